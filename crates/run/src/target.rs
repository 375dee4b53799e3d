//! A path in a call of the program.

use std::ffi::c_char;
use std::os::fd::RawFd;

use byway_service::file::client::{Found, ROOT};
use rustix::io::Errno;

use crate::c::text;
use crate::inside::inside;
use crate::session::Lookups;
use crate::walk::{Place, Step, Walked, walk};
use crate::{maps, open, process, report, working_directory};

/// A path that begins in a share.
pub(crate) struct Target<'a> {
    pub(crate) map: usize,
    pub(crate) names: Lookups,
    start: Vec<Step>,
    rest: &'a [u8],
}

impl Target<'_> {
    /// Where it leads. `follow`: also a symbolic link at its end.
    ///
    /// # Errors
    /// See [`walk`].
    pub(crate) fn walked(&self, follow: bool) -> Result<Walked, Errno> {
        walk(&self.names, &self.start, ROOT, self.rest, follow)
    }

    /// The place in the share.
    ///
    /// # Errors
    /// See [`walk`]; `EXDEV` if it leads out of the share.
    pub(crate) fn place(&self, follow: bool) -> Result<Place, Errno> {
        match self.walked(follow)? {
            Walked::Inside(place) => Ok(place),
            Walked::Outside(_) => {
                report::refused("a path that leads out of the share");
                Err(Errno::XDEV)
            }
        }
    }

    /// What is there.
    ///
    /// # Errors
    /// See [`Target::place`]; `ENOENT`.
    pub(crate) fn there(&self, follow: bool) -> Result<Found, Errno> {
        self.place(follow)?.there()
    }
}

/// Does the work of a call on a path. `None` if the path is of this machine.
pub(crate) fn on_path<T>(
    directory: RawFd,
    path: *const c_char,
    work: impl FnOnce(Target<'_>) -> Result<T, Errno>,
) -> Option<Result<T, Errno>> {
    let process = process::this()?;
    let path = text(path)?;
    if path.first() == Some(&b'/') {
        let (map, rest) = maps::find(process.maps, path)?;
        return Some(inside(|| {
            let names = Lookups::new(process.session(map)?);
            work(Target { map, names, start: Vec::new(), rest })
        }));
    }
    open::on(working_directory::resolve(directory), |open| {
        let live = open.live()?;
        if path.is_empty() {
            return Err(Errno::NOENT);
        }
        if !live.is_directory {
            return Err(Errno::NOTDIR);
        }
        let names = Lookups::new(std::sync::Arc::clone(&live.session));
        work(Target { map: open.map()?, names, start: live.steps.clone(), rest: path })
    })
}

/// Whether a path is of a share.
pub(crate) fn is_ours(directory: RawFd, path: *const c_char) -> bool {
    let Some(process) = process::this() else { return false };
    let Some(path) = text(path) else { return false };
    if path.first() == Some(&b'/') {
        return maps::find(process.maps, path).is_some();
    }
    open::is_ours(working_directory::resolve(directory))
}
