use std::os::fd::AsFd;

use byway_skip::{SkipReason, skip_this};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::*;

const PAGE: usize = 4096;
const PAGES: usize = 4;

/// Pages of a test, unmapped at its end. Its bytes are looked at by a thread that copies them.
struct Pages {
    at: usize,
}

impl Pages {
    fn anonymous() -> Self {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGES * PAGE, rights, MapFlags::PRIVATE) };
        Self { at: at.unwrap().expose_provenance() }
    }

    fn of_file(file: impl AsFd) -> Self {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        let at = unsafe { mmap(std::ptr::null_mut(), PAGES * PAGE, rights, MapFlags::SHARED, file, 0) };
        Self { at: at.unwrap().expose_provenance() }
    }

    fn page(&self, index: usize) -> Range<usize> {
        let start = self.at + index * PAGE;
        start..start + PAGE
    }

    /// Reads the first byte of a page; whoever answers faults must be another thread.
    fn read(&self, index: usize) -> u8 {
        // SAFETY: mapped as long as the test runs, and all that changes it are threads of this test and the kernel.
        unsafe { std::ptr::with_exposed_provenance::<u8>(self.page(index).start).read_volatile() }
    }

    fn write(&self, index: usize, byte: u8) {
        // SAFETY: as in `read`.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(self.page(index).start).write_volatile(byte) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: no thread of the test uses them any more.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.at), PAGES * PAGE) };
    }
}

/// Skips where this machine refuses it.
fn opened(features: Features) -> Option<Userfault> {
    match Userfault::open(features, true) {
        Ok(userfault) => Some(userfault),
        Err(error) => {
            skip_this(SkipReason::Machine(&error.to_string()));
            None
        }
    }
}

fn next(userfault: &Userfault) -> Event {
    let mut event = None;
    while event.is_none() {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(userfault, PollFlags::IN)], Some(&limit)), Ok(1), "no message");
        userfault.read(|came| event = Some(came));
    }
    event.unwrap()
}

fn fault(userfault: &Userfault) -> (usize, FaultKind, bool) {
    match next(userfault) {
        Event::Fault { address, kind, write, .. } => (address, kind, write),
        other => panic!("{other:?}"),
    }
}

/// Does something in another thread while this one answers. If this one fails the process ends: nobody would answer the other.
fn meanwhile<T: Send>(work: impl FnOnce() -> T + Send, answer: impl FnOnce()) -> T {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            if std::thread::panicking() {
                std::process::exit(101);
            }
        }
    }
    std::thread::scope(|scope| {
        let worker = scope.spawn(work);
        let _ends = Ends;
        answer();
        worker.join().unwrap()
    })
}

#[test]
fn a_missing_page_is_filled_and_one_that_is_there_is_not_touched() {
    let Some(userfault) = opened(Features::default()) else { return };
    let pages = Pages::anonymous();
    // SAFETY: no references are made to the pages.
    unsafe { userfault.register(pages.page(0).start..pages.page(3).end, Modes::MISSING) }.unwrap();
    let read = meanwhile(
        || pages.read(1),
        || {
            assert_eq!(fault(&userfault), (pages.page(1).start, FaultKind::Missing, false));
            userfault.copy(pages.page(1).start, &[7; PAGE], false).unwrap();
        },
    );
    assert_eq!(read, 7);
    let again = userfault.copy(pages.page(1).start, &[8; PAGE], false);
    assert_eq!(again, Err(Partly { bytes: 0, error: FillError::Exists }));
    userfault.zero(pages.page(2)).unwrap();
    assert_eq!((pages.read(1), pages.read(2)), (7, 0));
    let outside = userfault.copy(pages.page(3).end + (1 << 30), &[8; PAGE], false);
    assert!(matches!(outside, Err(Partly { error: FillError::NoMapping, .. })), "{outside:?}");
}

#[test]
fn a_page_moves_out_and_back() {
    let Some(userfault) = opened(Features::MOVE) else { return };
    let (pages, aside) = (Pages::anonymous(), Pages::anonymous());
    for (index, byte) in [(0, 1), (2, 3)] {
        pages.write(index, byte);
    }
    for pages in [&pages, &aside] {
        // SAFETY: no references are made to the pages.
        unsafe { userfault.register(pages.page(0).start..pages.page(3).end, Modes::MISSING) }.unwrap();
    }
    // SAFETY: nothing refers to the pages.
    let moved = |index: usize| unsafe { userfault.move_pages(aside.page(index).start, pages.page(index).start, PAGE) };
    assert_eq!((moved(0), moved(2)), (Ok(()), Ok(())));
    assert!(matches!(moved(1), Err(Partly { error: FillError::NoMapping, .. })), "there is no page");
    assert_eq!((aside.read(0), aside.read(2)), (1, 3));
    let back = meanwhile(
        || pages.read(2),
        || {
            assert_eq!(fault(&userfault).0, pages.page(2).start);
            // SAFETY: nothing refers to the pages.
            unsafe { userfault.move_pages(pages.page(2).start, aside.page(2).start, PAGE) }.unwrap();
        },
    );
    assert_eq!(back, 3);
}

/// The kernel moves pages to other frames meanwhile, as it does when it makes room for large ones.
#[test]
fn pages_that_the_kernel_migrates_are_moved_or_stay() {
    const COMPACT: &str = "/proc/sys/vm/compact_memory";
    const SOURCE: usize = 1 << 14;
    const RUN: usize = 16;
    let Some(userfault) = opened(Features::MOVE) else { return };
    if std::fs::write(COMPACT, "1").is_err() {
        skip_this(SkipReason::Machine("only root may have the kernel compact memory"));
        return;
    }
    let map = |pages: usize| {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, used below alone.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), pages * PAGE, rights, MapFlags::PRIVATE) }.unwrap();
        (at, at.expose_provenance())
    };
    let ((source, from), (stage, to)) = (map(SOURCE), map(RUN));
    let word = |index: usize| std::ptr::with_exposed_provenance_mut::<usize>(from + index * PAGE);
    // SAFETY: of the mapping, and no references are made.
    (0..SOURCE).for_each(|index| unsafe { word(index).write_volatile(index + 1) });
    for (at, pages) in [(from, SOURCE), (to, RUN)] {
        // SAFETY: no references are made to the pages.
        unsafe { userfault.register(at..at + pages * PAGE, Modes::MISSING) }.unwrap();
    }
    // SAFETY: nothing refers to the pages, and the destination is empty.
    let move_all = |to: usize, from: usize, pages: usize| match unsafe { userfault.move_pages(to, from, pages * PAGE) }
    {
        Ok(()) => pages,
        Err(Partly { bytes, error: FillError::Busy | FillError::Changing }) => bytes / PAGE,
        Err(partly) => panic!("{partly}"),
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while std::time::Instant::now() < end {
                let _ = std::fs::write(COMPACT, "1");
            }
        });
        for first in (0..SOURCE).step_by(RUN).cycle().take_while(|_| std::time::Instant::now() < end) {
            let moved = move_all(to, from + first * PAGE, RUN);
            let mut back = 0;
            while back < moved {
                back += move_all(from + (first + back) * PAGE, to + back * PAGE, moved - back);
            }
        }
    });
    userfault.unregister(from..from + SOURCE * PAGE);
    // SAFETY: as above; a page that is missing is all zeroes now.
    let lost: Vec<_> = (0..SOURCE).filter(|index| unsafe { word(*index).read_volatile() } != index + 1).collect();
    assert!(lost.is_empty(), "{lost:?}");
    // SAFETY: nothing uses the mappings any more.
    unsafe { (munmap(source, SOURCE * PAGE).unwrap(), munmap(stage, RUN * PAGE).unwrap()) };
}

#[test]
fn a_protected_page_faults_when_it_is_written() {
    let Some(userfault) = opened(Features::WRITE_PROTECT) else { return };
    let pages = Pages::anonymous();
    pages.write(0, 1);
    // SAFETY: no references are made to the pages.
    unsafe { userfault.register(pages.page(0), Modes::WRITE_PROTECT) }.unwrap();
    userfault.write_protect(pages.page(0), true, false).unwrap();
    assert_eq!(pages.read(0), 1);
    meanwhile(
        || pages.write(0, 2),
        || {
            assert_eq!(fault(&userfault), (pages.page(0).start, FaultKind::WriteProtected, true));
            userfault.write_protect(pages.page(0), false, false).unwrap();
        },
    );
    assert_eq!(pages.read(0), 2);
}

#[test]
fn a_page_of_a_file_is_mapped_when_it_is_here() {
    let features = Features::MINOR_SHARED.and(Features::WRITE_PROTECT_SHARED);
    let Some(userfault) = opened(features) else { return };
    let file = memfd_create("userfault", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, (PAGES * PAGE) as u64).unwrap();
    let (view, filler) = (Pages::of_file(&file), Pages::of_file(&file));
    // SAFETY: no references are made to the pages.
    unsafe { userfault.register(view.page(0), Modes::MINOR.and(Modes::WRITE_PROTECT)) }.unwrap();
    filler.write(0, 5);
    let read = meanwhile(
        || view.read(0),
        || {
            assert_eq!(fault(&userfault), (view.page(0).start, FaultKind::Minor, false));
            userfault.resume(view.page(0), true).unwrap();
        },
    );
    assert_eq!(read, 5);
    meanwhile(
        || view.write(0, 6),
        || {
            assert_eq!(fault(&userfault).1, FaultKind::WriteProtected, "it was mapped protected");
            userfault.write_protect(view.page(0), false, false).unwrap();
        },
    );
    assert_eq!(filler.read(0), 6);
}

#[test]
fn changes_are_told_and_nothing_is_filled_meanwhile() {
    let features = Features::REMOVE.and(Features::REMAP).and(Features::UNMAP);
    let Some(userfault) = opened(features) else { return };
    let pages = Pages::anonymous();
    pages.write(0, 1);
    // SAFETY: no references are made to the pages.
    unsafe { userfault.register(pages.page(0).start..pages.page(3).end, Modes::MISSING) }.unwrap();
    assert!(userfault.is_quiet());
    let (first, second) = (pages.page(0), pages.page(1));
    meanwhile(
        // SAFETY: nothing refers to the page.
        || unsafe { madvise(std::ptr::with_exposed_provenance_mut(first.start), PAGE, Advice::LinuxDontNeed) }.unwrap(),
        || {
            poll(&mut [PollFd::new(&userfault, PollFlags::IN)], None).unwrap();
            assert!(!userfault.is_quiet());
            let filled = userfault.copy(second.start, &[1; PAGE], false);
            assert_eq!(filled, Err(Partly { bytes: 0, error: FillError::Changing }));
            assert!(matches!(next(&userfault), Event::Removed(range) if range == first));
        },
    );
    let target = Pages::anonymous();
    let (from, to) = (pages.page(0).start, target.at);
    meanwhile(
        || {
            let at = |address| std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: nothing refers to either; the target is replaced.
            unsafe { rustix::mm::mremap_fixed(at(from), PAGE, PAGE, MremapFlags::MAYMOVE, at(to)) }.unwrap();
        },
        || {
            assert!(matches!(next(&userfault), Event::Remapped { bytes: PAGE, .. }));
            assert!(matches!(next(&userfault), Event::Unmapped(range) if range == pages.page(0)), "where it lay");
        },
    );
    let left = pages.page(2);
    meanwhile(
        // SAFETY: nothing refers to the page.
        || unsafe { munmap(std::ptr::with_exposed_provenance_mut(left.start), PAGE) }.unwrap(),
        || assert!(matches!(next(&userfault), Event::Unmapped(range) if range == left)),
    );
    userfault.unregister(pages.page(3));
    userfault.unregister(target.page(0));
    userfault.unregister(pages.page(1));
}
