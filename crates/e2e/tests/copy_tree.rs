//! `byway copy` from and to shares: trees, interrupted copies, and what is not copied.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use byway_e2e::{LIMIT, MountRig, Server, SmallDisk, binary, find_tool, lacks_mounts, noise, run, run_well, until};

/// As the file below has it: root's, if a server can be root.
fn rig() -> MountRig {
    MountRig::new(if rustix::process::geteuid().is_root() { ",users=squash:0" } else { "" })
}

/// A path of the share at the unix socket.
fn uri(rig: &MountRig, path: &str) -> String {
    rig.unix().replace("/share?", &format!("/share/{path}?"))
}

/// Makes a tree of so many files with odd names, and some other entries.
fn make_tree(top: &Path, files: usize) {
    std::fs::create_dir_all(top).unwrap();
    for number in 0..files {
        let folder = top.join(format!("folder {}", number % 60));
        std::fs::create_dir_all(&folder).unwrap();
        let name: Vec<u8> = match number % 6 {
            0 => format!("-{number}").into(),
            1 => format!("line\nand tab\t{number}").into(),
            2 => [&b"not text \xff\xfe"[..], number.to_string().as_bytes()].concat(),
            3 => format!("naïve 文件 {number}").into(),
            4 => format!("{number:0>255}").into(),
            _ => format!("*?\"'$(x)\\{number}").into(),
        };
        let path = folder.join(OsStr::from_bytes(&name));
        std::fs::write(&path, noise(number * 37 % 9000, number as u64)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o400 | (number as u32 % 0o400))).unwrap();
    }
    let deep = top.join("a/b/c/d/e/f");
    std::fs::create_dir_all(&deep).unwrap();
    symlink("../no where", deep.join("link")).unwrap();
    std::fs::write(top.join("large"), noise(20 << 20, 5)).unwrap();
    let sparse = File::create(deep.join("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    sparse.write_all_at(&noise(100_000, 7), 30 << 20).unwrap();
    // Before 1970, with nanoseconds.
    sparse.set_modified(SystemTime::UNIX_EPOCH - Duration::new(1000, 123_456_789)).unwrap();
    let xattr = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(top.join("large"), "user.byway", b"value", xattr).unwrap();
    std::fs::set_permissions(&deep, Permissions::from_mode(0o2750)).unwrap();
    File::open(&deep).unwrap().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(981_173_106)).unwrap();
}

/// Mode, seconds and nanoseconds of the last change, size, contents.
type Described = (u32, i64, i64, u64, Vec<u8>);

/// What a tree consists of, by path.
fn described(top: &Path) -> BTreeMap<PathBuf, Described> {
    let (mut all, mut folders) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        for path in entries.chain((folder == top).then(|| top.to_owned())) {
            let found = path.symlink_metadata().unwrap();
            let contents = match found.file_type() {
                kind if kind.is_symlink() => std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                kind if kind.is_dir() => Vec::new(),
                _ => std::fs::read(&path).unwrap(),
            };
            if found.is_dir() && path != *top {
                folders.push(path.clone());
            }
            let size = if found.is_dir() { 0 } else { found.len() };
            let name = path.strip_prefix(top).unwrap().to_owned();
            all.insert(name, (found.mode(), found.mtime(), found.mtime_nsec(), size, contents));
        }
    }
    all
}

/// Not with `assert_eq`: nobody reads megabytes.
fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (described(one), described(other));
    for (path, expected) in &one {
        let found = other.get(path).unwrap_or_else(|| panic!("{} is missing", path.display()));
        let attributes = |of: &Described| (of.0, of.1, of.2, of.3);
        assert_eq!(attributes(found), attributes(expected), "{}", path.display());
        assert!(found.4 == expected.4, "{}: other bytes", path.display());
    }
    let more: Vec<_> = other.keys().filter(|path| !one.contains_key(*path)).collect();
    assert!(more.is_empty(), "{more:?}");
}

fn copy(arguments: &[&str]) -> String {
    run_well(&binary(), &[&["copy"], arguments].concat())
}

/// What it prints when it does not copy all.
fn copy_fails(arguments: &[&str]) -> String {
    let output = run(&binary(), &[&["copy"], arguments].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// A copy that runs; killed with this.
struct Running(Child);

impl Running {
    fn start(arguments: &[&str], log: &Path) -> Self {
        let log = File::create(log).unwrap();
        let mut command = Command::new(binary());
        command.arg("copy").args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Self(command.spawn().expect("byway starts"))
    }

    fn ends(&mut self) -> Option<i32> {
        until(Instant::now() + LIMIT, "the copy to end", || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_tree_of_3000_files_goes_both_ways_whole() {
    let rig = rig();
    let server = rig.serve();
    let (local, back) = (rig.path("local"), rig.path("back"));
    make_tree(&local, 3000);
    let said = copy(&["--recursive", text(&local), &uri(&rig, "tree")]);
    assert!(said.starts_with("3002 files of ") && said.contains(", 1 symbolic links"), "{said}");
    let there = rig.below().join("tree");
    assert_same(&local, &there);
    let mut value = [0; 16];
    assert_eq!(rustix::fs::getxattr(there.join("large"), "user.byway", &mut value[..]), Ok(5));
    assert!(std::fs::metadata(there.join("a/b/c/d/e/f/sparse")).unwrap().blocks() * 512 < 1 << 20, "a hole stays one");
    let tcp = format!("byway://127.0.0.1:{}/share/tree", server.port("byway"));
    copy(&["-r", &tcp, text(&back), "--verify", "--depth", "3"]);
    assert_same(&local, &back);
    // Within the server.
    copy(&["-r", &uri(&rig, "tree"), &uri(&rig, "other")]);
    assert_same(&local, &rig.below().join("other"));
    let again = copy(&["-r", text(&local), &uri(&rig, "tree"), "--json"]);
    assert!(again.contains("\"files\":0") && again.contains("\"passed_over\":3003"), "{again}");
}

#[test]
fn a_file_goes_by_its_name_or_into_a_folder() {
    let rig = rig();
    let _server = rig.serve();
    let file = rig.path("file");
    std::fs::write(&file, "bytes").unwrap();
    std::fs::create_dir(rig.below().join("folder")).unwrap();
    let below = |name: &str| std::fs::read(rig.below().join(name)).unwrap();
    copy(&[text(&file), &uri(&rig, "")]);
    copy(&[text(&file), &uri(&rig, "folder")]);
    copy(&[text(&file), &uri(&rig, "folder/a%20b%2525")]);
    assert_eq!([below("file"), below("folder/file"), below("folder/a b%25")], [b"bytes"; 3]);
    copy(&[&uri(&rig, "folder/file"), text(&rig.path("back"))]);
    assert_eq!(std::fs::read(rig.path("back")).unwrap(), b"bytes");
    std::fs::write(&file, "other bytes").unwrap();
    let said = copy_fails(&[text(&file), &uri(&rig, "folder")]);
    assert!(said.contains("/share/folder/file?") && said.contains("add --overwrite"), "{said}");
    copy(&[text(&file), &uri(&rig, "folder"), "--overwrite"]);
    assert_eq!(below("folder/file"), b"other bytes");
    for (arguments, expected) in [
        (&[&uri(&rig, "folder"), text(&rig.path("x"))][..], "add --recursive"),
        (&[&uri(&rig, "none"), text(&rig.path("x"))], "No such file"),
        (&[text(&file), &uri(&rig, "none/x")], "No such file"),
        (&["-r", text(&file), text(&rig.path("x"))], "use cp -a"),
        (&["-r", &uri(&rig, "folder"), &uri(&rig, "folder/x")], "lies within the source"),
        (&[&uri(&rig, "file"), &rig.unix()], "write a slash behind the name of a share"),
        (&["--raw", text(&file), &uri(&rig, "x")], "--raw is for images"),
    ] {
        let said = copy_fails(arguments);
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}

#[test]
fn what_is_no_file_is_named_and_the_rest_is_copied() {
    let rig = rig();
    let _server = rig.serve();
    let local = rig.path("local");
    std::fs::create_dir_all(local.join("folder")).unwrap();
    std::fs::write(local.join("folder/file"), "bytes").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(local.join("socket")).unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, local.join("fifo"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let said = copy_fails(&["-r", text(&local), &uri(&rig, "tree")]);
    assert!(said.contains("/local/socket is a socket") && said.contains("/local/fifo is a FIFO"), "{said}");
    assert!(said.contains("2 entries were not copied, for the reasons above; 1 files are complete"), "{said}");
    assert_eq!(std::fs::read(rig.below().join("tree/folder/file")).unwrap(), b"bytes");
}

/// Whether each file that has its name is the source's; gives how many have. The server may still do what a killed copy asked for.
fn whole_files(source: &Path, copy: &Path) -> usize {
    let files = described(source).into_iter().filter(|(_, found)| found.0 & 0o170_000 == 0o100_000);
    let there = files.filter(|(path, found)| match std::fs::read(copy.join(path)) {
        Ok(bytes) => {
            assert!(bytes == found.4, "{}: other bytes", path.display());
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{}", path.display());
            false
        }
    });
    there.count()
}

#[test]
fn a_killed_copy_leaves_whole_files_and_is_resumed() {
    let rig = rig();
    let _server = rig.serve();
    let (local, there) = (rig.path("local"), rig.below().join("tree"));
    make_tree(&local, 3000);
    let arguments = ["-r", text(&local), &uri(&rig, "tree")];
    for least in [100, 1000] {
        let mut running = Running::start(&arguments, &rig.path("log"));
        let count = || walk_count(&there);
        until(Instant::now() + LIMIT, "some files", || (count() > least).then_some(()));
        running.0.kill().unwrap();
        running.0.wait().unwrap();
        assert!(whole_files(&local, &there) < 3002, "it was killed in the middle");
    }
    let resumed = copy(&arguments);
    assert!(resumed.contains("files done before"), "{resumed}");
    assert_same(&local, &there);
}

/// Entries of a tree that changes meanwhile.
fn walk_count(top: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(top) else { return 0 };
    let below = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => walk_count(&entry.path()),
        _ => 1,
    };
    entries.flatten().map(below).sum()
}

#[test]
fn a_server_that_restarts_is_a_wait() {
    let rig = rig();
    let mut server = rig.serve();
    let (local, there, back) = (rig.path("local"), rig.below().join("tree"), rig.path("back"));
    make_tree(&local, 3000);
    let restarted = |server: &mut Server, arguments: &[&str], to: &Path| {
        let mut running = Running::start(arguments, &rig.path("log"));
        for least in [300, 1500] {
            until(Instant::now() + LIMIT, "some files", || (walk_count(to) > least).then_some(()));
            server.kill();
            *server = rig.serve();
        }
        assert_eq!(running.ends(), Some(0), "{}", std::fs::read_to_string(rig.path("log")).unwrap());
    };
    restarted(&mut server, &["-r", text(&local), &uri(&rig, "tree")], &there);
    assert_same(&local, &there);
    restarted(&mut server, &["-r", &uri(&rig, "tree"), text(&back)], &back);
    assert_same(&local, &back);
}

/// Kills the server in the middle of a copy, and removes a file that it has, as a power failure of its machine would.
#[test]
fn names_that_a_server_has_lost_are_missed() {
    let rig = rig();
    let mut server = rig.serve();
    let (local, there) = (rig.path("local"), rig.below().join("tree"));
    std::fs::create_dir(&local).unwrap();
    for number in 0..2000 {
        std::fs::write(local.join(number.to_string()), noise(1000, number)).unwrap();
    }
    let arguments = ["-r", text(&local), &uri(&rig, "tree")];
    let mut running = Running::start(&arguments, &rig.path("log"));
    let named = || (0..2000).filter(|number| there.join(number.to_string()).exists());
    let lost = until(Instant::now() + LIMIT, "a file", || named().next());
    // Its name has been answered by then: an unanswered one would be given again. The folder is synced when all have theirs.
    until(Instant::now() + LIMIT, "more files", || (named().count() >= 200).then_some(()));
    server.kill();
    std::fs::remove_file(there.join(lost.to_string())).unwrap();
    server = rig.serve();
    let ended = running.ends();
    let said = std::fs::read_to_string(rig.path("log")).unwrap();
    assert_eq!(ended, Some(1), "{said}");
    assert!(
        said.contains(&format!("/share/tree/{lost}?")) && said.contains("restarted before it was durable"),
        "{said}"
    );
    let resumed = copy(&arguments);
    assert!(resumed.starts_with("1 files of "), "{resumed}");
    assert_same(&local, &there);
    drop(server);
}

#[test]
fn a_full_disk_is_named_and_room_lets_the_copy_go_on() {
    if lacks_mounts() {
        return;
    }
    let rig = rig();
    let disk = SmallDisk::mount(&rig.below());
    let _server = rig.serve();
    let local = rig.path("local");
    std::fs::create_dir(&local).unwrap();
    for number in 0..20 {
        std::fs::write(local.join(number.to_string()), noise(10_000, number)).unwrap();
    }
    std::fs::write(local.join("large"), noise(6 << 20, 1)).unwrap();
    let arguments = ["-r", text(&local), &uri(&rig, "tree")];
    // One after the other: else the large one may take the room of the others for a moment.
    let said = copy_fails(&[&arguments[..], &["--depth", "1"]].concat());
    assert!(said.contains("/share/tree/large?") && said.contains("make room"), "{said}");
    let there = rig.below().join("tree");
    assert_eq!(whole_files(&local, &there), 20, "the others are there");
    assert_eq!(std::fs::read_dir(&there).unwrap().count(), 20, "what was written of the large one has gone");
    let mount = find_tool("mount").unwrap();
    run_well(&mount, &["-o", "remount,size=16m", text(&rig.below())]);
    let resumed = copy(&arguments);
    assert!(resumed.starts_with("1 files of ") && resumed.contains("20 files done before"), "{resumed}");
    assert_same(&local, &there);
    drop(disk);
}
