//! The library that `byway run` makes the dynamic linker load before a program's own (`LD_PRELOAD`).
//!
//! It has functions of libc that take paths and descriptors (`symbols`). A call on a path below a prefix goes straight to the share's
//! server, into and out of the program's own memory: there is no mount, no agent, no cache, and no thread. `target` and `walk` find
//! what a path names, `open` has the open files, behind descriptors of the kernel's (`placeholder`). A program without maps in its
//! environment pays a test for each call.

#![cfg_attr(
    test,
    allow(dead_code, reason = "the functions of libc are defined in the library alone, not in its tests")
)]

mod attributes;
mod c;
mod data;
mod inside;
mod locks;
mod maps;
mod open;
mod placeholder;
mod process;
mod report;
mod session;
mod symbols;
mod target;
mod umask;
mod walk;
mod working_directory;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static AFTER_MAIN: extern "C" fn() = after_main;

/// Finds the maps and what was inherited. Connects to nothing yet.
#[cfg(not(test))]
extern "C" fn before_main() {
    let begun = inside::inside(|| {
        report::begin_program();
        process::begin_program();
        Ok(())
    });
    if begun.is_ok() && process::this().is_some() {
        (0..3).filter(|number| open::is_ours(*number)).for_each(open::arrived);
    }
}

/// The C library writes what its streams hold after this: here that comes first.
#[cfg(not(test))]
extern "C" fn after_main() {
    if process::this().is_some() {
        // SAFETY: null is all streams.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        symbols::process::end();
    }
}
