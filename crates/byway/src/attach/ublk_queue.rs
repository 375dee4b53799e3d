//! The requests of a ublk device, on its volume.

use std::io;
use std::os::fd::OwnedFd;

use byway_frontend::limits::UBLK_REQUEST_BYTES_MAX;
use byway_frontend::ublk::{Operation, Queue, Taken, UblkDevice, UblkOptions, UblkRequest};
use byway_reactor::{ByteRange, Errno, Frame};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Request, VolumeInfo};

use super::command::AttachError;
use super::device;
use super::registry::{Attachment, ClientRecord, UblkRecord};
use super::successor;
use super::volume_server::{Answer, KernelSide, KernelWrite, Requests, Supply};
use crate::limits::ATTACH_REQUESTS_PER_TURN;

/// The kernel's requests.
pub(super) struct UblkQueue {
    queue: Queue,
    supply: Supply,
}

/// The device, which the main thread starts.
pub(super) struct AddedDevice {
    pub device: UblkDevice,
    /// What a successor of this process needs.
    pub record: UblkRecord,
    /// No process has served it before.
    pub is_new: bool,
}

impl UblkQueue {
    /// Takes over the device that a process has left, or adds one. This thread serves it.
    pub(super) fn open(requests: &mut Requests, left: Option<&Attachment>) -> Result<(Self, AddedDevice), AttachError> {
        let taken = match left {
            Some(left) => take_over(requests, left)?,
            None => None,
        };
        let is_new = taken.is_none();
        let (device, queue, (cookie, read_only)) = if let Some(taken) = taken {
            taken
        } else {
            let options = options(&requests.info)?;
            let (device, queue) = UblkDevice::add(&options)?;
            (device, queue, (options.cookie, options.read_only))
        };
        let record = UblkRecord { cookie, client: ClientRecord { read_only, ..successor::client_record(requests) } };
        Ok((Self { queue, supply: Supply::Some }, AddedDevice { device, record, is_new }))
    }

    /// Answers a request, or asks the volume.
    fn request(&mut self, request: UblkRequest, requests: &mut Requests) {
        let UblkRequest { tag, operation, offset, len } = request;
        let unique = u64::from(tag);
        // The kernel may ask past the end of a volume that has shrunk.
        let is_inside = ByteRange::new(offset, len).ends_by(requests.info.len);
        let zero = |keep_space| {
            let flags = ZeroFlags { keep_space, ..ZeroFlags::default() };
            Request::Zero { offset, len, flags }
        };
        let changes = !matches!(operation, Operation::Read | Operation::Flush | Operation::Unknown);
        if changes && requests.info.read_only {
            return self.answer(unique, Err(Errno::ROFS));
        }
        match operation {
            Operation::Flush if requests.info.read_only => self.answer(unique, Ok(Answer::Done)),
            Operation::Flush => requests.ask_plain(unique, Request::Flush),
            Operation::Unknown => self.answer(unique, Err(Errno::OPNOTSUPP)),
            _ if !is_inside => self.answer(unique, Err(Errno::IO)),
            Operation::Read => requests.read(unique, offset, len as usize),
            Operation::Write { durable } => {
                requests.write_from(self, KernelWrite { unique, offset, len: len as usize, durable });
            }
            Operation::Discard => requests.ask_plain(unique, zero(false)),
            Operation::WriteZeroes { keep_space } => requests.ask_plain(unique, zero(keep_space)),
        }
    }
}

/// A device, its requests, its cookie, and whether it refuses writes.
type TakenOver = (UblkDevice, Queue, (u64, bool));

/// The device that a process has left; `None` if it is gone.
fn take_over(requests: &mut Requests, left: &Attachment) -> Result<Option<TakenOver>, AttachError> {
    let Some(record) = left.ublk.filter(|_| left.failed.is_none()) else { return Ok(None) };
    if !left.waits()? {
        return Ok(None);
    }
    successor::prepare(requests, left, &record.client)?;
    let taken = UblkDevice::recover(&left.device, record.cookie)?;
    if taken.is_some() {
        tracing::info!(device = %left.device.display(), "taken over from a process that has died");
    }
    Ok(taken.map(|(device, queue)| (device, queue, (record.cookie, record.client.read_only))))
}

fn options(info: &VolumeInfo) -> Result<UblkOptions, AttachError> {
    let block_bytes = device::block_bytes(info)?;
    let mut cookie = [0; 8];
    getrandom::fill(&mut cookie).map_err(|error| AttachError::Random(io::Error::other(error.to_string())))?;
    let cookie = u64::from_ne_bytes(cookie);
    let request_bytes_max = 1 << info.request_max.clamp(4096, UBLK_REQUEST_BYTES_MAX).ilog2();
    Ok(UblkOptions { bytes: info.len, block_bytes, request_bytes_max, read_only: info.read_only, cookie })
}

impl KernelSide for UblkQueue {
    fn readiness(&self) -> io::Result<OwnedFd> {
        self.queue.readiness()
    }

    fn note_readable(&mut self) {
        if self.supply == Supply::Nothing {
            self.supply = Supply::Some;
        }
    }

    fn take_requests(&mut self, requests: &mut Requests) -> Result<(), String> {
        for _ in 0..ATTACH_REQUESTS_PER_TURN {
            match self.queue.take() {
                Ok(Taken::Request(request)) => self.request(request, requests),
                Ok(Taken::Nothing) => {
                    self.supply = Supply::Nothing;
                    break;
                }
                Ok(Taken::Ended) => {
                    self.supply = Supply::Ended;
                    break;
                }
                Err(error) => return Err(format!("requests of ublk cannot be taken: {error}")),
            }
        }
        Ok(())
    }

    fn supply(&self) -> Supply {
        self.supply
    }

    fn copy_payload(&mut self, unique: u64, into: &mut Frame) -> io::Result<()> {
        self.queue.take_payload(unique as u16, into.bytes_mut())
    }

    fn answer(&mut self, unique: u64, answer: Result<Answer<'_>, Errno>) {
        let tag = unique as u16;
        let result = match answer {
            Ok(Answer::Read(bytes)) => match self.queue.put_payload(tag, bytes) {
                Ok(()) => bytes.len() as i32,
                Err(error) => {
                    tracing::error!(%error, "cannot give the kernel what was read");
                    -Errno::IO.raw_os_error()
                }
            },
            Ok(Answer::Written(size)) => size as i32,
            Ok(Answer::Done) => 0,
            Err(errno) => -errno.raw_os_error(),
        };
        self.queue.complete(tag, result);
    }

    fn submit(&mut self) -> Result<(), String> {
        self.queue.submit().map_err(|error| format!("requests of ublk cannot be completed: {error}"))
    }
}

const _: () = assert!(UBLK_REQUEST_BYTES_MAX as usize <= byway_reactor::limits::FRAME_BYTES_MAX);
