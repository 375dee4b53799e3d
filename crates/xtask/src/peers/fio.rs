//! fio's nbd engine: the same client for every server.

use super::FILE_BYTES;
use super::cases::Case;
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// What fio says of one run.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub operations: u64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub latency_p50_us: f64,
    pub latency_p99_us: f64,
}

/// Runs a case for `seconds`.
pub fn run(case: &Case, uri: &str, seconds: u32) -> Result<Outcome> {
    let text = process::output(
        Command::new("fio")
            .args(["--name=peers", "--ioengine=nbd", "--thread", "--group_reporting", "--time_based"])
            // Page-aligned buffers: an odd alignment makes the receiver's copy slow for some
            // servers' replies and not for others'.
            .args(["--iomem_align=4096", "--norandommap", "--randrepeat=1", "--output-format=json"])
            .arg(format!("--uri={uri}"))
            .arg(format!("--rw={}", case.pattern))
            .arg(format!("--bs={}", case.block_bytes))
            .arg(format!("--iodepth={}", case.depth))
            .arg(format!("--numjobs={}", case.connections))
            .arg(format!("--size={FILE_BYTES}"))
            .arg(format!("--runtime={seconds}")),
    )?;
    parse(&text, case.pattern).with_context(|| format!("{} at {uri}", case.name))
}

/// Reads or writes a local file or device past the page cache.
pub fn run_local(
    file: &Path,
    engine: &str,
    pattern: &str,
    block_bytes: u32,
    depth: u32,
    seconds: u32,
) -> Result<Outcome> {
    run_with(Command::new("fio").arg("--direct=1"), file, engine, pattern, block_bytes, depth, seconds)
}

/// The same with a command that starts fio.
pub fn run_with(
    command: &mut Command,
    file: &Path,
    engine: &str,
    pattern: &str,
    block_bytes: u32,
    depth: u32,
    seconds: u32,
) -> Result<Outcome> {
    let text = process::output(
        command
            .args(["--name=local", "--time_based"])
            .args(["--norandommap", "--randrepeat=1", "--output-format=json"])
            .arg(format!("--ioengine={engine}"))
            .arg(format!("--rw={pattern}"))
            .arg(format!("--filename={}", file.display()))
            .arg(format!("--bs={block_bytes}"))
            .arg(format!("--iodepth={depth}"))
            .arg(format!("--runtime={seconds}")),
    )?;
    parse(&text, pattern)
}

fn parse(text: &str, pattern: &str) -> Result<Outcome> {
    // fio may print notes before the object.
    let start = text.find('{').context("fio printed no JSON")?;
    let result: Value = serde_json::from_str(&text[start..])?;
    let job = &result["jobs"][0];
    if job["error"].as_i64() != Some(0) {
        bail!("fio reports error {}", job["error"]);
    }
    let side = &job[if pattern.contains("write") { "write" } else { "read" }];
    let number = |value: &Value| value.as_f64().context("a figure is missing in fio's JSON");
    let percentiles = &side["clat_ns"]["percentile"];
    let outcome = Outcome {
        operations: side["total_ios"].as_u64().context("fio's JSON has no total_ios")?,
        iops: number(&side["iops"])?,
        bytes_per_second: number(&side["bw_bytes"])?,
        latency_p50_us: number(&percentiles["50.000000"])? / 1000.0,
        latency_p99_us: number(&percentiles["99.000000"])? / 1000.0,
    };
    if outcome.operations == 0 {
        bail!("fio finished no operation");
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"note
        {"jobs": [{"error": 0, "write": {"total_ios": 0},
         "read": {"total_ios": 7, "iops": 3.5, "bw_bytes": 14336,
         "clat_ns": {"percentile": {"50.000000": 1500, "99.000000": 9000}}}}]}"#;

    #[test]
    fn the_figures_are_found() {
        let expected =
            Outcome { operations: 7, iops: 3.5, bytes_per_second: 14336.0, latency_p50_us: 1.5, latency_p99_us: 9.0 };
        assert_eq!(parse(GOOD, "randread").unwrap(), expected);
    }

    #[test]
    fn errors_and_empty_runs_are_not_figures() {
        assert!(parse(&GOOD.replace("\"error\": 0", "\"error\": 5"), "randread").is_err());
        assert!(parse(&GOOD.replace("\"total_ios\": 7", "\"total_ios\": 0"), "randread").is_err());
        assert!(parse(GOOD, "randwrite").is_err());
        assert!(parse("", "randread").is_err());
    }
}
