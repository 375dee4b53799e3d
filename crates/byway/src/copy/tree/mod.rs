//! Copies trees of files between this machine and shares, and within a share.
//!
//! One thread walks the source (`walk.rs`), makes directories, and queues the other entries (`queue.rs`). Others copy these, each by
//! calls that wait (`entry.rs`). They help each other with large files (`moving.rs`). `side.rs` is what they ask of either side. A file
//! is written under a temporary name, synced and renamed, so that the same command resumes an interrupted copy without a resume file.

mod command;
mod ends;
mod entry;
mod failure;
mod local;
mod moving;
mod queue;
mod rights;
mod run;
mod share;
mod side;
mod walk;

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::Scope;
use std::time::Duration;

pub use self::command::TreeError;
pub(super) use self::command::{concerns, run};
use self::moving::Buffers;
use self::queue::Work;
use self::run::{Folder, Run};
use self::side::Facts;

/// How often progress is reported to the caller.
const TELL_TIME: Duration = Duration::from_millis(100);

/// What is copied.
enum Source {
    /// All in a directory.
    Tree(Arc<Folder>),
    /// One entry of it, under a new name.
    Entry { folder: Arc<Folder>, name: Vec<u8>, new_name: Vec<u8>, facts: Facts },
}

/// Copies, and calls `tell` repeatedly, which may stop the copy. Prints and counts entries that were not copied.
fn copy(run: &Run, source: Source, tell: &mut dyn FnMut() -> ControlFlow<()>) -> io::Result<()> {
    let (alive, ended) = mpsc::channel::<Infallible>();
    std::thread::scope(|scope| {
        let started = (0..run.options.threads)
            .try_for_each(|_| start(scope, "byway-copy", alive.clone(), || run.work()))
            .and_then(|()| start(scope, "byway-walk", alive.clone(), || run.begin(source)));
        if started.is_err() {
            run.queue.abandon();
        }
        drop(alive);
        loop {
            match ended.recv_timeout(TELL_TIME) {
                Err(RecvTimeoutError::Disconnected) => return started,
                Err(RecvTimeoutError::Timeout) => {
                    if tell().is_break() {
                        run.stop();
                    }
                }
                Ok(never) => match never {},
            }
        }
    })
}

/// Starts a thread that has a part of a channel until its work is done.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    alive: Sender<Infallible>,
    work: impl FnOnce() + Send + 'scope,
) -> io::Result<()> {
    let body = move || {
        work();
        drop(alive);
    };
    std::thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, body).map(drop)
}

impl Run {
    fn begin(&self, source: Source) {
        match source {
            Source::Tree(folder) => self.walk(folder),
            Source::Entry { folder, name, new_name, facts } => {
                self.queue_entry(&folder, name, new_name, facts);
                self.release(folder);
            }
        }
        self.queue.close();
    }

    fn work(&self) {
        let mut buffers = Buffers::default();
        while let Some(work) = self.queue.next() {
            match work {
                Work::Help(file) => file.help(self, &mut buffers),
                Work::Entry(entry) => {
                    entry.copy(self, &mut buffers);
                    self.queue.ended();
                }
            }
        }
    }
}
