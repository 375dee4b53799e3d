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
        let mut destination = FileEndpoint::destination(&mut self.reactor, &to, 2, inner.bytes(), false).unwrap();
        let mut source = Faulty { inner, bad: BAD, lie: false, failing: None };
        let mut log = ResumeLog::open(&log).unwrap();
        copy(&mut self.reactor, &mut source, &mut destination, OPTIONS, Some(&mut log), &mut |_| {}).unwrap_err();
    }

    /// The command that a person gives.
    fn command(&self, more: &[&str]) -> Result<(), CopyCommandError> {
        let [from, to, log] = ["source", "destination", "log"].map(|name| self.path(name));
        let mut words: Vec<std::ffi::OsString> = vec!["copy".into(), from.into(), to.into()];
        words.extend(["--chunk".into(), "64K".into(), "--resume".into(), log.into()]);
        words.extend(more.iter().map(Into::into));
        run(&CommandLine::try_parse_from(words).unwrap().arguments)
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
    assert!(matches!(refused, CopyCommandError::Exists(_)), "{refused}");
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
