//! `FarMemory` of the Rust crates and of the C interface, with lenders of `byway serve --lend`.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use byway_e2e::far::{Lender, compiled_with_byway};
use byway_e2e::{LIMIT, SkipReason, skip, until};
use byway_fabric::node::{Deadline, Node, NodeOptions, Rights, parse_address};
use byway_frontend::far_memory::{FarMemory, FarMemoryError, FarMemoryOptions, RESIDENT_BYTES_MIN, spill_file};
use byway_reactor::userfault::pagemap;
use byway_service::memory::pager::Counters;
use byway_service::memory::pool::Class;

// Has the library built.
use byway as _;

const PAGE: usize = 4096;
const BYTES: usize = 32 << 20;
const RESIDENT: usize = 4 << 20;

fn addresses(lender: &Lender) -> [String; 2] {
    [format!("tcp://127.0.0.1:{}", lender.server.port("byway")), format!("shm://{}", lender.path("shm").display())]
}

/// `None`, said aloud, where the kernel hands no faults over.
fn open(test: &str, lenders: &[&str], class: Class, folder: &Path) -> Option<FarMemory> {
    let lenders = lenders.iter().map(|lender| parse_address(lender).unwrap()).collect();
    let spill = (class == Class::Disk).then(|| spill_file(folder).unwrap());
    match FarMemory::open(FarMemoryOptions {
        bytes: BYTES,
        resident_bytes: RESIDENT,
        lenders,
        class,
        spill,
        encrypt: false,
    }) {
        Ok(memory) => Some(memory),
        Err(FarMemoryError::Userfault(error)) => {
            skip(test, SkipReason::Machine(&error.to_string()));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What a page has of a version.
fn page_of(page: usize, version: u8) -> [u8; PAGE] {
    std::array::from_fn(|at| (page * 31 + at * 7) as u8 ^ version)
}

fn fill(memory: &mut FarMemory, version: u8) {
    for (number, page) in memory.bytes_mut().as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
        *page = page_of(number, version);
    }
}

fn check(memory: &FarMemory, version: u8) {
    for (number, page) in memory.bytes().as_chunks::<PAGE>().0.iter().enumerate() {
        assert!(*page == page_of(number, version), "page {number}");
    }
}

/// Bytes of it that are in this machine's memory.
fn resident(memory: &FarMemory) -> usize {
    let start = memory.as_ptr().addr();
    let mut bytes = 0;
    let maps = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap::scan(&maps, start..start + memory.len(), |range, _| bytes += range.len()).unwrap();
    bytes
}

/// Counters that are current: so many pages were fetched.
fn counters_from(memory: &FarMemory, fetched: u64) -> Counters {
    until(Instant::now() + LIMIT, "the counters", || Some(memory.counters()).filter(|now| now.fetched >= fetched))
}

#[test]
fn what_was_written_is_read_again_and_little_of_it_is_here() {
    let lender = Lender::start();
    for address in addresses(&lender) {
        let Some(mut memory) = open("far_memory", &[&address], Class::None, lender.path(".").as_path()) else { return };
        assert!(memory.bytes()[BYTES / 2..BYTES / 2 + PAGE].iter().all(|byte| *byte == 0));
        for version in [1, 2] {
            fill(&mut memory, version);
            check(&memory, version);
            let bound = RESIDENT + (64 << 10);
            until(Instant::now() + LIMIT, "pages that leave", || (resident(&memory) <= bound).then_some(()));
        }
    }
}

/// A handler that ran in the pager's thread and touched a far page would wait for itself.
#[test]
fn the_pager_takes_no_signals_of_the_program() {
    let lender = Lender::start();
    let [address, _] = addresses(&lender);
    let Some(memory) = open("far_memory", &[&address], Class::None, lender.path(".").as_path()) else { return };
    let pager = until(Instant::now() + LIMIT, "the pager's thread", || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
        let statuses = threads.map(|thread| std::fs::read_to_string(thread.join("status")).unwrap_or_default());
        statuses.into_iter().find(|status| status.starts_with("Name:\tbyway-far\n"))
    });
    let blocked = pager.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
    let blocked = u64::from_str_radix(blocked, 16).unwrap();
    // Bit n - 1 is signal n: HUP, INT, USR1, SEGV, ALRM, TERM, CHLD.
    for signal in [1, 2, 10, 11, 14, 15, 17] {
        assert!(blocked & (1 << (signal - 1)) != 0, "{signal}: {blocked:x}");
    }
    let own = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let own = own.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(own, 16).unwrap() & (1 << 14), 0, "this thread's are as before");
    drop(memory);
}

#[test]
fn pages_that_are_only_read_are_sent_once() {
    let lender = Lender::start();
    let [address, _] = addresses(&lender);
    let Some(mut memory) = open("far_memory", &[&address], Class::None, lender.path(".").as_path()) else { return };
    fill(&mut memory, 1);
    check(&memory, 1);
    let far = (BYTES - 2 * RESIDENT) as u64 / 4096;
    let before = counters_from(&memory, far);
    (0..3).for_each(|_| check(&memory, 1));
    let after = counters_from(&memory, before.fetched + 3 * far);
    assert!(after.put - before.put < far / 4, "{before:?} {after:?}");
    assert!(after.unchanged - before.unchanged > 2 * far, "{before:?} {after:?}");
}

#[test]
fn system_calls_and_other_nodes_read_and_write_it() {
    let lender = Lender::start();
    let [address, _] = addresses(&lender);
    let Some(mut memory) = open("far_memory", &[&address], Class::None, lender.path(".").as_path()) else { return };
    fill(&mut memory, 3);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(memory.bytes()).expect("far pages are the source of a write");
    fill(&mut memory, 4);
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(memory.bytes_mut()).expect("far pages are the target of a read");
    check(&memory, 3);

    let (ours, theirs) = (Node::open(&NodeOptions::default()).unwrap(), Node::open(&NodeOptions::default()).unwrap());
    let at = theirs.listen(&parse_address("tcp://127.0.0.1:0").unwrap()).unwrap().unwrap();
    let soon = || Deadline::after(Duration::from_secs(30));
    std::thread::scope(|scope| {
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let (give, descriptor) = std::sync::mpsc::channel();
        let theirs = &theirs;
        scope.spawn(move || {
            let session = theirs.accept(soon()).unwrap();
            let store = theirs.register(BYTES).unwrap();
            let window = theirs.open_window(session, &store, 0..BYTES, Rights { put: true, get: true }).unwrap();
            give.send(window.descriptor()).unwrap();
            while is_done.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                let _ = theirs.receive(Deadline::after(Duration::from_millis(20)));
            }
        });
        let session = ours.connect(&parse_address(&format!("tcp://{at}")).unwrap(), soon()).unwrap();
        let window = descriptor.recv().unwrap();
        ours.put_from(session, memory.bytes(), &window, 0, soon()).expect("far pages are the source of a put");
        fill(&mut memory, 5);
        ours.get_into(session, &window, 0, memory.bytes_mut(), soon()).expect("far pages are the target of a get");
        drop(done);
    });
    check(&memory, 3);
}

#[test]
fn a_lender_that_is_killed_costs_nothing_with_a_file() {
    let mut lender = Lender::start();
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let [address, _] = addresses(&lender);
    let Some(mut memory) = open("far_memory", &[&address], Class::Disk, folder.path()) else { return };
    fill(&mut memory, 1);
    lender.server.kill();
    check(&memory, 1);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let lender = || vec![parse_address("tcp://127.0.0.1:1").unwrap()];
    let options = |bytes, resident_bytes, lenders, class| FarMemoryOptions {
        bytes,
        resident_bytes,
        lenders,
        class,
        spill: None,
        encrypt: false,
    };
    for (options, why) in [
        (options(0, RESIDENT, lender(), Class::None), "no bytes"),
        (options(PAGE, RESIDENT_BYTES_MIN - 1, lender(), Class::None), "at least 1 MiB"),
        (options(PAGE, RESIDENT, Vec::new(), Class::None), "needs a lender"),
        (options(PAGE, RESIDENT, lender(), Class::Mirror), "two lenders"),
        (options(PAGE, RESIDENT, lender(), Class::Disk), "need a file"),
        (options(PAGE, RESIDENT, lender(), Class::Parity), "five lenders"),
    ] {
        let said = FarMemory::open(options).map(drop).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
    match FarMemory::open(options(PAGE, RESIDENT, lender(), Class::None)) {
        Err(FarMemoryError::Userfault(error)) => skip("far_memory", SkipReason::Machine(&error.to_string())),
        other => assert!(matches!(&other, Err(FarMemoryError::Lender { .. })), "{other:?}"),
    }
}

#[test]
fn one_lender_is_not_two() {
    let lender = Lender::start();
    let options = FarMemoryOptions {
        bytes: BYTES,
        resident_bytes: RESIDENT,
        lenders: addresses(&lender).iter().map(|address| parse_address(address).unwrap()).collect(),
        class: Class::Mirror,
        spill: None,
        encrypt: false,
    };
    match FarMemory::open(options) {
        Err(FarMemoryError::Userfault(error)) => skip("far_memory", SkipReason::Machine(&error.to_string())),
        opened => {
            let said = opened.map(drop).unwrap_err().to_string();
            assert!(said.contains("it is the same process as tcp://"), "{said}");
        }
    }
}

#[test]
fn a_c_program_has_far_memory() {
    let lender = Lender::start();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/examples/far.c");
    let Some(program) = compiled_with_byway(&source, &lender.path(".")) else { return };
    for address in addresses(&lender) {
        let ran = Command::new(&program).arg(&address).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        if said.contains("userfaultfd") {
            return skip("far_memory", SkipReason::Machine(said.trim()));
        }
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "64 MiB came back as they were written\n", "{said}");
    }
}
