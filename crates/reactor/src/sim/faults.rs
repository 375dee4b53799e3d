//! The faults of a world, their probabilities, and their counts.

use std::time::Duration;

/// What chance does to a world. Everything is off by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultPlan {
    /// Partitions of two random nodes, per simulated second (0 to 100).
    pub partitions_per_second: f64,
    /// The longest that such a partition lasts.
    pub partition_max: Duration,
    /// Resets of a random connection, per simulated second (0 to 100).
    pub resets_per_second: f64,
    /// Stalls of a random link, per simulated second (0 to 100).
    pub delays_per_second: f64,
    /// The longest that such a stall lasts.
    pub delay_max: Duration,
    /// Probability that a file read answers `EIO`.
    pub read_error: f64,
    /// Probability that a file write answers `EIO`; a prefix of its sectors may have been written.
    pub write_error: f64,
    /// Probability that a sync or a durable write answers `EIO` or `ENOSPC` for what was written before; what was not
    /// yet durable may then be lost, and no later sync is told. After that `ENOSPC` the next writes may find no room either.
    pub sync_error: f64,
    /// Probability that a file write answers `ENOSPC`; a prefix of its sectors may have been written.
    pub no_space: f64,
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self {
            partitions_per_second: 0.0,
            partition_max: Duration::from_secs(1),
            resets_per_second: 0.0,
            delays_per_second: 0.0,
            delay_max: Duration::from_millis(100),
            read_error: 0.0,
            write_error: 0.0,
            sync_error: 0.0,
            no_space: 0.0,
        }
    }
}

/// How often something went wrong so far, by the plan or because a test asked for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCount {
    /// Partitions.
    pub partitions: u64,
    /// Connections reset, other than by a crash.
    pub resets: u64,
    /// Connections that timed out in a partition, and connects that did.
    pub timeouts: u64,
    /// Stalled links.
    pub delays: u64,
    /// Crashes of nodes.
    pub crashes: u64,
    /// File operations that failed.
    pub disk_errors: u64,
    /// Sectors that a power loss took back to an older value.
    pub lost_sectors: u64,
}

impl FaultCount {
    /// All of them, without the sectors.
    pub fn total(&self) -> u64 {
        self.partitions + self.resets + self.timeouts + self.delays + self.crashes + self.disk_errors
    }
}
