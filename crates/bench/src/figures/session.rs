//! A run's parameters for its experiments: duration, rounds, a folder, and the progress display.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::workplace::Workplace;
use byway_remote::{RemoteError, TransferError};

/// Why an experiment could not be run.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    /// A program that it needs.
    #[error("cannot run a program of the experiment: {0}")]
    Child(std::io::Error),
    /// A node.
    #[error("byway serve {0} did not start; its messages are above")]
    Server(String),
    /// Its files.
    #[error("{}: {source}; give a folder with room, --files", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The loop.
    #[error("the event loop: {0}")]
    Loop(std::io::Error),
    /// The volume.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A request.
    #[error("a request failed: {0}")]
    Request(#[from] TransferError),
    /// What is measured by the fabric.
    #[error("{0}")]
    Fabric(String),
    /// The machine.
    #[error("{0}")]
    Machine(&'static str),
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// Of each point, interleaved.
    pub(super) rounds: usize,
    /// Of each point in a round.
    pub(super) time: Duration,
    /// Few points, for tests.
    pub(super) quick: bool,
}

impl Scale {
    /// The points of a full run, or of a quick one.
    pub(super) fn points<'a, T>(&self, full: &'a [T], quick: &'a [T]) -> &'a [T] {
        if self.quick { quick } else { full }
    }
}

/// A run.
pub(super) struct Session {
    pub(super) scale: Scale,
    workplace: Workplace,
}

impl Session {
    /// Makes a folder in `files`.
    pub(super) fn new(scale: Scale, files: &Path) -> std::io::Result<Self> {
        Ok(Self { scale, workplace: Workplace::new(files, "figures")? })
    }

    /// Of this run alone; removed with it.
    pub(super) fn folder(&self) -> &Path {
        self.workplace.folder()
    }

    /// Makes a file of noise, unless there is one of that name.
    pub(super) fn image(&self, name: &str, bytes: u64) -> Result<PathBuf, RunError> {
        let path = self.folder().join(name);
        if path.exists() {
            return Ok(path);
        }
        let made = self.workplace.make_image(name, bytes);
        made.and_then(|path| std::fs::File::open(&path)?.sync_all().map(|()| path.clone()))
            .map_err(|source| RunError::File { path, source })
    }

    /// Says what is under way.
    pub(super) fn say(&self, what: &str) {
        // Nobody need read it.
        let _ = writeln!(std::io::stderr(), "figures: {what}");
    }
}
