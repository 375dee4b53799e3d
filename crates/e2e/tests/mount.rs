//! A share, mounted: what programs do with it, what two mounts see of each other, and what a lost server does to them.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Instant;

use byway_e2e::{
    LIMIT, Mount, MountRig as Rig, SkipReason, binary, find_tool, lacks_mounts, noise, run, run_well, until,
};
use rustix::fs::{FlockOperation, flock};

fn shell(folder: &Path, script: &str) -> String {
    let script = format!("set -e; cd {}; {script}", folder.display());
    run_well(Path::new("/bin/sh"), &["-c", &script])
}

/// Of FIFOs it says no more than that they are some.
const DIFF: &str = "diff -r --no-dereference -x fifo";

/// A small tree with all kinds of entries, made by the shell.
const TREE: &str = "mkdir -p tree/a/b/c; echo one > tree/a/one; echo 'echo run' > tree/a/run; chmod 755 tree/a/run; \
    ln -s ../a/one tree/a/b/link; ln tree/a/one tree/a/b/hard; mkfifo tree/a/fifo; : > tree/empty; \
    for n in $(seq 200); do echo $n > tree/a/b/c/file$n; done; touch -d '2001-02-03 04:05:06.789 UTC' tree/a/one; \
    chmod 1777 tree/a/b; head -c 3000000 /dev/urandom > tree/noise";

/// Copies a tree into a mount of the share, compares and packs it there, and removes it.
fn a_tree_goes_through(rig: &Rig, (name, uri): (&str, &str), flags: &[&str]) {
    std::fs::create_dir_all(rig.path("local")).unwrap();
    shell(&rig.path("local"), &format!("rm -rf tree; {TREE}"));
    let mount = rig.mount(name, uri, flags);
    let (local, at) = (rig.path("local").display().to_string(), mount.at.clone());
    shell(&at, &format!("cp -a {local}/tree . && {DIFF} {local}/tree tree"));
    // Attributes too, as the folder below has them.
    let stats = "find tree -printf '%P %y %m %n %s %T@ %l\\n' | sort";
    let expected = shell(&rig.path("local"), stats);
    assert!(expected.contains("one f 644 2 4 981173106.7890000000"), "{expected}");
    assert_eq!(shell(&at, stats).replace(" d 755 5 ", ""), shell(&rig.below(), stats).replace(" d 755 5 ", ""));
    let files = "find tree ! -type d -printf '%P %y %m %n %s %T@ %l\\n' | sort";
    assert_eq!(shell(&at, files), shell(&rig.path("local"), files));
    shell(&at, &format!("tar cf all.tar tree && mkdir out && tar xf all.tar -C out && {DIFF} {local}/tree out/tree"));
    assert_eq!(shell(&at, "out/tree/a/run 2>/dev/null || sh out/tree/a/run").trim(), "run");
    shell(&at, "rm -r tree out all.tar && test -z \"$(ls -A)\"");
    mount.unmount();
}

#[test]
fn trees_go_through_a_mount_whole() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let server = rig.serve_shared();
    let tcp = rig.tcp(&server);
    for (name, uri) in [("tcp", tcp), ("unix", rig.unix()), ("shared", rig.shared())] {
        a_tree_goes_through(&rig, (name, &uri), &[]);
    }
}

#[test]
fn trees_go_through_a_mount_over_tls() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let (server, flags) = rig.serve_secure();
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let uri = rig.secure(&server);
    a_tree_goes_through(&rig, ("secure", &uri), &flags);
    std::fs::create_dir(rig.path("other")).unwrap();
    let refused = run(&binary(), &["mount", &uri, &rig.path("other").display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "without a certificate: {said}");
    assert!(!std::fs::read_to_string("/proc/self/mounts").unwrap().contains(rig.path("other").to_str().unwrap()));
}

#[test]
fn git_and_sqlite_work_in_a_mount() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    if find_tool("git").is_some() {
        // The settings of this machine's users do not count.
        let settings = "export GIT_CONFIG_NOSYSTEM=1 HOME=$PWD XDG_CONFIG_HOME=$PWD";
        let script = "git -c init.defaultBranch=main init -q repo && cd repo && git config user.email a@b && git config user.name a && \
            for n in 1 2 3 4 5; do echo $n > file$n; git add . ; git commit -qm $n; done && git gc -q && git fsck --strict && \
            git status --short && cd .. && git clone -q repo copy && cd copy && git log --oneline | wc -l";
        assert_eq!(shell(&mount.at, &format!("{settings}; {script}")).trim(), "5");
    } else {
        byway_skip::skip_part_of_this(SkipReason::MissingTool("git"));
    }
    if find_tool("sqlite3").is_some() {
        for mode in ["delete", "wal"] {
            let script = format!(
                "sqlite3 {mode}.db 'pragma journal_mode={mode}; create table t(n); insert into t select value from generate_series(1, 500); \
                 delete from t where n % 2; pragma integrity_check; select count(*) from t'"
            );
            let said = shell(&mount.at, &script);
            assert_eq!(said.split_whitespace().collect::<Vec<_>>(), [mode, "ok", "250"]);
        }
    } else {
        byway_skip::skip_part_of_this(SkipReason::MissingTool("sqlite3"));
    }
    mount.unmount();
}

fn two_mounts_see_each_other(options: &'static str) {
    const LINES: usize = 300;
    let rig = Rig::new(options);
    let server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let two = rig.mount("two", &rig.tcp(&server), &[]);
    let mut writer = File::create(one.path("file")).unwrap();
    let mut reader = File::open(two.path("file")).unwrap();
    for round in 0..50u32 {
        writer.write_all(&round.to_le_bytes()).unwrap();
        assert_eq!(reader.metadata().unwrap().len(), u64::from(round + 1) * 4);
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), round);
        writer.rewind().unwrap();
        writer.write_all(&bytes).unwrap();
        let mut first = [0; 4];
        reader.rewind().unwrap();
        reader.read_exact(&mut first).unwrap();
        assert_eq!(first, bytes, "an overwrite of what was read before");
        let end = std::io::SeekFrom::Start(u64::from(round + 1) * 4);
        writer.seek(end).unwrap();
        reader.seek(end).unwrap();
        std::fs::rename(one.path("file"), one.path("moved")).unwrap();
        assert!(!two.path("file").exists());
        std::fs::rename(two.path("moved"), two.path("file")).unwrap();
        assert!(one.path("file").exists());
    }
    std::thread::scope(|scope| {
        for (mount, letter) in [(&one, "a"), (&two, "b")] {
            scope.spawn(move || {
                let mut log = File::options().create(true).append(true).open(mount.path("log")).unwrap();
                (0..LINES).for_each(|_| log.write_all(format!("{letter}\n").as_bytes()).unwrap());
            });
        }
    });
    let log = std::fs::read_to_string(one.path("log")).unwrap();
    let count = |letter: &str| log.lines().filter(|line| *line == letter).count();
    assert_eq!((count("a"), count("b")), (LINES, LINES));
    drop((reader, writer));
    one.unmount();
    two.unmount();
}

#[test]
fn two_mounts_see_each_other_at_once() {
    if !lacks_mounts() {
        two_mounts_see_each_other(",users=squash:0");
    }
}

#[test]
fn two_mounts_that_keep_attributes_and_names_see_each_other_at_once() {
    if !lacks_mounts() {
        two_mounts_see_each_other(",users=squash:0,writers=exclusive");
    }
}

#[test]
fn locks_hold_across_mounts() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let _server = rig.serve();
    let (one, two) = (rig.mount("one", &rig.unix(), &[]), rig.mount("two", &rig.unix(), &[]));
    let held = File::create(one.path("file")).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    let wanted = File::open(two.path("file")).unwrap();
    assert_eq!(flock(&wanted, FlockOperation::NonBlockingLockShared), Err(rustix::io::Errno::WOULDBLOCK));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| flock(&wanted, FlockOperation::LockShared));
        drop(held);
        waits.join().unwrap().unwrap();
    });
    if find_tool("python3").is_some() {
        // A process that dies lets go, and one that waits can be interrupted.
        let script = "import fcntl, os, signal, sys\n\
            a = open(sys.argv[1], 'r+'); b = open(sys.argv[2], 'r+')\n\
            fcntl.lockf(a, fcntl.LOCK_EX, 10, 0)\n\
            pid = os.fork()\n\
            if pid == 0:\n\
            \x20   try: fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5); os._exit(1)\n\
            \x20   except BlockingIOError: pass\n\
            \x20   fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 10)\n\
            \x20   def stop(*_): raise KeyboardInterrupt\n\
            \x20   signal.signal(signal.SIGALRM, stop); signal.setitimer(signal.ITIMER_REAL, 0.2)\n\
            \x20   try: fcntl.lockf(b, fcntl.LOCK_EX, 10, 0); os._exit(2)\n\
            \x20   except KeyboardInterrupt: os._exit(0)\n\
            assert os.waitpid(pid, 0)[1] == 0\n\
            fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 10)\n\
            a.close()\n\
            fcntl.lockf(b, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)\n\
            fcntl.lockf(b, fcntl.LOCK_UN)\n\
            import struct, time\n\
            whole = struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0)\n\
            c = open(sys.argv[1], 'r+'); fcntl.fcntl(c, fcntl.F_OFD_SETLK, whole)\n\
            try: fcntl.fcntl(b, fcntl.F_OFD_SETLK, whole); sys.exit('two have it')\n\
            except BlockingIOError: pass\n\
            c.close()\n\
            limit = time.monotonic() + 20\n\
            while True:\n\
            \x20   try: fcntl.fcntl(b, fcntl.F_OFD_SETLK, whole); break\n\
            \x20   except BlockingIOError:\n\
            \x20       if time.monotonic() > limit: sys.exit('the lock of a closed file is still held')\n\
            \x20       time.sleep(0.01)\n";
        let python = find_tool("python3").unwrap();
        let (one, two) = (one.path("file").display().to_string(), two.path("file").display().to_string());
        run_well(&python, &["-c", script, &one, &two]);
    } else {
        byway_skip::skip_part_of_this(SkipReason::MissingTool("python3"));
    }
}

#[test]
fn a_killed_server_is_waited_for() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["--wait", "60"]);
    let bytes = noise(300_000, 1);
    std::fs::create_dir(mount.path("folder")).unwrap();
    let mut file = File::create(mount.path("folder/file")).unwrap();
    for round in 0..3 {
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        server.kill();
        let waits = std::thread::spawn({
            let path = mount.path("folder/file");
            move || std::fs::metadata(path).map(|metadata| metadata.len())
        });
        server = rig.serve();
        assert_eq!(waits.join().unwrap().unwrap(), (round + 1) * bytes.len() as u64);
    }
    // The file was opened again, and its place in the listing of names is as it was.
    assert!(std::fs::read(rig.below().join("folder/file")).unwrap() == bytes.repeat(3));
    file.write_all(b"more").unwrap();
    server.kill();
    server = rig.serve();
    let lost = file.sync_all().unwrap_err();
    assert_eq!(lost.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "what was not synced may be lost");
    file.sync_all().unwrap();
    drop(file);
    mount.unmount();
    drop(server);
}

#[test]
fn a_mount_without_a_server_fails_by_name_and_goes() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["--wait", "0"]);
    std::fs::write(mount.path("file"), "f").unwrap();
    server.kill();
    let lost = std::fs::metadata(mount.path("file")).unwrap_err();
    assert_eq!(lost.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    mount.unmount_unsynced();
    let refused = run(&binary(), &["mount", &rig.unix(), &rig.path("mount").display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("cannot connect"), "{said}");
    let _server = rig.serve();
    let nothing = run(&binary(), &["mount", &rig.unix().replace("share?", "other?"), "/mnt"]);
    let said = String::from_utf8_lossy(&nothing.stderr);
    assert!(!nothing.status.success() && said.contains("no share has that name"), "{said}");
}

/// A directory's path in the name of its mount's log: the names of temporary folders have dots, too.
fn log_name(directory: &str) -> String {
    directory.trim_start_matches('/').replace('/', "-").replace('.', "%2e")
}

#[test]
fn a_mount_goes_to_the_background_and_is_removed() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",ro,users=squash:0");
    std::fs::write(rig.below().join("file"), "f").unwrap();
    let mut server = rig.serve();
    let at = rig.path("mount");
    std::fs::create_dir(&at).unwrap();
    let at_text = at.display().to_string();
    let ready = run_well(&binary(), &["mount", &rig.unix(), &at_text, "--background", "--wait", "0"]);
    assert_eq!(ready, format!("ready mount {at_text}\n"));
    let said = std::fs::write(at.join("new"), "n").unwrap_err();
    let read = std::fs::read(at.join("file"));
    // It logs where the manual says: also what happens later.
    server.kill();
    let log = Path::new("/run/byway/mounts").join(format!("{}.log", log_name(&at_text)));
    until(Instant::now() + LIMIT, "a line about the lost server", || {
        let _ = std::fs::metadata(at.join("other"));
        let log = std::fs::read_to_string(&log).unwrap();
        log.contains("the session with the server has ended").then_some(())
    });
    run_well(&binary(), &["umount", &at_text]);
    std::fs::remove_file(log).unwrap();
    assert_eq!(said.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
    assert_eq!(read.unwrap(), b"f");
    assert!(!at.join("file").exists());
}

#[test]
fn users_of_a_trusting_share_have_their_own_rights() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=trust-root");
    std::fs::set_permissions(rig.path("."), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(rig.below(), PermissionsExt::from_mode(0o1777)).unwrap();
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["-o", "allow_other"]);
    let mut secret =
        File::options().write(true).create(true).truncate(true).mode(0o640).open(mount.path("secret")).unwrap();
    secret.write_all(b"s").unwrap();
    std::os::unix::fs::chown(mount.path("secret"), Some(0), Some(7777)).unwrap();
    if find_tool("setpriv").is_none() {
        return byway_skip::skip_this(SkipReason::MissingTool("setpriv"));
    }
    drop(secret);
    let as_user = |groups: &str, script: &str| {
        let groups = if groups.is_empty() { "--clear-groups".to_owned() } else { format!("--groups={groups}") };
        let script = format!("cd {} && {script}", mount.at.display());
        run(&find_tool("setpriv").unwrap(), &["--reuid=4711", "--regid=4712", &groups, "/bin/sh", "-c", &script])
    };
    assert!(!as_user("", "cat secret").status.success());
    assert_eq!(as_user("7777", "cat secret").stdout, b"s");
    assert!(!as_user("7777", "echo x >> secret").status.success());
    assert!(as_user("", "umask 022 && mkdir mine && echo x > mine/file && ! rm -f secret").status.success());
    let made = std::fs::metadata(rig.below().join("mine/file")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode() & 0o777), (4711, 4712, 0o644));
    mount.unmount();
}

#[test]
fn each_write_says_whether_it_appends() {
    if lacks_mounts() {
        return;
    }
    let Some(python) = find_tool("python3") else {
        return byway_skip::skip_this(SkipReason::MissingTool("python3"));
    };
    let rig = Rig::new(",users=squash:0");
    let _server = rig.serve();
    let mounts = [rig.mount("one", &rig.unix(), &[]), rig.mount("two", &rig.unix(), &[])];
    // Another mount's line behind what this one knows; and a page of a mapped file that is open for appending.
    let script = "import fcntl, mmap, os, sys
one, two = sys.argv[1] + '/log', sys.argv[2] + '/log'
log = os.open(one, os.O_RDWR | os.O_CREAT)
os.write(log, b'one ')
fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
os.fstat(log)
with open(two, 'ab') as other: other.write(b'two ')
os.write(log, b'three ')
fcntl.fcntl(log, fcntl.F_SETFL, 0)
os.pwrite(log, b'ONE', 0)
assert open(two).read() == 'ONE two three ', open(two).read()
os.truncate(one, 8192)
pages = mmap.mmap(os.open(one, os.O_RDWR | os.O_APPEND), 8192)
pages[4096:4103] = b'mapped!'
pages.flush()
assert os.stat(two).st_size == 8192, os.stat(two)
assert open(two, 'rb').read()[4096:4103] == b'mapped!'";
    let [one, two] = mounts.each_ref().map(|mount| mount.at.display().to_string());
    run_well(&python, &["-c", script, &one, &two]);
    mounts.into_iter().for_each(Mount::unmount);
}
