//! Events of the session: its begin and end, the volume's opening, answers and notices.

use std::time::Duration;

use byway_fabric::wire::{Header, Kind as Message, RefuseCode};
use byway_fabric::{CloseReason, Fabric, Handler, SessionId};
use byway_reactor::{Instant, Reactor};
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, CannotSend, Event, Incomer};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::super::wire::{
    Arguments, CallError, FLAG_READ_ONLY, Method, NOTICE_RESIZED, OpenResult, PROTOCOL, Resized, VOLUME_READ_ONLY,
    VOLUME_VOLATILE,
};
use super::super::machine::ServerEpoch;
use super::{Core, Notice, Pending, State, VolumeInfo};
use crate::host::sending::send_outbox;
use crate::limits::{CALL_TIME_MAX, RECONNECT_MAX, RECONNECT_MIN};

impl Core {
    /// The server has said what it serves: opens the volume.
    fn open(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId) {
        let mut arguments = Arguments::new_zeroed();
        arguments.flags.set(if self.options.read_only { FLAG_READ_ONLY } else { 0 });
        match self.call(session, Method::Open, &arguments, Pending::Open, reactor.now(), CALL_TIME_MAX) {
            Ok(header) => crate::host::sending::send(fabric, session, header, &[self.name.as_bytes()]),
            Err(CannotSend::NotServed(status)) => {
                self.not_opened(fabric, reactor, session, CallError::NotServed(status));
            }
            // A server that grants no calls.
            Err(CannotSend::NoCredit | CannotSend::Ended) => {
                fabric.close(reactor, session, CloseReason::Unexpected(Message::Protocols));
            }
        }
    }

    fn not_opened(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, error: CallError) {
        self.notice(Notice::Refused(error));
        self.machine.refused(error);
        fabric.close(reactor, session, CloseReason::Closed);
    }

    /// Begins a call, which may take `time_max`; gives its header.
    pub(super) fn call(
        &mut self,
        session: SessionId,
        method: Method,
        arguments: &Arguments,
        pending: Pending,
        now: Instant,
        time_max: Duration,
    ) -> Result<Header, CannotSend> {
        let windows = u8::from(matches!(pending, Pending::Operation(_, Some(_))));
        let arguments = Inline::new(arguments.as_bytes()).unwrap_or(Inline::EMPTY);
        let ask = Ask { protocol: PROTOCOL, method: method as u16, arguments: &arguments, windows };
        let (_, header) = self.calls.call(session, &ask, pending, now, now + time_max).map_err(|(_, error)| error)?;
        Ok(header)
    }

    fn noticed(&mut self, notice: &Incomer<'_>) {
        let resized = Resized::read_from_bytes(notice.arguments.padded());
        if let (NOTICE_RESIZED, Ok(resized), State::Open { handle }) = (notice.method, resized, self.state)
            && resized.handle.get() == handle
            && let Some(info) = &mut self.info
        {
            info.len = resized.len.get();
            self.notice(Notice::Resized(resized.len.get()));
        }
    }

    pub(super) fn opened(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        status: Result<(), CallError>,
        result: &[u8],
    ) {
        if let Err(error) = status {
            return self.not_opened(fabric, reactor, session, error);
        }
        let opened = OpenResult::read_from_prefix(result).map_or_else(|_| OpenResult::new_zeroed(), |(body, _)| body);
        let flags = opened.flags.get();
        let info = VolumeInfo {
            len: opened.len.get(),
            block_bytes: opened.block_bytes.get().max(1),
            request_max: opened.request_max.get(),
            read_only: flags & VOLUME_READ_ONLY != 0,
            volatile: flags & VOLUME_VOLATILE != 0,
            instance: self.agreed.map_or(0, |agreed| agreed.instance),
            store: opened.store.get(),
            backing_id: opened.backing_id.get(),
        };
        if self.info.is_some_and(|old| old.len != info.len) {
            self.notice(Notice::Resized(info.len));
        }
        self.info = Some(info);
        self.state = State::Open { handle: opened.handle.get() };
        self.backoff = RECONNECT_MIN;
        self.notice(Notice::Opened(info));
        self.machine.connected(
            ServerEpoch { instance: info.instance, store: info.store },
            info.backing_id,
            info.volatile,
        );
        if self.machine.failed().is_some() {
            self.give_up(fabric, reactor);
        }
    }
}

impl Handler for Core {
    fn up(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        self.agreed = fabric.agreed(session).copied();
        self.state = State::Opening;
        self.calls.up(session, self.identity.nonce, true);
        send_outbox(&mut self.calls, fabric);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Message,
        header: &Header,
        payload: &[u8],
    ) {
        match kind {
            Message::Reply | Message::Notice | Message::NoticeCredit | Message::Protocols => {}
            _ => return fabric.close(reactor, session, CloseReason::Unexpected(kind)),
        }
        match self.calls.message(session, kind, header, payload) {
            Ok(Event::Ended(pending, answer, payload)) => {
                self.answered(fabric, reactor, session, pending, &answer, payload);
            }
            Ok(Event::Ready(_)) if kind == Message::Protocols => self.open(fabric, reactor, session),
            Ok(Event::Notified(notice)) => {
                self.noticed(&notice);
                self.calls.notice_taken(session, PROTOCOL);
            }
            Ok(Event::None | Event::Ready(_) | Event::Called(..) | Event::Cancelled(_)) => {}
            Err(_) => fabric.close(reactor, session, CloseReason::Unexpected(kind)),
        }
        send_outbox(&mut self.calls, fabric);
    }

    fn placed(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Message,
        header: &Header,
    ) {
        if let Event::Ended(pending, answer, payload) = self.calls.placed(session, kind, header) {
            self.answered(fabric, reactor, session, pending, &answer, payload);
        }
    }

    fn down(&mut self, _fabric: &mut Fabric, reactor: &mut Reactor, _session: SessionId, reason: CloseReason) {
        self.state = State::Draining;
        // It is there, and still busy with what our last session asked for.
        if reason == CloseReason::Refused(RefuseCode::Busy) {
            self.machine.heard_from_server(reactor.now());
        }
        if let CloseReason::Tls(error) = reason {
            self.machine.tls_failed(error);
        }
        if reason != CloseReason::Closed {
            self.notice(Notice::Disconnected(reason));
        }
    }

    fn drained(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId) {
        for pending in self.calls.down(session) {
            if let Pending::Operation(id, Some(key)) = pending {
                self.close_window(fabric, id, key);
            }
        }
        for (id, key) in std::mem::take(&mut self.limbo) {
            self.close_window(fabric, id, key);
        }
        fabric.release(session);
        self.short_since = None;
        self.session = None;
        self.agreed = None;
        let now = reactor.now();
        self.machine.disconnected(now);
        self.state = if self.machine.failed().is_some() { State::Failed } else { State::Waiting(now + self.backoff) };
        self.backoff = (self.backoff * 2).min(RECONNECT_MAX);
    }
}
