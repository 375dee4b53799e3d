//! What runs in processes of its own: a peer to be killed, and one that may not lock memory.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};

use byway_fabric::rdma::{Buffer, Device, Domain, Library, RdmaError, Rights, WindowAddress};
use byway_reactor::FramePool;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::node::{Node, Outcome, ensure, established, start};

const WINDOW_BYTES: usize = 1 << 20;

/// Connects, offers a window, and waits to be killed; ends by itself when its starter does.
pub fn run(address: IpAddr, arguments: &[String]) -> Outcome<()> {
    let port: u16 = arguments.first().ok_or("which port?")?.parse()?;
    let mut node = Node::open(Library::load()?, address)?;
    let window = node.domain.open_window(Buffer::zeroed(WINDOW_BYTES).ok_or("no memory")?, Rights::Both)?;
    let WindowAddress { address: start_of, rkey } = window.address();
    let told = [&start_of.to_le_bytes()[..], &rkey.to_le_bytes()[..]].concat();
    let _endpoint = start(&mut node, SocketAddr::new(address, port), 1, &told)?;
    node.wait_for("the connection", |node| node.take_event(1, established))?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The window that a peer offers in its private data.
pub fn parse_window(said: &[u8]) -> Option<WindowAddress> {
    let address = u64::from_le_bytes(said.get(..8)?.try_into().ok()?);
    let rkey = u32::from_le_bytes(said.get(8..12)?.try_into().ok()?);
    Some(WindowAddress { address, rkey })
}

/// Tries to register more than it may lock.
pub fn run_limited(address: IpAddr) -> Outcome<()> {
    let limit = 1 << 20;
    setrlimit(Resource::Memlock, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    let mut sets = capabilities(None)?;
    // Root may lock what it likes by this. The kernel refuses descriptors that were opened with other rights.
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets)?;
    let device = Device::open(Library::load()?, address)?;
    let domain = Domain::new(&device)?;
    let pool = FramePool::new(8 << 20)?;
    let refused = domain.register_pool(&pool).err();
    let expected = RdmaError::MemoryLimit { bytes: pool.bytes() };
    ensure(refused.as_ref() == Some(&expected), || format!("8 MiB under a limit of 1 MiB: {refused:?}"))?;
    let little = FramePool::new(1)?;
    ensure(little.bytes() <= 1 << 20, || "the pool is larger than the limit".into())
}
