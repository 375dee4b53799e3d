//! The calls of the block service, checked and begun.

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::wire::Header;
use byway_fabric::{CloseReason, Fabric, Slot, WindowKey};
use byway_reactor::Reactor;
use byway_rpc::wire::CallBody;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::engine::{Step, VolumeId, WriteFlags, ZeroFlags};
use super::super::volume::Volume;
use super::super::wire::{
    Arguments, CallError, FLAG_DURABLE, FLAG_FAST, FLAG_KEEP_SPACE, FLAG_READ_ONLY, ListEntry, Method, OpenResult,
    VOLUME_READ_ONLY, VOLUME_TLS_REQUIRED, VOLUME_VOLATILE,
};
use super::Serving;
use super::jobs::{Call, Job, Read, Write};
use super::waiting::Queued;
use crate::limits::{CALL_BYTES_MAX, HANDLES_MAX, WAITING_BYTES_MAX};

impl Serving<'_> {
    /// A call has come.
    pub(super) fn called(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        slot: Slot,
        header: &Header,
        payload: &[u8],
    ) {
        let body: CallBody = header.body();
        if self.core.draining {
            return;
        }
        let Some(session) = self.core.session(slot) else { return };
        let call = Call { session: slot, id: body.call.get() };
        if session.inbound.begin(call.id).is_err() {
            return fabric.close(reactor, slot, CloseReason::Credit);
        }
        let arguments =
            Arguments::read_from_prefix(&body.arguments).map_or_else(|_| Arguments::new_zeroed(), |(body, _)| body);
        let window = (WindowKey(header.window.get()), body.window_len.get() as usize);
        let begun = match Method::from_number(body.method.get()) {
            None => Err(CallError::Malformed),
            Some(Method::Open) => self.open(fabric, call, &arguments, payload),
            // What is asked for costs memory that is not of the pool.
            Some(Method::List | Method::Extents) if fabric.is_full() => Err(CallError::Busy),
            Some(Method::Extents | Method::Flush | Method::Trim | Method::Zero | Method::Prefetch)
                if self.engine.is_full() =>
            {
                Err(CallError::Busy)
            }
            Some(Method::List) => {
                self.list(fabric, call, &arguments);
                Ok(())
            }
            Some(method) => self.volume(slot, &arguments).and_then(|volume| {
                self.on_volume(fabric, reactor, (call, method), volume, &arguments, window, payload)
            }),
        };
        if let Err(error) = begun {
            self.answer(fabric, call, Err(error));
        }
    }

    fn volume(&mut self, session: Slot, arguments: &Arguments) -> Result<VolumeId, CallError> {
        let handle = arguments.handle.get() as usize;
        let export = self.core.session(session).and_then(|session| session.handles.get(handle).copied());
        let export = &self.core.exports[export.ok_or(CallError::Malformed)?];
        if export.withdrawn { Err(super::super::BlockError::Closed.into()) } else { Ok(export.volume) }
    }

    #[expect(clippy::too_many_arguments, reason = "one place where a call is taken apart")]
    fn on_volume(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        (call, method): (Call, Method),
        volume: VolumeId,
        arguments: &Arguments,
        (window, window_len): (WindowKey, usize),
        payload: &[u8],
    ) -> Result<(), CallError> {
        let (offset, len) = (arguments.offset.get(), arguments.len.get());
        let flag = |bit| arguments.flags.get() & bit != 0;
        let durable = flag(FLAG_DURABLE);
        match method {
            Method::Read | Method::Write => {
                let len = usize::try_from(len).ok().filter(|len| *len <= CALL_BYTES_MAX);
                let len = len.ok_or(super::super::BlockError::TooLong)?;
                if len > SMALL_BYTES_MAX && (window_len < len || !fabric.can_put(call.session)) {
                    return Err(CallError::Malformed);
                }
                if method == Method::Read {
                    self.read(fabric, reactor, Read { call, volume, offset, len, window, sliced: None });
                    return Ok(());
                }
                self.engine.check_write(volume, offset, len as u64)?;
                if len > SMALL_BYTES_MAX {
                    let (asked, left, error) = (0, len, None);
                    let write = Write { call, volume, offset, len, window, durable, asked, left, error };
                    self.pull(fabric, reactor, write);
                    return Ok(());
                }
                if payload.len() != len {
                    return Err(CallError::Malformed);
                }
                self.write_small(fabric, reactor, call, volume, (offset, payload, durable))
            }
            Method::Flush => {
                self.plain(fabric, call, |serving, tag| serving.engine.flush(reactor, volume, tag));
                Ok(())
            }
            Method::Trim => {
                self.plain(fabric, call, |serving, tag| {
                    serving.engine.trim(reactor, volume, (offset, len), durable, tag)
                });
                Ok(())
            }
            Method::Zero => {
                let flags = ZeroFlags { keep_space: flag(FLAG_KEEP_SPACE), fast: flag(FLAG_FAST), durable };
                self.plain(fabric, call, |serving, tag| {
                    serving.engine.zero(reactor, volume, (offset, len), flags, tag)
                });
                Ok(())
            }
            Method::Prefetch => {
                self.plain(fabric, call, |serving, tag| serving.engine.prefetch(reactor, volume, (offset, len), tag));
                Ok(())
            }
            Method::Extents => {
                self.extents(fabric, reactor, call, volume, (offset, len));
                Ok(())
            }
            Method::Open | Method::List => Err(CallError::Malformed),
        }
    }

    fn extents(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, call: Call, volume: VolumeId, range: (u64, u64)) {
        let job = self.start_job(call.session, Job::Plain(call));
        let tag = self.core.tag(job);
        match self.engine.extents(reactor, volume, range, SMALL_BYTES_MAX / 8, tag) {
            Ok(Step::Later) => return,
            Ok(Step::Now(extents)) => self.answer_extents(fabric, call, &extents),
            Ok(Step::Busy | Step::InParts) => self.answer(fabric, call, Err(CallError::Busy)),
            Err(error) => self.answer(fabric, call, Err(error.into())),
        }
        self.end_job(fabric, call.session, job);
    }

    fn plain(
        &mut self,
        fabric: &mut Fabric,
        call: Call,
        begin: impl FnOnce(&mut Self, super::Tag) -> Result<Step<()>, super::super::BlockError>,
    ) {
        let job = self.start_job(call.session, Job::Plain(call));
        let tag = self.core.tag(job);
        let step = begin(self, tag);
        self.first_step(fabric, call, job, &step);
    }

    fn write_small(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        call: Call,
        volume: VolumeId,
        (offset, payload, durable): (u64, &[u8], bool),
    ) -> Result<(), CallError> {
        if self.core.requests.is_empty() {
            let job = self.start_job(call.session, Job::Plain(call));
            let tag = self.core.tag(job);
            let step = self.engine.write_small(reactor, volume, offset, payload, WriteFlags { durable }, tag);
            if !matches!(step, Ok(Step::Busy)) {
                self.first_step(fabric, call, job, &step);
                return Ok(());
            }
            self.end_job(fabric, call.session, job);
        }
        if self.core.waiting_bytes + payload.len() > WAITING_BYTES_MAX {
            return Err(CallError::Busy);
        }
        self.core.waiting_bytes += payload.len();
        let small = Queued::Small { call, volume, offset, bytes: payload.into(), durable };
        self.wait(reactor, call.session, small);
        Ok(())
    }

    fn open(&mut self, fabric: &mut Fabric, call: Call, arguments: &Arguments, name: &[u8]) -> Result<(), CallError> {
        let found = self.core.exports.iter().position(|export| {
            !export.withdrawn
                && self.engine.volume(export.volume).is_some_and(|volume| volume.name().as_bytes() == name)
        });
        let index = found.ok_or(CallError::NotFound)?;
        let volume = self.engine.volume(self.core.exports[index].volume).ok_or(CallError::NotFound)?;
        if volume.options().tls_required && !fabric.capabilities(call.session).is_some_and(|wire| wire.secure) {
            return Err(CallError::TlsRequired);
        }
        let flags =
            volume_flags(volume) | if arguments.flags.get() & FLAG_READ_ONLY != 0 { VOLUME_READ_ONLY } else { 0 };
        let (len, block_bytes) = (volume.len(), volume.block_bytes());
        let (store, medium) = (volume.store_identity(), volume.store().medium());
        let Some(session) = self.core.session(call.session) else { return Ok(()) };
        if session.handles.len() >= HANDLES_MAX {
            return Err(CallError::Busy);
        }
        session.handles.push(index);
        let result = OpenResult {
            handle: U32::new(session.handles.len() as u32 - 1),
            flags: U32::new(flags),
            len: U64::new(len),
            block_bytes: U32::new(block_bytes),
            request_max: U32::new(CALL_BYTES_MAX as u32),
            store: U64::new(store),
            medium: U64::new(medium),
            reserved: [0; 24],
        };
        self.answer_with(fabric, call, Ok(()), (result.as_bytes(), &[]));
        Ok(())
    }

    /// Lists volumes from an index on, as many as fit; the result begins with how many there are.
    fn list(&mut self, fabric: &mut Fabric, call: Call, arguments: &Arguments) {
        let offered: Vec<_> = self.core.exports.iter().filter(|export| !export.withdrawn).collect();
        let mut payload = Vec::new();
        for export in offered.iter().skip(arguments.offset.get() as usize) {
            let Some(volume) = self.engine.volume(export.volume) else { continue };
            let (name, description) = (volume.name().as_bytes(), volume.options().description.as_bytes());
            let entry = ListEntry {
                len: U64::new(volume.len()),
                flags: U32::new(volume_flags(volume)),
                block_bytes: U32::new(volume.block_bytes()),
                name_len: U32::new(name.len() as u32),
                description_len: U32::new(description.len() as u32),
            };
            if payload.len() + size_of::<ListEntry>() + name.len() + description.len() > SMALL_BYTES_MAX {
                break;
            }
            payload.extend_from_slice(entry.as_bytes());
            payload.extend_from_slice(name);
            payload.extend_from_slice(description);
        }
        let count = (offered.len() as u64).to_le_bytes();
        self.answer_with(fabric, call, Ok(()), (&count, &payload));
    }
}

fn volume_flags(volume: &Volume) -> u32 {
    let flag = |on, bit| if on { bit } else { 0 };
    flag(volume.is_read_only(), VOLUME_READ_ONLY)
        | flag(volume.options().volatile, VOLUME_VOLATILE)
        | flag(volume.options().tls_required, VOLUME_TLS_REQUIRED)
}
