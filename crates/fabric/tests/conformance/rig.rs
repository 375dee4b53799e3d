//! Two ends of one wire, turned by one thread, and what a test asks of them.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{
    ClientId, CloseReason, Closed, EndedGet, Fabric, GetError, Handler, Identity, Options, PayloadMeta, Put, Registry,
    Remote, SessionId, WindowKey,
};
use byway_reactor::sim::{LinkProfile, World};
use byway_reactor::{
    Address, Completion, File, FileOptions, Frame, FramePool, FrameRange, IoChoice, Mapping, Op, OpenFile, Outcome,
    Reactor, Token, Wait,
};

/// Nothing that a test waits for takes this long.
const DEADLINE: Duration = Duration::from_secs(60);
const POOL_BYTES: usize = 32 << 20;
/// How much of a window's frame lies before and behind it.
pub const MARGIN: usize = 64;

/// A wire, and what turns its loops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wire {
    Tcp(IoChoice),
    Unix(IoChoice),
    /// Shared memory, with an arena lent or without.
    Shared(IoChoice, Arena),
    /// RDMA, where `BYWAY_RDMA_ADDRESS` is an address of a device: `cargo xtask guest rdma` has one.
    Rdma(IoChoice),
    Sim,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arena {
    Lent,
    None,
}

impl Wire {
    fn is_uring(self) -> bool {
        use Wire::{Rdma, Shared, Sim, Tcp, Unix};
        match self {
            Tcp(io) | Unix(io) | Shared(io, _) | Rdma(io) => io == IoChoice::Uring,
            Sim => false,
        }
    }
}

/// What an end was told.
#[derive(Debug)]
pub enum Event {
    Up(SessionId),
    Message { kind: Kind, header: Header, payload: Vec<u8> },
    Placed { header: Header },
    Got { frame: Frame, context: u64, result: Result<(), GetError> },
    Recalled(WindowKey),
    Down(CloseReason),
    Drained,
}

/// One end: its loop, its fabric, what it was told.
pub struct RigEnd {
    pub reactor: Reactor,
    pub fabric: Fabric,
    pub log: Log,
    /// What the gets of [`Rig::get`] are received into, with margins.
    targets: HashMap<u64, Mapping>,
    completions: Vec<Completion>,
}

/// The handler of an end: it writes everything down.
#[derive(Default)]
pub struct Log {
    pub events: VecDeque<Event>,
    /// It answers each message with a notice.
    pub answers: bool,
}

impl Handler for Log {
    fn up(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        self.events.push_back(Event::Up(session));
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        _reactor: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) {
        if self.answers {
            fabric.send(session, Header::new(Kind::Notice));
        }
        self.events.push_back(Event::Message { kind, header: *header, payload: payload.to_vec() });
    }

    fn placed(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, _: Kind, header: &Header) {
        self.events.push_back(Event::Placed { header: *header });
    }

    fn got(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, get: EndedGet) {
        let EndedGet { frame, context, result } = get;
        let frame = frame.expect("no device was lost");
        self.events.push_back(Event::Got { frame, context, result });
    }

    fn recalled(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, window: WindowKey) {
        self.events.push_back(Event::Recalled(window));
    }

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, reason: CloseReason) {
        self.events.push_back(Event::Down(reason));
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        self.events.push_back(Event::Drained);
        fabric.release(session);
    }
}

impl RigEnd {
    fn new(reactor: Reactor, options: Options) -> Self {
        Self {
            reactor,
            fabric: Fabric::new(options),
            log: Log::default(),
            targets: HashMap::new(),
            completions: Vec::new(),
        }
    }

    /// Handles what is ready; says whether something was.
    pub fn turn(&mut self, wait: Wait) -> bool {
        let Self { reactor, fabric, log, completions, .. } = self;
        fabric.feed_starved(reactor, log);
        fabric.flush(reactor, log);
        reactor.reap(completions, wait).expect("a loop reaps");
        let busy = !completions.is_empty();
        for completion in completions.drain(..) {
            fabric.handle(reactor, completion, log);
        }
        fabric.flush(reactor, log);
        busy
    }

    /// Takes the first event that `wanted` makes something of.
    pub fn take<T>(&mut self, mut wanted: impl FnMut(&Event) -> Option<T>) -> Option<T> {
        let (place, found) =
            self.log.events.iter().enumerate().find_map(|(place, event)| Some((place, wanted(event)?)))?;
        self.log.events.remove(place);
        Some(found)
    }

    /// Takes the first get that ended, once what lies beside its target was found whole.
    pub fn take_got(&mut self) -> Option<(u64, Frame, Result<(), GetError>)> {
        let place = self.log.events.iter().position(|event| matches!(event, Event::Got { .. }))?;
        let Event::Got { context, frame, result } = self.log.events.remove(place)? else { return None };
        if let Some(target) = self.targets.remove(&context) {
            let beside = |from: usize| {
                // SAFETY: a margin, within the mapping, to which the frame does not reach.
                unsafe { std::slice::from_raw_parts(target.as_ptr().add(from), MARGIN) }
            };
            assert_margins(beside(0), beside(MARGIN + frame.len()));
        }
        Some((context, frame, result))
    }

    /// A frame with `bytes` in it behind a margin, and a margin behind them; in the arena, if there is one.
    pub fn framed(&self, bytes: &[u8]) -> Frame {
        let len = bytes.len() + 2 * MARGIN;
        let arena = self.fabric.arena().and_then(|arena| arena.alloc(len));
        let mut frame = arena.or_else(|| self.reactor.frames().alloc(len)).expect("there are frames");
        frame.fill(0xee);
        frame.write(MARGIN, bytes);
        frame
    }

    /// Opens a window of `len` bytes, all 0x11, for puts.
    pub fn open_target(&mut self, session: SessionId, len: usize) -> WindowKey {
        let frame = self.framed(&vec![0x11; len]);
        self.fabric.open_target(session, FrameRange::new(frame, MARGIN, len), 0).expect("a window")
    }

    /// Opens a window with these bytes for gets.
    pub fn open_source(&mut self, session: SessionId, bytes: &[u8]) -> WindowKey {
        let frame = Rc::new(self.framed(bytes));
        self.fabric.open_source(session, FrameRange::new(frame, MARGIN, bytes.len()), 0).expect("a window")
    }

    /// Closes a window for puts; gives its bytes, once its margins were found whole.
    pub fn close_target(&mut self, window: WindowKey) -> Vec<u8> {
        let Closed::Target(frame) = self.fabric.windows().close(window) else { panic!("no target") };
        within_margins(&frame.to_vec())
    }

    /// As [`Self::close_target`], of a window for gets.
    pub fn close_source(&mut self, window: WindowKey) -> Vec<u8> {
        let Closed::Source(frame) = self.fabric.windows().close(window) else { panic!("no source") };
        within_margins(&frame.to_vec())
    }
}

/// What lies between the margins of a window's frame, which are whole.
fn within_margins(frame: &[u8]) -> Vec<u8> {
    let (front, rest) = frame.split_at(MARGIN);
    let (bytes, back) = rest.split_at(rest.len() - MARGIN);
    assert_margins(front, back);
    bytes.to_vec()
}

fn assert_margins(front: &[u8], back: &[u8]) {
    assert!(front.iter().chain(back).all(|byte| *byte == 0xee), "somebody wrote beside the window");
}

/// Both ends: the server is 0, the client 1.
pub struct Rig {
    pub wire: Wire,
    pub ends: Vec<RigEnd>,
    pub address: Address,
    world: Option<World>,
    folder: tempfile::TempDir,
    sessions: u64,
    options: Options,
}

pub const SERVER: usize = 0;
pub const CLIENT: usize = 1;

/// Runs one case on a wire; skips aloud where the kernel refuses io_uring.
pub fn run(wire: Wire, case: fn(&mut Rig)) {
    let mut options = Options::new(7);
    options.seed = (wire == Wire::Sim).then_some(1);
    if let Some(mut rig) = Rig::new(wire, options) {
        case(&mut rig);
    }
}

impl Rig {
    /// `None`, said aloud, where the kernel refuses io_uring.
    pub fn new(wire: Wire, options: Options) -> Option<Self> {
        let device = byway_skip::rdma_device();
        if matches!(wire, Wire::Rdma(_)) && device.is_none() {
            byway_skip::skip_this(byway_skip::NO_RDMA);
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder for sockets");
        let world = (wire == Wire::Sim).then(|| World::new(1));
        let open = |node: usize| match (wire, &world) {
            (Wire::Sim, Some(world)) => Ok(world.node(ip(node), POOL_BYTES)),
            (Wire::Tcp(io) | Wire::Unix(io) | Wire::Shared(io, _) | Wire::Rdma(io), _) => Reactor::open(io, POOL_BYTES),
            (Wire::Sim, None) => unreachable!("made above"),
        };
        let (server, client) = match (open(SERVER), open(CLIENT)) {
            (Ok(server), Ok(client)) => (server, client),
            (Err(error), _) | (_, Err(error)) => {
                assert!(wire.is_uring(), "every kernel has epoll: {error}");
                byway_skip::skip_this(byway_skip::NO_IO_URING);
                return None;
            }
        };
        let mut server = RigEnd::new(server, options);
        server.fabric.serve(&server.reactor, Arc::new(Registry::new(1)));
        let asked = match wire {
            Wire::Tcp(_) => Address::Tcp(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)),
            Wire::Sim => Address::Tcp(SocketAddr::new(ip(SERVER), 4711)),
            Wire::Unix(_) => Address::Unix(folder.path().join("s")),
            Wire::Shared(..) => Address::Shared(folder.path().join("s")),
            Wire::Rdma(_) => Address::Rdma(SocketAddr::new(device.expect("looked for above"), 0)),
        };
        let address = if let Address::Rdma(at) = asked {
            Address::Rdma(server.fabric.listen_rdma(&mut server.reactor, at).expect("it listens"))
        } else {
            let listener = server.fabric.listen(&mut server.reactor, &asked).expect("it listens");
            match wire {
                Wire::Tcp(_) => Address::Tcp(server.reactor.local_address(listener).expect("an address")),
                _ => asked,
            }
        };
        let mut client = RigEnd::new(client, options);
        if matches!(wire, Wire::Shared(_, Arena::Lent)) {
            client.fabric.lend(FramePool::shared(POOL_BYTES).expect("an arena"));
        }
        Some(Self { wire, ends: vec![server, client], address, world, folder, sessions: 0, options })
    }

    pub fn server(&mut self) -> &mut RigEnd {
        &mut self.ends[SERVER]
    }

    pub fn client(&mut self) -> &mut RigEnd {
        &mut self.ends[CLIENT]
    }

    /// Lets all ends go on for a moment. False when nothing will ever happen again.
    pub fn turn(&mut self) -> bool {
        let busy = self.ends.iter_mut().filter_map(|end| end.turn(Wait::Poll).then_some(())).count();
        if busy > 0 {
            return true;
        }
        if let Some(world) = &self.world {
            return world.step();
        }
        for end in &mut self.ends {
            let until = end.reactor.now() + Duration::from_micros(200);
            end.turn(Wait::Until(until));
        }
        true
    }

    /// So many bytes a second are what the simulated network moves from now on.
    pub fn slow_down(&mut self, bandwidth: u64) {
        let world = self.world.as_ref().expect("a simulation");
        world.link(ip(SERVER), ip(CLIENT), LinkProfile { bandwidth, ..LinkProfile::default() });
    }

    /// Lets so much simulated time pass, in which one end alone is turned.
    pub fn pass(&mut self, time: Duration, end: usize) {
        let world = self.world.clone().expect("a simulation");
        let end = &mut self.ends[end];
        world.run_until(world.now() + time, || while end.turn(Wait::Poll) {});
    }

    /// Turns until `done` gives something.
    pub fn until<T>(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let deadline = std::time::Instant::now() + DEADLINE;
        loop {
            if let Some(found) = done(self) {
                return found;
            }
            assert!(self.turn(), "it never comes to this: {what}");
            assert!(std::time::Instant::now() < deadline, "it takes too long: {what}");
        }
    }

    /// Begins a session; gives the client's name of it.
    pub fn connect(&mut self) -> SessionId {
        self.sessions += 1;
        let number = self.sessions;
        let identity = Identity {
            client: ClientId([number as u8 ^ 0x5a; 16]),
            number,
            nonce: number.to_le_bytes().repeat(2).try_into().expect("16 bytes"),
        };
        let address = self.address.clone();
        let RigEnd { reactor, fabric, .. } = &mut self.ends[CLIENT];
        fabric.connect(reactor, address, identity)
    }

    /// A session that is up at both ends: the server's name of it and the client's. Puts are possible.
    pub fn session(&mut self) -> (SessionId, SessionId) {
        let client = self.connect();
        let up =
            |end: &mut RigEnd| end.take(|event| if let Event::Up(session) = event { Some(*session) } else { None });
        assert_eq!(self.until("the client is up", |rig| up(rig.client())), client);
        let server = self.until("the server is up", |rig| up(rig.server()));
        self.until("lanes", |rig| rig.server().fabric.can_put(server).then_some(()));
        (server, client)
    }

    /// The client tells the server of a window by a call; gives what the server heard.
    pub fn offer(&mut self, client: SessionId, window: WindowKey) -> Remote {
        let mut header = Header::new(Kind::Call);
        header.window.set(window.0);
        self.client().fabric.send(client, header);
        let key = self.until("the offer", |rig| {
            rig.server().take(|event| match event {
                Event::Message { kind: Kind::Call, header, payload, .. } => {
                    assert!(payload.is_empty(), "a grant is not for who stands above");
                    Some(header.window.get())
                }
                _ => None,
            })
        });
        Remote { window: WindowKey(key), offset: 0 }
    }

    /// The server puts bytes, and a message of the kind `Data` with `mark` in it.
    pub fn put(&mut self, server: SessionId, to: Remote, bytes: &[u8], mark: u8) {
        let mut header = Header::new(Kind::Data);
        header.body[0] = mark;
        let RigEnd { reactor, fabric, .. } = &mut self.ends[SERVER];
        let checked = fabric.agreed(server).is_some_and(byway_fabric::Agreed::payload_checksum);
        let payload = PayloadMeta { len: bytes.len(), checksum: checked.then(|| crc32c::crc32c(bytes)) };
        let mut frame = reactor.frames().alloc(bytes.len()).expect("a frame");
        frame.write(0, bytes);
        let put = Put { session: server, route: fabric.route(server), to, header, payload };
        fabric.put(reactor, put, |gather| gather.push_frame(frame, 0, bytes.len())).expect("frames can be read");
    }

    /// The client hears of a put.
    pub fn placed(&mut self) -> Header {
        self.until("a put", |rig| {
            rig.client().take(|event| if let Event::Placed { header, .. } = event { Some(*header) } else { None })
        })
    }

    /// The server gets `len` bytes, between margins that [`Self::got`] looks at.
    pub fn get(&mut self, server: SessionId, from: Remote, len: usize, context: u64) {
        let RigEnd { reactor, fabric, targets, .. } = &mut self.ends[SERVER];
        let target = Mapping::new(len + 2 * MARGIN).expect("memory");
        // SAFETY: within the mapping, which nobody else has; whoever looks at it later looks beside the frame.
        let mut into = unsafe {
            target.as_ptr().write_bytes(0xee, target.len());
            Frame::over(&target, MARGIN, len)
        };
        into.fill(0x22);
        assert!(targets.insert(context, target).is_none(), "each get under way has its own name");
        fabric.get(reactor, server, from, into, context).expect("there is a window for it");
    }

    /// The next get that ends at the server.
    pub fn got(&mut self) -> (u64, Frame, Result<(), GetError>) {
        self.until("a get", |rig| rig.server().take_got())
    }

    /// A file of the server's with these bytes, mapped.
    pub fn file(&mut self, bytes: &[u8]) -> File {
        let options = FileOptions { map: true, ..FileOptions::default() };
        let Some(world) = self.world.clone() else {
            let path = self.folder.path().join("mapped");
            std::fs::write(&path, bytes).expect("a file is made");
            let file = OpenFile::open(&path, options).expect("a file is opened");
            return self.server().reactor.add_file(Arc::new(file));
        };
        let file = OpenFile::simulated(world.disk(ip(SERVER)).file("mapped", bytes.len() as u64), options);
        let RigEnd { reactor, .. } = self.server();
        let file = reactor.add_file(Arc::new(file));
        let mut from = reactor.frames().alloc(bytes.len()).expect("a frame");
        from.write(0, bytes);
        let token = Token::new(u8::MAX, 0, 0, 0);
        let write = Op::Write { file, offset: 0, from, start: 0, len: bytes.len(), durable: false };
        reactor.submit(write, token);
        // Nobody has connected, so nothing else ends.
        let mut ended = Vec::new();
        while ended.is_empty() {
            reactor.reap(&mut ended, Wait::Poll).expect("a loop reaps");
            assert!(!ended.is_empty() || world.step(), "it is never written");
        }
        let [Completion { outcome: Outcome::Written { result, .. }, .. }] = &ended[..] else { panic!("{ended:?}") };
        assert_eq!(*result, Ok(bytes.len()));
        file
    }

    /// An end dies: its loop and all that it held are gone. The other must do with what it is told.
    pub fn kill(&mut self, end: usize) {
        let reactor = match (&self.world, self.wire) {
            (Some(world), _) => {
                world.crash(ip(end), byway_reactor::sim::Crash::Process);
                world.node(ip(end), POOL_BYTES)
            }
            (None, Wire::Tcp(io) | Wire::Unix(io) | Wire::Shared(io, _) | Wire::Rdma(io)) => {
                Reactor::open(io, POOL_BYTES).expect("it could be opened before")
            }
            (None, Wire::Sim) => unreachable!("has a world"),
        };
        self.ends[end] = RigEnd::new(reactor, self.options);
    }

    /// Whether the server's own CPU reaches the client's windows.
    pub fn places(&self) -> bool {
        matches!(self.wire, Wire::Shared(_, Arena::Lent))
    }

    /// Whether a kernel is behind it.
    pub fn is_real(&self) -> bool {
        self.world.is_none()
    }
}

fn ip(node: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, node as u8 + 1).into()
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
