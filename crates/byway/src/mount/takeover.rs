//! `byway mount --takeover`: goes on with a mount that another process serves.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use byway_frontend::fuse::Handover;
use byway_service::file::client::{Client, ClientOptions, TakeOverError};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::control::{MINE, PREPARE_TIME_MAX, READY, TAKEOVER_TIME_MAX, YOURS};
use super::document::{Document, DocumentError, VERSION};
use super::filesystem::Mounted;
use super::registry::{self, MountAnswer, Question, hear, tell};
use crate::limits::{MOUNT_ANSWER_BYTES_MAX, MOUNT_HANDOVER_FDS_MAX, MOUNT_STATE_BYTES_MAX};

/// How long the process may take to hand the mount over: it ends calls of programs first.
const HANDOVER_TIME_MAX: Duration = Duration::from_secs(60);
const _: () = assert!(PREPARE_TIME_MAX.as_secs() < HANDOVER_TIME_MAX.as_secs());

/// Why a mount is not taken over. The process that serves it goes on.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// None is there.
    #[error("no process of yours serves a mount on {}; `byway mount --list` shows them", .0.display())]
    NoMount(PathBuf),
    /// It is of another share.
    #[error("{} is a mount of {there}, not of {wanted}", directory.display())]
    OtherShare {
        /// Where.
        directory: PathBuf,
        /// What is mounted.
        there: String,
        /// What the command line says.
        wanted: String,
    },
    /// Its process says no.
    #[error("the mount's process does not hand it over: {0}")]
    Refused(String),
    /// Its process does not answer.
    #[error("the mount's process does not answer: {0}")]
    Silent(io::Error),
    /// What it sent.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// The client of the share.
    #[error("cannot go on with the mount: {0}")]
    Client(#[from] TakeOverError),
    /// This process took too long.
    #[error("takeover timed out; the old process keeps the mount; try again")]
    Late,
}

/// A mount's process, which waits for this one.
#[derive(Debug)]
pub(super) struct Predecessor {
    stream: UnixStream,
    channels: Vec<OwnedFd>,
    document: Document,
}

impl Predecessor {
    /// Has the process of the mount on a directory hand it over.
    pub(super) fn ask(directory: &Path, uri: &str) -> Result<Self, TakeoverError> {
        let found = registry::find(directory).map_err(TakeoverError::Silent)?;
        let Some((path, status)) = found else { return Err(TakeoverError::NoMount(directory.to_owned())) };
        if status.uri != uri {
            let (there, wanted) = (status.uri, uri.to_owned());
            return Err(TakeoverError::OtherShare { directory: directory.to_owned(), there, wanted });
        }
        let stream = UnixStream::connect(path).map_err(TakeoverError::Silent)?;
        stream.set_read_timeout(Some(HANDOVER_TIME_MAX)).map_err(TakeoverError::Silent)?;
        tell(&stream, &Question::TakeOver { version: VERSION }).map_err(TakeoverError::Silent)?;
        let (answer, mut fds) = receive(&stream).map_err(TakeoverError::Silent)?;
        match answer {
            MountAnswer::Handover { channels } if fds.len() == channels + 1 => {
                let document = document_in(fds.remove(0))?;
                Ok(Self { stream, channels: fds, document })
            }
            MountAnswer::Failed(reason) => Err(TakeoverError::Refused(reason)),
            _ => Err(DocumentError::Malformed.into()),
        }
    }

    /// When it was mounted, and how often it was taken over, with this time.
    pub(super) fn history(&self) -> (u64, u32) {
        (self.document.since, self.document.takeovers)
    }

    /// Goes on with the client of the share.
    pub(super) fn client(&self, options: ClientOptions) -> Result<Client, TakeoverError> {
        Ok(Client::take_over(options, &self.document.client)?)
    }

    /// Tells the file system what it has to know, and gives what the driver has.
    pub(super) fn driven(&mut self, mounted: &Mounted) -> Handover {
        mounted.locks().owners.extend(self.document.owners.drain(..));
        for (node, handle, has_pages) in self.document.mapped.drain(..) {
            mounted.mapped.take_over(node, handle, has_pages);
        }
        Handover {
            terms: self.document.terms,
            channels: std::mem::take(&mut self.channels),
            requests: std::mem::take(&mut self.document.requests),
        }
    }

    /// Has the other process end. If it has died, the mount is this one's anyway.
    pub(super) fn end(self) -> Result<(), TakeoverError> {
        let _ = self.stream.set_read_timeout(Some(TAKEOVER_TIME_MAX));
        // A process that has waited too long has said so, and takes no word any more: this one's fails, and that one's counts.
        let _ = tell(&self.stream, &READY);
        let heard = hear::<String>(&self.stream);
        match heard.as_deref() {
            Ok(YOURS) => Ok(()),
            Ok(MINE) => Err(TakeoverError::Late),
            Ok(_) => Err(DocumentError::Malformed.into()),
            Err(error) if is_gone(error) => {
                tracing::warn!("the mount's process died while it handed the mount over");
                Ok(())
            }
            Err(error) => {
                // From now on a word fails where it is said. It may have been said just before.
                let _ = self.stream.shutdown(Shutdown::Read);
                let is_ours = hear::<String>(&self.stream).is_ok_and(|word| word == YOURS);
                if is_ours { Ok(()) } else { Err(TakeoverError::Silent(error.kind().into())) }
            }
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::UnexpectedEof | Kind::BrokenPipe | Kind::ConnectionReset)
}

fn document_in(memory: OwnedFd) -> Result<Document, TakeoverError> {
    let mut bytes = Vec::new();
    let file = File::from(memory);
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0)).map_err(|error| TakeoverError::Silent(error.into()))?;
    file.take(MOUNT_STATE_BYTES_MAX as u64).read_to_end(&mut bytes).map_err(TakeoverError::Silent)?;
    Ok(Document::decode(&bytes)?)
}

/// Reads the answer, which is shorter than a message, and descriptors with it.
fn receive(stream: &UnixStream) -> io::Result<(MountAnswer, Vec<OwnedFd>)> {
    let mut line = vec![0; MOUNT_ANSWER_BYTES_MAX as usize];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOUNT_HANDOVER_FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(stream, &mut [IoSliceMut::new(&mut line)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = fds.flatten().collect();
    if !line[..got].ends_with(b"\n") {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&line[..got])?, fds))
}

#[cfg(test)]
mod tests {
    use byway_frontend::fuse::session::Terms;

    use super::*;

    /// A process that has been asked, and the other end of its connection.
    fn asked() -> (Predecessor, UnixStream) {
        let (stream, other) = UnixStream::pair().unwrap();
        let document = Document {
            terms: Terms { minor: 40, write_bytes_max: 1 << 20, flags: 0 },
            since: 0,
            takeovers: 1,
            requests: Vec::new(),
            owners: Vec::new(),
            mapped: Vec::new(),
            client: Vec::new(),
        };
        (Predecessor { stream, channels: Vec::new(), document }, other)
    }

    #[test]
    fn a_process_that_has_waited_too_long_keeps_the_mount() {
        let (before, other) = asked();
        tell(&other, &MINE).unwrap();
        drop(other);
        assert!(matches!(before.end(), Err(TakeoverError::Late)));
    }

    #[test]
    fn the_mount_is_the_next_process_s_when_that_is_said_or_the_one_before_is_gone() {
        let (before, other) = asked();
        tell(&other, &YOURS).unwrap();
        assert!(before.end().is_ok());
        let (before, other) = asked();
        drop(other);
        assert!(before.end().is_ok());
    }
}
