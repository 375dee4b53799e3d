//! Linux's memory operations in a program whose memory is far: each case of `far_linux/torture.c` checks each page that it
//! wrote. Where an operation cannot work, the program receives an error.

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
