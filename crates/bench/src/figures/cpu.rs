//! CPU time of an operation: of the client, which is this process, and of the server, which is another.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::experiment::{Axis, Gathered, Plot, Scale};
use super::load::Rate;

/// CPU time of a process so far, by thread: the kernel tells it in nanoseconds, where that of the whole process comes in
/// ticks of 10 ms, a twelfth of what a point takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ThreadTimes(BTreeMap<String, u64>);

impl ThreadTimes {
    /// Of a process; none where it has gone, or the kernel counts nothing (`CONFIG_SCHED_INFO`).
    pub(super) fn of(process: u32) -> Option<Self> {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
        let thread = |task: std::io::Result<std::fs::DirEntry>| {
            let task = task.ok()?;
            Some((task.file_name().into_string().ok()?, time_of(&task.path())?))
        };
        // A thread that ends meanwhile is not there.
        let times: BTreeMap<String, u64> = tasks.filter_map(thread).collect();
        (!times.is_empty()).then_some(Self(times))
    }

    /// What was spent between two readings: by threads that have begun since then too, and not by those that have ended.
    pub(super) fn since(&self, before: &Self) -> Duration {
        let spent = |(thread, nanos): (&String, &u64)| nanos.saturating_sub(before.0.get(thread).copied().unwrap_or(0));
        Duration::from_nanos(self.0.iter().map(spent).sum())
    }
}

fn time_of(task: &Path) -> Option<u64> {
    parse(&std::fs::read_to_string(task.join("schedstat")).ok()?)
}

/// sched-stats (the kernel's Documentation/scheduler): time on the CPU and time waiting for it in nanoseconds, time slices.
fn parse(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// CPU time by what is asked for, of client and server.
#[derive(Debug, Default)]
pub(super) struct CpuPoints(Gathered);

impl CpuPoints {
    /// Takes what an operation cost in one round.
    pub(super) fn add(&mut self, series: &str, x: f64, rate: &Rate) {
        self.0.add(&client(series), x, rate.client_cpu_us);
        if let Some(us) = rate.server_cpu_us {
            self.0.add(&server(series), x, us);
        }
    }

    /// A plot of them.
    pub(super) fn plot(self, name: &'static str, title: impl Into<String>, x: Axis) -> Plot {
        let y = Axis { label: "CPU of one", unit: "us", scale: Scale::Decades };
        Plot { name, title: title.into(), x, y, series: self.0.series() }
    }
}

fn client(series: &str) -> String {
    format!("client, {series}")
}

fn server(series: &str) -> String {
    format!("server, {series}")
}

/// How it was measured, for the report.
pub(super) const HOW: &str = "CPU: of the whole process of the client and of all threads of the server, as the kernel counts it, over \
                              the requests; one outstanding, both waiting adaptively.";

#[cfg(test)]
mod tests {
    use super::*;

    fn times(threads: &[(&str, u64)]) -> ThreadTimes {
        ThreadTimes(threads.iter().map(|&(thread, nanos)| (thread.to_owned(), nanos)).collect())
    }

    #[test]
    fn threads_that_come_and_go_are_no_negative_time() {
        let (before, after) = (times(&[("1", 500), ("2", 7000)]), times(&[("1", 900), ("3", 50)]));
        assert_eq!(after.since(&before), Duration::from_nanos(450));
    }

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!((parse("1234 99 7\n"), parse(""), parse("no 1 1")), (Some(1234), None, None));
    }

    #[test]
    fn this_process_has_spent_some_and_one_that_is_not_there_none() {
        // Where the kernel does not count there is nothing to be seen.
        if let Some(before) = ThreadTimes::of(std::process::id()) {
            assert!(before.since(&ThreadTimes::default()) > Duration::ZERO);
        }
        assert_eq!(ThreadTimes::of(u32::MAX), None);
    }

    #[test]
    fn a_server_that_cannot_be_seen_has_no_points() {
        let rate = |server_cpu_us| Rate { megabytes_per_second: 1.0, p50_us: 1.0, client_cpu_us: 3.0, server_cpu_us };
        let mut points = CpuPoints::default();
        points.add("TCP", 1.0, &rate(None));
        points.add("unix", 1.0, &rate(Some(5.0)));
        let plot = points.plot("p", "t", Axis { label: "x", unit: "", scale: Scale::Linear });
        let names: Vec<&str> = plot.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["client, TCP", "client, unix", "server, unix"]);
    }
}
