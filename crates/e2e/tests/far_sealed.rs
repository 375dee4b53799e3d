//! Sealed pages (`FarMemoryOptions::encrypt`, `byway far --encrypt`): the lender and the file have no byte of the program's, and a changed
//! page is noticed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use byway_e2e::far::{Lender, PagedProgram, can_page, compiled_with_byway, far, python};
use byway_e2e::{LIMIT, SkipReason, skip, until};
use byway_fabric::node::parse_address;
use byway_frontend::far_memory::{FarMemory, FarMemoryError, FarMemoryOptions, spill_file};
use byway_service::memory::pool::Class;

// Has the library built.
use byway as _;

const PAGE: usize = 4096;
const PAGES: usize = 4096;
const RESIDENT: usize = 2 << 20;
const SECRET: &[u8; 16] = b"of the program! ";

/// Far memory full of the secret, and the file beside it. `None`, said aloud, where the kernel hands no faults over.
fn filled(lender: &Lender, encrypt: bool) -> Option<(FarMemory, File)> {
    let file = spill_file(&lender.path(".")).unwrap();
    let lenders = vec![parse_address(&format!("tcp://127.0.0.1:{}", lender.server.port("byway"))).unwrap()];
    let spill = Some(file.try_clone().unwrap());
    let (bytes, class) = (PAGES * PAGE, Class::Disk);
    let options = FarMemoryOptions { bytes, resident_bytes: RESIDENT, lenders, class, spill, encrypt };
    let mut memory = match FarMemory::open(options) {
        Err(FarMemoryError::Userfault(error)) => {
            skip("far_sealed", SkipReason::Machine(&error.to_string()));
            return None;
        }
        opened => opened.unwrap(),
    };
    for (number, page) in memory.bytes_mut().as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
        page.as_chunks_mut::<16>().0.fill(*SECRET);
        page[..8].copy_from_slice(&(number as u64).to_ne_bytes());
    }
    let put = (PAGES * PAGE - 2 * RESIDENT) / PAGE;
    until(Instant::now() + LIMIT, "pages that leave", || (memory.counters().put >= put as u64).then_some(()));
    Some((memory, file))
}

fn check(memory: &FarMemory) {
    for (number, page) in memory.bytes().as_chunks::<PAGE>().0.iter().enumerate() {
        assert!(page[..8] == (number as u64).to_ne_bytes() && page[16..].as_chunks::<16>().0 == [*SECRET; 255]);
    }
}

/// The slabs in a lender's process: where each page with other bytes than zeroes is.
fn slab_pages(lender: &Lender) -> (File, Vec<u64>) {
    let folder = format!("/proc/{}", lender.server.id());
    let memory = File::options().read(true).write(true).open(format!("{folder}/mem")).unwrap();
    let maps = std::fs::read_to_string(format!("{folder}/maps")).unwrap();
    let mut pages = Vec::new();
    for line in maps.lines().filter(|line| line.contains(" rw-")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).unwrap());
        if end - start < 64 << 20 {
            continue;
        }
        let mut page = [0; PAGE];
        for at in (start..end).step_by(PAGE) {
            if memory.read_exact_at(&mut page, at).is_ok() && page.iter().any(|byte| *byte != 0) {
                pages.push(at);
            }
        }
    }
    (memory, pages)
}

/// How many of some pages have the secret.
fn secrets(file: &File, pages: &[u64]) -> usize {
    let mut page = [0; PAGE];
    let mut has = |at: &&u64| {
        file.read_exact_at(&mut page, **at).is_ok() && page.windows(SECRET.len()).any(|bytes| bytes == SECRET)
    };
    pages.iter().filter(|at| has(at)).count()
}

#[test]
fn a_lender_and_the_file_have_no_byte_of_the_program() {
    let far_pages = PAGES - 2 * RESIDENT / PAGE;
    for encrypt in [false, true] {
        let lender = Lender::start();
        let Some((memory, file)) = filled(&lender, encrypt) else { return };
        let (lent, pages) = slab_pages(&lender);
        assert!(pages.len() >= far_pages, "{}", pages.len());
        let in_file: Vec<u64> = (0..file.metadata().unwrap().len()).step_by(PAGE).collect();
        let found = [secrets(&lent, &pages), secrets(&file, &in_file)];
        if encrypt {
            assert_eq!(found, [0, 0]);
        } else {
            assert!(found.iter().all(|found| *found >= far_pages), "this is what the secret looks like: {found:?}");
        }
        check(&memory);
    }
}

/// `byway_far_open` with `BYWAY_FAR_ENCRYPT`, and without.
#[test]
fn a_lender_has_no_byte_of_a_c_program() {
    let lender = Lender::start();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_programs/sealed.c");
    let Some(program) = compiled_with_byway(&source, &lender.path(".")) else { return };
    let address = format!("tcp://127.0.0.1:{}", lender.server.port("byway"));
    for encrypt in ["0", "1"] {
        let mut command = Command::new(&program);
        command.args([&address, encrypt]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let probe = Command::new(&program).args([&address, encrypt]).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&probe.stderr);
        if said.contains("userfaultfd") {
            return skip("far_sealed", SkipReason::Machine(said.trim()));
        }
        let running = PagedProgram::start_filled(&mut command);
        let (lent, pages) = slab_pages(&lender);
        let found = secrets(&lent, &pages);
        assert!(pages.len() >= PAGES / 2, "{}", pages.len());
        assert!(if encrypt == "1" { found == 0 } else { found >= PAGES / 2 }, "encrypt {encrypt}: {found} pages");
        let output = running.finish();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_bit_that_the_lender_flips_is_noticed_and_the_page_comes_from_the_file() {
    let lender = Lender::start();
    let Some((memory, _file)) = filled(&lender, true) else { return };
    let (lent, pages) = slab_pages(&lender);
    for at in &pages {
        let mut byte = [0];
        lent.read_exact_at(&mut byte, *at + 77).unwrap();
        lent.write_all_at(&[byte[0] ^ 1], *at + 77).unwrap();
    }
    assert!(pages.len() > PAGES / 2);
    check(&memory);
}

#[test]
fn a_program_runs_in_sealed_memory_of_each_class() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let program = "pages = [bytearray(b'%07d.' % i * 512) for i in range(12000)]\n\
                   assert all(page == b'%07d.' % i * 512 for i, page in enumerate(pages))";
    let lenders = [(); 5].map(|()| Lender::start());
    let from = lenders.each_ref().map(|lender| lender.uris()[1].clone()).join(",");
    for class in ["none", "disk", "mirror=2", "parity=4+1"] {
        let output = far(&from, "20M", &["--encrypt", "--class", class], &[python, "-c", program]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains(" 0 lost"), "{class}: {said}");
    }
}
