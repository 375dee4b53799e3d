//! One address space that is paged: its userfaultfd, and the helper in it.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use byway_reactor::userfault::helper::{Hello, MOVES_MAX, Outcome, PROTECTED, WORDS_MAX, hear, say};
use byway_reactor::userfault::{FillError, Modes, Userfault};
use byway_service::memory::pager::{FillOutcome, Moved, PAGE_BYTES, PageId, SpaceId};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::children::Child;
use super::maps::{self, Candidate, Proc};

/// Ranges that are remembered one by one before they are looked through.
const DROPPED_MAX: usize = 256;

/// A program, or a forked child of one until it executes a program.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) space: SpaceId,
    pub(super) userfault: Userfault,
    /// `None` of a forked child.
    pub(super) helped: Option<Helped>,
    /// Of use to a forked child alone.
    child: Child,
    /// Since when a fork of it waits for a descriptor of this process.
    pub(super) fork_waits: Option<Instant>,
    /// What was wiped when this child was forked, and will be of its children, if nothing newer is known.
    wiped: Vec<Range<usize>>,
}

/// A program with a helper.
#[derive(Debug)]
pub(super) struct Helped {
    pub(super) process: u32,
    pub(super) pidfd: OwnedFd,
    pub(super) proc: Proc,
    /// `None`: the helper is gone; faults are answered still.
    pub(super) socket: Option<OwnedFd>,
    /// What is the helper's, and what of the program is to stay.
    own: [Range<usize>; 3],
    /// Since when the helper is gone, while that is not explained.
    pub(super) ended: Option<Instant>,
    /// Frames of the command under way.
    pub(super) commanded: Vec<u32>,
    /// Ranges that `madvise` has dropped lately, of which pages may be there still.
    dropped: Vec<Range<usize>>,
    /// Mapped bytes when its mappings were last looked at.
    pub(super) mapped_bytes: usize,
}

impl Process {
    /// Descriptors that this process has open for a program with a helper.
    pub(super) const DESCRIPTORS: usize = 5;

    /// Descriptors that this process has open for it.
    pub(super) fn descriptors(&self) -> usize {
        if self.helped.is_some() { Self::DESCRIPTORS } else { 1 + self.child.descriptors() }
    }

    pub(super) fn of_program(
        space: SpaceId,
        hello: &Hello,
        userfault: Userfault,
        socket: OwnedFd,
    ) -> std::io::Result<Self> {
        // The kernel's word, which holds for other PID namespaces too.
        let pid = socket_peercred(&socket)?.pid;
        let process = pid.as_raw_nonzero().get().unsigned_abs();
        let range = |range: &Range<u64>| range.start as usize..range.end as usize;
        let own = [range(&hello.scratch), range(&hello.stack), range(&hello.thread)];
        if own[0].len() != MOVES_MAX * PAGE_BYTES {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: the scratch pages are of another process, whose helper alone uses them.
        unsafe { userfault.register(own[0].clone(), Modes::MISSING) }?;
        let (pidfd, proc) = (pidfd_open(pid, PidfdFlags::empty())?, Proc::open(process)?);
        // Its socket is open after that: so it lives, and the number was its own.
        let mut words = [0; WORDS_MAX];
        if hear(&socket, &mut words, false) != Err(Errno::AGAIN) {
            return Err(Errno::SRCH.into());
        }
        let helped = Helped {
            process,
            pidfd,
            proc,
            socket: Some(socket),
            own,
            ended: None,
            commanded: Vec::new(),
            dropped: Vec::new(),
            mapped_bytes: 0,
        };
        let child = Child::default();
        Ok(Self { space, userfault, helped: Some(helped), child, fork_waits: None, wiped: Vec::new() })
    }

    /// A child that a process has forked, if it is known which.
    pub(super) fn of_child(
        space: SpaceId,
        userfault: Userfault,
        wiped: Vec<Range<usize>>,
        parent: Option<u32>,
    ) -> Self {
        Self { space, userfault, helped: None, child: Child::of(parent), fork_waits: None, wiped }
    }

    /// The number of its process, if that is known.
    pub(super) fn number(&self) -> Option<u32> {
        self.helped.as_ref().map(|helped| helped.process).or_else(|| self.child.process())
    }

    /// `None` of a program with a helper.
    pub(super) fn child_mut(&mut self) -> Option<&mut Child> {
        self.helped.is_none().then_some(&mut self.child)
    }

    /// Its helper has gone, and what that means is not known yet.
    pub(super) fn is_ending(&self) -> bool {
        self.helped.as_ref().is_some_and(|helped| helped.ended.is_some())
    }

    /// Kills it. False: it is a forked child whose process is not known, or it has ended.
    pub(super) fn kill(&self) -> bool {
        match &self.helped {
            Some(helped) => pidfd_send_signal(&helped.pidfd, Signal::KILL).is_ok(),
            None => self.child.kill(),
        }
    }

    /// The ranges that a child which is forked now has without their contents. Of a process that is not known: what was so of itself.
    pub(super) fn wiped_on_fork(&self) -> Vec<Range<usize>> {
        let found = self.number().and_then(|process| maps::wiped_on_fork(process).ok());
        // It lives: so the number was its own.
        found.filter(|_| self.number().is_some()).unwrap_or_else(|| self.wiped.clone())
    }

    /// Has missing pages of a mapping told, and of what it has grown by since it was looked at: `mremap` of a mapping that is watched in
    /// part is refused, and its program would find no memory.
    pub(super) fn watch(&self, candidate: &Candidate) -> Result<(), Errno> {
        let register = |range| {
            // SAFETY: the pages are of another process. What it finds there is what it left there: see the pager.
            unsafe { self.userfault.register(range, Modes::MISSING.and(Modes::WRITE_PROTECT)) }
        };
        let Candidate { range, grows_to } = candidate;
        // Something else may lie there by now, which cannot be watched.
        register(range.start..*grows_to).or_else(|_| register(range.clone()))
    }

    /// Whether a mapping is watched, as far as can be said now. One page tells, the first, which is write-protected or not: a mapping is
    /// watched as a whole.
    pub(super) fn is_watched(&self, mapping: Range<usize>, is_protected: bool) -> bool {
        let page = mapping.start..mapping.start + PAGE_BYTES;
        // Nothing changes by it.
        self.userfault.write_protect(page, is_protected, true) != Err(FillError::NoMapping)
    }

    /// Makes accesses to a page end in SIGBUS.
    pub(super) fn poison(&self, at: PageId) -> FillOutcome {
        let start = at.page as usize * PAGE_BYTES;
        match self.userfault.poison(start..start + PAGE_BYTES) {
            Ok(()) => FillOutcome::Done(1),
            Err(partly) => match partly.error {
                FillError::Changing => FillOutcome::Changing,
                FillError::Exists => FillOutcome::Exists,
                _ => FillOutcome::NoMapping,
            },
        }
    }

    /// Lifts the write protection of a page, and wakes the threads that wait for it.
    pub(super) fn unprotect(&self, at: PageId) -> FillOutcome {
        let start = at.page as usize * PAGE_BYTES;
        match self.userfault.write_protect(start..start + PAGE_BYTES, false, false) {
            Ok(()) => FillOutcome::Done(1),
            Err(FillError::NoMapping | FillError::Gone) => FillOutcome::NoMapping,
            Err(_) => FillOutcome::Changing,
        }
    }

    /// Fills pages from `at` on, perhaps write-protected.
    pub(super) fn fill(&self, at: PageId, bytes: &[u8], protect: bool) -> FillOutcome {
        match self.userfault.copy(at.page as usize * PAGE_BYTES, bytes, protect) {
            Ok(()) => FillOutcome::Done((bytes.len() / PAGE_BYTES) as u64),
            Err(partly) if partly.bytes > 0 => FillOutcome::Done((partly.bytes / PAGE_BYTES) as u64),
            Err(partly) => match partly.error {
                FillError::Exists => FillOutcome::Exists,
                FillError::NoMapping | FillError::Gone => FillOutcome::NoMapping,
                FillError::Changing => FillOutcome::Changing,
                error => {
                    tracing::warn!(%error, page = at.page, "cannot fill a page; retrying");
                    FillOutcome::Changing
                }
            },
        }
    }
}

impl Helped {
    /// Whether no move of its pages is under way.
    pub(super) fn has_no_moves(&self) -> bool {
        self.commanded.is_empty() || self.socket.is_none()
    }

    /// `madvise` drops a range, or frees it: which of the two the kernel does not say.
    pub(super) fn note_dropped(&mut self, range: Range<usize>) {
        self.dropped.push(range);
        if self.dropped.len() > DROPPED_MAX {
            let hull = self.dropped.drain(..).reduce(|hull, next| hull.start.min(next.start)..hull.end.max(next.end));
            self.dropped.extend(hull);
        }
    }

    /// Pages that are there in the ranges that were dropped since the last call.
    pub(super) fn take_present_of_dropped(&mut self) -> Vec<Range<usize>> {
        let dropped = std::mem::take(&mut self.dropped);
        dropped.into_iter().filter_map(|range| self.proc.pages(range).ok()).flat_map(|pages| pages.present).collect()
    }

    /// The mappings that can be paged.
    pub(super) fn candidates(&self) -> std::io::Result<Vec<Candidate>> {
        self.proc.candidates(&self.own)
    }

    /// Has the helper move pages out. False: it is gone.
    pub(super) fn command(&mut self, moves: &[(PageId, u32, bool)]) -> bool {
        let mut words = [0; WORDS_MAX];
        for ((at, frame, is_protected), pair) in moves.iter().zip(words.as_chunks_mut::<2>().0) {
            let protected = if *is_protected { PROTECTED } else { 0 };
            *pair = [(at.page * PAGE_BYTES as u64) | protected, (*frame).into()];
        }
        let said = self.socket.as_ref().is_some_and(|socket| say(socket, &words[..2 * moves.len()], None).is_ok());
        if said {
            self.commanded.extend(moves.iter().map(|(_, frame, _)| frame));
        }
        said
    }

    /// What came of a command, if it has ended. An error: the helper is gone.
    pub(super) fn answers(&mut self) -> Result<Vec<(u32, Outcome)>, Errno> {
        let Some(socket) = &self.socket else { return Ok(Vec::new()) };
        let mut words = [0; WORDS_MAX];
        let count = match hear(socket.as_fd(), &mut words, false) {
            Ok(0) => return Err(Errno::PIPE),
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let pairs = words.as_chunks::<2>().0[..count / 2].iter();
        let answers: Vec<_> = pairs.map(|[frame, outcome]| (*frame as u32, Outcome::of(*outcome))).collect();
        if !answers.iter().map(|(frame, _)| frame).eq(&self.commanded) {
            return Err(Errno::PROTO);
        }
        self.commanded.clear();
        Ok(answers)
    }
}

pub(super) fn moved(outcome: Outcome) -> Moved {
    match outcome {
        Outcome::Out => Moved::Out,
        Outcome::Zeroes => Moved::Zeroes,
        Outcome::Missing => Moved::Missing,
        Outcome::Stays => Moved::Stays,
        Outcome::Unwatched => Moved::Unwatched,
    }
}
