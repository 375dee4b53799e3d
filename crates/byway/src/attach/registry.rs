//! Which volumes are attached on this machine: a file of each in a folder, locked by the process that serves the device.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use byway_frontend::fuse::session::Terms;
use byway_frontend::nbd_device;
use byway_frontend::ublk::{self, UblkError};
use byway_service::block::client::ClientName;
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

/// Sessions that a process may begin, before the numbers of its successor's begin.
const SESSIONS_MAX: u64 = 1 << 32;

/// What the file of a device says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attachment {
    /// `--as`, or the volume's name.
    pub name: String,
    /// The volume.
    pub uri: String,
    /// `/dev/ublkbN`, `/dev/nbdN` or `/dev/loopN`.
    pub device: PathBuf,
    /// The process.
    pub pid: i32,
    /// Bytes of the volume when it was attached.
    pub bytes: u64,
    /// What a successor needs to take over a device of ublk.
    #[serde(default)]
    pub ublk: Option<UblkRecord>,
    /// What a successor needs to take over the file under a loop device.
    #[serde(default)]
    pub file: Option<FileRecord>,
    /// Why the device ended before the server had confirmed all writes.
    pub failed: Option<String>,
}

/// What a successor needs to take over a device of ublk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UblkRecord {
    /// The number by which the device is known.
    pub cookie: u64,
    /// The process's client.
    #[serde(flatten)]
    pub client: ClientRecord,
}

/// What a successor needs to take over the file under a loop device. The keeper has the descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    /// The process that starts the successor.
    pub keeper: KeeperRecord,
    /// What process and kernel agreed on at FUSE's INIT: the minor version, the longest WRITE in bytes, and flags.
    pub minor: u32,
    pub write_bytes_max: u32,
    pub flags: u64,
    /// The process's client.
    #[serde(flatten)]
    pub client: ClientRecord,
}

impl FileRecord {
    pub(super) fn new(keeper: KeeperRecord, terms: Terms, client: ClientRecord) -> Self {
        let Terms { minor, write_bytes_max, flags } = terms;
        Self { keeper, minor, write_bytes_max, flags, client }
    }

    pub(super) fn terms(&self) -> Terms {
        Terms { minor: self.minor, write_bytes_max: self.write_bytes_max, flags: self.flags }
    }
}

/// The keeper of a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeeperRecord {
    pub pid: i32,
    /// When it began, in the kernel's clock ticks: another process may have its number by now.
    pub started: u64,
}

impl KeeperRecord {
    /// Of a process; `None` if there is none.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The 22nd word; the second one is a name in parentheses, which may have blanks and parentheses.
        let started = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()?;
        let is_zombie = stat.rsplit_once(')')?.1.starts_with(" Z");
        (!is_zombie).then_some(Self { pid, started })
    }

    pub(super) fn lives(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

/// What a successor needs to be the same client to the server as the process before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClientRecord {
    /// The client's name.
    #[serde(rename = "client")]
    pub id: [u8; 16],
    /// The number of its first session; later processes begin with higher ones.
    pub first_session: u64,
    /// The device refuses writes. Records of earlier versions do not say so, and count as writable.
    #[serde(default)]
    pub read_only: bool,
    /// Each write is durable before it is complete.
    #[serde(default)]
    pub shared: bool,
    /// The server process, and the files that it has open for the volume, which have all writes that were acknowledged.
    pub instance: u64,
    pub store: u64,
}

impl Attachment {
    /// Whether the kernel has a device of ublk that waits for a successor of its process.
    pub(super) fn waits(&self) -> Result<bool, UblkError> {
        self.ublk.map_or(Ok(false), |record| ublk::is_there(&self.device, record.cookie))
    }

    /// Whether a keeper lives that starts a successor of a process that has died.
    pub(super) fn is_kept(&self) -> bool {
        self.failed.is_none() && self.file.is_some_and(|file| file.keeper.lives())
    }

    /// What a successor needs to be the same client.
    fn client_mut(&mut self) -> Option<&mut ClientRecord> {
        match (&mut self.ublk, &mut self.file) {
            (Some(ublk), _) => Some(&mut ublk.client),
            (None, Some(file)) => Some(&mut file.client),
            (None, None) => None,
        }
    }

    /// Removes what the kernel still has of the device after the end of its process. Loop devices go by themselves.
    pub(super) fn remove_device(&self) {
        remove_nbd_devices(|found| found == identifier(&self.name, self.pid));
        let Some(UblkRecord { cookie, .. }) = self.ublk else { return };
        if let Err(error) = ublk::remove(&self.device, cookie) {
            tracing::warn!(%error, device = %self.device.display(), "the device of a process that died is still there");
        }
    }
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

/// By what the kernel's NBD client knows the device of an attachment: this name of a process.
pub(super) fn identifier(name: &str, pid: i32) -> String {
    format!("byway:{name}:{pid}")
}

/// Removes the NBD devices that have no process any more, and such an identifier.
fn remove_nbd_devices(meant: impl Fn(&str) -> bool) {
    if let Err(error) = nbd_device::disconnect_left(meant) {
        tracing::warn!(%error, "the device of a process that died is still there");
    }
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
        // With the name locked, no living process has one.
        let prefix = format!("byway:{name}:");
        remove_nbd_devices(|found| found.strip_prefix(&prefix).is_some_and(|pid| !pid.contains(':')));
        // A device may wait for a successor: its record stays until there is one. It is read from the locked file: to close another
        // descriptor of the file would give up the lock.
        let attachment = parse(&file).filter(|left| left.ublk.is_some() || left.file.is_some());
        Ok(Some(Self { file, name: name.to_owned(), attachment }))
    }

    /// The attachment of a process that has died, if its device can have a successor.
    pub(super) fn left(&self) -> Option<&Attachment> {
        self.attachment.as_ref()
    }

    /// Records that this process begins sessions as the client of [`Claim::left`], and gives that client; `None` if there is none.
    ///
    /// A server refuses the number of an earlier session. So each process has numbers of its own, also one that dies before it has
    /// published its attachment.
    pub(super) fn begin_sessions(&mut self) -> io::Result<Option<ClientName>> {
        let record = self.change(|record| record.first_session = record.first_session.saturating_add(SESSIONS_MAX))?;
        Ok(record.map(|record| ClientName { id: record.id, first_session: record.first_session }))
    }

    /// Another server process, or the same with other files, has all that was acknowledged.
    pub(super) fn renew(&mut self, instance: u64, store: u64) -> io::Result<()> {
        self.change(|record| (record.instance, record.store) = (instance, store)).map(drop)
    }

    /// Another process keeps the descriptors.
    pub(super) fn renew_keeper(&mut self, keeper: KeeperRecord) -> io::Result<()> {
        let Some(mut attachment) = self.attachment.clone() else { return Ok(()) };
        let Some(file) = &mut attachment.file else { return Ok(()) };
        file.keeper = keeper;
        self.write(&attachment)?;
        self.attachment = Some(attachment);
        Ok(())
    }

    /// Changes the client's record, which is this process's then, in the file first; gives it.
    fn change(&mut self, change: impl FnOnce(&mut ClientRecord)) -> io::Result<Option<ClientRecord>> {
        let Some(mut attachment) = self.attachment.clone() else { return Ok(None) };
        let Some(record) = attachment.client_mut() else { return Ok(None) };
        change(record);
        let record = *record;
        // `byway detach` signals it, also before the attachment is published anew.
        attachment.pid = std::process::id() as i32;
        self.write(&attachment)?;
        self.attachment = Some(attachment);
        Ok(Some(record))
    }

    /// One that is killed meanwhile leaves the attachment as it was, or as it is to be, perhaps with the end of the longer one.
    fn write(&mut self, attachment: &Attachment) -> io::Result<()> {
        let text = serde_json::json!(attachment).to_string();
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        self.file.set_len(text.len() as u64)
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

    /// The device has not come to be: nothing is left of it.
    pub(super) fn withdraw(&mut self) {
        self.attachment = None;
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

/// What a file says; `None` for one that says nothing yet.
fn parse(file: &File) -> Option<Attachment> {
    let mut text = String::new();
    file.take(64 << 10).read_to_string(&mut text).ok()?;
    serde_json::Deserializer::from_str(&text).into_iter().next()?.ok()
}

/// `None` for one that goes or comes just now.
fn read(path: &Path) -> Option<Listed> {
    let file = File::open(path).ok()?;
    let attachment = parse(&file)?;
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
            Attachment {
                name,
                uri: String::new(),
                device: "/dev/null".into(),
                pid,
                bytes: 1,
                ublk: None,
                file: None,
                failed: None,
            }
        }
    }

    impl Drop for Entry {
        fn drop(&mut self) {
            remove_locked(&self.0);
        }
    }

    fn client_record() -> ClientRecord {
        ClientRecord { id: [8; 16], first_session: 1, read_only: false, shared: false, instance: 10, store: 11 }
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

    #[test]
    fn each_successor_has_numbers_of_its_own_for_its_sessions() {
        if lacks_the_folder() {
            return;
        }
        let entry = Entry::new("sessions");
        let mut claim = Claim::new(&entry.0).unwrap().unwrap();
        assert_eq!(claim.begin_sessions().unwrap(), None);
        let record = UblkRecord { cookie: 7, client: client_record() };
        claim.publish(Attachment { ublk: Some(record), ..entry.attachment() }).unwrap();
        drop(claim);
        // Both die before they have published anything.
        let begin = || Claim::new(&entry.0).unwrap().unwrap().begin_sessions().unwrap().unwrap();
        let (first, second) = (begin(), begin());
        assert_eq!((first.id, second.id), (record.client.id, record.client.id));
        assert!(1 < first.first_session && first.first_session < second.first_session, "{first:?} {second:?}");
    }

    #[test]
    fn a_device_that_has_not_come_to_be_leaves_nothing() {
        if lacks_the_folder() {
            return;
        }
        let entry = Entry::new("withdrawn");
        let mut claim = Claim::new(&entry.0).unwrap().unwrap();
        claim.publish(entry.attachment()).unwrap();
        claim.withdraw();
        drop(claim);
        assert!(!file_of(&entry.0).exists());
    }

    #[test]
    fn the_record_of_a_device_stays_until_a_successor_has_it() {
        if lacks_the_folder() {
            return;
        }
        let entry = Entry::new("successor");
        let record = UblkRecord { cookie: 7, client: client_record() };
        let mut claim = Claim::new(&entry.0).unwrap().unwrap();
        assert_eq!(claim.left(), None);
        claim.publish(Attachment { ublk: Some(record), ..entry.attachment() }).unwrap();
        claim.renew(1, 2).unwrap();
        // Its process is killed, and its first successor finds no server.
        drop(claim);
        drop(Claim::new(&entry.0).unwrap().unwrap());
        let successor = Claim::new(&entry.0).unwrap().unwrap();
        let left = successor.left().unwrap();
        let client = ClientRecord { instance: 1, store: 2, ..record.client };
        assert_eq!(left.ublk, Some(UblkRecord { client, ..record }));
        // A process that is killed while it writes a shorter record leaves the end of the longer one.
        drop(successor);
        let text = fs::read_to_string(file_of(&entry.0)).unwrap();
        fs::write(file_of(&entry.0), text + "11}}").unwrap();
        assert_eq!(Claim::new(&entry.0).unwrap().unwrap().left().unwrap().ublk.unwrap().client.instance, 1);
    }

    #[test]
    fn records_read_as_they_were_written() {
        // As processes wrote it before loop devices had successors.
        let old = r#"{"name":"a","uri":"u","device":"/dev/ublkb0","pid":1,"bytes":2,"ublk":{"cookie":7,"client":[8,8,8,8,8,8,8,8,8,8,8,8,8,8,8,8],"first_session":1,"instance":10,"store":11},"failed":null}"#;
        let read: Attachment = serde_json::from_str(old).unwrap();
        assert_eq!(read.ublk, Some(UblkRecord { cookie: 7, client: client_record() }));
        let keeper = KeeperRecord { pid: 3, started: 4 };
        let terms = Terms { minor: 40, write_bytes_max: 1 << 20, flags: u64::MAX };
        let file = FileRecord::new(keeper, terms, client_record());
        let written = Attachment { file: Some(file), ..Entry::new("records").attachment() };
        let read: Attachment = serde_json::from_str(&serde_json::json!(written).to_string()).unwrap();
        assert_eq!(read, written);
        assert_eq!(file.terms(), terms);
    }

    #[test]
    fn a_keeper_is_known_by_its_beginning() {
        let own = KeeperRecord::of(std::process::id() as i32).unwrap();
        assert!(own.lives());
        assert!(!KeeperRecord { started: own.started + 1, ..own }.lives());
    }
}
