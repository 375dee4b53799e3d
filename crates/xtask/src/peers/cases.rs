//! The cases, and what byway must reach in each against nbdkit's file plugin.

use super::Sample;
use std::fmt;

/// How the client reaches the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Unix,
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        })
    }
}

/// A figure that has a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    Iops,
    Bandwidth,
    LatencyP50,
    ServerCpu,
    ClientCpu,
    MachineCpu,
}

impl Metric {
    /// The figure in a sample.
    pub fn of(self, sample: &Sample) -> f64 {
        match self {
            Self::Iops => sample.iops,
            Self::Bandwidth => sample.megabytes_per_second,
            Self::LatencyP50 => sample.latency_p50_us,
            Self::ServerCpu => sample.server_cpu_us_per_operation,
            Self::ClientCpu => sample.client_cpu_us_per_operation,
            Self::MachineCpu => sample.machine_cpu_us_per_operation,
        }
    }

    /// Short, for a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Bandwidth => "MB/s",
            Self::LatencyP50 => "p50",
            Self::ServerCpu => "server CPU",
            Self::ClientCpu => "client CPU",
            Self::MachineCpu => "machine CPU",
        }
    }

    /// Rates are to be high, costs low.
    pub fn is_rate(self) -> bool {
        matches!(self, Self::Iops | Self::Bandwidth)
    }
}

/// A bound on the ratio to nbdkit: at least for rates, at most for costs.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub metric: Metric,
    pub ratio: f64,
}

/// What every case must keep.
pub const COMMON_TARGETS: [Target; 2] = [target(Metric::ClientCpu, 1.1), target(Metric::MachineCpu, 1.0)];

/// One load, the same for every server.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    /// fio's `--rw`.
    pub pattern: &'static str,
    pub block_bytes: u32,
    /// Per connection.
    pub depth: u32,
    pub connections: u32,
    pub transport: Transport,
    pub targets: &'static [Target],
}

const KIB: u32 = 1 << 10;
const MIB: u32 = 1 << 20;

const fn target(metric: Metric, ratio: f64) -> Target {
    Target { metric, ratio }
}

const LONE: &[Target] = &[target(Metric::LatencyP50, 0.5), target(Metric::ServerCpu, 1.0)];

/// All cases, in the order of the report.
pub const CASES: [Case; 10] = [
    Case {
        name: "4k-randread-qd1-unix",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 1,
        connections: 1,
        transport: Transport::Unix,
        targets: LONE,
    },
    Case {
        name: "4k-randread-qd1-tcp",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 1,
        connections: 1,
        transport: Transport::Tcp,
        targets: LONE,
    },
    Case {
        name: "4k-randread-qd32-unix",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 32,
        connections: 1,
        transport: Transport::Unix,
        targets: &[target(Metric::Iops, 1.5), target(Metric::ServerCpu, 0.4)],
    },
    Case {
        name: "4k-randread-qd32-tcp",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 32,
        connections: 1,
        transport: Transport::Tcp,
        targets: &[target(Metric::Iops, 1.4), target(Metric::ServerCpu, 0.4)],
    },
    Case {
        name: "4k-randwrite-qd32-tcp",
        pattern: "randwrite",
        block_bytes: 4 * KIB,
        depth: 32,
        connections: 1,
        transport: Transport::Tcp,
        targets: &[target(Metric::Iops, 1.3), target(Metric::ServerCpu, 0.5)],
    },
    Case {
        name: "4k-randread-qd32x4-tcp",
        pattern: "randread",
        block_bytes: 4 * KIB,
        depth: 32,
        connections: 4,
        transport: Transport::Tcp,
        targets: &[target(Metric::Iops, 1.5), target(Metric::ServerCpu, 0.4)],
    },
    Case {
        name: "64k-randread-qd8x4-tcp",
        pattern: "randread",
        block_bytes: 64 * KIB,
        depth: 8,
        connections: 4,
        transport: Transport::Tcp,
        targets: &[target(Metric::Bandwidth, 1.5), target(Metric::ServerCpu, 0.5)],
    },
    Case {
        name: "1m-randread-qd8-unix",
        pattern: "randread",
        block_bytes: MIB,
        depth: 8,
        connections: 1,
        transport: Transport::Unix,
        targets: &[target(Metric::Bandwidth, 2.0), target(Metric::ServerCpu, 0.45)],
    },
    Case {
        name: "1m-randread-qd8-tcp",
        pattern: "randread",
        block_bytes: MIB,
        depth: 8,
        connections: 1,
        transport: Transport::Tcp,
        targets: &[target(Metric::Bandwidth, 1.5), target(Metric::ServerCpu, 0.5)],
    },
    Case {
        name: "1m-write-qd8-tcp",
        pattern: "write",
        block_bytes: MIB,
        depth: 8,
        connections: 1,
        transport: Transport::Tcp,
        targets: &[target(Metric::Bandwidth, 1.3), target(Metric::ServerCpu, 0.7)],
    },
];
