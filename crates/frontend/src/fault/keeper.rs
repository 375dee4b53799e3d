//! The keeper: a second process that only keeps the pager's descriptors open.
//!
//! When the last descriptor of a userfaultfd is closed, the kernel stops watching that program's memory: pages that were
//! moved out read as zeroes. So the userfaultfds must stay open as long as a paged program runs, also if the pager is
//! killed. The two processes share one table of descriptors; if one ends, the other ends all programs and then itself.
//! Programs are found as descendants: both processes adopt programs whose parent has ended (`PR_SET_CHILD_SUBREAPER`).
//! The keeper has another name than the pager, so `killall byway` and `pkill byway` do not kill both.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::time::Duration;

use byway_reactor::userfault::split::fork_with_shared_descriptors;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_child_subreaper, wait};
use rustix::thread::set_name;

/// Which of the two processes this is.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// The keeper, and its child, the pager.
    Keeper(Pid),
    /// The pager.
    Pager(Keeper),
}

/// The keeper, for the pager.
#[derive(Clone, Copy, Debug)]
pub struct Keeper(Pid);

/// Makes two processes of this one, which must have one thread: the keeper, which goes on as this process, and the pager.
///
/// # Errors
/// The kernel's; `EBUSY`: there are more threads.
pub fn split() -> std::io::Result<Side> {
    let keeper = getpid();
    let child = fork_with_shared_descriptors()?;
    set_child_subreaper(Some(keeper))?;
    let Some(pager) = child else { return Ok(Side::Pager(Keeper(keeper))) };
    set_name(KEEPER_NAME)?;
    Ok(Side::Keeper(pager))
}

impl Keeper {
    /// Whether it lives.
    pub fn is_alive(&self) -> bool {
        getppid() == Some(self.0)
    }
}

/// Descriptors for [`Spare::end_descendants`], which reads /proc also when the table, which both processes share, is full.
#[derive(Debug)]
pub struct Spare([File; SPARE_DESCRIPTORS]);

/// The keeper's name for `ps`, `killall` and `pkill`.
const KEEPER_NAME: &CStr = c"far-keeper";

/// /proc, a file below it, and one more.
const SPARE_DESCRIPTORS: usize = 3;
/// How long until /proc is read again where it could not be.
const PAUSE: Duration = Duration::from_millis(10);

impl Spare {
    /// Takes them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take() -> std::io::Result<Self> {
        let mut all = Vec::with_capacity(SPARE_DESCRIPTORS);
        for _ in 0..SPARE_DESCRIPTORS {
            all.push(File::open("/proc/self/stat")?);
        }
        Ok(Self(all.try_into().expect("so many were opened")))
    }

    /// As [`end_descendants`].
    pub fn end_descendants(self) {
        drop(self.0);
        end_descendants();
    }
}

/// Kills all descendants of this process, and waits until none is left. Tries again while /proc cannot be read: this process keeps the
/// descriptors without which they would read zeroes.
#[expect(clippy::disallowed_methods, reason = "nothing tells when /proc can be read again")]
pub fn end_descendants() {
    loop {
        match descendants(getpid()) {
            Ok(left) if left.is_empty() => return,
            Ok(left) => {
                for process in left {
                    let _ = kill_process(process, Signal::KILL);
                }
                // Whose parent has ended is a child of this process, so one of its children ends as long as any is left.
                let _ = wait(WaitOptions::empty());
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Sends a signal to all descendants of this process.
///
/// # Errors
/// /proc cannot be read.
pub fn signal_descendants(signal: Signal) -> std::io::Result<()> {
    for process in descendants(getpid())? {
        let _ = kill_process(process, signal);
    }
    Ok(())
}

/// By /proc: the children of a process, their children, and so on.
///
/// # Errors
/// /proc cannot be read.
pub fn descendants(of: Pid) -> std::io::Result<Vec<Pid>> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = match std::fs::read_to_string(entry.path().join("stat")) {
            Ok(stat) => stat,
            // It has ended meanwhile.
            Err(error)
                if [Some(Errno::NOENT.raw_os_error()), Some(Errno::SRCH.raw_os_error())]
                    .contains(&error.raw_os_error()) =>
            {
                continue;
            }
            Err(error) => return Err(error),
        };
        if let Some(parent) = parent(&stat) {
            children.entry(parent).or_default().push(process);
        }
    }
    let (mut found, mut index) = (vec![of.as_raw_nonzero().get()], 0);
    while let Some(process) = found.get(index) {
        found.extend(children.remove(process).unwrap_or_default());
        index += 1;
    }
    Ok(found[1..].iter().filter_map(|process| Pid::from_raw(*process)).collect())
}

/// Of a line of /proc/PID/stat: the second word behind the name, which stands in parentheses and may have some itself.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_parentheses_hides_no_parent() {
        assert_eq!(parent("77 (a) 1 (b)) S 42 77 77 0"), Some(42));
        assert_eq!(parent("77"), None);
    }

    #[test]
    fn children_of_children_are_descendants() {
        let script = "sleep 1000 & echo $!; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(shell.stdout.take().unwrap()), &mut line).unwrap();
        let sleeper = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        let found = descendants(getpid()).unwrap();
        let _ = kill_process(sleeper, Signal::KILL);
        shell.wait().unwrap();
        assert!(found.contains(&sleeper) && found.contains(&Pid::from_child(&shell)), "{found:?}");
    }
}
