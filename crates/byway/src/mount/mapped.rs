//! Writes by calls to files that programs may have mapped for writing.
//!
//! Files that are open for writing pass the page cache by, but programs can map them. Before the kernel sends a write, it drops the
//! pages of the write's range. A program that loads such a page before the server has written gets old bytes; when it stores to
//! another part of the page, the kernel later sends the whole page, old bytes too, over those of the write. Therefore:
//!
//! - a write waits until pages of its range that are under way to the server have arrived there,
//! - pages that come while it is under way get its bytes,
//! - before it is answered, the kernel drops the pages of its range, and sends those that were stored to (`cached.rs`).
//!
//! Pages that are loaded later have the write's bytes. A file that no program has open for reading and writing cannot be mapped for
//! writing; one whose pages the kernel has not read since then is not mapped. It may be opened and mapped while a write is under way,
//! so each write is noted.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use byway_frontend::fuse::Request;
use byway_frontend::fuse::request::{Operation, Write};
use rustix::fs::OFlags;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MappedFiles {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Files that a program has open for reading and writing, or with requests under way: no more than such handles and requests.
    files: HashMap<u64, File>,
    last: u64,
}

#[derive(Debug, Default)]
struct File {
    /// Those for reading and writing.
    handles: HashSet<u64>,
    /// The kernel has read pages while there are handles. It drops what it has read before when it opens a file.
    has_pages: bool,
    /// Writes by calls that are not answered. They and pages are bounded by the requests of a mount.
    writes: Vec<(u64, Arc<Request>)>,
    /// Pages on their way to the server.
    pages: Vec<(u64, Bytes)>,
}

impl State {
    /// Changes what is known of a file, and forgets it if nothing uses it any more.
    fn ended(&mut self, node: u64, end: impl FnOnce(&mut File)) {
        let Some(file) = self.files.get_mut(&node) else { return };
        end(file);
        if file.handles.is_empty() && file.writes.is_empty() && file.pages.is_empty() {
            self.files.remove(&node);
        }
    }
}

/// Bytes of a file: the first, and the first behind.
type Bytes = (u64, u64);

fn bytes_of(write: &Write<'_>) -> Bytes {
    (write.offset, write.offset.saturating_add(write.data.len() as u64))
}

fn overlap(one: Bytes, other: Bytes) -> bool {
    one.0 < other.1 && other.0 < one.1
}

fn write_of(request: &Request) -> Option<Write<'_>> {
    match request.parsed().operation {
        Operation::Write(write) => Some(write),
        _ => None,
    }
}

/// Copies the bytes of a write into pages that have some of the same places.
fn lay_over(pages: &mut [u8], start: u64, write: &Write<'_>) {
    let from = write.offset.max(start);
    let to = (write.offset + write.data.len() as u64).min(start + pages.len() as u64);
    if from < to {
        let (at, of, len) = ((from - start) as usize, (from - write.offset) as usize, (to - from) as usize);
        pages[at..at + len].copy_from_slice(&write.data[of..of + len]);
    }
}

fn maps_for_writing(flags: u32) -> bool {
    OFlags::from_bits_retain(flags) & OFlags::ACCMODE == OFlags::RDWR
}

impl MappedFiles {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file was opened with these flags.
    pub(super) fn opened(&self, node: u64, handle: u64, flags: u32) {
        if maps_for_writing(flags) {
            self.state().files.entry(node).or_default().handles.insert(handle);
        }
    }

    /// Open files, for another process: node, handle, and whether pages of the node were read.
    pub(super) fn all(&self) -> Vec<(u64, u64, bool)> {
        let state = self.state();
        let of = |(node, file): (&u64, &File)| {
            let (node, has_pages) = (*node, file.has_pages);
            file.handles.iter().map(move |handle| (node, *handle, has_pages)).collect::<Vec<_>>()
        };
        state.files.iter().flat_map(of).collect()
    }

    /// A file that another process has opened.
    pub(super) fn take_over(&self, node: u64, handle: u64, has_pages: bool) {
        let mut state = self.state();
        let file = state.files.entry(node).or_default();
        file.handles.insert(handle);
        file.has_pages |= has_pages;
    }

    /// A handle was closed. Requests that are under way may end later.
    pub(super) fn closed(&self, node: u64, handle: u64) {
        self.state().ended(node, |file| {
            file.handles.remove(&handle);
            file.has_pages &= !file.handles.is_empty();
        });
    }

    /// The kernel reads pages. To be called before the server is asked.
    pub(super) fn begin_pages_read(&self, node: u64) {
        if let Some(file) = self.state().files.get_mut(&node) {
            file.has_pages |= !file.handles.is_empty();
        }
    }

    /// A write by a call begins. Waits for pages that are under way, which wait for the server alone.
    pub(super) fn begin_write(self: &Arc<Self>, node: u64, request: &Arc<Request>, write: &Write<'_>) -> CallWrite {
        let bytes = bytes_of(write);
        let comes = |state: &mut State| {
            state.files.get(&node).is_some_and(|file| file.pages.iter().any(|(_, pages)| overlap(*pages, bytes)))
        };
        let mut state = self.arrived.wait_while(self.state(), comes).unwrap_or_else(PoisonError::into_inner);
        state.last += 1;
        let number = state.last;
        state.files.entry(node).or_default().writes.push((number, Arc::clone(request)));
        CallWrite { files: Arc::clone(self), node, number }
    }

    /// Pages are about to be sent to the server. Gives them as they are to be sent, if writes have changed them.
    pub(super) fn begin_pages_write(&self, node: u64, pages: &Write<'_>) -> (PagesWrite<'_>, Option<Vec<u8>>) {
        let mut state = self.state();
        state.last += 1;
        let number = state.last;
        let mut changed = None;
        if let Some(file) = state.files.get_mut(&node) {
            let bytes = bytes_of(pages);
            for write in file.writes.iter().filter_map(|(_, request)| write_of(request)) {
                if overlap(bytes_of(&write), bytes) {
                    lay_over(changed.get_or_insert_with(|| pages.data.to_vec()), pages.offset, &write);
                }
            }
            file.pages.push((number, bytes));
        }
        (PagesWrite { files: self, node, number }, changed)
    }
}

/// A write by a call, until it is answered.
#[derive(Debug)]
pub(super) struct CallWrite {
    files: Arc<MappedFiles>,
    node: u64,
    number: u64,
}

impl CallWrite {
    /// Whether the kernel may have loaded old pages: known once the server has written.
    pub(super) fn may_have_old_pages(&self) -> bool {
        self.files.state().files.get(&self.node).is_some_and(|file| file.has_pages)
    }
}

impl Drop for CallWrite {
    fn drop(&mut self) {
        self.files.state().ended(self.node, |file| file.writes.retain(|(number, _)| *number != self.number));
    }
}

/// Pages under way to the server.
#[derive(Debug)]
pub(super) struct PagesWrite<'a> {
    files: &'a MappedFiles,
    node: u64,
    number: u64,
}

impl Drop for PagesWrite<'_> {
    fn drop(&mut self) {
        self.files.state().ended(self.node, |file| file.pages.retain(|(number, _)| *number != self.number));
        self.files.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use byway_frontend::fuse::abi::{InHeader, WriteIn, opcode};
    use byway_frontend::fuse::request::WRITE_HEAD_BYTES;
    use zerocopy::{FromZeros, IntoBytes};

    use super::*;

    #[test]
    fn a_write_changes_the_part_of_pages_that_it_covers() {
        let over = |offset, data: &[u8]| {
            let (flags, lock_owner, from_cache, kill_suid_gid) = (0, None, false, false);
            let write = Write { handle: 1, offset, data, flags, lock_owner, from_cache, kill_suid_gid };
            let mut pages = *b"........";
            lay_over(&mut pages, 100, &write);
            String::from_utf8(pages.to_vec()).unwrap()
        };
        assert_eq!(over(102, b"abc"), "..abc...");
        assert_eq!(over(98, b"abc"), "c.......");
        assert_eq!(over(107, b"abc"), ".......a");
        assert_eq!(over(96, b"0123456789abcdef"), "456789ab");
        assert_eq!(over(90, b"abc"), "........");
        assert_eq!(over(108, b"abc"), "........");
    }

    #[test]
    fn only_a_file_that_is_open_for_reading_and_writing_counts() {
        let files = Arc::new(MappedFiles::default());
        files.opened(7, 1, OFlags::WRONLY.bits());
        files.begin_pages_read(7);
        assert!(files.state().files.is_empty());
        files.opened(7, 2, OFlags::RDWR.bits());
        files.opened(7, 3, OFlags::RDWR.bits());
        assert!(!files.state().files[&7].has_pages);
        files.begin_pages_read(7);
        files.closed(7, 2);
        assert!(files.state().files[&7].has_pages);
        files.closed(7, 3);
        assert!(files.state().files.is_empty());
    }

    /// The kernel's WRITE of some bytes to node 7.
    fn write_request(offset: u64, data: &[u8]) -> Arc<Request> {
        let len = (WRITE_HEAD_BYTES + data.len()) as u32;
        let header = InHeader { len, opcode: opcode::WRITE, node: 7, ..InHeader::new_zeroed() };
        let write = WriteIn { handle: 1, offset, size: data.len() as u32, ..WriteIn::new_zeroed() };
        Arc::new(Request::copied(&[header.as_bytes(), write.as_bytes(), data].concat()).unwrap())
    }

    #[test]
    fn a_file_that_is_opened_and_mapped_during_a_write_keeps_its_bytes() {
        let files = Arc::new(MappedFiles::default());
        let (request, pages) = (write_request(2, b"new"), write_request(0, b"old old."));
        let by_call = files.begin_write(7, &request, &write_of(&request).unwrap());
        files.begin_pages_read(7);
        assert!(!by_call.may_have_old_pages(), "nothing can map it for writing yet");
        files.opened(7, 1, OFlags::RDWR.bits());
        files.begin_pages_read(7);
        assert!(by_call.may_have_old_pages());
        let (under_way, sent) = files.begin_pages_write(7, &write_of(&pages).unwrap());
        assert_eq!(sent.as_deref(), Some(&b"olnewld."[..]));
        files.closed(7, 1);
        drop(by_call);
        assert!(files.state().files.contains_key(&7), "another write has to wait for the pages");
        drop(under_way);
        assert!(files.state().files.is_empty());
    }
}
