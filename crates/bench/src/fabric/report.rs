//! The figures of a run: of each point, and their medians over the rounds.

use serde::Serialize;

use super::part::{Mode, Tally};
use super::{FabricBenchArguments, driven, naive};
use crate::statistics::median;
use byway_remote::output;
use byway_remote::units::show_size;

/// What the paper measured where payloads were sent unasked: clients, and MB/s (Goglin, figure 9).
const PAPER: [(usize, f64); 2] = [(92, 233.0), (184, 163.0)];

/// What one point has shown, once.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Point {
    mode: Mode,
    clients: usize,
    /// Of the clients; the server is one more.
    processes: usize,
    /// Of all clients together.
    connections: usize,
    megabytes_per_second: f64,
    /// Jain's index of fairness over the clients' blocks: 1 if all had the same, 1/n if one had all.
    fairness: f64,
    p50_us: f64,
    p99_us: f64,
    server_cpu_us_per_mib: f64,
    client_cpu_us_per_mib: f64,
    /// Mean time that a request waited for a frame.
    frame_wait_us: f64,
    drops: u64,
    repeats: u64,
    wasted_bytes: u64,
}

impl Point {
    pub(super) fn new(mode: Mode, block_bytes: usize, server: &Tally, writers: &[Tally]) -> Self {
        let blocks: Vec<u64> = writers.iter().flat_map(|writer| writer.blocks.iter().copied()).collect();
        let rate: f64 = writers.iter().map(|writer| writer.blocks.iter().sum::<u64>() as f64 / writer.seconds).sum();
        let mut latencies: Vec<(u64, u64)> = writers.iter().flat_map(|writer| writer.latencies.clone()).collect();
        latencies.sort_unstable();
        let mib = |blocks: u64| (blocks.max(1) * block_bytes as u64) as f64 / f64::from(1 << 20);
        let client_cpu: f64 = writers.iter().map(|writer| writer.cpu_seconds).sum();
        Self {
            mode,
            clients: blocks.len(),
            processes: writers.len(),
            connections: blocks.len() * connections_each(mode),
            megabytes_per_second: rate * block_bytes as f64 / 1e6,
            fairness: fairness(&blocks),
            p50_us: quantile(&latencies, 0.5) / 1e3,
            p99_us: quantile(&latencies, 0.99) / 1e3,
            server_cpu_us_per_mib: server.cpu_seconds * 1e6 / mib(server.blocks.iter().sum()),
            client_cpu_us_per_mib: client_cpu * 1e6 / mib(blocks.iter().sum()),
            frame_wait_us: server.wait_mean_us,
            drops: server.drops,
            repeats: writers.iter().map(|writer| writer.repeats).sum(),
            wasted_bytes: server.wasted_bytes,
        }
    }

    /// The medians of points that differ by nothing but the round.
    fn median(points: &[&Self]) -> Self {
        let number = |figure: fn(&Self) -> f64| median(&points.iter().map(|point| figure(point)).collect::<Vec<_>>());
        Self {
            megabytes_per_second: number(|point| point.megabytes_per_second),
            fairness: number(|point| point.fairness),
            p50_us: number(|point| point.p50_us),
            p99_us: number(|point| point.p99_us),
            server_cpu_us_per_mib: number(|point| point.server_cpu_us_per_mib),
            client_cpu_us_per_mib: number(|point| point.client_cpu_us_per_mib),
            frame_wait_us: number(|point| point.frame_wait_us),
            drops: number(|point| point.drops as f64) as u64,
            repeats: number(|point| point.repeats as f64) as u64,
            wasted_bytes: number(|point| point.wasted_bytes as f64) as u64,
            ..points[0].clone()
        }
    }
}

/// Connections of a client with the server.
fn connections_each(mode: Mode) -> usize {
    match mode {
        Mode::Driven => driven::CONNECTIONS_EACH,
        Mode::Naive => naive::CONNECTIONS_EACH,
    }
}

/// (sum x)^2 / (n sum x^2) (Jain, Chiu and Hawe, 1984); 1 for nobody.
fn fairness(blocks: &[u64]) -> f64 {
    let (sum, squares) = blocks.iter().fold((0.0, 0.0), |(sum, squares), blocks| {
        let blocks = *blocks as f64;
        (sum + blocks, squares + blocks * blocks)
    });
    if squares == 0.0 { 1.0 } else { sum * sum / (blocks.len() as f64 * squares) }
}

/// Of values in order, with how often each was there; 0 for none.
fn quantile(counted: &[(u64, u64)], quantile: f64) -> f64 {
    let all: u64 = counted.iter().map(|(_, count)| count).sum();
    let wanted = (all as f64 * quantile).ceil().max(1.0) as u64;
    let mut seen = 0;
    let found = counted.iter().find(|(_, count)| {
        seen += count;
        seen >= wanted
    });
    found.map_or(0.0, |(value, _)| *value as f64)
}

/// A run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    frames: u16,
    block_bytes: u64,
    wire: super::Wire,
    store: super::Store,
    rounds: u16,
    seconds: u32,
    congestion_control: Option<String>,
    paper_megabytes_per_second_by_clients: [(usize, f64); 2],
    points: Vec<Point>,
}

impl Report {
    pub(super) fn new(arguments: &FabricBenchArguments) -> Self {
        let control = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        Self {
            frames: arguments.frames,
            block_bytes: arguments.bs,
            wire: arguments.wire,
            store: arguments.store,
            rounds: arguments.rounds,
            seconds: arguments.seconds,
            congestion_control: control.ok().map(|name| name.trim().to_owned()),
            paper_megabytes_per_second_by_clients: PAPER,
            points: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, point: Point) {
        self.points.push(point);
    }

    /// The medians, in the order in which the points came first.
    fn medians(&self) -> Vec<Point> {
        let mut keys: Vec<(usize, Mode)> = Vec::new();
        for point in &self.points {
            if !keys.contains(&(point.clients, point.mode)) {
                keys.push((point.clients, point.mode));
            }
        }
        let of = |key: &(usize, Mode)| {
            let same = |point: &&Point| (point.clients, point.mode) == *key;
            Point::median(&self.points.iter().filter(same).collect::<Vec<_>>())
        };
        keys.iter().map(of).collect()
    }

    pub(super) fn print(&self, json: bool) {
        let medians = self.medians();
        if json {
            return output::line(serde_json::json!({ "run": self, "medians": medians }));
        }
        output::line(format_args!(
            "blocks of {}, {} receive frames, {:?} ({}), store: {:?}, {} rounds of {} s\n\
             | clients | processes | connections | mode | MB/s | fairness | p50 us | p99 us | server CPU us/MiB | clients' CPU us/MiB | \
             frame wait us | drops | repeats | wasted |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            show_size(self.block_bytes),
            self.frames,
            self.wire,
            self.congestion_control.as_deref().unwrap_or("?"),
            self.store,
            self.rounds,
            self.seconds,
        ));
        for point in &medians {
            output::line(format_args!(
                "| {} | {} | {} | {} | {:.0} | {:.3} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {} | {} |",
                point.clients,
                point.processes,
                point.connections,
                if point.mode == Mode::Driven { "driven" } else { "naive" },
                point.megabytes_per_second,
                point.fairness,
                point.p50_us,
                point.p99_us,
                point.server_cpu_us_per_mib,
                point.client_cpu_us_per_mib,
                point.frame_wait_us,
                point.drops,
                point.repeats,
                show_size(point.wasted_bytes),
            ));
        }
        for (clients, rate) in PAPER {
            output::line(format_args!("paper, sent unasked: {rate} MB/s with {clients} clients"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_is_one_for_equal_shares_and_a_share_for_one_who_has_all() {
        assert!((fairness(&[7, 7, 7, 7]) - 1.0).abs() < 1e-9);
        assert!((fairness(&[9, 0, 0, 0]) - 0.25).abs() < 1e-9);
        assert!((fairness(&[0, 0]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn quantiles_count_how_often_a_value_was_there() {
        let counted = [(10, 1), (20, 98), (1000, 1)];
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|at| quantile(&counted, at) as u64), [10, 20, 20, 1000]);
        assert_eq!(quantile(&[], 0.5) as u64, 0);
    }

    #[test]
    fn a_point_sums_its_processes_and_a_median_is_taken_figure_by_figure() {
        let writer = |blocks: Vec<u64>, seconds| Tally { blocks, seconds, repeats: 2, ..Tally::default() };
        let server = Tally { blocks: vec![30], cpu_seconds: 1.0, drops: 4, ..Tally::default() };
        let writers = [writer(vec![10, 10], 1.0), writer(vec![10], 2.0)];
        let point = Point::new(Mode::Naive, 1 << 20, &server, &writers);
        assert_eq!((point.clients, point.processes, point.drops, point.repeats), (3, 2, 4, 4));
        assert_eq!(point.connections, 3, "one each");
        let driven = Point::new(Mode::Driven, 1 << 20, &server, &writers);
        assert_eq!((driven.processes, driven.connections), (2, 6), "one for messages and one for payloads each");
        assert!((point.megabytes_per_second - 25.0 * 1.048_576).abs() < 1e-6, "{point:?}");
        let faster = Point { megabytes_per_second: 1e6, p50_us: -1.0, ..point.clone() };
        let slower = Point { megabytes_per_second: 1.0, p50_us: 5.0, ..point.clone() };
        let median = Point::median(&[&faster, &point, &slower]);
        assert!((median.megabytes_per_second - point.megabytes_per_second).abs() < 1e-6);
        assert!(median.p50_us.abs() < 1e-6);
    }
}
