//! Calls: an operation becomes one, and its answer an operation's end.

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::wire::Kind as Message;
use byway_fabric::{CloseReason, Closed, Descriptor, Fabric, OpenError, PayloadMeta, SessionId, WindowKey};
use byway_reactor::{Errno, Extent, FrameRange, Instant, Reactor};
use byway_rpc::session as rpc;
use zerocopy::little_endian::{U32, U64};

use super::super::super::BlockError;
use super::super::super::wire::{
    Arguments, CallError, EXTENT_HOLE, FLAG_DURABLE, FLAG_FAST, FLAG_KEEP_SPACE, Method, read_status,
};
use super::super::machine::{Kind, OpId};
use super::super::request::Answer;
use super::{Core, Pending};
use crate::host::sending::send;
use crate::limits::{CALL_TIME_MAX, LONG_CALL_TIME_MAX};

impl Core {
    pub(super) fn send(&mut self, fabric: &mut Fabric, session: SessionId, handle: u32, id: OpId, now: Instant) {
        let Some(operation) = self.machine.operation(id) else { return };
        let (start, len) = (operation.start, operation.len as usize);
        let mut payload = None;
        let mut window = None;
        match operation.kind {
            Kind::Read if len > SMALL_BYTES_MAX => {
                let into =
                    operation.into.take().map(|frame| fabric.open_target(session, FrameRange::new(frame, 0, len), 0));
                window = match into.transpose() {
                    Ok(window) => window,
                    Err((error, frame)) => {
                        operation.into = frame;
                        return self.no_window(id, error, now);
                    }
                };
            }
            Kind::Write { .. } => match operation.from.clone() {
                Some(from) if len > SMALL_BYTES_MAX => {
                    window = match fabric.open_source(session, FrameRange::new(from, start, len), 0) {
                        Ok(window) => Some(window),
                        Err(error) => return self.no_window(id, error, now),
                    };
                }
                from => payload = from,
            },
            _ => {}
        }
        let (method, flags) = method_of(operation.kind);
        let arguments = Arguments {
            handle: U32::new(handle),
            flags: U32::new(flags),
            offset: U64::new(operation.offset),
            len: U64::new(operation.len),
            reserved: [0; 40],
        };
        let time_max = match operation.kind {
            Kind::Flush | Kind::Trim { .. } | Kind::Zero(_) => LONG_CALL_TIME_MAX,
            _ if flags & FLAG_DURABLE != 0 => LONG_CALL_TIME_MAX,
            _ => CALL_TIME_MAX,
        };
        let pending = Pending::Operation(id, window);
        let Ok(mut header) = self.call(session, method, &arguments, pending, now, time_max) else {
            debug_assert!(false, "the caller has looked whether there is credit");
            if let Some(key) = window {
                self.close_window(fabric, id, key);
            }
            return self.machine.complete(id, Err(CallError::Busy), now);
        };
        match (window, payload) {
            (Some(key), _) => {
                header.window.set(key.0);
                let is_read = method == Method::Read;
                let descriptor = Descriptor::new(Some(key).filter(|_| is_read), Some(key).filter(|_| !is_read), len);
                send(fabric, session, header, &[&descriptor.to_bytes()]);
            }
            (None, Some(from)) => {
                let checksum = self.agreed.is_some_and(|agreed| agreed.payload_checksum());
                let checksum = checksum.then(|| byway_fabric::payload_checksum(&from, start..start + len));
                let payload = PayloadMeta { len, checksum };
                fabric.send_with(session, header, payload, |gather| gather.push_shared(from, start, len));
            }
            (None, None) => fabric.send(session, header),
        }
    }

    /// An operation's memory cannot be opened to the server.
    fn no_window(&mut self, id: OpId, error: OpenError, now: Instant) {
        let is_users = self.machine.operation(id).is_some_and(|operation| operation.is_users());
        let error = refusal(error, is_users, self.calls_out() == 0);
        self.machine.complete(id, Err(error), now);
    }

    /// A call has ended.
    pub(super) fn answered(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        pending: Pending,
        answer: &rpc::Answer,
        payload: &[u8],
    ) {
        let status = read_status(answer.status, &answer.result);
        let (id, window) = match pending {
            Pending::Open => return self.opened(fabric, reactor, session, status, answer.result.padded()),
            Pending::Operation(id, window) => (id, window),
        };
        if let Some(key) = window {
            if fabric.windows().is_lent(key) {
                self.limbo.push((id, key));
                return fabric.close(reactor, session, CloseReason::Unexpected(Message::Data));
            }
            self.close_window(fabric, id, key);
        }
        let Some(operation) = self.machine.operation(id) else { return };
        if operation.kind == Kind::Read
            && window.is_none()
            && payload.len() == operation.len as usize
            && let Some(into) = &mut operation.into
        {
            into.write(0, payload);
        }
        let result = status.map(|()| match operation.kind {
            Kind::Extents => Answer::Extents(read_extents(payload)),
            _ => Answer::Unit,
        });
        if let Ok(Answer::Extents(extents)) = &result
            && !are_sound(extents, operation.len)
        {
            self.machine.complete(id, Err(CallError::Malformed), reactor.now());
            return fabric.close(reactor, session, CloseReason::Unexpected(Message::Reply));
        }
        if result.is_ok() && operation.kind == Kind::Read && u64::from(answer.total) != operation.len {
            self.machine.complete(id, Err(CallError::Malformed), reactor.now());
            return fabric.close(reactor, session, CloseReason::Unexpected(Message::Reply));
        }
        self.machine.complete(id, result, reactor.now());
        if self.machine.failed().is_some() {
            self.give_up(fabric, reactor);
        }
    }

    /// Takes an operation's memory back.
    pub(super) fn close_window(&mut self, fabric: &mut Fabric, id: OpId, key: WindowKey) {
        if let Closed::Target(frame) = fabric.windows().close(key)
            && let Some(operation) = self.machine.operation(id)
        {
            operation.into = Some(frame);
        }
    }
}

/// The method of an operation, and its flags.
fn method_of(kind: Kind) -> (Method, u32) {
    let flag = |on, bit| if on { bit } else { 0 };
    match kind {
        Kind::Read => (Method::Read, 0),
        Kind::Write { durable } => (Method::Write, flag(durable, FLAG_DURABLE)),
        Kind::Flush => (Method::Flush, 0),
        Kind::Trim { durable } => (Method::Trim, flag(durable, FLAG_DURABLE)),
        Kind::Zero(flags) => {
            let keep = flag(flags.keep_space, FLAG_KEEP_SPACE);
            (Method::Zero, flag(flags.durable, FLAG_DURABLE) | keep | flag(flags.fast, FLAG_FAST))
        }
        Kind::Extents => (Method::Extents, 0),
        Kind::Prefetch => (Method::Prefetch, 0),
    }
}

/// Whether a list of extents is not empty and covers only bytes that were asked about: a caller that continues at its end must not hang.
fn are_sound(extents: &[Extent], asked: u64) -> bool {
    let all = extents.iter().try_fold(0u64, |all, extent| all.checked_add(extent.len).filter(|_| extent.len > 0));
    all.is_some_and(|all| all <= asked && (all > 0 || asked == 0))
}

fn read_extents(payload: &[u8]) -> Vec<Extent> {
    let entry = |bytes: &[u8; 8]| {
        let word = u64::from_le_bytes(*bytes);
        Extent { len: word & !EXTENT_HOLE, hole: word & EXTENT_HOLE != 0 }
    };
    payload.as_chunks::<8>().0.iter().map(entry).collect()
}

/// What comes of an operation whose memory cannot be opened. Where calls are in flight, each that ends gives up memory that is locked:
/// it is tried again. What the client does by itself is tried again and again: writes that were acknowledged are not given up for
/// want of memory. So only a program's operation that is alone fails, and what is to be raised the fabric has logged.
fn refusal(error: OpenError, is_users: bool, is_alone: bool) -> CallError {
    match error {
        OpenError::Full => CallError::Busy,
        _ if is_users && is_alone => BlockError::Io(Errno::NOMEM).into(),
        _ => CallError::Busy,
    }
}

#[cfg(test)]
mod tests {
    use byway_fabric::rdma::RdmaError;

    use super::*;

    #[test]
    fn a_list_of_extents_that_leads_nowhere_or_too_far_is_not_taken() {
        let sound = |lens: &[u64], asked| {
            let extents: Vec<_> = lens.iter().map(|len| Extent { len: *len, hole: false }).collect();
            are_sound(&extents, asked)
        };
        assert!(sound(&[512, 1024], 4096) && sound(&[4096], 4096) && sound(&[], 0));
        assert!(!sound(&[], 4096) && !sound(&[512, 0], 4096) && !sound(&[4097], 4096));
        assert!(!sound(&[u64::MAX >> 1, u64::MAX >> 1, 4], u64::MAX >> 1));
    }

    #[test]
    fn only_a_programs_operation_that_is_alone_fails_for_want_of_memory() {
        let refused = OpenError::Rdma(RdmaError::State("a window"));
        for (is_users, is_alone, fails) in
            [(true, true, true), (true, false, false), (false, true, false), (false, false, false)]
        {
            let error = refusal(refused, is_users, is_alone);
            let want = if fails { BlockError::Io(Errno::NOMEM).into() } else { CallError::Busy };
            assert_eq!(error, want, "{is_users} {is_alone}");
            assert_eq!(refusal(OpenError::Full, is_users, is_alone), CallError::Busy);
        }
    }
}
