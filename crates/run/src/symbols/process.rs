//! The process: its umask and its end.

use std::ffi::c_int;

use libc::mode_t;

use crate::inside::inside;
use crate::{process, umask};

interpose! {
    fn umask(mask: mode_t) -> UmaskResult {
        if process::this().is_some() {
            umask::set(mask);
        }
        None
    }
}

/// `umask` never fails.
type UmaskResult = c_int;

/// The server keeps nothing for a program that has ended.
pub(crate) fn end() {
    if let Some(process) = process::this().filter(|process| !process.is_guest()) {
        let _ = inside(|| {
            process.end();
            Ok(())
        });
    }
}

/// Ends without the functions of `atexit`.
fn exit_now(status: c_int) -> ! {
    end();
    // SAFETY: a number alone.
    unsafe { libc::syscall(libc::SYS_exit_group, status) };
    unreachable!("the process has ended")
}

#[cfg(not(test))]
#[unsafe(no_mangle)]
pub(super) extern "C" fn _exit(status: c_int) -> ! {
    exit_now(status)
}

#[cfg(not(test))]
#[unsafe(no_mangle)]
pub(super) extern "C" fn _Exit(status: c_int) -> ! {
    exit_now(status)
}
