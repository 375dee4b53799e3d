//! End-to-end tests: the built binary against the clients that people use.
//!
//! The tests are in `tests/`; this library has their common parts. A test that cannot run on a machine says so with [`skip`]
//! and returns: `cargo xtask test` prints every such line.
#![forbid(unsafe_code)]

mod certificates;
pub mod far;
mod foreign;
mod mounts;
mod networks;
mod rig;
mod script;
mod server;

pub use byway_skip::{SkipReason, skip, skip_this};
pub use certificates::Certificates;
pub use foreign::{ForeignServer, noise};
pub use mounts::{Mount, MountRig, SmallDisk, lacks_mounts};
pub use networks::{FAR, NEAR, Networks, Side};
pub use rig::Rig;
pub use script::Script;
pub use server::{
    LIBNBD_PRELUDE, LIMIT, Server, binary, cpu_ticks, libnbd_python, run, run_well, until, wait_until_idle,
};

use std::path::PathBuf;

use byway_reactor::{IoChoice, Reactor};

/// The event loops that this machine has, for `--io`: epoll, and io_uring unless the kernel refuses it, which is said aloud.
pub fn backends() -> Vec<&'static str> {
    if Reactor::open(IoChoice::Uring, 1).is_ok() {
        return vec!["uring", "epoll"];
    }
    byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
    vec!["epoll"]
}

/// Finds a program in `PATH` and in the administrators' folders, which a user's `PATH` may lack.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_found_by_name() {
        assert!(find_tool("sh").is_some());
        assert_eq!(find_tool("no-such-program-anywhere"), None);
    }
}
