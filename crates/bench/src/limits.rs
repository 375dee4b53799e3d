//! The bounds of the benches, and what happens at each.

use std::time::Duration;

/// Clients of one point of `byway bench fabric`; more are refused. Each has up to two connections and 128 KiB of memory.
pub const BENCH_CLIENTS_MAX: i64 = 1024;

/// Points of `byway bench fabric`; more are refused.
pub const BENCH_POINTS_MAX: usize = 64;

/// The first pause of a client of the naive transfer whose block was dropped; each next one is twice as long.
pub const NAIVE_PAUSE_MIN: Duration = Duration::from_millis(1);

/// The longest pause of a client whose block was dropped.
pub const NAIVE_PAUSE_MAX: Duration = Duration::from_millis(128);
