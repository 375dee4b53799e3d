//! One put and one get of much memory, a GiB with `BYWAY_LONG=1` (64 MiB else): all of it comes, nothing beside it
//! is touched, and nowhere is there a second copy of it.
//!
//! A program of its own, since what this process has is measured.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use byway_fabric::node::{
    Address, Completed, Deadline, Memory, Node, NodeOptions, Op, Outcome, Rights, Session, parse_address,
};

/// Bytes beside what is moved.
const MARGIN: usize = 4096;
const CANARY: u8 = 0xee;
/// Frames of a node.
const FRAME_BYTES: usize = 16 << 20;
/// What else a process may have got: heap, stacks, pages of the program.
const SLACK: u64 = 16 << 20;
/// How long nothing takes.
const PATIENCE: Duration = Duration::from_secs(500);

/// Bytes that are moved by one operation.
fn len() -> usize {
    let all = if std::env::var_os("BYWAY_LONG").is_some() { 1 << 30 } else { 64 << 20 };
    all - 2 * MARGIN
}

/// What the process has at most is of all its tests.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn done(op: &Op) {
    assert_eq!(op.wait(PATIENCE), Ok::<Completed, _>(Ok(Outcome::Done)));
}

/// Bytes that look random, between margins.
fn fill(bytes: &mut [u8], mut state: u64) {
    let all = bytes.len();
    for word in bytes.chunks_mut(8) {
        state = (state ^ state << 13) ^ (state ^ state << 13) >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes[..MARGIN].fill(CANARY);
    bytes[all - MARGIN..].fill(CANARY);
}

/// The checksum of what lies between the margins, which are whole.
fn checksum(memory: &Memory) -> u32 {
    let mut chunk = vec![0; 1 << 20];
    let (mut at, end, mut sum) = (MARGIN, memory.len() - MARGIN, 0);
    while at < end {
        let len = chunk.len().min(end - at);
        memory.read(at, &mut chunk[..len]).unwrap();
        sum = crc32c::crc32c_append(sum, &chunk[..len]);
        at += len;
    }
    let mut margins = [0; 2 * MARGIN];
    memory.read(0, &mut margins[..MARGIN]).unwrap();
    memory.read(end, &mut margins[MARGIN..]).unwrap();
    assert!(margins.iter().all(|byte| *byte == CANARY), "somebody wrote beside it");
    sum
}

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).expect("Linux has it");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

/// Turns a node until dropped.
struct Turner(std::sync::Arc<Op>, Option<std::thread::JoinHandle<()>>);

impl Turner {
    fn of(node: &Node) -> Self {
        let op = std::sync::Arc::new(node.start_accept().unwrap());
        let waited = std::sync::Arc::clone(&op);
        let thread = std::thread::spawn(move || drop(waited.wait(PATIENCE)));
        Self(op, Some(thread))
    }
}

impl Drop for Turner {
    fn drop(&mut self) {
        self.0.cancel().unwrap();
        self.1.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// A session from one node to another: as the one that accepts it calls it, and as the other.
fn connect(server: &Node, client: &Node, address: &Address) -> (Session, Session) {
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.accept(Deadline::after(PATIENCE)).unwrap());
        let connected = client.connect(address, PATIENCE).unwrap();
        (accepted.join().unwrap(), connected)
    })
}

/// Over an address; the server's memory is lent to the client or not.
fn one_operation_moves_it_all(address: Address, lends: bool) {
    let _alone = alone();
    let options = NodeOptions { frame_bytes: FRAME_BYTES, ..NodeOptions::default() };
    let (server, client) = (Node::open(&options).unwrap(), Node::open(&options).unwrap());
    let bound = server.listen(&address).unwrap();
    let (to_client, to_server) = connect(&server, &client, &bound.map_or(address, Address::Tcp));
    let len = len();
    let all = len + 2 * MARGIN;
    let mut theirs = if lends { server.register_shared(all) } else { server.register(all) }.unwrap();
    let mut mine = client.register(all).unwrap();
    fill(theirs.bytes_mut().unwrap(), 1);
    fill(mine.bytes_mut().unwrap(), 2);
    let (before, wanted) = (checksum(&theirs), checksum(&mine));
    assert_ne!(before, wanted);
    let window = server.open_window(to_client, &theirs, MARGIN..MARGIN + len, Rights::BOTH).unwrap();
    // From here on the peak counts anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let at_first = status("VmRSS:");
    let turner = Turner::of(&server);
    let segment = [mine.segment(MARGIN..MARGIN + len)];
    done(&client.put(to_server, &segment, &window.descriptor(), 0).unwrap());
    assert_eq!(checksum(&theirs), wanted);
    mine.write(MARGIN, &vec![0; 1 << 20]).unwrap();
    mine.write(all - MARGIN - (1 << 20), &vec![0; 1 << 20]).unwrap();
    assert_ne!(checksum(&mine), wanted);
    done(&client.get(to_server, &window.descriptor(), 0, &[mine.segment(MARGIN..MARGIN + len)]).unwrap());
    assert_eq!(checksum(&mine), wanted);
    assert_eq!(checksum(&theirs), wanted);
    // Whom it is lent has the same pages in another place.
    let mapped = if lends { all as u64 } else { 0 };
    let more = status("VmHWM:") - at_first;
    let bound = mapped + 2 * FRAME_BYTES as u64 + SLACK;
    assert!(more <= bound, "{more} bytes more than before, of at most {bound}");
    let closing = Turner::of(&client);
    done(&window.close().unwrap());
    drop((closing, turner));
    assert!(!mine.is_in_use() && !theirs.is_in_use());
}

#[test]
fn one_operation_moves_a_great_memory_over_tcp() {
    one_operation_moves_it_all(parse_address("tcp://127.0.0.1:0").unwrap(), false);
}

#[test]
fn one_operation_moves_a_great_memory_over_shared_memory() {
    let folder = tempfile::tempdir().unwrap();
    one_operation_moves_it_all(Address::Shared(folder.path().join("socket")), false);
}

#[test]
fn one_operation_moves_a_great_memory_that_is_lent() {
    let folder = tempfile::tempdir().unwrap();
    one_operation_moves_it_all(Address::Shared(folder.path().join("socket")), true);
}
