//! Two loops of one backend, turned by one thread, and what a test asks of them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use byway_reactor::sim::World;
use byway_reactor::{
    Address, Completion, Errno, File, FileOptions, Frame, FramePool, Gather, IoChoice, Listener, Op, OpenFile, Outcome,
    Reactor, Scatter, Socket, Token, Wait,
};

/// Nothing that a test waits for takes this long.
const DEADLINE: Duration = Duration::from_secs(30);
const POOL_BYTES: usize = 32 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backend {
    UringTcp,
    UringUnix,
    EpollTcp,
    EpollUnix,
    UringShared,
    EpollShared,
    Sim,
}

pub struct Rig {
    pub backend: Backend,
    pub loops: [Reactor; 2],
    done: [Vec<Completion>; 2],
    world: Option<World>,
    folder: tempfile::TempDir,
    next: u32,
    /// Streams between the loops.
    streams: usize,
}

/// Runs one case on a backend; skips aloud where the kernel refuses io_uring.
pub fn run(backend: Backend, case: fn(&mut Rig)) {
    let open = |choice| Reactor::open(choice, POOL_BYTES);
    let (loops, world) = match backend {
        Backend::Sim => {
            let world = World::new(1);
            ([0, 1].map(|node| world.node(ip(node), POOL_BYTES)), Some(world))
        }
        Backend::EpollTcp | Backend::EpollUnix | Backend::EpollShared => {
            ([0, 1].map(|_| open(IoChoice::Epoll).expect("every kernel has epoll")), None)
        }
        Backend::UringTcp | Backend::UringUnix | Backend::UringShared => {
            match (open(IoChoice::Uring), open(IoChoice::Uring)) {
                (Ok(a), Ok(b)) => ([a, b], None),
                _ => return byway_skip::skip_this(byway_skip::NO_IO_URING),
            }
        }
    };
    let folder = tempfile::tempdir().expect("a folder for files");
    case(&mut Rig { backend, loops, done: [Vec::new(), Vec::new()], world, folder, next: 0, streams: 0 });
}

fn ip(node: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, node as u8 + 1).into()
}

impl Rig {
    /// Whether a kernel is behind it.
    pub fn is_real(&self) -> bool {
        self.world.is_none()
    }

    pub fn token(&mut self) -> Token {
        self.next += 1;
        Token::new(1, 0, self.next, 0)
    }

    pub fn submit(&mut self, node: usize, op: Op) -> Token {
        let token = self.token();
        self.loops[node].submit(op, token);
        token
    }

    /// Lets both loops go on for a moment. False when nothing will ever happen again.
    pub fn turn(&mut self) -> bool {
        let before = self.done.each_ref().map(Vec::len);
        for (reactor, done) in self.loops.iter_mut().zip(&mut self.done) {
            reactor.reap(done, Wait::Poll).expect("a loop reaps");
        }
        if before != self.done.each_ref().map(Vec::len) {
            return true;
        }
        if let Some(world) = &self.world {
            return world.step();
        }
        for (reactor, done) in self.loops.iter_mut().zip(&mut self.done) {
            let until = reactor.now() + Duration::from_micros(200);
            reactor.reap(done, Wait::Until(until)).expect("a loop reaps");
        }
        true
    }

    /// The outcome of an operation, if it has ended.
    pub fn taken(&mut self, node: usize, token: Token) -> Option<Outcome> {
        let place = self.done[node].iter().position(|completion| completion.token == token)?;
        Some(self.done[node].remove(place).outcome)
    }

    /// All that has ended on a loop, in order.
    pub fn reaped(&mut self, node: usize) -> Vec<Completion> {
        std::mem::take(&mut self.done[node])
    }

    pub fn wait(&mut self, node: usize, token: Token) -> Outcome {
        let deadline = std::time::Instant::now() + DEADLINE;
        loop {
            if let Some(outcome) = self.taken(node, token) {
                return outcome;
            }
            assert!(self.turn(), "{token:?} never ends");
            assert!(std::time::Instant::now() < deadline, "{token:?} takes too long");
        }
    }

    pub fn run(&mut self, node: usize, op: Op) -> Outcome {
        let token = self.submit(node, op);
        self.wait(node, token)
    }

    /// Turns the loops until an operation submitted now on each of them is over.
    pub fn settle(&mut self) {
        for node in [0, 1] {
            let at = self.loops[node].now() + Duration::from_millis(5);
            assert!(matches!(self.run(node, Op::Timer { at }), Outcome::TimedOut(Ok(()))));
        }
    }

    pub fn frame(&self, node: usize, bytes: &[u8]) -> Frame {
        let mut frame = self.empty_frame(node, bytes.len());
        frame.write(0, bytes);
        frame
    }

    pub fn empty_frame(&self, node: usize, len: usize) -> Frame {
        self.loops[node].frames().alloc(len).expect("room in the pool")
    }

    /// Where a loop may listen.
    pub fn address(&self, node: usize, name: &str) -> Address {
        match self.backend {
            Backend::Sim => Address::Tcp(SocketAddr::new(ip(node), 0)),
            Backend::UringTcp | Backend::EpollTcp => Address::Tcp((Ipv4Addr::LOCALHOST, 0).into()),
            Backend::UringUnix | Backend::EpollUnix => Address::Unix(self.folder.path().join(name)),
            Backend::UringShared | Backend::EpollShared => Address::Shared(self.folder.path().join(name)),
        }
    }

    /// Listens; gives where to connect to.
    pub fn listen(&mut self, node: usize, name: &str) -> (Listener, Address) {
        let address = self.address(node, name);
        let listener = self.loops[node].listen(&address).expect("the address is free");
        let bound = self.loops[node].local_address(listener).map(Address::Tcp);
        (listener, bound.unwrap_or(address))
    }

    /// A stream from loop 0 to loop 1.
    pub fn connect(&mut self) -> (Socket, Socket) {
        let name = format!("stream-{}", self.next);
        let (listener, address) = self.listen(1, &name);
        let accept = self.submit(1, Op::Accept { listener });
        let connected = self.run(0, Op::Connect { to: address });
        let Outcome::Connected(Ok(client)) = connected else { panic!("{connected:?}") };
        let Outcome::Accepted(Ok(server)) = self.wait(1, accept) else { panic!("not accepted") };
        self.loops[1].close_listener(listener);
        let ended = self.wait(1, accept);
        assert!(matches!(ended, Outcome::Accepted(Err(Errno::CANCELED))), "{ended:?}");
        self.streams += 1;
        (client, server)
    }

    pub fn start_send(&mut self, node: usize, socket: Socket, bytes: &[u8]) -> Token {
        let mut gather = Gather::new();
        for part in bytes.chunks(128 << 10) {
            gather.push_frame(self.frame(node, part), 0, part.len());
        }
        self.submit(node, Op::Send { socket, gather })
    }

    pub fn sent(&mut self, node: usize, send: Token) -> Result<usize, Errno> {
        match self.wait(node, send) {
            Outcome::Sent { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    pub fn send(&mut self, node: usize, socket: Socket, bytes: &[u8]) -> Result<usize, Errno> {
        let send = self.start_send(node, socket, bytes);
        self.sent(node, send)
    }

    pub fn start_receive(&mut self, node: usize, socket: Socket, len: usize, min: usize) -> Token {
        let into = Scatter::one(self.empty_frame(node, len), 0, len);
        self.submit(node, Op::Recv { socket, into, min })
    }

    pub fn received(&mut self, node: usize, receive: Token) -> Result<Vec<u8>, Errno> {
        match self.wait(node, receive) {
            Outcome::Received { mut into, result } => {
                let mut all = Vec::new();
                into.drain().for_each(|piece| all.extend_from_slice(&piece.frame.bytes()[piece.start..][..piece.len]));
                result.map(|n| {
                    all.truncate(n);
                    all
                })
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn receive(&mut self, node: usize, socket: Socket, len: usize, min: usize) -> Result<Vec<u8>, Errno> {
        let receive = self.start_receive(node, socket, len, min);
        self.received(node, receive)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A sparse file of loop 0.
    pub fn open(&mut self, name: &str, len: u64, options: FileOptions) -> File {
        let open = if let Some(world) = &self.world {
            OpenFile::simulated(world.disk(ip(0)).file(name, len), options)
        } else {
            let path = self.path(name);
            std::fs::File::create(&path).and_then(|file| file.set_len(len)).expect("a file is made");
            OpenFile::open(&path, options).expect("a file is opened")
        };
        self.loops[0].add_file(Arc::new(open))
    }

    pub fn write(&mut self, file: File, offset: u64, bytes: &[u8], durable: bool) -> Result<usize, Errno> {
        let from = self.frame(0, bytes);
        match self.run(0, Op::Write { file, offset, from, start: 0, len: bytes.len(), durable }) {
            Outcome::Written { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    pub fn read(&mut self, file: File, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let into = self.empty_frame(0, len);
        match self.run(0, Op::Read { file, offset, into, start: 0, len }) {
            Outcome::Read { into, result } => result.map(|n| into.bytes()[..n].to_vec()),
            other => panic!("{other:?}"),
        }
    }

    /// Everything that was lent of another pool came back.
    pub fn assert_all_back(&mut self, pool: &FramePool) {
        let deadline = std::time::Instant::now() + DEADLINE;
        while pool.free_bytes() < pool.bytes() {
            self.settle();
            assert!(std::time::Instant::now() < deadline, "frames that did not come back: {pool:?}");
        }
    }

    /// Everything that was lent came back. Over shared memory, an open stream has a small frame to hear its bell with.
    pub fn assert_pools_full(&mut self) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            // What was sent without a copy is the kernel's until the peer has it, or is known to be gone.
            self.settle();
            self.done.iter_mut().for_each(Vec::clear);
            let lent = |reactor: &Reactor| reactor.frames().bytes() - reactor.frames().free_bytes();
            let lent: Vec<_> = self.loops.iter().map(lent).collect();
            let shared = matches!(self.backend, Backend::UringShared | Backend::EpollShared);
            let bells = if shared { self.streams * 4096 } else { 0 };
            if lent.iter().all(|bytes| *bytes <= bells) {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "bytes of frames that did not come back: {lent:?}");
        }
    }
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9) >> 11) as u8).collect()
}
