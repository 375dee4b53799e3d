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

#[test]
fn a_run_leaves_up_to_the_first_page_that_cannot() {
    let _alone = ALONE.lock();
    let Some(area) = area(8) else { return };
    area.open_segment(0, 8).unwrap();
    let bytes: Vec<u8> = (0..3 * PAGE_BYTES).map(|at| (at / PAGE_BYTES) as u8).collect();
    area.fill(2, &bytes, Mode::Write).unwrap();
    for keeps in [Mode::Read, Mode::Write, Mode::None] {
        let taken = area.take_run(2, 5, keeps).unwrap();
        assert_eq!(taken.iter().map(|page| page[7]).collect::<Vec<_>>(), [0, 1, 2], "the fourth is not there");
        for page in 2..5 {
            assert_eq!(area.is_there(page).unwrap(), keeps > Mode::None);
        }
    }
    assert_eq!(area.take_run(2, 3, Mode::None), Err(TakeError::Dropped));
    assert_eq!(area.fill(3, &[7; PAGE_BYTES], Mode::Read), Ok(()));
    assert_eq!(area.fill(2, &bytes, Mode::Write), Err(FillError::Exists));
    assert_eq!(area.take(2).unwrap()[..], bytes[..PAGE_BYTES], "what is before the page that is there is filled");
}

/// The kernel has two mappings of segments that lie side by side, where both were used before.
#[test]
fn a_run_crosses_mappings() {
    let _alone = ALONE.lock();
    let Some(area) = area(6) else { return };
    let bytes: Vec<u8> = (0..6 * PAGE_BYTES).map(|at| (at / PAGE_BYTES) as u8).collect();
    for first in [0, 4] {
        area.open_segment(first, 2).unwrap();
        area.fill(first, &bytes[..2 * PAGE_BYTES], Mode::Write).unwrap();
    }
    area.open_segment(2, 2).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_area = |line: &&str| line.starts_with(&format!("{:x}", AREA_ADDRESS >> 16)) && line.contains("rw-p");
    assert_eq!(maps.lines().filter(of_area).count(), 2, "{maps}");
    for first in [0, 4] {
        assert_eq!(area.take_run(first, 2, Mode::None).unwrap().len(), 2);
    }
    area.fill(0, &bytes, Mode::Read).unwrap();
    let (mut page, mut seen) = (0, Vec::new());
    while page < 6 {
        let taken = area.take_run(page, 6 - page as usize, Mode::None).unwrap();
        page += taken.len() as Page;
        seen.extend(taken.iter().map(|page| page[9]));
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    area.fill(0, &bytes, Mode::Read).unwrap();
    area.drop_copies(0, 6).unwrap();
    assert!((0..6).all(|page| !area.is_there(page).unwrap()));
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
    let buffer = libc::iovec { iov_base: with_exposed_provenance_mut(area.view_of(1, 1).start), iov_len: PAGE_BYTES };
    // SAFETY: the page stays mapped until the buffer is unregistered; the ring reads and writes nothing.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    assert_eq!(area.take(1), Err(TakeError::Pinned));
    assert_eq!(area.protect(1), Err(TakeError::Pinned));
    assert!(area.is_there(1).unwrap());
    ring.submitter().unregister_buffers().unwrap();
    assert_eq!(area.protect(1).unwrap()[0], 5);
    assert_eq!(area.take(1).unwrap()[0], 5);
}

#[test]
fn a_run_leaves_up_to_a_page_that_is_pinned() {
    let _alone = ALONE.lock();
    let Some(area) = area(3) else { return };
    let Ok(ring) = io_uring::IoUring::new(2) else {
        return skip_this(SkipReason::Machine("the kernel refuses io_uring"));
    };
    area.open_segment(0, 3).unwrap();
    area.fill(0, &[5; 3 * PAGE_BYTES], Mode::Write).unwrap();
    let buffer = libc::iovec { iov_base: with_exposed_provenance_mut(area.view_of(1, 1).start), iov_len: PAGE_BYTES };
    // SAFETY: as above.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    assert_eq!(area.take_run(0, 3, Mode::Read).unwrap().len(), 1);
    assert_eq!(area.take_run(1, 2, Mode::Read), Err(TakeError::Pinned));
    assert_eq!(area.take_run(2, 1, Mode::Read).unwrap().len(), 1);
    assert!((0..3).all(|page| area.is_there(page).unwrap()));
}
