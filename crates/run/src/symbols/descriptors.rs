//! What is done with numbers of descriptors.

use std::ffi::{c_int, c_uint, c_ulong};
use std::sync::Arc;

use byway_reactor::descriptor_floor;
use byway_service::file::client::LockKind;
use libc::{F_UNLCK, F_WRLCK, off_t};
use rustix::io::Errno;

use super::interpose::{Answer, fail};
use super::opening::last_error;
use super::streams;
use crate::c::{put, take};
use crate::inside::{inside, is_inside};
use crate::locks::{self, Family, LockedBytes};
use crate::open::{self, Open, on};
use crate::{data, process, report, working_directory};

/// Commands of `fcntl` that the C library's header has and `libc` lacks.
const F_DUPFD_QUERY: c_int = 1027;

interpose! {
    fn close(number: c_int) -> c_int {
        if working_directory::is_number(number) {
            return Some(Err(Errno::BADF));
        }
        on(number, |open| open::close(number, open).map(|()| 0))
    }

    fn dup(number: c_int) -> c_int {
        on(number, |open| duplicate(open, || {
            // SAFETY: numbers alone.
            unsafe { libc::syscall(libc::SYS_dup, number) }
        }))
    }

    fn flock(number: c_int, operation: c_int) -> c_int {
        let open = open::taken(number)?;
        let kind = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => LockKind::Shared,
            libc::LOCK_EX => LockKind::Exclusive,
            libc::LOCK_UN => LockKind::Unlock,
            _ => return Some(Err(Errno::INVAL)),
        };
        let wait = operation & libc::LOCK_NB == 0;
        Some(locks::lock(&open, Family::Whole, LockedBytes::ALL, kind, wait).map(|()| 0))
    }

    fn lockf | lockf64(number: c_int, command: c_int, len: off_t) -> c_int {
        let open = open::taken(number)?;
        let kind = if command == libc::F_ULOCK { libc::F_UNLCK } else { F_WRLCK };
        let whence = libc::SEEK_CUR as i16;
        let lock = libc::flock { l_type: kind as i16, l_whence: whence, l_start: 0, l_len: len, l_pid: 0 };
        if command == libc::F_TEST {
            let found = inside(|| locks::test(&open, Family::Process, &lock, bytes(number, &open, &lock)?));
            return Some(found.and_then(|found| if found.l_type == F_UNLCK as i16 { Ok(0) } else { Err(Errno::ACCESS) }));
        }
        Some(set_lock(number, &open, Family::Process, &lock, command == libc::F_LOCK))
    }

    fn ioctl(number: c_int, request: c_ulong, argument: usize) -> c_int {
        on(number, |open| match request {
            libc::FIOCLEX => set_close_on_exec(number, true),
            libc::FIONCLEX => set_close_on_exec(number, false),
            libc::FIONREAD => {
                let live = open.live()?;
                let size = live.client().attributes(live.caller(), live.node, live.handle_if_any())?.size.get();
                let left = size.saturating_sub(data::move_position(number, open, 0, libc::SEEK_CUR)? as u64);
                put(std::ptr::with_exposed_provenance_mut(argument), left.min(i32::MAX as u64) as c_int)?;
                Ok(0)
            }
            _ => Err(Errno::NOTTY),
        })
    }

    fn fcntl | fcntl64(number: c_int, command: c_int, argument: usize) -> c_int {
        control(number, command, argument)
    }
}

fn set_close_on_exec(number: c_int, is_on: bool) -> Result<c_int, Errno> {
    let flags = if is_on { rustix::io::FdFlags::CLOEXEC } else { rustix::io::FdFlags::empty() };
    rustix::io::fcntl_setfd(open::borrowed(number), flags).map(|()| 0)
}

/// Has the kernel duplicate a descriptor of a share.
fn duplicate(open: &Arc<Open>, make: impl FnOnce() -> i64) -> Result<c_int, Errno> {
    let made = make();
    if made < 0 {
        return Err(last_error());
    }
    note(made as c_int, open);
    Ok(made as c_int)
}

/// A number stands for an open file of a share now.
fn note(number: c_int, open: &Open) {
    if process::this().is_some_and(|process| !process.is_guest()) {
        open.add(number);
    }
}

fn control(number: c_int, command: c_int, argument: usize) -> Answer<c_int> {
    use libc::{F_GETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, F_SETLK, F_SETLKW};
    let open = open::taken(number)?;
    let given = std::ptr::with_exposed_provenance_mut::<libc::flock>(argument);
    let family = if matches!(command, F_GETLK | F_SETLK | F_SETLKW) { Family::Process } else { Family::Description };
    match command {
        F_SETLK | F_SETLKW | F_OFD_SETLK | F_OFD_SETLKW => {
            let Some(lock) = take(given) else { return Some(Err(Errno::FAULT)) };
            let wait = matches!(command, F_SETLKW | F_OFD_SETLKW);
            Some(set_lock(number, &open, family, &lock, wait))
        }
        F_GETLK | F_OFD_GETLK => Some(inside(|| {
            let lock = take(given).ok_or(Errno::FAULT)?;
            put(given, locks::test(&open, family, &lock, bytes(number, &open, &lock)?)?)?;
            Ok(0)
        })),
        _ => Some(inside(|| control_of_kernel(number, &open, command, argument))),
    }
}

/// What the kernel does with the descriptor itself.
fn control_of_kernel(number: c_int, open: &Arc<Open>, command: c_int, argument: usize) -> Result<c_int, Errno> {
    let by_kernel = |argument: usize| {
        // SAFETY: numbers alone, with these commands.
        unsafe { libc::syscall(libc::SYS_fcntl, number, command, argument) }
    };
    let done = |result: i64| if result < 0 { Err(last_error()) } else { Ok(result as c_int) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicate(open, || by_kernel(argument)),
        libc::F_GETFD | libc::F_SETFD | libc::F_GETOWN | libc::F_SETOWN | F_DUPFD_QUERY => done(by_kernel(argument)),
        libc::F_GETFL => {
            let status = done(by_kernel(0))? & (libc::O_APPEND | libc::O_NONBLOCK);
            let lasting = libc::O_ACCMODE | libc::O_DIRECTORY | libc::O_PATH | libc::O_DIRECT | libc::O_SYNC;
            Ok(open.described.flags & lasting | status)
        }
        libc::F_SETFL => done(by_kernel(argument & (libc::O_APPEND | libc::O_NONBLOCK) as usize)),
        _ => {
            report::refused("fcntl (another command)");
            Err(Errno::INVAL)
        }
    }
}

fn set_lock(number: c_int, open: &Open, family: Family, lock: &libc::flock, wait: bool) -> Result<c_int, Errno> {
    let kind = match c_int::from(lock.l_type) {
        libc::F_RDLCK if open.is_readable() => LockKind::Shared,
        libc::F_WRLCK if open.is_writable() => LockKind::Exclusive,
        libc::F_UNLCK => LockKind::Unlock,
        libc::F_RDLCK | libc::F_WRLCK => return Err(Errno::BADF),
        _ => return Err(Errno::INVAL),
    };
    let bytes = inside(|| bytes(number, open, lock))?;
    locks::lock(open, family, bytes, kind, wait).map(|()| 0)
}

/// The first and last byte of a lock.
fn bytes(number: c_int, open: &Open, lock: &libc::flock) -> Result<LockedBytes, Errno> {
    let base = match c_int::from(lock.l_whence) {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => data::move_position(number, open, 0, libc::SEEK_CUR)?,
        libc::SEEK_END => {
            let live = open.live()?;
            live.client().attributes(live.caller(), live.node, live.handle_if_any())?.size.get() as i64
        }
        _ => return Err(Errno::INVAL),
    };
    let start = base.checked_add(lock.l_start).ok_or(Errno::OVERFLOW)?;
    // A length below 0 is what lies before the start.
    let (first, end) = match lock.l_len {
        0 => (start, None),
        len @ 1.. => (start, Some(start.checked_add(len).ok_or(Errno::OVERFLOW)?)),
        len => (start.checked_add(len).ok_or(Errno::INVAL)?, Some(start)),
    };
    let start = u64::try_from(first).map_err(|_| Errno::INVAL)?;
    Ok(LockedBytes { start, last: end.map_or(u64::MAX, |end| end as u64 - 1) })
}

/// Puts a copy of a descriptor in place of another number, which may have been a file of a share.
fn replace(from: c_int, to: c_int, by_kernel: impl FnOnce() -> i64) -> Answer<c_int> {
    let process = process::this()?;
    let (source, replaced) = (open::taken(from), open::taken(to));
    let is_of_library = descriptor_floor::is_raised(to) || working_directory::is_number(to);
    if source.is_none() && replaced.is_none() && !is_of_library {
        return None;
    }
    Some(inside(|| {
        if is_of_library {
            // Else the library's bytes would go to the program's file.
            report::refused("dup2 (to a descriptor of byway)");
            return Err(Errno::BUSY);
        }
        let made = by_kernel();
        if made < 0 {
            return Err(last_error());
        }
        if !process.is_guest() && from != to {
            if let Some(replaced) = &replaced {
                locks::closed(replaced);
                replaced.remove(process);
            }
            match &source {
                Some(source) => source.add(to),
                None => streams::is_now(to, false),
            }
        }
        Ok(made as c_int)
    }))
}

interpose! {
    fn dup2(from: c_int, to: c_int) -> c_int {
        replace(from, to, || {
            // SAFETY: numbers alone.
            unsafe { libc::syscall(libc::SYS_dup3, from, to, 0) }
        })
    }

    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
        replace(from, to, || {
            // SAFETY: numbers alone.
            unsafe { libc::syscall(libc::SYS_dup3, from, to, flags) }
        })
    }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        process::this()?;
        Some(close_all(first, last, flags))
    }
}

/// Closes a range of numbers, but for those of this library.
fn close_all(first: c_uint, last: c_uint, flags: c_int) -> Result<c_int, Errno> {
    let process = process::this().ok_or(Errno::IO)?;
    let is_close = flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0;
    if is_close && !process.is_guest() {
        let numbers = first.min(process::NUMBERS as u32)..=last.min(process::NUMBERS as u32 - 1);
        let numbers = numbers.filter_map(|number| c_int::try_from(number).ok());
        for number in numbers.filter(|number| !working_directory::is_number(*number)) {
            // The kernel closes the number below.
            let _ = on(number, |open| {
                locks::closed(open);
                open.remove(process);
                Ok(())
            });
        }
    }
    let mut start = first;
    let mut kept: Vec<c_int> = descriptor_floor::raised().chain(working_directory::number()).collect();
    kept.sort_unstable();
    let kept = kept.into_iter().map(|number| number as c_uint).filter(|number| (first..=last).contains(number));
    let ends = kept.map(|number| (number.checked_sub(1), number + 1)).chain([(Some(last), last)]);
    for (end, next) in ends {
        if let Some(end) = end.filter(|end| *end >= start) {
            // SAFETY: numbers alone; those of this library are left out.
            if unsafe { libc::syscall(libc::SYS_close_range, start, end, flags) } < 0 {
                return Err(last_error());
            }
        }
        start = next;
    }
    Ok(0)
}

/// As `close_range` to the last number; it cannot fail.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(super) unsafe extern "C" fn closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    if process::this().is_some() && !is_inside() {
        let _ = close_all(first, c_uint::MAX, 0);
        return;
    }
    // SAFETY: numbers alone.
    if unsafe { libc::syscall(libc::SYS_close_range, first, c_uint::MAX, 0) } < 0 {
        fail::<c_int>(last_error());
    }
}
