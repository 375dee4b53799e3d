//! The kind of memory of a range: only pages that cannot be taken away without an event stay registered.
//!
//! Another program can truncate a file or punch a hole into it, and no event reports that. So by default the cache keeps
//! private anonymous memory only. It asks the kernel by `PROCMAP_QUERY` (`/proc/PID/maps`, Linux 6.11), after the range is
//! watched: a later change of the mapping is an event.

use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::general as sys;
use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::Unavailable;
use super::range::PageRange;
use crate::limits::BACKING_MAPPINGS_MAX;

const PROCMAP_QUERY: Opcode = opcode::read_write::<sys::procmap_query>(b'f', 17);

/// What is known of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// All of it is private anonymous memory.
    Private,
    /// Parts are a file's, or memory that other processes share.
    Shared,
    /// Not all of it is mapped, or by more mappings than we look at.
    Unknown,
}

/// The process's list of mappings.
#[derive(Debug)]
pub(super) struct Mappings {
    maps: OwnedFd,
}

impl Mappings {
    /// Opens the list, where the kernel answers single questions about it.
    pub(super) fn open() -> Result<Self, Unavailable> {
        let maps = rustix::fs::open("/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mappings = Self { maps: maps.map_err(|_| Unavailable::NoMappings)? };
        let here = PageRange::covering(std::ptr::from_ref(&mappings).addr(), 1).ok_or(Unavailable::NoMappings)?;
        mappings.at(here.start()).map(|_| ()).ok_or(Unavailable::NoMappings)?;
        Ok(mappings)
    }

    /// What `range` is made of.
    pub(super) fn backing(&self, range: PageRange) -> Backing {
        let mut at = range.start();
        let mut backing = Backing::Private;
        for _ in 0..BACKING_MAPPINGS_MAX {
            let Some(mapping) = self.at(at) else { return Backing::Unknown };
            let is_shared =
                mapping.vma_flags & u64::from(sys::procmap_query_flags::PROCMAP_QUERY_VMA_SHARED as u32) != 0;
            if mapping.inode != 0 || is_shared {
                backing = Backing::Shared;
            }
            at = mapping.vma_end as usize;
            if at >= range.end() {
                return backing;
            }
        }
        Backing::Unknown
    }

    /// From the start of the first mapping with a page of `range` to the end of the last. `None` where none has one, or they
    /// are more than we look at.
    pub(super) fn around(&self, range: PageRange) -> Option<PageRange> {
        let next = |address| self.query(address, sys::procmap_query_flags::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64);
        let first = next(range.start()).filter(|first| (first.vma_start as usize) < range.end())?;
        let (start, mut end) = (first.vma_start as usize, first.vma_end as usize);
        for _ in 0..BACKING_MAPPINGS_MAX {
            if end >= range.end() {
                return PageRange::covering(start, end - start);
            }
            match next(end).filter(|mapping| (mapping.vma_start as usize) < range.end()) {
                Some(mapping) => end = mapping.vma_end as usize,
                None => return PageRange::covering(start, end - start),
            }
        }
        None
    }

    /// The number of the descriptor, for a forked child to close.
    pub(super) fn raw_fd(&self) -> i32 {
        self.maps.as_raw_fd()
    }

    /// The mapping with the byte at `address`.
    fn at(&self, address: usize) -> Option<sys::procmap_query> {
        self.query(address, 0)
    }

    fn query(&self, address: usize, flags: u64) -> Option<sys::procmap_query> {
        // SAFETY: the structure is made of numbers only, for which zero is a value.
        let mut query: sys::procmap_query = unsafe { std::mem::zeroed() };
        query.size = size_of::<sys::procmap_query>() as u64;
        query.query_addr = address as u64;
        query.query_flags = flags;
        // SAFETY: the structure is that of the call, and has no pointers set.
        unsafe { ioctl(&self.maps, Updater::<PROCMAP_QUERY, _>::new(&mut query)) }.ok()?;
        Some(query)
    }
}
