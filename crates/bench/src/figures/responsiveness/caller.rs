//! The caller: it starts the process of the node, and calls it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, NodeOptions, Op, Session, SubmitError, WaitError, parse_address};
use byway_fabric::random::Random;
use byway_rpc::node::{Call, Rpc};
use rustix::time::{ClockId, clock_gettime};

use super::super::process::{on_cpus, this_program};
use super::super::session::RunError;

/// For one call, and for a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two calls: from none to this, any as likely as any other.
const PAUSE_MAX: Duration = Duration::from_micros(500);
/// What a call carries, and its answer.
const ARGUMENTS: [u8; 64] = [0x5a; 64];

/// The process of the node.
pub(super) struct Responder {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// In the order of its listeners.
    pub(super) addresses: Vec<String>,
}

/// What its threads have done since it began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    pub(super) at: Instant,
    /// Parts of work.
    pub(super) parts: f64,
    /// CPU of waiting and answering.
    pub(super) answering_us: f64,
}

impl Responder {
    /// Starts it on these CPUs with these arguments, and waits until it listens at all its addresses.
    pub(super) fn start(cpus: &[usize], listen: &[String], arguments: &[String]) -> Result<Self, RunError> {
        let mut command = this_program()?;
        command.args(["bench", "responder", "--end-with", &std::process::id().to_string()]).args(arguments);
        command.args(listen.iter().flat_map(|address| ["--listen", address]));
        command.env("RUST_LOG", "error").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = on_cpus(cpus, || command.spawn())?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(RunError::Child(std::io::ErrorKind::BrokenPipe.into()));
        };
        let mut responder = Self { child, to, from: BufReader::new(from), addresses: Vec::new() };
        for _ in listen {
            let line = responder.line()?;
            responder.addresses.push(line);
        }
        Ok(responder)
    }

    fn line(&mut self) -> Result<String, RunError> {
        let mut line = String::new();
        if self.from.read_line(&mut line).map_err(RunError::Child)? == 0 {
            return Err(RunError::Child(std::io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(line.trim().to_owned())
    }

    /// Asks for its counts.
    pub(super) fn counts(&mut self) -> Result<Counted, RunError> {
        writeln!(self.to).and_then(|()| self.to.flush()).map_err(RunError::Child)?;
        let line = self.line()?;
        let mut words = line.split(' ').map(str::parse::<f64>);
        match (words.next(), words.next()) {
            (Some(Ok(parts)), Some(Ok(nanos))) => Ok(Counted { at: Instant::now(), parts, answering_us: nanos / 1e3 }),
            _ => Err(RunError::Child(std::io::ErrorKind::InvalidData.into())),
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the node is asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asks {
    /// Calls, as `next_call` takes them.
    Calls,
    /// Messages, answered by messages: what operations of the node alone wait for.
    Messages,
}

/// How the caller waits for its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// Adaptively: a short spin while that is worth it, then sleep.
    Adaptive,
    /// By looking again and again.
    Polling,
}

/// A session with the node.
pub(super) struct Caller {
    rpc: Rpc,
    session: Session,
    asks: Asks,
    random: Random,
}

/// What calls took.
#[derive(Clone, Debug)]
pub(super) struct Called {
    /// Of each, in order of length.
    latencies_us: Vec<f64>,
    /// CPU of the caller for each, from the call to the answer.
    pub(super) cpu_us: f64,
}

impl Called {
    /// Calls.
    pub(super) fn count(&self) -> usize {
        self.latencies_us.len()
    }

    /// The latency that so many of a thousand stay under.
    pub(super) fn per_mille(&self, part: usize) -> f64 {
        let at = self.latencies_us.len() * part / 1000;
        self.latencies_us.get(at.min(self.latencies_us.len().saturating_sub(1))).copied().unwrap_or(0.0)
    }
}

impl Caller {
    /// Connects.
    pub(super) fn connect(address: &str, asks: Asks) -> Result<Self, RunError> {
        let failed = |error: &dyn std::error::Error| RunError::Fabric(format!("{address}: {error}"));
        let rpc = Rpc::open(&NodeOptions::default()).map_err(RunError::Loop)?;
        let address = parse_address(address).map_err(|error| failed(&error))?;
        let session = rpc.node().connect(&address, Deadline::after(PATIENCE)).map_err(|error| failed(&error))?;
        // The same pauses in every run.
        Ok(Self { rpc, session, asks, random: Random::from_seed(1) })
    }

    /// Makes so many calls, one at a time, with pauses.
    #[expect(clippy::disallowed_methods, reason = "the pause is part of the load, and waits for nothing")]
    pub(super) fn calls(&mut self, count: usize, waiting: Waiting) -> Result<Called, RunError> {
        let mut latencies_us = Vec::with_capacity(count);
        let mut cpu = Duration::ZERO;
        for _ in 0..count {
            let pause = PAUSE_MAX.mul_f64(self.random.next_u64() as f64 / u64::MAX as f64);
            let until = Instant::now() + pause;
            match waiting {
                Waiting::Adaptive => std::thread::sleep(pause),
                Waiting::Polling => while Instant::now() < until {},
            }
            let (before, began) = (thread_cpu(), Instant::now());
            self.call(waiting)?;
            latencies_us.push(began.elapsed().as_secs_f64() * 1e6);
            cpu += thread_cpu().saturating_sub(before);
        }
        latencies_us.sort_by(f64::total_cmp);
        Ok(Called { latencies_us, cpu_us: cpu.as_secs_f64() * 1e6 / count.max(1) as f64 })
    }

    /// The operation brings the answer.
    fn ask(&self, deadline: Deadline) -> Result<Op, SubmitError> {
        match self.asks {
            Asks::Calls => {
                let call = Call { method: 1, arguments: &ARGUMENTS, ..Call::default() };
                self.rpc.call(self.session, &call, deadline)
            }
            Asks::Messages => {
                let answer = self.rpc.node().start_receive(Some(self.session))?;
                self.rpc.node().send(self.session, &[], &ARGUMENTS).map(|_| answer)
            }
        }
    }

    fn call(&self, waiting: Waiting) -> Result<(), RunError> {
        let failed = |error: &dyn std::error::Error| RunError::Fabric(format!("a call: {error}"));
        let deadline = Deadline::after(PATIENCE);
        let op = self.ask(deadline).map_err(|error| failed(&error))?;
        let ended = match waiting {
            Waiting::Adaptive => op.wait(deadline),
            Waiting::Polling => loop {
                match op.test() {
                    Err(WaitError::Deadline) => {}
                    ended => break ended,
                }
            },
        };
        ended.map_err(|error| failed(&error))?.map_err(|error| failed(&error)).map(drop)
    }
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::Called;

    #[test]
    fn parts_of_a_thousand_are_read_off() {
        let called = Called { latencies_us: (0..2000).map(f64::from).collect(), cpu_us: 0.0 };
        assert_eq!([500, 990, 999].map(|part| called.per_mille(part).round() as u32), [1000, 1980, 1998]);
        let few = Called { latencies_us: vec![7.0], cpu_us: 0.0 };
        assert_eq!([500, 999].map(|part| few.per_mille(part).round() as u32), [7, 7]);
    }
}
