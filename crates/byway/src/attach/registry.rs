//! Which volumes are attached on this machine: a file of each in a folder, locked by the process that serves the device.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

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
}

/// An attachment and whether its process lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub attachment: Attachment,
    pub lives: bool,
}

/// The place of this process in the registry; its file and link go when this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    file: File,
    path: PathBuf,
    link: Option<PathBuf>,
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

impl Claim {
    /// Takes the name; `None` if a living process has it.
    pub(super) fn new(name: &str) -> io::Result<Option<Self>> {
        prepare()?;
        let path = file_of(name);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { file, path, link: None })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes down what was attached, and makes the link to the device.
    pub(super) fn publish(&mut self, attachment: &Attachment) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(serde_json::json!(attachment).to_string().as_bytes())?;
        let link = Path::new(LINKS).join(&attachment.name);
        let linked = fs::create_dir_all(LINKS).and_then(|()| {
            // One that a killed process left.
            let _ = fs::remove_file(&link);
            std::os::unix::fs::symlink(&attachment.device, &link)
        });
        match linked {
            Ok(()) => self.link = Some(link),
            Err(error) => tracing::warn!(%error, link = %link.display(), "no link to the device; use its own name"),
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for path in self.link.iter().chain([&self.path]) {
            let _ = fs::remove_file(path);
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
    let lives = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK);
    Some(Listed { attachment, lives })
}

/// Removes what a killed process left of an attachment.
pub(super) fn remove(name: &str) {
    for path in [file_of(name), Path::new(LINKS).join(name)] {
        let _ = fs::remove_file(path);
    }
}
