//! Opens the source or destination named on the command line as an endpoint.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use byway_reactor::Reactor;
use byway_service::block::spec::VolumeName;

use super::claim::{Claim, ClaimError};
use super::endpoint::Endpoint;
use super::file::{FileEndpoint, object_identity};
use super::remote::{RemoteEndpoint, volume_identity};
use crate::limits::{COPY_UNFLUSHED_BYTES_MAX, RESUME_NAME_CHARS_MAX};
use crate::remote::{self, Remote, RemoteError, RemoteInfo, RemoteOptions, RemoteUri, RemoteUriError, TreeUri};
use crate::tls::ClientTlsArguments;

/// The source's token class, and the destination's.
const SOURCE_CLASS: u8 = 0x30;
const DESTINATION_CLASS: u8 = 0x31;

/// A file, a block device, or a volume of another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A path.
    Path(PathBuf),
    /// A volume.
    Remote(RemoteUri),
    /// A share with a slash behind its name, or what a path behind it leads to.
    Tree(TreeUri),
}

impl Location {
    /// Reads a name: what has the form of a URI is one, all else is a path (`./a://b` is a path).
    ///
    /// # Errors
    /// See [`LocationNameError`].
    pub fn parse(text: OsString) -> Result<Self, LocationNameError> {
        if text == "-" {
            return Err(LocationNameError::Stream);
        }
        match text.to_str().filter(|text| RemoteUri::is_uri(text)) {
            Some(uri) => {
                let uri: TreeUri = uri.parse()?;
                Ok(if uri.is_below { Self::Tree(uri) } else { Self::Remote(uri.remote) })
            }
            None => Ok(Self::Path(text.into())),
        }
    }

    /// The path, if it is one.
    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Remote(_) | Self::Tree(_) => None,
        }
    }

    /// The path of the resume file of a copy to it: beside a file, or in `state` for a volume.
    pub(super) fn resume_path(&self, state: &Path) -> PathBuf {
        match self {
            Self::Path(path) => {
                let mut path = path.as_os_str().to_owned();
                path.push(".byway-resume");
                path.into()
            }
            Self::Remote(_) | Self::Tree(_) => {
                let text = self.to_string();
                let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
                let name: String = text.chars().map(plain).take(RESUME_NAME_CHARS_MAX).collect();
                // A hash keeps names apart that differ only in replaced or cut characters.
                state.join(format!("copy-{name}-{:08x}.byway-resume", crc32c::crc32c(text.as_bytes())))
            }
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Remote(uri) => uri.fmt(f),
            Self::Tree(uri) => uri.fmt(f),
        }
    }
}

/// Why a text names no place.
#[derive(Debug, thiserror::Error)]
pub enum LocationNameError {
    /// A URI that names no volume.
    #[error(transparent)]
    Uri(#[from] RemoteUriError),
    /// Standard input or output, as other programs call it.
    #[error(
        "byway copy reads and writes many places of an image at once, which standard input and output cannot; name a file (of \
         this very name: ./-), or pipe through nbdcopy: nbdcopy nbd://HOST/EXPORT -"
    )]
    Stream,
}

/// Why a place cannot be opened. Says what to do.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// A path that cannot be read.
    #[error("{}: {source}; name a file or block device that can be read{}", path.display(), volume_hint(path))]
    Source {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// An image of a virtual machine, whose bytes are no disk.
    #[error(
        "{} is a {format} image, and its bytes would be copied as they are: convert it first (qemu-img convert -O raw), or say \
         --raw if the destination shall hold the image's own bytes",
        path.display()
    )]
    Format {
        /// Which.
        path: PathBuf,
        /// Its format.
        format: &'static str,
    },
    /// A path that cannot be written.
    #[error("{}: {source}; name a file or block device that can be written and is large enough", path.display())]
    Destination {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A path that other programs write to.
    #[error(
        "{} is in use: {by}; wait for that copy, copy to the volume that is served (byway://, nbd://), or stop what uses it",
        path.display()
    )]
    InUse {
        /// Which.
        path: PathBuf,
        /// By whom, as far as is known.
        by: &'static str,
    },
    /// A volume.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// Writes would be refused.
    #[error(
        "{0} is read-only; name another destination, or serve it without `ro`, and without `:ro` for this client in its access list"
    )]
    ReadOnly(String),
    /// Too small.
    #[error("{place} has {bytes} bytes, and {wanted} are to be copied; make it larger, or name another")]
    Small {
        /// Which.
        place: String,
        /// Its size.
        bytes: u64,
        /// The source's.
        wanted: u64,
    },
    /// The end cannot be written.
    #[error(
        "{place} takes only multiples of {block_bytes} bytes, and the source has {bytes}; make the source's size a multiple"
    )]
    Block {
        /// Which.
        place: String,
        /// Its block.
        block_bytes: u32,
        /// The source's size.
        bytes: u64,
    },
}

/// What to write if a bare name was meant to be a volume's.
fn volume_hint(path: &Path) -> String {
    match path.to_str().map(VolumeName::new) {
        Some(Ok(name)) => format!(", or a volume: byway://HOST/{name}"),
        _ => String::new(),
    }
}

/// An opened end of a copy.
pub(super) enum Opened {
    File(Box<FileEndpoint>),
    Remote(Box<RemoteEndpoint>),
}

impl Opened {
    pub(super) fn endpoint(&mut self) -> &mut dyn Endpoint {
        match self {
            Self::File(file) => &mut **file,
            Self::Remote(remote) => &mut **remote,
        }
    }

    /// The name of the volume's backing store, if its server tells it.
    fn backing_id(&self) -> Option<u64> {
        match self {
            Self::File(_) => None,
            Self::Remote(remote) => remote.info().backing_id,
        }
    }

    /// The volume.
    pub(super) fn remote(&mut self) -> Option<&mut Remote> {
        match self {
            Self::File(_) => None,
            Self::Remote(remote) => Some(remote.remote()),
        }
    }
}

/// A destination that was examined, before it is changed.
pub(super) enum Found {
    /// `claim`: on what is there; `None`: nothing is.
    Path {
        claim: Option<Claim>,
    },
    Remote {
        remote: Box<Remote>,
        info: RemoteInfo,
        occupied: bool,
    },
}

impl Found {
    /// Whether data would be lost.
    pub(super) fn is_occupied(&self) -> bool {
        match self {
            Self::Path { claim } => claim.as_ref().is_some_and(|claim| {
                let there = claim.metadata();
                there.file_type().is_block_device() || there.len() > 0
            }),
            Self::Remote { occupied, .. } => *occupied,
        }
    }

    /// The end of the error that says that data would be lost.
    pub(super) fn contents_doubt(&self) -> &'static str {
        match self {
            Self::Path { .. } => "",
            Self::Remote { info, .. } => info.contents_doubt(),
        }
    }

    /// The volume.
    pub(super) fn remote(&mut self) -> Option<&mut Remote> {
        match self {
            Self::Path { .. } => None,
            Self::Remote { remote, .. } => Some(remote),
        }
    }

    /// The identity of what is there, as its endpoint will tell it if its contents stay; `None`: nothing is there.
    pub(super) fn identity(&self) -> Option<String> {
        match self {
            Self::Path { claim } => claim.as_ref().map(|claim| object_identity(claim.metadata())),
            Self::Remote { remote, info, .. } => Some(volume_identity(remote, info)),
        }
    }
}

/// How volumes are reached: streams for payloads, certificates.
#[derive(Clone, Copy)]
pub(super) struct Reach<'a> {
    pub(super) connections: usize,
    pub(super) tls: &'a ClientTlsArguments,
}

/// Connects to a volume; `others` are volumes of the same loop.
fn connect(
    reactor: &mut Reactor,
    uri: &RemoteUri,
    class: u8,
    read_only: bool,
    Reach { connections, tls }: Reach<'_>,
    other: Option<&mut Remote>,
) -> Result<(Remote, RemoteInfo), RemoteError> {
    let unflushed_bytes_max = COPY_UNFLUSHED_BYTES_MAX;
    let options = RemoteOptions { class, connections, read_only, tls, unflushed_bytes_max };
    let mut remote = Remote::connect(reactor, uri, options)?;
    let mut all = vec![&mut remote];
    all.extend(other);
    remote::open(reactor, &mut all)?;
    let info = remote.info().ok_or_else(|| RemoteError::Silent(uri.to_string()))?;
    Ok((remote, info))
}

/// Opens the source.
pub(super) fn open_source(reactor: &mut Reactor, place: &Location, reach: Reach<'_>) -> Result<Opened, LocationError> {
    match place {
        Location::Path(path) => FileEndpoint::source(reactor, path, SOURCE_CLASS)
            .map(|file| Opened::File(Box::new(file)))
            .map_err(|source| LocationError::Source { path: path.clone(), source }),
        Location::Remote(uri) => {
            let (remote, info) = connect(reactor, uri, SOURCE_CLASS, true, reach, None)?;
            Ok(Opened::Remote(Box::new(RemoteEndpoint::new(remote, info, false))))
        }
        Location::Tree(uri) => Err(RemoteError::NoVolume(uri.to_string()).into()),
    }
}

/// Refuses to write an image of another format than raw to a disk. A file may hold such an image.
pub(super) fn check_format(from: &Location, source: &mut Opened, to: &Location) -> Result<(), LocationError> {
    let (Location::Path(path), Opened::File(file)) = (from, source) else { return Ok(()) };
    let is_disk = match to {
        Location::Remote(_) | Location::Tree(_) => true,
        Location::Path(to) => std::fs::metadata(to).is_ok_and(|there| there.file_type().is_block_device()),
    };
    let format = file.image_format().map_err(|source| LocationError::Source { path: path.clone(), source })?;
    match format.filter(|_| is_disk) {
        Some(format) => Err(LocationError::Format { path: path.clone(), format }),
        None => Ok(()),
    }
}

/// Examines the destination; `None` if it is the source itself.
pub(super) fn find_destination(
    reactor: &mut Reactor,
    place: &Location,
    from: &Location,
    source: &mut Opened,
    reach: Reach<'_>,
) -> Result<Option<Found>, LocationError> {
    let bytes = source.endpoint().bytes();
    match place {
        Location::Path(path) => find_path(from, source, path).map_err(|error| unclaimed(path, error)),
        Location::Remote(_) if place == from => Ok(None),
        Location::Remote(uri) => {
            let mut other = source.remote();
            let (mut remote, info) = connect(reactor, uri, DESTINATION_CLASS, false, reach, other.as_deref_mut())?;
            let mut all = vec![&mut remote];
            all.extend(other);
            let is_blank = fits(place, &info, bytes).and_then(|()| Ok(remote::is_blank(reactor, &mut all, &info)?));
            if is_blank.is_err() {
                remote::break_off(reactor, &mut all);
            }
            let occupied = !is_blank?;
            Ok(Some(Found::Remote { remote: Box::new(remote), info, occupied }))
        }
        Location::Tree(uri) => Err(RemoteError::NoVolume(uri.to_string()).into()),
    }
}

fn fits(place: &Location, info: &RemoteInfo, bytes: u64) -> Result<(), LocationError> {
    let place = || place.to_string();
    if info.read_only {
        return Err(LocationError::ReadOnly(place()));
    }
    if info.bytes < bytes {
        return Err(LocationError::Small { place: place(), bytes: info.bytes, wanted: bytes });
    }
    if !bytes.is_multiple_of(info.block_bytes.into()) {
        return Err(LocationError::Block { place: place(), block_bytes: info.block_bytes, bytes });
    }
    Ok(())
}

/// Opens the destination. With `keep` its contents stay, for a resumed copy.
pub(super) fn open_destination(
    reactor: &mut Reactor,
    place: &Location,
    found: Found,
    bytes: u64,
    keep: bool,
) -> Result<Opened, LocationError> {
    match (place, found) {
        (_, Found::Remote { remote, info, occupied }) => {
            Ok(Opened::Remote(Box::new(RemoteEndpoint::new(*remote, info, !occupied))))
        }
        (Location::Path(path), Found::Path { claim }) => {
            let failed = |source| LocationError::Destination { path: path.clone(), source };
            let claim = claim.map_or_else(|| Claim::made(path), Ok).map_err(|error| unclaimed(path, error))?;
            let file = FileEndpoint::destination(reactor, claim, DESTINATION_CLASS, bytes, keep).map_err(failed)?;
            Ok(Opened::File(Box::new(file)))
        }
        (place, Found::Path { .. }) => Err(RemoteError::NoVolume(place.to_string()).into()),
    }
}

fn unclaimed(path: &Path, error: ClaimError) -> LocationError {
    let path = path.to_owned();
    match error {
        ClaimError::Open(source) => LocationError::Destination { path, source },
        ClaimError::InUse(by) => LocationError::InUse { path, by },
    }
}

/// Claims what is at a path, from before it is looked at until the copy has ended; `None` if it is the source itself,
/// by its path or as the volume that a server of this machine makes of it.
fn find_path(from: &Location, source: &Opened, to: &Path) -> Result<Option<Found>, ClaimError> {
    let there = match std::fs::metadata(to) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(Found::Path { claim: None })),
        there => there?,
    };
    if let Location::Path(from) = from {
        let here = std::fs::metadata(from)?;
        let devices = here.file_type().is_block_device() && there.file_type().is_block_device();
        if (here.dev(), here.ino()) == (there.dev(), there.ino()) || devices && here.rdev() == there.rdev() {
            return Ok(None);
        }
    }
    let claim = Claim::existing(to)?;
    let backing_id = source.backing_id();
    if backing_id.is_some() && backing_id == claim.backing_id()? {
        return Ok(None);
    }
    Ok(Some(Found::Path { claim: Some(claim.alone()?) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_uri_is_none_other() {
        assert_eq!(Location::parse("a/b".into()).unwrap(), Location::Path("a/b".into()));
        assert_eq!(Location::parse("./nbd://x".into()).unwrap(), Location::Path("./nbd://x".into()));
        assert!(matches!(Location::parse("nbd://h/x".into()), Ok(Location::Remote(RemoteUri::Nbd(_)))));
        assert!(matches!(Location::parse("byway://h/x".into()), Ok(Location::Remote(RemoteUri::Native(_)))));
        assert!(Location::parse("ftp://h/x".into()).is_err());
        assert!(matches!(Location::parse("-".into()), Err(LocationNameError::Stream)));
        assert_eq!(Location::parse("./-".into()).unwrap(), Location::Path("./-".into()));
    }

    #[test]
    fn volumes_that_are_alike_have_resume_files_that_are_not() {
        let at = |text: &str| Location::parse(text.into()).unwrap().resume_path(Path::new("/s"));
        assert_eq!(at("/a/b"), Path::new("/a/b.byway-resume"));
        assert_ne!(at("nbd://h/a_b"), at("nbd://h/a%20b"));
        let long = at(&format!("nbd://h/{}", "x".repeat(4000)));
        assert!(long.file_name().unwrap().len() <= 255 && long.parent() == Some(Path::new("/s")));
    }
}
