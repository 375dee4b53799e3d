//! Whether a thread of this process may be throwing pages away at this moment.
//!
//! A thread whose `UFFD_EVENT_REMOVE` was read goes on to take the pages, and tells nobody when it has. But a thread does one
//! system call at a time: one that is found asleep in another call has finished that one. `/proc/PID/task/TID/syscall`
//! says so of threads that sleep; of those that run, nothing is known.

use std::io::Read;

use crate::limits::QUIESCENCE_THREADS_MAX;

/// The calls that throw pages away in two steps.
const DISCARDING: [i64; 2] = [libc::SYS_madvise, libc::SYS_process_madvise];

/// Whether each thread but the caller's has been seen doing something else. `false` says nothing.
pub(super) fn nobody_discards() -> bool {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return false };
    let me = rustix::thread::gettid().as_raw_pid().to_string();
    let mut count = 0;
    for task in tasks {
        let Ok(task) = task else { return false };
        count += 1;
        if count > QUIESCENCE_THREADS_MAX {
            return false;
        }
        if task.file_name().to_str() != Some(&me) && !is_elsewhere(&task.path().join("syscall")) {
            return false;
        }
    }
    count > 0
}

/// Whether that thread is asleep in a call that throws no pages away, or gone.
fn is_elsewhere(path: &std::path::Path) -> bool {
    let mut text = String::new();
    match std::fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => says_elsewhere(&text),
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
    }
}

/// `running`, or the call's number, its arguments, and the stack and instruction pointers. A worker of io_uring's has no
/// such pointers, and might be at an `IORING_OP_MADVISE`.
fn says_elsewhere(text: &str) -> bool {
    let mut words = text.split_ascii_whitespace();
    let Some(number) = words.next().and_then(|word| word.parse::<i64>().ok()) else { return false };
    let is_of_user = words.next_back().is_some_and(|pointer| pointer != "0x0");
    is_of_user && !DISCARDING.contains(&number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_runs_or_discards_or_cannot_be_read_is_not_elsewhere() {
        assert!(says_elsewhere("7 0x7ffe 0x1 0x3e8 0x0 0x0 0x0 0x7ffe5a8 0x7f52c1\n"));
        assert!(says_elsewhere("-1 0x7ffe5a8 0x7f52c1\n"), "in a page fault");
        let discards = format!("{} 0x7f01 0x1000 0x4 0x0 0x0 0x0 0x7ffe5a8 0x7f52c1\n", libc::SYS_madvise);
        assert!(!says_elsewhere(&discards));
        for text in ["running\n", "", "0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n"] {
            assert!(!says_elsewhere(text), "{text:?}");
        }
    }
}
