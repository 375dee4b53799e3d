//! The helper of a pager in a program whose memory is paged: a thread that moves pages out.
//!
//! Moving pages ([`Userfault::move_pages`]) works only in their own process. The pager, another process that has the
//! userfaultfd, does everything else. The two share a socket and *frames*, an anonymous file. The helper moves a page to a
//! scratch page of its own, copies it to a frame, and reports the result. A page is never in two places: a write that comes
//! between finds the page gone, faults, and waits for the pager.
//!
//! The helper's descriptors are in a table of their own ([`Helper::take_own_descriptors`]): the program neither sees nor
//! closes them.
//!
//! The helper's loop uses no memory that could be paged (its stack, the scratch pages and the frames are not paged),
//! allocates nothing, takes no lock, and uses only system calls, because the program's threads may hold any lock while they
//! wait for a page.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, send, sendmsg,
};

use super::{FillError, Modes, Userfault};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Moves of one command.
pub const MOVES_MAX: usize = 64;

/// Words of a message.
pub const WORDS_MAX: usize = 2 * MOVES_MAX;

/// In a command, with a page's address: the page is write-protected, and is to stay so if it is not moved.
pub const PROTECTED: u64 = 1;

/// The environment variable that names the pager's socket.
pub const SOCKET_VARIABLE: &str = "BYWAY_FAR_SOCKET";

/// The one word of who asks for the job's state, instead of a [`Hello`]. The answer is JSON.
pub const STATUS_REQUEST: u64 = 0x0001_5453_4659_5742;

/// The first word of a [`Hello`], with the version of what is said here.
const MAGIC: u64 = 0x0004_5241_4659_5742;

/// What a program says first, with its userfaultfd: ranges of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Scratch pages of the helper.
    pub scratch: Range<u64>,
    /// The helper's stack.
    pub stack: Range<u64>,
    /// What the C library has for the first thread. The kernel writes there when a program is executed, after it has ended the helper.
    pub thread: Range<u64>,
}

impl Hello {
    /// As words.
    pub const fn words(&self) -> [u64; 7] {
        let Self { scratch, stack, thread } = self;
        [MAGIC, scratch.start, scratch.end, stack.start, stack.end, thread.start, thread.end]
    }

    /// From words; `None`: it is none of this version.
    pub fn of(words: &[u64]) -> Option<Self> {
        let &[MAGIC, scratch, scratch_end, stack, stack_end, thread, thread_end] = words else { return None };
        Some(Self { scratch: scratch..scratch_end, stack: stack..stack_end, thread: thread..thread_end })
    }
}

/// What became of a page that was to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Outcome {
    /// The frame has it.
    Out = 1,
    /// It had zeroes alone, and is gone.
    Zeroes = 2,
    /// There was none.
    Missing = 3,
    /// It is where it was: pinned, shared with a child, or its mapping is being changed.
    Stays = 4,
    /// It is where it was, in a mapping that is not watched: a touch would not be reported.
    Unwatched = 5,
}

impl Outcome {
    /// Of a word.
    pub const fn of(word: u64) -> Self {
        match word {
            1 => Self::Out,
            2 => Self::Zeroes,
            3 => Self::Missing,
            5 => Self::Unwatched,
            _ => Self::Stays,
        }
    }
}

/// Sends words, and perhaps a descriptor, as one message.
///
/// # Errors
/// The kernel's.
pub fn say(socket: impl AsFd, words: &[u64], fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut bytes = [0; WORDS_MAX * 8];
    for (word, into) in words.iter().zip(bytes.as_chunks_mut::<8>().0) {
        *into = word.to_ne_bytes();
    }
    let bytes = bytes.get(..words.len() * 8).ok_or(Errno::MSGSIZE)?;
    let Some(fd) = fd else {
        return send(socket, bytes, SendFlags::NOSIGNAL).map(drop);
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Receives words; how many came. 0: the other end is gone.
///
/// # Errors
/// The kernel's.
pub fn hear(socket: impl AsFd, words: &mut [u64; WORDS_MAX], wait: bool) -> Result<usize, Errno> {
    let mut bytes = [0; WORDS_MAX * 8];
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let (len, _) = recv(socket, &mut bytes[..], flags)?;
    for (from, word) in bytes.as_chunks::<8>().0.iter().zip(words.iter_mut()) {
        *word = u64::from_ne_bytes(*from);
    }
    Ok(len / 8)
}

/// As [`hear`], of a message that brings a descriptor.
///
/// # Errors
/// The kernel's.
pub fn hear_with_fd(socket: impl AsFd, words: &mut [u64; WORDS_MAX]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut bytes = [0; WORDS_MAX * 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // No descriptor was free for the one that was sent.
        return Err(Errno::MFILE);
    }
    for (from, word) in bytes.as_chunks::<8>().0.iter().zip(words.iter_mut()) {
        *word = u64::from_ne_bytes(*from);
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((got.bytes / 8, fd))
}

/// What the helper works with.
#[derive(Debug)]
pub struct Helper {
    /// The pager's end.
    pub socket: OwnedFd,
    /// The program's.
    pub userfault: Userfault,
    /// [`MOVES_MAX`] pages that nothing else uses, registered.
    pub scratch: Range<usize>,
    /// The frames.
    pub frames: Range<usize>,
}

impl Helper {
    /// Gives the calling thread a table of descriptors of its own, which has the helper's two alone. The program may close all of its descriptors
    /// then, or put others at these numbers, and nothing that it has open is kept open by the helper.
    ///
    /// # Errors
    /// The kernel's, before Linux 5.9.
    pub fn take_own_descriptors(&self) -> Result<(), Errno> {
        let (socket, userfault) = (self.socket.as_raw_fd() as u32, self.userfault.raw_fd() as u32);
        let (low, high) = (socket.min(userfault), socket.max(userfault));
        let between = (high > low + 1).then(|| (low + 1, high - 1));
        let below = (low > 0).then(|| (0, low - 1));
        // The first makes the table, and the kernel copies only what is left.
        for (first, last) in [Some((high + 1, u32::MAX)), between, below].into_iter().flatten() {
            // SAFETY: the call takes numbers. What it closes is in this thread's own table, in which nobody else has anything.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
            if closed != 0 {
                return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
            }
        }
        Ok(())
    }

    /// Moves pages as the pager says, until the pager is gone.
    ///
    /// # Safety
    /// `scratch` and `frames` are mapped, for reading and writing, as long as this runs, and nothing refers to their bytes. A thread that
    /// touches a page which was moved out is answered by the pager.
    pub unsafe fn run(&self) {
        let mut words = [0; WORDS_MAX];
        let mut is_empty = true;
        loop {
            let count = match hear(&self.socket, &mut words, true) {
                Ok(0) => return,
                Ok(count) => count,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            let commands = words.as_chunks_mut::<2>().0.get_mut(..count / 2).unwrap_or_default();
            if is_empty {
                // SAFETY: as the caller promises; the scratch pages are empty.
                is_empty = unsafe { self.move_out(commands) };
            } else {
                for command in commands {
                    *command = [command[1], Outcome::Stays as u64];
                }
            }
            if say(&self.socket, &words[..count], None).is_err() {
                return;
            }
        }
    }

    /// Of each pair: the page's address, perhaps with [`PROTECTED`], and the number of the frame; afterwards the frame and the outcome.
    /// False if the scratch pages could not be emptied: then no page may be moved there any more.
    ///
    /// # Safety
    /// As for [`Helper::run`]; the scratch pages are empty.
    unsafe fn move_out(&self, commands: &mut [[u64; 2]]) -> bool {
        let frames = (self.frames.len() / PAGE_BYTES) as u64;
        let mut outcomes = [Outcome::Stays; MOVES_MAX];
        let mut index = 0;
        while let Some([page, frame]) = commands.get(index).copied() {
            // Protected pages and others are moved by calls of their own: the numbers below differ by the flag too.
            let follows =
                |(at, [next, frame]): (u64, &[u64; 2])| *next == page + at * PAGE_BYTES as u64 && *frame < frames;
            let run = (0..).zip(&commands[index..]).take_while(|command| follows(*command)).count();
            let some = &mut outcomes[index..index + run.max(1)];
            if frame < frames {
                let from = (page & !PROTECTED) as usize;
                // SAFETY: as the caller promises.
                unsafe { self.move_run(self.scratch_page(index), from, page & PROTECTED != 0, some) };
            }
            index += some.len();
        }
        // What is dropped here is to be no message for the pager, which reads none before it has our answer.
        self.userfault.unregister(self.scratch.clone());
        for (index, ([_, frame], outcome)) in commands.iter().zip(&mut outcomes).enumerate() {
            let to = self.frames.start + *frame as usize * PAGE_BYTES;
            if *outcome != Outcome::Out {
                continue;
            }
            let from = std::ptr::with_exposed_provenance::<u64>(self.scratch_page(index));
            let to = std::ptr::with_exposed_provenance_mut::<u64>(to);
            let words = PAGE_BYTES / 8;
            // SAFETY: both lie in what the caller has promised, a page each, and do not overlap.
            unsafe {
                if (0..words).all(|word| from.add(word).read() == 0) {
                    *outcome = Outcome::Zeroes;
                } else {
                    // Word by word: the C library's copies look at variables of theirs, which may be paged.
                    (0..words).for_each(|word| to.add(word).write_volatile(from.add(word).read_volatile()));
                }
            }
        }
        let at = std::ptr::with_exposed_provenance_mut(self.scratch.start);
        // SAFETY: nothing refers to the scratch pages.
        let emptied = unsafe { madvise(at, commands.len() * PAGE_BYTES, Advice::LinuxDontNeed) }.is_ok();
        // SAFETY: nothing touches the scratch pages but moves.
        let _ = unsafe { self.userfault.register(self.scratch.clone(), Modes::MISSING) };
        for (command, outcome) in commands.iter_mut().zip(outcomes) {
            *command = [command[1], outcome as u64];
        }
        emptied
    }

    const fn scratch_page(&self, index: usize) -> usize {
        self.scratch.start + index * PAGE_BYTES
    }

    /// Moves pages that lie one behind the other: by one call, and those that it does not move one at a time, which tells why.
    ///
    /// # Safety
    /// As for [`Helper::run`]; the scratch pages from `to` on are free.
    unsafe fn move_run(&self, to: usize, from: usize, is_protected: bool, outcomes: &mut [Outcome]) {
        let bytes = outcomes.len() * PAGE_BYTES;
        let mut done = 0;
        if outcomes.len() > 1 && self.userfault.write_protect(from..from + bytes, is_protected, true).is_ok() {
            // SAFETY: as below.
            done = match unsafe { self.userfault.move_pages(to, from, bytes) } {
                Ok(()) => bytes,
                Err(partly) => partly.bytes,
            };
        }
        for (index, outcome) in outcomes.iter_mut().enumerate() {
            let at = index * PAGE_BYTES;
            if at < done {
                *outcome = Outcome::Out;
            } else {
                // SAFETY: as the caller promises.
                *outcome = unsafe { self.move_page(to + at, from + at, is_protected) };
            }
        }
    }

    /// # Safety
    /// As for [`Helper::run`]; the scratch page `to` is free.
    unsafe fn move_page(&self, to: usize, from: usize, is_protected: bool) -> Outcome {
        // A page of a mapping that came in place of the one that the pager knows is not to be moved. What is watched now cannot be
        // unmapped before the move: the kernel refuses moves until the pager has read the message.
        // Nothing else changes by the question: a page that is protected stays so.
        match self.userfault.write_protect(from..from + PAGE_BYTES, is_protected, true) {
            Ok(()) => {}
            Err(FillError::NoMapping) => return Outcome::Unwatched,
            Err(_) => return Outcome::Stays,
        }
        // SAFETY: nothing relies on the scratch page, and who touches the page from now on waits for the pager.
        match unsafe { self.userfault.move_pages(to, from, PAGE_BYTES) } {
            Ok(()) => Outcome::Out,
            Err(partly) if partly.error == FillError::NoMapping => Outcome::Missing,
            Err(_) => Outcome::Stays,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        let hello = Hello { scratch: 4096..8192, stack: 12288..16384, thread: 0..4096 };
        assert_eq!(Hello::of(&hello.words()), Some(hello.clone()));
        assert_eq!(Hello::of(&hello.words()[..4]), None);
        assert_eq!(Hello::of(&[0; 7]), None);
    }
}
