//! Mounts that cache: repeated looks and reads send no message, and a mount sees the changes of another one at once, whatever its kernel
//! has cached.
//!
//! 10 s of changes and looks; 10 minutes with `BYWAY_LONG=1`.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Mount, MountRig as Rig, SkipReason, find_tool, lacks_mounts, noise, run_well, until};

/// Messages that a mount has sent to its server, but for those that renew leases.
fn messages(mount: &Mount) -> u64 {
    let mut value = [0; 32];
    let len = rustix::fs::getxattr(&mount.at, "byway.messages", &mut value[..]).unwrap();
    std::str::from_utf8(&value[..len]).unwrap().parse().unwrap()
}

/// Does something until it costs no message: a mount gets leases once its call for recalls has reached the server.
fn until_free(mount: &Mount, what: &str, mut act: impl FnMut()) {
    until(Instant::now() + LIMIT, what, || {
        act();
        let before = messages(mount);
        act();
        (messages(mount) == before).then_some(())
    });
}

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
    let two = rig.mount("two", &format!("byway://127.0.0.1:{}/share", server.port("byway")), &[]);

    until_free(&one, "a free second read", || assert!(bytes_of(&one.path("file")) == bytes));
    until_free(&one, "a free second stat", || {
        assert_eq!(std::fs::metadata(one.path("file")).unwrap().len(), 5_000_000);
    });
    until_free(&one, "a free second listing", || {
        assert_eq!(std::fs::read_dir(one.path("folder")).unwrap().count(), 100);
    });
    until_free(&one, "a free second look at what is not there", || assert!(!one.path("missing").exists()));
    until_free(&one, "free small files", || {
        (0..100).for_each(|number| {
            assert_eq!(bytes_of(&one.path(&format!("folder/{number}"))), format!("{number}").as_bytes());
        });
    });
    let path = one.at.display();
    let listed = |script: String| run_well(Path::new("/bin/sh"), &["-c", &script]);
    until_free(&one, "a free ls -lR", || assert!(listed(format!("ls -lR {path}")).len() > 1000));

    // What the other changes is asked for again, once.
    std::fs::write(two.path("folder/7"), "seven").unwrap();
    std::fs::rename(two.path("folder/8"), two.path("folder/eight")).unwrap();
    assert_eq!(bytes_of(&one.path("folder/7")), b"seven");
    assert!(!one.path("folder/8").exists() && one.path("folder/eight").exists());
    until_free(&one, "a free listing again", || {
        assert_eq!(std::fs::read_dir(one.path("folder")).unwrap().count(), 100);
    });
    one.unmount();
    two.unmount();
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
    until_free(&one, "a lease", || assert_eq!(std::fs::metadata(one.path("file")).unwrap().len(), 16 << 20));
    let before = messages(&one);
    let mut file = File::open(one.path("file")).unwrap();
    assert_eq!(std::io::copy(&mut file, &mut std::io::sink()).unwrap(), 16 << 20);
    drop(file);
    let messages = messages(&one) - before;
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
        "git -c init.defaultBranch=main init -q repo; cd repo; git config user.email a@b; git config user.name a; \
         for d in 1 2 3; do mkdir $d; for n in 1 2 3 4 5; do echo $d $n > $d/$n; done; done; git add .; git commit -qm all",
    );
    until_free(&one, "a free git status", || assert_eq!(shell("cd repo; git status --short"), ""));
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
    let two = rig.mount("two", &format!("byway://127.0.0.1:{}/share", server.port("byway")), &[]);
    let bytes = noise(100_000, 2);
    for remover in [&two, &one] {
        std::fs::write(two.path("file"), &bytes).unwrap();
        // Opened, and not read: the kernel has no pages.
        until_free(&one, "a free open", || drop(File::open(one.path("file")).unwrap()));
        let before = messages(&one);
        let open = File::open(one.path("file")).unwrap();
        assert_eq!(messages(&one), before);
        std::fs::remove_file(remover.path("file")).unwrap();
        let mut read = vec![0; bytes.len()];
        open.read_exact_at(&mut read, 0).unwrap();
        assert!(read == bytes);
    }
    one.unmount();
    two.unmount();
}

/// What a writer has begun and done: a look that begins when `done` is so many and ends when `begun` is sees one of these.
#[derive(Default)]
struct Progress {
    begun: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    fn change(&self, number: u64, act: impl FnOnce()) {
        self.begun.store(number, Ordering::SeqCst);
        act();
        self.done.store(number, Ordering::SeqCst);
    }

    /// Checks what a look has seen.
    fn look(&self, what: &str, see: impl FnOnce() -> Vec<u64>) {
        let done = self.done.load(Ordering::SeqCst);
        let seen = see();
        let begun = self.begun.load(Ordering::SeqCst);
        for one in seen {
            assert!((done..=begun).contains(&one), "{what}: saw {one} after {done} were done, of {begun}");
        }
    }
}

const LEN: usize = 20_000;

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

/// The changes of a round, each with a unique value, by two mounts in turn.
#[derive(Default)]
struct Torture {
    stop: AtomicBool,
    written: Progress,
    size: Progress,
    replaced: Progress,
    appended: Progress,
    listed: Progress,
    looks: AtomicU64,
}

impl Torture {
    fn prepare(&self, below: &Path) {
        for name in ["written", "size", "replaced", "appended", "listed/0"] {
            let path = below.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, []).unwrap();
        }
        std::fs::write(below.join("written"), [0; LEN]).unwrap();
        std::fs::write(below.join("replaced"), [0; LEN]).unwrap();
    }

    /// Does something until the end; a failure ends all.
    fn run(&self, act: impl FnOnce(&Self)) {
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&self.stop);
        act(self);
    }

    fn change(&self, progress: &Progress, mounts: [&Mount; 2], act: impl Fn(&Mount, u64)) {
        for number in 1.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            progress.change(number, || act(mounts[number as usize / 4 % 2], number));
            // So that the readers have something to keep.
            std::thread::park_timeout(Duration::from_millis(number % 5 * 2));
        }
    }

    fn look(&self, mount: &Mount) {
        let open = File::open(mount.path("written")).unwrap();
        while !self.stop.load(Ordering::Relaxed) {
            self.written.look("a file that is read again", || {
                let mut bytes = vec![0; LEN];
                open.read_exact_at(&mut bytes, 0).unwrap();
                numbers(&bytes)
            });
            self.written.look("a file that is opened and read", || numbers(&bytes_of(&mount.path("written"))));
            self.size.look("a size", || vec![std::fs::metadata(mount.path("size")).unwrap().len()]);
            self.replaced.look("a file that others take the name of", || numbers(&bytes_of(&mount.path("replaced"))));
            self.appended.look("a log", || {
                let log = String::from_utf8(bytes_of(&mount.path("appended"))).unwrap();
                let wrong = log.lines().enumerate().find(|(at, line)| *line != format!("{}", at + 1));
                assert_eq!(wrong, None, "a line of a log");
                vec![log.lines().count() as u64]
            });
            let done = self.listed.done.load(Ordering::SeqCst);
            let names: Vec<_> =
                std::fs::read_dir(mount.path("listed")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            if self.listed.begun.load(Ordering::SeqCst) == done {
                assert_eq!(names, [done.to_string().as_str()], "a listing");
            }
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn two_mounts_that_cache_never_show_each_other_old_state() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let torture = Torture::default();
    torture.prepare(&rig.below());
    let server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let two = rig.mount("two", &format!("byway://127.0.0.1:{}/share", server.port("byway")), &[]);
    let mounts = [&one, &two];
    for mount in mounts {
        until_free(mount, "leases", || _ = bytes_of(&mount.path("written")));
    }
    let write = |mount: &Mount, number: u64| {
        let file = File::options().write(true).open(mount.path("written")).unwrap();
        file.write_all_at(&number.to_le_bytes().repeat(LEN / 8), 0).unwrap();
    };
    let resize = |mount: &Mount, number: u64| {
        File::options().write(true).open(mount.path("size")).unwrap().set_len(number).unwrap();
    };
    let replace = |mount: &Mount, number: u64| {
        std::fs::write(mount.path("new"), number.to_le_bytes().repeat(LEN / 8)).unwrap();
        std::fs::rename(mount.path("new"), mount.path("replaced")).unwrap();
    };
    let append = |mount: &Mount, number: u64| {
        let mut log = File::options().append(true).open(mount.path("appended")).unwrap();
        log.write_all(format!("{number}\n").as_bytes()).unwrap();
    };
    let list = |mount: &Mount, number: u64| {
        let (from, to) = (format!("listed/{}", number - 1), format!("listed/{number}"));
        std::fs::rename(mount.path(&from), mount.path(&to)).unwrap();
    };
    std::thread::scope(|scope| {
        let torture = &torture;
        scope.spawn(move || torture.run(|all| all.change(&all.written, mounts, write)));
        scope.spawn(move || torture.run(|all| all.change(&all.size, mounts, resize)));
        scope.spawn(move || torture.run(|all| all.change(&all.replaced, mounts, replace)));
        scope.spawn(move || torture.run(|all| all.change(&all.appended, mounts, append)));
        scope.spawn(move || torture.run(|all| all.change(&all.listed, mounts, list)));
        for mount in mounts {
            scope.spawn(move || torture.run(|all| all.look(mount)));
        }
        let lasts = Duration::from_secs(if std::env::var_os("BYWAY_LONG").is_some() { 600 } else { 10 });
        let end = Instant::now() + lasts;
        while Instant::now() < end && !torture.stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(100));
        }
        torture.stop.store(true, Ordering::Relaxed);
    });
    let changes = [&torture.written, &torture.size, &torture.replaced, &torture.appended, &torture.listed];
    let changes = changes.map(|progress| progress.done.load(Ordering::Relaxed));
    println!("changes: {changes:?}, looks: {:?}", torture.looks);
    assert!(changes.iter().all(|changes| *changes > 10) && torture.looks.load(Ordering::Relaxed) > 10);
    one.unmount();
    two.unmount();
}
