//! Pages leave and come as the kernel moves and fills them.

use byway_skip::{SkipReason, skip_this};

use super::*;

/// All areas of a process lie at one address.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn area(pages: u64) -> Option<Area> {
    match Area::new(pages) {
        Ok(area) => Some(area),
        Err(AreaError::Userfault(error)) => {
            skip_this(SkipReason::Machine(&error.to_string()));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn memory_that_lies_there_already_stays() {
    let _alone = ALONE.lock();
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE);
    let there = with_exposed_provenance_mut(AREA_ADDRESS);
    // SAFETY: a new mapping that replaces none.
    let there = unsafe { rustix::mm::mmap_anonymous(there, PAGE_BYTES, rights, flags) }.unwrap().cast::<u8>();
    // SAFETY: the mapping just made.
    unsafe { there.write_volatile(7) };
    match Area::new(4) {
        Err(AreaError::Address) => {}
        Err(AreaError::Userfault(error)) => skip_this(SkipReason::Machine(&error.to_string())),
        other => panic!("{other:?}"),
    }
    // SAFETY: the same mapping; without it, the test ends by a signal.
    assert_eq!(unsafe { there.read_volatile() }, 7);
    // SAFETY: the same mapping, which nothing uses any more.
    unsafe { munmap(there.cast(), PAGE_BYTES) }.unwrap();
}

/// Bytes of this process's memory that have frames (`VmRSS`).
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE_BYTES
}

#[test]
fn a_page_that_leaves_gives_its_frame_back() {
    const PAGES: Page = 4096;
    let _alone = ALONE.lock();
    let Some(area) = area(PAGES.into()) else { return };
    area.open_segment(0, PAGES.into()).unwrap();
    let before = resident_bytes();
    for page in 0..PAGES {
        area.fill(page, &[page as u8; PAGE_BYTES], Mode::Write).unwrap();
    }
    let full = resident_bytes();
    assert!(full - before > 12 << 20, "16 MiB of pages take {} bytes", full - before);
    for page in 0..PAGES {
        assert!(area.is_there(page).unwrap());
        assert_eq!(area.take(page).unwrap()[17], page as u8);
        assert!(!area.is_there(page).unwrap());
    }
    assert_eq!(area.take(3), Err(TakeError::Dropped));
    let left = resident_bytes().saturating_sub(before);
    assert!(left < 4 << 20, "{left} bytes stay when all pages have left");
}

#[test]
fn a_page_that_a_ring_has_pinned_does_not_leave() {
    let _alone = ALONE.lock();
    let Some(area) = area(2) else { return };
    let Ok(ring) = io_uring::IoUring::new(2) else {
        return skip_this(SkipReason::Machine("the kernel refuses io_uring"));
    };
    area.open_segment(0, 2).unwrap();
    area.fill(1, &[5; PAGE_BYTES], Mode::Write).unwrap();
    let buffer = libc::iovec { iov_base: with_exposed_provenance_mut(area.view_of(1).start), iov_len: PAGE_BYTES };
    // SAFETY: the page stays mapped until the buffer is unregistered; the ring reads and writes nothing.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    assert_eq!(area.take(1), Err(TakeError::Pinned));
    assert_eq!(area.protect(1), Err(TakeError::Pinned));
    assert!(area.is_there(1).unwrap());
    ring.submitter().unregister_buffers().unwrap();
    assert_eq!(area.protect(1).unwrap()[0], 5);
    assert_eq!(area.take(1).unwrap()[0], 5);
}
