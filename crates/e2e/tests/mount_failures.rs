//! Failures as a mount's programs see them: servers that are killed, a full disk, a folder that is removed.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Mount, MountRig, SmallDisk, lacks_mounts, until};
use rustix::io::Errno;

fn is_errno(error: &std::io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Takes the result of a change: true if it was done, false if nobody knows.
fn known(result: std::io::Result<()>, what: &str) -> bool {
    match result {
        Ok(()) => true,
        Err(error) if is_errno(&error, Errno::IO) => false,
        // EEXIST or ENOENT, for example: it was done before.
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Numbers of records: those that were written, and those of which nobody knows.
#[derive(Default)]
struct Records {
    written: BTreeSet<u32>,
    unknown: BTreeSet<u32>,
    /// Those that were there when a sync succeeded.
    synced: BTreeSet<u32>,
}

/// Appends numbered records until the end, and makes them durable now and then.
fn append(log: &Path, stop: &AtomicBool, done: &AtomicU32) -> Records {
    let mut records = Records::default();
    let mut file = File::options().create(true).append(true).open(log).unwrap();
    for number in 0u32.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let is_written = known(file.write_all(&number.to_le_bytes()), "an append");
        if is_written { &mut records.written } else { &mut records.unknown }.insert(number);
        if number % 16 == 15 && known(file.sync_data(), "a sync") {
            records.synced.clone_from(&records.written);
        }
        done.fetch_add(1, Ordering::Release);
    }
    records
}

/// Makes, renames and removes directories, and makes and removes files: each name once.
fn rename(folder: &Path, stop: &AtomicBool, done: &AtomicU32) -> (BTreeSet<PathBuf>, BTreeSet<PathBuf>) {
    let (mut there, mut unknown) = (BTreeSet::new(), BTreeSet::new());
    for number in 0u32.. {
        if stop.load(Ordering::Acquire) {
            break;
        }
        let [made, moved, file] = ["made", "moved", "file"].map(|name| folder.join(format!("{name}{number}")));
        let steps: [&dyn Fn() -> std::io::Result<()>; 5] = [
            &|| std::fs::create_dir(&made),
            &|| std::fs::rename(&made, &moved),
            &|| if number % 2 == 0 { std::fs::remove_dir(&moved) } else { Ok(()) },
            &|| File::create_new(&file).map(drop),
            &|| std::fs::remove_file(&file),
        ];
        if steps.iter().all(|step| known(step(), "a change of names")) {
            there.extend((number % 2 == 1).then_some(moved));
        } else {
            unknown.extend([made, moved, file]);
        }
        done.fetch_add(1, Ordering::Release);
    }
    (there, unknown)
}

/// Ends the programs of a mount, also if the test fails beside them.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What the programs of a mount did.
struct Work {
    records: Records,
    /// Names that there are, and that there may be.
    there: BTreeSet<PathBuf>,
    unknown: BTreeSet<PathBuf>,
}

/// Appends to `log` and changes names in `names`, and restarts the server so many times meanwhile.
fn work_beside_restarts(mount: &Mount, restarts: u32, mut restart: impl FnMut(u32)) -> Work {
    std::fs::create_dir(mount.path("names")).unwrap();
    let (stop, done) = (AtomicBool::new(false), [0; 2].map(AtomicU32::new));
    let (records, (there, unknown)) = std::thread::scope(|scope| {
        let appender = scope.spawn(|| append(&mount.path("log"), &stop, &done[0]));
        let renamer = scope.spawn(|| rename(&mount.path("names"), &stop, &done[1]));
        let stopping = Stop(&stop);
        for round in 0..restarts {
            // Both have gone on with the server before it ends, somewhere in what they do then.
            let before = done.each_ref().map(|done| done.load(Ordering::Acquire));
            let went_on = || {
                let is_over = appender.is_finished() || renamer.is_finished();
                let all = done.iter().zip(before).all(|(done, before)| done.load(Ordering::Acquire) > before + 3);
                (all || is_over).then_some(())
            };
            until(Instant::now() + LIMIT, "work under the server", went_on);
            std::thread::park_timeout(Duration::from_micros(u64::from(round) * 7919 % 20_000));
            restart(round);
        }
        drop(stopping);
        (appender.join().unwrap(), renamer.join().unwrap())
    });
    Work { records, there, unknown }
}

/// The numbers of the records that there are, in their order.
fn numbers_in(log: &Path) -> Vec<u32> {
    let log = std::fs::read(log).unwrap();
    let (chunks, rest) = log.as_chunks::<4>();
    assert!(rest.is_empty(), "whole records");
    chunks.iter().map(|number| u32::from_le_bytes(*number)).collect()
}

fn names_in(folder: &Path) -> BTreeSet<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Kills the server of a share with these options again and again, under programs that append, change names, have a lock, and have a
/// file open that was removed. It is its user's, and its mode forbids all.
fn kill_again_and_again(options: &'static str, kills: u32) {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(options);
    std::fs::set_permissions(rig.below(), PermissionsExt::from_mode(0o777)).unwrap();
    let mut server = rig.serve();
    let (mount, other) = (rig.mount("mount", &rig.unix(), &[]), rig.mount("other", &rig.unix(), &[]));
    let locked = File::create(mount.path("locked")).unwrap();
    locked.lock().unwrap();
    let removed =
        File::options().read(true).write(true).create_new(true).mode(0o000).open(mount.path("removed")).unwrap();
    std::fs::remove_file(mount.path("removed")).unwrap();
    let Work { records, there, unknown } = work_beside_restarts(&mount, kills, |round| {
        server.kill();
        server = rig.serve();
        removed.write_all_at(&round.to_le_bytes(), u64::from(round) * 4).unwrap();
    });
    let numbers = numbers_in(&rig.below().join("log"));
    let found: BTreeSet<u32> = numbers.iter().copied().collect();
    assert!(found.len() == numbers.len(), "each record once");
    assert!(records.synced.is_subset(&found), "what was synced is there");
    // The machine went on, so what was answered is there as well, and nothing that was not asked for.
    assert!(records.written.is_subset(&found));
    assert!(found.iter().all(|number| records.written.contains(number) || records.unknown.contains(number)));
    let names = names_in(&mount.path("names"));
    assert!(there.is_subset(&names), "{there:?}");
    assert!(names.iter().all(|name| there.contains(name) || unknown.contains(name)));
    let mut text = Vec::new();
    (&removed).read_to_end(&mut text).unwrap();
    assert_eq!(text, (0..kills).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    // The lock was held all the time.
    let wanted = File::open(other.path("locked")).unwrap();
    assert!(matches!(wanted.try_lock_shared(), Err(TryLockError::WouldBlock)));
    (&locked).write_all(b"still mine").unwrap();
    locked.unlock().unwrap();
    wanted.try_lock_shared().unwrap();
    drop((locked, wanted, removed));
    mount.unmount();
    other.unmount();
}

fn restarts(usual: u32) -> u32 {
    if std::env::var_os("BYWAY_LONG").is_some() { 100 } else { usual }
}

#[test]
fn a_server_that_is_killed_again_and_again_loses_and_doubles_nothing() {
    kill_again_and_again(",users=squash:0", restarts(20));
}

#[test]
fn the_same_where_mounts_have_leases() {
    kill_again_and_again(",users=squash:0,writers=exclusive", restarts(10));
}

#[test]
fn the_same_for_a_user_who_is_not_root() {
    kill_again_and_again(",users=squash:4711", restarts(10));
}

/// A server that ends in an orderly way answers what it has begun, and says that it has not begun the rest.
#[test]
fn no_change_fails_when_a_server_ends_in_an_orderly_way() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let Work { records, there, unknown } = work_beside_restarts(&mount, restarts(20), |_| {
        server.terminate();
        server = rig.serve();
    });
    assert!(records.unknown.is_empty(), "appends: {:?}", records.unknown);
    assert!(unknown.is_empty(), "changes of names: {unknown:?}");
    assert!(numbers_in(&rig.below().join("log")).into_iter().eq(records.written), "each record once");
    assert_eq!(names_in(&mount.path("names")), there);
    mount.unmount();
}

#[test]
fn a_removed_file_that_is_open_outlives_the_server() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let mut server = rig.serve();
    let (mount, other) = (rig.mount("mount", &rig.unix(), &[]), rig.mount("other", &rig.unix(), &[]));
    let open = |name: &str| File::options().create_new(true).read(true).write(true).open(mount.path(name)).unwrap();
    let (mut mine, mut theirs) = (open("mine"), open("theirs"));
    mine.lock().unwrap();
    mine.write_all(b"one, ").unwrap();
    mine.sync_all().unwrap();
    std::fs::remove_file(mount.path("mine")).unwrap();
    std::fs::write(other.path("new"), "new").unwrap();
    std::fs::rename(other.path("new"), other.path("theirs")).unwrap();
    theirs.write_all(b"replaced").unwrap();
    server.kill();
    server = rig.serve();
    mine.write_all(b"two, ").unwrap();
    server.terminate();
    let _server = rig.serve();
    mine.write_all(b"three").unwrap();
    let text = |file: &mut File| {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    };
    assert_eq!((text(&mut mine), text(&mut theirs)), ("one, two, three".to_owned(), "replaced".to_owned()));
    assert_eq!(std::fs::read_to_string(mount.path("theirs")).unwrap(), "new");
    assert_eq!(std::fs::read_dir(&mount.at).unwrap().count(), 1);
    mine.unlock().unwrap();
    drop((mine, theirs));
    let state = rig.below().join(".byway-state");
    let is_removed = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().as_encoded_bytes().starts_with(b"removed-")
    };
    until(Instant::now() + LIMIT, "their blocks to be free", || {
        (!std::fs::read_dir(&state).unwrap().any(is_removed)).then_some(())
    });
    mount.unmount();
    other.unmount();
}

#[test]
fn a_full_disk_fails_the_write_and_nothing_that_was_taken_is_missing() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let _disk = SmallDisk::mount(&rig.below());
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let mut file = File::create(mount.path("file")).unwrap();
    let bytes: Vec<u8> = (0..1u32 << 16).flat_map(u32::to_le_bytes).collect();
    let mut taken = Vec::new();
    let full = loop {
        match file.write(&bytes) {
            Ok(count) => taken.extend_from_slice(&bytes[..count]),
            Err(error) => break error,
        }
        assert!(taken.len() <= 4 << 20, "more than there is room for");
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    assert!(taken.len() > 3 << 20, "{}", taken.len());
    assert_eq!(std::fs::write(mount.path("other"), b"x").unwrap_err().kind(), ErrorKind::StorageFull);
    file.sync_all().unwrap();
    drop(file);
    let mut back = Vec::new();
    File::open(mount.path("file")).unwrap().read_to_end(&mut back).unwrap();
    assert!(back == taken, "{} bytes of {}", back.len(), taken.len());
    std::fs::remove_file(mount.path("file")).unwrap();
    std::fs::write(mount.path("other"), &bytes).unwrap();
    mount.unmount();
}

/// The share lies on another mount, whose server goes: each call there fails with `EIO`.
#[test]
fn errors_of_the_file_system_below_reach_programs_and_nothing_is_made_up() {
    if lacks_mounts() {
        return;
    }
    let disk = MountRig::new(",users=squash:0");
    let mut disk_server = disk.serve();
    let rig = MountRig::new(",users=squash:0");
    let disk_mount = rig.mount("below", &disk.unix(), &["--wait", "1"]);
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let mut file =
        File::options().create(true).truncate(false).read(true).write(true).open(mount.path("file")).unwrap();
    file.write_all(b"durable").unwrap();
    file.sync_all().unwrap();
    disk_server.kill();
    for (what, result) in [
        ("a write", file.write(b"lost").map(drop)),
        ("a sync", file.sync_all()),
        ("a read", file.rewind().and_then(|()| file.read(&mut [0; 7]).map(drop))),
        ("attributes", std::fs::metadata(mount.path("file")).map(drop)),
        ("a new file", File::create(mount.path("new")).map(drop)),
        ("a listing", std::fs::read_dir(&mount.at).and_then(|mut names| names.next().transpose()).map(drop)),
    ] {
        let error = result.expect_err(what);
        assert!(is_errno(&error, Errno::IO), "{what}: {error}");
    }
    assert!(server.is_alive());
    let _disk_server = disk.serve();
    assert_eq!(std::fs::read(mount.path("file")).unwrap(), b"durable");
    drop(file);
    std::fs::write(mount.path("new"), "new").unwrap();
    assert_eq!(std::fs::read(disk.below().join("new")).unwrap(), b"new");
    // A sync has failed, so something may be lost, though its program knows.
    mount.unmount_unsynced();
    drop(server);
    disk_mount.unmount();
}

#[test]
fn a_mount_goes_while_its_server_is_away() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let idle = rig.mount("idle", &rig.unix(), &[]);
    let busy = rig.mount("busy", &rig.unix(), &["--wait", "2"]);
    let mut file = File::create(busy.path("file")).unwrap();
    file.write_all(b"before").unwrap();
    file.lock().unwrap();
    server.kill();
    // Without calls under way it goes at once, though it would wait for the server for a minute.
    idle.unmount();
    let lost = std::fs::metadata(busy.path("file")).unwrap_err();
    assert!(is_errno(&lost, Errno::IO), "{lost}");
    assert!(is_errno(&file.write_all(b"behind").unwrap_err(), Errno::IO));
    drop(file);
    busy.unmount_unsynced();
}

#[test]
fn a_share_whose_folder_is_removed_says_so_and_harms_no_other() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["--wait", "2"]);
    let mut file = File::create(mount.path("file")).unwrap();
    file.write_all(b"before").unwrap();
    std::fs::remove_dir_all(rig.below()).unwrap();
    // An open file is usable to its end; names are gone, and none can be made.
    file.write_all(b", behind").unwrap();
    assert_eq!(std::fs::metadata(mount.path("file")).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(File::create(mount.path("other")).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(std::fs::read_dir(&mount.at).unwrap().count(), 0);
    assert!(server.is_alive());
    // A folder of that name is another one: the mount does not write into it.
    std::fs::create_dir(rig.below()).unwrap();
    server.kill();
    let mut server = rig.serve();
    let other = File::create(mount.path("other")).unwrap_err();
    assert!(is_errno(&other, Errno::IO), "{other}");
    assert_eq!(std::fs::read_dir(rig.below()).unwrap().count(), 0);
    drop(file);
    mount.unmount_unsynced();
    let again = rig.mount("again", &rig.unix(), &[]);
    std::fs::write(again.path("file"), "new").unwrap();
    assert_eq!(std::fs::read(rig.below().join("file")).unwrap(), b"new");
    again.unmount();
    assert!(server.is_alive());
}
