//! The end that asks, and measures.

use std::error::Error;
use std::rc::Rc;
use std::time::{Duration, Instant};

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::wire::{Header, Kind};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, PayloadMeta, SessionId, WindowKey};
use byway_reactor::{Address, Frame, FramePool, FrameRange, Reactor};

use super::command::{Command, Mode, REGION_WINDOW_BYTES};
use super::end::{Ask, Body, Latencies, WireEnd, cpu};

/// What has come.
#[derive(Default)]
struct Came {
    up: bool,
    down: Option<CloseReason>,
    /// Answers, with and without a payload in a window.
    answers: usize,
    last: Option<Header>,
}

impl Handler for Came {
    fn up(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {
        self.up = true;
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, header: &Header, _: &[u8]) {
        self.answers += 1;
        self.last = Some(*header);
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {
        self.answers += 1;
    }

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, reason: CloseReason) {
        self.down = Some(reason);
    }

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}

/// Payloads up to this are copied behind their header at once.
const INLINE_BYTES_MAX: usize = 256;

struct Asking {
    /// What small messages carry.
    payload: Rc<Frame>,
    end: WireEnd,
    came: Came,
    session: SessionId,
}

impl Asking {
    fn connect(command: &Command) -> Result<Self, Box<dyn Error>> {
        let mut end = WireEnd::new(command.io, command.polling)?;
        if matches!(command.address, Address::Shared(_)) {
            end.fabric.lend(FramePool::shared(160 << 20)?);
        }
        let client = ClientId(end.fabric.random().bytes16());
        let identity = Identity { client, number: 1, nonce: end.fabric.random().bytes16() };
        let session = end.fabric.connect(&mut end.reactor, command.address.clone(), identity);
        let payload = Rc::new(end.reactor.frames().alloc(SMALL_BYTES_MAX).ok_or("no frames")?);
        let mut this = Self { payload, end, came: Came::default(), session };
        while !this.came.up {
            this.turn()?;
        }
        Ok(this)
    }

    fn turn(&mut self) -> Result<(), Box<dyn Error>> {
        self.end.turn(&mut self.came)?;
        match self.came.down.take() {
            Some(reason) => Err(reason.into()),
            None => Ok(()),
        }
    }

    /// Waits for one more answer than were seen.
    fn answered(&mut self, seen: usize) -> Result<(), Box<dyn Error>> {
        while self.came.answers == seen {
            self.turn()?;
        }
        Ok(())
    }

    fn frame(&self, len: usize) -> Result<Frame, Box<dyn Error>> {
        let arena = self.end.fabric.arena().and_then(|arena| arena.alloc(len));
        let mut frame = arena.or_else(|| self.end.reactor.frames().alloc(len)).ok_or("no frames")?;
        frame.fill(7);
        Ok(frame)
    }

    /// Opens a window and tells the server of it.
    fn offer(&mut self, ask: Ask, len: usize) -> Result<WindowKey, Box<dyn Error>> {
        let frame = self.frame(len)?;
        let fabric = &mut self.end.fabric;
        let window = match ask {
            Ask::Source => fabric.open_source(self.session, FrameRange::new(Rc::new(frame), 0, len), 0)?,
            _ => fabric.open_target(self.session, FrameRange::new(frame, 0, len), 0).map_err(|(error, _)| error)?,
        };
        let mut header = Body { ask: ask as u8, ..Body::default() }.header(Kind::Call);
        header.window.set(window.0);
        let seen = self.came.answers;
        self.end.fabric.send(self.session, header);
        self.answered(seen)?;
        Ok(window)
    }

    fn ask(&mut self, body: Body, payload: usize, window: Option<WindowKey>) {
        let mut header = body.header(Kind::Call);
        header.window.set(window.map_or(0, |window| window.0));
        let (meta, from) = (PayloadMeta { len: payload, checksum: None }, &self.payload);
        self.end.fabric.send_with(self.session, header, meta, |gather| match payload {
            0 => {}
            1..=INLINE_BYTES_MAX => {
                let mut inline = [0; INLINE_BYTES_MAX];
                from.read(0, &mut inline[..payload]);
                gather.push_head(&inline[..payload]);
            }
            _ => gather.push_shared(Rc::clone(from), 0, payload),
        });
    }

    /// CPU time that the server has spent.
    fn server_cpu(&mut self) -> Result<Duration, Box<dyn Error>> {
        let seen = self.came.answers;
        self.ask(Body::default(), 0, None);
        self.answered(seen)?;
        let header = self.came.last.ok_or("no answer")?;
        Ok(Duration::from_nanos(u64::from_le_bytes(header.body[32..40].try_into()?)))
    }
}

/// What is printed.
struct Report {
    operations: u64,
    seconds: f64,
    p50_nanos: u64,
    p99_nanos: u64,
    client: Duration,
    server: Duration,
}

pub fn run(command: &Command) -> Result<(), Box<dyn Error>> {
    let mut asking = Asking::connect(command)?;
    let large = command.bytes > SMALL_BYTES_MAX;
    let len = command.bytes;
    let mut target = None;
    match command.mode {
        Mode::Call if command.reply > SMALL_BYTES_MAX => target = Some(asking.offer(Ask::Target, command.reply)?),
        Mode::Echo if large => {
            asking.offer(Ask::Source, len)?;
            asking.offer(Ask::Target, len)?;
        }
        Mode::Get if command.region > 0 => {
            for _ in 0..command.region / REGION_WINDOW_BYTES {
                asking.offer(Ask::Source, REGION_WINDOW_BYTES)?;
            }
        }
        // One source for all, as other benchmarks have.
        Mode::Get => drop(asking.offer(Ask::Source, len)?),
        Mode::Give if large => drop(asking.offer(Ask::Source, len)?),
        _ => {}
    }
    let server = asking.server_cpu()?;
    let mut report =
        if command.mode == Mode::Get { gets(&mut asking, command)? } else { asks(&mut asking, command, target)? };
    report.server = asking.server_cpu()?.saturating_sub(server);
    print(&report, command.bytes.max(command.reply * usize::from(command.mode == Mode::Call)));
    Ok(())
}

/// Asks, `depth` at a time, until the time is over.
fn asks(asking: &mut Asking, command: &Command, target: Option<WindowKey>) -> Result<Report, Box<dyn Error>> {
    let large = command.bytes > SMALL_BYTES_MAX;
    let (ask, payload) = match command.mode {
        Mode::Call => (Ask::Call, command.bytes),
        Mode::Echo if large => (Ask::EchoLarge, 0),
        Mode::Echo => (Ask::Echo, command.bytes),
        _ if large => (Ask::Give, 0),
        _ => (Ask::Give, command.bytes),
    };
    let len = if command.mode == Mode::Call { command.reply } else { command.bytes };
    // A call with a window carries no payload.
    let payload = if target.is_some() { 0 } else { payload };
    let mut latencies = Latencies::new();
    let (started, spent) = (Instant::now(), cpu());
    let end = started + command.time;
    // What is given needs no answer: one for so many says that there is room for more.
    let step = if command.mode == Mode::Give && !large { command.depth.div_ceil(2) } else { 1 };
    let (mut asked, mut seen) = (0, asking.came.answers);
    let mut begun = std::collections::VecDeque::new();
    let mut next = |asking: &mut Asking, begun: &mut std::collections::VecDeque<Instant>, now: Instant| {
        begun.push_back(now);
        for _ in 0..step {
            asked += 1;
            let depth = u32::from(asked % step == 0);
            asking.ask(Body { ask: ask as u8, len: len as u32, depth, ..Body::default() }, payload, target);
        }
    };
    for _ in 0..command.depth / step {
        next(asking, &mut begun, Instant::now());
    }
    while !begun.is_empty() {
        asking.turn()?;
        let came = asking.came.answers - seen;
        seen = asking.came.answers;
        let mut now = Instant::now();
        for answer in 0..came {
            let Some(then) = begun.pop_front() else { return Err("an answer too many".into()) };
            latencies.push(now.duration_since(then));
            if now < end {
                if answer > 0 {
                    now = Instant::now();
                }
                next(asking, &mut begun, now);
            }
        }
    }
    let (seconds, client) = (started.elapsed().as_secs_f64(), cpu().saturating_sub(spent));
    let (p50_nanos, p99_nanos) = latencies.p50_p99();
    Ok(Report { operations: asked as u64, seconds, p50_nanos, p99_nanos, client, server: Duration::ZERO })
}

/// Has the server get, and tell how long it took.
fn gets(asking: &mut Asking, command: &Command) -> Result<Report, Box<dyn Error>> {
    let (seen, spent) = (asking.came.answers, cpu());
    let body = Body {
        ask: Ask::Get as u8,
        len: command.bytes as u32,
        places: if command.region > 0 { (REGION_WINDOW_BYTES / command.bytes) as u32 } else { 0 },
        depth: command.depth as u32,
        nanos: command.time.as_nanos() as u64,
    };
    asking.ask(body, 0, None);
    asking.answered(seen)?;
    let header = asking.came.last.ok_or("no answer")?;
    let word = |at: usize| header.body[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or_default();
    let (client, server, seconds) = (cpu().saturating_sub(spent), Duration::ZERO, word(24) as f64 / 1e9);
    Ok(Report { operations: word(8), seconds, p50_nanos: word(16), p99_nanos: 0, client, server })
}

fn print(report: &Report, bytes: usize) {
    let per = |time: Duration| time.as_secs_f64() * 1e6 / report.operations.max(1) as f64;
    println!(
        "{{\"operations\":{},\"per_second\":{:.1},\"megabytes_per_second\":{:.1},\"p50_us\":{:.3},\"p99_us\":{:.3},\
         \"client_cpu_us\":{:.3},\"server_cpu_us\":{:.3}}}",
        report.operations,
        report.operations as f64 / report.seconds,
        report.operations as f64 * bytes as f64 / report.seconds / 1e6,
        report.p50_nanos as f64 / 1e3,
        report.p99_nanos as f64 / 1e3,
        per(report.client),
        per(report.server),
    );
}

/// Copies between buffers in turn, as a wire would that costs nothing but the copy.
pub fn memcpy(command: &Command) {
    let from = vec![7; command.bytes];
    let mut to: Vec<Vec<u8>> = vec![vec![0; command.bytes]; command.depth];
    let (client, begun) = (cpu(), Instant::now());
    let mut operations = 0u64;
    while begun.elapsed() < command.time {
        for to in &mut to {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
            operations += 1;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let nanos = (seconds * 1e9 / operations as f64) as u64;
    let (client, server) = (cpu().saturating_sub(client), Duration::ZERO);
    print(&Report { operations, seconds, p50_nanos: nanos, p99_nanos: nanos, client, server }, command.bytes);
}
