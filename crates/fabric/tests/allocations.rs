//! Puts and gets of nodes in a steady state: what they take from the allocator. A program of its own, whose allocator counts.

mod turned_pair;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use byway_fabric::node::{Address, NodeOptions, Op, Rights, parse_address};
use byway_reactor::{IoChoice, Reactor};
use turned_pair::Pair;

/// Operations until all tables and lists have their size, and then those that are counted.
const WARM_UP: usize = 500;
const COUNTED: usize = 500;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: the system's allocator does it all; this counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: by the caller's word.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's word.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of puts and of gets of that many bytes.
fn allocations(address: &Address, io: IoChoice, lends: bool, len: usize) -> [u64; 2] {
    // The other tests of this program allocate too.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pair = Pair::new(address, &NodeOptions { io, frame_bytes: 16 << 20, ..NodeOptions::default() });
    let theirs = if lends { pair.server.register_shared(len) } else { pair.server.register(len) }.unwrap();
    let mine = pair.client.register(len).unwrap();
    let window = pair.server.open_window(pair.to_client, &theirs, 0..len, Rights::BOTH).unwrap();
    let descriptor = window.descriptor();
    let put = || pair.client.put(pair.to_server, &[mine.segment(0..len)], &descriptor, 0).unwrap();
    let get = || pair.client.get(pair.to_server, &descriptor, 0, &[mine.segment(0..len)]).unwrap();
    let count = |begin: &dyn Fn() -> Op| {
        (0..WARM_UP).for_each(|_| pair.end(&begin()));
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..COUNTED).for_each(|_| pair.end(&begin()));
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    let counted = [count(&put), count(&get)];
    let close = window.close().unwrap();
    pair.end(&close);
    counted
}

fn nothing_is_allocated(address: &Address, lends: bool) {
    for io in [IoChoice::Epoll, IoChoice::Uring] {
        if io == IoChoice::Uring && Reactor::open_for_threads(io, 1).is_err() {
            byway_skip::skip_this(byway_skip::NO_IO_URING);
            continue;
        }
        for len in [64, 4096, 1 << 20] {
            let counted = allocations(address, io, lends, len);
            assert_eq!(counted, [0, 0], "{COUNTED} puts and {COUNTED} gets of {len} bytes, {io:?}");
        }
    }
}

#[test]
fn puts_and_gets_over_tcp_allocate_nothing() {
    nothing_is_allocated(&parse_address("tcp://127.0.0.1:0").unwrap(), false);
}

#[test]
fn puts_and_gets_over_unix_sockets_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Unix(folder.path().join("socket")), false);
}

#[test]
fn puts_and_gets_through_rings_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Shared(folder.path().join("socket")), false);
}

#[test]
fn puts_and_gets_in_lent_memory_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    nothing_is_allocated(&Address::Shared(folder.path().join("socket")), true);
}
