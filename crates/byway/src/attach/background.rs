//! Starting the process of a device behind a shell's back: the same command once more, in a session of its own.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::process::{Command, Stdio};

use super::command::AttachError;
use super::registry;

/// The flag of the process that was started so.
pub(super) const FLAG: &str = "--in-background";

/// Bytes of the process's log that are shown when it fails.
const LOG_SHOWN_BYTES_MAX: u64 = 64 << 10;

/// Starts it and waits until its device is ready; gives the device.
pub(super) fn start(name: &str) -> Result<String, AttachError> {
    let failed = |source: io::Error| AttachError::Background { source };
    registry::prepare().map_err(AttachError::State)?;
    let path = registry::log_of(name);
    let mut log = File::options().create(true).append(true).read(true).open(&path).map_err(failed)?;
    let before = log.seek(SeekFrom::End(0)).map_err(failed)?;
    let mut child = Command::new(std::env::current_exe().map_err(failed)?)
        .args(std::env::args_os().skip(1))
        .arg(FLAG)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.try_clone().map_err(failed)?)
        .spawn()
        .map_err(failed)?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line).map_err(failed)?;
    }
    if let Some(device) = line.strip_suffix('\n') {
        return Ok(device.to_owned());
    }
    let _ = child.wait();
    let mut said = String::new();
    log.seek(SeekFrom::Start(before)).map_err(failed)?;
    let _ = log.take(LOG_SHOWN_BYTES_MAX).read_to_string(&mut said);
    // The last line is the reason, as this program says it on standard error.
    let reason = said.lines().rev().find_map(|line| line.strip_prefix("byway: ")).unwrap_or("see its log");
    Err(AttachError::Started { reason: reason.to_owned(), log: path })
}

/// What the process does first: no terminal's end, and no lack of memory, ends the device, which keeps no file system busy. Paths of
/// the command line are absolute by then.
pub(super) fn settle() -> io::Result<()> {
    std::env::set_current_dir("/")?;
    // It is a session's leader already if it was started by hand so.
    let _ = rustix::process::setsid();
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    Ok(())
}
