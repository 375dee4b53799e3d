//! `cargo xtask guest ocfs2`: a cluster file system on one volume that two machines have attached, as gmblock's users had it.
//!
//! Two guests with a network of their own: the first one serves the volume too. Both mount OCFS2 on it, write and read each other's files, count in
//! one file under a lock of the cluster, and do not notice that the server is killed.

use super::boot::{Ending, Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Context, Result, anyhow, bail};
use std::path::Path;
use std::time::{Duration, Instant};

/// Three minutes under emulation; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(15);
/// The second guest is started when the first one listens for it.
const LISTENS: Duration = Duration::from_secs(60);
const MODULES: [&str; 7] =
    ["virtio_net", "crc32c_generic", "ocfs2", "ocfs2_stack_o2cb", "ocfs2_dlm", "ublk_drv", "configfs"];
const PROGRAMS: [&str; 8] = ["dd", "flock", "fsck.ocfs2", "ip", "mkfs.ocfs2", "mount.ocfs2", "o2cb", "ocfs2_hb_ctl"];
/// Files that each node writes, and how often each counts.
const FILES: usize = 20;
const COUNTS: usize = 40;

pub fn run(system: &System) -> Result<()> {
    let byway = super::build_byway_for_tests()?;
    let folder = tempfile::Builder::new().prefix("ocfs2-").tempdir_in(system.scratch())?;
    let socket = folder.path().join("network");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| boot(system, &byway, 1, &socket));
        let listened = wait_for(&socket);
        let second = listened.and_then(|()| boot(system, &byway, 2, &socket));
        let first = first.join().map_err(|_| anyhow!("the first guest's thread has panicked"))?;
        for (node, ending) in [(1, first?), (2, second?)] {
            match ending.status {
                Some(0) => {}
                Some(status) => bail!("guest ocfs2: FAILED, the script of node {node} ended with status {status}"),
                None => bail!("guest ocfs2: FAILED, node {node} died"),
            }
        }
        println!("guest ocfs2: PASSED");
        Ok(())
    })
}

fn boot(system: &System, byway: &Path, node: usize, socket: &Path) -> Result<Ending> {
    let settings = [("node", node), ("files", FILES), ("counts", COUNTS)];
    let mut initramfs = Initramfs::bare(system, &MODULES, &settings, include_str!("ocfs2.sh"))?;
    for program in PROGRAMS {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    initramfs.add_program("byway", byway)?;
    let role = if node == 1 { "server=on" } else { "server=off" };
    let devices = [
        "-netdev".to_owned(),
        format!("stream,id=net,{role},addr.type=unix,addr.path={}", socket.display()),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=net,mac=52:54:00:00:00:0{node},romfile="),
    ];
    let extra = Extra { devices: &devices, ..Extra::default() };
    Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra }.boot()
}

fn wait_for(socket: &Path) -> Result<()> {
    let until = Instant::now() + LISTENS;
    while !socket.exists() {
        if Instant::now() > until {
            bail!("guest ocfs2: the first guest does not listen for the second one");
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
    std::fs::metadata(socket).map(drop).context("the socket of the first guest has gone")
}
