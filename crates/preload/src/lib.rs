//! The library that `byway far` has the dynamic linker load before a program's own (`LD_PRELOAD`).
//!
//! Before `main` it makes the process's userfaultfd, hands it to the pager, and starts the pager's helper
//! ([`byway_reactor::userfault::helper`]). What a program does from then on needs nothing of this library: allocators, threads and system
//! calls find missing pages through the kernel. A program that is executed by this one is paged too, by the same environment.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use byway_reactor::userfault::Userfault;
use byway_reactor::userfault::helper::{
    Hello, Helper, MOVES_MAX, PAGE_BYTES, SOCKET_VARIABLE, WORDS_MAX, hear_with_fd, say,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Bytes of the helper's stack: it holds a command and its answer.
const STACK_BYTES: usize = 256 << 10;

/// The exit status of a program that cannot be paged, as of one that the shell cannot execute.
const CANNOT_PAGE: i32 = 126;

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
    let range = |range: &Range<usize>| (range.start as u64, range.end as u64);
    let hello = Hello { process: std::process::id(), scratch: range(&scratch), stack: range(&stack) };
    say(&socket, &hello.words(), Some(userfault.as_fd()))?;
    let mut words = [0; WORDS_MAX];
    let (1.., Some(frames)) = hear_with_fd(&socket, &mut words)? else {
        return Err("the pager refuses it; what it says stands before this".into());
    };
    let frames = map_file(&frames, words[0] as usize)?;
    // SAFETY: it is this process's. Nothing is registered by this process but scratch pages; what the pager registers it answers for.
    let userfault = unsafe { Userfault::of_other_process(userfault) };
    let helper = Box::leak(Box::new(Helper { socket: above(socket)?, userfault, scratch, frames }));
    spawn(helper, &stack)
}

/// Out of the way of programs that choose numbers for their descriptors.
fn above(fd: OwnedFd) -> Result<OwnedFd, Box<dyn std::error::Error>> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 200).unwrap_or(fd))
}

fn map(bytes: usize) -> std::io::Result<Range<usize>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE) }?;
    let at = at.expose_provenance();
    Ok(at..at + bytes)
}

fn map_file(file: impl AsFd, bytes: usize) -> std::io::Result<Range<usize>> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: as in `map`.
    let at = unsafe { mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, file, 0) }?;
    let at = at.expose_provenance();
    Ok(at..at + bytes)
}

/// Starts the helper's thread, which takes no signals.
fn spawn(helper: &'static Helper, stack: &Range<usize>) -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: all structures are made by their functions before they are used; the stack is ours, and the helper lives for ever.
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
    // SAFETY: it is the leaked helper. It lies in the program's heap, which may be paged: so it is copied to this stack first.
    let helper = std::mem::ManuallyDrop::new(unsafe { helper.cast::<Helper>().read() });
    // SAFETY: scratch and frames were mapped for the helper alone, for ever.
    unsafe { helper.run() };
    // Without the pager every page that is not here is lost, and who touches one would wait for ever.
    const GONE: &[u8] = b"byway far: the pager has ended; this program's pages are lost with it, so it ends too\n";
    // SAFETY: the bytes are there, and standard error is whatever the program has made of it.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, GONE.as_ptr().cast(), GONE.len()) };
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::ptr::null_mut()
}
