//! Jobs of the examples of this crate.

use std::path::PathBuf;

use byway_dsm::Wire;
use byway_dsm::launch::{JobEnd, Launch};
use byway_skip::{SkipReason, skip_this};

/// An example of this crate, built beside the tests.
pub fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

/// Whether this machine has what a job needs; says so if not.
pub fn can_run() -> bool {
    use byway_reactor::userfault::{Features, Userfault};
    let opened = Userfault::open(Features::WRITE_PROTECT.and(Features::MOVE), true);
    if opened.is_err() {
        skip_this(SkipReason::Machine("the kernel refuses userfaultfd with write protection and moves of pages"));
    }
    opened.is_ok()
}

pub fn launch(ranks: usize, wire: Wire, name: &str, arguments: &[&str]) -> Launch {
    let arguments = arguments.iter().map(Into::into).collect();
    Launch { wire, arguments, ..Launch::new(ranks, example(name)) }
}

/// Runs a job to its end: how it ended, and the lines that it printed with their ranks.
pub fn run(job: &Launch) -> (JobEnd, Vec<(usize, String)>) {
    let mut lines = Vec::new();
    let end = job.start().unwrap().wait(|rank, _, line| lines.push((rank, String::from_utf8_lossy(line).into_owned())));
    (end, lines)
}

pub const WIRES: [Wire; 3] = [Wire::Shm, Wire::Unix, Wire::Tcp];
