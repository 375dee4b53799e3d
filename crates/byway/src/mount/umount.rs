//! `byway umount`. systemd unmounts by the helper of umount(8), which does the same (`helper.rs`).

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use byway_frontend::fuse::mount::unmount;
use clap::Args;

use super::CommandError;
use super::registry::{self, Lines, MountAnswer, Question, tell};

/// How long the mount's process may take to say that it will tell, and then that the kernel has ended the mount.
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

/// What the process of a mount answers to a command that waits for the mount's end.
enum Awaited {
    /// It will tell.
    Told(Lines<UnixStream>),
    /// It refuses now, and says why.
    Refused(String),
    /// The process gave no answer.
    Unknown(io::Error),
}

/// Unmounts, and waits until what was written is durable at the server, unless it is lazy.
///
/// # Errors
/// [`CommandError::Mount`], [`CommandError::MountedStill`]: it is mounted still. [`CommandError::Unmounted`]: it is not, and data may not be
/// durable.
pub fn umount(UmountArguments { directory, lazy }: &UmountArguments) -> Result<(), CommandError> {
    if *lazy {
        return Ok(unmount(directory, true)?);
    }
    let awaited = await_end(directory).unwrap_or_else(Awaited::Unknown);
    if let Awaited::Refused(reason) = awaited {
        return Err(CommandError::MountedStill { directory: directory.clone(), reason });
    }
    unmount(directory, false)?;
    let unknown = |error| format!("its process did not say whether what was written is durable at the server: {error}");
    let not_durable = match awaited {
        Awaited::Told(process) => end_of(process, directory).unwrap_or_else(|error| Some(unknown(error))),
        Awaited::Refused(reason) => Some(reason),
        Awaited::Unknown(error) => Some(unknown(error)),
    };
    let failed = |reason| Err(CommandError::Unmounted { directory: directory.clone(), reason });
    not_durable.map_or(Ok(()), failed)
}

/// Has the process of a mount tell its end.
fn await_end(directory: &Path) -> io::Result<Awaited> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no process of yours serves it");
    let (socket, _) = registry::find(directory)?.ok_or_else(none)?;
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    tell(&stream, &Question::AwaitEnd)?;
    let mut lines = Lines::of(stream);
    match lines.hear()? {
        MountAnswer::Awaits => Ok(Awaited::Told(lines)),
        MountAnswer::Failed(reason) => Ok(Awaited::Refused(reason)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Why what was written may not be durable. From the mount's end on, the process bounds the time.
fn end_of(mut process: Lines<UnixStream>, directory: &Path) -> io::Result<Option<String>> {
    let still = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other("it serves the mount still, perhaps in another mount namespace"),
        _ => error,
    };
    match process.hear().map_err(still)? {
        MountAnswer::Ending => {}
        // It had ended before.
        MountAnswer::Ended { not_durable } => return Ok(not_durable),
        MountAnswer::Failed(reason) => return Ok(Some(reason)),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    process.stream().set_read_timeout(Some(SILENT_TIME_MAX))?;
    let told = process.hear().or_else(|error| {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        let directory = directory.display();
        crate::output::note(format_args!("{directory} is unmounted; waits until what was written is durable"));
        process.stream().set_read_timeout(None)?;
        process.hear()
    });
    match told? {
        MountAnswer::Ended { not_durable } => Ok(not_durable),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
