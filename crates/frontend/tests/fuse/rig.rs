//! Mounts that end with their test.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_frontend::fuse::abi::open;
use byway_frontend::fuse::mount::{MountOptions, mount, unmount};
use byway_frontend::fuse::session::Wishes;
use byway_frontend::fuse::{Driver, Filesystem};
use byway_skip::{SkipReason, skip_this};

use crate::passthrough::Passthrough;

/// How long anything here may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Threads that read the requests of a mount.
pub const THREADS: usize = 3;

/// Whether this machine mounts nothing, which is said aloud.
pub fn lacks_mounts() -> bool {
    let lacks = !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists();
    if lacks {
        skip_this(SkipReason::Machine("needs root and /dev/fuse"));
    }
    lacks
}

/// Looks until there is something.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 });
    }
}

/// Runs a program, which must succeed.
pub fn run(program: &str, arguments: &[impl AsRef<OsStr>]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&said));
}

/// Takes a mount away in the end, if it is there.
pub struct Unmounted(pub PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, true);
    }
}

/// Mounts a file system and waits until it works.
pub fn start(at: &Path, files: Arc<dyn Filesystem>, wishes: Wishes) -> Driver {
    let options = MountOptions { source: "byway-test".into(), ..MountOptions::default() };
    let driver = Driver::start(mount(&options, at).unwrap(), files, wishes, THREADS).unwrap();
    assert!(driver.wait_until_ready(LIMIT).is_some());
    driver
}

/// A mount and what it stands on.
pub struct Mount {
    // Fields are dropped in this order.
    guard: Unmounted,
    driver: Option<Driver>,
    _at: tempfile::TempDir,
    below: tempfile::TempDir,
}

impl Mount {
    /// A folder, passed through, whose OPENs are answered with these flags.
    pub fn passthrough(open_flags: u32) -> Option<Self> {
        if lacks_mounts() {
            return None;
        }
        let below = tempfile::tempdir().unwrap();
        // A process that is killed must not wait for a FLUSH that it would have to answer itself.
        let files = Passthrough::new(below.path()).unwrap().with_open_flags(open_flags | open::NO_FLUSH);
        Some(Self::over(below, Arc::new(files), Wishes::default()))
    }

    /// A file system of the test's own.
    pub fn of(files: Arc<dyn Filesystem>, wishes: Wishes) -> Self {
        Self::over(tempfile::tempdir().unwrap(), files, wishes)
    }

    fn over(below: tempfile::TempDir, files: Arc<dyn Filesystem>, wishes: Wishes) -> Self {
        let at = tempfile::tempdir().unwrap();
        let guard = Unmounted(at.path().to_owned());
        let driver = Some(start(at.path(), files, wishes));
        Self { guard, driver, _at: at, below }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.guard.0
    }

    /// What is below.
    pub fn below(&self) -> &Path {
        self.below.path()
    }

    /// The threads.
    pub fn driver(&self) -> &Driver {
        self.driver.as_ref().unwrap()
    }

    /// Waits for the end of the threads, at most [`LIMIT`].
    pub fn wait_for_the_end(mut self) {
        let driver = self.driver.take().unwrap();
        let waiting = std::thread::spawn(move || driver.wait());
        until("the driver to end", || waiting.is_finished().then_some(()));
    }
}
