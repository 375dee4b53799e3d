//! A tree of a share, over its client. A directory is held by its node; the client finds it again after a restart of the server.

use std::ops::Range;
use std::sync::Arc;

use byway_service::file::client::{Caller, Client, CopyRange, Listed, NamedIn, ROOT};
use byway_service::file::wire::{Attributes, NewAttributes, SET_ACCESSED, SET_MODE, SET_MODIFIED, SET_SIZE};
use rustix::fs::{FileType, OFlags, RenameFlags};
use rustix::io::Errno;
use zerocopy::FromZeros;

use super::side::{Attributed, Directory, Facts, Listing, OpenFile, Time, data_range, split_names};

/// `lseek(2)`: data, and a hole.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// A share, and the user for whom it is used.
pub(super) struct Share {
    client: Client,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl Share {
    pub(super) fn new(client: Client) -> Self {
        let groups = rustix::process::getgroups().unwrap_or_default().iter().map(|group| group.as_raw()).collect();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self { client, uid, gid, groups }
    }

    fn me(&self) -> Caller<'_> {
        Caller { uid: self.uid, gid: self.gid, groups: &self.groups }
    }

    /// Ends the session.
    pub(super) fn close(&self) {
        self.client.close();
    }

    /// Whether there is no session with the server.
    pub(super) fn is_lost(&self) -> bool {
        self.client.is_read_only().is_none()
    }

    /// Whether the server refuses changes.
    pub(super) fn is_read_only(&self) -> bool {
        self.client.is_read_only() == Some(true)
    }
}

fn facts(attributes: &Attributes) -> Facts {
    let mode = attributes.mode.get();
    Facts {
        kind: FileType::from_raw_mode(mode),
        size: attributes.size.get(),
        allocated_bytes: attributes.blocks.get().saturating_mul(512),
        mode: mode & 0o7777,
        accessed: Time { seconds: attributes.accessed_s.get(), nanoseconds: attributes.accessed_ns.get() },
        modified: Time { seconds: attributes.modified_s.get(), nanoseconds: attributes.modified_ns.get() },
    }
}

fn times_of(of: &Facts) -> NewAttributes {
    let mut new = NewAttributes::new_zeroed();
    new.which = (SET_ACCESSED | SET_MODIFIED).into();
    (new.accessed_s, new.accessed_ns) = (of.accessed.seconds.into(), of.accessed.nanoseconds.into());
    (new.modified_s, new.modified_ns) = (of.modified.seconds.into(), of.modified.nanoseconds.into());
    new
}

/// A node of the share; forgotten with this.
struct Node {
    share: Arc<Share>,
    number: u64,
}

impl Node {
    fn look_up(&self, name: &[u8]) -> Result<(Self, Facts), Errno> {
        let found = self.share.client.look_up(self.share.me(), self.number, name)?;
        Ok((self.other(found.node), facts(&found.attributes)))
    }

    fn other(&self, number: u64) -> Self {
        Self { share: Arc::clone(&self.share), number }
    }

    fn facts(&self, handle: Option<u64>) -> Result<Facts, Errno> {
        self.share.client.attributes(self.share.me(), self.number, handle).map(|attributes| facts(&attributes))
    }

    fn take_attributes(&self, handle: Option<u64>, of: &Facts) -> Result<(), Errno> {
        let mut new = times_of(of);
        new.which |= SET_MODE;
        new.mode = of.mode_of_copy().into();
        self.share.client.set_attributes(self.share.me(), self.number, handle, &new).map(drop)
    }

    fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno> {
        self.share.client.list_xattrs(self.share.me(), self.number).map(|list| split_names(&list))
    }

    fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        self.share.client.get_xattr(self.share.me(), self.number, name)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.share.client.set_xattr(self.share.me(), self.number, name, value, 0)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.number != ROOT {
            self.share.client.forget(self.number, 1);
        }
    }
}

/// See the module.
pub(super) struct ShareDirectory(Node);

impl ShareDirectory {
    /// The share's own.
    pub(super) fn root(share: &Arc<Share>) -> Self {
        Self(Node { share: Arc::clone(share), number: ROOT })
    }
}

impl Attributed for ShareDirectory {
    fn facts(&self) -> Result<Facts, Errno> {
        self.0.facts(None)
    }

    fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno> {
        self.0.xattr_names()
    }

    fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        self.0.xattr(name)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.0.set_xattr(name, value)
    }

    fn take_attributes(&self, of: &Facts) -> Result<(), Errno> {
        self.0.take_attributes(None, of)
    }

    fn sync(&self) -> Result<(), Errno> {
        let Node { share, number } = &self.0;
        let handle = share.client.open_directory(share.me(), *number)?;
        let synced = share.client.sync(share.me(), handle, false);
        share.client.close_handle_later(handle);
        synced
    }
}

impl Directory for ShareDirectory {
    fn list(&self) -> Result<Box<dyn Listing>, Errno> {
        let share = Arc::clone(&self.0.share);
        let handle = share.client.open_directory(share.me(), self.0.number)?;
        Ok(Box::new(ShareListing { share, handle, cookie: 0, window: Vec::new().into_iter() }))
    }

    fn find(&self, name: &[u8]) -> Result<Facts, Errno> {
        self.0.look_up(name).map(|(_, facts)| facts)
    }

    fn open_directory(&self, name: &[u8]) -> Result<Arc<dyn Directory>, Errno> {
        let (node, facts) = self.0.look_up(name)?;
        if facts.kind == FileType::Directory { Ok(Arc::new(Self(node))) } else { Err(Errno::NOTDIR) }
    }

    fn make_directory(&self, name: &[u8]) -> Result<(), Errno> {
        let Node { share, number } = &self.0;
        share.client.make_directory(share.me(), *number, name, 0o700).map(|made| drop(self.0.other(made.node)))
    }

    fn open_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno> {
        let (node, facts) = self.0.look_up(name)?;
        if facts.kind != FileType::RegularFile {
            return Err(Errno::OPNOTSUPP);
        }
        let handle = node.share.client.open(node.share.me(), node.number, OFlags::RDONLY.bits())?;
        Ok(Box::new(ShareFile { node, handle }))
    }

    fn create_file(&self, name: &[u8]) -> Result<Box<dyn OpenFile>, Errno> {
        let Node { share, number } = &self.0;
        let flags = (OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).bits();
        let (found, handle) = share.client.create(share.me(), NamedIn::new(*number, name), flags, 0o600)?;
        Ok(Box::new(ShareFile { node: self.0.other(found.node), handle }))
    }

    fn read_link(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let (node, _) = self.0.look_up(name)?;
        node.share.client.read_link(node.share.me(), node.number)
    }

    fn make_link(&self, name: &[u8], target: &[u8], of: &Facts) -> Result<(), Errno> {
        let Node { share, number } = &self.0;
        let made = self.0.other(share.client.make_symlink(share.me(), *number, name, target)?.node);
        share.client.set_attributes(share.me(), made.number, None, &times_of(of)).map(drop)
    }

    fn set_mode(&self, name: &[u8], mode: u32) -> Result<(), Errno> {
        let (node, _) = self.0.look_up(name)?;
        let mut new = NewAttributes::new_zeroed();
        (new.which, new.mode) = (SET_MODE.into(), mode.into());
        node.share.client.set_attributes(node.share.me(), node.number, None, &new).map(drop)
    }

    fn rename(&self, from: &[u8], to: &[u8], replace: bool) -> Result<(), Errno> {
        let Node { share, number } = &self.0;
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        share.client.rename(share.me(), NamedIn::new(*number, from), NamedIn::new(*number, to), flags.bits())
    }

    fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        self.0.share.client.unlink(self.0.share.me(), self.0.number, name)
    }

    fn is_lost(&self) -> bool {
        self.0.share.is_lost()
    }
}

struct ShareListing {
    share: Arc<Share>,
    handle: u64,
    cookie: u64,
    window: std::vec::IntoIter<Listed>,
}

impl Listing for ShareListing {
    fn next(&mut self) -> Result<Option<(Vec<u8>, Facts)>, Errno> {
        loop {
            if let Some(one) = self.window.next() {
                self.cookie = one.cookie;
                // An entry that could not be looked up was removed, or lies on another file system.
                if one.name != b"." && one.name != b".." {
                    return Ok(Some((one.name, facts(&one.attributes))));
                }
                continue;
            }
            let (share, handle) = (&self.share, self.handle);
            let window = share.client.read_directory(share.me(), handle, self.cookie, usize::MAX, false)?;
            if window.is_empty() {
                return Ok(None);
            }
            self.window = window.into_iter();
        }
    }
}

impl Drop for ShareListing {
    fn drop(&mut self) {
        self.share.client.close_handle_later(self.handle);
    }
}

/// An open file of a share.
pub(super) struct ShareFile {
    node: Node,
    handle: u64,
}

impl ShareFile {
    /// Copies a range of another file of the same share at the server; `None`: it is of another share, or the file system cannot.
    pub(super) fn copy_from(&self, from: &Self, range: &Range<u64>) -> Option<Result<(), Errno>> {
        let share = &self.node.share;
        if !Arc::ptr_eq(share, &from.node.share) {
            return None;
        }
        let mut at = range.start;
        while at < range.end {
            let (from, to, len) = (from.handle, self.handle, range.end - at);
            match share.client.copy_range(share.me(), CopyRange { from, from_offset: at, to, to_offset: at, len }) {
                // The source has become shorter.
                Ok(0) => return Some(Err(Errno::NODATA)),
                Ok(count) => at += count,
                Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Ok(()))
    }
}

impl Drop for ShareFile {
    fn drop(&mut self) {
        self.node.share.client.close_handle_later(self.handle);
    }
}

impl Attributed for ShareFile {
    fn facts(&self) -> Result<Facts, Errno> {
        self.node.facts(Some(self.handle))
    }

    fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno> {
        self.node.xattr_names()
    }

    fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        self.node.xattr(name)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.node.set_xattr(name, value)
    }

    fn take_attributes(&self, of: &Facts) -> Result<(), Errno> {
        self.node.take_attributes(Some(self.handle), of)
    }

    fn sync(&self) -> Result<(), Errno> {
        self.node.share.client.sync(self.node.share.me(), self.handle, false)
    }
}

impl OpenFile for ShareFile {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.node.share.client.read(self.node.share.me(), self.handle, offset, into)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < bytes.len() {
            let (share, at) = (&self.node.share, offset + done as u64);
            match share.client.write(share.me(), self.handle, at, &bytes[done..])? {
                0 => return Err(Errno::NOSPC),
                count => done += count,
            }
        }
        Ok(())
    }

    fn data_from(&self, offset: u64) -> Result<Option<Range<u64>>, Errno> {
        let share = &self.node.share;
        let seek = |offset, whence| share.client.seek(share.me(), self.handle, offset, whence);
        data_range(offset, |offset| seek(offset, SEEK_DATA), |offset| seek(offset, SEEK_HOLE))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        let mut new = NewAttributes::new_zeroed();
        (new.which, new.size) = (SET_SIZE.into(), bytes.into());
        let Node { share, number } = &self.node;
        share.client.set_attributes(share.me(), *number, Some(self.handle), &new).map(drop)
    }

    fn of_share(&self) -> Option<&ShareFile> {
        Some(self)
    }
}
