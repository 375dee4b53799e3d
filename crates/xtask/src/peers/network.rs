//! A network namespace with only a loopback device, and the same socket settings for all programs.

use crate::process;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// Set in the program that runs inside.
const INSIDE: &str = "BYWAY_PEERS_NAMESPACE";

/// Congestion control and buffers (minimum, default, maximum in bytes). cubic is what most Linux
/// machines use; the buffers are the kernel's own defaults on a machine of this size.
const SETTINGS: [(&str, &str); 3] = [
    ("net/ipv4/tcp_congestion_control", "cubic"),
    ("net/ipv4/tcp_rmem", "4096 131072 6291456"),
    ("net/ipv4/tcp_wmem", "4096 16384 4194304"),
];

/// Whether this program runs inside the namespace.
pub fn is_isolated() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// The algorithms that a namespace may choose from: a list of the whole machine.
const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

/// Runs this program again with the same arguments, in a new namespace. While it runs, namespaces may choose cubic.
pub fn run_again_isolated() -> Result<()> {
    let allowed = std::fs::read_to_string(ALLOWED)?;
    if !allowed.split_whitespace().any(|name| name == "cubic") {
        std::fs::write(ALLOWED, format!("{} cubic", allowed.trim()))
            .context("cannot let a namespace choose cubic; it needs root and the kernel's tcp_cubic")?;
    }
    let outcome = run_again();
    let _ = std::fs::write(ALLOWED, allowed.trim());
    outcome
}

fn run_again() -> Result<()> {
    let mut command = Command::new("unshare");
    // Mounts of a measurement end with it.
    command.args(["--net", "--mount", "--"]);
    command.arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(INSIDE, "1");
    // A signal ends the measurement inside, which takes its servers along; this program stays to put the list back.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let mut child = command.spawn().context("cannot start unshare (package util-linux)")?;
    let (id, handle) = (Pid::from_child(&child), signals.handle());
    let status = std::thread::scope(|scope| {
        scope.spawn(move || {
            for signal in signals.forever() {
                // `unshare` has become the measurement. It fails once that has ended.
                let _ = Signal::from_named_raw(signal).map(|signal| kill_process(id, signal));
            }
        });
        let status = child.wait();
        handle.close();
        status
    })?;
    if let Some(signal) = status.signal() {
        bail!(
            "the measurement was killed by signal {signal}; end the servers that it left, and remove its folder in /dev/shm"
        );
    }
    if !status.success() {
        bail!("the measurement in its network namespace failed: {status}; it needs root");
    }
    Ok(())
}

/// Brings loopback up, makes the settings, and returns them as the kernel now shows them.
pub fn prepare() -> Result<BTreeMap<String, String>> {
    process::output(Command::new("ip").args(["link", "set", "lo", "up"]))?;
    let mut shown = BTreeMap::new();
    for (name, value) in SETTINGS {
        let path = format!("/proc/sys/{name}");
        std::fs::write(&path, value).with_context(|| format!("cannot set {path}"))?;
        let now = std::fs::read_to_string(&path)?;
        let now: Vec<&str> = now.split_whitespace().collect();
        shown.insert(name.replace('/', "."), now.join(" "));
    }
    let kernel = process::output(Command::new("uname").arg("-r"))?;
    shown.insert("kernel".to_owned(), kernel.trim().to_owned());
    let fio = process::output(Command::new("fio").arg("--version"))?;
    shown.insert("fio".to_owned(), fio.trim().to_owned());
    let processors = std::thread::available_parallelism()?;
    shown.insert("processors".to_owned(), processors.to_string());
    Ok(shown)
}
