//! Changes of a directory's names after which a client may go on using what it knew of the others.

use std::ffi::{CStr, CString};
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::super::leases::Since;
use super::super::wire::Attributes;
use super::table::Node;
use super::tree;

/// A call that changes names of one directory, and nothing else there.
#[derive(Clone, Debug)]
pub(super) struct KeptNames {
    pub(super) directory: Arc<Node>,
    /// A name that is there before the call.
    pub(super) before: Option<CString>,
    /// One that is there after it.
    pub(super) after: Option<CString>,
}

/// What a client is told of such a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangedNames {
    /// Version of its lease on the directory, if it has one again.
    pub(super) lease: Option<u64>,
    pub(super) attributes: Attributes,
    /// From before the call, for a lease on what it has made.
    pub(super) since: Since,
    /// What it has made has no extended attribute that the user may list.
    pub(super) made_without_xattrs: bool,
}

impl KeptNames {
    /// Whether the names that the call changes have no other spelling: to be asked before it and, for those that it makes, after it.
    pub(super) fn are_exact_before(&self) -> bool {
        self.before.as_ref().is_none_or(|name| is_exact(&self.directory, name))
    }

    pub(super) fn are_exact_after(&self) -> bool {
        self.after.as_ref().is_none_or(|name| is_exact(&self.directory, name))
    }
}

/// Whether a file has only one spelling of its name. Where case does not count (casefold, FAT), the client may know the file's absence by
/// another one. What a directory does with a letter is looked up once.
fn is_exact(directory: &Node, name: &CStr) -> bool {
    let mut other = name.to_bytes().to_vec();
    if !other.is_ascii() {
        return false;
    }
    let Some(letter) = other.iter_mut().find(|byte| byte.is_ascii_alphabetic()) else { return true };
    if let Some(known) = directory.has_exact_names.get() {
        return *known;
    }
    *letter ^= b'a' ^ b'A';
    let identity = |name: &CStr| tree::identity(directory.fd.as_fd(), name);
    let (Ok(here), Ok(other)) = (identity(name), CString::new(other)) else { return false };
    let is_exact = match identity(&other) {
        Err(Errno::NOENT) => true,
        Ok(there) => there != here,
        Err(_) => return false,
    };
    *directory.has_exact_names.get_or_init(|| is_exact)
}
