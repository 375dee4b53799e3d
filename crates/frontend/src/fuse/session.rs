//! A mount's side of the protocol without I/O: the features negotiated at INIT, and the requests in flight.

use std::collections::{HashMap, VecDeque};

use super::abi::{self, InitIn, InitOut, init};
use super::request::{Operation, Parsed};
use crate::limits::{FUSE_INTERRUPTS_MAX, FUSE_LOCKS_WAITING_MAX, FUSE_REQUESTS_MAX, FUSE_WRITE_BYTES_MAX};

/// What a file system wants of the kernel. The kernel gives of it what it has ([`Terms`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// The longest WRITE and READ, in bytes: a multiple of 4 KiB, at most 1 MiB.
    pub write_bytes_max: u32,
    /// Requests of the page cache and of asynchronous direct I/O that the kernel sends at once; more wait there.
    pub background_max: u16,
    /// The file system keeps the locks of `fcntl` and `flock`, for other clients to meet; else the kernel does, for this host.
    pub locks: bool,
    /// Listings come with attributes where the kernel thinks that it pays.
    pub read_directory_plus: bool,
    /// The file system clears the set-uid and set-gid bits where [`Write::kill_suid_gid`](super::request::Write::kill_suid_gid)
    /// and the like say so; else the kernel asks for that beforehand.
    pub kills_suid_gid: bool,
    /// The file system applies the umask, which requests carry; else the kernel has done so.
    pub applies_umask: bool,
    /// The kernel caches targets of symbolic links.
    pub cache_symlinks: bool,
    /// Cached pages go when a file's size or time was seen to change, asked for again when attributes are no longer valid.
    pub auto_invalidate: bool,
    /// The kernel can send again what a process has read and not answered (Linux 6.9).
    pub resends: bool,
}

impl Default for Wishes {
    fn default() -> Self {
        Self {
            write_bytes_max: FUSE_WRITE_BYTES_MAX,
            background_max: 256,
            locks: false,
            read_directory_plus: true,
            kills_suid_gid: false,
            applies_umask: false,
            cache_symlinks: false,
            auto_invalidate: true,
            resends: false,
        }
    }
}

/// What was agreed at INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The protocol's minor version.
    pub minor: u32,
    /// The longest WRITE and READ, in bytes.
    pub write_bytes_max: u32,
    /// Flags of [`abi::init`] that hold.
    pub flags: u64,
}

impl Terms {
    /// Whether the kernel can send requests again that were read and not answered ([`Wishes::resends`]).
    pub fn resends(&self) -> bool {
        self.flags & init::HAS_RESEND != 0
    }
}

/// Whether further requests are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Yes.
    GoesOn,
    /// Not now: they wait in the kernel.
    Paused,
    /// Not any more: another process reads them.
    HandedOver,
}

/// What is to be done with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Answer INIT with this.
    Welcome(InitOut),
    /// Answer with this errno (positive).
    Refuse(i32),
    /// The file system answers, and [`Session::finish`] is called with the request's number. If it waits for a lock,
    /// [`Session::end_handing`] is called when the file system has it.
    Serve {
        /// The request may wait for a lock, without a limit.
        waits_for_lock: bool,
    },
    /// The file system is told, and does not answer.
    Tell,
    /// The file system is told that the request of that number was interrupted. No answer.
    Interrupt(u64),
    /// Nothing.
    Nothing,
    /// The mount ends.
    End,
}

const EINTR: i32 = 4;
const EIO: i32 = 5;
const ENOLCK: i32 = 37;
const EPROTO: i32 = 71;

/// A request that the file system has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnderWay {
    /// Its answer comes soon.
    Answering,
    /// It waits for a lock, and the file system is about to take it: told of an interrupt now, it would not know the request.
    Handing { is_interrupted: bool },
    /// It waits for a lock. The file system may give back a request just when it is told of its interrupt.
    Waiting { is_interrupted: bool },
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    wishes: Wishes,
    terms: Option<Terms>,
    ended: bool,
    reading: Reading,
    /// Threads that read a request or hand it to the file system.
    readers: usize,
    /// Requests that the file system has not answered.
    under_way: HashMap<u64, UnderWay>,
    /// Requests for locks that are on their way to the file system.
    handing: usize,
    locks_waiting: usize,
    /// Requests that were interrupted and are not under way: not brought here yet, or answered. The oldest is first.
    interrupted: VecDeque<u64>,
}

impl Session {
    /// A session that waits for INIT.
    pub fn new(wishes: Wishes) -> Self {
        Self {
            wishes,
            terms: None,
            ended: false,
            reading: Reading::GoesOn,
            readers: 0,
            under_way: HashMap::new(),
            handing: 0,
            locks_waiting: 0,
            interrupted: VecDeque::new(),
        }
    }

    /// The session of a mount that another process has served, paused. What it agreed on with the kernel holds.
    pub fn taken_over(wishes: Wishes, terms: Terms) -> Self {
        Self { terms: Some(terms), reading: Reading::Paused, ..Self::new(wishes) }
    }

    /// Whether further requests are read.
    pub fn reading(&self) -> Reading {
        self.reading
    }

    /// Says whether further requests are read.
    pub fn set_reading(&mut self, reading: Reading) {
        self.reading = reading;
    }

    /// Whether a thread that wants to read a request waits.
    pub fn reader_waits(&self) -> bool {
        self.reading == Reading::Paused || (self.reading == Reading::GoesOn && self.is_full())
    }

    /// A thread begins to read a request.
    pub fn begin_reader(&mut self) {
        self.readers += 1;
    }

    /// It has read none, or handed it to the file system.
    pub fn end_reader(&mut self) {
        self.readers -= 1;
    }

    /// Whether a thread reads a request or hands it to the file system.
    pub fn has_readers(&self) -> bool {
        self.readers > 0 || self.handing > 0
    }

    /// What was agreed; `None` before INIT.
    pub fn terms(&self) -> Option<Terms> {
        self.terms
    }

    /// Requests that the file system has not answered.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether so many requests are under way that no further one should be read.
    pub fn is_full(&self) -> bool {
        self.under_way.len() >= FUSE_REQUESTS_MAX
    }

    /// Whether the kernel has said that the mount ends.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Notes that the mount has ended.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Takes a request.
    pub fn receive(&mut self, request: &Parsed<'_>) -> Step {
        match request.operation {
            Operation::Init(init) => self.init(init),
            Operation::Forget { .. } | Operation::BatchForget { .. } => Step::Tell,
            Operation::Destroy => {
                self.ended = true;
                Step::End
            }
            Operation::Interrupt { unique } => match self.under_way.get_mut(&unique) {
                Some(UnderWay::Waiting { is_interrupted }) => {
                    *is_interrupted = true;
                    Step::Interrupt(unique)
                }
                Some(UnderWay::Handing { is_interrupted }) => {
                    *is_interrupted = true;
                    Step::Nothing
                }
                Some(UnderWay::Answering) => Step::Nothing,
                // Another thread has read the request and not brought it here yet; or it was answered. EAGAIN would have the
                // kernel send the interrupt again, but not where the request was read over another channel of the mount.
                None => {
                    if self.interrupted.len() >= FUSE_INTERRUPTS_MAX {
                        self.interrupted.pop_front();
                    }
                    self.interrupted.push_back(unique);
                    Step::Nothing
                }
            },
            _ if self.terms.is_none() || self.ended => Step::Refuse(EIO),
            operation => {
                let waits_for_lock = matches!(operation, Operation::SetLock { wait: true, .. });
                if self.take_interrupt(request.unique) && waits_for_lock {
                    return Step::Refuse(EINTR);
                }
                if waits_for_lock && self.locks_waiting >= FUSE_LOCKS_WAITING_MAX {
                    return Step::Refuse(ENOLCK);
                }
                // The kernel gives no number twice; should it, there is one answer to come.
                self.finish(request.unique);
                self.locks_waiting += usize::from(waits_for_lock);
                self.handing += usize::from(waits_for_lock);
                let handing = UnderWay::Handing { is_interrupted: false };
                self.under_way.insert(request.unique, if waits_for_lock { handing } else { UnderWay::Answering });
                Step::Serve { waits_for_lock }
            }
        }
    }

    /// The file system has a request that waits for a lock. True: the request was interrupted before, and the file system is to be
    /// told so.
    pub fn end_handing(&mut self, unique: u64) -> bool {
        self.handing -= 1;
        match self.under_way.get_mut(&unique) {
            Some(state @ &mut UnderWay::Handing { is_interrupted }) => {
                *state = UnderWay::Waiting { is_interrupted };
                is_interrupted
            }
            _ => false,
        }
    }

    /// The file system gives back a request that waits for a lock, which is not under way any more then. False: it was interrupted, stays
    /// under way, and is to be answered with `EINTR`.
    pub fn keep(&mut self, unique: u64) -> bool {
        let interrupted = [UnderWay::Handing { is_interrupted: true }, UnderWay::Waiting { is_interrupted: true }];
        let is_kept = self.under_way.get(&unique).is_none_or(|state| !interrupted.contains(state));
        if is_kept {
            self.finish(unique);
        }
        is_kept
    }

    /// Whether a request was interrupted after the file system gave it back. The kernel says so once, and so does this.
    pub fn take_interrupt(&mut self, unique: u64) -> bool {
        let at = self.interrupted.iter().position(|number| *number == unique);
        at.and_then(|at| self.interrupted.remove(at)).is_some()
    }

    /// Notes that a request was answered.
    pub fn finish(&mut self, unique: u64) {
        if let Some(state) = self.under_way.remove(&unique) {
            self.locks_waiting -= usize::from(state != UnderWay::Answering);
        }
    }

    fn init(&mut self, asked: InitIn) -> Step {
        if self.terms.is_some() {
            return Step::Refuse(EIO);
        }
        if asked.major > abi::MAJOR {
            // The kernel asks again in this version.
            return Step::Welcome(InitOut { major: abi::MAJOR, minor: abi::MINOR, ..InitOut::default() });
        }
        if asked.major < abi::MAJOR || asked.minor < abi::MINOR_MIN {
            return Step::Refuse(EPROTO);
        }
        let mut offered = u64::from(asked.flags);
        if offered & init::INIT_EXT != 0 {
            offered |= u64::from(asked.flags2) << 32;
        }
        let flags = offered & self.wanted();
        let page = 4096;
        let bytes_max = self.wishes.write_bytes_max.clamp(page, FUSE_WRITE_BYTES_MAX) / page * page;
        // Without MAX_PAGES a request has 32 pages at most.
        let write_bytes_max = if flags & init::MAX_PAGES != 0 { bytes_max } else { bytes_max.min(32 * page) };
        let minor = asked.minor.min(abi::MINOR);
        self.terms = Some(Terms { minor, write_bytes_max, flags });
        Step::Welcome(InitOut {
            major: abi::MAJOR,
            minor,
            max_readahead: write_bytes_max.max(asked.max_readahead),
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            max_background: self.wishes.background_max,
            congestion_threshold: self.wishes.background_max / 4 * 3,
            max_write: write_bytes_max,
            time_granularity_ns: 1,
            max_pages: (write_bytes_max / page) as u16,
            ..InitOut::default()
        })
    }

    fn wanted(&self) -> u64 {
        let wishes = &self.wishes;
        let always = init::ASYNC_READ
            | init::ATOMIC_O_TRUNC
            | init::BIG_WRITES
            | init::ASYNC_DIO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES
            | init::INIT_EXT
            | init::DIRECT_IO_ALLOW_MMAP;
        let choices = [
            (wishes.locks, init::POSIX_LOCKS | init::FLOCK_LOCKS),
            (wishes.read_directory_plus, init::DO_READDIRPLUS | init::READDIRPLUS_AUTO),
            (wishes.kills_suid_gid, init::HANDLE_KILLPRIV_V2),
            (wishes.applies_umask, init::DONT_MASK),
            (wishes.cache_symlinks, init::CACHE_SYMLINKS),
            (wishes.auto_invalidate, init::AUTO_INVAL_DATA),
            (!wishes.auto_invalidate, init::EXPLICIT_INVAL_DATA),
            (wishes.resends, init::HAS_RESEND),
        ];
        choices.into_iter().filter_map(|(wish, flags)| wish.then_some(flags)).fold(always, |all, flags| all | flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::request::Caller;

    const ANSWER: Step = Step::Serve { waits_for_lock: false };
    const LOCK: Step = Step::Serve { waits_for_lock: true };

    fn asked(unique: u64, operation: Operation<'_>) -> Parsed<'_> {
        Parsed { unique, node: 1, caller: Caller { uid: 0, gid: 0, pid: 1 }, operation }
    }

    fn kernel() -> InitIn {
        let flags2 = (init::DIRECT_IO_ALLOW_MMAP >> 32) as u32;
        InitIn { major: 7, minor: 45, max_readahead: 128 << 10, flags: u32::MAX, flags2, ..InitIn::default() }
    }

    fn running() -> Session {
        let mut session = Session::new(Wishes::default());
        assert!(matches!(session.receive(&asked(2, Operation::Init(kernel()))), Step::Welcome(_)));
        session
    }

    #[test]
    fn init_takes_what_both_have() {
        let mut session = Session::new(Wishes { locks: true, ..Wishes::default() });
        let Step::Welcome(out) = session.receive(&asked(2, Operation::Init(kernel()))) else { panic!("welcome") };
        assert_eq!((out.major, out.minor, out.max_write, out.max_pages), (7, 40, 1 << 20, 256));
        let terms = session.terms().unwrap();
        assert_ne!(terms.flags & init::POSIX_LOCKS, 0);
        assert_ne!(terms.flags & init::DIRECT_IO_ALLOW_MMAP, 0, "of the upper half");
        assert_eq!(terms.flags & init::HANDLE_KILLPRIV_V2, 0, "not wished");
        assert_eq!(terms.flags & 1 << 16, 0, "no write-back cache");
        assert!(matches!(session.receive(&asked(4, Operation::Init(kernel()))), Step::Refuse(EIO)), "once");

        let mut session = Session::new(Wishes::default());
        let old = InitIn { minor: 31, flags: (init::INIT_EXT | init::ASYNC_READ) as u32, flags2: 0, ..kernel() };
        let Step::Welcome(out) = session.receive(&asked(2, Operation::Init(old))) else { panic!("welcome") };
        assert_eq!((out.minor, out.max_write), (31, 128 << 10));
        assert_eq!(u64::from(out.flags), init::INIT_EXT | init::ASYNC_READ);
    }

    #[test]
    fn only_newer_kernels_send_requests_again() {
        let flags2 = (init::HAS_RESEND >> 32) as u32;
        for (offered, resends) in [(flags2, true), (0, false)] {
            let mut session = Session::new(Wishes { resends: true, ..Wishes::default() });
            session.receive(&asked(2, Operation::Init(InitIn { flags2: offered, ..kernel() })));
            assert_eq!(session.terms().unwrap().resends(), resends);
        }
        assert!(!running().terms().unwrap().resends(), "not wished");
    }

    #[test]
    fn other_versions_are_refused_or_asked_to_come_again() {
        let mut session = Session::new(Wishes::default());
        let Step::Welcome(again) = session.receive(&asked(2, Operation::Init(InitIn { major: 8, ..kernel() }))) else {
            panic!("asked again")
        };
        assert_eq!((again.major, session.terms()), (7, None));
        assert_eq!(session.receive(&asked(4, Operation::Init(InitIn { minor: 30, ..kernel() }))), Step::Refuse(EPROTO));
        assert_eq!(session.receive(&asked(6, Operation::StatFs)), Step::Refuse(EIO), "before INIT");
        assert!(matches!(session.receive(&asked(8, Operation::Init(kernel()))), Step::Welcome(_)));
        assert_eq!(session.receive(&asked(10, Operation::StatFs)), ANSWER);
    }

    #[test]
    fn interrupts_reach_only_what_waits_for_a_lock() {
        let mut session = running();
        let lock = Operation::SetLock { handle: 1, owner: 1, lock: abi::FileLock::default(), flock: false, wait: true };
        assert_eq!(session.receive(&asked(4, lock)), LOCK);
        assert!(!session.end_handing(4));
        assert_eq!(session.receive(&asked(6, Operation::StatFs)), ANSWER);
        let interrupt = |unique| asked(5, Operation::Interrupt { unique });
        assert_eq!(session.receive(&interrupt(4)), Step::Interrupt(4));
        assert_eq!(session.receive(&interrupt(6)), Step::Nothing);
        session.finish(4);
        assert_eq!(session.receive(&interrupt(4)), Step::Nothing, "it was answered");
        assert_eq!(session.under_way(), 1);
    }

    #[test]
    fn an_interrupt_may_come_before_its_request() {
        let mut session = running();
        let lock = Operation::SetLock { handle: 1, owner: 1, lock: abi::FileLock::default(), flock: false, wait: true };
        let interrupt = |unique| asked(5, Operation::Interrupt { unique });
        for unique in [8, 10] {
            assert_eq!(session.receive(&interrupt(unique)), Step::Nothing);
        }
        assert_eq!(session.receive(&asked(8, lock)), Step::Refuse(EINTR));
        assert_eq!(session.receive(&asked(10, Operation::StatFs)), ANSWER, "it does not wait for a lock");
        assert_eq!(session.under_way(), 1);
        // The oldest is forgotten: it was answered, for all that is known.
        for unique in 0..=FUSE_INTERRUPTS_MAX as u64 {
            session.receive(&interrupt(100 + 2 * unique));
        }
        assert_eq!(session.receive(&asked(100, lock)), LOCK);
        assert_eq!(session.receive(&asked(102, lock)), Step::Refuse(EINTR));
    }

    #[test]
    fn an_interrupt_waits_until_the_file_system_has_the_request() {
        let mut session = running();
        let lock = Operation::SetLock { handle: 1, owner: 1, lock: abi::FileLock::default(), flock: false, wait: true };
        let interrupt = |unique| asked(5, Operation::Interrupt { unique });
        assert_eq!(session.receive(&asked(4, lock)), LOCK);
        assert!(session.has_readers(), "the mount does not pause meanwhile");
        assert_eq!(session.receive(&interrupt(4)), Step::Nothing);
        assert!(!session.keep(4) && session.end_handing(4), "told now");
        assert!(!session.has_readers());
        assert_eq!(session.receive(&interrupt(4)), Step::Interrupt(4));

        // Answered before the file system's function has returned: nothing to tell.
        assert_eq!(session.receive(&asked(6, lock)), LOCK);
        assert_eq!(session.receive(&interrupt(6)), Step::Nothing);
        session.finish(6);
        assert!(!session.end_handing(6) && !session.has_readers());
    }

    #[test]
    fn a_request_that_was_interrupted_is_not_given_back() {
        let mut session = running();
        let lock = Operation::SetLock { handle: 1, owner: 1, lock: abi::FileLock::default(), flock: false, wait: true };
        let interrupt = |unique| asked(5, Operation::Interrupt { unique });
        for unique in [4, 6] {
            assert_eq!(session.receive(&asked(unique, lock)), LOCK);
            assert!(!session.end_handing(unique));
        }
        // The thread that has read the interrupt has not told the file system yet.
        assert_eq!(session.receive(&interrupt(4)), Step::Interrupt(4));
        assert!(!session.keep(4));
        assert_eq!(session.under_way(), 2, "it is to be answered");
        session.finish(4);
        // A thread reads the interrupt when the request was given back: what takes over is not told of it.
        assert!(session.keep(6));
        assert_eq!(session.under_way(), 0);
        assert_eq!(session.receive(&interrupt(6)), Step::Nothing);
        assert!(session.take_interrupt(6) && !session.take_interrupt(6));
    }

    #[test]
    fn what_is_under_way_is_bounded() {
        let mut session = running();
        let lock = Operation::SetLock { handle: 1, owner: 1, lock: abi::FileLock::default(), flock: false, wait: true };
        let waiting = (0..FUSE_LOCKS_WAITING_MAX as u64).map(|n| session.receive(&asked(2 * n + 100, lock)));
        assert!(waiting.collect::<Vec<_>>().into_iter().all(|step| step == LOCK));
        assert_eq!(session.receive(&asked(4, lock)), Step::Refuse(ENOLCK));
        session.finish(100);
        assert_eq!(session.receive(&asked(4, lock)), LOCK);
        assert!(!session.is_full());
        for unique in 0..FUSE_REQUESTS_MAX as u64 {
            session.receive(&asked(1_000_000 + unique, Operation::StatFs));
        }
        assert!(session.is_full());
        assert_eq!(session.receive(&asked(3, Operation::Forget { lookups: 1 })), Step::Tell, "and takes no place");
        assert_eq!(session.receive(&asked(9, Operation::Destroy)), Step::End);
        assert!(session.has_ended());
        assert_eq!(session.receive(&asked(11, Operation::StatFs)), Step::Refuse(EIO));
    }
}
