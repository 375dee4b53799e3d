//! Jobs of real processes, started as `byway dsm run` starts them.

mod harness;

use std::collections::HashMap;

use byway_dsm::launch::{JobEnd, JobReport, Launch, Stream};
use byway_dsm::{Consistency, Waits, Wire};

use harness::{WIRES, can_run, example, launch, run};

#[test]
fn matrices_are_multiplied_right() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for ranks in [1, 2, 4, 8] {
            let (end, lines) = run(&launch(ranks, wire, "matrix", &["96"]));
            assert_eq!(end, JobEnd::Well, "{wire:?}, {ranks} processes: {lines:?}");
            let right = format!("product of 96 x 96 right on {ranks} processes");
            assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(&right)), "{lines:?}");
        }
    }
}

#[test]
fn a_grid_is_relaxed_right() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for ranks in [2, 4, 8] {
            let (end, lines) = run(&launch(ranks, wire, "sor", &["100", "8"]));
            assert_eq!(end, JobEnd::Well, "{wire:?}, {ranks} processes: {lines:?}");
            let right = format!("grid of 100 x 100 right after 8 steps on {ranks} processes");
            assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(&right)), "{lines:?}");
        }
    }
}

/// Programs without data races, whose processes write to words of one page, under barriers and under a lock.
#[test]
fn programs_without_races_are_right_with_release_consistency() {
    if !can_run() {
        return;
    }
    let programs = [
        ("sharing", vec!["50"], "50 rounds right"),
        ("sor", vec!["100", "8"], "grid of 100 x 100 right"),
        ("matrix", vec!["96"], "product of 96 x 96 right"),
    ];
    for wire in WIRES {
        for ranks in [1, 2, 4, 8] {
            for (name, arguments, right) in &programs {
                let job = Launch { consistency: Consistency::Release, ..launch(ranks, wire, name, arguments) };
                let (end, lines) = run(&job);
                assert_eq!(end, JobEnd::Well, "{name}, {wire:?}, {ranks} processes: {lines:?}");
                assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(right)), "{lines:?}");
            }
        }
    }
}

/// What a page costs that two processes write by turns. With `sc` it goes to the one that stores. With `rc` each turn costs its writer a
/// fault, and rank 1 also a fetch from rank 0, the page's home.
#[test]
fn the_counters_tell_what_a_page_with_several_writers_costs() {
    if !can_run() {
        return;
    }
    let counted = [
        (Consistency::Sequential, ["10 write faults, 0 read faults, 10 pages received, 10 sent"; 2]),
        (
            Consistency::Release,
            [
                "10 write faults, 0 read faults, 0 pages received, 10 sent",
                "10 write faults, 0 read faults, 10 pages received, 0 sent",
            ],
        ),
    ];
    for (wire, (consistency, expected)) in WIRES.into_iter().flat_map(|wire| counted.map(|case| (wire, case))) {
        let (end, mut lines) = run(&Launch { consistency, ..launch(2, wire, "trouble", &["writers"]) });
        lines.sort();
        let lines: Vec<_> = lines.iter().map(|(_, line)| line.as_str()).collect();
        assert_eq!((end, lines), (JobEnd::Well, expected.to_vec()), "{consistency:?}, {wire:?}");
    }
}

#[test]
fn all_threads_of_all_processes_share_memory_and_locks() {
    if !can_run() {
        return;
    }
    for (wire, consistency) in
        WIRES.into_iter().zip([Consistency::Sequential, Consistency::Release, Consistency::Release])
    {
        let (end, lines) = run(&Launch { consistency, ..launch(3, wire, "trouble", &["threads"]) });
        assert_eq!(end, JobEnd::Well, "{consistency:?}, {wire:?}: {lines:?}");
    }
}

#[test]
fn more_pages_are_shared_than_one_message_has_notices_of() {
    if !can_run() {
        return;
    }
    let job = Launch { consistency: Consistency::Release, ..launch(2, Wire::Shm, "sharing", &["2", "1500"]) };
    let (end, lines) = run(&job);
    assert_eq!(end, JobEnd::Well, "{lines:?}");
}

/// Runs of pages that cross owners and segments, with other pages of them on their way, and while another process stores to them.
#[test]
fn fetches_bring_what_was_stored() {
    if !can_run() {
        return;
    }
    use Consistency::{Release, Sequential};
    for (wire, (consistency, program)) in WIRES.into_iter().flat_map(|wire| {
        let programs = [(Sequential, "striped"), (Release, "striped"), (Sequential, "ordered"), (Sequential, "locked")];
        programs.into_iter().chain([(Release, "locked")]).map(move |case| (wire, case))
    }) {
        for ranks in [2, 4] {
            let job = Launch { consistency, ..launch(ranks, wire, "fetches", &[program, "8"]) };
            let (end, lines) = run(&job);
            assert_eq!(end, JobEnd::Well, "{program}, {consistency:?}, {wire:?}, {ranks} processes: {lines:?}");
        }
    }
}

#[test]
fn a_device_and_locks_work_with_release_consistency() {
    if !can_run() {
        return;
    }
    for program in ["pin", "stranger"] {
        let job = Launch { consistency: Consistency::Release, ..launch(2, Wire::Shm, "trouble", &[program]) };
        let (end, lines) = run(&job);
        assert_eq!(end, JobEnd::Well, "{program}: {lines:?}");
    }
}

#[test]
fn faults_locks_and_barriers_are_timed() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for consistency in [Consistency::Sequential, Consistency::Release] {
            let (end, lines) = run(&Launch { consistency, ..launch(2, wire, "latency", &["50"]) });
            assert_eq!((end, lines.len()), (JobEnd::Well, 10), "{consistency:?}, {wire:?}: {lines:?}");
        }
    }
}

/// The threads of all processes but one compute: their pagers answer, or they do at safe points.
#[test]
fn loads_from_processes_that_compute_are_timed() {
    if !can_run() {
        return;
    }
    for (waits, way) in [(Waits::Sleep, "computes"), (Waits::Poll, "computes"), (Waits::Points, "polls")] {
        let (end, lines) = run(&Launch { waits, ..launch(2, Wire::Tcp, "latency", &["20", way]) });
        assert_eq!((end, lines.len()), (JobEnd::Well, 2), "{waits:?}: {lines:?}");
    }
}

#[test]
fn the_parts_of_a_fault_are_timed() {
    if !can_run() {
        return;
    }
    for wire in ["tcp", "shm"] {
        let done = std::process::Command::new(example("parts")).args([wire, "50"]).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.lines().count() == 5, "{wire}: {said}, {done:?}");
    }
}

#[test]
fn a_grid_is_relaxed_right_however_pagers_wait() {
    if !can_run() {
        return;
    }
    for waits in [Waits::Sleep, Waits::Poll, Waits::Spin, Waits::Points] {
        for consistency in [Consistency::Sequential, Consistency::Release] {
            let job = Launch { waits, consistency, ..launch(2, Wire::Shm, "sor", &["64", "4"]) };
            let (end, lines) = run(&job);
            assert_eq!(end, JobEnd::Well, "{waits:?}, {consistency:?}: {lines:?}");
        }
    }
}

/// Two processes store to each other's words on two pages; what they print themselves stays.
#[test]
fn a_report_names_the_pages_to_which_several_processes_store() {
    if !can_run() {
        return;
    }
    for consistency in [Consistency::Sequential, Consistency::Release] {
        let job = Launch { consistency, reports: true, ..launch(2, Wire::Tcp, "sharing", &["20", "2"]) };
        let (mut report, mut printed) = (JobReport::new(2), Vec::new());
        let end = job.start().unwrap().wait(|rank, stream, line| {
            let left = if stream == Stream::Error { report.take(rank, line) } else { Some(line) };
            printed.extend(left.map(|left| String::from_utf8_lossy(left).into_owned()));
        });
        assert_eq!(end, JobEnd::Well, "{printed:?}");
        assert!(matches!(&printed[..], [line] if line.starts_with("20 rounds right")), "{printed:?}");
        let text = report.to_string();
        for part in
            ["to which several processes stored: 2\n", "  0,1        words+0x0\n", "  0,1        words+0x1000\n"]
        {
            assert!(text.contains(part), "{consistency:?}: {text}");
        }
        for part in ["   0 -> 1 ", "   1 -> 0 "] {
            let line = text.lines().find(|line| line.starts_with(part)).unwrap();
            let numbers: Vec<u64> =
                line[part.len()..].split_whitespace().map(|number| number.parse().unwrap()).collect();
            // Each round brings both the other's stores to each page: whole pages with `sc`, what has changed with `rc`.
            assert!(numbers[0] >= 20 && numbers[1] >= 20 * 8, "{consistency:?}: {text}");
        }
        assert!(!text.contains("told nothing"), "{text}");
    }
}

/// A run of litmus programs on real processes.
struct LitmusRun {
    consistency: Consistency,
    wire: Wire,
    ranks: usize,
    /// Rounds of each program, and with `BYWAY_LONG`.
    rounds: [u64; 2],
    /// One program alone.
    only: Option<&'static str>,
}

/// Most rounds are between two processes over shared memory, where they take least time: a million of each program with `BYWAY_LONG`. IRIW has four
/// sides. With release consistency a process fences before each access.
const LITMUS_RUNS: [LitmusRun; 6] = {
    use Consistency::{Release, Sequential};
    [
        LitmusRun { consistency: Sequential, wire: Wire::Shm, ranks: 2, rounds: [2000, 1_000_000], only: None },
        LitmusRun { consistency: Sequential, wire: Wire::Tcp, ranks: 2, rounds: [250, 10_000], only: None },
        LitmusRun { consistency: Sequential, wire: Wire::Shm, ranks: 4, rounds: [250, 10_000], only: None },
        LitmusRun { consistency: Sequential, wire: Wire::Shm, ranks: 4, rounds: [1000, 250_000], only: Some("IRIW") },
        LitmusRun { consistency: Release, wire: Wire::Shm, ranks: 2, rounds: [250, 100_000], only: None },
        LitmusRun { consistency: Release, wire: Wire::Shm, ranks: 4, rounds: [250, 20_000], only: Some("IRIW") },
    ]
};

#[test]
fn litmus_programs_show_no_forbidden_outcome() {
    if !can_run() {
        return;
    }
    let is_long = std::env::var_os("BYWAY_LONG").is_some();
    let mut most = HashMap::new();
    for LitmusRun { consistency, wire, ranks, rounds, only } in LITMUS_RUNS {
        let rounds = rounds[usize::from(is_long)].to_string();
        let fences = (consistency == Consistency::Release).then_some("fenced");
        let arguments: Vec<&str> = [Some(rounds.as_str()), fences, only].into_iter().flatten().collect();
        let began = std::time::Instant::now();
        let (end, lines) = run(&Launch { consistency, ..launch(ranks, wire, "litmus", &arguments) });
        println!("{consistency:?}, {wire:?}, {ranks} processes, {arguments:?}: {:?}", began.elapsed());
        assert_eq!(end, JobEnd::Well, "{consistency:?}, {wire:?}: {lines:?}");
        let two = ["MP", "SB", "SB with fences", "LB", "R with fences", "S", "2+2W", "CoRR"];
        let named = if only.is_some() { &[][..] } else { &two };
        for name in named.iter().copied().chain((ranks == 4).then_some("IRIW")).chain(["lock"]) {
            let line = lines.iter().find_map(|(_, line)| line.strip_prefix(&format!("{name}: ")));
            let (outcomes, forbidden) = line.and_then(|line| line.split_once(" outcomes, ")).unwrap();
            assert_eq!(forbidden, "none forbidden", "{consistency:?}, {wire:?}, {name}");
            let most: &mut usize = most.entry((name, consistency == Consistency::Release)).or_default();
            *most = outcomes.parse::<usize>().unwrap().max(*most);
        }
    }
    // A program whose rounds all ended alike would show nothing. On a busy machine that may happen in one run, and in few rounds with fences.
    let alike: Vec<_> =
        most.iter().filter(|((name, fenced), most)| *name != "lock" && **most < 2 && (is_long || !fenced)).collect();
    assert!(alike.is_empty(), "{alike:?}");
}

#[test]
fn a_program_without_a_job_says_how_to_start_it() {
    let alone = std::process::Command::new(example("sor")).env_remove("BYWAY_DSM_RANK").output().unwrap();
    assert!(!alone.status.success());
    let said = String::from_utf8_lossy(&alone.stderr);
    assert!(said.contains("byway dsm run"), "{said}");
}
