use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::Duration;

use io_uring::opcode;

use super::{DATA_CANCEL, SUBMISSIONS, Uring};
use crate::{FramePool, Reactor, Wait};

/// How long a loop may take to notice.
const LIMIT: Duration = Duration::from_secs(20);

/// Runs a loop in a thread of its own, which is left behind if it never ends.
fn in_a_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, ended) = mpsc::channel();
    std::thread::spawn(move || send.send(body()));
    ended.recv_timeout(LIMIT).expect("it ends, and well")
}

fn can_open() -> bool {
    let can = Uring::open(&FramePool::new(1).unwrap()).is_ok();
    if !can {
        byway_skip::skip_this(byway_skip::NO_IO_URING);
    }
    can
}

#[test]
fn a_loop_whose_submissions_are_refused_for_good_fails_and_does_not_spin() {
    if !can_open() {
        return;
    }
    let reaped = in_a_thread(|| {
        let mut uring = Uring::open(&FramePool::new(1).unwrap()).unwrap();
        // From now on the ring's descriptor is another file.
        let other = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: both descriptors are open, and the ring closes its own once.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), uring.ring.as_raw_fd()) } >= 0);
        for _ in 0..=SUBMISSIONS {
            uring.push(opcode::Nop::new().build(), DATA_CANCEL);
        }
        uring.reap(&mut Vec::new(), Wait::Block).map_err(|error| error.raw_os_error())
    });
    assert_eq!(reaped, Err(Some(libc::EOPNOTSUPP)));
}

/// Refuses `io_uring_enter` to this thread, as a container's filter of system calls may.
fn refuse_to_enter() {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let is_enter = libc::sock_filter {
        jf: 1,
        ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_enter as u32)
    };
    let mut filter = [
        // The number of the call is the first word of what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is_enter,
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives until the kernel has copied it, and binds this thread alone.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

#[test]
fn where_a_ring_can_be_made_and_not_entered_a_loop_is_over_epoll() {
    if !can_open() {
        return;
    }
    let (asked, any, probed) = in_a_thread(|| {
        refuse_to_enter();
        let asked = Reactor::open(crate::IoChoice::Uring, 1).map(drop).map_err(|error| error.kind());
        let any = Reactor::open(crate::IoChoice::Auto, 1).unwrap();
        (asked, any.io().clone(), crate::probe::uring().map_err(|error| error.kind()))
    });
    assert_eq!(asked, Err(std::io::ErrorKind::PermissionDenied));
    assert_eq!(any.name, "epoll", "{}", any.reason);
    assert!(any.reason.contains("not permitted"), "{}", any.reason);
    assert_eq!(probed, Err(std::io::ErrorKind::PermissionDenied), "doctor says so");
}
