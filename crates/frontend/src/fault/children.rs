//! Which processes forked children are.
//!
//! The kernel hands over the userfaultfd of a forked child and does not say which process that is. The thread of a fault does not say so
//! either: it may be of another process, which reads the child's memory, or have its number in another PID namespace. So the child is
//! looked for among the processes that the programs have started, and is recognised by its memory: one of its pages is write-protected
//! for a moment, which `/proc/PID/pagemap` shows (Documentation/admin-guide/mm/pagemap.rst, bit 57).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use byway_reactor::userfault::dead_mans_switch::{Armed, DeadMansSwitch};
use byway_reactor::userfault::{FillError, Userfault};
use byway_service::memory::pager::{PAGE_BYTES, SpaceId};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use super::programs::is_readable;
use super::{FarJob, keeper};
use crate::limits::FAR_DESCRIPTORS_KEPT;

/// How often a child is looked for by itself: again with each slow look.
const SEARCHES_MAX: u32 = 5;

/// How long a search waits for a thread whose change of mappings has just been read.
const CHANGE_PATIENCE: Duration = Duration::from_millis(10);

/// The switch has a higher number than the userfaultfds, if there may be so many. A table of descriptors takes 8 bytes for each number.
const SWITCH_NUMBER: u64 = 1 << 14;

/// Pages that are tried at each end of the memory: one may have been dropped.
const PAGES_TRIED: usize = 2;

/// A page is write-protected by userfaultfd.
const PROTECTED: u64 = 1 << 57;

/// A forked child, until it executes a program.
#[derive(Debug, Default)]
pub(super) struct Child {
    /// The process that forked it, if that was known.
    parent: Option<u32>,
    found: Option<Found>,
    is_looked_for: bool,
    searches: u32,
}

/// The process of a forked child.
#[derive(Debug)]
pub(super) struct Found {
    number: u32,
    pidfd: OwnedFd,
    /// It is not to read zeroes when the pager and the keeper are killed at once.
    _armed: Armed,
}

impl Child {
    pub(super) fn of(parent: Option<u32>) -> Self {
        Self { parent, ..Self::default() }
    }

    /// Its process, if that is known and lives.
    pub(super) fn process(&self) -> Option<u32> {
        self.found.as_ref().filter(|found| !is_readable(&found.pidfd)).map(|found| found.number)
    }

    /// Descriptors that this process has open for it beside its userfaultfd.
    pub(super) fn descriptors(&self) -> usize {
        if self.found.is_some() { DESCRIPTORS } else { 0 }
    }

    /// Kills it. False: its process is not known.
    pub(super) fn kill(&self) -> bool {
        self.found.as_ref().is_some_and(|found| pidfd_send_signal(&found.pidfd, Signal::KILL).is_ok())
    }
}

/// Descriptors of a child that was found.
const DESCRIPTORS: usize = 2;

/// What a look at a process came to.
#[derive(Debug)]
enum Look {
    Same(OwnedFd),
    Other,
    /// The child changes its mappings: to be looked at later.
    Changing,
}

/// Whether a process has the memory that is watched, of which this page is present.
fn look(userfault: &Userfault, process: u32, page: u64) -> Look {
    let Some(pid) = Pid::from_raw(process.cast_signed()) else { return Look::Other };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return Look::Other };
    let Ok(pagemap) = File::open(format!("/proc/{process}/pagemap")) else { return Look::Other };
    // It lives: so the file is of the same process.
    if is_readable(&pidfd) {
        return Look::Other;
    }
    let is_protected = || {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, page * 8).is_ok_and(|()| u64::from_le_bytes(entry) & PROTECTED != 0)
    };
    let start = page as usize * PAGE_BYTES;
    let mut shown = [false; 3];
    for (protect, shown) in [false, true, false].into_iter().zip(&mut shown) {
        match userfault.write_protect(start..start + PAGE_BYTES, protect, protect) {
            Ok(()) => *shown = is_protected(),
            // If the page stays protected, a write to it raises a fault, and the answer lifts the protection.
            Err(FillError::Changing) => return Look::Changing,
            Err(_) => return Look::Other,
        }
    }
    if shown == [false, true, false] { Look::Same(pidfd) } else { Look::Other }
}

/// The children of a process, by /proc.
pub(super) fn children_of(process: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// All processes that the programs have started.
fn descendants() -> Vec<u32> {
    let all = keeper::descendants(getpid()).unwrap_or_default();
    all.into_iter().map(|process| process.as_raw_nonzero().get().unsigned_abs()).collect()
}

impl FarJob {
    /// Looks for the processes of children that were forked lately; for those that were not found among the children of their parents, among
    /// all processes of the job.
    pub(super) fn find_children(&mut self, everywhere: bool) {
        let mut all = None;
        for index in 0..self.processes.len() {
            let process = &mut self.processes[index];
            let Some(child) = process.child_mut() else { continue };
            let is_new = !std::mem::replace(&mut child.is_looked_for, true);
            if child.found.is_some() || child.searches >= SEARCHES_MAX || !(is_new || everywhere) {
                continue;
            }
            let parent = child.parent;
            // Later, when one of its pages is here.
            if self.pager.some_local_pages(process.space, 1).is_empty() {
                continue;
            }
            if let Some(child) = self.processes[index].child_mut() {
                child.searches += 1;
            }
            let candidates = match parent.filter(|_| is_new) {
                Some(parent) => children_of(parent),
                None => all.get_or_insert_with(descendants).clone(),
            };
            self.find_child(index, &candidates);
        }
    }

    /// Finds the process of a child that has just forked, which waits no more and may change its mappings for a moment still.
    pub(super) fn find_forking_child(&mut self, space: SpaceId) {
        let Some(index) = self.processes.iter().position(|process| process.space == space) else { return };
        if self.processes[index].number().is_some() || self.processes[index].helped.is_some() {
            return;
        }
        let (candidates, until) = (descendants(), Instant::now() + CHANGE_PATIENCE);
        while self.find_child(index, &candidates) && Instant::now() < until {
            std::thread::yield_now();
        }
    }

    /// Whether it may be found later, since the child changes its mappings now.
    fn find_child(&mut self, index: usize, candidates: &[u32]) -> bool {
        let taken = self.processes.iter().map(super::Process::descriptors).sum::<usize>() + FAR_DESCRIPTORS_KEPT;
        if (taken + DESCRIPTORS) as u64 > super::programs::descriptors_max() {
            return false;
        }
        let process = &self.processes[index];
        if process.userfault.is_gone() {
            return false;
        }
        let pages = self.pager.some_local_pages(process.space, PAGES_TRIED);
        let known: Vec<u32> = self.processes.iter().filter_map(super::Process::number).collect();
        let candidates: Vec<u32> = candidates.iter().copied().filter(|candidate| !known.contains(candidate)).collect();
        // Each process by one page, and only then by the next: a look at another process costs as much.
        for (page, candidate) in pages.iter().flat_map(|page| candidates.iter().map(move |candidate| (page, candidate)))
        {
            match look(&process.userfault, *candidate, *page) {
                Look::Same(pidfd) => {
                    let found = self.arm(*candidate, pidfd);
                    if let Some(child) = self.processes[index].child_mut() {
                        child.found = found;
                    }
                    return false;
                }
                Look::Changing => return true,
                Look::Other => {}
            }
        }
        false
    }

    fn arm(&mut self, number: u32, pidfd: OwnedFd) -> Option<Found> {
        let armed = self.try_arm(Pid::from_raw(number.cast_signed())?);
        if let Err(error) = &armed {
            tracing::warn!(%error, process = number, "a forked child cannot be bound to byway far");
        }
        // It lives: so the switch is for the same process.
        let armed = armed.ok().filter(|_| !is_readable(&pidfd))?;
        Some(Found { number, pidfd, _armed: armed })
    }

    fn try_arm(&mut self, process: Pid) -> Result<Armed, Errno> {
        if let Some(switch) = &self.switch {
            return switch.arm(process);
        }
        let highest = super::programs::descriptors_max().min(SWITCH_NUMBER) - 1;
        self.switch.insert(DeadMansSwitch::new(highest as i32)?).arm(process)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use byway_reactor::userfault::{Features, Modes};
    use byway_skip::{SkipReason, skip_this};
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    use super::*;

    #[test]
    fn a_process_is_known_by_its_memory() {
        let Ok(userfault) = Userfault::open(Features::WRITE_PROTECT, false) else {
            return skip_this(SkipReason::Machine("no userfaultfd with write protection"));
        };
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which stays until the test ends.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, rights, MapFlags::PRIVATE) }.unwrap();
        // SAFETY: the page is this test's.
        unsafe { at.cast::<u8>().write(1) };
        let start = at.expose_provenance();
        // SAFETY: no page is missing.
        unsafe { userfault.register(start..start + PAGE_BYTES, Modes::WRITE_PROTECT) }.unwrap();
        let page = (start / PAGE_BYTES) as u64;
        let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let looks = [std::process::id(), other.id()].map(|process| look(&userfault, process, page));
        drop(other.stdin.take());
        other.wait().unwrap();
        assert!(matches!(looks, [Look::Same(_), Look::Other]), "{looks:?}");
        // SAFETY: as before: the protection is lifted again, or this would wait for ever.
        unsafe { at.cast::<u8>().write(2) };
    }
}
