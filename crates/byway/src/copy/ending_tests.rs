//! What a copy that ends early records: only what a successful flush covers, and it says how much that is.

use std::cell::Cell;
use std::rc::Rc;

use super::*;

const MIB: u64 = 1 << 20;
const DEEP: CopyOptions = CopyOptions { depth: 4, chunk_bytes: MIB as usize, verify: false };
/// So much is written when the first checkpoint comes.
const CHECKPOINT: u64 = 256 * MIB;

/// What both ends and the caller know of each other.
#[derive(Default)]
struct Scene {
    /// Flushes that were asked for.
    flushes: Cell<u32>,
    /// Pieces that were written behind the first flush.
    later_writes: Cell<u32>,
    /// The source fails where the first pieces behind the checkpoint end.
    source_fails: bool,
    source_failed: Cell<bool>,
    /// The source's server does not answer once the copy was stopped.
    source_is_lost: bool,
    stopped: Cell<bool>,
}

impl Scene {
    fn is_ending(&self) -> bool {
        self.source_failed.get() || self.stopped.get()
    }
}

/// Any bytes.
struct Source {
    scene: Rc<Scene>,
    done: Vec<Done>,
}

impl Endpoint for Source {
    fn bytes(&self) -> u64 {
        2 * CHECKPOINT
    }
    fn is_blank(&self) -> bool {
        false
    }
    fn identity(&self) -> String {
        "source".to_owned()
    }
    fn class(&self) -> u8 {
        1
    }
    fn lost_at(&self) -> Option<byway_reactor::Instant> {
        (self.scene.source_is_lost && self.scene.stopped.get()).then_some(byway_reactor::Instant::ZERO)
    }
    fn submit(&mut self, _reactor: &mut Reactor, id: u32, request: Request) {
        let answer = match request {
            Request::Read { .. } if self.scene.source_fails && self.scene.later_writes.get() >= 2 => {
                self.scene.source_failed.set(true);
                Answer::Read(Err(FAULT))
            }
            Request::Read { into, .. } => Answer::Read(Ok(into)),
            Request::Extents { len, .. } => Answer::Extents(Ok(vec![byway_reactor::Extent { len, hole: false }])),
            other => panic!("{other:?}"),
        };
        self.done.push(Done { id, answer });
    }
    fn complete(&mut self, _reactor: &mut Reactor, _completion: Completion, _done: &mut Vec<Done>) {}
    fn turn(&mut self, _reactor: &mut Reactor, done: &mut Vec<Done>) {
        done.append(&mut self.done);
    }
}

/// A disk whose first flush is answered once the copy is ending. If it `loses` bytes, that flush says so and the next ones
/// succeed, as in Linux.
struct Lossy {
    scene: Rc<Scene>,
    done: Vec<Done>,
    flush: Option<u32>,
    /// Turns in which the flush could have been answered.
    turns: u32,
    loses: bool,
}

impl Endpoint for Lossy {
    fn bytes(&self) -> u64 {
        2 * CHECKPOINT
    }
    fn is_blank(&self) -> bool {
        true
    }
    fn identity(&self) -> String {
        "destination".to_owned()
    }
    fn class(&self) -> u8 {
        2
    }
    fn submit(&mut self, _reactor: &mut Reactor, id: u32, request: Request) {
        match request {
            Request::Flush => {
                self.scene.flushes.set(self.scene.flushes.get() + 1);
                if self.scene.flushes.get() == 1 {
                    self.flush = Some(id);
                    return;
                }
            }
            _ if self.flush.is_some() => self.scene.later_writes.set(self.scene.later_writes.get() + 1),
            _ => {}
        }
        self.done.push(Done { id, answer: Answer::Changed(Ok(())) });
    }
    fn complete(&mut self, _reactor: &mut Reactor, _completion: Completion, _done: &mut Vec<Done>) {}
    fn turn(&mut self, _reactor: &mut Reactor, done: &mut Vec<Done>) {
        done.append(&mut self.done);
        let Some(id) = self.flush.filter(|_| self.scene.is_ending()) else { return };
        self.turns += 1;
        // The engine has two turns before it asks its caller again.
        if self.turns > 2 {
            self.flush = None;
            done.push(Done { id, answer: Answer::Changed(if self.loses { Err(FAULT) } else { Ok(()) }) });
        }
    }
}

/// Copies until the source fails, or `stop` says so of the bytes that are done. Gives the error, and the bytes that the
/// resume file tells of.
fn end_early(scene: Scene, loses: bool, stop: impl Fn(&Scene, u64) -> bool) -> (CopyError, u64, Rc<Scene>) {
    let bench = Bench::new();
    let mut reactor = Reactor::open(IoChoice::Auto, 8 * MIB as usize).unwrap();
    let scene = Rc::new(scene);
    let mut source = Source { scene: Rc::clone(&scene), done: Vec::new() };
    let mut destination = Lossy { scene: Rc::clone(&scene), done: Vec::new(), flush: None, turns: 0, loses };
    let mut log = ResumeLog::open(&bench.path("log"), &[]).unwrap();
    let ended = copy(&mut reactor, &mut source, &mut destination, DEEP, Some(&mut log), &mut |progress| {
        if scene.stopped.get() || stop(&scene, progress.done_bytes) {
            scene.stopped.set(true);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    let records = log.load("source", "destination", 2 * CHECKPOINT).unwrap();
    let recorded = records.values().map(|record| record.len).sum();
    (ended.unwrap_err(), recorded, scene)
}

#[test]
fn a_flush_that_fails_while_the_copy_ends_is_not_repeated() {
    for source_fails in [true, false] {
        let stop = |scene: &Scene, _| !source_fails && scene.later_writes.get() >= 2;
        let (error, recorded, scene) = end_early(Scene { source_fails, ..Scene::default() }, true, stop);
        assert!(scene.is_ending() && scene.later_writes.get() >= 2);
        assert!(matches!(error, CopyError::Flush(FAULT)), "{error}");
        assert_eq!((recorded, scene.flushes.get()), (0, 1), "the next run must copy all of it");
    }
}

#[test]
fn a_last_flush_that_fails_is_told_although_the_copy_was_stopped() {
    let (error, recorded, scene) = end_early(Scene::default(), true, |_, done| done >= 10 * MIB);
    assert!(matches!(error, CopyError::Flush(FAULT)), "{error}");
    assert_eq!((recorded, scene.flushes.get()), (0, 1));
}

#[test]
fn a_copy_that_is_stopped_says_how_much_the_resume_file_tells_of() {
    for (source_is_lost, at) in [(false, 10 * MIB), (false, CHECKPOINT + 2 * MIB), (true, 10 * MIB)] {
        let scene = Scene { source_is_lost, ..Scene::default() };
        let (error, recorded, scene) = end_early(scene, false, |_, done| done >= at);
        // Of a server that does not answer the copy does not wait for the flush of the other end either.
        assert!(if source_is_lost { recorded == 0 } else { recorded >= at }, "{recorded}");
        assert_eq!(scene.flushes.get(), if at > CHECKPOINT { 2 } else { 1 });
        let CopyError::Stopped { recorded_bytes, bytes } = error else { panic!("{error}") };
        assert_eq!((recorded_bytes, bytes), (recorded, 2 * CHECKPOINT));
    }
}
