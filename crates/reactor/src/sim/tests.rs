//! The world as its users see it: every test is a story on a few nodes, told for many seeds.

mod disk;
mod lending;
mod network;
mod property;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use super::{FaultPlan, SimFile, World};
use crate::{
    Address, Completion, Errno, Extent, File, FileOptions, Frame, Gather, Instant, Listener, Op, OpenFile, Outcome,
    Reactor, Scatter, Socket, Token, Wait,
};

const POOL_BYTES: usize = 8 << 20;
const PORT: u16 = 7;

fn ip(node: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, node as u8 + 1).into()
}

fn address(node: usize) -> Address {
    Address::Tcp(SocketAddr::new(ip(node), PORT))
}

/// Some nodes of a world, and a trace of all that they were told.
struct Rig {
    world: World,
    seed: u64,
    loops: Vec<Reactor>,
    done: Vec<Vec<Completion>>,
    trace: DefaultHasher,
    next: u32,
}

impl Rig {
    fn new(seed: u64, nodes: usize) -> Self {
        let world = World::new(seed);
        let loops = (0..nodes).map(|node| world.node(ip(node), POOL_BYTES)).collect();
        let done = (0..nodes).map(|_| Vec::new()).collect();
        Self { world, seed, loops, done, trace: DefaultHasher::new(), next: 0 }
    }

    fn submit(&mut self, node: usize, op: Op) -> Token {
        self.next += 1;
        let token = Token::new(1, 0, self.next, 0);
        self.loops[node].submit(op, token);
        token
    }

    fn turn(&mut self) {
        for (node, reactor) in self.loops.iter_mut().enumerate() {
            let mut new = Vec::new();
            reactor.reap(&mut new, Wait::Block).expect("a simulated loop reaps");
            for completion in &new {
                (self.world.now(), node, format!("{completion:?}")).hash(&mut self.trace);
            }
            self.done[node].append(&mut new);
        }
    }

    /// The outcome of an operation, if it has ended.
    fn taken(&mut self, node: usize, token: Token) -> Option<Outcome> {
        self.turn();
        let place = self.done[node].iter().position(|completion| completion.token == token)?;
        Some(self.done[node].remove(place).outcome)
    }

    /// The outcome of an operation, which must end.
    fn wait(&mut self, node: usize, token: Token) -> Outcome {
        loop {
            if let Some(outcome) = self.taken(node, token) {
                return outcome;
            }
            assert!(self.world.step(), "seed {}: {token:?} of node {node} never ends", self.seed);
        }
    }

    fn run(&mut self, node: usize, op: Op) -> Outcome {
        let token = self.submit(node, op);
        self.wait(node, token)
    }

    /// Lets the world run until nothing is planned.
    fn settle(&mut self) {
        self.turn();
        while self.world.step() {
            self.turn();
        }
    }

    /// Lets so much time pass.
    fn pass(&mut self, time: std::time::Duration) {
        let at = self.world.now() + time;
        let token = self.submit(0, Op::Timer { at });
        assert!(matches!(self.wait(0, token), Outcome::TimedOut(Ok(()))));
    }

    fn frame(&self, node: usize, bytes: &[u8]) -> Frame {
        let mut frame = self.loops[node].frames().alloc(bytes.len()).expect("room in the pool");
        frame.write(0, bytes);
        frame
    }

    fn scatter(&self, node: usize, len: usize) -> Scatter {
        Scatter::one(self.loops[node].frames().alloc(len).expect("room in the pool"), 0, len)
    }

    fn listen(&mut self, node: usize) -> Listener {
        self.loops[node].listen(&address(node)).expect("the port is free")
    }

    /// A stream from node `a` to node `b`.
    fn connect(&mut self, a: usize, b: usize) -> (Socket, Socket) {
        let listener = self.listen(b);
        let accept = self.submit(b, Op::Accept { listener });
        let Outcome::Connected(Ok(client)) = self.run(a, Op::Connect { to: address(b) }) else {
            panic!("seed {}: no connection", self.seed)
        };
        let Outcome::Accepted(Ok(server)) = self.wait(b, accept) else { panic!("seed {}: no stream", self.seed) };
        self.loops[b].close_listener(listener);
        assert!(matches!(self.wait(b, accept), Outcome::Accepted(Err(Errno::CANCELED))));
        (client, server)
    }

    fn start_send(&mut self, node: usize, socket: Socket, bytes: &[u8]) -> Token {
        let mut gather = Gather::new();
        for part in bytes.chunks(64 << 10) {
            gather.push_frame(self.frame(node, part), 0, part.len());
        }
        self.submit(node, Op::Send { socket, gather })
    }

    fn sent(&mut self, node: usize, send: Token) -> Result<usize, Errno> {
        match self.wait(node, send) {
            Outcome::Sent { result, .. } => result,
            other => panic!("seed {}: {other:?}", self.seed),
        }
    }

    fn send(&mut self, node: usize, socket: Socket, bytes: &[u8]) -> Result<usize, Errno> {
        let send = self.start_send(node, socket, bytes);
        self.sent(node, send)
    }

    fn start_receive(&mut self, node: usize, socket: Socket, len: usize, min: usize) -> Token {
        let into = self.scatter(node, len);
        self.submit(node, Op::Recv { socket, into, min })
    }

    fn received(&mut self, node: usize, receive: Token) -> Result<Vec<u8>, Errno> {
        match self.wait(node, receive) {
            Outcome::Received { mut into, result } => {
                let piece = into.drain().next().expect("the memory comes back");
                result.map(|n| piece.frame.bytes()[piece.start..piece.start + n].to_vec())
            }
            other => panic!("seed {}: {other:?}", self.seed),
        }
    }

    fn receive(&mut self, node: usize, socket: Socket, len: usize, min: usize) -> Result<Vec<u8>, Errno> {
        let receive = self.start_receive(node, socket, len, min);
        self.received(node, receive)
    }

    /// Opens a file of a node's disk.
    fn open(&mut self, node: usize, name: &str, len: u64, options: FileOptions) -> (SimFile, File) {
        let sim = self.world.disk(ip(node)).file(name, len);
        let file = self.loops[node].add_file(Arc::new(OpenFile::simulated(sim.clone(), options)));
        (sim, file)
    }

    fn write_op(&self, node: usize, file: File, offset: u64, bytes: &[u8], durable: bool) -> Op {
        Op::Write { file, offset, from: self.frame(node, bytes), start: 0, len: bytes.len(), durable }
    }

    fn write(&mut self, node: usize, file: File, offset: u64, bytes: &[u8], durable: bool) -> Result<usize, Errno> {
        let op = self.write_op(node, file, offset, bytes, durable);
        match self.run(node, op) {
            Outcome::Written { result, .. } => result,
            other => panic!("seed {}: {other:?}", self.seed),
        }
    }

    fn read(&mut self, node: usize, file: File, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let into = self.loops[node].frames().alloc(len).expect("room in the pool");
        match self.run(node, Op::Read { file, offset, into, start: 0, len }) {
            Outcome::Read { into, result } => result.map(|n| into.bytes()[..n].to_vec()),
            other => panic!("seed {}: {other:?}", self.seed),
        }
    }

    /// What lies in a file's first `len` bytes, however many answers that takes.
    fn extents(&mut self, node: usize, file: File, len: u64, count_max: usize) -> Vec<Extent> {
        let (mut all, mut at): (Vec<Extent>, u64) = (Vec::new(), 0);
        while at < len {
            let found = self.run(node, Op::Extents { file, offset: at, len: len - at, count_max });
            let Outcome::Extents(Ok(found)) = found else { panic!("{found:?}") };
            assert!((1..=count_max).contains(&found.len()) && found.iter().all(|extent| extent.len > 0), "{found:?}");
            for extent in found {
                at += extent.len;
                match all.last_mut() {
                    Some(last) if last.hole == extent.hole => last.len += extent.len,
                    _ => all.push(extent),
                }
            }
        }
        assert_eq!(at, len, "more than was asked");
        all
    }

    fn sync(&mut self, node: usize, file: File) -> Result<(), Errno> {
        match self.run(node, Op::Sync { file }) {
            Outcome::Synced(result) => result,
            other => panic!("seed {}: {other:?}", self.seed),
        }
    }

    /// Starts a node again after its crash.
    fn restart(&mut self, node: usize) {
        // The old loop goes first: an address has one.
        let spare = World::new(0).node(ip(node), 1);
        drop(std::mem::replace(&mut self.loops[node], spare));
        self.loops[node] = self.world.node(ip(node), POOL_BYTES);
        self.done[node].clear();
    }

    /// All memory came back.
    fn assert_pools_full(&mut self) {
        self.done.iter_mut().for_each(Vec::clear);
        for reactor in &self.loops {
            assert_eq!(reactor.frames().free_bytes(), reactor.frames().bytes(), "seed {}", self.seed);
        }
    }
}

/// Bytes that tell where they belong.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9).wrapping_add(seed) >> 7) as u8).collect()
}
