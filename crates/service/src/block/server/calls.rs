//! The calls of the block service, checked and begun.

use byway_fabric::access::Right;
use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::{DESCRIPTOR_BYTES, Descriptor, Fabric, SessionId, WindowKey};
use byway_reactor::{ByteRange, Reactor};
use byway_rpc::session::{CallRef, Incomer};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::BlockError;
use super::super::engine::{Step, VolumeId, WriteFlags, ZeroFlags};
use super::super::volume::Volume;
use super::super::wire::{
    Arguments, CallError, FLAG_DURABLE, FLAG_FAST, FLAG_KEEP_SPACE, FLAG_READ_ONLY, ListEntry, Method, OpenResult,
    VOLUME_READ_ONLY, VOLUME_TLS_REQUIRED, VOLUME_VOLATILE,
};
use super::requests::{BlockRequest, Read, Write};
use super::waiting::Queued;
use super::{Handle, ServerContext};
use crate::host::SmallAnswer;
use crate::limits::{CALL_BYTES_MAX, HANDLES_MAX, WAITING_BYTES_MAX};

/// A call on a volume.
#[derive(Clone, Copy)]
struct VolumeCall<'a> {
    call: CallRef,
    method: Method,
    volume: VolumeId,
    arguments: Arguments,
    /// The caller's window, and its bytes; 0 without one.
    window: WindowKey,
    window_len: usize,
    payload: &'a [u8],
}

/// A write whose bytes came with its call.
struct SmallWrite<'a> {
    call: CallRef,
    volume: VolumeId,
    offset: u64,
    payload: &'a [u8],
    durable: bool,
}

impl ServerContext<'_> {
    /// A call has come.
    pub(super) fn called(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, call: CallRef, asked: &Incomer<'_>) {
        let arguments =
            Arguments::read_from_bytes(asked.arguments.padded()).unwrap_or_else(|_| Arguments::new_zeroed());
        // A handle is valid only in the session that opened it, so no session can use another's.
        let begun = match Method::from_number(asked.method) {
            None => Err(CallError::UnknownMethod),
            Some(_) if asked.delegated => Err(CallError::Malformed),
            Some(Method::Open) => self.open(fabric, call, &arguments, asked.payload),
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
            Some(method) => self.volume(call.session, &arguments, method).and_then(|volume| {
                let (window, window_len) = window_of(asked.windows, method);
                let payload = asked.payload;
                let asked = VolumeCall { call, method, volume, arguments, window, window_len, payload };
                self.on_volume(fabric, reactor, &asked)
            }),
        };
        if let Err(error) = begun {
            self.answer(fabric, call, Err(error));
        }
    }

    /// The volume that a call names, if the session may do so much with it.
    fn volume(&mut self, session: SessionId, arguments: &Arguments, method: Method) -> Result<VolumeId, CallError> {
        let number = arguments.handle.get() as usize;
        let handle = self.core.client(session).and_then(|client| client.handles.get(number).copied());
        let handle = handle.ok_or(CallError::Malformed)?;
        let export = &self.core.exports[handle.export];
        match handle.right {
            None => Err(BlockError::Closed.into()),
            Some(_) if export.withdrawn => Err(BlockError::Closed.into()),
            Some(Right::Read) if method.writes() => Err(BlockError::ReadOnly.into()),
            Some(_) => Ok(export.volume),
        }
    }

    fn on_volume(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        asked: &VolumeCall<'_>,
    ) -> Result<(), CallError> {
        let VolumeCall { call, method, volume, arguments, window, window_len, payload } = *asked;
        let (offset, len) = (arguments.offset.get(), arguments.len.get());
        let range = ByteRange::new(offset, len);
        let flag = |bit| arguments.flags.get() & bit != 0;
        let durable = flag(FLAG_DURABLE);
        match method {
            Method::Read | Method::Write => {
                let len = usize::try_from(len).ok().filter(|len| *len <= CALL_BYTES_MAX);
                let len = len.ok_or(BlockError::TooLong)?;
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
                self.write_small(fabric, reactor, SmallWrite { call, volume, offset, payload, durable })
            }
            Method::Flush => {
                self.plain(fabric, call, |server, tag| server.engine.flush(reactor, volume, tag));
                Ok(())
            }
            Method::Trim => {
                self.plain(fabric, call, |server, tag| server.engine.trim(reactor, volume, range, durable, tag));
                Ok(())
            }
            Method::Zero => {
                let flags = ZeroFlags { keep_space: flag(FLAG_KEEP_SPACE), fast: flag(FLAG_FAST), durable };
                self.plain(fabric, call, |server, tag| server.engine.zero(reactor, volume, range, flags, tag));
                Ok(())
            }
            Method::Prefetch => {
                self.plain(fabric, call, |server, tag| server.engine.prefetch(reactor, volume, range, tag));
                Ok(())
            }
            Method::Extents => {
                self.extents(fabric, reactor, call, volume, range);
                Ok(())
            }
            Method::Open | Method::List => Err(CallError::Malformed),
        }
    }

    fn extents(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        call: CallRef,
        volume: VolumeId,
        range: ByteRange,
    ) {
        let request = self.start_request(call.session, BlockRequest::Plain(call));
        let tag = self.core.tag(request);
        match self.engine.extents(reactor, volume, range, SMALL_BYTES_MAX / 8, tag) {
            Ok(Step::Later) => return,
            Ok(Step::Now(extents)) => self.answer_extents(fabric, call, &extents),
            Ok(Step::Busy | Step::InParts) => self.answer(fabric, call, Err(CallError::Busy)),
            Err(error) => self.answer(fabric, call, Err(error.into())),
        }
        self.end_request(fabric, call.session, request);
    }

    fn plain(
        &mut self,
        fabric: &mut Fabric,
        call: CallRef,
        begin: impl FnOnce(&mut Self, super::Tag) -> Result<Step<()>, BlockError>,
    ) {
        let request = self.start_request(call.session, BlockRequest::Plain(call));
        let tag = self.core.tag(request);
        let step = begin(self, tag);
        self.first_step(fabric, call, request, &step);
    }

    fn write_small(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        write: SmallWrite<'_>,
    ) -> Result<(), CallError> {
        let SmallWrite { call, volume, offset, payload, durable } = write;
        if self.core.requests.is_empty() {
            let request = self.start_request(call.session, BlockRequest::Plain(call));
            let tag = self.core.tag(request);
            let step = self.engine.write_small(reactor, volume, offset, payload, WriteFlags { durable }, tag);
            if !matches!(step, Ok(Step::Busy)) {
                self.first_step(fabric, call, request, &step);
                return Ok(());
            }
            self.end_request(fabric, call.session, request);
        }
        if self.core.waiting_bytes + payload.len() > WAITING_BYTES_MAX {
            return Err(CallError::Busy);
        }
        self.core.waiting_bytes += payload.len();
        let small = Queued::Small { call, volume, offset, bytes: payload.into(), durable };
        self.wait(reactor, call.session, small);
        Ok(())
    }

    fn open(
        &mut self,
        fabric: &mut Fabric,
        call: CallRef,
        arguments: &Arguments,
        name: &[u8],
    ) -> Result<(), CallError> {
        let found = self.core.exports.iter().position(|export| {
            !export.withdrawn
                && self.engine.volume(export.volume).is_some_and(|volume| volume.name().as_bytes() == name)
        });
        let index = found.ok_or(CallError::NotFound)?;
        let client = self.sessions.get(call.session).map(|session| session.client.clone()).unwrap_or_default();
        let volume = self.engine.volume(self.core.exports[index].volume).ok_or(CallError::NotFound)?;
        let Some(right) = volume.right(&client) else {
            tracing::debug!(volume = volume.name(), %client, "the client is not in the volume's access list; answered not found");
            return Err(CallError::NotFound);
        };
        if volume.options().tls_required && !is_secure(fabric, call.session) {
            return Err(CallError::TlsRequired);
        }
        let right = if arguments.flags.get() & FLAG_READ_ONLY != 0 { Right::Read } else { right };
        let flags = volume_flags(volume, right);
        let (len, block_bytes) = (volume.len(), volume.block_bytes());
        let (store, backing_id) = (volume.open_epoch(), volume.store().backing_id());
        let handles = self.core.handles(call.session);
        if handles.len() >= HANDLES_MAX {
            return Err(CallError::Busy);
        }
        handles.push(Handle { export: index, right: Some(right), untold: None });
        let result = OpenResult {
            handle: U32::new(handles.len() as u32 - 1),
            flags: U32::new(flags),
            len: U64::new(len),
            block_bytes: U32::new(block_bytes),
            request_max: U32::new(CALL_BYTES_MAX as u32),
            store: U64::new(store),
            backing_id: U64::new(backing_id),
            reserved: [0; 24],
        };
        self.sessions.answer(fabric, call, SmallAnswer::done(result.as_bytes(), &[]));
        Ok(())
    }

    /// Lists the volumes that the client may use over its wire from an index on, as many as fit; the result begins with
    /// how many there are.
    fn list(&mut self, fabric: &mut Fabric, call: CallRef, arguments: &Arguments) {
        let client = self.sessions.get(call.session).map(|session| session.client.clone()).unwrap_or_default();
        let offered = self.core.exports.iter().filter(|export| !export.withdrawn);
        let secure = is_secure(fabric, call.session);
        let volumes = offered.filter_map(|export| self.engine.volume(export.volume));
        let volumes = volumes.filter(|volume| secure || !volume.options().tls_required);
        let open: Vec<_> = volumes.filter_map(|volume| Some((volume, volume.right(&client)?))).collect();
        let mut payload = Vec::new();
        for (volume, right) in open.iter().skip(arguments.offset.get() as usize) {
            let (name, description) = (volume.name().as_bytes(), volume.options().description.as_bytes());
            let entry = ListEntry {
                len: U64::new(volume.len()),
                flags: U32::new(volume_flags(volume, *right)),
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
        let count = (open.len() as u64).to_le_bytes();
        self.sessions.answer(fabric, call, SmallAnswer::done(&count, &payload));
    }
}

/// The window of a read or write, and its bytes; of length 0 if there is none.
fn window_of(windows: &[u8], method: Method) -> (WindowKey, usize) {
    let Some(descriptor) = windows.first_chunk::<DESCRIPTOR_BYTES>().map(Descriptor::from_bytes) else {
        return (WindowKey(0), 0);
    };
    let key = if method == Method::Read { descriptor.put_key() } else { descriptor.get_key() };
    (key, usize::try_from(descriptor.len()).unwrap_or(usize::MAX))
}

fn is_secure(fabric: &Fabric, session: SessionId) -> bool {
    fabric.capabilities(session).is_some_and(|wire| wire.secure)
}

fn volume_flags(volume: &Volume, right: Right) -> u32 {
    let flag = |on, bit| if on { bit } else { 0 };
    flag(right == Right::Read, VOLUME_READ_ONLY)
        | flag(volume.options().volatile, VOLUME_VOLATILE)
        | flag(volume.options().tls_required, VOLUME_TLS_REQUIRED)
}
