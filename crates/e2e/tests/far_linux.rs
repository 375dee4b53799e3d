//! Linux's memory operations in a program whose memory is far: each case of `far_linux/torture.c` checks each page that it
//! wrote. Where an operation cannot work, the program receives an error.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use byway_e2e::far::{Lender, can_page, compiled, far};
use byway_skip::{SkipReason, skip_this};

fn case(name: &str) {
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_linux/torture.c");
    let Some(program) = compiled(&source, folder.path()) else { return };
    let path = |path: &Path| path.display().to_string();
    let (program, folder) = (path(&program), path(folder.path()));
    for (uri, class) in lender.uris().iter().zip(["none", "disk"]) {
        let output = far(uri, "16M", &["--class", class], &[&program, name, &folder]);
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        if output.status.code() == Some(77) {
            return skip_this(SkipReason::Machine(stderr.trim()));
        }
        assert!(
            output.status.success() && stdout == "good\n",
            "{name} over {uri}: {}\n{stdout}{stderr}",
            output.status
        );
        assert!(!stderr.contains(" 0 put,"), "nothing was far: {stderr}");
    }
}

#[test]
fn forked_children_and_theirs_have_the_version_of_their_fork() {
    case("forks");
}

#[test]
fn what_is_wiped_or_left_out_on_fork_is_so_when_it_is_far() {
    case("wiped");
}

#[test]
fn a_child_in_another_pid_namespace_has_its_own_advice() {
    case("namespaces");
}

#[test]
fn programs_are_executed_with_arguments_that_are_far() {
    case("spawns");
}

#[test]
fn mappings_that_grow_shrink_and_move_keep_their_pages() {
    case("remaps");
}

#[test]
fn advice_drops_what_it_drops_and_nothing_else() {
    case("advises");
}

#[test]
fn pages_that_are_freed_and_used_again_count_toward_the_limit() {
    case("frees");
}

#[test]
fn rights_come_and_go_and_pages_stay() {
    case("protects");
}

#[test]
fn locked_pages_are_here() {
    case("locks");
}

#[test]
fn signal_handlers_and_their_stacks_are_paged() {
    case("handles");
}

#[test]
fn other_processes_read_and_write_what_is_far() {
    case("others");
}

#[test]
fn a_tracer_is_refused_what_is_far_and_changes_nothing_there() {
    case("traced");
}

/// Of `far_linux/torture.c`.
const PAGE: u64 = 4096;

/// Where a core file has the memory from an address on: of the segment (ELF64 program header) with that address.
fn place_in_core(core: &File, address: u64) -> Option<u64> {
    const PT_LOAD: u32 = 1;
    let mut header = [0; 64];
    core.read_exact_at(&mut header, 0).unwrap();
    let number = |bytes: &[u8], at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let (offset, count) = (number(&header, 32), u16::from_le_bytes([header[56], header[57]]));
    (0..u64::from(count)).find_map(|index| {
        let mut segment = [0; 56];
        core.read_exact_at(&mut segment, offset + index * 56).unwrap();
        let kind = u32::from_le_bytes(*segment.first_chunk().unwrap());
        let [place, start, bytes] = [8, 16, 32].map(|at| number(&segment, at));
        (kind == PT_LOAD && (start..start + bytes).contains(&address)).then(|| place + (address - start))
    })
}

#[test]
fn a_core_file_has_the_pages_that_are_here_and_zeroes_for_the_others() {
    if !can_page() {
        return;
    }
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.trim().contains(['|', '/']) {
        return skip_this(SkipReason::Machine("core files do not go to the program's folder (core_pattern)"));
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_linux/torture.c");
    let Some(program) = compiled(&source, folder.path()) else { return };
    let cores = folder.path().join("cores");
    std::fs::create_dir(&cores).unwrap();
    let program = [program.to_str().unwrap(), "dumps", cores.to_str().unwrap()];
    let output = far(&lender.uris()[0], "16M", &["--class", "none"], &program);
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert_eq!(output.status.code(), Some(128 + 6), "{stdout}{stderr}");
    let (address, pages) = stdout.trim().split_once(' ').expect("an address, and how many pages");
    let (address, pages) = (u64::from_str_radix(address, 16).unwrap(), pages.parse::<u64>().unwrap());
    let core = std::fs::read_dir(&cores).unwrap().next().expect("a core file").unwrap().path();
    let core = File::open(core).unwrap();
    let (mut here, mut left_out) = (0, 0);
    for page in 0..pages {
        let mut bytes = [0; PAGE as usize];
        let place = place_in_core(&core, address + page * PAGE).expect("the core file has the mapping");
        core.read_exact_at(&mut bytes, place).unwrap();
        let value = (1 << 40 | page).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        if bytes == [0; PAGE as usize] {
            left_out += 1;
        } else {
            assert_eq!(bytes[..8], value.to_le_bytes(), "page {page} has bytes of another one");
            here += 1;
        }
    }
    assert!(here > 0 && left_out > 0, "{here} pages in the core file, {left_out} left out; {stderr}");
}

#[test]
fn direct_reads_and_writes_of_files_find_their_pages() {
    case("directs");
}

#[test]
fn rings_read_into_far_memory_and_into_registered_buffers() {
    case("rings");
}

#[test]
fn pages_that_came_back_to_be_read_are_written_in_each_way() {
    case("rewrites");
}

#[test]
fn threads_come_and_go_on_stacks_of_each_kind() {
    case("threads");
}

#[test]
fn a_program_that_closes_and_reuses_all_descriptors_keeps_its_pages_and_its_files() {
    case("descriptors");
}

#[test]
fn a_tebibyte_is_mapped_and_costs_what_is_touched() {
    case("tebibyte");
}
