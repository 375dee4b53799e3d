//! The end of a mount: what was written through it is made durable at the server first.
//!
//! Linux asks no file system of FUSE to sync when it is unmounted, and tells the mount's process afterwards. So that process asks the server
//! then, and `byway umount` waits for what comes of it; systemd does so by the helper of umount(8) (`helper.rs`).

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use byway_frontend::fuse::mount::unmount;
use byway_service::file::client::NotDurable;
use clap::Args;

use super::CommandError;
use super::filesystem::Mounted;
use super::registry::{self, MountAnswer, Question, hear, tell};

/// How long the mount's process may take to say that it will tell.
const PATIENCE: Duration = Duration::from_secs(5);

/// After that time the command says what it waits for.
const SILENT_TIME_MAX: Duration = Duration::from_secs(2);

/// The flags of `byway umount`.
#[derive(Args, Debug)]
pub struct UmountArguments {
    /// Mount point
    pub directory: PathBuf,
    /// Detach the mount at once, also if it is in use; it ends when its last file is closed. Does not wait for the server
    #[arg(long)]
    pub lazy: bool,
}

/// Whether what was written through a mount is durable, once the mount has ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Durability(Arc<OnceLock<Result<(), NotDurable>>>);

impl Mounted {
    /// The mount has ended: makes durable what was written, and ends the session.
    pub(super) fn end(&self) {
        let _ = self.durability.0.set(self.client.make_durable());
        self.client.close();
    }

    /// What came of it. A mount that another process has taken over has not ended.
    pub(super) fn durable(&self) -> Result<(), NotDurable> {
        self.durability.0.get().copied().unwrap_or(Ok(()))
    }
}

/// Unmounts, and waits until what was written is durable at the server, unless it is lazy.
///
/// # Errors
/// [`CommandError::Mount`]: it is mounted still. [`CommandError::Unmounted`]: it is not, and data may not be durable. Without a process that
/// could say so, this is a note.
pub fn umount(UmountArguments { directory, lazy }: &UmountArguments) -> Result<(), CommandError> {
    if *lazy {
        return Ok(unmount(directory, true)?);
    }
    let process = await_end(directory);
    unmount(directory, false)?;
    let process = match process {
        Ok(process) => process,
        Err(error) => {
            let directory = directory.display();
            let unknown = "what was written and not synced may not be durable at the server";
            crate::output::note(format_args!("{directory} is unmounted, but {unknown}: {error}"));
            return Ok(());
        }
    };
    let told = end_of(&process, directory).unwrap_or_else(|error| {
        Some(format!("its process did not say whether what was written is durable at the server: {error}"))
    });
    let failed = |reason| Err(CommandError::Unmounted { directory: directory.clone(), reason });
    told.map_or(Ok(()), failed)
}

/// Has the process of a mount tell its end.
fn await_end(directory: &Path) -> io::Result<UnixStream> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no process of yours serves it");
    let (socket, _) = registry::find(directory)?.ok_or_else(none)?;
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    tell(&stream, &Question::AwaitEnd)?;
    match hear(&stream)? {
        MountAnswer::Awaits => Ok(stream),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Why what was written may not be durable. The process bounds the time.
fn end_of(process: &UnixStream, directory: &Path) -> io::Result<Option<String>> {
    process.set_read_timeout(Some(SILENT_TIME_MAX))?;
    let told = hear(process).or_else(|error| {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        let directory = directory.display();
        crate::output::note(format_args!("{directory} is unmounted; waits until what was written is durable"));
        process.set_read_timeout(None)?;
        hear(process)
    });
    match told? {
        MountAnswer::Ended { not_durable } => Ok(not_durable),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
