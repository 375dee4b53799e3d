//! Allocators and kinds of programs: each prints the same with half of its memory as without a limit; with `BYWAY_LONG=1` also with a
//! quarter and with three quarters.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use byway_e2e::far::comparison::compare;
use byway_e2e::far::{Lender, can_page, compiled, far, python};
use byway_e2e::{find_tool, noise};
use byway_skip::{SkipReason, skip_this};

/// Of the C library and the program.
const CODE: u64 = 3 << 20;

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_programs").join(name)
}

/// Compares a C program of ours with an allocator that the dynamic linker finds by its name, or with glibc's; gives what it prints.
fn compare_c(name: &str, allocator: Option<&'static str>) -> Option<String> {
    if !can_page() {
        return None;
    }
    let variables: Vec<_> = allocator.map(|library| ("LD_PRELOAD", library)).into_iter().collect();
    let tried = Command::new("true").envs(variables.iter().copied()).output().unwrap();
    if let Some(library) = allocator.filter(|_| !tried.stderr.is_empty()) {
        skip_this(SkipReason::MissingTool(library));
        return None;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let program = compiled(&source(name), folder.path())?.display().to_string();
    Some(compare(&variables, &[&program], CODE))
}

#[test]
fn threads_allocate_with_glibc() {
    let Some(said) = compare_c("allocations.c", None) else { return };
    assert!(said.contains("libc.so.6 "), "{said}");
}

#[test]
fn threads_allocate_with_jemalloc() {
    let Some(said) = compare_c("allocations.c", Some("libjemalloc.so.2")) else { return };
    assert!(said.contains("libjemalloc.so.2 "), "{said}");
}

#[test]
fn threads_allocate_with_mimalloc() {
    let Some(said) = compare_c("allocations.c", Some("libmimalloc.so.2.0")) else { return };
    assert!(said.contains("libmimalloc.so.2.0 "), "{said}");
}

#[test]
fn a_graph_has_the_same_depths_and_ranks() {
    let Some(said) = compare_c("graph.c", None) else { return };
    assert!(said.starts_with("1 at depth 0\n") && said.contains("\nranks: "), "{said}");
}

#[test]
fn a_rust_program_has_the_same_sums() {
    if find_tool("rustc").is_none() {
        return skip_this(SkipReason::MissingTool("rustc"));
    }
    if !can_page() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let program = folder.path().join("table");
    let mut compiler = Command::new("rustc");
    let made = compiler.args(["-O", "--edition", "2024", "-o"]).arg(&program).arg(source("table.rs")).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    compare(&[], &[&program.display().to_string()], CODE);
}

/// 24 MiB of whole numbers, which are sorted, and sums and products of them that are exact.
const ARRAYS: &str = "
import numpy
choice = numpy.random.default_rng(7)
numbers = choice.integers(0, 1 << 40, 3_000_000)
numbers.sort()
assert (numbers[1:] >= numbers[:-1]).all()
print(int(numbers.sum()), int((numbers[::7] ^ numbers[::7][::-1]).sum()))
matrix = choice.integers(0, 1000, (500, 500)).astype(float)
print(int((matrix @ matrix.T).sum()), numpy.bincount(numbers % 97).tolist())
";

#[test]
fn numpy_has_the_same_numbers() {
    let Some(python) = python() else { return };
    let imported = Command::new(python).args(["-c", "import numpy"]).stderr(Stdio::null()).status().unwrap();
    if !imported.success() {
        return skip_this(SkipReason::MissingTool("numpy"));
    }
    if !can_page() {
        return;
    }
    compare(&[("OPENBLAS_NUM_THREADS", "1")], &[python, "-c", ARRAYS], 24 << 20);
}

/// The MD5 of each file, as rclone computes it of what it keeps in memory. It compares that with the file's.
fn verified(log: &[u8]) -> BTreeSet<String> {
    let log = String::from_utf8_lossy(log);
    let sums = log.lines().filter_map(|line| line.split("md5 = ").nth(1)?.strip_suffix(" OK").map(str::to_owned));
    sums.collect()
}

/// rclone, as Debian has it, is linked dynamically.
#[test]
fn a_go_program_keeps_files_in_far_memory() {
    if find_tool("rclone").is_none() {
        return skip_this(SkipReason::MissingTool("rclone"));
    }
    if !can_page() {
        return;
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    for number in 0..16 {
        std::fs::write(folder.path().join(number.to_string()), noise(3 << 20, 2 * number + 1)).unwrap();
    }
    let files = folder.path().display().to_string();
    let program = ["rclone", "--config", "/dev/null", "-vv", "copy", &files, ":memory:bucket"];
    let plain = Command::new(program[0]).args(&program[1..]).output().unwrap();
    let expected = verified(&plain.stderr);
    assert!(plain.status.success() && expected.len() == 16, "{}", String::from_utf8_lossy(&plain.stderr));
    // It has more than 150 MiB, of which 20 are of its file.
    let output = far(&lender.uris()[0], "85M", &["--class", "none"], &program);
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("a static program loads no libraries") {
        return skip_this(SkipReason::Machine("this rclone is linked statically"));
    }
    assert!(output.status.success() && verified(&output.stderr) == expected, "{} {said}", output.status);
    assert!(!said.contains(" 0 put,"), "nothing was far: {said}");
}

#[test]
fn stressapptest_finds_no_wrong_word_in_half_of_its_memory() {
    if find_tool("stressapptest").is_none() {
        return skip_this(SkipReason::MissingTool("stressapptest"));
    }
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let program = ["stressapptest", "-M", "48", "-s", "5", "-m", "2", "-i", "1"];
    let output = far(&lender.uris()[0], "28M", &["--class", "none"], &program);
    let [out, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && out.contains("Status: PASS"), "{} {out} {said}", output.status);
    assert!(!said.contains(" 0 put,") && !said.contains(" 0 fetched;"), "nothing was far: {said}");
}

/// Its forked children do the work, and their memory stays local: see docs/far-memory.md.
#[test]
fn stress_ng_verifies_the_memory_of_its_children() {
    if find_tool("stress-ng").is_none() {
        return skip_this(SkipReason::MissingTool("stress-ng"));
    }
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let work = ["--vm", "2", "--vm-bytes", "64M", "--vm-keep", "--vm-method", "all", "--timeout", "4", "--verify"];
    let program = [&["stress-ng"], &work[..], &["--metrics"]].concat();
    let output = far(&lender.uris()[0], "32M", &["--class", "none"], &program);
    let said = String::from_utf8_lossy(&output.stderr);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{} {out} {said}", output.status);
    assert!([&out, &said].iter().any(|text| text.contains("successful run completed")), "{out} {said}");
}
