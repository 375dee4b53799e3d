//! Mounts whose process is killed or stopped, and mounts whose network is cut: what their programs see, and what others get.

use std::fs::{File, Permissions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Mount, MountRig, NEAR, Networks, Side, binary, lacks_mounts, run, until};
use rustix::io::Errno;
use rustix::process::Signal;

fn is_errno(error: &std::io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Opens a file through a mount, and locks it for this mount alone.
fn locked(mount: &Mount, name: &str) -> File {
    let file = File::options().create(true).truncate(false).read(true).write(true).open(mount.path(name)).unwrap();
    file.lock().unwrap();
    file
}

fn is_held(mount: &Mount, name: &str) -> bool {
    let file = File::open(mount.path(name)).unwrap();
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_mount_whose_process_is_killed_fails_by_name_and_can_be_unmounted() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let other = rig.mount("other", &rig.unix(), &[]);
    let mut mount = rig.mount("mount", &rig.unix(), &[]);
    let mut file = locked(&mount, "file");
    file.write_all(b"before").unwrap();
    mount.kill();
    for error in [
        std::fs::metadata(mount.path("file")).unwrap_err(),
        file.write_all(b"behind").unwrap_err(),
        File::create(mount.path("new")).unwrap_err(),
    ] {
        assert!(is_errno(&error, Errno::NOTCONN), "{error}");
    }
    drop(file);
    let told = run(&binary(), &["umount", &mount.at.display().to_string()]);
    let said = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.code() == Some(1) && said.contains("is unmounted, but its process did not say"), "{said}");
    drop(mount);
    let again = rig.mount("mount", &rig.unix(), &[]);
    assert_eq!(text(&again.path("file")), "before");
    // The lock of the killed process is released in time.
    drop(locked(&other, "file"));
    again.unmount();
    other.unmount();
    assert!(server.is_alive());
}

#[test]
fn a_stopped_mount_loses_its_lock_to_others_and_is_told() {
    if lacks_mounts() {
        return;
    }
    // Without leases, for whose sake the server would end a silent session, too.
    let rig = MountRig::new(",users=squash:0");
    let _server = rig.serve();
    let (mount, other) = (rig.mount("mount", &rig.unix(), &[]), rig.mount("other", &rig.unix(), &[]));
    let mut file = locked(&mount, "file");
    file.write_all(b"mine").unwrap();
    mount.signal(Signal::STOP);
    assert!(is_held(&other, "file"), "for a while nobody else gets it");
    let mut theirs = locked(&other, "file");
    theirs.write_all(b"theirs").unwrap();
    mount.signal(Signal::CONT);
    let error = file.write_all(b"mine").unwrap_err();
    assert!(is_errno(&error, Errno::IO), "{error}");
    drop(file);
    assert!(is_held(&mount, "file"), "the other has it");
    drop(theirs);
    assert_eq!(text(&mount.path("file")), "theirs");
    drop(locked(&mount, "file"));
    mount.unmount();
    other.unmount();
}

/// Has the cable unplugged for a time.
fn pull_for(networks: &Networks, time: Duration) {
    networks.plug(false);
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::thread::park_timeout(end - Instant::now());
    }
    networks.plug(true);
}

#[test]
fn a_partition_is_a_wait_or_a_lost_lock_that_is_told() {
    if lacks_mounts() {
        return;
    }
    let Some(networks) = Networks::new("a_partition_is_a_wait_or_a_lost_lock_that_is_told") else { return };
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let listen = format!("tcp://{NEAR}:0");
    let more = ["--allow", "10.77.0.0/24", "--insecure"];
    let server = rig.serve_by(networks.command(Side::Near, &binary()), &listen, &more);
    let uri = format!("byway://{NEAR}:{}/share", server.port("byway"));
    let far = rig.mount_by(networks.command(Side::Far, &binary()), "far", &uri, &[]);
    let near = rig.mount("near", &rig.unix(), &[]);
    let mut file = locked(&far, "file");
    file.write_all(b"one").unwrap();

    // Shorter than the lease: calls wait, and are done once; the lock holds.
    std::thread::scope(|scope| {
        let written = scope.spawn(|| {
            file.write_all(b", two").unwrap();
            std::fs::create_dir(far.path("directory"))
        });
        pull_for(&networks, Duration::from_secs(3));
        written.join().unwrap().unwrap();
    });
    assert_eq!(text(&near.path("file")), "one, two");
    assert!(is_held(&near, "file") && near.path("directory").is_dir());

    // Longer: another client gets the lock, and what it changes is seen at once when the network is back.
    assert_eq!(std::fs::metadata(far.path("file")).unwrap().len(), 8);
    networks.plug(false);
    let mut theirs = locked(&near, "file");
    theirs.write_all(b"theirs, all of it").unwrap();
    networks.plug(true);
    let error = until(Instant::now() + LIMIT, "an answer", || match file.write_all(b"mine") {
        Ok(()) => Some(None),
        Err(error) => Some(Some(error)),
    });
    assert!(error.as_ref().is_some_and(|error| is_errno(error, Errno::IO)), "{error:?}");
    assert_eq!(std::fs::metadata(far.path("file")).unwrap().len(), 17);
    let mut seen = String::new();
    theirs.rewind().unwrap();
    theirs.read_to_string(&mut seen).unwrap();
    assert_eq!(seen, "theirs, all of it");
    drop((file, theirs));
    drop(locked(&far, "file"));
    far.unmount();
    near.unmount();
}

#[test]
fn reads_go_on_while_many_changes_wait_for_a_stopped_client() {
    const CHANGES: usize = 40;
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    std::fs::write(rig.below().join("free"), "free").unwrap();
    for number in 0..CHANGES {
        std::fs::write(rig.below().join(number.to_string()), "").unwrap();
    }
    let _server = rig.serve();
    let (holder, busy) = (rig.mount("holder", &rig.unix(), &[]), rig.mount("busy", &rig.unix(), &[]));
    let look = || (0..CHANGES).for_each(|number| _ = std::fs::metadata(holder.path(&number.to_string())).unwrap());
    until(Instant::now() + LIMIT, "leases on all", || {
        look();
        let before = holder.messages();
        look();
        (holder.messages() == before).then_some(())
    });
    holder.signal(Signal::STOP);
    let begun = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let change = |number: usize| {
            let (path, begun) = (busy.path(&number.to_string()), &begun);
            move || {
                begun.fetch_add(1, Ordering::Release);
                std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
            }
        };
        let changes: Vec<_> = (0..CHANGES).map(|number| scope.spawn(change(number))).collect();
        until(Instant::now() + LIMIT, "all changes", || (begun.load(Ordering::Acquire) == CHANGES).then_some(()));
        for _ in 0..50 {
            assert_eq!(text(&busy.path("free")), "free");
            assert_eq!(std::fs::read_dir(&busy.at).unwrap().count(), CHANGES + 1);
            assert!(changes.iter().all(|change| !change.is_finished()), "none waits for those that wait");
        }
    });
    holder.signal(Signal::CONT);
    for number in 0..CHANGES {
        let metadata = std::fs::metadata(holder.path(&number.to_string())).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }
    holder.unmount();
    busy.unmount();
}

/// The change waits until the server ends the stopped mount's session, which cannot say that it no longer uses its leases. From then on,
/// also the stopped machine's kernel may show nothing old.
#[test]
fn a_mount_that_is_stopped_with_leases_holds_a_change_up_until_its_fence() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    std::fs::write(rig.below().join("file"), "before").unwrap();
    let server = rig.serve();
    let (holder, busy) = (rig.mount("holder", &rig.unix(), &[]), rig.mount("busy", &rig.unix(), &[]));
    let open = File::open(holder.path("file")).unwrap();
    let read = |file: &File| {
        let mut bytes = [0; 16];
        let len = file.read_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let look = || assert_eq!((text(&holder.path("file")), read(&open)), ("before".into(), "before".into()));
    until(Instant::now() + LIMIT, "a lease", || {
        look();
        let before = holder.messages();
        look();
        (holder.messages() == before).then_some(())
    });
    holder.signal(Signal::STOP);
    // Nobody continues it meanwhile.
    let mut file = File::options().write(true).open(busy.path("file")).unwrap();
    file.write_all(b"after!").unwrap();
    assert!(server.log().contains("not returned a lease in time"), "{}", server.log());
    assert_eq!((text(&busy.path("file")), text(&rig.below().join("file"))), ("after!".into(), "after!".into()));
    let thread = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
            read(&open)
        });
        // It is answered, or sleeps until the mount goes on.
        until(Instant::now() + LIMIT, "a program that reads", || {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", thread.load(Ordering::Acquire)));
            let sleeps = stat.is_ok_and(|stat| stat.contains(") S ") || stat.contains(") D "));
            (asks.is_finished() || sleeps).then_some(())
        });
        holder.signal(Signal::CONT);
        assert_eq!(asks.join().unwrap(), "after!");
    });
    assert_eq!(text(&holder.path("file")), "after!");
    drop((open, file));
    holder.unmount();
    busy.unmount();
}

/// With `BYWAY_LONG` it has 1,000,000 files: four times as many as the server may hold for a client.
#[test]
fn a_tree_of_more_files_than_a_session_may_hold_is_walked() {
    if lacks_mounts() {
        return;
    }
    let folders = if std::env::var_os("BYWAY_LONG").is_some() { 1000 } else { 20 };
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    for folder in 0..folders {
        let folder = rig.below().join(format!("folder{folder}"));
        std::fs::create_dir(&folder).unwrap();
        for file in 0..1000 {
            File::create(folder.join(format!("file{file}"))).unwrap();
        }
    }
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let mut seen = 0;
    for folder in std::fs::read_dir(&mount.at).unwrap() {
        for file in std::fs::read_dir(folder.unwrap().path()).unwrap() {
            let metadata = file.unwrap().path().symlink_metadata().unwrap();
            assert!(metadata.is_file() && metadata.len() == 0);
            seen += 1;
        }
    }
    assert_eq!(seen, folders * 1000);
    mount.unmount();
}
