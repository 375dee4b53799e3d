//! The program's log, on standard error: so many lines a second from one place in the code, and about one volume, however fast
//! clients fail.

use std::collections::HashMap;
use std::fmt;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::limits::LOG_LINES_PER_SECOND_MAX;

/// What `--log` or `RUST_LOG` asks for, on standard error; without either information and worse.
pub fn to_stderr(level: Option<&str>) {
    let from_environment = || EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let filter = level.map_or_else(from_environment, EnvFilter::new);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        // It would panic: where a log line cannot be written, its own complaint cannot either.
        .log_internal_errors(false)
        .event_format(Limited::new(tracing_subscriber::fmt::format().with_target(false)))
        .init();
}

/// Leaves out lines beyond [`LOG_LINES_PER_SECOND_MAX`] of one place in the code, and says so. Lines about one volume are counted apart
/// from those about others: where many volumes fail at once, the log names each. Lines for debugging are asked for, and all
/// written.
struct Limited<F> {
    format: F,
    /// By place and volume: there are as many as the code has, and the configuration. No client chooses such a name.
    places: Mutex<HashMap<(Identifier, VolumeName), CallSite>>,
}

/// What a line says is its volume; empty if it says none.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
struct VolumeName(String);

impl VolumeName {
    fn of(event: &Event<'_>) -> Self {
        let mut name = Self::default();
        event.record(&mut name);
        name
    }
}

impl Visit for VolumeName {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "volume" {
            // Writing into a text does not fail.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

/// The lines of one place.
struct CallSite {
    /// The second that is counted.
    since: Instant,
    lines: u32,
    left_out: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// After so many were left out.
    Write(u64),
    /// The last one of this second.
    WriteLast,
    LeaveOut,
}

impl CallSite {
    fn new(now: Instant) -> Self {
        Self { since: now, lines: 0, left_out: 0 }
    }

    fn judge(&mut self, now: Instant) -> Verdict {
        let mut left_out = 0;
        if now.saturating_duration_since(self.since) >= Duration::from_secs(1) {
            left_out = self.left_out;
            *self = Self::new(now);
        }
        self.lines = self.lines.saturating_add(1);
        match self.lines {
            lines if lines < LOG_LINES_PER_SECOND_MAX => Verdict::Write(left_out),
            LOG_LINES_PER_SECOND_MAX => Verdict::WriteLast,
            _ => {
                self.left_out += 1;
                Verdict::LeaveOut
            }
        }
    }
}

impl<F> Limited<F> {
    fn new(format: F) -> Self {
        Self { format, places: Mutex::default() }
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if *event.metadata().level() > Level::INFO {
            return self.format.format_event(context, writer, event);
        }
        let now = Instant::now();
        let verdict = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let place = (event.metadata().callsite(), VolumeName::of(event));
            places.entry(place).or_insert_with(|| CallSite::new(now)).judge(now)
        };
        match verdict {
            Verdict::LeaveOut => return Ok(()),
            Verdict::Write(0) | Verdict::WriteLast => {}
            Verdict::Write(lines) => writeln!(writer, "({lines} lines like the next one were left out)")?,
        }
        self.format.format_event(context, writer.by_ref(), event)?;
        if verdict == Verdict::WriteLast {
            writeln!(writer, "(more lines like the last one are left out for the rest of this second)")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_place_has_so_many_lines_a_second_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut place = CallSite::new(start);
        let first: Vec<_> = (0..7000).map(|_| place.judge(start)).collect();
        let written = first.iter().filter(|verdict| **verdict != Verdict::LeaveOut).count();
        assert_eq!(written, LOG_LINES_PER_SECOND_MAX as usize);
        assert_eq!(first[written - 1], Verdict::WriteLast);
        let left_out = 7000 - u64::from(LOG_LINES_PER_SECOND_MAX);
        assert_eq!(place.judge(start + Duration::from_secs(1)), Verdict::Write(left_out));
        assert_eq!(place.judge(start + Duration::from_secs(1)), Verdict::Write(0));
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What is written of what `log` logs.
    fn written(log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .event_format(Limited::new(tracing_subscriber::fmt::format()))
            .finish();
        tracing::subscriber::with_default(subscriber, log);
        let text = lines.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_flood_about_one_volume_hides_no_line_about_another() {
        let text = written(|| {
            for volume in (0..1000).map(|number| format!("v{}", number.min(500))) {
                tracing::error!(volume, "a flush failed");
            }
        });
        let count = |volume: usize| text.matches(&format!("volume=\"v{volume}\"")).count();
        (0..500).for_each(|volume| assert_eq!(count(volume), 1, "{volume}: {text}"));
        // More than one second may have passed.
        assert!(count(500) < 400, "{text}");
    }

    #[test]
    fn a_flood_from_one_place_hides_no_line_of_another() {
        let text = written(|| {
            (0..1000).for_each(|number| tracing::info!(number, "a client failed"));
            tracing::error!("the disk failed");
            (0..100).for_each(|number| tracing::debug!(number, "asked for"));
        });
        let count = |what: &str| text.matches(what).count();
        // More than one second may have passed.
        assert!(count("a client failed") < 500, "{text}");
        assert_eq!((count("the disk failed"), count("asked for")), (1, 100), "{text}");
        assert!(count("are left out") >= 1, "{text}");
    }
}
