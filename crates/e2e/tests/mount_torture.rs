//! Mounts that cache, under changes of all kinds at the same moment: none shows old state, and no lock is held twice.
//!
//! 10 s each; with `BYWAY_LONG=1` 20 minutes, or as many seconds as `BYWAY_TORTURE_SECONDS` says.

use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use byway_e2e::{
    LIMIT, Mount, MountRig as Rig, NEAR, Networks, Side, SkipReason, binary, find_tool, lacks_mounts, until,
};

/// How long it goes on.
fn lasts() -> Duration {
    let seconds = std::env::var("BYWAY_TORTURE_SECONDS").ok().map(|text| text.parse().expect("a number of seconds"));
    let default = if std::env::var_os("BYWAY_LONG").is_some() { 1200 } else { 10 };
    Duration::from_secs(seconds.unwrap_or(default))
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

    /// Checks what a look has seen; it is told how many were done.
    fn look(&self, what: &str, see: impl FnOnce(u64) -> Vec<u64>) {
        let done = self.done.load(Ordering::SeqCst);
        let seen = see(done);
        let begun = self.begun.load(Ordering::SeqCst);
        for one in seen {
            assert!((done..=begun).contains(&one), "{what}: saw {one} after {done} were done, of {begun}");
        }
    }
}

/// Bytes of a file that is rewritten.
const LEN: usize = 20_000;
/// Lines of a log, after which the next one begins.
const LINES: u64 = 10_000;

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

/// The changes of a round, each with a unique value, by the mounts in turn, and by all at once.
#[derive(Default)]
struct Torture {
    stop: AtomicBool,
    written: Progress,
    mapped: Progress,
    size: Progress,
    replaced: Progress,
    appended: Progress,
    listed: Progress,
    /// Logs to which two mounts append at the same moment.
    at_once: [Progress; 2],
    /// Programs that have the lock.
    inside: AtomicU64,
    locked: AtomicU64,
    looks: AtomicU64,
}

/// The file with a line of a log.
fn log_path(at: &Path, log: &str, line: u64) -> PathBuf {
    at.join(format!("{log}{}", line / LINES))
}

/// Appends a line; a letter says whose it is.
fn append(mount: &Mount, log: &str, letter: char, number: u64) {
    let path = log_path(&mount.at, log, number - 1);
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    file.write_all(format!("{letter}{number}\n").as_bytes()).unwrap();
}

/// The last line of a letter in the log that follows so many lines; those before must be there, in order.
fn last_line(mount: &Mount, log: &str, letter: char, done: u64) -> u64 {
    let text = std::fs::read_to_string(log_path(&mount.at, log, done)).unwrap_or_default();
    let first = done / LINES * LINES;
    let own = text.lines().filter(|line| line.starts_with(letter));
    let mut last = first;
    for line in own {
        last += 1;
        assert_eq!(line, format!("{letter}{last}"), "a line of a log");
    }
    last
}

/// Ends all when its thread has ended, also by a failure.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Torture {
    fn prepare(&self, below: &Path) {
        std::fs::create_dir(below.join("listed")).unwrap();
        for (name, len) in
            [("written", LEN), ("mapped", LEN), ("replaced", LEN), ("size", 0), ("listed/0", 0), ("locked", 8)]
        {
            std::fs::write(below.join(name), vec![0; len]).unwrap();
        }
    }

    fn run(&self, act: impl FnOnce(&Self)) {
        let _stop = Stop(&self.stop);
        act(self);
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn change(&self, progress: &Progress, mounts: [&Mount; 2], act: impl Fn(&Mount, u64)) {
        for number in (1..).take_while(|_| self.goes_on()) {
            progress.change(number, || act(mounts[number as usize / 4 % 2], number));
            // So that the readers have something to keep.
            std::thread::park_timeout(Duration::from_millis(number % 5 * 2));
        }
    }

    /// Counts in a file under a lock that one program alone may have.
    fn lock(&self, mount: &Mount) {
        let mut number = [0; 8];
        while self.goes_on() {
            let file = File::options().read(true).write(true).open(mount.path("locked")).unwrap();
            // Not by a wait without end: a failure elsewhere may leave the lock with its holder.
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    std::thread::park_timeout(Duration::from_millis(1));
                    continue;
                }
                Err(TryLockError::Error(error)) => panic!("{error}"),
            }
            assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two programs have the lock");
            file.read_exact_at(&mut number, 0).unwrap();
            let next = u64::from_le_bytes(number) + 1;
            assert_eq!(self.locked.fetch_add(1, Ordering::SeqCst) + 1, next, "a change under the lock is lost");
            file.write_all_at(&next.to_le_bytes(), 0).unwrap();
            self.inside.fetch_sub(1, Ordering::SeqCst);
            file.unlock().unwrap();
            std::thread::park_timeout(Duration::from_millis(next % 3));
        }
    }

    fn look(&self, mount: &Mount) {
        let open = File::open(mount.path("written")).unwrap();
        let read = |name: &str| numbers(&std::fs::read(mount.path(name)).unwrap());
        while self.goes_on() {
            self.written.look("a file that is read again", |_| {
                let mut bytes = vec![0; LEN];
                open.read_exact_at(&mut bytes, 0).unwrap();
                numbers(&bytes)
            });
            self.written.look("a file that is opened and read", |_| read("written"));
            self.mapped.look("a file that is mapped elsewhere", |_| read("mapped"));
            self.size.look("a size", |_| vec![std::fs::metadata(mount.path("size")).unwrap().len()]);
            self.replaced.look("a file that others take the name of", |_| read("replaced"));
            self.appended.look("a log", |done| vec![last_line(mount, "appended", 'x', done)]);
            for (progress, letter) in self.at_once.iter().zip(['a', 'b']) {
                progress.look("a log of two writers", |done| vec![last_line(mount, "at-once", letter, done)]);
            }
            let done = self.listed.done.load(Ordering::SeqCst);
            let names: Vec<_> =
                std::fs::read_dir(mount.path("listed")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            if self.listed.begun.load(Ordering::SeqCst) == done {
                assert_eq!(names, [done.to_string().as_str()], "a listing");
            }
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All of it, on two mounts, until the time is over.
    fn go_on(&self, mounts: [&Mount; 2]) {
        let write = |name: &'static str| {
            move |mount: &Mount, number: u64| {
                let file = File::options().write(true).open(mount.path(name)).unwrap();
                file.write_all_at(&number.to_le_bytes().repeat(LEN / 8), 0).unwrap();
            }
        };
        let resize = |mount: &Mount, number: u64| {
            File::options().write(true).open(mount.path("size")).unwrap().set_len(number).unwrap();
        };
        let replace = |mount: &Mount, number: u64| {
            std::fs::write(mount.path("new"), number.to_le_bytes().repeat(LEN / 8)).unwrap();
            std::fs::rename(mount.path("new"), mount.path("replaced")).unwrap();
        };
        let log = |mount: &Mount, number: u64| append(mount, "appended", 'x', number);
        let list = |mount: &Mount, number: u64| {
            let (from, to) = (format!("listed/{}", number - 1), format!("listed/{number}"));
            std::fs::rename(mount.path(&from), mount.path(&to)).unwrap();
        };
        std::thread::scope(|scope| {
            let _stop = Stop(&self.stop);
            scope.spawn(move || self.run(|all| all.change(&all.written, mounts, write("written"))));
            scope.spawn(move || self.run(|all| all.change(&all.mapped, mounts, write("mapped"))));
            scope.spawn(move || self.run(|all| all.change(&all.size, mounts, resize)));
            scope.spawn(move || self.run(|all| all.change(&all.replaced, mounts, replace)));
            scope.spawn(move || self.run(|all| all.change(&all.appended, mounts, log)));
            scope.spawn(move || self.run(|all| all.change(&all.listed, mounts, list)));
            for (place, letter) in ['a', 'b'].into_iter().enumerate() {
                let line = move |mount: &Mount, number| append(mount, "at-once", letter, number);
                scope.spawn(move || self.run(|all| all.change(&all.at_once[place], [mounts[place]; 2], line)));
            }
            for mount in mounts {
                scope.spawn(move || self.run(|all| all.lock(mount)));
                scope.spawn(move || self.run(|all| all.look(mount)));
            }
            let end = Instant::now() + lasts();
            while Instant::now() < end && self.goes_on() {
                std::thread::park_timeout(Duration::from_millis(100));
            }
        });
        let changes = [&self.written, &self.mapped, &self.size, &self.replaced, &self.appended, &self.listed];
        let changes = changes.map(|progress| progress.done.load(Ordering::Relaxed));
        let at_once = self.at_once.each_ref().map(|progress| progress.done.load(Ordering::Relaxed));
        println!("changes: {changes:?}, {at_once:?}, locks: {:?}, looks: {:?}", self.locked, self.looks);
        assert!(changes.iter().chain(&at_once).all(|changes| *changes > 10));
        assert!([&self.locked, &self.looks].iter().all(|count| count.load(Ordering::Relaxed) > 10));
    }
}

/// A program that maps a file and reads it again and again.
struct MappedReader(Child, BufReader<ChildStdout>);

impl MappedReader {
    fn start(python: &Path, mount: &Mount) -> Self {
        let script = format!("{}/tests/mount_torture/mapped.py", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(python);
        command.arg(script).arg(mount.path("mapped")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        // Else all may be written before it looks, on a busy machine.
        said.read_line(&mut String::new()).unwrap();
        Self(child, said)
    }

    /// Tells it the last number that was written, and waits until it sees that.
    fn finish(&mut self, last: u64) {
        let _ = writeln!(self.0.stdin.take().unwrap(), "{last}");
        let status =
            until(Instant::now() + LIMIT * 2, "the last number in mapped memory", || self.0.try_wait().unwrap());
        assert!(status.success(), "a program that maps the file");
        let mut said = String::new();
        self.1.read_to_string(&mut said).unwrap();
        println!("looks and states of a mapped file: {}", said.trim());
        let states = said.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        assert!(states > 2, "it has seen writes: {said}");
    }
}

impl Drop for MappedReader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Tortures two mounts, and unmounts them.
fn torture(below: &Path, mounts: [Mount; 2]) {
    let torture = Torture::default();
    torture.prepare(below);
    for mount in &mounts {
        mount.until_free("a free second read", || drop(std::fs::read(mount.path("written")).unwrap()));
    }
    let python = find_tool("python3");
    if python.is_none() {
        byway_skip::skip_part_of_this(SkipReason::MissingTool("python3"));
    }
    let mut readers: Vec<_> =
        mounts.iter().filter_map(|mount| Some(MappedReader::start(python.as_deref()?, mount))).collect();
    torture.go_on(mounts.each_ref());
    for reader in &mut readers {
        reader.finish(torture.mapped.done.load(Ordering::Relaxed));
    }
    mounts.into_iter().for_each(Mount::unmount);
}

#[test]
fn two_mounts_that_cache_never_show_each_other_old_state() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let server = rig.serve();
    let one = rig.mount("one", &rig.unix(), &[]);
    let two = rig.mount("two", &rig.tcp(&server), &[]);
    torture(&rig.below(), [one, two]);
}

/// Each has a network of its own, as two machines have.
#[test]
fn two_mounts_in_two_networks_never_show_each_other_old_state() {
    if lacks_mounts() {
        return;
    }
    let Some(networks) = Networks::new("two_mounts_in_two_networks_never_show_each_other_old_state") else { return };
    let rig = Rig::new(",users=squash:0,writers=exclusive");
    let more = ["--allow", "10.77.0.0/24", "--insecure"];
    let server = rig.serve_by(networks.command(Side::Near, &binary()), &format!("tcp://{NEAR}:0"), &more);
    let uri = format!("byway://{NEAR}:{}/share", server.port("byway"));
    let near = rig.mount_by(networks.command(Side::Near, &binary()), "near", &uri, &[]);
    let far = rig.mount_by(networks.command(Side::Far, &binary()), "far", &uri, &[]);
    torture(&rig.below(), [near, far]);
}
