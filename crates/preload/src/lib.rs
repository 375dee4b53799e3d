//! The library that `byway far` makes the dynamic linker load before a program's own (`LD_PRELOAD`).
//!
//! Before `main` it makes the process's userfaultfd, hands it to the pager, and starts the pager's helper
//! ([`byway_reactor::userfault::helper`]), whose descriptors the program does not see. After that the program does not need
//! this library: allocators, threads and system calls find missing pages through the kernel. A program that this one
//! executes is paged too, by the same environment.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use byway_reactor::userfault::Userfault;
use byway_reactor::userfault::helper::{
    Hello, Helper, MOVES_MAX, PAGE_BYTES, SOCKET_VARIABLE, WORDS_MAX, hear_with_fd, say,
};
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::thread::futex;

/// Bytes of the helper's stack: it holds a command and its answer.
const STACK_BYTES: usize = 256 << 10;

/// The exit status of a program that cannot be paged, as of one that the shell cannot execute.
const CANNOT_PAGE: i32 = 126;

/// How far the helper is: one of the three below.
static STATE: AtomicU32 = AtomicU32::new(STARTING);
const STARTING: u32 = 0;
const RUNS: u32 = 1;
const FAILED: u32 = 2;

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    let Some(path) = std::env::var_os(SOCKET_VARIABLE) else { return };
    if let Err(error) = start(&path) {
        eprintln!("byway far: this program cannot be paged: {error}");
        std::process::exit(CANNOT_PAGE);
    }
}

fn start(path: &std::ffi::OsStr) -> Result<(), Box<dyn std::error::Error>> {
    // Huge pages come 512 at a time, and a page of one cannot be moved alone.
    rustix::thread::disable_transparent_huge_pages(true)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| format!("the pager cannot be reached: {error}"))?;
    let userfault = Userfault::create()?;
    let scratch = map(MOVES_MAX * PAGE_BYTES)?;
    let stack = map(STACK_BYTES)?;
    let range = |range: &Range<usize>| range.start as u64..range.end as u64;
    let hello = Hello { scratch: range(&scratch), stack: range(&stack), thread: range(&of_first_thread()) };
    say(&socket, &hello.words(), Some(userfault.as_fd()))?;
    let mut words = [0; WORDS_MAX];
    let (1.., Some(frames)) = hear_with_fd(&socket, &mut words)? else {
        return Err("the pager refuses it; what it says stands before this".into());
    };
    let frames = map_file(&frames, words[0] as usize)?;
    // SAFETY: it is this process's. Nothing is registered by this process but scratch pages; what the pager registers it answers for.
    let userfault = unsafe { Userfault::of_other_process(userfault) };
    let helper = Box::new(Helper { socket, userfault, scratch, frames });
    spawn(&helper, &stack)?;
    while STATE.load(Ordering::Acquire) == STARTING {
        // An interrupted wait looks again.
        let _ = futex::wait(&STATE, futex::Flags::PRIVATE, STARTING, None);
    }
    // The helper has its own copies by now, of the structure and of the descriptors in it; here both end.
    if STATE.load(Ordering::Acquire) == RUNS {
        Ok(())
    } else {
        Err("its helper cannot have descriptors of its own".into())
    }
}

/// The pages in which the kernel finds the number of the first thread, and its robust locks: behind the thread's own pointer.
fn of_first_thread() -> Range<usize> {
    // SAFETY: the call has no conditions.
    let at = unsafe { libc::pthread_self() } as usize / PAGE_BYTES * PAGE_BYTES;
    at..at + 2 * PAGE_BYTES
}

fn map(bytes: usize) -> std::io::Result<Range<usize>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE) }?;
    let at = at.expose_provenance();
    Ok(at..at + bytes)
}

/// Maps the frames. A forked child has no helper and does not get them.
fn map_file(file: impl AsFd, bytes: usize) -> std::io::Result<Range<usize>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: as in `map`.
    let at = unsafe { mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, file, 0) }?;
    // SAFETY: the mapping is new, and its contents stay as they are.
    unsafe { madvise(at, bytes, Advice::LinuxDontFork) }?;
    let at = at.expose_provenance();
    Ok(at..at + bytes)
}

/// Starts the helper's thread, which takes no signals. `helper` is there until [`STATE`] says that the thread runs, or not.
fn spawn(helper: &Helper, stack: &Range<usize>) -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: all structures are made by their functions before they are used; the stack is ours, and the helper
    // is there as long as the thread looks at it.
    let error = unsafe {
        let (mut all, mut before, mut attributes) = (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_attr_init(&raw mut attributes);
        let at = std::ptr::with_exposed_provenance_mut(stack.start);
        libc::pthread_attr_setstack(&raw mut attributes, at, stack.len());
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread = 0;
        let argument = std::ptr::from_ref(helper).cast_mut().cast::<c_void>();
        let error = libc::pthread_create(&raw mut thread, &raw const attributes, run, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        error
    };
    if error == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(error).into()) }
}

extern "C" fn run(helper: *mut c_void) -> *mut c_void {
    // SAFETY: it is there until STATE changes. It lies in the program's memory, which may be paged: so it is copied to this stack first.
    let helper = std::mem::ManuallyDrop::new(unsafe { helper.cast::<Helper>().read() });
    let has_own = helper.take_own_descriptors().is_ok();
    STATE.store(if has_own { RUNS } else { FAILED }, Ordering::Release);
    let _ = futex::wake(&STATE, futex::Flags::PRIVATE, 1);
    if !has_own {
        return std::ptr::null_mut();
    }
    // SAFETY: scratch and frames were mapped for the helper alone, for ever.
    unsafe { helper.run() };
    // Without the pager every page that is not here is lost, and a thread that touches one would wait for ever.
    say_that_it_ends();
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::ptr::null_mut()
}

/// Says so on the program's standard error, if that is a terminal or a pipe: the number may be a file of the program's, whose bytes are its own.
fn say_that_it_ends() {
    const GONE: &[u8] = b"byway far: the pager has ended; this program's pages are lost with it, so it ends too\n";
    let Ok(file) = open(c"/proc/self/fd/2", OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) else {
        return;
    };
    let kind = fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if matches!(kind, Ok(FileType::Fifo | FileType::CharacterDevice)) {
        let _ = rustix::io::write(&file, GONE);
    }
}
