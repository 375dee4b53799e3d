//! The table of a demonstration: copies out of its node over each path, in interleaved rounds, and their medians.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use byway_frontend::http::Report;
use byway_reactor::{Address, IoChoice, Reactor};
use serde::{Serialize, Serializer};

use super::sink::Sink;
use super::{CLASS, DemoError, FRAME_BYTES, open_remote};
use crate::copy::{CopyOptions, Endpoint, FileEndpoint, copy};
use crate::node::Node;
use crate::remote::{self, RemoteError, RemoteUri};

/// How often each path is taken, one after the other.
const ROUNDS: usize = 5;
/// No round begins after so much time: a large file is copied once.
const ROUNDS_TIME: Duration = Duration::from_secs(6);
/// Pieces in flight and their size, as `byway copy` has by default.
const OPTIONS: CopyOptions = CopyOptions { depth: 16, chunk_bytes: 512 << 10, verify: false };

/// One path to the bytes: the medians of its rounds.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) path: &'static str,
    pub(super) rounds: usize,
    /// Each time.
    pub(super) bytes: u64,
    pub(super) megabytes_per_second: f64,
    /// Of both ends together, the checksum included.
    pub(super) cpu_seconds_per_gigabyte: f64,
    /// By the CPUs of both ends, for each byte that was delivered.
    pub(super) copied_bytes_per_byte: f64,
    #[serde(serialize_with = "as_hex")]
    pub(super) crc32c: u32,
}

pub(super) fn as_hex<S: Serializer>(crc32c: &u32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{crc32c:08x}"))
}

/// One copy.
struct Sample {
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    copied_bytes: u64,
    crc32c: u32,
}

/// Copies over each path in turn, again and again.
pub(super) fn measure(file: &Path, node: &Node, io: IoChoice) -> Result<Vec<Row>, DemoError> {
    let paths = paths(node)?;
    let mut samples: Vec<Vec<Sample>> = paths.iter().map(|_| Vec::with_capacity(ROUNDS)).collect();
    let (mut wanted, began) = (None, std::time::Instant::now());
    for round in 0..ROUNDS {
        if round > 0 && began.elapsed() > ROUNDS_TIME {
            break;
        }
        for ((path, uri), samples) in paths.iter().zip(&mut samples) {
            let sample = measure_one(path, file, uri.as_ref(), node, io)?;
            let (wanted, found) = (*wanted.get_or_insert(sample.crc32c), sample.crc32c);
            if found != wanted {
                return Err(DemoError::Differs { path, found, wanted });
            }
            samples.push(sample);
        }
    }
    Ok(paths.iter().zip(&samples).filter_map(|((path, _), samples)| row(path, samples)).collect())
}

/// The paths to the bytes: the file itself, then NBD and byway's own protocol in turn.
fn paths(node: &Node) -> Result<Vec<(&'static str, Option<RemoteUri>)>, RemoteError> {
    let mut paths = Vec::new();
    for ready in node.ready() {
        let (place, path, uri) = match (ready.frontend, &ready.address) {
            ("nbd", Address::Tcp(at)) => (0, "NBD, TCP", format!("nbd://{at}/demo")),
            ("byway", Address::Tcp(at)) => (1, "byway's own protocol, TCP", format!("byway://{at}/demo")),
            ("nbd", Address::Unix(at)) => (2, "NBD, unix socket", format!("nbd+unix:///demo?socket={}", at.display())),
            ("byway", Address::Shared(at)) => {
                (3, "byway's own protocol, shared memory", format!("byway+shm:///demo?socket={}", at.display()))
            }
            _ => continue,
        };
        paths.push((place, path, Some(uri.parse()?)));
    }
    paths.sort_by_key(|(place, ..)| *place);
    let paths = paths.into_iter().map(|(_, path, uri)| (path, uri));
    Ok(std::iter::once(("the file itself", None)).chain(paths).collect())
}

fn measure_one(
    path: &'static str,
    file: &Path,
    uri: Option<&RemoteUri>,
    node: &Node,
    io: IoChoice,
) -> Result<Sample, DemoError> {
    let mut reactor = Reactor::open(io, FRAME_BYTES).map_err(RemoteError::Loop)?;
    let Some(uri) = uri else {
        let failed = |source| DemoError::Path { path: file.to_owned(), source };
        let mut source = FileEndpoint::source(&mut reactor, file, CLASS).map_err(failed)?;
        return measure_copy(path, &mut reactor, &mut source, node);
    };
    let mut source = open_remote(&mut reactor, uri)?;
    let measured = measure_copy(path, &mut reactor, &mut source, node);
    remote::close(&mut reactor, &mut [source.remote()]);
    measured
}

fn measure_copy(
    path: &'static str,
    reactor: &mut Reactor,
    source: &mut dyn Endpoint,
    node: &Node,
) -> Result<Sample, DemoError> {
    let mut sink = Sink::new(source.bytes());
    let copied_before = reactor.counters().copied_bytes() + node.report().snapshot().counters.copied_bytes();
    let (began, cpu) = (reactor.now(), byway_bench::own_cpu());
    let copied = copy(reactor, source, &mut sink, OPTIONS, None, &mut |_| ControlFlow::Continue(()));
    let copied = copied.map_err(|source| DemoError::Copy { path, source })?;
    let (seconds, cpu) = (reactor.now().since(began).as_secs_f64(), byway_bench::own_cpu().saturating_sub(cpu));
    let by_cpus = reactor.counters().copied_bytes() + node.report().snapshot().counters.copied_bytes();
    Ok(Sample {
        bytes: copied.moved_bytes,
        seconds,
        cpu_seconds: cpu.as_secs_f64(),
        copied_bytes: by_cpus - copied_before,
        crc32c: copied.crc32c,
    })
}

fn row(path: &'static str, samples: &[Sample]) -> Option<Row> {
    let first = samples.first()?;
    // A file of holes alone moves nothing.
    let bytes = first.bytes.max(1) as f64;
    let median_of = |figure: fn(&Sample) -> f64| median(samples.iter().map(figure).collect());
    Some(Row {
        path,
        rounds: samples.len(),
        bytes: first.bytes,
        megabytes_per_second: bytes / median_of(|sample| sample.seconds).max(1e-9) / 1e6,
        cpu_seconds_per_gigabyte: median_of(|sample| sample.cpu_seconds) / (bytes / 1e9),
        copied_bytes_per_byte: median_of(|sample| sample.copied_bytes as f64) / bytes,
        crc32c: first.crc32c,
    })
}

/// Of an even number the lower one in the middle; 0 of none.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_medians_of_its_rounds() {
        let sample =
            |seconds, copied_bytes| Sample { bytes: 4_000_000, seconds, cpu_seconds: 0.002, copied_bytes, crc32c: 7 };
        let row = row("a path", &[sample(0.5, 8_000_000), sample(0.001, 4_000_000), sample(0.002, 4_000_000)]).unwrap();
        assert_eq!((row.rounds, row.bytes, row.crc32c), (3, 4_000_000, 7));
        let figures = [row.megabytes_per_second, row.cpu_seconds_per_gigabyte, row.copied_bytes_per_byte];
        assert_eq!(figures.map(|figure| (figure * 1000.0).round() as u64), [2_000_000, 500, 1000]);
        assert!(super::row("a path", &[]).is_none());
    }
}
