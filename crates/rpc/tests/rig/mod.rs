//! Nodes that call each other, over one wire or another.

use std::path::Path;
use std::time::Duration;

use byway_fabric::node::{Address, Deadline, NodeOptions, Op, Session};
use byway_reactor::{IoChoice, Reactor};
use byway_rpc::node::{Reply, Rpc};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Tcp,
    Unix,
    Shm,
    /// Where `BYWAY_RDMA_ADDRESS` is an address of a device: `cargo xtask guest rdma` has one.
    Rdma,
}

impl Wire {
    /// An address to listen at; `name` is a socket's in `folder`.
    pub fn address(self, folder: &Path, name: &str) -> Address {
        match self {
            Self::Tcp => Address::Tcp("127.0.0.1:0".parse().unwrap()),
            Self::Unix => Address::Unix(folder.join(name)),
            Self::Shm => Address::Shared(folder.join(name)),
            Self::Rdma => Address::Rdma((byway_skip::rdma_device().expect("looked for before"), 0).into()),
        }
    }
}

/// Whether this machine has the backend and the wires. If not, the test is logged as skipped.
pub fn is_there(io: IoChoice, wires: &[Wire]) -> bool {
    if wires.contains(&Wire::Rdma) && byway_skip::rdma_device().is_none() {
        byway_skip::skip_this(byway_skip::NO_RDMA);
        return false;
    }
    if io == IoChoice::Uring && Reactor::open_for_threads(io, 1).is_err() {
        byway_skip::skip_this(byway_skip::NO_IO_URING);
        return false;
    }
    true
}

pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub fn open(io: IoChoice) -> Rpc {
    Rpc::open(&NodeOptions { io, frame_bytes: 16 << 20, ..NodeOptions::default() }).unwrap()
}

/// A session from `client` to `server`: as each of them calls it.
pub fn connect(server: &Rpc, client: &Rpc, address: &Address) -> (Session, Session) {
    let at = match (server.node().listen(address).unwrap(), address) {
        (Some(at), Address::Rdma(_)) => Address::Rdma(at),
        (Some(at), _) => Address::Tcp(at),
        (None, address) => address.clone(),
    };
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let connected = client.node().connect(&at, soon()).unwrap();
        (accepted.join().unwrap(), connected)
    })
}

pub fn reply(op: &Op) -> Reply {
    Reply::of(op.wait(soon()).expect("the call ends").expect("the call succeeds")).unwrap()
}

/// Takes the next call and answers it with nothing.
pub fn answer_plain(rpc: &Rpc) {
    rpc.next_call(soon()).unwrap().token.reply(0, &[], &[]).unwrap();
}
