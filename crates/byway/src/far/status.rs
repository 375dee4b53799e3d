//! `byway ctl far PID`: where the pages of a job of `byway far` are.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use byway_frontend::fault::keeper::descendants;
use byway_frontend::fault::{FarStatus, ask};
use byway_frontend::latencies::Latencies;
use byway_reactor::userfault::helper::SOCKET_VARIABLE;
use rustix::process::Pid;

use crate::units::show_size;

/// Why a job told nothing.
#[derive(Debug, thiserror::Error)]
pub enum FarStatusError {
    /// It is no such job.
    #[error(
        "process {0} is not run by byway far: name the process of byway far or one of its programs, as the user that started it"
    )]
    NoJob(u32),
    /// It has started several.
    #[error("process {0} runs several jobs of byway far: name one of them, or one of its programs")]
    SeveralJobs(u32),
    /// It does not answer.
    #[error("{}: the job does not answer: {source}", path.display())]
    Silent {
        /// Its socket.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// Asks the job of a process: a program of the job, or `byway far` itself.
///
/// # Errors
/// See [`FarStatusError`].
pub(crate) fn of_process(process: u32) -> Result<FarStatus, FarStatusError> {
    let none = || FarStatusError::NoJob(process);
    let first = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or_else(none)?;
    let mut all = vec![first];
    all.extend(descendants(first).map_err(|_| none())?);
    let sockets: BTreeSet<PathBuf> = all.into_iter().filter_map(socket_of).collect();
    if sockets.len() > 1 {
        return Err(FarStatusError::SeveralJobs(process));
    }
    let path = sockets.into_iter().next().ok_or_else(none)?;
    ask(&path).map_err(|source| FarStatusError::Silent { path, source })
}

/// The pager's socket, as a program found it in its environment.
fn socket_of(process: Pid) -> Option<PathBuf> {
    let environment = std::fs::read(format!("/proc/{}/environ", process.as_raw_nonzero())).ok()?;
    let name = format!("{SOCKET_VARIABLE}=").into_bytes();
    let path = environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(&name[..]))?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(path)))
}

pub(crate) fn print(out: &mut impl Write, status: &FarStatus) -> std::io::Result<()> {
    let FarStatus { programs, limit_bytes, resident_bytes, local_bytes, far_bytes, .. } = status;
    let noun = if *programs == 1 { "program" } else { "programs" };
    writeln!(
        out,
        "{programs} {noun}: {} of {} here, of which {} can be moved out; {} far",
        show_size(*resident_bytes),
        show_size(*limit_bytes),
        show_size(*local_bytes),
        show_size(*far_bytes)
    )?;
    let FarStatus { faults_per_second, fetched_per_second, put_per_second, .. } = status;
    writeln!(out, "last second: {faults_per_second} faults, {fetched_per_second} pages fetched, {put_per_second} put")?;
    for lender in &status.lenders {
        let state = if lender.connected { "connected" } else { "not connected" };
        writeln!(out, "lender {}: {state}; {} in {} slabs", lender.name, show_size(lender.bytes), lender.slabs)?;
    }
    if let Some(bytes) = status.file_bytes {
        writeln!(out, "spill file: {}", show_size(bytes))?;
    }
    if let Some(text) = percentiles(&status.latencies) {
        writeln!(out, "waits for a page: {text}")?;
    }
    let mut least = 0;
    for (us, waits) in status.latencies.buckets() {
        writeln!(out, "  {least:>8} to {us:>8} us: {waits}")?;
        least = us;
    }
    Ok(())
}

/// Half of some waits or calls, and nearly all.
pub(crate) fn percentiles(latencies: &Latencies) -> Option<String> {
    let [half, most] = [50, 99].map(|percent| latencies.percentile_us(percent));
    Some(format!("50 % at most {} us, 99 % at most {} us", half?, most?))
}
