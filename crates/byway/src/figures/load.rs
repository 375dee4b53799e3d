//! Requests to a volume, so many outstanding, for so long.

use std::rc::Rc;
use std::time::Duration;

use byway_reactor::{Frame, Instant, IoChoice, Reactor, Wait};
use byway_service::block::client::Request;

use super::session::RunError;
use crate::remote::{self, Remote, RemoteDone, RemoteOptions, RemoteUri};
use crate::tls::ClientTlsArguments;

/// The class of the volume's tokens.
const CLASS: u8 = 0x30;
/// Streams for payloads of a native session, as its client has by default.
const LANES: usize = 2;
/// Before the clock starts, as a share of the time that is measured.
const WARM_SHARE: u32 = 5;

/// Which requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Requests {
    /// Of each; they follow one another in the volume.
    pub(super) bytes: u64,
    /// In flight.
    pub(super) outstanding: usize,
    pub(super) writes: bool,
}

/// What they gave.
#[derive(Clone, Debug)]
pub(super) struct Rate {
    /// 10^6 bytes a second.
    pub(super) megabytes_per_second: f64,
    /// The median of the latencies.
    pub(super) p50_us: f64,
}

/// A volume that requests are made to.
pub(super) struct Load {
    reactor: Reactor,
    volume: Remote,
    volume_bytes: u64,
    /// Where the next request begins, in requests.
    next: u64,
    begun: Vec<Instant>,
    payload: Option<Rc<Frame>>,
}

impl Load {
    /// Opens a volume.
    pub(super) fn open(uri: &str) -> Result<Self, RunError> {
        let uri: RemoteUri = uri.parse().map_err(remote::RemoteError::from)?;
        let mut reactor = Reactor::open(IoChoice::Auto, 96 << 20).map_err(RunError::Loop)?;
        let connections = if matches!(uri, RemoteUri::Native(_)) { LANES } else { 1 };
        let unflushed_bytes_max = byway_service::limits::CLIENT_UNFLUSHED_BYTES;
        let tls = &ClientTlsArguments::default();
        let options = RemoteOptions { class: CLASS, connections, read_only: false, tls, unflushed_bytes_max };
        let mut volume = Remote::connect(&mut reactor, &uri, options)?;
        remote::open(&mut reactor, &mut [&mut volume])?;
        let volume_bytes = volume.info().map_or(0, |info| info.bytes);
        Ok(Self { reactor, volume, volume_bytes, next: 0, begun: Vec::new(), payload: None })
    }

    /// Makes requests for a time, after a while that does not count.
    pub(super) fn run(&mut self, requests: Requests, time: Duration) -> Result<Rate, RunError> {
        let warm = self.reactor.now() + time / WARM_SHARE;
        self.drive(requests, &mut |now| now >= warm)?;
        let end = self.reactor.now() + time;
        self.drive(requests, &mut |now| now >= end)
    }

    /// Makes requests until `enough`, then waits for the last answers, which count.
    pub(super) fn drive(
        &mut self,
        requests: Requests,
        enough: &mut dyn FnMut(Instant) -> bool,
    ) -> Result<Rate, RunError> {
        let began = self.reactor.now();
        self.begun = vec![began; requests.outstanding];
        if requests.writes && self.payload.as_ref().is_none_or(|payload| payload.len() as u64 != requests.bytes) {
            let mut payload = self.frame(requests)?;
            payload.fill(0x5a);
            self.payload = Some(Rc::new(payload));
        }
        for tag in 0..requests.outstanding {
            let frame = if requests.writes { None } else { Some(self.frame(requests)?) };
            self.begin(requests, tag, frame)?;
        }
        let mut latencies: Vec<u64> = Vec::new();
        let mut done: Vec<RemoteDone> = Vec::new();
        let mut ending = false;
        while self.volume.pending() > 0 {
            self.volume.reap(&mut done);
            let (now, answered) = (self.reactor.now(), !done.is_empty());
            for one in done.drain(..) {
                one.result?;
                latencies.push(now.since(self.begun[one.tag as usize]).as_nanos() as u64);
                ending = ending || enough(now);
                if !ending {
                    self.begin(requests, one.tag as usize, one.buffer)?;
                }
            }
            let wait = if answered { Wait::Poll } else { Wait::Block };
            remote::turn(&mut self.reactor, &mut [&mut self.volume], wait)?;
        }
        let seconds = self.reactor.now().since(began).as_secs_f64().max(1e-9);
        let bytes = latencies.len() as f64 * requests.bytes as f64;
        latencies.sort_unstable();
        let p50 = latencies.get(latencies.len() / 2).copied().unwrap_or(0);
        Ok(Rate { megabytes_per_second: bytes / seconds / 1e6, p50_us: p50 as f64 / 1e3 })
    }

    fn frame(&self, requests: Requests) -> Result<Frame, RunError> {
        let len = requests.bytes as usize;
        let own = self.volume.shared_frame(len).or_else(|| self.reactor.frames().alloc(len));
        own.ok_or(RunError::Loop(std::io::ErrorKind::OutOfMemory.into()))
    }

    fn begin(&mut self, requests: Requests, tag: usize, frame: Option<Frame>) -> Result<(), RunError> {
        let len = requests.bytes as usize;
        let offset = self.next % (self.volume_bytes / requests.bytes).max(1) * requests.bytes;
        self.next += 1;
        let no_memory = || RunError::Loop(std::io::ErrorKind::OutOfMemory.into());
        let request = if requests.writes {
            Request::Write { offset, len, from: self.payload.clone().ok_or_else(no_memory)?, durable: false }
        } else {
            let into = frame.map_or_else(|| self.frame(requests), Ok)?;
            Request::Read { offset, len, into }
        };
        self.begun[tag] = self.reactor.now();
        // Refused only over the client's bound, which is above all depths here.
        self.volume.submit(request, tag as u64).map_err(|_| no_memory())
    }
}

impl Drop for Load {
    /// Leaves as the protocol asks, so that the server does not take it for a failure.
    fn drop(&mut self) {
        remote::close(&mut self.reactor, &mut [&mut self.volume]);
    }
}
