//! The steps of `cargo xtask test`: announced, timed, and remembered for the next run's announcement.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A file in the target folder: a line for each step, its name, a tab, and the seconds that it took the last time.
const TIMES: &str = "xtask-test-times";

/// What is said where no run has ended yet: sums of runs on 4 cores without and with dependencies to build.
const UNTIMED: &str = "about 10 minutes on 4 cores, and some more for the first build";

/// The steps of one run, in order.
pub struct Steps {
    names: Vec<&'static str>,
    next: usize,
    began: Instant,
    current: Option<(&'static str, Instant)>,
    times: BTreeMap<String, Duration>,
    file: PathBuf,
}

impl Steps {
    /// Prints how long all of them are going to take, as far as an earlier run has shown it. `folder` keeps the times.
    pub fn begin(names: Vec<&'static str>, folder: PathBuf) -> Self {
        let file = folder.join(TIMES);
        let times = read(&std::fs::read_to_string(&file).unwrap_or_default());
        println!("{}", announcement(&names, &times));
        Self { names, next: 0, began: Instant::now(), current: None, times, file }
    }

    /// Ends the step before, and announces the next one.
    pub fn next(&mut self) {
        self.end_current();
        let Some(&name) = self.names.get(self.next) else { return };
        self.next += 1;
        let last = self.times.get(name).map(|time| format!(", {} the last time", shown(*time))).unwrap_or_default();
        println!("\n== {} of {}: {name}{last}; {} so far", self.next, self.names.len(), shown(self.began.elapsed()));
        self.current = Some((name, Instant::now()));
    }

    /// Ends the last step.
    pub fn end(mut self) {
        self.end_current();
        println!("took {}", shown(self.began.elapsed()));
    }

    fn end_current(&mut self) {
        let Some((name, began)) = self.current.take() else { return };
        self.times.insert(name.to_owned(), began.elapsed());
        // Without the file the next run announces less.
        let _ = std::fs::write(&self.file, written(&self.times));
    }
}

fn announcement(names: &[&str], times: &BTreeMap<String, Duration>) -> String {
    let known: Option<Duration> = names.iter().map(|name| times.get(*name).copied()).sum();
    let time =
        known.map_or_else(|| UNTIMED.to_owned(), |time| format!("{} the last time on this machine", shown(time)));
    format!("{} steps: {}; {time}", names.len(), names.join(", "))
}

fn read(text: &str) -> BTreeMap<String, Duration> {
    let line = |line: &str| {
        let (name, seconds) = line.split_once('\t')?;
        Some((name.to_owned(), Duration::from_secs(seconds.parse().ok()?)))
    };
    text.lines().filter_map(line).collect()
}

fn written(times: &BTreeMap<String, Duration>) -> String {
    let lines: Vec<_> = times.iter().map(|(name, time)| format!("{name}\t{}", time.as_secs())).collect();
    lines.join("\n")
}

/// `45 s` or `3 min 5 s`.
fn shown(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds < 60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_says_how_long_the_last_one_took() {
        let names = ["build", "tests"];
        let mut times = BTreeMap::from([("build".to_owned(), Duration::from_secs(51))]);
        assert_eq!(announcement(&names, &times), format!("2 steps: build, tests; {UNTIMED}"));
        times.insert("tests".to_owned(), Duration::from_secs(178));
        times.insert("guests".to_owned(), Duration::from_secs(1000));
        let times = read(&written(&times));
        assert_eq!(announcement(&names, &times), "2 steps: build, tests; 3 min 49 s the last time on this machine");
    }

    #[test]
    fn each_step_is_timed_for_the_next_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut steps = Steps::begin(vec!["build", "tests"], folder.path().to_owned());
        steps.next();
        steps.next();
        steps.end();
        let kept = read(&std::fs::read_to_string(folder.path().join(TIMES)).unwrap());
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["build", "tests"]);
    }
}
