//! The changes of a volume that are at its store, on any loop, so that a client can wait for those of its own earlier
//! connection (docs/decisions/0033).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The changes of a volume on all loops.
#[derive(Debug, Default)]
pub(super) struct Changes {
    loops: Mutex<Vec<Weak<Progress>>>,
    /// Clients that have come.
    arrivals: AtomicU64,
    /// Held once more for each client that is there.
    clients: Arc<()>,
    /// Clients that have left while requests of theirs were at the store.
    departures: AtomicU64,
}

/// How far one loop is. Only that loop writes it.
#[derive(Debug, Default)]
struct Progress {
    begun: AtomicU64,
    /// Every change up to this number has ended.
    ended: AtomicU64,
    /// Odd while the loop begins changes of a connection: see [`LoopChanges::begin_batch`].
    batch: AtomicU64,
}

/// The changes of a volume on one loop, numbered as they begin.
#[derive(Debug)]
pub(super) struct LoopChanges {
    progress: Arc<Progress>,
    in_flight: BTreeSet<u64>,
}

/// A client of a volume that has come, until it has gone.
#[derive(Debug)]
pub struct Presence {
    /// How many had come with it.
    number: u64,
    /// Another was there when it came, or at any look since.
    had_others: bool,
    _client: Arc<()>,
}

/// The changes of a volume that were at the store, or about to begin, at a certain time.
#[derive(Debug)]
pub struct EarlierChanges {
    left: Vec<Earlier>,
    departures: u64,
}

/// Those of one loop.
#[derive(Debug)]
struct Earlier {
    progress: Weak<Progress>,
    /// The batch that the loop was in. Until it ends, more of the earlier changes may begin.
    batch: Option<u64>,
    /// The number of the last.
    last: u64,
}

impl Changes {
    /// A loop begins to serve the volume.
    pub(super) fn join(&self) -> LoopChanges {
        let progress = Arc::<Progress>::default();
        let mut loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        loops.retain(|one| one.strong_count() > 0);
        loops.push(Arc::downgrade(&progress));
        LoopChanges { progress, in_flight: BTreeSet::new() }
    }

    /// A client has come.
    pub(super) fn arrive(&self) -> Presence {
        let client = Arc::clone(&self.clients);
        let number = self.arrivals.fetch_add(1, Ordering::SeqCst) + 1;
        Presence { number, had_others: Arc::strong_count(&self.clients) > 2, _client: client }
    }

    /// Whether another client is there, or was at any time since this one came: it may have sent again what this one has not begun.
    pub(super) fn has_others(&self, client: &mut Presence) -> bool {
        // One for the volume, one for the client.
        let is_alone = self.arrivals.load(Ordering::SeqCst) == client.number && Arc::strong_count(&self.clients) <= 2;
        client.had_others |= !is_alone;
        client.had_others
    }

    /// A client has left while requests of it were at the store.
    pub(super) fn depart(&self) {
        self.departures.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn departures(&self) -> u64 {
        self.departures.load(Ordering::SeqCst)
    }

    /// The changes that began before now. Not to be called within a batch of the same loop, which would wait for itself.
    pub(super) fn earlier(&self) -> EarlierChanges {
        // First: a departure in the meantime is then seen as a new one.
        let departures = self.departures();
        let loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        let mark = |one: &Weak<Progress>| {
            let progress = one.upgrade()?;
            let batch = progress.batch.load(Ordering::SeqCst);
            let last = progress.begun.load(Ordering::SeqCst);
            Some(Earlier { progress: Weak::clone(one), batch: (batch % 2 == 1).then_some(batch), last })
        };
        EarlierChanges { left: loops.iter().filter_map(mark).collect(), departures }
    }
}

impl LoopChanges {
    /// The loop is about to begin changes of one connection, and looks afterwards whether clients have come or left. The order
    /// matters: either the loop sees a client that has come, or that client sees the batch, and waits for its end.
    pub(super) fn begin_batch(&self) {
        let batch = self.progress.batch.load(Ordering::Relaxed);
        debug_assert!(batch.is_multiple_of(2), "a loop has one batch at a time");
        self.progress.batch.store(batch + 1, Ordering::SeqCst);
    }

    /// All changes of the batch have begun. Those that the page cache took have ended, too.
    pub(super) fn end_batch(&self) {
        let batch = self.progress.batch.load(Ordering::Relaxed);
        self.progress.batch.store(batch + 1, Ordering::Release);
    }

    /// A change is about to be submitted; gives its number.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.progress.begun.load(Ordering::Relaxed) + 1;
        self.in_flight.insert(number);
        self.progress.begun.store(number, Ordering::SeqCst);
        number
    }

    /// A change has ended.
    pub(super) fn end(&mut self, number: u64) {
        self.in_flight.remove(&number);
        let begun = self.progress.begun.load(Ordering::Relaxed);
        let ended = self.in_flight.first().map_or(begun, |oldest| oldest - 1);
        self.progress.ended.store(ended, Ordering::Release);
    }
}

impl EarlierChanges {
    /// Whether all of them have ended.
    pub fn have_ended(&mut self) -> bool {
        self.left.retain_mut(|earlier| {
            // A loop that is gone has no operation in flight.
            let Some(progress) = earlier.progress.upgrade() else { return false };
            if let Some(batch) = earlier.batch {
                if progress.batch.load(Ordering::Acquire) == batch {
                    return true;
                }
                earlier.batch = None;
                earlier.last = progress.begun.load(Ordering::SeqCst);
            }
            progress.ended.load(Ordering::Acquire) < earlier.last
        });
        self.left.is_empty()
    }

    /// How many clients of the volume had left while requests of theirs were at the store.
    pub fn departures(&self) -> u64 {
        self.departures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_waits_for_what_began_before_it_on_any_loop_and_for_nothing_else() {
        let changes = Changes::default();
        let (mut one, mut other) = (changes.join(), changes.join());
        let (first, second, third) = (one.begin(), one.begin(), other.begin());
        let mut earlier = changes.earlier();
        let later = one.begin();
        one.end(second);
        other.end(third);
        assert!(!earlier.have_ended(), "the first is at the store");
        one.end(first);
        assert!(earlier.have_ended(), "what began later does not count");
        one.end(later);
        assert!(changes.earlier().have_ended());
    }

    #[test]
    fn a_loop_that_is_gone_holds_up_no_client() {
        let changes = Changes::default();
        let mut gone = changes.join();
        gone.begin();
        let mut earlier = changes.earlier();
        assert!(!earlier.have_ended());
        drop(gone);
        assert!(earlier.have_ended());
    }

    #[test]
    fn a_client_has_others_for_good_once_there_was_one() {
        let changes = Changes::default();
        let mut first = changes.arrive();
        assert!(!changes.has_others(&mut first));
        let mut second = changes.arrive();
        assert!(changes.has_others(&mut first) && changes.has_others(&mut second));
        drop(first);
        assert!(
            changes.has_others(&mut second) && changes.has_others(&mut second),
            "it may have sent again before it left"
        );
        drop(second);
        let mut third = changes.arrive();
        assert!(!changes.has_others(&mut third));
        drop(changes.arrive());
        assert!(changes.has_others(&mut third) && changes.has_others(&mut third));
        let fourth = changes.arrive();
        drop(third);
        let mut fifth = changes.arrive();
        drop(fourth);
        assert!(changes.has_others(&mut fifth), "it was there when this one came, and left before the first look");
    }

    /// What a loop does with a change of an old connection, step by step.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Old {
        BeginBatch,
        /// Whether another client has come: then the change is not begun.
        Look,
        /// Not for a change that the page cache takes.
        Number,
        Land,
        EndBatch,
        /// Of one that has a number; it lands late.
        LandLate,
    }

    /// What another loop does for a new connection and its change.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum New {
        Arrive,
        Mark,
        Ask,
    }

    const AT_ONCE: &[Old] = &[Old::BeginBatch, Old::Look, Old::Land, Old::EndBatch];
    const AT_STORE: &[Old] = &[Old::BeginBatch, Old::Look, Old::Number, Old::EndBatch, Old::LandLate];
    const NEW: &[New] = &[New::Arrive, New::Mark, New::Ask, New::Ask];

    /// Plays one order of the steps: `turns` has true where the old connection's loop is next.
    fn play(old: &[Old], turns: &[bool]) {
        let changes = Changes::default();
        let mut on_loop = changes.join();
        let (mut old_left, mut new_left) = (old.iter(), NEW.iter());
        let (mut refused, mut landed, mut number, mut earlier, mut done) = (false, false, 0, None, false);
        let mut land = |done: bool| {
            landed = true;
            assert!(!done, "the old change lands over the new one: {old:?} {turns:?}");
        };
        for turn in turns {
            if *turn {
                match old_left.next().unwrap() {
                    Old::BeginBatch => on_loop.begin_batch(),
                    Old::Look => refused = changes.arrivals.load(Ordering::SeqCst) > 0,
                    Old::Number if !refused => number = on_loop.begin(),
                    Old::Land if !refused => land(done),
                    Old::LandLate if !refused => {
                        land(done);
                        on_loop.end(number);
                    }
                    Old::EndBatch => on_loop.end_batch(),
                    _ => {}
                }
            } else {
                match new_left.next().unwrap() {
                    New::Arrive => drop(changes.arrive()),
                    New::Mark => earlier = Some(changes.earlier()),
                    New::Ask => done |= earlier.as_mut().is_some_and(EarlierChanges::have_ended),
                }
            }
        }
        assert!(landed || refused);
        assert!(earlier.unwrap().have_ended(), "the new change waits for ever: {old:?} {turns:?}");
    }

    #[test]
    fn in_no_order_of_the_loops_steps_does_an_old_change_land_over_a_new_one() {
        for old in [AT_ONCE, AT_STORE] {
            let steps = old.len() + NEW.len();
            for order in 0u32..1 << steps {
                if order.count_ones() as usize == old.len() {
                    let turns: Vec<bool> = (0..steps).map(|step| order >> step & 1 == 1).collect();
                    play(old, &turns);
                }
            }
        }
    }
}
