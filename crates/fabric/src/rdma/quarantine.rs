//! Memory of devices that the kernel has taken away.
//!
//! When a device is unplugged, the kernel itself ends a process's use of it, and later calls of the process fail with `EIO`
//! (ibv_open_device(3); `RDMAV_ALLOW_DISASSOC_DESTROY` would make them succeed). So `EIO` of a destroying call means that
//! the object is destroyed, or is about to be: the kernel refuses calls a little before it has ended all use. The memory is
//! kept in quarantine for that time, and then belongs to its owner again. A driver may return `EIO` for other reasons. So
//! the device is queried as well, and only a device that answers `EIO` to that too counts as taken away.

use std::any::Any;

use byway_reactor::Errno;

/// The result of a call that ends something on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The device no longer uses the memory.
    Ended,
    /// The kernel has taken the device away, or is about to.
    TakenAway,
    /// The device may still access the memory.
    Refused,
}

impl Ending {
    /// Judges the number that the verbs returned, and whether the device still answers other calls.
    pub(super) fn of(status: i32, is_taken_away: impl FnOnce() -> bool) -> Self {
        match status {
            0 => Self::Ended,
            status if status == Errno::IO.raw_os_error() && is_taken_away() => Self::TakenAway,
            _ => Self::Refused,
        }
    }
}

/// Memory that is kept until no device can access it.
#[derive(Default)]
pub(super) struct Quarantine {
    new: Vec<Box<dyn Any>>,
    old: Vec<Box<dyn Any>>,
}

impl Quarantine {
    pub(super) fn keep(&mut self, memory: impl Any) {
        self.new.push(Box::new(memory));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.new.is_empty() && self.old.is_empty()
    }

    /// Another pause is over: gives what was here during all of it. To be dropped when `self` is not borrowed any more, since
    /// the end of a registration may add more.
    #[must_use]
    pub(super) fn pause_over(&mut self) -> Vec<Box<dyn Any>> {
        std::mem::replace(&mut self.old, std::mem::take(&mut self.new))
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{Frame, Mapping};

    use super::super::error::WorkError;
    use super::super::memory::{Payload, Segment};
    use super::super::operations::{Completion, Kind};
    use super::*;

    #[test]
    fn only_what_the_kernel_says_of_a_device_that_it_took_away_is_an_end() {
        for is_taken_away in [false, true] {
            assert_eq!(Ending::of(0, || is_taken_away), Ending::Ended);
            let said = if is_taken_away { Ending::TakenAway } else { Ending::Refused };
            assert_eq!(Ending::of(5, || is_taken_away), said);
            for status in [-1, 12, 16, 22] {
                assert_eq!(Ending::of(status, || is_taken_away), Ending::Refused, "{status}");
            }
        }
    }

    #[test]
    fn memory_of_a_device_that_was_taken_away_is_free_after_a_whole_pause_and_not_given_up() {
        let memory = Mapping::new(4096).unwrap();
        // SAFETY: no references to the memory are made.
        let frame = unsafe { Frame::over(&memory, 0, 4096) };
        let completion = Completion {
            token: 1,
            kind: Kind::Read,
            queue_pair: 3,
            result: Err(WorkError::Flushed),
            immediate: None,
            payload: Payload::from(Segment::unregistered(frame)),
        };
        let mut quarantine = Quarantine::default();
        let ended = completion.quarantine(&mut quarantine);
        assert!(matches!(ended.payload, Payload::GivenUp), "whoever waits hears of the end at once");
        drop(quarantine.pause_over());
        assert!(!quarantine.is_empty() && memory.uses() > 0, "of that pause it may have seen only the end");
        drop(quarantine.pause_over());
        assert!(quarantine.is_empty() && memory.uses() == 0 && !memory.is_given_up());
    }
}
