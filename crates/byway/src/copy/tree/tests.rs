//! Copies between two folders of this machine: what does not depend on a server.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;

use super::local::LocalDirectory;
use super::run::{Copied, Options, TEMPORARY};
use super::side::Directory;
use super::*;

const OPTIONS: Options = Options { threads: 4, request_bytes: 64 << 10, verify: false, overwrite: false };

struct Rig {
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let rig = Self { folder: tempfile::tempdir().unwrap() };
        for name in ["from", "to"] {
            std::fs::create_dir(rig.path(name)).unwrap();
        }
        rig
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn copy(&self, options: Options) -> Copied {
        self.copy_telling(options, &mut |_| ControlFlow::Continue(()))
    }

    fn copy_telling(&self, options: Options, tell: &mut dyn FnMut(&Run) -> ControlFlow<()>) -> Copied {
        self.copy_to("to", options, tell)
    }

    fn copy_to(&self, to: &str, options: Options, tell: &mut dyn FnMut(&Run) -> ControlFlow<()>) -> Copied {
        let run = Run::new(options, ["from", to].map(str::to_owned)).unwrap();
        let open = |name| -> Arc<dyn Directory> { Arc::new(LocalDirectory::open(&self.path(name)).unwrap()) };
        let (from, to) = (open("from"), open(to));
        run.remove_temporaries(&*to, b"").unwrap();
        let facts = from.facts().unwrap();
        let top = Folder {
            from,
            to,
            path: Vec::new(),
            is_single: false,
            depth: 0,
            was_there: true,
            facts: Some(facts),
            parent: None,
            only: None,
            pending: AtomicUsize::new(1),
        };
        copy(&run, Source::Tree(Arc::new(top)), &mut || tell(&run)).unwrap();
        run.copied()
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_tree_is_copied_with_its_attributes_and_a_second_time_passed_over() {
    let rig = Rig::new();
    std::fs::create_dir_all(rig.path("from/a/b")).unwrap();
    rig.write("from/a/b/file", "bytes");
    rig.write("from/empty", "");
    std::fs::set_permissions(rig.path("from/a/b/file"), Permissions::from_mode(0o4751)).unwrap();
    symlink("../nowhere", rig.path("from/a/link")).unwrap();
    std::fs::set_permissions(rig.path("from/a/b"), Permissions::from_mode(0o555)).unwrap();
    let copied = rig.copy(OPTIONS);
    let expected = Copied { files: 2, directories: 3, links: 1, bytes: 5, ..Copied::default() };
    assert_eq!(copied, expected);
    assert_eq!(rig.read("to/a/b/file"), b"bytes");
    assert_eq!(std::fs::read_link(rig.path("to/a/link")).unwrap(), Path::new("../nowhere"));
    for name in ["a", "a/b", "a/b/file", "a/link", "empty"] {
        let [one, other] = ["from", "to"].map(|side| rig.path(side).join(name).symlink_metadata().unwrap());
        assert_eq!((one.mtime(), one.mtime_nsec()), (other.mtime(), other.mtime_nsec()), "{name}");
        assert_eq!(one.mode() & !0o6000, other.mode(), "{name}: without set-user-ID");
    }
    let again = rig.copy(OPTIONS);
    assert_eq!(again, Copied { directories: 3, passed_over: 3, ..Copied::default() });
}

#[test]
fn a_large_file_is_copied_by_several_threads_with_its_holes() {
    let rig = Rig::new();
    let file = File::create(rig.path("from/sparse")).unwrap();
    file.set_len(8 << 20).unwrap();
    let noise: Vec<u8> = (0..1u32 << 18).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    file.write_all_at(&noise, 1 << 20).unwrap();
    file.write_all_at(b"end", 5 << 20).unwrap();
    rig.write("from/dense", &noise);
    let copied = rig.copy(Options { verify: true, ..OPTIONS });
    assert_eq!((copied.files, copied.failures, copied.verified), (2, 0, true));
    assert!(rig.read("to/sparse") == rig.read("from/sparse") && rig.read("to/dense") == noise);
    let blocks = |name: &str| std::fs::metadata(rig.path(name)).unwrap().blocks();
    assert!(blocks("to/sparse") * 512 < 2 << 20, "holes stay holes: {} blocks", blocks("to/sparse"));
}

#[test]
fn what_cannot_be_copied_is_counted_and_the_rest_is_copied() {
    let rig = Rig::new();
    for name in ["differs", "directory", "good"] {
        rig.write(&format!("from/{name}"), "new");
    }
    rustix::fs::mknodat(rustix::fs::CWD, rig.path("from/fifo"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    rig.write("to/differs", "older");
    std::fs::create_dir(rig.path("to/directory")).unwrap();
    let copied = rig.copy(OPTIONS);
    assert_eq!((copied.files, copied.failures), (1, 3));
    assert_eq!((rig.read("to/good"), rig.read("to/differs")), (b"new".to_vec(), b"older".to_vec()));
    assert_eq!(names(&rig.path("to")), ["differs", "directory", "good"], "no temporary file stays");
    let copied = rig.copy(Options { overwrite: true, ..OPTIONS });
    assert_eq!((copied.files, copied.passed_over, copied.failures), (1, 1, 2));
    assert_eq!(rig.read("to/differs"), b"new");
}

#[test]
fn a_link_at_the_destination_leads_nowhere_else() {
    let rig = Rig::new();
    for name in ["from/a", "outside"] {
        std::fs::create_dir(rig.path(name)).unwrap();
    }
    rig.write("from/a/file", "bytes");
    symlink(rig.path("outside"), rig.path("to/a")).unwrap();
    let copied = rig.copy(Options { overwrite: true, ..OPTIONS });
    assert_eq!((copied.files, copied.failures), (0, 1));
    assert_eq!(names(&rig.path("outside")), [""; 0]);
}

#[test]
fn a_destination_within_the_source_is_not_copied_into_itself() {
    let rig = Rig::new();
    for name in ["from/a", "from/below/to/old"] {
        std::fs::create_dir_all(rig.path(name)).unwrap();
    }
    rig.write("from/a/file", "bytes");
    // The run knows of no name that the two sides have in common, as for a mount, or a server of two addresses.
    let copied = rig.copy_to("from/below/to", OPTIONS, &mut |_| ControlFlow::Continue(()));
    assert_eq!((copied.files, copied.failures), (1, 1));
    assert_eq!(rig.read("from/below/to/a/file"), b"bytes");
    assert_eq!(names(&rig.path("from/below/to")), ["a", "below", "old"]);
    assert_eq!(names(&rig.path("from/below/to/below")), [""; 0]);
    // Nor is a directory copied over itself.
    assert_eq!(rig.copy_to("from", OPTIONS, &mut |_| ControlFlow::Continue(())).failures, 1);
}

#[test]
fn a_read_only_directory_that_was_copied_in_part_is_resumed() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path("from/locked")).unwrap();
    std::fs::create_dir_all(rig.path("to/locked/second")).unwrap();
    for name in ["first", "second"] {
        rig.write(&format!("from/locked/{name}"), "bytes");
    }
    std::fs::set_permissions(rig.path("from/locked"), Permissions::from_mode(0o555)).unwrap();
    let as_user = |copy: &(dyn Fn() -> Copied + Sync)| {
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| {
                become_nobody();
                copy()
            });
            copying.join().unwrap()
        })
    };
    for name in
        ["", "from", "from/locked", "from/locked/first", "from/locked/second", "to", "to/locked", "to/locked/second"]
    {
        chown_to_nobody(&rig.path(name));
    }
    let copied = as_user(&|| rig.copy(OPTIONS));
    assert_eq!((copied.files, copied.failures), (1, 1), "a directory is in the way");
    assert_eq!(std::fs::metadata(rig.path("to/locked")).unwrap().mode() & 0o7777, 0o555);
    std::fs::set_permissions(rig.path("to/locked"), Permissions::from_mode(0o755)).unwrap();
    std::fs::remove_dir(rig.path("to/locked/second")).unwrap();
    std::fs::set_permissions(rig.path("to/locked"), Permissions::from_mode(0o555)).unwrap();
    let copied = as_user(&|| rig.copy(OPTIONS));
    assert_eq!((copied.files, copied.passed_over, copied.failures), (1, 1, 0));
    assert_eq!(std::fs::metadata(rig.path("to/locked")).unwrap().mode() & 0o7777, 0o555);
}

/// Takes root's rights from the calling thread, and from those that it starts.
fn become_nobody() {
    if rustix::process::geteuid().is_root() {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(NOBODY)).unwrap();
    }
}

fn chown_to_nobody(path: &Path) {
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(path, Some(NOBODY), None).unwrap();
    }
}

/// The user without rights.
const NOBODY: u32 = 65534;

#[test]
fn what_only_begins_as_a_temporary_file_is_copied_and_stays() {
    let rig = Rig::new();
    std::fs::create_dir_all(rig.path("from/.byway-copy-backups")).unwrap();
    rig.write("from/.byway-copy-backups/file", "bytes");
    rig.write("from/.byway-copy-notes", "of a user");
    rig.write("to/.byway-copy-list", "of another user");
    let left = format!("{}0123456789abcdef-4", String::from_utf8_lossy(TEMPORARY));
    for side in ["from", "to"] {
        rig.write(&format!("{side}/{left}"), "half");
    }
    let copied = rig.copy(OPTIONS);
    assert_eq!((copied.files, copied.directories, copied.failures), (2, 2, 0));
    assert_eq!(rig.read("to/.byway-copy-backups/file"), b"bytes");
    assert_eq!(names(&rig.path("to")), [".byway-copy-backups", ".byway-copy-list", ".byway-copy-notes"]);
}

#[test]
fn verify_finds_a_complete_looking_file_with_other_bytes() {
    let rig = Rig::new();
    rig.write("from/file", "bytes");
    rig.copy(OPTIONS);
    let modified = std::fs::metadata(rig.path("to/file")).unwrap().modified().unwrap();
    rig.write("to/file", "bytez");
    File::options().write(true).open(rig.path("to/file")).unwrap().set_modified(modified).unwrap();
    assert_eq!(rig.copy(OPTIONS).passed_over, 1, "size and time are the source's");
    let verifying = Options { verify: true, ..OPTIONS };
    assert_eq!(rig.copy(verifying).failures, 1, "it is not replaced without --overwrite");
    assert_eq!(rig.copy(Options { overwrite: true, ..verifying }).files, 1);
    assert_eq!(rig.read("to/file"), b"bytes");
}

#[test]
fn a_copy_that_is_stopped_leaves_whole_files_and_is_resumed() {
    let rig = Rig::new();
    for number in 0..COUNT {
        rig.write(&format!("from/{number}"), vec![number as u8; 100_000]);
    }
    // What an earlier copy left when it was killed.
    let left = format!("to/{}0123456789abcdef-4", String::from_utf8_lossy(TEMPORARY));
    rig.write(&left, "half");
    let run = |run: &Run| {
        // The first files are there.
        if run.copied().files > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = rig.copy_telling(OPTIONS, &mut { run });
    assert!(stopped.failures == 0 && !rig.path(&left).exists());
    for name in names(&rig.path("to")) {
        assert_eq!(rig.read(&format!("to/{name}")), rig.read(&format!("from/{name}")), "{name}");
    }
    let resumed = rig.copy(OPTIONS);
    assert_eq!(resumed.files + resumed.passed_over, COUNT);
    assert_eq!(names(&rig.path("to")), names(&rig.path("from")));
}

/// Files of a copy that is stopped.
const COUNT: u64 = 200;
