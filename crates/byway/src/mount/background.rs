//! A mount whose process goes on in the background, with a log file.

use std::fs::{DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{CommandError, READY};

/// Bytes of the process's log that are shown when it fails.
const LOG_SHOWN_BYTES_MAX: u64 = 64 << 10;

/// Has a process of its own do it, and waits until the mount works.
pub(super) fn start(directory: &Path) -> Result<(), CommandError> {
    let program = std::env::current_exe().map_err(CommandError::Background)?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--background");
    let path = log_of(&std::path::absolute(directory).map_err(CommandError::Background)?);
    let unwritable = |source| CommandError::Log { path: path.clone(), source };
    let mut log = open(&path).map_err(unwritable)?;
    let before = log.seek(SeekFrom::End(0)).map_err(unwritable)?;
    let mut command = Command::new(program);
    // Not of the terminal's group: a key for this one does not end the mount.
    command.args(arguments).process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(log.try_clone().map_err(unwritable)?).spawn().map_err(CommandError::Background)?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut line).map_err(CommandError::Background)?;
    }
    if !line.starts_with(READY) {
        let _ = child.wait();
        log.seek(SeekFrom::Start(before)).map_err(unwritable)?;
        let _ = io::copy(&mut log.take(LOG_SHOWN_BYTES_MAX), &mut io::stderr());
        return Err(CommandError::BackgroundFailed(directory.to_owned()));
    }
    crate::output::line(line.trim_end());
    Ok(())
}

/// Where the process of a mount on a directory logs to: in the folder of what runs now, of the machine or of the user.
fn log_of(directory: &Path) -> PathBuf {
    let user = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !rustix::process::geteuid().is_root());
    let folder = user.map_or_else(|| PathBuf::from("/run"), PathBuf::from);
    folder.join("byway/mounts").join(format!("{}.log", name_of(directory)))
}

/// A directory's path as one name, which no other path has: what is neither letter nor digit is written in hexadecimal, and a slash as a dash.
fn name_of(directory: &Path) -> String {
    let bytes = directory.as_os_str().as_bytes();
    let one = |byte: &u8| match byte {
        b'/' => "-".to_owned(),
        byte if byte.is_ascii_alphanumeric() => char::from(*byte).to_string(),
        byte => format!("%{byte:02x}"),
    };
    bytes.strip_prefix(b"/").unwrap_or(bytes).iter().map(one).collect()
}

fn open(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    File::options().create(true).append(true).read(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_has_a_log_of_its_own() {
        assert_eq!(name_of(Path::new("/mnt/share")), "mnt-share");
        assert_eq!(name_of(Path::new("/mnt-share")), "mnt%2dshare");
        assert_eq!(name_of(Path::new("/mnt/a b%/..")), "mnt-a%20b%25-%2e%2e");
    }
}
