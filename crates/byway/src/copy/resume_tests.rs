//! What the command does about a copy that ended early, when source or destination are not what they were.

use clap::Parser;

use super::*;
use crate::copy::command::{CopyArguments, CopyCommandError, run};

/// The first piece whose read fails: behind the hole.
const BAD: u64 = 45 * CHUNK as u64;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    arguments: CopyArguments,
}

impl Bench {
    /// A copy whose source failed in the middle; what had come is recorded in the log.
    fn interrupt(&mut self) {
        let (from, to, log) = (self.path("source"), self.path("destination"), self.path("log"));
        let inner = FileEndpoint::source(&mut self.reactor, &from, 1).unwrap();
        let mut destination =
            FileEndpoint::destination(&mut self.reactor, claim(&to), 2, inner.bytes(), false).unwrap();
        let mut source = Faulty { inner, bad: BAD, lie: false, failing: None, unreadable: None };
        let mut log = ResumeLog::open(&log, &[]).unwrap();
        copy(&mut self.reactor, &mut source, &mut destination, OPTIONS, Some(&mut log), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap_err();
    }

    /// A copy from a source whose changes cannot be seen; `bad`: where it fails.
    fn copy_from_blind(&mut self, keep: bool, bad: u64) -> Result<Copied, CopyError> {
        let (from, to, log) = (self.path("source"), self.path("destination"), self.path("log"));
        let inner = FileEndpoint::source(&mut self.reactor, &from, 1).unwrap();
        let mut destination = FileEndpoint::destination(&mut self.reactor, claim(&to), 2, inner.bytes(), keep).unwrap();
        let mut source = Blind(Faulty { inner, bad, lie: false, failing: None, unreadable: None });
        let mut log = ResumeLog::open(&log, &[]).unwrap();
        copy(&mut self.reactor, &mut source, &mut destination, OPTIONS, Some(&mut log), &mut |_| {
            ControlFlow::Continue(())
        })
    }

    /// The command that a person gives.
    fn command(&self, more: &[&str]) -> Result<(), CopyCommandError> {
        let [from, to, log] = ["source", "destination", "log"].map(|name| self.path(name));
        let mut words: Vec<std::ffi::OsString> = vec!["copy".into(), from.into(), to.into()];
        words.extend(["--chunk".into(), "64K".into(), "--resume".into(), log.into()]);
        words.extend(more.iter().map(Into::into));
        run(&CommandLine::try_parse_from(words).unwrap().arguments).map(|_| ())
    }
}

/// A source like a volume or a device: nobody tells that it has changed.
struct Blind(Faulty);

impl Endpoint for Blind {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn is_blank(&self) -> bool {
        self.0.is_blank()
    }
    fn identity(&self) -> String {
        "blind".to_owned()
    }
    fn class(&self) -> u8 {
        self.0.class()
    }
    fn submit(&mut self, reactor: &mut Reactor, id: u32, request: Request) {
        self.0.submit(reactor, id, request);
    }
    fn complete(&mut self, reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>) {
        self.0.complete(reactor, completion, done);
    }
}

#[test]
fn the_command_goes_on_with_what_was_interrupted() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    bench.interrupt();
    bench.command(&["--verify"]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
    assert!(!bench.path("log").exists());
}

#[test]
fn a_destination_that_was_removed_is_written_anew() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    bench.interrupt();
    // Many file systems give the next file the same number.
    std::fs::remove_file(bench.path("destination")).unwrap();
    bench.command(&[]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
}

#[test]
fn a_destination_that_was_emptied_is_written_anew() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    bench.interrupt();
    File::create(bench.path("destination")).unwrap();
    bench.command(&[]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
}

#[test]
fn another_file_in_the_destinations_place_is_not_lost_nor_mixed_in() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    bench.interrupt();
    let other = vec![0xa5; bytes.len()];
    std::fs::write(bench.path("other"), &other).unwrap();
    std::fs::rename(bench.path("other"), bench.path("destination")).unwrap();
    let refused = bench.command(&[]).unwrap_err();
    assert!(matches!(refused, CopyCommandError::Exists(..)), "{refused}");
    assert!(contents(&bench.path("destination")) == other, "nothing was touched");
    bench.command(&["--overwrite"]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes, "holes too");
}

#[test]
fn holes_that_are_not_recorded_are_made_when_a_copy_goes_on() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    bench.interrupt();
    let log = std::fs::read_to_string(bench.path("log")).unwrap();
    let without: String = log.split_inclusive('\n').filter(|line| !line.starts_with("zero ")).collect();
    std::fs::write(bench.path("log"), without).unwrap();
    let destination = File::options().write(true).open(bench.path("destination")).unwrap();
    destination.write_all_at(&[0xa5; CHUNK], (1 << 20) + 5).unwrap();
    bench.command(&[]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
}

#[test]
fn pieces_of_a_source_that_changed_unseen_are_copied_anew() {
    let mut bench = Bench::new();
    let mut bytes = bench.make_source();
    bench.copy_from_blind(false, BAD).unwrap_err();
    // In a piece that is recorded.
    bytes[3 * CHUNK + 9] ^= 0xff;
    let source = File::options().write(true).open(bench.path("source")).unwrap();
    source.write_all_at(&bytes[3 * CHUNK..4 * CHUNK], 3 * CHUNK as u64).unwrap();
    let log_bytes = contents(&bench.path("log")).len();
    // It fails again, behind that piece.
    bench.copy_from_blind(true, BAD).unwrap_err();
    assert!(contents(&bench.path("destination"))[..4 * CHUNK] == bytes[..4 * CHUNK], "the change has arrived");
    // Had it been killed before it could record that, the old record must be gone even so.
    let log = std::fs::read_to_string(bench.path("log")).unwrap();
    let (old, new) = log.split_at(log_bytes);
    let dropped = new.split_inclusive('\n').filter(|line| line.starts_with("drop "));
    std::fs::write(bench.path("log"), old.to_owned() + &dropped.collect::<String>()).unwrap();
    bytes[3 * CHUNK + 9] ^= 0xff;
    source.write_all_at(&bytes[3 * CHUNK..4 * CHUNK], 3 * CHUNK as u64).unwrap();
    let copied = bench.copy_from_blind(true, u64::MAX).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
    assert!(copied.verified && copied.crc32c == crc32c::crc32c(&bytes));
    assert!(copied.resumed_bytes >= 3 * CHUNK as u64, "what is the same is not written again: {copied:?}");
    assert_eq!(copied.resumed_bytes + copied.moved_bytes + copied.zero_bytes, bytes.len() as u64);
}

#[test]
fn data_that_became_a_hole_unseen_is_a_hole_afterwards_and_the_other_way_round() {
    let mut bench = Bench::new();
    let mut bytes = bench.make_source();
    bench.copy_from_blind(false, BAD).unwrap_err();
    bytes[..CHUNK].fill(0);
    bytes[20 * CHUNK..21 * CHUNK].fill(7);
    let source = File::options().write(true).open(bench.path("source")).unwrap();
    source.write_all_at(&bytes, 0).unwrap();
    let copied = bench.copy_from_blind(true, u64::MAX).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
    assert_eq!(copied.crc32c, crc32c::crc32c(&bytes));
}

#[test]
fn a_destination_that_differs_is_mended_by_the_same_command() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    let bad = 5 * CHUNK as u64;
    let wrong = bench
        .copy(false, |inner| Box::new(Faulty { inner, bad, lie: true, failing: None, unreadable: None }))
        .unwrap_err();
    assert!(matches!(wrong, CopyError::Differs { .. }), "{wrong}");
    // Somebody has damaged another two pieces: the command says how much there is, and mends all of it.
    let destination = File::options().write(true).open(bench.path("destination")).unwrap();
    for offset in [7 * CHUNK as u64, (1 << 20) + 5] {
        destination.write_all_at(b"damage", offset).unwrap();
    }
    let said = bench.command(&["--verify"]).unwrap_err().to_string();
    assert!(said.contains("run the same command again") && !said.contains("go on from"), "{said}");
    bench.command(&["--verify"]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
}

#[test]
fn what_differs_is_copied_again_also_if_the_check_could_not_go_on() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    let (bad, unreadable) = (5 * CHUNK as u64, Some(40 * CHUNK as u64));
    let failed =
        bench.copy(false, |inner| Box::new(Faulty { inner, bad, lie: true, failing: None, unreadable })).unwrap_err();
    assert!(matches!(failed, CopyError::Destination { .. }), "{failed}");
    bench.copy(true, |file| Box::new(file)).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
}

#[test]
fn a_copy_of_a_source_that_changed_is_done_over_as_advised() {
    let mut bench = Bench::new();
    let bytes = bench.make_source();
    let (from, to, log) = (bench.path("source"), bench.path("destination"), bench.path("log"));
    let mut source = FileEndpoint::source(&mut bench.reactor, &from, 1).unwrap();
    let mut destination = FileEndpoint::destination(&mut bench.reactor, claim(&to), 2, source.bytes(), false).unwrap();
    let touch = File::options().write(true).open(&from).unwrap();
    let modified = touch.metadata().unwrap().modified().unwrap();
    let mut log = ResumeLog::open(&log, &[]).unwrap();
    let mut progress = |_| {
        touch.set_modified(std::time::UNIX_EPOCH).unwrap();
        ControlFlow::Continue(())
    };
    let failed = copy(&mut bench.reactor, &mut source, &mut destination, OPTIONS, Some(&mut log), &mut progress);
    let error = failed.unwrap_err();
    assert!(matches!(error, CopyError::Changed), "{error}");
    assert!(CopyCommandError::Changed { error }.to_string().contains("again with --overwrite"));
    drop((log, destination));
    // Also with its old time of change, nobody goes on.
    touch.set_modified(modified).unwrap();
    File::options().write(true).open(&to).unwrap().write_all_at(b"not the source", 0).unwrap();
    assert!(matches!(bench.command(&[]), Err(CopyCommandError::Exists(..))));
    bench.command(&["--overwrite"]).unwrap();
    assert!(contents(&to) == bytes);
}

#[test]
fn a_dropped_range_is_no_record_and_what_comes_after_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = ResumeLog::open(&folder.path().join("log"), &[]).unwrap();
    log.load("s", "d", 1000).unwrap();
    let data = |len, crc| Record { len, crc: Some(crc) };
    log.append(&[(0, data(100, 7)), (100, data(100, 8)), (200, data(100, 9))]).unwrap();
    log.forget(&[(150, 60)]).unwrap();
    log.append(&[(200, data(100, 10))]).unwrap();
    let records: Vec<_> = log.load("s", "d", 1000).unwrap().into_iter().collect();
    assert_eq!(records, [(0, data(100, 7)), (200, data(100, 10))]);
}

#[test]
fn a_resume_file_that_is_somebodys_is_left_alone() {
    let bench = Bench::new();
    let bytes = bench.make_source();
    let command = |resume: &Path| {
        let words = [&bench.path("source"), &bench.path("destination"), Path::new("--resume"), resume];
        let words = std::iter::once(Path::new("copy")).chain(words.map(AsRef::as_ref));
        run(&CommandLine::try_parse_from(words).unwrap().arguments).map(|_| ()).unwrap_err().to_string()
    };
    std::fs::hard_link(bench.path("source"), bench.path("alias")).unwrap();
    std::os::unix::fs::symlink(bench.path("destination"), bench.path("to")).unwrap();
    for end in ["source", "alias", "destination"] {
        let said = command(&bench.path(end));
        assert!(said.contains("it is the source or the destination"), "{end}: {said}");
    }
    command(&bench.path("to"));
    std::fs::write(bench.path("text"), "by").unwrap();
    let said = command(&bench.path("text"));
    assert!(said.contains("it is not a resume file; name another"), "{said}");
    let said = command(bench.folder.path());
    assert!(said.contains("it is not a regular file"), "{said}");
    assert!(command(Path::new("/dev/null")).contains("it is not a regular file"));
    assert!(contents(&bench.path("source")) == bytes && contents(&bench.path("text")) == b"by");
    assert!(!bench.path("destination").exists(), "nothing was begun");
    // As it is there, it is found by its number as well.
    std::fs::write(bench.path("destination"), "kept").unwrap();
    for end in ["destination", "to"] {
        let said = command(&bench.path(end));
        assert!(said.contains("it is the source or the destination"), "{end}: {said}");
    }
    assert!(contents(&bench.path("destination")) == b"kept");
}

#[test]
fn a_destination_that_others_write_to_is_refused_and_untouched() {
    let bench = Bench::new();
    let bytes = bench.make_source();
    std::fs::write(bench.path("destination"), "a volume").unwrap();
    let server = File::options().write(true).open(bench.path("destination")).unwrap();
    server.lock().unwrap();
    let refused = bench.command(&["--overwrite"]).unwrap_err().to_string();
    assert!(refused.contains("destination is in use: a server or another copy"), "{refused}");
    assert!(refused.contains("copy to the volume that is served"), "{refused}");
    assert!(contents(&bench.path("destination")) == b"a volume" && !bench.path("log").exists());
    drop(server);
    bench.command(&["--overwrite"]).unwrap();
    assert!(contents(&bench.path("destination")) == bytes);
    // It has let go of it.
    File::open(bench.path("destination")).unwrap().try_lock().unwrap();
}
