//! Requests to a volume: a number of them in flight, for a time.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use byway_reactor::{Frame, Instant, IoChoice, Reactor, Wait};
use byway_service::block::client::Request;

use super::cpu::ThreadTimes;
use super::process::Server;
use super::session::RunError;
use crate::own_cpu;
use byway_remote::tls::ClientTlsArguments;
use byway_remote::{self as remote, Remote, RemoteDone, RemoteOptions, RemoteUri};

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
    /// CPU time of this process for each request, in microseconds.
    pub(super) client_cpu_us: f64,
    /// CPU time of the server for each request, where the kernel tells.
    pub(super) server_cpu_us: Option<f64>,
}

/// A volume that requests are made to.
pub(super) struct Load {
    reactor: Reactor,
    volume: Remote,
    /// The server's process.
    server: u32,
    volume_bytes: u64,
    /// Where the next request begins, in requests.
    next: u64,
    begun: Vec<Instant>,
    payload: Option<Rc<Frame>>,
    /// Bytes a second at most.
    bytes_per_second_max: Option<f64>,
}

impl Load {
    /// Opens a volume of a server, by a scheme that [`Server::uri`] knows.
    pub(super) fn open(server: &Server, scheme: &str, volume: &str) -> Result<Self, RunError> {
        let uri: RemoteUri = server.uri(scheme, volume).parse().map_err(remote::RemoteError::from)?;
        let mut reactor = Reactor::open(IoChoice::Auto, 96 << 20).map_err(RunError::Loop)?;
        let connections = if matches!(uri, RemoteUri::Native(_)) { LANES } else { 1 };
        let unflushed_bytes_max = byway_service::limits::CLIENT_UNFLUSHED_BYTES;
        let tls = &ClientTlsArguments::default();
        let options = RemoteOptions { class: CLASS, connections, read_only: false, tls, unflushed_bytes_max };
        let mut volume = Remote::connect(&mut reactor, &uri, options)?;
        remote::open(&mut reactor, &mut [&mut volume])?;
        let volume_bytes = volume.info().map_or(0, |info| info.bytes);
        Ok(Self {
            reactor,
            volume,
            server: server.id(),
            volume_bytes,
            next: 0,
            begun: Vec::new(),
            payload: None,
            bytes_per_second_max: None,
        })
    }

    /// Holds requests back, so that no more than so much is moved: 10^6 bytes a second. For paths that are compared at the same rate.
    pub(super) fn set_rate(&mut self, megabytes_per_second_max: f64) {
        self.bytes_per_second_max = Some(megabytes_per_second_max * 1e6);
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
        let (cpu, server) = (own_cpu(), ThreadTimes::of(self.server));
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
        let mut pace = Pacer::new(self.bytes_per_second_max, requests, began);
        // Answered, and not to be made again yet.
        let mut held: VecDeque<(u64, Option<Frame>)> = VecDeque::new();
        while self.volume.pending() > 0 || !held.is_empty() {
            self.volume.reap(&mut done);
            let (now, answered) = (self.reactor.now(), !done.is_empty());
            for one in done.drain(..) {
                one.result?;
                latencies.push(now.since(self.begun[one.tag as usize]).as_nanos() as u64);
                ending = ending || enough(now);
                held.push_back((one.tag, one.buffer));
            }
            if ending {
                held.clear();
            }
            while let Some((tag, frame)) = pace.take(now, &mut held) {
                self.begin(requests, tag as usize, frame)?;
            }
            let wait = match pace.next_at {
                _ if answered => Wait::Poll,
                Some(at) if !held.is_empty() => Wait::Until(at),
                _ => Wait::Block,
            };
            remote::turn(&mut self.reactor, &mut [&mut self.volume], wait)?;
        }
        let seconds = self.reactor.now().since(began).as_secs_f64().max(1e-9);
        let each_us = |time: Duration| time.as_secs_f64() * 1e6 / latencies.len().max(1) as f64;
        let client_cpu_us = each_us(own_cpu().saturating_sub(cpu));
        let server_cpu_us =
            server.zip(ThreadTimes::of(self.server)).map(|(before, after)| each_us(after.since(&before)));
        let bytes = latencies.len() as f64 * requests.bytes as f64;
        latencies.sort_unstable();
        let p50 = latencies.get(latencies.len() / 2).copied().unwrap_or(0);
        let megabytes_per_second = bytes / seconds / 1e6;
        Ok(Rate { megabytes_per_second, p50_us: p50 as f64 / 1e3, client_cpu_us, server_cpu_us })
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

/// When the next request may be made.
struct Pacer {
    /// None: at once.
    next_at: Option<Instant>,
    between: Duration,
    /// What has not been made in its time is made up for, but no more than this.
    behind_max: Duration,
}

impl Pacer {
    /// As many as are outstanding have been made at `began`.
    fn new(bytes_per_second_max: Option<f64>, requests: Requests, began: Instant) -> Self {
        let between =
            Duration::from_secs_f64(requests.bytes as f64 / bytes_per_second_max.unwrap_or(f64::MAX).max(1.0));
        let behind_max = between * requests.outstanding as u32;
        Self { next_at: bytes_per_second_max.map(|_| began + behind_max), between, behind_max }
    }

    /// One of those that are held back, if its time has come.
    fn take<T>(&mut self, now: Instant, held: &mut VecDeque<T>) -> Option<T> {
        if self.next_at.is_some_and(|at| at > now) {
            return None;
        }
        let taken = held.pop_front()?;
        if let Some(at) = &mut self.next_at {
            let late = now.since(*at);
            *at = *at + late.saturating_sub(self.behind_max) + self.between;
        }
        Some(taken)
    }
}

impl Drop for Load {
    /// Leaves as the protocol asks, so that the server does not take it for a failure.
    fn drop(&mut self) {
        remote::close(&mut self.reactor, &mut [&mut self.volume]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_in(rate: Option<f64>, millis: u64, stop: std::ops::Range<u64>) -> usize {
        let requests = Requests { bytes: 1000, outstanding: 2, writes: false };
        let began = byway_reactor::monotonic();
        let mut pace = Pacer::new(rate, requests, began);
        let mut held: VecDeque<()> = VecDeque::from(vec![(); 100]);
        for at in (0..millis).filter(|at| !stop.contains(at)) {
            while pace.take(began + Duration::from_millis(at), &mut held).is_some() {}
        }
        100 - held.len()
    }

    #[test]
    fn requests_keep_their_rate_and_make_up_for_a_stop_within_bounds() {
        // One each 10 ms, after the two that were made at the start.
        assert_eq!(made_in(Some(100_000.0), 101, 0..0), 9);
        // Two are due when it goes on after the stop, and one in its time: those between are lost.
        assert!((5..=6).contains(&made_in(Some(100_000.0), 101, 30..90)), "{}", made_in(Some(100_000.0), 101, 30..90));
        assert_eq!(made_in(None, 1, 0..0), 100, "nothing holds them back");
    }
}
