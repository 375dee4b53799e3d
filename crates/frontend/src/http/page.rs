//! Prometheus's text (exposition format 0.0.4), written by hand: it is a page of lines.

use std::fmt::Write;
use std::time::Duration;

/// Name, type, help and value of a metric that each of some things has.
pub(super) type Each<T> = (&'static str, &'static str, &'static str, fn(&T) -> u64);

/// Metrics as text. Names start with `byway_`, end with their unit, and counters with `_total`.
#[derive(Clone, Debug, Default)]
pub struct Page(String);

// Writing to a string does not fail.
impl Page {
    /// What follows is of this metric. `kind` is `gauge`, `counter` or `histogram`.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A value, under the labels that tell it from others of its metric.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0 += name;
        for (index, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if index == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// A histogram: its classes, each with its longest time (`None` for the last) and how many it has, and the time of all together.
    pub fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        classes: impl Iterator<Item = (Option<Duration>, u64)>,
        total: Duration,
    ) {
        let (bucket, mut count) = (format!("{name}_bucket"), 0);
        for (bound, more) in classes {
            count += more;
            let bound = bound.map_or("+Inf".to_owned(), |bound| bound.as_secs_f64().to_string());
            self.line(&bucket, &[labels, &[("le", &bound)]].concat(), count);
        }
        self.line(&format!("{name}_sum"), labels, total.as_secs_f64());
        self.line(&format!("{name}_count"), labels, count);
    }

    /// Metrics of some things, under their names.
    pub(super) fn each<T>(&mut self, all: &[Each<T>], things: &[T], label: &str, name_of: fn(&T) -> &String) {
        for (name, kind, help, value) in all {
            self.head(name, kind, help);
            for thing in things {
                self.line(name, &[(label, name_of(thing))], value(thing));
            }
        }
    }

    /// The text.
    pub fn into_text(self) -> String {
        self.0
    }
}
