//! How soon a thread runs once it wakes, beside computing threads.
//!
//! A thread that waits for a node (in `wait`, `receive`, `next_call`, or in a poll of its own) runs a few microseconds for
//! each event, and has computing time in store. Still the kernel does not preempt a computing thread before that thread's
//! slice is used up (`sched(7)`; the fair scheduler keeps a thread running until its slice ends or it has had its share):
//! some milliseconds by default, for every call that comes while all cores are busy. A thread that asks for shorter slices
//! than the running one is scheduled sooner, and gets no larger share. No privilege is needed. `byway bench figures --only
//! responsiveness` measures the effect.

use std::time::Duration;

/// The shortest slice that the kernel gives, and what a thread that answers should ask for.
pub const SLICE_MIN: Duration = Duration::from_micros(100);
/// The longest slice that the kernel gives.
pub const SLICE_MAX: Duration = Duration::from_millis(100);

/// Why a thread keeps its slice.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// The kernel has no slices of a thread's own (before 6.12), or gave another than was asked for.
    #[error("this kernel (Linux before 6.12, or another scheduler) gives threads no slices of their own")]
    Unsupported,
    /// The thread is scheduled by another policy than those of the fair scheduler (`SCHED_OTHER`, `SCHED_BATCH`): a real-time thread
    /// needs none.
    #[error("the thread is not scheduled by the fair scheduler: it has no slice")]
    OtherPolicy,
    /// The kernel refused it, as a container's seccomp filter may.
    #[error("sched_setattr: {0}")]
    Refused(#[from] std::io::Error),
}

/// The kernel's `struct sched_attr`, version 0 (`sched_setattr(2)`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_nanos: u64,
    deadline_nanos: u64,
    period_nanos: u64,
}

const ATTRIBUTES_BYTES: u32 = size_of::<Attributes>() as u32;
const _: () = assert!(ATTRIBUTES_BYTES == 48, "SCHED_ATTR_SIZE_VER0");

/// Asks for slices of this length for the calling thread, and for those that it starts from now on. Held to [`SLICE_MIN`] and
/// [`SLICE_MAX`]. The thread's policy and its nice value stay.
///
/// For threads that wait for a node and do little for each event. One that computes runs as much as before, with more
/// switches.
///
/// # Errors
/// See [`SliceError`]: the thread runs as before.
pub fn set_slice(slice: Duration) -> Result<(), SliceError> {
    let nanos = slice.clamp(SLICE_MIN, SLICE_MAX).as_nanos() as u64;
    let mut attributes = attributes()?;
    if !matches!(attributes.policy.cast_signed(), libc::SCHED_OTHER | libc::SCHED_BATCH) {
        return Err(SliceError::OtherPolicy);
    }
    attributes.runtime_nanos = nanos;
    attributes.flags &= libc::SCHED_FLAG_RESET_ON_FORK as u64;
    // SAFETY: the kernel reads `size` bytes, which are those of the struct, and changes the calling thread's scheduling only.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // Kernels without slices take the number and forget it.
    if slice_of(self::attributes()?) == Some(nanos) { Ok(()) } else { Err(SliceError::Unsupported) }
}

/// The slice of the calling thread; `None` where the kernel has none, or does not say.
pub fn slice() -> Option<Duration> {
    slice_of(attributes().ok()?).map(Duration::from_nanos)
}

fn slice_of(attributes: Attributes) -> Option<u64> {
    Some(attributes.runtime_nanos).filter(|nanos| *nanos > 0)
}

fn attributes() -> std::io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes at most `ATTRIBUTES_BYTES` bytes, which are those of the struct, and any bytes are numbers.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, ATTRIBUTES_BYTES, 0) };
    if done == 0 { Ok(attributes) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a thread of its own: the test's own keeps what it has.
    fn apart<T: Send>(act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(act).join().unwrap())
    }

    #[test]
    fn a_thread_gets_the_slice_it_asks_for_and_keeps_the_rest() {
        let before = slice();
        let after = apart(|| {
            let (was, set) = (attributes().unwrap(), set_slice(Duration::from_micros(300)));
            (was, set.map(|()| attributes().unwrap()))
        });
        match after {
            (was, Ok(now)) => {
                assert_eq!(now.runtime_nanos, 300_000);
                assert_eq!((now.policy, now.nice), (was.policy, was.nice));
            }
            // An old kernel, or a filter: said, not passed over.
            (_, Err(error)) => assert!(matches!(error, SliceError::Unsupported | SliceError::Refused(_)), "{error}"),
        }
        assert_eq!(slice(), before, "other threads keep theirs");
    }

    #[test]
    fn lengths_are_held_to_what_the_kernel_gives() {
        for (asked, given) in [(Duration::ZERO, SLICE_MIN), (Duration::from_secs(9), SLICE_MAX)] {
            let set = apart(|| set_slice(asked).map(|()| slice()));
            assert!(!matches!(&set, Ok(slice) if *slice != Some(given)), "{set:?}");
        }
    }
}
