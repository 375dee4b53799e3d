//! Suites for file systems, on mounts: pjdfstest and fsx (from crates.io), fio's own checks, and several clients on one file under locks.
//!
//! `BYWAY_LONG=1` makes 1,000,000 operations of fsx on each kind of share, and 20 times as many changes under locks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use byway_e2e::{Mount, MountRig, SkipReason, find_tool, lacks_mounts, run, run_well, skip_this};

/// The two ways in which a share can be written to.
const SHARES: [&str; 2] = [",users=trust-root", ",users=trust-root,writers=exclusive"];

fn is_long() -> bool {
    std::env::var_os("BYWAY_LONG").is_some()
}

/// A file of `suites/`.
fn here(name: &str) -> String {
    format!("{}/tests/suites/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A tool, unless it is missing or no mount can be made, which is said aloud.
fn tool(name: &'static str) -> Option<PathBuf> {
    let tool = find_tool(name);
    if tool.is_none() {
        skip_this(SkipReason::MissingTool(name));
    }
    tool.filter(|_| !lacks_mounts())
}

/// What pjdfstest says of each of its cases in a folder.
fn pjdfstest(program: &Path, folder: &Path) -> BTreeMap<String, String> {
    std::fs::create_dir(folder).unwrap();
    let arguments = ["--configuration-file", &here("pjdfstest.toml"), "--path", folder.to_str().unwrap()];
    let output = run(program, &arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    // The case, spaces, the result.
    let cases = said.lines().filter_map(|line| {
        let (case, result) = line.split_once(' ')?;
        let result = result.trim();
        (case.contains("::") && ["ok", "FAILED", "skipped"].contains(&result)).then(|| (case.into(), result.into()))
    });
    let cases: BTreeMap<_, _> = cases.collect();
    assert!(cases.len() >= 398, "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    cases
}

/// docs/files.md has the reasons.
fn is_known_difference(case: &str, result: &str) -> bool {
    let is_device = case.ends_with("::block") || case.ends_with("::char");
    (is_device && result == "FAILED") || (case == "link::link_count_max" && result == "skipped")
}

#[test]
fn pjdfstest_finds_the_differences_that_are_documented() {
    let Some(program) = tool("pjdfstest") else { return };
    for options in SHARES {
        let rig = MountRig::new(options);
        // Its two users pass through.
        for folder in [rig.path("."), rig.below()] {
            run_well(Path::new("/bin/chmod"), &["755", folder.to_str().unwrap()]);
        }
        let _server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &["-o", "allow_other"]);
        let below = pjdfstest(&program, &rig.path("plain"));
        let on_mount = pjdfstest(&program, &mount.path("suite"));
        let differences: Vec<_> = on_mount.iter().filter(|(case, result)| below.get(*case) != Some(result)).collect();
        let unknown: Vec<_> = differences.iter().filter(|(case, result)| !is_known_difference(case, result)).collect();
        assert!(unknown.is_empty() && on_mount.len() == below.len(), "{options}: {unknown:?}");
        println!("{options}: {} differences of {}", differences.len(), below.len());
        mount.unmount();
    }
}

/// Runs fsx on a mount, with two seeds at once. It leaves the mappings of its reads, of which a process has 65,530 at most, and
/// the files of these stay open: a million operations are several runs.
fn fsx(program: &Path, options: &'static str, seeds: u64, operations: &str) {
    const AT_ONCE: u64 = 2;
    let config = here("fsx.toml");
    let rig = MountRig::new(options);
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let artifacts = rig.path(".").display().to_string();
    let one = |seed: u64| {
        let (file, seed) = (mount.path(&format!("file{seed}")), seed.to_string());
        let arguments = ["-f", &config, "-N", operations, "-S", &seed, "-P", &artifacts, file.to_str().unwrap()];
        let since = Instant::now();
        let said = run(program, &arguments);
        let text = String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr);
        assert!(said.status.success() && text.contains("All operations completed"), "{options}, {seed}: {text}");
        println!("{options}, {seed}: {operations} operations in {} s", since.elapsed().as_secs());
        std::fs::remove_file(file).unwrap();
    };
    std::thread::scope(|scope| {
        let one = &one;
        for first in 0..AT_ONCE {
            scope.spawn(move || (first..seeds).step_by(AT_ONCE as usize).for_each(one));
        }
    });
    mount.unmount();
}

#[test]
fn fsx_reads_what_it_wrote() {
    let Some(program) = tool("fsx") else { return };
    let (seeds, operations) = if is_long() { (10, "100000") } else { (4, "500") };
    std::thread::scope(|scope| {
        let program = &program;
        for options in SHARES {
            scope.spawn(move || fsx(program, options, seeds, operations));
        }
    });
}

#[test]
fn fio_finds_its_own_bytes_on_another_mount() {
    let Some(program) = tool("fio") else { return };
    let size = format!("--size={}", if is_long() { "512m" } else { "16m" });
    for options in SHARES {
        let rig = MountRig::new(options);
        let server = rig.serve();
        let one = rig.mount("one", &rig.unix(), &[]);
        let two = rig.mount("two", &rig.tcp(&server), &[]);
        for (engine, direct) in [("psync", 0), ("libaio", 1), ("io_uring", 0), ("mmap", 0)] {
            let job = [
                "--name=verify".to_owned(),
                format!("--ioengine={engine}"),
                format!("--direct={direct}"),
                size.clone(),
                "--rw=randwrite".to_owned(),
                "--bs=20k".to_owned(),
                "--iodepth=8".to_owned(),
                "--end_fsync=1".to_owned(),
                "--verify=crc32c".to_owned(),
                "--verify_fatal=1".to_owned(),
                "--verify_state_save=0".to_owned(),
            ];
            let job: Vec<_> = job.iter().map(String::as_str).collect();
            let name = format!("{engine}{direct}");
            let written = format!("--filename={}", one.path(&name).display());
            run_well(&program, &[&job[..], &[written.as_str()]].concat());
            let read = format!("--filename={}", two.path(&name).display());
            run_well(&program, &[&job[..], &[read.as_str(), "--verify_only=1"]].concat());
        }
        one.unmount();
        two.unmount();
    }
}

#[test]
fn four_programs_on_two_mounts_change_one_file_under_locks() {
    const CELLS: usize = 24;
    const LEN: usize = 5000;
    let Some(python) = tool("python3") else { return };
    let (script, rounds) = (here("cells.py"), if is_long() { "4000" } else { "200" });
    for options in SHARES {
        let rig = MountRig::new(options);
        let empty = |cell: usize| [[0; 8], (cell as u64).to_le_bytes()].concat().repeat(LEN / 16 + 1)[..LEN].to_vec();
        std::fs::write(rig.below().join("cells"), (0..CELLS).flat_map(empty).collect::<Vec<_>>()).unwrap();
        let server = rig.serve();
        let one = rig.mount("one", &rig.unix(), &[]);
        let two = rig.mount("two", &rig.tcp(&server), &[]);
        let work = |mount: &Mount, seed: usize| {
            let (path, seed) = (mount.path("cells").display().to_string(), seed.to_string());
            let said = run_well(&python, &[&script, &path, &CELLS.to_string(), &seed, rounds]);
            said.trim().parse::<u64>().unwrap()
        };
        let made: u64 = std::thread::scope(|scope| {
            let work = &work;
            let workers: Vec<_> = [&one, &two, &one, &two]
                .into_iter()
                .enumerate()
                .map(|(seed, mount)| scope.spawn(move || work(mount, seed)))
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        let cells = std::fs::read(rig.below().join("cells")).unwrap();
        let changes = |cell: &[u8]| u64::from_le_bytes(cell[..8].try_into().unwrap());
        assert_eq!(cells.chunks(LEN).map(changes).sum::<u64>(), made, "{options}: a change is lost");
        one.unmount();
        two.unmount();
    }
}
