//! Counts of calls, for `byway run --report`: in a file that all of its programs map.
//!
//! A table of [`ENTRIES`] entries of [`ENTRY_BYTES`]: a hash of the name, which claims the entry, two counts, and the name.

use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// The variable with the file's path; `byway/src/run.rs` sets it and reads the table.
const REPORT_VARIABLE: &str = "BYWAY_RUN_REPORT";

/// Entries of the table; further names are not counted.
const ENTRIES: usize = 256;

/// Bytes of an entry.
const ENTRY_BYTES: usize = 64;

#[repr(C)]
struct Entry {
    hash: AtomicU64,
    /// Calls that were answered from a share.
    answered: AtomicU64,
    /// Calls that this library refuses.
    refused: AtomicU64,
    name: [AtomicU8; 40],
}

const _: () = assert!(size_of::<Entry>() == ENTRY_BYTES);

static TABLE: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

/// Maps the table, if there is one.
pub(crate) fn begin_program() {
    let Some(path) = std::env::var_os(REPORT_VARIABLE) else { return };
    let Ok(file) = open(path.as_bytes(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else { return };
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    if !rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_size as usize >= ENTRIES * ENTRY_BYTES) {
        return;
    }
    // SAFETY: a new mapping at an address of the kernel's choice; it is used by atomic operations alone.
    let at = unsafe { mmap(std::ptr::null_mut(), ENTRIES * ENTRY_BYTES, rights, MapFlags::SHARED, &file, 0) };
    if let Ok(at) = at {
        TABLE.store(at.cast(), Ordering::Release);
    }
}

/// A call was answered from a share.
pub(crate) fn answered(name: &str) {
    if let Some(entry) = entry(name) {
        entry.answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call on a share was refused, because this library does not have it.
pub(crate) fn refused(name: &str) {
    if let Some(entry) = entry(name) {
        entry.refused.fetch_add(1, Ordering::Relaxed);
    }
}

fn entry(name: &str) -> Option<&'static Entry> {
    let table = TABLE.load(Ordering::Acquire);
    if table.is_null() {
        return None;
    }
    // SAFETY: the mapping has so many entries, and is never unmapped.
    let table = unsafe { std::slice::from_raw_parts(table.cast_const(), ENTRIES) };
    let hash = hash(name);
    let first = hash as usize % ENTRIES;
    for entry in table[first..].iter().chain(&table[..first]) {
        match entry.hash.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                name.bytes().zip(&entry.name).for_each(|(byte, place)| place.store(byte, Ordering::Relaxed));
                return Some(entry);
            }
            Err(found) if found == hash => return Some(entry),
            Err(_) => {}
        }
    }
    None
}

/// FNV-1a of 64 bits; never 0.
fn hash(name: &str) -> u64 {
    let mixed = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    mixed.max(1)
}
