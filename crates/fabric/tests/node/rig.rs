//! Two nodes over a wire and a backend, and somebody who turns one of them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use byway_fabric::node::{
    Address, Completed, Deadline, Memory, Node, NodeOptions, Op, Outcome, Rights, Session, Window, parse_address,
};
use byway_reactor::IoChoice;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Tcp,
    Unix,
    Shm,
    /// With the memory of windows lent to the peer.
    Lent,
    /// RDMA, where `BYWAY_RDMA_ADDRESS` is an address of a device: `cargo xtask guest rdma` has one.
    Rdma,
}

/// Whatever hangs, hangs for so long.
pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub fn end(op: &Op) -> Completed {
    op.wait(soon()).expect("the operation ends")
}

pub fn done(op: &Op) {
    assert_eq!(end(op), Ok(Outcome::Done));
}

/// Waits for an operation on a node that somebody waits for, so that it is turned until dropped.
pub struct Turner {
    op: std::sync::Arc<Op>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Turner {
    pub fn of(node: &Node) -> Self {
        let op = std::sync::Arc::new(node.start_accept().unwrap());
        let waited = std::sync::Arc::clone(&op);
        let thread = std::thread::spawn(move || {
            let _ = waited.wait(Deadline::after(Duration::from_secs(120)));
        });
        Self { op, thread: Some(thread) }
    }
}

impl Drop for Turner {
    fn drop(&mut self) {
        self.op.cancel().unwrap();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

pub struct Rig {
    pub wire: Wire,
    pub io: IoChoice,
    folder: tempfile::TempDir,
}

static LISTENERS: AtomicU32 = AtomicU32::new(0);

impl Rig {
    pub fn new(wire: Wire, io: IoChoice) -> Self {
        Self { wire, io, folder: tempfile::tempdir().unwrap() }
    }

    pub fn options(&self) -> NodeOptions {
        NodeOptions { io: self.io, frame_bytes: 16 << 20, ..NodeOptions::default() }
    }

    pub fn node(&self) -> Node {
        Node::open(&self.options()).unwrap()
    }

    /// Has a node listen; gives where.
    pub fn listen(&self, node: &Node) -> Address {
        let number = LISTENERS.fetch_add(1, Ordering::Relaxed);
        let path = self.folder.path().join(format!("socket-{number}"));
        let address = match self.wire {
            Wire::Tcp => parse_address("tcp://127.0.0.1:0").unwrap(),
            Wire::Unix => Address::Unix(path),
            Wire::Shm | Wire::Lent => Address::Shared(path),
            Wire::Rdma => Address::Rdma(SocketAddr::new(byway_skip::rdma_device().expect("looked for before"), 0)),
        };
        match node.listen(&address).unwrap() {
            Some(at) if self.wire == Wire::Rdma => Address::Rdma(at),
            Some(at) => Address::Tcp(at),
            None => address,
        }
    }

    pub fn pair(&self) -> Pair {
        self.pair_of(&self.options())
    }

    pub fn pair_of(&self, options: &NodeOptions) -> Pair {
        let (server, client) = (Node::open(options).unwrap(), Node::open(options).unwrap());
        let address = self.listen(&server);
        let (to_client, to_server) = connect(&server, &client, &address);
        Pair { wire: self.wire, server, client, to_client, to_server }
    }
}

/// A session from `client` to `server`: as each of them calls it.
pub fn connect(server: &Node, client: &Node, address: &Address) -> (Session, Session) {
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.accept(soon()).unwrap());
        let connected = client.connect(address, soon()).unwrap();
        (accepted.join().unwrap(), connected)
    })
}

pub struct Pair {
    pub wire: Wire,
    pub server: Node,
    pub client: Node,
    pub to_client: Session,
    pub to_server: Session,
}

impl Pair {
    /// Closes a window of the server's: a client that was lent it must hear of that.
    pub fn close(&self, window: Window) {
        let _client = Turner::of(&self.client);
        done(&window.close().unwrap());
    }

    /// Memory for windows, as the wire wants it.
    pub fn memory(&self, node: &Node, len: usize) -> Memory {
        if self.wire == Wire::Lent { node.register_shared(len).unwrap() } else { node.register(len).unwrap() }
    }

    /// Memory of the server with a byte for each place, and a window in its middle; canaries around it.
    pub fn window(&self, len: usize, open: impl FnOnce(&Memory, std::ops::Range<usize>) -> Window) -> (Memory, Window) {
        let memory = self.memory(&self.server, len + 2 * CANARY);
        memory.write(0, &(0..memory.len()).map(pattern).collect::<Vec<_>>()).unwrap();
        let window = open(&memory, CANARY..CANARY + len);
        self.hear();
        (memory, window)
    }

    /// Such a window that stays open.
    pub fn open(&self, len: usize, rights: Rights) -> (Memory, Window) {
        self.window(len, |memory, range| self.server.open_window(self.to_client, memory, range, rights).unwrap())
    }

    /// Has the client hear what its server has said: over RDMA, of windows, which programs would name in a message behind that.
    pub fn hear(&self) {
        if self.wire == Wire::Rdma {
            done(&self.server.send(self.to_client, b"heard?", &[]).unwrap());
            assert_eq!(self.client.receive_from(self.to_server, soon()).unwrap().header, b"heard?");
        }
    }
}

/// Bytes around windows that nobody may touch.
pub const CANARY: usize = 4096;

pub fn pattern(at: usize) -> u8 {
    (at * 31 + at / 251) as u8
}

/// Has the kernel refuse to let a device write to memory: memory that may not be written can no more be registered than memory
/// over the limit.
pub fn prevent_registration(memory: &Memory) {
    // SAFETY: memory of the test's, to which nothing refers; it stays readable, and nobody writes to it any more.
    unsafe { rustix::mm::mprotect(memory.as_ptr().cast(), memory.len(), rustix::mm::MprotectFlags::READ) }.unwrap();
}

pub fn copy_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

pub fn canaries_are_whole(memory: &Memory) {
    let bytes = copy_of(memory);
    let end = bytes.len() - CANARY;
    for at in (0..CANARY).chain(end..bytes.len()) {
        assert_eq!(bytes[at], pattern(at), "canary at {at}");
    }
}

/// A window between its canaries has nothing but this byte in it.
#[track_caller]
pub fn window_is_all(memory: &Memory, byte: u8) {
    canaries_are_whole(memory);
    let bytes = copy_of(memory);
    let other = bytes[CANARY..bytes.len() - CANARY].iter().position(|found| *found != byte);
    assert_eq!(other, None, "of {} bytes, the first that is not {byte:#x}", bytes.len() - 2 * CANARY);
}

/// Each test over RDMA and each backend: those that ask for nothing which it has not.
#[macro_export]
macro_rules! over_rdma {
    ($($name:ident),* $(,)?) => {
        $crate::over_each_wire!(@ rdma_epoll, Rdma, Epoll, $($name),*);
        $crate::over_each_wire!(@ rdma_uring, Rdma, Uring, $($name),*);
    };
}

/// Each test over each wire and backend.
#[macro_export]
macro_rules! over_each_wire {
    ($($name:ident),* $(,)?) => {
        $crate::over_each_wire!(@ tcp_epoll, Tcp, Epoll, $($name),*);
        $crate::over_each_wire!(@ unix_epoll, Unix, Epoll, $($name),*);
        $crate::over_each_wire!(@ shm_epoll, Shm, Epoll, $($name),*);
        $crate::over_each_wire!(@ lent_epoll, Lent, Epoll, $($name),*);
        $crate::over_each_wire!(@ lent_uring, Lent, Uring, $($name),*);
        $crate::over_each_wire!(@ tcp_uring, Tcp, Uring, $($name),*);
        $crate::over_each_wire!(@ unix_uring, Unix, Uring, $($name),*);
        $crate::over_each_wire!(@ shm_uring, Shm, Uring, $($name),*);
    };
    (@ $module:ident, $wire:ident, $io:ident, $($name:ident),*) => {
        mod $module {
            $(#[test]
            fn $name() {
                use byway_reactor::IoChoice;
                let io = IoChoice::$io;
                if io == IoChoice::Uring && byway_reactor::Reactor::open_for_threads(io, 1).is_err() {
                    return byway_skip::skip_this(byway_skip::NO_IO_URING);
                }
                let wire = $crate::rig::Wire::$wire;
                if wire == $crate::rig::Wire::Rdma && byway_skip::rdma_device().is_none() {
                    return byway_skip::skip_this(byway_skip::NO_RDMA);
                }
                super::$name(&$crate::rig::Rig::new(wire, io));
            })*
        }
    };
}
