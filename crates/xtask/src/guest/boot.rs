//! One boot of a guest, from the start of qemu to its end.

use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What `init.sh` prints when the kernel's own messages are over.
const MARK: &str = "@@guest@@";
const PROCESSORS: &str = "2";
/// The programs lie in it, packed and unpacked.
const MEMORY_MIB: &str = "1536";
/// Lines of the console that are shown when a guest dies before its script begins.
const TAIL_LINES: usize = 40;
/// The emulated kernel has panicked at an `int3` that it wrote into its own code (jump labels), while it booted and later: a
/// fault of the emulator, which rarely comes twice.
const BOOTS: usize = 2;
/// How the console says so.
const EMULATOR_FAULT: &str = "Oops: int3";

/// A guest that is not yet started.
pub struct Guest<'a> {
    pub system: &'a System,
    pub initramfs: &'a Initramfs<'a>,
    /// Raw images: `/dev/vda`, `/dev/vdb` and so on.
    pub disks: &'a [PathBuf],
    /// A guest that runs longer is an error.
    pub limit: Duration,
    pub extra: Extra<'a>,
}

/// What only some guests have.
#[derive(Clone, Copy, Default)]
pub struct Extra<'a> {
    /// A kernel of its own, as an ELF file; else Debian's.
    pub kernel: Option<&'a Path>,
    /// Arguments of qemu: more devices.
    pub devices: &'a [String],
}

/// How a guest ended.
pub struct Ending {
    /// The script's exit status; none where the power was cut.
    pub status: Option<u32>,
    /// What the script printed.
    pub lines: Vec<String>,
}

impl Guest<'_> {
    /// Boots the guest, showing what its script prints, and waits for its end. A guest that ends before its script begins is
    /// booted once more, as nothing has happened in it; and so is one without disks whose kernel met the emulator's fault.
    pub fn boot(&self) -> Result<Ending> {
        let scratch = tempfile::Builder::new().prefix("boot-").tempdir_in(self.system.scratch())?;
        let initramfs = scratch.path().join("initramfs");
        self.initramfs.write(&initramfs)?;
        let report = scratch.path().join("status");
        for boot in 1..=BOOTS {
            let child = self.command(&initramfs, &report).spawn().context("cannot start qemu")?;
            match Emulator(child).follow(self.limit)? {
                Followed::Script(lines) => {
                    let status = std::fs::read_to_string(&report).ok().and_then(|text| parse_status(&text));
                    let emulator_fault = status.is_none() && lines.iter().any(|line| line.contains(EMULATOR_FAULT));
                    if emulator_fault && self.disks.is_empty() && boot < BOOTS {
                        println!(
                            "guest: boot {boot} of {BOOTS} ended by a fault of the emulator ({EMULATOR_FAULT}): once more"
                        );
                        continue;
                    }
                    return Ok(Ending { status, lines });
                }
                Followed::Nothing(console) => {
                    println!("guest: boot {boot} of {BOOTS} ended before its script began{console}");
                }
            }
        }
        bail!("the guest ended {BOOTS} times before its script began")
    }

    fn command(&self, initramfs: &Path, report: &Path) -> Command {
        let mut qemu = self.system.qemu();
        qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"])
            .args(["-smp", PROCESSORS, "-m", MEMORY_MIB, "-display", "none", "-nodefaults", "-no-user-config"])
            // A reset, which is how a script cuts the power, ends qemu.
            .args(["-no-reboot", "-device", "virtio-rng-pci", "-serial", "stdio"])
            .args(["-serial", &format!("file:{}", report.display())])
            .arg("-kernel")
            .arg(self.extra.kernel.map_or_else(|| self.system.vmlinux(), Path::to_owned))
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 panic=-1 mitigations=off quiet loglevel=3"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        qemu.args(self.extra.devices);
        for disk in self.disks {
            // What the guest has written is in the image, whether this machine has it on its own
            // disk or not: only the guest loses its power, so its flushes need not go further.
            qemu.args(["-drive", &format!("file={},if=virtio,format=raw,cache=unsafe", disk.display())]);
        }
        qemu
    }
}

/// What came of a boot.
#[derive(Debug, PartialEq, Eq)]
enum Followed {
    /// What the script printed.
    Script(Vec<String>),
    /// The guest ended by itself before its script began: the end of what the console said.
    Nothing(String),
}

/// qemu, killed by its process id when dropped.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        // Both fail only for a child that has ended already, which is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Emulator {
    /// Shows and returns the lines of the script until qemu ends.
    fn follow(mut self, limit: Duration) -> Result<Followed> {
        let console = lines_of(self.0.stdout.take().context("no standard output")?);
        let complaints = lines_of(self.0.stderr.take().context("no standard error")?);
        let deadline = Instant::now() + limit;
        let mut early = Vec::new();
        let mut script = None;
        loop {
            match console.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line == MARK => script = Some(Vec::new()),
                Ok(line) => match &mut script {
                    Some(lines) => {
                        println!("guest| {line}");
                        lines.push(line);
                    }
                    None => early.push(line),
                },
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the guest ran longer than {} s{}", limit.as_secs(), tail(&early))
                }
            }
        }
        let status = self.0.wait()?;
        match script {
            _ if !status.success() => {
                early.extend(complaints);
                bail!("qemu ended with {status}{}", tail(&early))
            }
            Some(lines) => Ok(Followed::Script(lines)),
            None => Ok(Followed::Nothing(tail(&early))),
        }
    }
}

/// The end of what the console said before the script began, which was not shown as it came.
fn tail(early: &[String]) -> String {
    let start = early.len().saturating_sub(TAIL_LINES);
    [&[String::new()], &early[start..]].concat().join("\n")
}

/// Lines as they come, without the carriage returns of a terminal.
fn lines_of(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(std::result::Result::ok) {
            let line = String::from_utf8_lossy(&line);
            // Nobody listens any more when the guest ran too long.
            if sender.send(line.trim_end_matches('\r').to_owned()).is_err() {
                break;
            }
        }
    });
    receiver
}

fn parse_status(report: &str) -> Option<u32> {
    report.trim().strip_prefix("status=")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_status_or_nothing() {
        assert_eq!(parse_status("status=3\r\n"), Some(3));
        assert_eq!(parse_status(""), None);
        assert_eq!(parse_status("status="), None);
    }

    #[test]
    fn only_what_follows_the_mark_is_the_scripts() {
        let start = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
            Emulator(command.spawn().unwrap()).follow(Duration::from_secs(20))
        };
        let script = ["one", "two"].map(str::to_owned).to_vec();
        assert_eq!(start("printf 'kernel\\r\\n@@guest@@\\r\\none\\r\\ntwo\\r\\n'").unwrap(), Followed::Script(script));
        assert_eq!(start("echo kernel").unwrap(), Followed::Nothing("\nkernel".to_owned()));
        assert!(start("echo kernel; exit 3").is_err());
        assert!(start("echo @@guest@@; exit 3").is_err());
    }
}
