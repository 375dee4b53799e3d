//! The rules, against holders that answer late, return rights, go, or say nothing until their lease has run out.

use std::collections::VecDeque;
use std::time::Duration;

use byway_reactor::Instant;
use proptest::prelude::*;

use super::{Action, Delivery, Mode, Object, Refused};

const HOLDERS: usize = 4;
const LEASE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
enum Step {
    Ask(usize, Mode),
    /// The holder takes its next message.
    Hear(usize),
    /// The object takes the holder's next message.
    Answer(usize),
    Release(usize),
    Gone(usize),
    Wait(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let holder = || 0..HOLDERS;
    let mode = prop_oneof![Just(Mode::Read), Just(Mode::Write)];
    let step = prop_oneof![
        6 => (holder(), mode).prop_map(|(holder, mode)| Step::Ask(holder, mode)),
        6 => holder().prop_map(Step::Hear),
        6 => holder().prop_map(Step::Answer),
        2 => holder().prop_map(Step::Release),
        1 => holder().prop_map(Step::Gone),
        2 => (1..60_u8).prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 1..200)
}

#[derive(Clone, Copy, Debug)]
enum Said {
    Asks(Mode),
    Recalled(u64),
    Delivered(u64),
    Released(u64),
}

#[derive(Debug, Default)]
struct Holder {
    /// When it sent the ask that it waits for.
    asked: Option<Instant>,
    /// What it believes to have: the mode, the version, until when.
    has: Option<(Mode, u64, Instant)>,
    inbox: VecDeque<Action<usize>>,
    outbox: VecDeque<Said>,
    recalls: usize,
}

struct World {
    object: Object<usize>,
    delivery: Delivery,
    lease: Option<Duration>,
    now: Instant,
    holders: [Holder; HOLDERS],
    /// Asks that wait, in their order.
    queue: VecDeque<usize>,
    fenced: Vec<(usize, u64)>,
}

impl World {
    fn new(lease: Option<Duration>, delivery: Delivery) -> Self {
        let (object, holders) = (Object::new(lease, delivery), Default::default());
        let (now, queue, fenced) = (Instant::ZERO, VecDeque::new(), Vec::new());
        Self { object, delivery, lease, now, holders, queue, fenced }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(holder, mode) => {
                if self.holders[holder].asked.is_none() {
                    self.holders[holder].asked = Some(self.now);
                    self.holders[holder].outbox.push_back(Said::Asks(mode));
                }
            }
            Step::Hear(holder) => self.hear(holder),
            Step::Answer(holder) => self.answer(holder),
            Step::Release(holder) => {
                let holder = &mut self.holders[holder];
                if let (Some((_, version, _)), None) = (holder.has, holder.asked) {
                    holder.has = None;
                    holder.outbox.push_back(Said::Released(version));
                }
            }
            Step::Gone(holder) => {
                self.holders[holder] = Holder::default();
                self.queue.retain(|other| *other != holder);
                self.object.gone(holder, self.now);
                assert_eq!(self.object.mode(holder), Mode::None, "a holder that has gone keeps nothing");
            }
            Step::Wait(millis) => {
                self.now = self.now + Duration::from_millis(u64::from(millis));
                self.object.time(self.now);
            }
        }
        self.take_actions();
        self.check();
    }

    fn ask(&mut self, holder: usize, mode: Mode) {
        let before = self.object.next_version();
        self.queue.push_back(holder);
        self.object.ask(holder, mode, self.now).unwrap();
        if self.object.next_version() == before && self.object.asks.iter().all(|ask| ask.holder != holder) {
            // It has the right already, and no other ask came between.
            self.queue.pop_back();
        }
    }

    fn take_actions(&mut self) {
        while let Some(action) = self.object.next_action() {
            match action {
                Action::Grant { holder, version, .. } => {
                    if self.queue.contains(&holder) {
                        assert_eq!(self.queue.pop_front(), Some(holder), "version {version} before an earlier ask");
                    }
                    self.holders[holder].inbox.push_back(action);
                }
                Action::Recall { holder, .. } => {
                    self.holders[holder].recalls += 1;
                    assert_eq!(self.holders[holder].recalls, 1, "a second recall of one holder is on its way");
                    self.holders[holder].inbox.push_back(action);
                }
                Action::Fence { holder, version } => {
                    assert!(self.lease.is_some(), "without leases nobody is fenced");
                    self.fenced.push((holder, version));
                    self.holders[holder].recalls = 0;
                }
            }
        }
    }

    fn hear(&mut self, holder: usize) {
        let heard = &mut self.holders[holder];
        // Where grants need confirmation, recalls overtake them.
        let is_recall = |action: &Action<usize>| matches!(action, Action::Recall { .. });
        let overtakes = heard.inbox.iter().position(is_recall).filter(|_| self.delivery == Delivery::Confirmed);
        match heard.inbox.remove(overtakes.unwrap_or(0)) {
            Some(Action::Grant { mode, version, .. }) => {
                let Some(asked) = heard.asked.take() else { return };
                heard.has = Some((mode, version, self.lease.map_or(Instant::FAR, |lease| asked + lease)));
                if self.delivery == Delivery::Confirmed {
                    heard.outbox.push_back(Said::Delivered(version));
                }
            }
            Some(Action::Recall { to, version, .. }) => {
                if let Some(has) = heard.has.as_mut().filter(|has| has.1 == version) {
                    has.0 = to;
                }
                heard.outbox.push_back(Said::Recalled(version));
            }
            _ => {}
        }
    }

    fn answer(&mut self, holder: usize) {
        let Some(said) = self.holders[holder].outbox.pop_front() else { return };
        let (result, version) = match said {
            Said::Asks(mode) => return self.ask(holder, mode),
            Said::Recalled(version) => {
                let result = self.object.recalled(holder, version, self.now);
                if result.is_ok() {
                    self.holders[holder].recalls -= 1;
                }
                (result, version)
            }
            Said::Delivered(version) => {
                // A grant of a right that the holder has already needs no confirmation.
                let delivered = self.object.delivered(holder, version, self.now);
                assert!(matches!(delivered, Ok(()) | Err(Refused::NotGranting)));
                (Ok(()), version)
            }
            Said::Released(version) => {
                let result = self.object.release(holder, version, self.now);
                if result.is_ok() {
                    self.holders[holder].recalls = 0;
                }
                (result, version)
            }
        };
        // Only what was fenced, or was returned while the recall was on its way, is too late.
        if let Err(error) = result {
            assert_eq!(error, Refused::Stale { version });
        }
    }

    /// No writer is beside another holder, by what the holders believe now and by what the object knows.
    fn check(&self) {
        let valid = |has: &(Mode, u64, Instant)| has.0 > Mode::None && has.2 > self.now;
        let believed: Vec<_> = self.holders.iter().filter_map(|holder| holder.has.filter(valid)).collect();
        let writers = believed.iter().filter(|has| has.0 == Mode::Write).count();
        assert!(writers == 0 || believed.len() == 1, "a writer beside others: {believed:?}");
        let known: Vec<_> = self.object.holders().collect();
        assert!(known.len() <= 1 || known.iter().all(|(_, mode)| *mode == Mode::Read), "{known:?}");
        for (place, holder) in self.holders.iter().enumerate() {
            let Some((mode, version, _)) = holder.has.filter(|has| valid(has)) else { continue };
            assert_eq!(self.object.check(place, version, mode, self.now), Ok(()), "holder {place} uses what it lost");
        }
        for (holder, version) in &self.fenced {
            let stale = Err(Refused::Stale { version: *version });
            assert_eq!(self.object.check(*holder, *version, Mode::Read, self.now), stale);
        }
    }

    /// All holders hear and answer until nothing is on its way.
    fn settle(&mut self) {
        while self.holders.iter().any(|holder| !holder.inbox.is_empty() || !holder.outbox.is_empty()) {
            for holder in 0..HOLDERS {
                self.step(Step::Hear(holder));
                self.step(Step::Answer(holder));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn holders_never_conflict_and_none_starves(
        steps in steps(), leased: bool, confirmed: bool
    ) {
        let delivery = if confirmed { Delivery::Confirmed } else { Delivery::InOrder };
        let mut world = World::new(leased.then_some(LEASE), delivery);
        for step in steps {
            world.step(step);
        }
        world.settle();
        prop_assert!(world.queue.is_empty(), "asks that are never served: {:?}", world.queue);
    }
}

fn actions(object: &mut Object<char>) -> Vec<Action<char>> {
    std::iter::from_fn(|| object.next_action()).collect()
}

#[test]
fn a_silent_holder_is_fenced_when_its_lease_has_run_out() {
    let mut object = Object::new(Some(LEASE), Delivery::InOrder);
    let at = |millis| Instant::ZERO + Duration::from_millis(millis);
    object.ask('a', Mode::Write, at(0)).unwrap();
    object.ask('b', Mode::Read, at(10)).unwrap();
    let grant = |holder, mode, version| Action::Grant { holder, mode, version };
    let recall = Action::Recall { holder: 'a', to: Mode::Read, version: 1 };
    assert_eq!(actions(&mut object), [grant('a', Mode::Write, 1), recall]);
    assert_eq!(object.next_time(), Some(at(100)));
    object.time(at(99));
    assert_eq!(actions(&mut object), []);
    object.time(at(100));
    assert_eq!(actions(&mut object), [Action::Fence { holder: 'a', version: 1 }, grant('b', Mode::Read, 2)]);
    assert_eq!(object.recalled('a', 1, at(101)), Err(Refused::Stale { version: 1 }));
    assert_eq!(object.release('a', 1, at(101)), Err(Refused::Stale { version: 1 }));
    assert_eq!(object.next_time(), None);
}

#[test]
fn readers_that_wait_behind_a_writer_are_granted_together() {
    let mut object = Object::new(None, Delivery::InOrder);
    for (holder, mode) in [('a', Mode::Write), ('b', Mode::Read), ('c', Mode::Read), ('d', Mode::Write)] {
        object.ask(holder, mode, Instant::ZERO).unwrap();
    }
    assert_eq!(actions(&mut object).len(), 2);
    object.recalled('a', 1, Instant::ZERO).unwrap();
    let granted: Vec<_> = actions(&mut object);
    let grant = |holder, version| Action::Grant { holder, mode: Mode::Read, version };
    let recall = |holder, version| Action::Recall { holder, to: Mode::None, version };
    assert_eq!(granted, [grant('b', 2), grant('c', 3), recall('a', 1), recall('b', 2), recall('c', 3)]);
}

#[test]
fn a_bounded_number_of_asks_waits() {
    let mut object = Object::new(None, Delivery::InOrder);
    object.ask(usize::MAX, Mode::Write, Instant::ZERO).unwrap();
    for holder in 0..crate::limits::COHERENCE_ASKS_MAX {
        object.ask(holder, Mode::Read, Instant::ZERO).unwrap();
    }
    assert_eq!(object.ask(usize::MAX - 1, Mode::Read, Instant::ZERO), Err(Refused::Full));
    assert_eq!(object.ask(3, Mode::Write, Instant::ZERO), Err(Refused::Asked));
    assert_eq!(object.delivered(3, 1, Instant::ZERO), Err(Refused::NotGranting));
    assert_eq!(object.recalled(3, 7, Instant::ZERO), Err(Refused::Stale { version: 7 }));
}
