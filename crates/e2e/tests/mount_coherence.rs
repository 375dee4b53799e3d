//! Mounts that cache: repeated looks and reads send no message, and a mount sees the changes of another one at once, whatever its kernel
//! has cached.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use byway_e2e::{LIMIT, MountRig as Rig, SkipReason, find_tool, lacks_mounts, noise, run_well};

/// Reads a file as programs do that map nothing.
fn bytes_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn what_a_mount_knows_costs_no_message() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let bytes = noise(5_000_000, 1);
    std::fs::write(rig.below().join("file"), &bytes).unwrap();
    std::fs::create_dir(rig.below().join("folder")).unwrap();
    for number in 0..100 {
        std::fs::write(rig.below().join(format!("folder/{number}")), format!("{number}")).unwrap();
    }
    let server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let two = rig.mount("two", &rig.tcp(&server), &[]);

    one.until_free("a free second read", || assert!(bytes_of(&one.path("file")) == bytes));
    one.until_free("a free second stat", || {
        assert_eq!(std::fs::metadata(one.path("file")).unwrap().len(), 5_000_000);
    });
    one.until_free("a free second listing", || {
        assert_eq!(std::fs::read_dir(one.path("folder")).unwrap().count(), 100);
    });
    one.until_free("a free second look at what is not there", || assert!(!one.path("missing").exists()));
    one.until_free("free small files", || {
        (0..100).for_each(|number| {
            assert_eq!(bytes_of(&one.path(&format!("folder/{number}"))), format!("{number}").as_bytes());
        });
    });
    let path = one.at.display();
    let listed = |script: String| run_well(Path::new("/bin/sh"), &["-c", &script]);
    one.until_free("a free ls -lR", || assert!(listed(format!("ls -lR {path}")).len() > 1000));

    // What the other changes is asked for again, once.
    std::fs::write(two.path("folder/7"), "seven").unwrap();
    std::fs::rename(two.path("folder/8"), two.path("folder/eight")).unwrap();
    assert_eq!(bytes_of(&one.path("folder/7")), b"seven");
    assert!(!one.path("folder/8").exists() && one.path("folder/eight").exists());
    one.until_free("a free listing again", || {
        assert_eq!(std::fs::read_dir(one.path("folder")).unwrap().count(), 100);
    });
    one.unmount();
    two.unmount();
}

#[test]
fn a_mount_has_leases_as_soon_as_it_is_ready() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    std::fs::write(rig.below().join("file"), "content").unwrap();
    let _server = rig.serve();
    for number in 0..5 {
        let one = rig.mount(&format!("mount-{number}"), &rig.unix(), &[]);
        let size = || std::fs::metadata(one.path("file")).unwrap().len();
        assert_eq!(size(), 7);
        let before = one.messages();
        assert_eq!(size(), 7);
        assert_eq!(one.messages(), before, "mount {number} asks again for what it has just been told");
        one.unmount();
    }
}

#[test]
fn a_short_file_is_read_with_the_call_that_opens_it() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    for number in 0..100 {
        std::fs::write(rig.below().join(format!("{number}")), format!("{number}")).unwrap();
    }
    let _server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let before = one.messages();
    for number in 0..100 {
        assert_eq!(bytes_of(&one.path(&format!("{number}"))), format!("{number}").as_bytes());
    }
    let messages = one.messages() - before;
    assert!(messages <= 320, "{messages} messages for 100 files: a look-up, an open and a close for each");
    one.unmount();
}

#[test]
fn a_file_that_is_read_from_start_to_end_is_asked_for_in_large_pieces() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    std::fs::write(rig.below().join("file"), noise(16 << 20, 3)).unwrap();
    let _server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let before = one.messages();
    let mut file = File::open(one.path("file")).unwrap();
    assert_eq!(std::io::copy(&mut file, &mut std::io::sink()).unwrap(), 16 << 20);
    drop(file);
    let messages = one.messages() - before;
    assert!(
        messages <= 40,
        "{messages} messages for 16 MiB, of 128 KiB each if the kernel does not read ahead further"
    );
    one.unmount();
}

#[test]
fn git_status_on_a_warm_tree_costs_no_message() {
    if lacks_mounts() {
        return;
    }
    if find_tool("git").is_none() {
        return byway_skip::skip_this(SkipReason::MissingTool("git"));
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let _server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let shell = |script: &str| {
        let settings = "export GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent GIT_OPTIONAL_LOCKS=0";
        run_well(Path::new("/bin/sh"), &["-c", &format!("set -e; {settings}; cd {}; {script}", one.at.display())])
    };
    shell(
        "git -c init.defaultBranch=main init -q repo; cd repo; git config user.email a@b; git config user.name a; git config maintenance.auto false; \
         for d in 1 2 3; do mkdir $d; for n in 1 2 3 4 5; do echo $d $n > $d/$n; done; done; git add .; git commit -qm all",
    );
    one.until_free("a free git status", || assert_eq!(shell("cd repo; git status --short"), ""));
    one.unmount();
}

#[test]
fn a_file_that_was_opened_without_a_message_outlives_its_name() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let two = rig.mount("two", &rig.tcp(&server), &[]);
    let bytes = noise(100_000, 2);
    for remover in [&two, &one] {
        std::fs::write(two.path("file"), &bytes).unwrap();
        // Opened, and not read: the kernel has no pages.
        one.until_free("a free open", || drop(File::open(one.path("file")).unwrap()));
        let before = one.messages();
        let open = File::open(one.path("file")).unwrap();
        assert_eq!(one.messages(), before);
        std::fs::remove_file(remover.path("file")).unwrap();
        let mut read = vec![0; bytes.len()];
        open.read_exact_at(&mut read, 0).unwrap();
        assert!(read == bytes);
    }
    one.unmount();
    two.unmount();
}

/// Where a page of a file begins with a zero. A local file system shows zeroes at most behind an earlier end of the file.
fn page_of_zeroes(bytes: &[u8]) -> Option<usize> {
    bytes.chunks(4096).position(|page| page[0] == 0)
}

/// Rewrites a file in different ways and lengths, each time with another byte that is not zero.
fn rewrite(path: &Path, number: usize) {
    let (len, byte) = (1 + number * 7919 % 20_000, (1 + number % 255) as u8);
    let file = File::options().write(true).truncate(number.is_multiple_of(2)).open(path).unwrap();
    if !number.is_multiple_of(2) {
        file.set_len(0).unwrap();
    }
    file.write_all_at(&vec![byte; len], 0).unwrap();
}

#[test]
fn readers_beside_a_program_that_rewrites_a_file_see_no_zeroes() {
    if lacks_mounts() {
        return;
    }
    const REWRITES: usize = 1500;
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let _server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &[]);
    let path = &mount.path("file");
    std::fs::write(path, "first").unwrap();
    mount.until_free("a cached file", || _ = bytes_of(path));
    let (done, reads) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let read = || {
        while !done.load(Ordering::Relaxed) {
            let bytes = bytes_of(path);
            let page = page_of_zeroes(&bytes);
            assert_eq!(page, None, "the page that begins with zeroes, of {} bytes", bytes.len());
            reads.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        let readers = [scope.spawn(read), scope.spawn(read), scope.spawn(read)];
        let end = Instant::now() + LIMIT;
        for number in 1..=REWRITES {
            if Instant::now() > end || readers.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                break;
            }
            rewrite(path, number);
        }
        done.store(true, Ordering::Relaxed);
    });
    println!("{} reads", reads.load(Ordering::Relaxed));
    mount.unmount();
}
