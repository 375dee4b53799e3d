//! Far memory: a range of memory of which only a part is on this machine.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use byway_frontend::far_memory::{FarMemory, FarMemoryError, FarMemoryOptions, spill_file};
use byway_service::memory::pool::Class;

use crate::error::{BYWAY_E_INVALID, BYWAY_E_SYSTEM, Code, OutPointer, borrow, guard};
use crate::node::address;

/// A range of memory of which a part lies at lenders.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_far(FarMemory);

/// Each page that is far lies at one lender, and is lost with it: its access then ends in SIGBUS.
pub const BYWAY_FAR_NONE: u32 = 0;
/// Each page that is far lies at a lender, and in a file of this machine.
pub const BYWAY_FAR_DISK: u32 = 1;
/// Each page that is far lies at two lenders.
pub const BYWAY_FAR_MIRROR: u32 = 2;
/// Each page that is far lies at one of five lenders, and any four of them can compute it.
pub const BYWAY_FAR_PARITY: u32 = 3;
/// With one of the others: pages are sealed (AES-256-GCM) before they leave the process, with a key that stays in it.
pub const BYWAY_FAR_ENCRYPT: u32 = 256;

/// What the pager of a range has done.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_far_counters {
    /// Accesses that waited for a page.
    pub faults: u64,
    /// New pages.
    pub zeroed: u64,
    /// Pages that came from lenders.
    pub fetched: u64,
    /// Of these, pages that no thread waited for yet.
    pub fetched_ahead: u64,
    /// Pages that were sent to lenders.
    pub put: u64,
    /// Pages that left without being sent, because they had not changed.
    pub unchanged: u64,
}

impl From<FarMemoryError> for Code {
    fn from(error: FarMemoryError) -> Self {
        Self(if let FarMemoryError::Options(_) = error { BYWAY_E_INVALID } else { BYWAY_E_SYSTEM })
    }
}

/// Maps `bytes` (rounded up to pages), zeroes at first, into `*far`, of which at most `resident_bytes` (1 MiB or more, and 2 MiB of buffers
/// beside) are on this machine at a time. The rest lies at `count` lenders (`byway serve --lend`), at addresses as for `byway_connect`.
/// `class` is one of `BYWAY_FAR_*`, perhaps with `BYWAY_FAR_ENCRYPT`; `folder` is where the file of `BYWAY_FAR_DISK` is made, else it may
/// be null. Reports on standard error why it failed. Free it with `byway_far_close`. A forked child does not have the range.
/// `madvise(MADV_DONTNEED)` of the range is not supported: pages that are far keep their bytes.
///
/// # Safety
/// `lenders` has `count` addresses that end with a zero byte; `folder` is null or ends with a zero byte; `far` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_far_open(
    lenders: *const *const c_char,
    count: usize,
    bytes: usize,
    resident_bytes: usize,
    class: u32,
    folder: *const c_char,
    far: *mut *mut byway_far,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let place = unsafe { OutPointer::at(far)? };
        if lenders.is_null() || count == 0 {
            return Err(Code(BYWAY_E_INVALID));
        }
        // SAFETY: not null, and has so many addresses by the caller's word.
        let lenders = unsafe { std::slice::from_raw_parts(lenders, count) };
        // SAFETY: each ends with a zero byte, by the caller's word.
        let lenders = lenders.iter().map(|at| unsafe { address(*at) }).collect::<Result<_, _>>()?;
        let encrypt = class & BYWAY_FAR_ENCRYPT != 0;
        let class = match class & !BYWAY_FAR_ENCRYPT {
            BYWAY_FAR_NONE => Class::None,
            BYWAY_FAR_DISK => Class::Disk,
            BYWAY_FAR_MIRROR => Class::Mirror,
            BYWAY_FAR_PARITY => Class::Parity,
            _ => return Err(Code(BYWAY_E_INVALID)),
        };
        let mut spill = None;
        if class == Class::Disk {
            if folder.is_null() {
                return Err(Code(BYWAY_E_INVALID));
            }
            // SAFETY: not null, and ends with a zero byte by the caller's word.
            let folder = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(folder) }.to_bytes()));
            let file = spill_file(folder).inspect_err(|error| eprintln!("byway: {}: {error}", folder.display()));
            spill = Some(file.map_err(|_| Code(BYWAY_E_SYSTEM))?);
        }
        let options = FarMemoryOptions { bytes, resident_bytes, lenders, class, spill, encrypt };
        let far = FarMemory::open(options).inspect_err(|error| eprintln!("byway: {error}"))?;
        place.give(Box::into_raw(Box::new(byway_far(far))));
        Ok(0)
    })
}

/// The start of the range, at a page boundary; null if `far` is. Valid until `byway_far_close`.
///
/// # Safety
/// `far` is null or of `byway_far_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_far_bytes(far: *const byway_far) -> *mut u8 {
    // SAFETY: by the caller's word.
    unsafe { far.as_ref() }.map_or(std::ptr::null_mut(), |far| far.0.as_ptr())
}

/// The size of the range in bytes; 0 if `far` is null.
///
/// # Safety
/// `far` is null or of `byway_far_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_far_len(far: *const byway_far) -> usize {
    // SAFETY: by the caller's word.
    unsafe { far.as_ref() }.map_or(0, |far| far.0.len())
}

/// Writes what the pager has done to `*counters`.
///
/// # Safety
/// `far` is of `byway_far_open`; `counters` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_far_statistics(far: *const byway_far, counters: *mut byway_far_counters) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (far, place) = unsafe { (borrow(far)?, OutPointer::at(counters)?) };
        let counted = far.0.counters();
        place.give(byway_far_counters {
            faults: counted.faults,
            zeroed: counted.zeroed,
            fetched: counted.fetched,
            fetched_ahead: counted.ahead,
            put: counted.put,
            unchanged: counted.unchanged,
        });
        Ok(0)
    })
}

/// Unmaps the range, with its contents, and frees `far`. Does nothing for null.
///
/// # Safety
/// `far` is null or of `byway_far_open`; neither it nor its bytes are used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_far_close(far: *mut byway_far) {
    guard(|| {
        if !far.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(far) });
        }
        Ok(0)
    });
}
