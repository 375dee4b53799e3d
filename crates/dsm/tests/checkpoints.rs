//! Jobs that end in the middle, and resume from their checkpoints.

mod harness;

use std::fs::File;
use std::path::Path;

use byway_dsm::launch::{CheckpointFolder, JobEnd, Launch, LaunchError};
use byway_dsm::{CheckpointError, Consistency, Wire};
use rustix::process::{Pid, Signal, kill_process};

use harness::{WIRES, can_run, example, launch, run};

const EVERY: u64 = 3;
/// No job reaches it.
const NEVER: u64 = 100_000_000;

/// A job of the grid relaxation with checkpoints.
fn grid(folder: &Path, ranks: usize, (wire, consistency): (Wire, Consistency), steps: u64, resume: bool) -> Launch {
    let checkpoint = Some(CheckpointFolder { folder: folder.to_owned(), resume });
    let job = launch(ranks, wire, "sor", &["100", &steps.to_string(), &EVERY.to_string()]);
    Launch { checkpoint, consistency, ..job }
}

/// The generation of a folder's checkpoint, from its manifest.
fn generation(folder: &Path) -> u64 {
    let manifest = std::fs::read(folder.join("manifest")).unwrap_or_default();
    manifest.get(16..24).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
}

/// Runs a job until it has written another checkpoint, and kills a process of it then.
fn kill_behind_a_checkpoint(job: &Launch, folder: &Path, victim: usize) {
    let before = generation(folder);
    let running = job.start().unwrap();
    let pid = Pid::from_raw(running.pids()[victim] as i32).unwrap();
    let watched = folder.to_owned();
    let killer = std::thread::spawn(move || {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while generation(&watched) < before + 2 && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        kill_process(pid, Signal::KILL).unwrap();
    });
    let mut lines = Vec::new();
    let end = running.wait(|rank, _, line| lines.push((rank, String::from_utf8_lossy(line).into_owned())));
    killer.join().unwrap();
    assert!(matches!(end, JobEnd::Failed { rank, .. } if rank == victim), "{end:?}: {lines:?}");
    assert!(generation(folder) >= before + 2, "no checkpoint: {lines:?}");
}

/// Of the files of checkpoints.
fn names(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "lock").collect();
    names.sort();
    names
}

/// A job is killed twice, each time somewhere behind a checkpoint, and its result is that of an undisturbed one.
#[test]
fn a_grid_is_relaxed_right_though_its_job_is_killed() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for consistency in [Consistency::Sequential, Consistency::Release] {
            let (folder, way) = (tempfile::tempdir().unwrap(), (wire, consistency));
            kill_behind_a_checkpoint(&grid(folder.path(), 3, way, NEVER, false), folder.path(), 1);
            kill_behind_a_checkpoint(&grid(folder.path(), 3, way, NEVER, true), folder.path(), 0);
            let done = generation(folder.path()) * EVERY;
            let (end, lines) = run(&grid(folder.path(), 3, way, done + 4, true));
            assert_eq!(end, JobEnd::Well, "{way:?}: {lines:?}");
            let said = |text: &str| lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(text));
            assert!(said(&format!("resumes behind step {done}")), "{way:?}: {lines:?}");
            let right = format!("grid of 100 x 100 right after {} steps on 3 processes", done + 4);
            assert!(said(&right), "{way:?}: {lines:?}");
            let last = done / EVERY + 1;
            let all = ["manifest".to_owned()].into_iter().chain((0..3).map(|rank| format!("pages-{last}-{rank}")));
            assert_eq!(names(folder.path()), all.collect::<Vec<_>>());
        }
    }
}

/// Process 1 may write 4 KiB at most, as on a disk that is full. The job goes on, and leaves nothing half written.
#[test]
fn a_checkpoint_that_cannot_be_written_is_named_and_the_job_goes_on() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "[ $BYWAY_DSM_RANK = 1 ] && trap '' XFSZ && ulimit -f 8; exec {} 100 7 {EVERY}",
        example("sor").display()
    );
    let checkpoint = Some(CheckpointFolder { folder: folder.path().to_owned(), resume: false });
    let arguments = vec!["-c".into(), script.into()];
    let (end, lines) = run(&Launch { checkpoint, arguments, ..Launch::new(2, "sh") });
    assert_eq!(end, JobEnd::Well, "{lines:?}");
    let named = lines.iter().filter(|(_, line)| line.contains("rank 1 could not write the checkpoint: File too large"));
    // Both processes, at both checkpoints.
    assert_eq!(named.count(), 4, "{lines:?}");
    assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
}

#[test]
fn what_is_no_checkpoint_of_the_job_is_refused() {
    if !can_run() {
        return;
    }
    let (folder, way) = (tempfile::tempdir().unwrap(), (Wire::Shm, Consistency::Sequential));
    let refused = |job: Launch| match job.start() {
        Err(LaunchError::Checkpoint(error)) => error,
        other => panic!("{other:?}"),
    };
    let job = |ranks, resume| grid(folder.path(), ranks, way, 4, resume);
    assert!(matches!(refused(job(2, true)), CheckpointError::Missing { .. }));
    assert_eq!(run(&job(2, false)).0, JobEnd::Well);
    assert!(matches!(refused(job(2, false)), CheckpointError::Exists { generation: 1, .. }));
    // As the launcher of a job that still runs.
    let lock = File::open(folder.path().join("lock")).unwrap();
    lock.try_lock().unwrap();
    assert!(matches!(refused(job(2, true)), CheckpointError::InUse { .. }));
    drop(lock);
    assert!(matches!(refused(job(3, true)), CheckpointError::OtherJob { ranks: 2, .. }));
    let consistency = Consistency::Release;
    assert!(matches!(refused(Launch { consistency, ..job(2, true) }), CheckpointError::OtherJob { .. }));
    // A bit of a page has changed, and then one of the manifest.
    for (name, at) in [("pages-1-1", 1000), ("manifest", 20)] {
        let path = folder.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        if name == "manifest" {
            assert!(matches!(refused(job(2, true)), CheckpointError::Damaged { .. }));
            continue;
        }
        let (end, lines) = run(&job(2, true));
        assert!(matches!(end, JobEnd::Failed { rank: 1, .. }), "{end:?}: {lines:?}");
        let said = lines.iter().any(|(rank, line)| *rank == 1 && line.contains("its checksum is not the manifest's"));
        assert!(said, "{lines:?}");
    }
}
