//! What the macros of `byway_anl.h` expand to: shared memory for programs written with the macros of Argonne National Laboratory
//! (PARMACS), as those of SPLASH.
//!
//! The macros have no results: what fails ends the process with a message on standard error, and with it the job. How CREATE becomes a
//! job's ranks: docs/decisions/0050.

use std::ffi::{CStr, c_char, c_void};
use std::fmt::Display;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::with_exposed_provenance_mut;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use byway_dsm::limits::{AREA_ADDRESS, NAMES_MAX, PAGE_BYTES};
use byway_dsm::{CallError, Job, Prepared};

/// A flag that processes wait for (PAUSEDEC). It lies in shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_anl_flag {
    /// Guards the flag.
    pub lock: u32,
    /// Whether it is set.
    pub is_set: u32,
}

/// Guards the number of bytes that are allocated.
const LOCK_MEMORY: u32 = 0;
/// All created processes have ended.
const BARRIER_ENDED: u32 = 0;
/// The numbers of the program's locks, flags and barriers begin here.
const NUMBER_FIRST: u32 = 1;
/// Numbers that a process gives out itself when the processes run.
const NUMBERS_PER_RANK: u32 = 1 << 24;
/// The first bytes of the memory are not the program's: a word of them counts the bytes that are allocated.
const ALLOCATED_FIRST: usize = PAGE_BYTES;
/// The alignment of less than a page.
const LINE_BYTES: usize = 64;
/// The shortest and the longest pause between two looks at a flag.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// The program before CREATE.
struct Preparation {
    memory: Prepared,
    /// Standard output, which ranks other than 0 do not print to until CREATE.
    output: Option<OwnedFd>,
}

/// This process's part, apart from the job.
struct Program {
    /// Until this process is created.
    preparation: Option<Preparation>,
    rank: u8,
    ranks: u8,
    /// The end of the memory.
    bytes: usize,
    /// Processes that the program has created.
    created: u32,
    next_number: u32,
    /// What was allocated before this process was created, and where in the program's source.
    named: Vec<(Range<usize>, String)>,
}

static PROGRAM: Mutex<Option<Program>> = Mutex::new(None);
static JOB: RwLock<Option<Job>> = RwLock::new(None);

/// Ends the process, and with it the job.
fn die(why: impl Display) -> ! {
    eprintln!("byway: {why}");
    // Exit handlers may wait for other processes.
    // SAFETY: ends the process; nothing is run after it.
    unsafe { libc::_exit(1) }
}

fn program() -> MutexGuard<'static, Option<Program>> {
    PROGRAM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program. It begins here if it has not: Barnes of SPLASH allocates memory before MAIN_INITENV.
fn with_program<T>(use_it: impl FnOnce(&mut Program) -> T) -> T {
    use_it(program().get_or_insert_with(begin))
}

/// Calls the job, if this process has been created: before, it is alone with its memory, and needs no order.
fn with_job(call: impl FnOnce(&Job) -> Result<(), CallError>) -> bool {
    let job = JOB.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(job) = &*job
        && let Err(error) = call(job)
    {
        die(error);
    }
    job.is_some()
}

/// The number of bytes that are allocated, in shared memory.
fn allocated() -> *mut usize {
    with_exposed_provenance_mut(AREA_ADDRESS)
}

/// What the program has printed goes where it was printed to.
fn flush_output() {
    // SAFETY: flushes all streams of C, by a function that threads may call.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}

/// The program begins (MAIN_INITENV). Each process of the job runs it from here to CREATE, with memory of its own. Does nothing if the program
/// has begun by another call.
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_begin() {
    with_program(|_| ());
}

fn begin() -> Program {
    let memory = Prepared::map().unwrap_or_else(|error| die(error));
    let (rank, ranks, bytes) = (memory.rank(), memory.ranks(), memory.len());
    if bytes <= ALLOCATED_FIRST {
        die("the job has no memory for G_MALLOC: raise --memory");
    }
    // SAFETY: the first bytes of the memory, which is mapped and aligned; the program has no pointer to it yet.
    unsafe { allocated().write(ALLOCATED_FIRST) };
    let output = (rank > 0).then(|| silence().unwrap_or_else(|error| die(format_args!("standard output: {error}"))));
    let preparation = Some(Preparation { memory, output });
    Program { preparation, rank, ranks, bytes, created: 0, next_number: NUMBER_FIRST, named: Vec::new() }
}

/// Has standard output lead nowhere; gives where it led. What the program has printed, and the stream still holds, goes nowhere too: rank 0
/// prints it.
fn silence() -> std::io::Result<OwnedFd> {
    let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 0)?;
    rustix::stdio::dup2_stdout(std::fs::File::options().write(true).open("/dev/null")?)?;
    flush_output();
    Ok(output)
}

/// A number for a lock, a flag or a barrier.
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_number() -> u32 {
    with_program(|program| {
        let number = program.next_number;
        program.next_number += 1;
        if number >= NUMBERS_PER_RANK {
            die("too many locks, flags and barriers");
        }
        // Before CREATE all processes give out the same numbers; then each has its own.
        let own = if program.preparation.is_some() { 0 } else { 1 + u32::from(program.rank) };
        own * NUMBERS_PER_RANK + number
    })
}

/// Allocates shared memory of zeroes (G_MALLOC), aligned to a page if it has a page or more, else to 64 bytes. `file` and `line` of the caller are its
/// name in the reports of `byway dsm run --report` and `byway dsm top`.
///
/// # Safety
/// `file` is null or a string that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_anl_malloc(bytes: usize, file: *const c_char, line: u32) -> *mut c_void {
    let area = with_program(|program| program.bytes);
    let alignment = if bytes >= PAGE_BYTES { PAGE_BYTES } else { LINE_BYTES };
    byway_anl_lock(LOCK_MEMORY);
    // SAFETY: the word is mapped and aligned, and only this function uses it, under the lock.
    let used = unsafe { allocated().read() };
    let at = used.next_multiple_of(alignment);
    let end = at.checked_add(bytes).filter(|end| *end <= area);
    let Some(end) = end else {
        die(format_args!("{bytes} bytes of shared memory: only {} of {area} are left: raise --memory", area - used));
    };
    // SAFETY: as above.
    unsafe { allocated().write(end) };
    byway_anl_unlock(LOCK_MEMORY);
    if !file.is_null() {
        // SAFETY: by the caller's word.
        let file = unsafe { CStr::from_ptr(file) }.to_string_lossy();
        name(at..end, format!("{file}:{line}"));
    }
    with_exposed_provenance_mut(AREA_ADDRESS + at)
}

/// Names allocated bytes, which are counted from the beginning of the memory, in the job's report.
fn name(bytes: Range<usize>, name: String) {
    let is_told = with_job(|job| {
        let segment = job.segment_of(with_exposed_provenance_mut(AREA_ADDRESS)).ok_or(CallError::Range)?;
        job.name(segment, bytes.clone(), &name)
    });
    if !is_told {
        with_program(|program| {
            if program.named.len() < NAMES_MAX {
                program.named.push((bytes, name));
            }
        });
    }
}

/// Creates a process that runs `body` (CREATE), if `count` is 0; otherwise `count - 1` processes, and runs `body` in this one too. In a process
/// that is created, this does not return.
///
/// # Safety
/// `body` is a function without arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_anl_create(body: Option<unsafe extern "C" fn()>, count: u32) {
    let Some(body) = body else { die("CREATE needs a function") };
    let (is_created, named) = with_program(|program| {
        let (rank, ranks) = (u32::from(program.rank), u32::from(program.ranks));
        program.created += count.saturating_sub(1).max(u32::from(count == 0));
        if program.created >= ranks || count > 0 && count != ranks {
            let all = 1 + program.created;
            die(format_args!(
                "the program has {all} processes or more, and the job {ranks}: give both the same number"
            ));
        }
        let is_next = rank == 0 || count > 0 || program.created == rank;
        if let Some(Preparation { memory, output }) = program.preparation.take_if(|_| is_next) {
            // SAFETY: the word is mapped and aligned, and no other thread of the program runs.
            let used = unsafe { allocated().read() };
            // SAFETY: this crate has no reference into the memory; the program has pointers.
            let job = unsafe { memory.join(used) }.unwrap_or_else(|error| die(error));
            *JOB.write().unwrap_or_else(PoisonError::into_inner) = Some(job);
            if let Some(output) = output {
                flush_output();
                rustix::stdio::dup2_stdout(output).unwrap_or_else(|error| die(error));
            }
        }
        let named = if is_next { std::mem::take(&mut program.named) } else { Vec::new() };
        (rank > 0 && is_next, named)
    });
    for (bytes, text) in named {
        name(bytes, text);
    }
    if is_created || count > 0 {
        // SAFETY: by the caller's word.
        unsafe { body() };
    }
    if is_created {
        byway_anl_wait();
        byway_anl_end();
        std::process::exit(0);
    }
}

/// Waits for the end of all processes (WAIT_FOR_END).
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_wait() {
    if with_job(|job| job.barrier(BARRIER_ENDED)) {
        let (created, ranks, rank) = with_program(|program| (program.created, program.ranks, program.rank));
        if rank == 0 && created + 1 != u32::from(ranks) {
            die(format_args!("the program has {} processes, and the job {ranks}", created + 1));
        }
    } else {
        alone("WAIT_FOR_END");
    }
}

/// A process that is not created yet does what only created ones do: the program has one process.
fn alone(what: &str) {
    let ranks = with_program(|program| program.ranks);
    if ranks > 1 {
        die(format_args!(
            "{what} without as many processes as the job has, {ranks}: give the program the same number as -n"
        ));
    }
}

/// The end of the program (MAIN_END). Memory of G_MALLOC is gone then.
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_end() {
    let job = JOB.write().unwrap_or_else(PoisonError::into_inner).take();
    match job {
        Some(job) => job.finish().unwrap_or_else(|error| die(error)),
        None => alone("MAIN_END"),
    }
}

/// Waits for a lock (LOCK).
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_lock(lock: u32) {
    with_job(|job| job.acquire(lock));
}

/// Releases a lock (UNLOCK).
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_unlock(lock: u32) {
    with_job(|job| {
        job.release(lock);
        Ok(())
    });
}

/// Waits until all processes are at the barrier (BARRIER). `count` is 0 or the number of processes.
#[unsafe(no_mangle)]
pub extern "C" fn byway_anl_barrier(barrier: u32, count: u32) {
    let ranks = with_program(|program| program.ranks);
    if count > 0 && count != u32::from(ranks) {
        die(format_args!("a barrier of {count} processes: all {ranks} processes of the job meet at each barrier"));
    }
    if !with_job(|job| job.barrier(barrier)) {
        alone("BARRIER");
    }
}

/// Sets or clears a flag (SETPAUSE, CLEARPAUSE).
///
/// # Safety
/// `flag` is null or a flag of PAUSEDEC that PAUSEINIT has initialised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_anl_set(flag: *mut byway_anl_flag, is_set: u32) {
    if flag.is_null() {
        die("SETPAUSE or CLEARPAUSE needs a flag");
    }
    // SAFETY: by the caller's word; the number does not change.
    let lock = unsafe { (*flag).lock };
    byway_anl_lock(lock);
    // SAFETY: by the caller's word; the lock keeps others away.
    unsafe { (*flag).is_set = is_set };
    byway_anl_unlock(lock);
}

/// Waits until a flag is set (WAITPAUSE). Looks at it again and again, with pauses of up to 1 ms.
///
/// # Safety
/// As [`byway_anl_set`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_anl_wait_for(flag: *const byway_anl_flag) {
    if flag.is_null() {
        die("WAITPAUSE needs a flag");
    }
    // SAFETY: by the caller's word; the number does not change.
    let lock = unsafe { (*flag).lock };
    byway_anl_lock(lock);
    // SAFETY: by the caller's word; the lock keeps others away.
    wait_until(lock, || unsafe { (*flag).is_set } != 0);
    byway_anl_unlock(lock);
}

/// Releases a lock that the caller has, waits until a condition is signalled, and takes the lock again (CONDVARWAIT). Looks again and
/// again, with pauses of up to 1 ms.
///
/// # Safety
/// `condition` is null or of CONDVARDEC, and signalled under the lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_anl_wait_signal(condition: *const u32, lock: u32) {
    if condition.is_null() {
        die("CONDVARWAIT needs a condition");
    }
    // SAFETY: by the caller's word; the lock keeps others away.
    let signals = || unsafe { condition.read_volatile() };
    let before = signals();
    wait_until(lock, || signals() != before);
}

/// Waits until this is so, which is looked at under a lock that the caller has.
fn wait_until(lock: u32, is_so: impl Fn() -> bool) {
    let mut pause = PAUSE_MIN;
    while !is_so() {
        byway_anl_unlock(lock);
        if JOB.read().unwrap_or_else(PoisonError::into_inner).is_none() {
            die("the program waits for what no other process can do: it has not created any");
        }
        #[expect(clippy::disallowed_methods, reason = "another process stores the flag, and wakes nobody")]
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
        byway_anl_lock(lock);
    }
}
