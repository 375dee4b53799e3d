//! Calls that few programs use, each made in a folder of the file system below and on mounts of a share: the results are the same.

use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;
use std::time::Instant;

use byway_e2e::{LIMIT, Mount, MountRig, Server, SkipReason, SmallDisk, lacks_mounts, skip_this, until};
use rustix::fs::{
    CWD, FallocateFlags, FlockOperation, Mode, OFlags, RawDir, RenameFlags, SeekFrom, XattrFlags, fallocate,
    fcntl_lock, getxattr, listxattr, openat, removexattr, renameat_with, seek, setxattr, statvfs,
};
use rustix::io::Errno;

/// The two ways in which a share can be written to.
const SHARES: [&str; 2] = [",users=squash:0", ",users=squash:0,writers=exclusive"];

/// Two mounts of a share, and its server.
struct Mounts {
    rig: MountRig,
    server: Server,
    one: Mount,
    two: Mount,
    /// What is shared, if it is not the temporary folder's file system.
    _disk: Option<SmallDisk>,
}

impl Mounts {
    fn new(options: &'static str) -> Self {
        Self::on(MountRig::new(options))
    }

    fn on(rig: MountRig) -> Self {
        let server = rig.serve();
        let one = rig.mount("one", &rig.unix(), &[]);
        let two = rig.mount("two", &rig.tcp(&server), &[]);
        Self { rig, server, one, two, _disk: None }
    }

    fn unmount(self) {
        self.one.unmount();
        self.two.unmount();
    }
}

/// Does something on two mounts of each kind of share.
fn on_each_share(act: impl Fn(&Mounts, &str)) {
    on_each(Mounts::new, act);
}

fn on_each(mounts: impl Fn(&'static str) -> Mounts, act: impl Fn(&Mounts, &str)) {
    if lacks_mounts() {
        return;
    }
    for options in SHARES {
        let mounts = mounts(options);
        act(&mounts, options);
        mounts.unmount();
    }
}

/// Makes calls in a folder beside the share, and in one on a mount of each kind of share; what they return and leave must be the same.
fn compare<T: PartialEq + std::fmt::Debug>(calls: impl Fn(&Path) -> T) -> Option<T> {
    let expected = std::cell::Cell::new(None);
    on_each_share(|mounts, options| {
        let (plain, folder) = (mounts.rig.path("plain"), mounts.one.path("folder"));
        for path in [&plain, &folder] {
            std::fs::create_dir(path).unwrap();
        }
        let below = calls(&plain);
        assert_eq!(calls(&folder), below, "{options}");
        expected.set(Some(below));
    });
    expected.into_inner()
}

/// Names and contents of a folder; directories end with a slash.
fn tree(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            let inner = tree(&entry.path()).into_iter().map(|(inner, text)| (format!("{name}/{inner}"), text));
            found.extend(inner);
            found.push((name + "/", String::new()));
        } else {
            found.push((name, std::fs::read_to_string(entry.path()).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn names_are_exchanged_and_not_replaced_where_a_rename_says_so() {
    let seen = compare(|folder| {
        std::fs::create_dir(folder.join("directory")).unwrap();
        for name in ["a", "b", "directory/inner"] {
            std::fs::write(folder.join(name), name).unwrap();
        }
        let open = File::open(folder.join("a")).unwrap();
        let mut log = Vec::new();
        for (from, to, flags) in [
            ("a", "b", RenameFlags::NOREPLACE),
            ("a", "new", RenameFlags::NOREPLACE),
            ("missing", "b", RenameFlags::NOREPLACE),
            ("directory", "b", RenameFlags::NOREPLACE),
            ("new", "b", RenameFlags::EXCHANGE),
            ("b", "directory", RenameFlags::EXCHANGE),
            ("b", "missing", RenameFlags::EXCHANGE),
            ("missing", "b", RenameFlags::EXCHANGE),
            ("b", "b/inner", RenameFlags::EXCHANGE),
            ("b/inner", "new", RenameFlags::EXCHANGE),
            ("new", "b", RenameFlags::EXCHANGE | RenameFlags::NOREPLACE),
        ] {
            let done = renameat_with(CWD, folder.join(from), CWD, folder.join(to), flags);
            log.push((from, to, done, tree(folder)));
        }
        let mut text = String::new();
        (&open).read_to_string(&mut text).unwrap();
        assert_eq!(text, "a", "the open file is the same, whatever its name");
        log
    });
    let Some(seen) = seen else { return };
    // Some of each kind: the file system below has these flags.
    let results: Vec<_> = seen.iter().map(|(_, _, done, _)| *done).collect();
    assert_eq!(results[..2], [Err(Errno::EXIST), Ok(())]);
    assert_eq!((results[4], results[6], results[10]), (Ok(()), Err(Errno::NOENT), Err(Errno::INVAL)));
}

#[test]
fn an_exchange_of_names_is_seen_by_another_mount_at_once() {
    on_each_share(|mounts, _| {
        let texts = || ["a", "b"].map(|name| std::fs::read_to_string(mounts.two.path(name)).unwrap());
        for name in ["a", "b"] {
            std::fs::write(mounts.one.path(name), name).unwrap();
        }
        for round in 0..20 {
            let expected = if round % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
            // Twice: what is looked at again comes from the cache, if there is one.
            assert_eq!((texts(), texts()), (expected.map(String::from), expected.map(String::from)));
            let [a, b] = ["a", "b"].map(|name| mounts.one.path(name));
            renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
        }
    });
}

/// Each waits for the other's lock: one of them is refused, and the other gets its lock when the first lets go.
#[test]
fn a_circle_of_waits_over_two_mounts_is_refused() {
    on_each_share(|mounts, options| {
        let (send, results) = mpsc::channel();
        let files: Vec<_> = [(&mounts.one, "a", "b"), (&mounts.two, "b", "a")]
            .into_iter()
            .map(|(mount, own, others)| {
                let open = |name| File::options().write(true).create(true).truncate(false).open(mount.path(name));
                let (own, others) = (open(own).unwrap(), open(others).unwrap());
                fcntl_lock(&own, FlockOperation::LockExclusive).unwrap();
                (own, others)
            })
            .collect();
        for (own, others) in files {
            let send = send.clone();
            std::thread::spawn(move || {
                let result = fcntl_lock(&others, FlockOperation::LockExclusive);
                // A POSIX lock goes with the process's first close of the file.
                drop((own, others));
                let _ = send.send(result);
            });
        }
        // The first answer is the refusal: the other waits until the refused one lets go.
        let results = [(); 2].map(|()| results.recv_timeout(LIMIT).expect("an end of the circle"));
        assert!(results.contains(&Err(Errno::DEADLK)) && results.contains(&Ok(())), "{options}: {results:?}");
    });
}

#[test]
fn a_socket_has_its_name_on_a_mount() {
    on_each_share(|mounts, _| {
        let path = mounts.one.path("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"through the name").unwrap();
        drop(client);
        let mut text = String::new();
        listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through the name");
        for seen in [mounts.rig.below().join("socket"), mounts.two.path("socket")] {
            assert!(std::fs::symlink_metadata(&seen).unwrap().file_type().is_socket(), "{}", seen.display());
            // The socket is of the program that bound it, on the mount where it did: elsewhere the name leads to none.
            let refused = UnixStream::connect(&seen).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(Errno::CONNREFUSED.raw_os_error()));
        }
        assert_eq!(UnixListener::bind(&path).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
        std::fs::remove_file(mounts.two.path("socket")).unwrap();
        assert!(UnixStream::connect(&path).is_err());
        drop(listener);
    });
}

/// Open flags of a process's descriptor of a file.
fn flags_of(process: u32, file: &Path) -> Option<u32> {
    let inode = std::fs::metadata(file).unwrap().ino().to_string();
    let entries = std::fs::read_dir(format!("/proc/{process}/fdinfo")).unwrap();
    let infos = entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    let mut flags = infos.filter_map(|info| {
        let of = |key: &str| info.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let flags = u32::from_str_radix(of("flags:")?, 8).ok()?;
        (of("ino:") == Some(inode.as_str()) && flags & OFlags::PATH.bits() == 0).then_some(flags)
    });
    flags.next()
}

#[test]
fn synchronous_writes_are_synchronous_at_the_server() {
    on_each_share(|mounts, options| {
        for (name, asked) in [("plain", OFlags::empty()), ("sync", OFlags::SYNC), ("dsync", OFlags::DSYNC)] {
            let mut open = File::options();
            let file = open.create(true).truncate(false).write(true).custom_flags(asked.bits() as i32);
            let mut file = file.open(mounts.one.path(name)).unwrap();
            file.write_all(b"durable when this returns").unwrap();
            let below = mounts.rig.below().join(name);
            let flags = flags_of(mounts.server.id(), &below).expect("the server has it open");
            assert_eq!(OFlags::from_bits_retain(flags) & OFlags::SYNC, asked, "{options}, {name}: {flags:o}");
        }
    });
}

#[test]
fn attributes_of_security_modules_are_kept() {
    let seen = compare(|folder| {
        let file = folder.join("file");
        std::fs::write(&file, "text").unwrap();
        let mut log = Vec::new();
        let mut value = [0; 64];
        // Effective `cap_net_raw`, in the kernel's second form.
        let capability = [0x0200_0001u32, 1 << 13, 0, 0, 0].map(u32::to_le_bytes).concat();
        for (name, bytes) in [("security.byway", &b"label"[..]), ("security.capability", &capability)] {
            log.push(setxattr(&file, name, bytes, XattrFlags::CREATE).map(|()| Vec::new()));
            log.push(setxattr(&file, name, bytes, XattrFlags::CREATE).map(|()| Vec::new()));
            log.push(getxattr(&file, name, &mut value).map(|len| value[..len].to_vec()));
        }
        // A write takes the rights away.
        File::options().append(true).open(&file).unwrap().write_all(b", changed").unwrap();
        log.push(getxattr(&file, "security.capability", &mut value).map(|len| value[..len].to_vec()));
        log.push(removexattr(&file, "security.byway").map(|()| Vec::new()));
        log.push(removexattr(&file, "security.byway").map(|()| Vec::new()));
        let mut names = [0; 256];
        log.push(listxattr(&file, &mut names).map(|len| names[..len].to_vec()));
        log
    });
    let Some(seen) = seen else { return };
    if seen[0] == Err(Errno::OPNOTSUPP) {
        return skip_this(SkipReason::Machine("the temporary folder's file system has no security attributes"));
    }
    assert_eq!((&seen[1], &seen[2]), (&Err(Errno::EXIST), &Ok(b"label".to_vec())));
    assert_eq!((&seen[6], &seen[7]), (&Err(Errno::NODATA), &Ok(Vec::new())));
}

#[test]
fn room_and_names_are_those_of_the_file_system_below() {
    // Each on a file system of its own, which ends after the mounts and the server.
    let small = |options| {
        let rig = MountRig::new(options);
        let disk = SmallDisk::mount(&rig.below());
        Mounts { _disk: Some(disk), ..Mounts::on(rig) }
    };
    on_each(small, |mounts, options| {
        let seen = |path: &Path| {
            let stat = statvfs(path).unwrap();
            let room = (stat.f_bsize, stat.f_frsize, stat.f_blocks, stat.f_bfree, stat.f_bavail);
            (room, stat.f_files, stat.f_ffree, stat.f_namemax)
        };
        let empty = seen(&mounts.one.at);
        assert_eq!(empty, seen(&mounts.rig.below()), "{options}");
        let file = File::create(mounts.one.path("file")).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
        let full = seen(&mounts.two.at);
        assert_eq!(full, seen(&mounts.rig.below()), "{options}");
        let ((.., before), (.., after)) = (empty.0, full.0);
        assert!(after < before, "{options}: {after} blocks of {before} are left");
    });
}

/// The modes of `fallocate(2)` that Linux passes to a FUSE file system, on a file of 64 KiB; then its size, its room and its bytes.
#[test]
fn room_is_allocated_kept_and_zeroed() {
    let seen = compare(|folder| {
        let path = folder.join("file");
        let mut log = Vec::new();
        for (mode, offset, len) in [
            (FallocateFlags::empty(), 0, 100_000),
            (FallocateFlags::KEEP_SIZE, 65_536, 65_536),
            (FallocateFlags::ZERO_RANGE, 4096, 8192),
            (FallocateFlags::ZERO_RANGE, 61_440, 8192),
            (FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 61_440, 8192),
            (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 8192),
            (FallocateFlags::PUNCH_HOLE, 4096, 8192),
            (FallocateFlags::empty(), 0, 0),
        ] {
            std::fs::write(&path, [7; 65_536]).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            let done = fallocate(&file, mode, offset, len);
            file.sync_all().unwrap();
            let metadata = file.metadata().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let is_zero = |byte: &u8| *byte == 0;
            let zeroes = (bytes.iter().position(is_zero), bytes.iter().rposition(is_zero));
            log.push((mode.bits(), done, metadata.len(), metadata.blocks(), bytes.len(), zeroes));
        }
        log
    });
    let Some(seen) = seen else { return };
    let (_, done, len, blocks, ..) = seen[1];
    assert_eq!((done, len), (Ok(()), 65_536), "the size is kept");
    assert!(blocks >= 2 * 65_536 / 512, "and the room is there: {blocks} blocks");
}

/// These move bytes of a file: Linux does not pass them to a FUSE file system (docs/files.md). Nor does it pass on a request to share
/// extents, which `copy_file_range` may do at the server.
#[test]
fn ranges_are_not_collapsed_or_inserted_or_cloned_on_a_mount() {
    on_each_share(|mounts, _| {
        std::fs::write(mounts.one.path("file"), [7; 65_536]).unwrap();
        let file = File::options().read(true).write(true).open(mounts.one.path("file")).unwrap();
        for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
            assert_eq!(fallocate(&file, mode, 4096, 4096), Err(Errno::OPNOTSUPP));
        }
        let other = File::create(mounts.one.path("clone")).unwrap();
        assert_eq!(rustix::fs::ioctl_ficlone(&other, &file), Err(Errno::OPNOTSUPP));
        assert_eq!(rustix::fs::copy_file_range(&file, None, &other, None, 65_536), Ok(65_536));
        assert!(std::fs::read(mounts.rig.below().join("clone")).unwrap() == [7; 65_536]);
        drop((file, other));
    });
}

/// The next names of a directory, as many as fit, each with the place behind it.
fn next_names(directory: &File, room: usize) -> Vec<(String, u64)> {
    let mut buffer = vec![MaybeUninit::uninit(); room];
    let mut listing = RawDir::new(directory, &mut buffer);
    let mut names = Vec::new();
    // One system call: the next would overwrite what is not read yet.
    while let Some(entry) = listing.next().map(Result::unwrap) {
        names.push((entry.file_name().to_str().unwrap().to_owned(), entry.next_entry_cookie()));
        if listing.is_buffer_empty() {
            break;
        }
    }
    names.retain(|(name, _)| name != "." && name != "..");
    names
}

/// Entries that stay are listed once, whatever is made, renamed and removed beside them meanwhile, and a place in a directory stays one.
#[test]
fn a_directory_may_change_while_it_is_listed() {
    const STAY: usize = 600;
    let seen = compare(|folder| {
        let kinds = ["stays", "goes"];
        for number in 0..STAY {
            for kind in kinds {
                File::create(folder.join(format!("{kind}-with-a-long-name-{number:04}"))).unwrap();
            }
        }
        let directory: File = openat(CWD, folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap().into();
        let (mut seen, mut places) = (Vec::new(), Vec::new());
        for turn in 0.. {
            let names = next_names(&directory, 1500);
            if names.is_empty() {
                break;
            }
            // One that was listed goes, one that may not be listed yet too, and others come.
            for (name, _) in names.iter().filter(|(name, _)| name.starts_with("goes")).take(1) {
                std::fs::remove_file(folder.join(name)).unwrap();
            }
            let _ = std::fs::remove_file(folder.join(format!("goes-with-a-long-name-{:04}", STAY - 1 - turn)));
            File::create(folder.join(format!("comes-{turn}"))).unwrap();
            std::fs::rename(folder.join(format!("comes-{turn}")), folder.join(format!("came-{turn}"))).unwrap();
            places.extend(names.last().map(|(_, place)| *place));
            seen.extend(names.into_iter().map(|(name, _)| name));
        }
        let stays = |name: &&String| name.starts_with("stays");
        let mut listed: Vec<_> = seen.iter().filter(stays).cloned().collect();
        listed.sort();
        let count = listed.len();
        listed.dedup();
        assert_eq!((listed.len(), count), (STAY, STAY), "each once");
        let mut all = seen.clone();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), seen.len(), "no entry is listed twice");
        // From a place in the middle on, the same entries come again.
        let middle = places.len() / 2;
        seek(&directory, SeekFrom::Start(places[middle])).unwrap();
        let mut again = Vec::new();
        until(Instant::now() + LIMIT, "the end of the listing", || {
            let names = next_names(&directory, 1500);
            again.extend(names.iter().map(|(name, _)| name.clone()).filter(|name| name.starts_with("stays")));
            names.is_empty().then_some(())
        });
        let from = seen.iter().position(|name| Some(name) == again.first()).unwrap();
        let expected: Vec<_> = seen[from..].iter().filter(stays).cloned().collect();
        assert_eq!(again, expected);
        middle > 5
    });
    assert_ne!(seen, Some(false), "the listing came in parts");
}
