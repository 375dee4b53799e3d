//! A step of a demonstration: two processes that share memory relax a grid.

use std::collections::BTreeMap;

use byway_dsm::AreaError;
use byway_dsm::launch::{JobEnd, Launch, LaunchError, Stream};
use serde::Serialize;

use super::DemoError;

const PROCESSES: usize = 2;
/// Rows of the grid, of a page each.
const ROWS: usize = 256;

/// Why the processes computed nothing.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// No process.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// One has failed, or said nothing.
    #[error("a job of {processes} processes has ended before its time: {}", said.join("; "))]
    Failed {
        /// Of the job.
        processes: usize,
        /// What they have printed.
        said: Vec<String>,
    },
}

/// What that came to.
#[derive(Debug, Serialize)]
pub(super) struct SharedShown {
    /// Why it was left out; `None`: it was not.
    left_out: Option<String>,
    processes: usize,
    rows: usize,
    pages_received: f64,
    milliseconds: f64,
    alone_milliseconds: f64,
}

impl SharedShown {
    fn left_out(why: &AreaError) -> Self {
        Self {
            left_out: Some(why.to_string()),
            processes: PROCESSES,
            rows: ROWS,
            pages_received: 0.0,
            milliseconds: 0.0,
            alone_milliseconds: 0.0,
        }
    }

    /// For people.
    pub(super) fn sentence(&self) -> String {
        if let Some(why) = &self.left_out {
            return format!("Memory shared by processes was left out: {why}.");
        }
        format!(
            "{} processes that share memory relaxed a grid of {} rows, a page each, in {:.0} ms (one process: {:.0} ms), with the same result. \
             {:.0} pages\ncame to the first process from the second; both load and store as threads do.",
            self.processes, self.rows, self.milliseconds, self.alone_milliseconds, self.pages_received
        )
    }
}

/// Relaxes the grid in one process and in two.
pub(super) fn show() -> Result<SharedShown, DemoError> {
    if let Err(why) = byway_dsm::check() {
        // Not every user may handle page faults.
        return Ok(SharedShown::left_out(&why));
    }
    let (alone, together) = (relax(1)?, relax(PROCESSES)?);
    if together["result"].to_bits() != alone["result"].to_bits() {
        return Err(DemoError::SharedDiffers);
    }
    Ok(SharedShown {
        left_out: None,
        processes: PROCESSES,
        rows: ROWS,
        pages_received: together["pages"],
        milliseconds: together["ms"],
        alone_milliseconds: alone["ms"],
    })
}

/// What the first process says, by name.
fn relax(processes: usize) -> Result<BTreeMap<String, f64>, SharedError> {
    let program = std::env::current_exe().map_err(LaunchError::from)?;
    let rows = ROWS.to_string();
    let arguments = ["bench", "shared-memory-program", "sor", "--rows", &rows].map(Into::into).to_vec();
    let mut said = Vec::new();
    let job = Launch { arguments, ..Launch::new(processes, program) }.start()?;
    let end = job.wait(|_, _: Stream, line| said.push(String::from_utf8_lossy(line).into_owned()));
    let number = |line: &String| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    let figures: BTreeMap<String, f64> = said.iter().filter_map(number).collect();
    let has_all = ["result", "ms", "pages"].iter().all(|name| figures.contains_key(*name));
    if end == JobEnd::Well && has_all { Ok(figures) } else { Err(SharedError::Failed { processes, said }) }
}
