//! The two ends of a copy, as the command line names them: a path of this machine, or of a share.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use byway_service::file::client::Client;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::command::TreeError;
use super::failure::Place;
use super::local::{self, LocalDirectory};
use super::share::{Share, ShareDirectory};
use super::side::{Attributed, Directory, Facts};
use crate::copy::command::CopyArguments;
use crate::copy::location::Location;
use crate::remote::{RemoteUri, TreeUri};
use crate::share_uri::{ShareUriError, client_options};

/// A side that has been opened.
pub(super) enum Side {
    Local(PathBuf),
    Share(TreeUri, Arc<Share>),
}

/// The entry at the source.
pub(super) enum Origin {
    Directory(Arc<dyn Directory>, Facts),
    /// In its directory, with its name there.
    Entry(Arc<dyn Directory>, Vec<u8>, Facts),
}

/// The destination: an existing directory, or a name in one.
pub(super) enum Target {
    Directory(Arc<dyn Directory>),
    Named(Arc<dyn Directory>, Vec<u8>),
}

/// Connects to a share. If the other side is on the same share, both use one client.
pub(super) fn reach(place: &Location, arguments: &CopyArguments, other: Option<&Side>) -> Result<Side, TreeError> {
    let uri = match place {
        Location::Path(path) => return Ok(Side::Local(path.clone())),
        Location::Remote(RemoteUri::Nbd(uri)) => return Err(TreeError::Nbd(uri.to_string())),
        // With --recursive a bare name is a share's.
        Location::Remote(uri) if !arguments.recursive || uri.volume().is_none_or(str::is_empty) => {
            return Err(TreeError::Volume(uri.to_string()));
        }
        Location::Remote(uri) => TreeUri::top(uri.clone()),
        Location::Tree(uri) => uri.clone(),
    };
    if let Some(Side::Share(same, share)) = other
        && same.remote == uri.remote
    {
        return Ok(Side::Share(uri, Arc::clone(share)));
    }
    let options = client_options(&uri.remote, &arguments.tls)?;
    let client = Client::connect(options).map_err(|source| ShareUriError::client(&uri.remote, source))?;
    Ok(Side::Share(uri, Arc::new(Share::new(client))))
}

impl Side {
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Local(path) => path.display().to_string(),
            Self::Share(uri, _) => uri.to_string(),
        }
    }

    fn end(&self, source: Errno, advice: &'static str) -> TreeError {
        TreeError::End { place: Place::below(&self.shown(), b""), source, advice }
    }

    pub(super) fn close(&self) {
        if let Self::Share(_, share) = self {
            share.close();
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self, Self::Share(_, share) if share.is_lost())
    }

    /// The last name of the path, for a copy into a directory.
    pub(super) fn last_name(&self) -> Option<Vec<u8>> {
        match self {
            Self::Local(path) => path.file_name().map(|name| name.as_bytes().to_vec()),
            Self::Share(uri, _) => uri.path.last().cloned(),
        }
    }

    pub(super) fn origin(&self) -> Result<Origin, TreeError> {
        let found = match self {
            Self::Local(path) => local_origin(path),
            Self::Share(uri, share) => share_origin(uri, share),
        };
        found.map_err(|error| self.end(error, "name a file or directory that can be read"))
    }

    pub(super) fn target(&self) -> Result<Target, TreeError> {
        let found = match self {
            Self::Local(path) => local_target(path),
            Self::Share(uri, share) => share_target(uri, share),
        };
        found.map_err(|error| self.end(error, "name a destination in a directory that exists and can be written"))
    }

    /// Whether the other side's path lies below this one's, in the same share.
    pub(super) fn contains(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Share(uri, share), Self::Share(below, same)) => {
                Arc::ptr_eq(share, same) && below.path.starts_with(&uri.path)
            }
            _ => false,
        }
    }
}

fn local_origin(path: &Path) -> Result<Origin, Errno> {
    let facts = local::find(path)?;
    if facts.kind == FileType::Directory {
        return Ok(Origin::Directory(Arc::new(LocalDirectory::open(path)?), facts));
    }
    let path = std::fs::canonicalize(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let (parent, name) = (path.parent().ok_or(Errno::INVAL)?, path.file_name().ok_or(Errno::INVAL)?);
    Ok(Origin::Entry(Arc::new(LocalDirectory::open(parent)?), name.as_bytes().to_vec(), facts))
}

fn local_target(path: &Path) -> Result<Target, Errno> {
    match local::find(path) {
        Ok(facts) if facts.kind == FileType::Directory => {
            return Ok(Target::Directory(Arc::new(LocalDirectory::open(path)?)));
        }
        Ok(_) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    let name = path.file_name().ok_or(Errno::NOENT)?.as_bytes().to_vec();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(Target::Named(Arc::new(LocalDirectory::open(parent)?), name))
}

/// A directory, and a name in it.
type LastStep<'a> = (Arc<dyn Directory>, Option<&'a Vec<u8>>);

/// The directory above the last name of a path, and that name; `None`: the path is that of the share itself.
fn above<'a>(uri: &'a TreeUri, share: &Arc<Share>) -> Result<LastStep<'a>, Errno> {
    let mut directory: Arc<dyn Directory> = Arc::new(ShareDirectory::root(share));
    let Some((last, above)) = uri.path.split_last() else { return Ok((directory, None)) };
    for name in above {
        directory = directory.open_directory(name)?;
    }
    Ok((directory, Some(last)))
}

fn share_origin(uri: &TreeUri, share: &Arc<Share>) -> Result<Origin, Errno> {
    let (parent, Some(name)) = above(uri, share)? else {
        let top = ShareDirectory::root(share);
        let facts = top.facts()?;
        return Ok(Origin::Directory(Arc::new(top), facts));
    };
    let facts = parent.find(name)?;
    if facts.kind == FileType::Directory {
        return Ok(Origin::Directory(parent.open_directory(name)?, facts));
    }
    Ok(Origin::Entry(parent, name.clone(), facts))
}

fn share_target(uri: &TreeUri, share: &Arc<Share>) -> Result<Target, Errno> {
    let (parent, Some(name)) = above(uri, share)? else {
        return Ok(Target::Directory(Arc::new(ShareDirectory::root(share))));
    };
    match parent.find(name) {
        Ok(facts) if facts.kind == FileType::Directory => Ok(Target::Directory(parent.open_directory(name)?)),
        Ok(_) | Err(Errno::NOENT) => Ok(Target::Named(parent, name.clone())),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        copy: CopyArguments,
    }

    #[test]
    fn an_address_of_nbd_is_refused_with_the_form_of_a_path() {
        let CommandLine { copy } = CommandLine::parse_from(["copy", "nbd://h/v", "byway://h/share/file"]);
        let refused = reach(&copy.source, &copy, None).err().expect("NBD has no shares");
        assert!(refused.to_string().contains("write byway://HOST/SHARE/PATH"), "{refused}");
    }
}
