//! Which threads of this process may be discarding pages.
//!
//! A thread whose `UFFD_EVENT_REMOVE` was read then takes the pages, and reports nothing when it has. But a thread does one
//! system call at a time: a thread that is asleep in another call, or asks for a registration, has finished that one.
//! `/proc/PID/task/TID/syscall` shows the call of sleeping threads; of running threads nothing is known. A suspicion ends
//! when each thread has been seen in another call once.

use std::collections::HashMap;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::limits::SIGHTED_THREADS_MAX;

/// The calls that throw pages away in two steps.
const DISCARDING: [i64; 2] = [libc::SYS_madvise, libc::SYS_process_madvise];

/// For each thread, the latest suspicion after which it was seen elsewhere. A thread that has another's number, since that one
/// ended, was not there before.
#[derive(Debug, Default)]
pub(super) struct Sightings {
    seen: Mutex<HashMap<String, u64>>,
}

impl Sightings {
    /// Whether each thread has been seen elsewhere since suspicion `needed`. `latest` is the latest suspicion of all
    /// before this call.
    /// The caller holds no lock, and throws nothing away itself.
    pub(super) fn are_complete(&self, needed: u64, latest: u64) -> bool {
        let me = rustix::thread::gettid().as_raw_pid().to_string();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tasks) = tasks() else { return false };
        seen.retain(|task, _| tasks.contains(task));
        let mut is_complete = true;
        for task in tasks {
            if seen.get(&task).is_some_and(|since| *since >= needed) {
                continue;
            }
            if task == me || is_elsewhere(&Path::new(TASKS).join(&task)) {
                seen.insert(task, latest);
            } else {
                is_complete = false;
            }
        }
        is_complete
    }
}

const TASKS: &str = "/proc/self/task";

/// The threads that there are, unless they are too many, or come and go at this moment: where a thread ends while the list
/// is read, the kernel goes on by counting, and leaves out another.
fn tasks() -> Option<Vec<String>> {
    let is_unchanged = |tasks: &Vec<String>| threads() == Some(tasks.len() as u64);
    let tasks = listed().filter(is_unchanged)?;
    listed().filter(is_unchanged).filter(|again| *again == tasks)
}

/// How many threads there are: each is a folder.
fn threads() -> Option<u64> {
    std::fs::metadata(TASKS).ok()?.nlink().checked_sub(FOLDER_LINKS)
}

/// What each folder has: its name, and `.` in it.
const FOLDER_LINKS: u64 = 2;

fn listed() -> Option<Vec<String>> {
    let mut tasks = Vec::new();
    for task in std::fs::read_dir(TASKS).ok()? {
        tasks.push(task.ok()?.file_name().into_string().ok()?);
        if tasks.len() > SIGHTED_THREADS_MAX {
            return None;
        }
    }
    Some(tasks)
}

/// Whether that thread is asleep in a call that throws no pages away, or gone.
fn is_elsewhere(thread: &Path) -> bool {
    match read(&thread.join("syscall")) {
        Ok(text) => match says(&text) {
            Says::Elsewhere => true,
            Says::Nothing => false,
            Says::Worker => read(&thread.join("wchan")).is_ok_and(|place| IDLE_WORKERS.contains(&place.as_str())),
        },
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
    }
}

/// Where io_uring's own threads sleep when they have nothing to do.
const IDLE_WORKERS: [&str; 2] = ["io_wq_worker", "io_sq_thread"];

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

#[derive(Debug, PartialEq, Eq)]
enum Says {
    Elsewhere,
    /// A thread of io_uring's, which might be at an `IORING_OP_MADVISE`.
    Worker,
    Nothing,
}

/// The text is `running`, or the call's number, its arguments, and the stack and instruction pointers, which workers of
/// io_uring's do not have.
fn says(text: &str) -> Says {
    let mut words = text.split_ascii_whitespace();
    match (words.next().and_then(|word| word.parse::<i64>().ok()), words.next_back()) {
        (Some(_), Some("0x0")) => Says::Worker,
        (Some(number), Some(_)) if !DISCARDING.contains(&number) => Says::Elsewhere,
        _ => Says::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_runs_or_discards_or_cannot_be_read_is_not_elsewhere() {
        assert_eq!(says("7 0x7ffe 0x1 0x3e8 0x0 0x0 0x0 0x7ffe5a8 0x7f52c1\n"), Says::Elsewhere);
        assert_eq!(says("-1 0x7ffe5a8 0x7f52c1\n"), Says::Elsewhere, "in a page fault");
        assert_eq!(says("426 0x3 0x1 0x1 0x1 0x0 0x80 0x0 0x0\n"), Says::Worker);
        let discards = format!("{} 0x7f01 0x1000 0x4 0x0 0x0 0x0 0x7ffe5a8 0x7f52c1\n", libc::SYS_madvise);
        for text in [discards.as_str(), "running\n", "", "7\n"] {
            assert_eq!(says(text), Says::Nothing, "{text:?}");
        }
    }

    #[test]
    fn a_suspicion_is_over_when_each_thread_was_seen_once_since() {
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        let (is_over, is_asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let busy = scope.spawn(|| {
                while !is_asleep.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let sightings = Sightings::default();
            assert!(!sightings.are_complete(1, 1), "a thread runs");
            is_asleep.store(true, Relaxed);
            busy.join().unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while !is_over.load(Relaxed) && std::time::Instant::now() < deadline {
                is_over.store(sightings.are_complete(1, 1), Relaxed);
            }
            assert!(is_over.load(Relaxed));
        });
    }
}
