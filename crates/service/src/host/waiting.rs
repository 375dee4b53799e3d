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
//!
//! Over shared memory the loop itself copies the bytes of a transfer. It begins transfers of a bounded number of bytes in a turn
//! ([`Sessions::turn_is_full`]), and continues in the next one; requests of other clients are taken in between.

use byway_fabric::{Deficit, Fabric, SessionId};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Instant, Reactor};

use super::Sessions;

/// A queue of requests that wait for frames.
#[derive(Debug)]
pub struct Line<T> {
    ring: Deficit<Waiting<T>>,
}

/// A waiting request.
#[derive(Debug)]
struct Waiting<T> {
    queued: T,
    since: Instant,
    /// A part of it was begun.
    begun: bool,
}

/// What became of a request whose turn it was.
#[derive(Debug)]
pub enum Tried<T> {
    /// All of it was begun: so many bytes.
    All(u64),
    /// So many bytes of it were begun; there is more.
    Part(u64, T),
    /// There are no frames.
    NoFrames(T),
    /// It waits for something else, such as its volume's rate, and does not hold up other sessions.
    Waits(T),
}

/// The owner of a line.
pub trait Feeds<T> {
    /// The line.
    fn line(&mut self) -> &mut Line<T>;
    /// The sessions.
    fn sessions(&self) -> &Sessions;
    /// Tries to begin a waiting request.
    fn try_one(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, queued: T) -> Tried<T>;
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self { ring: Deficit::default() }
    }
}

impl<T> Line<T> {
    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Appends a request to its session's queue.
    pub fn push(&mut self, reactor: &Reactor, session: SessionId, queued: T) {
        self.ring.push(session.index as usize, Waiting { queued, since: reactor.now(), begun: false });
    }

    /// Removes a session's waiting requests, and returns them.
    pub fn leave(&mut self, session: SessionId) -> impl Iterator<Item = T> + use<T> {
        self.ring.leave(session.index as usize).into_iter().map(|waiting| waiting.queued)
    }
}

/// Begins the waiting requests of a line in turn, until frames run out or the turn is full. Passes over sessions that hold too many
/// frames, and those whose request waits for something else.
pub fn feed<T, F: Feeds<T>>(of: &mut F, fabric: &mut Fabric, reactor: &mut Reactor) {
    let mut passed_over = 0;
    while !of.sessions().turn_is_full() {
        let Some((flow, _)) = of.line().ring.front() else { return };
        let Some(session) = of.sessions().at(flow) else {
            debug_assert!(false, "nothing of an ended session waits");
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
