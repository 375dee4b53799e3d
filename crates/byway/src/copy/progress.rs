//! Progress of a copy on standard error: a bar on a terminal, otherwise a line now and then. Also stops a copy on signals.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use byway_reactor::Instant;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::engine::{Phase, Progress};
use crate::output;
use crate::units::show_size;

/// What the bar of a copy shows.
const PROGRESS_TEMPLATE: &str =
    "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";

/// Between two lines where there is no terminal.
const LINE_TIME: Duration = Duration::from_secs(10);

/// The exit code of a program that a signal ended: 128 and the number of SIGINT.
pub(super) const STOPPED: u8 = 130;

/// Reports a copy's progress, and stops the copy after a signal.
pub(super) struct Teller {
    bytes: u64,
    bar: ProgressBar,
    lines: Lines,
    shown: Option<String>,
    phase: Phase,
    stop: Arc<AtomicBool>,
}

impl Teller {
    /// For a copy of so many bytes that begins now. From here on the first SIGINT or SIGTERM stops the copy, and the second
    /// ends the program.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn new(bytes: u64, now: Instant) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first must not find what it has set itself.
            signal_hook::flag::register_conditional_shutdown(signal, STOPPED.into(), Arc::clone(&stop))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        let (lines, phase) = (Lines { next: now + LINE_TIME, gone: false }, Phase::Copying);
        Ok(Self { bytes, bar: bar(bytes), lines, shown: None, phase, stop })
    }

    /// Reports progress; says whether the copy continues.
    pub(super) fn tell(&mut self, progress: Progress) -> ControlFlow<()> {
        if self.bar.is_hidden() {
            if let Some(line) = self.lines.line(&progress, self.bytes) {
                output::note(line);
            }
        } else {
            self.draw(&progress);
        }
        if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// The same for files of a tree, whose total grows while the source is walked.
    pub(super) fn tell_files(
        &mut self,
        label: String,
        done_bytes: u64,
        found_bytes: u64,
        now: Instant,
    ) -> ControlFlow<()> {
        if !self.bar.is_hidden() {
            self.bar.set_length(found_bytes);
            self.bar.set_message(label);
            self.bar.set_position(done_bytes);
        } else if now >= self.lines.next {
            self.lines.next = now + LINE_TIME;
            output::note(format_args!("{label}: {} of {}", show_size(done_bytes), show_size(found_bytes)));
        }
        if self.stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn draw(&mut self, progress: &Progress) {
        if self.phase != progress.phase {
            self.phase = progress.phase;
            self.bar.reset();
        }
        let label = label(progress);
        if self.shown.as_ref() != Some(&label) {
            self.bar.set_message(label.clone());
            self.shown = Some(label);
        }
        self.bar.set_position(progress.done_bytes);
    }

    /// Takes the bar away.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// A bar on standard error, hidden if that is no terminal.
fn bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    // A test parses it.
    if let Ok(style) = ProgressStyle::with_template(PROGRESS_TEMPLATE) {
        bar.set_style(style);
    }
    bar
}

/// The phase that is shown.
fn label(progress: &Progress) -> String {
    match (progress.lost_at, progress.phase) {
        (Some(at), _) => format!("no session with the server, retrying ({} s left)", at.since(progress.now).as_secs()),
        (None, Phase::Copying) => "copying".to_owned(),
        (None, Phase::Verifying) => "verifying".to_owned(),
    }
}

/// Decides when a line of progress is printed where there is no terminal.
struct Lines {
    next: Instant,
    /// A line has said that there is no session with a server.
    gone: bool,
}

impl Lines {
    fn line(&mut self, progress: &Progress, bytes: u64) -> Option<String> {
        let gone = progress.lost_at.is_some();
        if gone == self.gone && progress.now < self.next {
            return None;
        }
        let back = self.gone && !gone;
        (self.next, self.gone) = (progress.now + LINE_TIME, gone);
        let done = progress.done_bytes.min(bytes);
        let percent = done as f64 * 100.0 / bytes.max(1) as f64;
        let back = if back { "session is back; " } else { "" };
        Some(format!("{back}{}: {} of {} ({percent:.0} %)", label(progress), show_size(done), show_size(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_template_is_good() {
        ProgressStyle::with_template(PROGRESS_TEMPLATE).unwrap();
        assert_eq!(bar(100).length(), Some(100));
    }

    #[test]
    fn without_a_terminal_there_is_a_line_now_and_then_and_one_when_a_session_ends() {
        let start = Instant::ZERO + Duration::from_secs(100);
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut lines = Lines { next: at(10), gone: false };
        let mut line = |seconds: u64, done_bytes, phase, lost: Option<u64>| {
            let progress = Progress { phase, done_bytes, now: at(seconds), lost_at: lost.map(at) };
            lines.line(&progress, 4 << 30)
        };
        assert_eq!(line(9, 1 << 20, Phase::Copying, None), None);
        assert_eq!(line(10, 1 << 30, Phase::Copying, None).unwrap(), "copying: 1.0 GiB of 4.0 GiB (25 %)");
        assert_eq!(line(11, 1 << 30, Phase::Copying, None), None);
        let gone = line(12, 1 << 30, Phase::Copying, Some(72)).unwrap();
        assert_eq!(gone, "no session with the server, retrying (60 s left): 1.0 GiB of 4.0 GiB (25 %)");
        assert_eq!(line(13, 1 << 30, Phase::Copying, Some(72)), None);
        let gone = line(22, 1 << 30, Phase::Copying, Some(72)).unwrap();
        assert_eq!(gone, "no session with the server, retrying (50 s left): 1.0 GiB of 4.0 GiB (25 %)");
        let back = line(23, 2 << 30, Phase::Copying, None).unwrap();
        assert_eq!(back, "session is back; copying: 2.0 GiB of 4.0 GiB (50 %)");
        assert_eq!(line(40, 1 << 30, Phase::Verifying, None).unwrap(), "verifying: 1.0 GiB of 4.0 GiB (25 %)");
    }
}
