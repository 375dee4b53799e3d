//! Which pages of a process are there: `PAGEMAP_SCAN` of `/proc/PID/pagemap` (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst).

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;

use linux_raw_sys::general as sys;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// Regions that one call gives.
const REGIONS: usize = 128;

const SCAN: Opcode = opcode::read_write::<sys::pm_scan_arg>(b'f', 16);

/// What lies in a range of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Pages that are in memory, swapped, or on their way to another frame.
    Present,
    /// Guard pages (`MADV_GUARD_INSTALL`), as in front of the stacks of threads. Linux before 6.15 does not tell them.
    Guard,
}

/// Tells the pages of a range, in order, of a process whose `/proc/PID/pagemap` this is. The cost goes by the pages that are there.
///
/// # Errors
/// `ENOTTY`: Linux before 6.7. `ESRCH`: the process has ended.
pub fn scan(
    pagemap: impl AsFd,
    range: Range<usize>,
    mut take: impl FnMut(Range<usize>, PageKind),
) -> Result<(), Errno> {
    let present = u64::from(sys::PAGE_IS_PRESENT | sys::PAGE_IS_SWAPPED);
    let mut categories = present | u64::from(sys::PAGE_IS_GUARD);
    let mut start = range.start;
    while start < range.end {
        let mut regions = [sys::page_region { start: 0, end: 0, categories: 0 }; REGIONS];
        let request = sys::pm_scan_arg {
            size: size_of::<sys::pm_scan_arg>() as u64,
            flags: 0,
            start: start as u64,
            end: range.end as u64,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: REGIONS as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: categories,
            return_mask: categories,
        };
        let mut scan = Scan(request);
        // SAFETY: the structure is that of the call, which writes at most `vec_len` regions to the array.
        let count = match unsafe { ioctl(&pagemap, &mut scan) } {
            Err(Errno::INVAL) if categories != present => {
                categories = present;
                continue;
            }
            result => result?,
        };
        for region in &regions[..count.min(REGIONS)] {
            let kind = if region.categories & present == 0 { PageKind::Guard } else { PageKind::Present };
            take(region.start as usize..region.end as usize, kind);
        }
        start = (scan.0.walk_end as usize).max(start + 1);
    }
    Ok(())
}

/// The call's argument; its result is how many regions were written.
struct Scan(sys::pm_scan_arg);

// SAFETY: the opcode's argument is this structure; what else the call writes is the caller's to answer for.
unsafe impl Ioctl for &mut Scan {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        SCAN
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<usize> {
        Ok(usize::try_from(output).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn of_a_tebibyte_the_pages_that_were_touched_are_told() {
        let bytes = 1 << 40;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }.unwrap();
        let start = at.expose_provenance();
        let touched = [0, 1, 1000, bytes / PAGE - 1];
        for page in touched {
            // SAFETY: the page is in the mapping, which nothing else refers to.
            unsafe { at.cast::<u8>().add(page * PAGE).write(1) };
        }
        // MADV_GUARD_INSTALL.
        // SAFETY: the page is in the mapping, and is not touched.
        let has_guards = unsafe { libc::madvise(at.cast::<u8>().add(5 * PAGE).cast(), PAGE, 102) } == 0;
        let mut told = Vec::new();
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let scanned = scan(&pagemap, start..start + bytes, |range, kind| told.push((range, kind)));
        // SAFETY: nothing refers to the mapping.
        unsafe { munmap(at, bytes) }.unwrap();
        if scanned == Err(Errno::NOTTY) {
            return byway_skip::skip_this(byway_skip::SkipReason::Machine("no PAGEMAP_SCAN (Linux before 6.7)"));
        }
        let pages = |first: usize, count: usize| start + first * PAGE..start + (first + count) * PAGE;
        let present = |first, count| (pages(first, count), PageKind::Present);
        // An empty table after a guard page may be left out by kernels that do not tell guards.
        told.retain(|(_, kind)| has_guards || *kind == PageKind::Present);
        assert_eq!(told[0], present(0, 2));
        assert_eq!(told[told.len() - 2..], [present(1000, 1), present(bytes / PAGE - 1, 1)]);
        let guards: Vec<_> = told.iter().filter(|(_, kind)| *kind == PageKind::Guard).collect();
        assert!(guards.is_empty() || *guards[0] == (pages(5, 1), PageKind::Guard), "{guards:?}");
    }
}
