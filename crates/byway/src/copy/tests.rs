use std::fs::File;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use byway_reactor::{Completion, Errno, IoChoice, Reactor};

use super::*;

#[path = "ending_tests.rs"]
mod ending_tests;
#[path = "resume_tests.rs"]
mod resume_tests;

/// What a faulty endpoint answers.
const FAULT: EndpointError = EndpointError::File(Errno::NOSPC);

const CHUNK: usize = 64 << 10;
const OPTIONS: CopyOptions = CopyOptions { depth: 4, chunk_bytes: CHUNK, verify: true };

struct Bench {
    folder: tempfile::TempDir,
    reactor: Reactor,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, reactor: Reactor::open(IoChoice::Auto, CHUNK * 4).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// 3 MiB and a bit: data, a hole of 1 MiB, data with an odd end.
    fn make_source(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..3_200_001u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        bytes[1 << 20..2 << 20].fill(0);
        let file = File::create(self.path("source")).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        file.write_all_at(&bytes[..1 << 20], 0).unwrap();
        file.write_all_at(&bytes[2 << 20..], 2 << 20).unwrap();
        file.sync_all().unwrap();
        bytes
    }

    fn copy(&mut self, keep: bool, wrap: impl FnOnce(FileEndpoint) -> Box<dyn Endpoint>) -> Result<Copied, CopyError> {
        let (from, to, log) = (self.path("source"), self.path("destination"), self.path("log"));
        let mut source = FileEndpoint::source(&mut self.reactor, &from, 1).unwrap();
        let bytes = source.bytes();
        let mut destination = wrap(FileEndpoint::destination(&mut self.reactor, claim(&to), 2, bytes, keep).unwrap());
        let mut log = ResumeLog::open(&log, &[]).unwrap();
        copy(&mut self.reactor, &mut source, &mut *destination, OPTIONS, Some(&mut log), &mut |_| {
            ControlFlow::Continue(())
        })
    }
}

/// What is to be written, made if it is not there.
fn claim(path: &Path) -> Claim {
    if path.exists() { Claim::existing(path).unwrap() } else { Claim::made(path).unwrap() }
}

fn contents(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// An endpoint with a fault: the read or write at `bad` fails, or the write stores something else.
struct Faulty {
    inner: FileEndpoint,
    bad: u64,
    lie: bool,
    failing: Option<u32>,
    /// Reads there fail.
    unreadable: Option<u64>,
}

impl Endpoint for Faulty {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn is_blank(&self) -> bool {
        self.inner.is_blank()
    }
    fn identity(&self) -> String {
        self.inner.identity()
    }
    fn shows_changes(&self) -> bool {
        self.inner.shows_changes()
    }
    fn class(&self) -> u8 {
        self.inner.class()
    }
    fn submit(&mut self, reactor: &mut Reactor, id: u32, request: Request) {
        let request = match request {
            Request::Write { offset, mut from } if offset == self.bad => {
                from.bytes_mut()[7] ^= 1;
                self.failing = (!self.lie).then_some(id);
                Request::Write { offset, from }
            }
            Request::Read { offset, into } if offset == self.bad && !self.lie || self.unreadable == Some(offset) => {
                self.failing = Some(id);
                Request::Read { offset, into }
            }
            other => other,
        };
        self.inner.submit(reactor, id, request);
    }
    fn complete(&mut self, reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>) {
        self.inner.complete(reactor, completion, done);
        for done in done {
            if self.failing == Some(done.id) {
                self.failing = None;
                match &mut done.answer {
                    Answer::Read(result) => *result = Err(FAULT),
                    Answer::Changed(result) => *result = Err(FAULT),
                    Answer::Extents(_) => {}
                }
            }
        }
    }
}

#[test]
fn a_file_arrives_whole_with_its_holes() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    let copied = bench.copy(false, |file| Box::new(file)).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
    assert!(copied.verified);
    assert_eq!(copied.crc32c, crc32c::crc32c(&bytes));
    assert_eq!(copied.moved_bytes + copied.zero_bytes, bytes.len() as u64);
    let blocks = |name| std::fs::metadata(bench.path(name)).unwrap().blocks();
    // Where the file system keeps holes at all, the destination has them too.
    if blocks("source") * 512 < bytes.len() as u64 {
        assert_eq!(copied.zero_bytes, 1 << 20);
        assert!(blocks("destination") <= blocks("source") + 16);
    }
}

#[test]
fn an_empty_file_is_copied() {
    let mut bench = Bench::new();
    File::create(bench.path("source")).unwrap();
    let copied = bench.copy(false, |file| Box::new(file)).unwrap();
    assert_eq!((copied.bytes, copied.crc32c), (0, 0));
    assert!(contents(&bench.path("destination")).is_empty());
}

#[test]
fn verification_catches_a_destination_that_lies() {
    let mut bench = Bench::new();
    bench.make_source();
    let bad = 5 * CHUNK as u64;
    let error = bench
        .copy(false, |inner| Box::new(Faulty { inner, bad, lie: true, failing: None, unreadable: None }))
        .unwrap_err();
    assert!(matches!(error, CopyError::Differs { offset, len } if offset == bad && len == CHUNK as u64), "{error}");
}

#[test]
fn what_was_flushed_before_an_error_is_not_copied_again() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    let (from, to) = (bench.path("source"), bench.path("destination"));
    let inner = FileEndpoint::source(&mut bench.reactor, &from, 1).unwrap();
    let mut destination = FileEndpoint::destination(&mut bench.reactor, claim(&to), 2, inner.bytes(), false).unwrap();
    let bad = 45 * CHUNK as u64;
    let mut source = Faulty { inner, bad, lie: false, failing: None, unreadable: None };
    let mut log = ResumeLog::open(&bench.path("log"), &[]).unwrap();
    let failed = copy(&mut bench.reactor, &mut source, &mut destination, OPTIONS, Some(&mut log), &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(matches!(failed, Err(CopyError::Source { offset, error: FAULT }) if offset == bad), "{failed:?}");
    drop((log, destination));

    let copied = bench.copy(true, |file| Box::new(file)).unwrap();
    assert!(copied.resumed_bytes > 1 << 20, "{copied:?}");
    assert!(copied.moved_bytes > 0, "{copied:?}");
    assert_eq!(copied.crc32c, crc32c::crc32c(&bytes));
    assert!(contents(&to) == bytes);
}

#[test]
fn a_full_destination_is_named_and_nothing_is_recorded_after_it() {
    let mut bench = Bench::new();
    bench.make_source();
    let error = bench
        .copy(false, |inner| Box::new(Faulty { inner, bad: 0, lie: false, failing: None, unreadable: None }))
        .unwrap_err();
    assert!(matches!(error, CopyError::Destination { offset: 0, error: FAULT }), "{error}");
    let log = std::fs::read_to_string(bench.path("log")).unwrap();
    assert!(!log.lines().any(|line| line.starts_with("data ")), "{log}");
}

#[test]
fn a_resume_file_survives_a_torn_end_and_other_cuts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut log = ResumeLog::open(&path, &[]).unwrap();
    assert!(log.load("s", "d", 1000).unwrap().is_empty());
    let data = |len, crc| Record { len, crc: Some(crc) };
    log.append(&[(0, data(100, 7)), (100, Record { len: 50, crc: None })]).unwrap();
    assert_eq!(ResumeLog::open(&path, &[]).unwrap_err().kind(), std::io::ErrorKind::ResourceBusy, "one copy at a time");
    drop(log);
    File::options().append(true).open(&path).unwrap().write_all(b"data 150 10 0000").unwrap();

    let mut log = ResumeLog::open(&path, &[]).unwrap();
    assert!(log.is_of("s", "d", 1000).unwrap());
    for (source, destination, bytes) in [("s", "d", 1001), ("x", "d", 1000), ("s", "x", 1000)] {
        assert!(!log.is_of(source, destination, bytes).unwrap(), "{source} {destination} {bytes}");
    }
    assert_eq!(log.load("s", "d", 1000).unwrap().len(), 2, "the torn line is none");
    log.append(&[(50, data(100, 9))]).unwrap();
    let records: Vec<_> = log.load("s", "d", 1000).unwrap().into_iter().collect();
    assert_eq!(records, [(50, data(100, 9))], "what it overlaps is gone");
    assert!(log.load("s", "another", 1000).unwrap().is_empty(), "another destination starts over");
    assert!(log.load("s", "d", 1000).unwrap().is_empty());
    log.append(&[(0, data(100, 7))]).unwrap();
    log.clear().unwrap();
    assert!(!log.is_of("s", "d", 1000).unwrap() && log.load("s", "d", 1000).unwrap().is_empty());
}

/// Bytes that this process has had fetched from disks (proc(5)).
fn fetched_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap().parse().unwrap()
}

#[test]
fn verification_reads_the_disk_and_not_the_page_cache() {
    let mut bench = Bench::new();
    let source = bench.make_source();
    let file = File::open(bench.path("source")).unwrap();
    if rustix::fs::fstatfs(&file).unwrap().f_type == 0x0102_1994 {
        let test = "verification_reads_the_disk_and_not_the_page_cache";
        return byway_skip::skip(test, byway_skip::SkipReason::Machine("temporary files are in memory (tmpfs)"));
    }
    let before = fetched_bytes();
    bench.copy(false, |file| Box::new(file)).unwrap();
    // All but the hole. The source was written a moment ago and is in the cache.
    let data = source.len() as u64 - (1 << 20);
    assert!(fetched_bytes() - before >= data, "{} of {data} bytes came from the disk", fetched_bytes() - before);
}

#[test]
fn a_source_that_changes_under_the_copy_is_noticed() {
    let mut bench = Bench::new();
    bench.make_source();
    let (from, to) = (bench.path("source"), bench.path("destination"));
    let mut source = FileEndpoint::source(&mut bench.reactor, &from, 1).unwrap();
    let mut destination = FileEndpoint::destination(&mut bench.reactor, claim(&to), 2, source.bytes(), false).unwrap();
    let touch = File::options().write(true).open(&from).unwrap();
    let mut progress = |_| {
        touch.set_modified(std::time::UNIX_EPOCH).unwrap();
        ControlFlow::Continue(())
    };
    let failed = copy(&mut bench.reactor, &mut source, &mut destination, OPTIONS, None, &mut progress);
    assert!(matches!(failed, Err(CopyError::Changed)), "{failed:?}");
}

#[test]
fn a_source_that_is_no_storage_is_refused_at_once() {
    let mut bench = Bench::new();
    let pipe = bench.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let words = [(pipe.as_path(), "neither a regular file"), (Path::new("/dev/null"), "neither a regular file")];
    for (path, words) in words.into_iter().chain([(Path::new("/proc/cpuinfo"), "it says that it is empty and is not")])
    {
        let Err(refused) = FileEndpoint::source(&mut bench.reactor, path, 1) else { panic!("{}", path.display()) };
        assert!(refused.to_string().contains(words), "{refused}");
    }
}
