//! Which volumes are attached on this machine: a file of each in a folder, locked by the process that serves the device.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Flock, FlockType, fcntl_getlk};
use serde::{Deserialize, Serialize};

use super::command::AttachError;
use crate::limits::ATTACHMENTS_MAX;

/// Where the files are: not in /run/byway, which systemd removes when a node of this machine stops (RuntimeDirectory).
const FOLDER: &str = "/run/byway-attach";
/// Where a link with the attachment's name leads to its device.
const LINKS: &str = "/dev/byway";

/// What the file of a device says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attachment {
    /// `--as`, or the volume's name.
    pub name: String,
    /// The volume.
    pub uri: String,
    /// `/dev/loopN`; empty while it is being made.
    pub device: PathBuf,
    /// The process.
    pub pid: i32,
    /// Bytes of the volume when it was attached.
    pub bytes: u64,
    /// Why the device ended before the server had confirmed all writes.
    pub failed: Option<String>,
}

/// An attachment and whether its process lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub attachment: Attachment,
    pub lives: bool,
}

/// The place of this process in the registry. Once something was attached its file stays until [`Claim::end`] says how it ended:
/// a file that stayed tells of a process that was killed.
#[derive(Debug)]
pub(super) struct Claim {
    file: File,
    name: String,
    attachment: Option<Attachment>,
}

/// Names of attachments are names of files: those of volumes are.
fn file_of(name: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{name}.json"))
}

/// Where the process of an attachment logs to, in the background.
pub(super) fn log_of(name: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{name}.log"))
}

/// Makes the folder.
pub(super) fn prepare() -> io::Result<()> {
    fs::create_dir_all(FOLDER)
}

/// Opens the file of a name and locks it; `None` if a living process has it.
fn open_locked(name: &str) -> io::Result<Option<File>> {
    let path = file_of(name);
    loop {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        // A record lock: whether it is held can be asked without holding it.
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK | Errno::ACCESS) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // Its last owner may have removed it since it was opened.
        let (locked, there) = (file.metadata()?, fs::metadata(&path));
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (locked.dev(), locked.ino())) {
            return Ok(Some(file));
        }
    }
}

/// Removes the file and link of a name, whose file this process has locked.
fn remove_locked(name: &str) {
    for path in [Path::new(LINKS).join(name), file_of(name)] {
        let _ = fs::remove_file(path);
    }
}

impl Claim {
    /// Takes the name; `None` if a living process has it.
    pub(super) fn new(name: &str) -> io::Result<Option<Self>> {
        prepare()?;
        let Some(file) = open_locked(name)? else { return Ok(None) };
        Ok(Some(Self { file, name: name.to_owned(), attachment: None }))
    }

    fn write(&mut self, attachment: &Attachment) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(serde_json::json!(attachment).to_string().as_bytes())
    }

    /// Writes the attachment to its file, and makes the link to the device.
    pub(super) fn publish(&mut self, attachment: Attachment) -> io::Result<()> {
        self.write(&attachment)?;
        let link = Path::new(LINKS).join(&attachment.name);
        let linked = fs::create_dir_all(LINKS).and_then(|()| {
            // One that a killed process left.
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&attachment.device, &link)
        });
        if let Err(error) = linked {
            tracing::warn!(%error, link = %link.display(), "cannot link to the device; use the device's own name");
        }
        self.attachment = Some(attachment);
        Ok(())
    }

    /// The device has ended: well, with all that was written at the server, or not, which is left for [`take_failure`].
    pub(super) fn end(mut self, result: &Result<(), AttachError>) {
        let Some(mut attachment) = self.attachment.take() else { return };
        let Err(error) = result else { return };
        attachment.failed = Some(error.to_string());
        let written = self.write(&attachment);
        if let Err(error) = written {
            tracing::error!(%error, "cannot record in the registry that the last flush failed");
        }
        self.attachment = Some(attachment);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.attachment.is_none() {
            remove_locked(&self.name);
        }
    }
}

/// All attachments, in the order of their names.
pub(super) fn list() -> io::Result<Vec<Listed>> {
    let folder = match fs::read_dir(FOLDER) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in folder.take(ATTACHMENTS_MAX) {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json")
            && let Some(listed) = read(&path)
        {
            found.push(listed);
        }
    }
    found.sort_by(|a, b| a.attachment.name.cmp(&b.attachment.name));
    Ok(found)
}

/// `None` for one that goes or comes just now.
fn read(path: &Path) -> Option<Listed> {
    let mut file = File::open(path).ok()?;
    let mut text = String::new();
    (&mut file).take(64 << 10).read_to_string(&mut text).ok()?;
    let attachment = serde_json::from_str(&text).ok()?;
    let any = Flock::from(FlockType::WriteLock);
    let lives = fcntl_getlk(&file, &any).is_ok_and(|holder| holder.is_some());
    Some(Listed { attachment, lives })
}

/// Removes what a process left that has ended, unless another one has taken the name.
pub(super) fn remove(name: &str) {
    if let Ok(Some(_locked)) = open_locked(name) {
        remove_locked(name);
    }
}

/// After the end of an attachment's process: why not all that was written is at the server, `None` if it is. What the process left
/// is removed.
pub(super) fn take_failure(ended: &Attachment) -> Option<String> {
    let left = read(&file_of(&ended.name)).filter(|left| left.attachment.pid == ended.pid)?;
    remove(&ended.name);
    Some(left.attachment.failed.unwrap_or_else(|| "its process died before it had written out everything".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of this test's own, which goes with it.
    struct Entry(String);

    impl Entry {
        fn new(what: &str) -> Self {
            Self(format!("unit-{what}-{}", std::process::id()))
        }

        fn attachment(&self) -> Attachment {
            let (name, pid) = (self.0.clone(), std::process::id() as i32);
            Attachment { name, uri: String::new(), device: "/dev/null".into(), pid, bytes: 1, failed: None }
        }
    }

    impl Drop for Entry {
        fn drop(&mut self) {
            remove_locked(&self.0);
        }
    }

    fn lacks_the_folder() -> bool {
        let lacks = !rustix::process::geteuid().is_root() || prepare().is_err();
        if lacks {
            byway_skip::skip_this(byway_skip::SkipReason::Machine("needs root and /run"));
        }
        lacks
    }

    #[test]
    fn an_end_without_a_flush_is_left_for_detach() {
        if lacks_the_folder() {
            return;
        }
        let entry = Entry::new("end");
        let claim = || {
            let mut claim = Claim::new(&entry.0).unwrap().unwrap();
            claim.publish(entry.attachment()).unwrap();
            claim
        };
        claim().end(&Ok(()));
        assert!(!file_of(&entry.0).exists());
        assert_eq!(take_failure(&entry.attachment()), None);

        claim().end(&Err(AttachError::Ended("no flush".to_owned())));
        assert_eq!(take_failure(&entry.attachment()), Some("the device has ended: no flush".to_owned()));
        assert!(!file_of(&entry.0).exists());

        // Its process is killed.
        drop(claim());
        let failure = take_failure(&entry.attachment()).unwrap();
        assert!(failure.starts_with("its process died"), "{failure}");
        // Another one has the name by now.
        drop(claim());
        assert_eq!(take_failure(&Attachment { pid: 1, ..entry.attachment() }), None);
        assert!(file_of(&entry.0).exists());
    }
}
