//! `cargo xtask guest rdma`: the RDMA provider over soft-RoCE, which is the kernel's own.
//!
//! `crates/fabric/examples/rdma_check` tests the provider: it is both ends of its connections, and starts a second process for
//! the checks in which a peer dies. It says which check fails. Then the suites of the fabric, of nodes and of the service have
//! their cases over RDMA, and byway itself serves volumes and copies them, also when a peer, the link or the device goes, as
//! `rdma.sh` says. At last the processes of a job share memory over it.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Result, bail};
use std::time::Duration;

/// Some minutes under emulation on a busy machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(30);
/// rdma_rxe asks the crypto API for crc32 by name, which no line of `modules.dep` tells.
const MODULES: [&str; 5] = ["crc32_generic", "rdma_rxe", "rdma_ucm", "ib_uverbs", "dummy"];
/// What the provider and the libraries load at run time, by name or path.
const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libibverbs/librxe-rdmav34.so"];
/// The last line of a run in which nothing failed.
const PASSED: &str = "rdma.sh: PASSED";
/// The server is killed when so many bytes of a copy have arrived.
const COPIED_BEFORE_KILL: usize = 8 << 20;

/// What can be run by itself; `rdma.sh` has them by these numbers.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The provider's own checks.
    Check = 1,
    /// The fabric's suites: conformance, and nodes; calls between nodes.
    Conformance = 2,
    /// The service's suites.
    Service = 3,
    /// Copies and benchmarks, with what the device counted at each copy; the C library's example of a volume.
    Copies = 4,
    /// Peers killed, the link down, the device removed, memory refused.
    Faults = 5,
    /// Processes that share memory.
    Jobs = 6,
}

/// Everything, or one part of it.
pub fn run(system: &System, only: Option<Part>) -> Result<()> {
    let runs = |part| only.is_none_or(|only| only == part);
    let settings = [("copied_before_kill", COPIED_BEFORE_KILL), ("part", only.map_or(0, |part| part as usize))];
    let mut initramfs = Initramfs::bare(system, &MODULES, &settings, include_str!("rdma.sh"))?;
    for program in ["ip", "rdma"] {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    if runs(Part::Check) {
        initramfs.add_program("rdma_check", &super::build_example("byway-fabric", "rdma_check")?)?;
    }
    if runs(Part::Conformance) {
        for suite in ["conformance", "node"] {
            initramfs.add_program(suite, &super::build_suite("byway-fabric", suite)?)?;
        }
        for suite in ["two_nodes", "three_nodes"] {
            initramfs.add_program(suite, &super::build_suite("byway-rpc", suite)?)?;
        }
    }
    if runs(Part::Service) {
        for suite in ["native", "loops", "tls", "hostile", "library"] {
            initramfs.add_program(suite, &super::build_suite("byway-service", suite)?)?;
        }
    }
    if runs(Part::Jobs) {
        initramfs.add_program("sor", &super::build_example("byway-dsm", "sor")?)?;
    }
    if runs(Part::Copies) || runs(Part::Faults) || runs(Part::Jobs) {
        initramfs.add_program("byway", &super::build_byway_for_tests()?)?;
    }
    if runs(Part::Copies) {
        initramfs.add_program("volume", &super::build_c_example("volume")?)?;
    }
    for library in LIBRARIES {
        // The path that Debian's libibverbs has for its providers; the loader looks there too.
        let path = format!("usr/lib/x86_64-linux-gnu/{library}");
        initramfs.add_library(&path, &system.library(library)?)?;
    }
    initramfs.add_file("etc/libibverbs.d/rxe.driver", b"driver rxe\n".to_vec());
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra: Extra::default() }.boot()?;
    match ending.status {
        Some(0) if ending.lines.iter().any(|line| line == PASSED) => {
            println!("guest rdma: PASSED");
            Ok(())
        }
        Some(status) => {
            let failed: Vec<&str> =
                ending.lines.iter().filter(|line| line.contains("FAILED")).map(String::as_str).collect();
            bail!("guest rdma: FAILED with status {status}: {}", failed.join("; "))
        }
        None => bail!("guest rdma: FAILED, the guest died"),
    }
}
