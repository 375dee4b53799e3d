//! A thread that waits for calls, and whose loop fails for a while: the next call goes to another.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use byway_fabric::node::{Address, Deadline, NodeError, NodeOptions, WaitError};
use byway_reactor::IoChoice;
use byway_rpc::node::{Call, Reply, Rpc};

unsafe extern "C" {
    fn dup(from: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// The descriptors of this process for epoll.
fn epolls() -> BTreeSet<c_int> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    let epolls = open.filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains("eventpoll"))
    });
    epolls.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect()
}

/// A loop that is without its epoll until dropped.
struct Broken {
    epoll: c_int,
    saved: OwnedFd,
}

impl Broken {
    fn new(epoll: c_int) -> Self {
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the descriptor is open, and its copy is ours.
        let saved = unsafe { OwnedFd::from_raw_fd(dup(epoll)) };
        // SAFETY: both are open.
        assert!(unsafe { dup2(null.as_raw_fd(), epoll) } >= 0);
        Self { epoll, saved }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        // SAFETY: both are open.
        unsafe { dup2(self.saved.as_raw_fd(), self.epoll) };
    }
}

#[test]
fn a_thread_that_leaves_by_an_error_of_its_loop_is_given_no_call() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("s"));
    let before = epolls();
    let server = Rpc::open(&NodeOptions { io: IoChoice::Epoll, ..NodeOptions::default() }).unwrap();
    let epoll = *epolls().difference(&before).next().unwrap();
    let client = Rpc::open(&NodeOptions::default()).unwrap();
    server.node().listen(&at).unwrap();
    let to_server = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let session = client.node().connect(&at, soon()).unwrap();
        accepted.join().unwrap();
        session
    });
    let broken = Broken::new(epoll);
    let left = server.next_call(soon());
    assert!(matches!(left, Err(NodeError::Wait(WaitError::Io(_)))), "{left:?}");
    drop(broken);
    std::thread::scope(|scope| {
        scope.spawn(|| server.next_call(soon()).unwrap().token.reply(0, b"here", &[]).unwrap());
        let op = client.call(to_server, &Call::default(), soon()).unwrap();
        assert_eq!(Reply::of(op.wait(soon()).unwrap().unwrap()).unwrap().result, b"here");
    });
}
