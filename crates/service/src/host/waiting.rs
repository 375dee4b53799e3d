//! The order in which waiting requests get frames.
//!
//! Requests wait in a queue that is fair between sessions by bytes ([`Deficit`]). A request that arrives while others wait
//! goes to the end of its session's queue, even if there would be frames for it: otherwise small requests would pass a large
//! one for ever.
//!
//! A session may not take all frames by requesting much and receiving slowly either. It gets more only while the frames that
//! it holds (at the stores, and in answers that it has not received) are no more than the free ones. So one session gets
//! half of the pool at most, two sessions a third each, and some frames are always free for new sessions. This is the
//! dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998). A session above it has requests in progress, and
//! their ends serve the queues again.

use byway_fabric::{Deficit, Fabric, SessionId};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Instant, Reactor};

use super::Sessions;

/// What waits for frames.
#[derive(Debug)]
pub struct Line<T> {
    ring: Deficit<Waiting<T>>,
}

/// It, and since when.
#[derive(Debug)]
struct Waiting<T> {
    queued: T,
    since: Instant,
    /// Some of it was begun.
    begun: bool,
}

/// What became of something whose turn it was.
#[derive(Debug)]
pub enum Tried<T> {
    /// So many bytes of it were begun, and that was all.
    All(u64),
    /// So many bytes of it were begun; there is more.
    Part(u64, T),
    /// There are no frames.
    NoFrames(T),
    /// It waits for something of its own, and holds up no other session.
    Waits(T),
}

/// The owner of a line, which feeds it.
pub trait Feeds<T> {
    /// The line.
    fn line(&mut self) -> &mut Line<T>;
    /// The sessions.
    fn sessions(&self) -> &Sessions;
    /// Tries what waited.
    fn try_one(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, queued: T) -> Tried<T>;
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self { ring: Deficit::default() }
    }
}

impl<T> Line<T> {
    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Puts something at the end of its session's queue.
    pub fn push(&mut self, reactor: &Reactor, session: SessionId, queued: T) {
        self.ring.push(session.index as usize, Waiting { queued, since: reactor.now(), begun: false });
    }

    /// Gives back what of a session waits, which is not begun any more.
    pub fn leave(&mut self, session: SessionId) -> impl Iterator<Item = T> + use<T> {
        self.ring.leave(session.index as usize).into_iter().map(|waiting| waiting.queued)
    }
}

/// Gives those that wait in a line their turns, as long as there are frames. Sessions that must wait for something of their own are
/// passed over: those that hold too much, and those of which that is said.
pub fn feed<T, F: Feeds<T>>(of: &mut F, fabric: &mut Fabric, reactor: &mut Reactor) {
    let mut passed_over = 0;
    loop {
        let Some((flow, _)) = of.line().ring.front() else { return };
        let Some(session) = of.sessions().at(flow) else {
            debug_assert!(false, "who is gone waits for nothing");
            of.line().ring.leave(flow);
            continue;
        };
        let holds_too_much = of.sessions().holds_too_much(fabric, reactor, session);
        let Some(Waiting { queued, since, begun }) = of.line().ring.take(flow) else { return };
        let tried = if holds_too_much { Tried::Waits(queued) } else { of.try_one(fabric, reactor, queued) };
        if !begun && matches!(tried, Tried::All(_) | Tried::Part(..)) {
            fabric.note_start(session, reactor.now().since(since));
        }
        let ring = &mut of.line().ring;
        match tried {
            Tried::All(bytes) => {
                ring.charge(flow, bytes);
                passed_over = 0;
            }
            Tried::Part(bytes, queued) => {
                ring.put_back(flow, Waiting { queued, since, begun: true });
                ring.charge(flow, bytes);
                passed_over = 0;
            }
            Tried::NoFrames(queued) => {
                ring.put_back(flow, Waiting { queued, since, begun });
                if seeded::is(Bug::LostWakeUp) {
                    ring.leave(flow);
                }
                return;
            }
            Tried::Waits(queued) => {
                ring.put_back(flow, Waiting { queued, since, begun });
                ring.pass_over();
                passed_over += 1;
                if passed_over >= ring.flows() {
                    return;
                }
            }
        }
    }
}
