//! A world of nodes with sessions between them, driven by one seed: calls, parts of answers, delegation, cancellation,
//! deadlines, notices, forged answers and deaths of sessions in any order. Messages of a session's lane keep their order;
//! parts of answers travel on a lane of their own; sessions have no order among each other.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use byway_fabric::random::Random;
use byway_fabric::{SessionKind, Slots};
use byway_reactor::Instant;
use zerocopy::IntoBytes;

use super::*;
use crate::seeded::{Bug, select};

mod hostile;

const NODES: usize = 4;
const PROTOCOL: u8 = 7;
const GRANT: Grant = Grant { calls: 4, notices: 6 };
const STEPS: usize = 400;
const PART_BYTES: usize = 100;

/// What the world says of a violation.
type Checked = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

/// A call as its caller knows it: a number that the whole world shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Number(u64);

#[derive(Debug, Default)]
struct Life {
    caller: usize,
    at: Option<CallId>,
    /// How the call ended for its caller.
    ended: Vec<&'static str>,
    /// Bytes of the answer that lie in the caller's window.
    placed: usize,
    /// Whether the number and the credit of the call may be used by another call.
    is_done: bool,
}

struct Owing {
    node: usize,
    call: CallRef,
    number: Number,
    /// Bytes of the answer that went before the reply.
    sent: usize,
    cancelled: bool,
}

struct Packet {
    header: Header,
    payload: Vec<u8>,
}

/// One direction of a session: the control lane and a bulk lane.
#[derive(Default)]
struct Lanes {
    control: VecDeque<Packet>,
    bulk: VecDeque<Packet>,
}

/// The two ends of a session, by the slot that each node has given it.
struct SessionPair {
    ends: [(usize, SessionId); 2],
    /// By the receiving end.
    lanes: [Lanes; 2],
    down: [bool; 2],
}

struct World {
    random: Random,
    now: Instant,
    nodes: Vec<Calls<Number>>,
    /// The sessions of each node that have not ended: names are used again, as in a table.
    names: Vec<Slots<(), SessionKind>>,
    pairs: Vec<SessionPair>,
    lives: HashMap<Number, Life>,
    owing: Vec<Owing>,
    notices: Vec<(usize, SessionId)>,
    forged: u64,
    next_number: u64,
}

impl World {
    fn new(number: u64) -> Self {
        let spoken =
            vec![Spoken { protocol: PROTOCOL, versions: Versions { oldest: 1, newest: 3 }, grant: Some(GRANT) }];
        let nodes = (0..NODES).map(|node| Calls::new([node as u8 + 1; 16], spoken.clone())).collect();
        let mut world = Self {
            random: Random::from_seed(number),
            now: Instant::from_nanos(1),
            nodes,
            names: (0..NODES).map(|_| Slots::default()).collect(),
            pairs: Vec::new(),
            lives: HashMap::new(),
            owing: Vec::new(),
            notices: Vec::new(),
            forged: 0,
            next_number: 1,
        };
        for a in 0..NODES {
            for b in 0..a {
                // Some pairs have no session: their answers are passed on.
                if world.below(3) > 0 {
                    world.connect(a, b);
                }
            }
        }
        world
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.random.next_u64() % bound.max(1) as u64) as usize
    }

    fn connect(&mut self, a: usize, b: usize) {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.random.next_u64().to_le_bytes());
        let mut ends = [(a, SessionId::new(0, 1)); 2];
        for (end, (node, begins)) in ends.iter_mut().zip([(a, true), (b, false)]) {
            *end = (node, self.names[node].insert(()));
            self.nodes[node].up(end.1, nonce, begins);
        }
        self.pairs.push(SessionPair { ends, lanes: Default::default(), down: [false; 2] });
        self.send_outboxes();
    }

    fn send(&mut self, node: usize, session: SessionId, header: Header, payload: Vec<u8>, bulk: bool) {
        let place = self.pairs.iter().position(|pair| pair.ends.contains(&(node, session)));
        let Some(pair) = place.map(|place| &mut self.pairs[place]) else { return };
        let sender = usize::from(pair.ends[0] != (node, session));
        if pair.down[sender] {
            return;
        }
        let mut header = header;
        header.payload_len.set(payload.len() as u32);
        let lanes = &mut pair.lanes[1 - sender];
        let lane = if bulk { &mut lanes.bulk } else { &mut lanes.control };
        lane.push_back(Packet { header, payload });
    }

    fn send_outboxes(&mut self) {
        for node in 0..NODES {
            for out in std::mem::take(self.nodes[node].outbox()) {
                self.send(node, out.session, out.header, out.payload, false);
            }
        }
    }

    fn sessions_of(&self, node: usize) -> Vec<SessionId> {
        let of = |pair: &SessionPair| {
            (0..2).find(|end| pair.ends[*end].0 == node && !pair.down[*end]).map(|end| pair.ends[end].1)
        };
        self.pairs.iter().filter_map(of).collect()
    }

    fn pick_session(&mut self, node: usize) -> Option<SessionId> {
        let sessions = self.sessions_of(node);
        let at = self.below(sessions.len());
        sessions.get(at).copied()
    }

    fn step(&mut self) -> Checked {
        let node = self.below(NODES);
        match self.below(100) {
            0..40 => self.deliver_one()?,
            40..58 => self.begin(node),
            58..75 => self.serve()?,
            75..80 => self.delegate()?,
            80..84 => self.cancel()?,
            84..88 => self.pass_time()?,
            88..92 => self.notify(node)?,
            92..95 => self.take_notice(),
            95..97 => self.forge(node),
            97 => self.cut()?,
            _ => {
                let other = self.below(NODES);
                if other != node && self.pairs.len() < 20 {
                    self.connect(node, other);
                }
            }
        }
        self.send_outboxes();
        Ok(())
    }

    fn begin(&mut self, node: usize) {
        let Some(session) = self.pick_session(node) else { return };
        let number = Number(self.next_number);
        let deadline = if self.below(3) == 0 { self.now + Duration::from_nanos(40) } else { Instant::FAR };
        let arguments = number.0;
        let ask = Ask { protocol: PROTOCOL, method: 1, arguments: &inline(arguments), windows: 0 };
        let Ok((at, header)) = self.nodes[node].call(session, &ask, number, self.now, deadline) else { return };
        self.next_number += 1;
        // A number of a call in flight must not be given out again.
        self.lives.insert(number, Life { caller: node, at: Some(at), ..Life::default() });
        self.send(node, session, header, Vec::new(), false);
    }

    fn end(&mut self, number: Number, how: &'static str, is_done: bool) -> Checked {
        let life = self.lives.get_mut(&number).ok_or("a call that nobody began ended")?;
        life.ended.push(how);
        life.is_done |= is_done;
        ensure!(life.ended.len() == 1, "call {number:?} ended {:?}", life.ended);
        Ok(())
    }

    fn deliver_one(&mut self) -> Checked {
        let full: Vec<_> = (0..self.pairs.len())
            .flat_map(|pair| (0..4).map(move |lane| (pair, lane / 2, lane % 2 == 1)))
            .filter(|(pair, end, bulk)| {
                let lanes = &self.pairs[*pair].lanes[*end];
                !if *bulk { &lanes.bulk } else { &lanes.control }.is_empty()
            })
            .collect();
        let Some(&(pair, end, bulk)) = full.get(self.below(full.len())) else { return Ok(()) };
        let lanes = &mut self.pairs[pair].lanes[end];
        let packet = if bulk { lanes.bulk.pop_front() } else { lanes.control.pop_front() };
        let (Some(packet), (node, session)) = (packet, self.pairs[pair].ends[end]) else { return Ok(()) };
        if self.pairs[pair].down[end] {
            return Ok(());
        }
        let kind = Kind::from_number(packet.header.kind).ok_or("a kind")?;
        if bulk {
            return self.deliver_part(node, session, kind, &packet);
        }
        let event = self.nodes[node].message(session, kind, &packet.header, &packet.payload);
        let event = event.map_err(|breach| format!("an honest peer is accused: {breach}"))?;
        match event {
            Event::Called(call, incomer) => {
                let number = Number(u64::from_le_bytes(incomer.arguments[..8].try_into().map_err(|_| "arguments")?));
                ensure!(incomer.version == 3, "the newest version in common is 3");
                let again = self.owing.iter().any(|owing| owing.node == node && owing.call == call);
                ensure!(!again, "a callee has two calls by one name");
                self.owing.push(Owing { node, call, number, sent: 0, cancelled: false });
            }
            Event::Notified(_) => {
                self.notices.push((node, session));
                let held = self.notices.iter().filter(|held| **held == (node, session)).count();
                ensure!(held <= usize::from(GRANT.notices), "more notices than granted");
            }
            Event::Cancelled(call) => {
                let owing = self.owing.iter_mut().find(|owing| owing.node == node && owing.call == call);
                owing.ok_or("a cancelled call that its callee does not have")?.cancelled = true;
            }
            Event::Ended(number, answer, payload) => {
                self.ended(number, answer, payload.len())?;
            }
            Event::None | Event::Ready(_) => {}
        }
        Ok(())
    }

    fn ended(&mut self, number: Number, answer: Answer, _payload: usize) -> Checked {
        let lost = Status::from_number(answer.status);
        ensure!(matches!(lost, None | Some(Status::DelegateLost)), "call {number:?} has status {lost:?}");
        if lost.is_none() {
            ensure!(*answer.result == number.0.to_le_bytes(), "call {number:?} has another call's answer");
            let placed = self.lives.get(&number).map_or(0, |life| life.placed);
            let total = answer.total as usize;
            ensure!(placed == total, "call {number:?} ended with {placed} of {total} bytes");
        }
        // The node that has a lost call may still write into windows that are open for it, until they are closed.
        self.end(number, "answered", lost.is_none())
    }

    fn deliver_part(&mut self, node: usize, session: SessionId, kind: Kind, packet: &Packet) -> Checked {
        // The payload of a part names its call: it goes into that call's window.
        let number = Number(u64::from_le_bytes(packet.payload[..8].try_into().map_err(|_| "a part")?));
        let life = self.lives.get_mut(&number).ok_or("a part of no call")?;
        ensure!(life.caller == node, "a part came to somebody else");
        let its_session_lives = life.at.is_some_and(|at| self.nodes[node].session_ref(at.session).is_some());
        ensure!(!life.is_done || !its_session_lives, "a part came into a window whose call is over");
        life.placed += packet.payload.len();
        match self.nodes[node].placed(session, kind, &packet.header) {
            Event::Ended(number, answer, _) => self.ended(number, answer, 0),
            _ => Ok(()),
        }
    }

    /// Answers a call, or sends a part of its answer.
    fn serve(&mut self) -> Checked {
        if self.owing.is_empty() {
            return Ok(());
        }
        let place = self.below(self.owing.len());
        let Owing { node, call, number, sent, .. } = self.owing[place];
        if self.below(3) == 0 {
            let Some(route) = self.nodes[node].data(call) else { return Ok(()) };
            let mut payload = vec![0; PART_BYTES];
            payload[..8].copy_from_slice(&number.0.to_le_bytes());
            self.owing[place].sent += PART_BYTES;
            self.send(node, route.session, route.header, payload, true);
            return Ok(());
        }
        self.answer(place, node, call, number, sent)
    }

    fn answer(&mut self, place: usize, node: usize, call: CallRef, number: Number, sent: usize) -> Checked {
        self.owing.swap_remove(place);
        let Some(route) = self.nodes[node].reply(call, 0, sent as u32, &inline(number.0)) else { return Ok(()) };
        let payload = route.token.map_or_else(Vec::new, |token| token.as_bytes().to_vec());
        self.send(node, route.session, route.header, payload, false);
        ensure!(self.nodes[node].reply(call, 0, 0, &Inline::EMPTY).is_none(), "a call can be answered twice");
        Ok(())
    }

    fn delegate(&mut self) -> Checked {
        if self.owing.is_empty() {
            return Ok(());
        }
        let place = self.below(self.owing.len());
        let Owing { node, call, number, sent, .. } = self.owing[place];
        let Some(third) = self.pick_session(node).filter(|_| sent == 0) else { return Ok(()) };
        let arguments = number.0;
        let ask = Ask { protocol: PROTOCOL, method: 2, arguments: &inline(arguments), windows: 0 };
        if let Ok((header, token)) = self.nodes[node].delegate(call, third, &ask, None) {
            self.owing.swap_remove(place);
            self.send(node, third, header, token.as_bytes().to_vec(), false);
            ensure!(
                self.nodes[node].reply(call, 0, 0, &Inline::EMPTY).is_none(),
                "a delegated call can be answered here"
            );
        }
        Ok(())
    }

    fn cancel(&mut self) -> Checked {
        let open: Vec<Number> =
            self.lives.iter().filter(|(_, life)| life.ended.is_empty()).map(|(number, _)| *number).collect();
        let mut open = open;
        open.sort_unstable_by_key(|number| number.0);
        let Some(&number) = open.get(self.below(open.len())) else { return Ok(()) };
        let (node, Some(at)) = (self.lives[&number].caller, self.lives[&number].at) else { return Ok(()) };
        if self.nodes[node].cancel(at) == Some(number) {
            self.end(number, "cancelled", false)?;
        }
        Ok(())
    }

    fn pass_time(&mut self) -> Checked {
        self.now = self.now + Duration::from_nanos(10);
        for node in 0..NODES {
            while let Some(number) = self.nodes[node].overdue(self.now) {
                self.end(number, "overdue", false)?;
            }
            let next = self.nodes[node].next_deadline();
            ensure!(next.is_none_or(|next| next > self.now), "a deadline has passed unnoticed");
        }
        Ok(())
    }

    fn notify(&mut self, node: usize) -> Checked {
        let Some(session) = self.pick_session(node) else { return Ok(()) };
        let ask = Ask { protocol: PROTOCOL, method: 3, arguments: &Inline::EMPTY, windows: 0 };
        if let Ok(header) = self.nodes[node].notify(session, &ask) {
            self.send(node, session, header, Vec::new(), false);
        }
        Ok(())
    }

    fn take_notice(&mut self) {
        if !self.notices.is_empty() {
            let place = self.below(self.notices.len());
            let (node, session) = self.notices.swap_remove(place);
            self.nodes[node].notice_taken(session, PROTOCOL);
        }
    }

    /// A node that was not asked answers a call of its peer's.
    fn forge(&mut self, node: usize) {
        let Some(session) = self.pick_session(node) else { return };
        let Some(pair) = self.pairs.iter().find(|pair| pair.ends.contains(&(node, session))) else {
            return;
        };
        let victim = pair.ends[usize::from(pair.ends[0] == (node, session))].0;
        let mut of_victim: Vec<_> =
            self.lives.iter().filter(|(_, life)| life.caller == victim && life.ended.is_empty()).collect();
        of_victim.sort_unstable_by_key(|(number, _)| number.0);
        let Some(at) = of_victim.first().and_then(|(_, life)| life.at) else { return };
        let token = Token {
            caller: [victim as u8 + 1; 16],
            session: at.session.to_u64().into(),
            call: at.call.into(),
            secret: 1.into(),
        };
        let mut header = reply_header(at.call, 0, 0, &inline(0));
        header.flags |= FLAG_TOKEN;
        self.forged += 1;
        self.send(node, session, header, token.as_bytes().to_vec(), false);
    }

    /// A session breaks: one end notices, the other after what it still gets.
    fn cut(&mut self) -> Checked {
        if self.pairs.is_empty() {
            return Ok(());
        }
        let place = self.below(self.pairs.len());
        let end = self.below(2);
        self.take_down(place, end)?;
        let second_is_told = self.pairs[place].down[1 - end] || self.below(2) == 0;
        if second_is_told {
            self.take_down(place, 1 - end)?;
        }
        if self.pairs[place].down == [true; 2] {
            self.pairs.swap_remove(place);
        }
        Ok(())
    }

    fn take_down(&mut self, place: usize, end: usize) -> Checked {
        if std::mem::replace(&mut self.pairs[place].down[end], true) {
            return Ok(());
        }
        let (node, session) = self.pairs[place].ends[end];
        let (keep_control, keep_bulk) = (self.below(4), self.below(4));
        let lanes = &mut self.pairs[place].lanes;
        lanes[end] = Lanes::default();
        lanes[1 - end].control.truncate(keep_control);
        lanes[1 - end].bulk.truncate(keep_bulk);
        self.names[node].remove(session);
        for number in self.nodes[node].down(session) {
            self.end(number, "session ended", true)?;
        }
        let went_over = |life: &Life| life.caller == node && life.at.is_some_and(|at| at.session == session);
        self.lives.values_mut().filter(|life| went_over(life)).for_each(|life| life.is_done = true);
        self.owing.retain(|owing| owing.node != node || owing.call.session != session);
        self.notices.retain(|held| *held != (node, session));
        Ok(())
    }

    /// Lets everything end, and looks at what must hold then.
    fn settle(&mut self) -> Checked {
        for _ in 0..20_000 {
            for place in (0..self.pairs.len()).rev() {
                if self.pairs[place].down == [true, false] || self.pairs[place].down == [false, true] {
                    let end = usize::from(self.pairs[place].down[0]);
                    if self.pairs[place].lanes[end].control.is_empty() && self.pairs[place].lanes[end].bulk.is_empty() {
                        self.take_down(place, end)?;
                        self.pairs.swap_remove(place);
                    }
                }
            }
            self.send_outboxes();
            let idle = |lanes: &Lanes| lanes.control.is_empty() && lanes.bulk.is_empty();
            let quiet = self.pairs.iter().all(|pair| pair.lanes.iter().all(idle));
            if !quiet || !self.notices.is_empty() {
                self.take_notice();
                self.deliver_one()?;
            } else if !self.owing.is_empty() {
                let Owing { node, call, number, sent, .. } = self.owing[0];
                self.answer(0, node, call, number, sent)?;
            } else {
                return self.check_settled();
            }
        }
        Err("the world does not come to rest".into())
    }

    fn check_settled(&mut self) -> Checked {
        for (number, life) in &self.lives {
            ensure!(life.ended.len() == 1, "call {number:?} of node {} ended {:?}", life.caller, life.ended);
        }
        let mut forged = 0;
        for (index, node) in self.nodes.iter_mut().enumerate() {
            forged += node.counters.forged;
            for session in node.sessions.iter_mut().flatten() {
                let (out, of_peer) = (session.outgoing.len(), session.incoming.count());
                ensure!(out == 0 && session.protocols.calls_out() == 0, "node {index} has {out} calls and credit out");
                ensure!(of_peer == 0 && session.protocols.calls_in() == 0, "node {index} owes {of_peer} answers");
            }
        }
        ensure!(forged <= self.forged, "honest answers were taken for forged");
        // Every session has all its credit again.
        for node in 0..NODES {
            for session in self.sessions_of(node) {
                let ask = Ask { protocol: PROTOCOL, method: 3, arguments: &Inline::EMPTY, windows: 0 };
                let mut sent = 0;
                while self.nodes[node].notify(session, &ask).is_ok() {
                    sent += 1;
                }
                // Less than half of the grant may be owed at any time.
                ensure!(sent * 2 > i32::from(GRANT.notices), "{sent} notices can be sent");
            }
        }
        Ok(())
    }
}

fn inline(number: u64) -> Inline {
    Inline::new(&number.to_le_bytes()).expect("eight bytes fit")
}

/// Runs the world of a seed.
fn run(number: u64) -> Result<HashSet<&'static str>, String> {
    let mut world = World::new(number);
    world.send_outboxes();
    for _ in 0..STEPS {
        world.step()?;
    }
    world.settle()?;
    let mut seen: HashSet<_> = world.lives.values().flat_map(|life| life.ended.clone()).collect();
    for node in &world.nodes {
        let CallCounters { relayed, delegated, forged, .. } = node.counters;
        for (count, name) in [(relayed, "relayed"), (delegated, "delegated"), (forged, "forged")] {
            seen.extend((count > 0).then_some(name));
        }
    }
    Ok(seen)
}

/// How many seeds the suite runs; `BYWAY_SIM_SEED` runs that one alone.
fn seeds() -> std::ops::Range<u64> {
    let one = std::env::var("BYWAY_SIM_SEED").ok().and_then(|text| text.parse::<u64>().ok());
    one.map_or(0..3000, |seed| seed..seed + 1)
}

#[test]
fn every_call_ends_once_with_its_own_answer() {
    let mut seen = HashSet::new();
    for number in seeds() {
        match run(number) {
            Ok(saw) => seen.extend(saw),
            Err(error) => panic!("BYWAY_SIM_SEED={number}: {error}"),
        }
    }
    if seeds().nth(1).is_some() {
        for what in ["answered", "cancelled", "overdue", "session ended", "relayed", "delegated", "forged"] {
            assert!(seen.contains(what), "no seed shows a call that was {what}: the test has become blind");
        }
    }
}

#[test]
fn every_seeded_bug_is_found() {
    for bug in Bug::MACHINE {
        select(Some(bug));
        let found = (0..3000).find_map(|number| run(number).err().map(|error| (number, error)));
        select(None);
        let (number, error) = found.unwrap_or_else(|| panic!("{bug:?} was not found in 3,000 seeds"));
        println!("{bug:?}: seed {number}: {error}");
    }
}

proptest::proptest! {
    /// Whatever a peer sends, it gets no more than it was granted, and no call of ours ends twice.
    #[test]
    fn a_hostile_peer_is_bounded(
        messages in proptest::collection::vec((0usize..7, proptest::array::uniform16(0u8..4), 0usize..96), 1..200),
    ) {
        let spoken = vec![Spoken { protocol: 1, versions: Versions::only(1), grant: Some(GRANT) }];
        let mut calls: Calls<usize> = Calls::new([9; 16], spoken.clone());
        let session = SessionId::new(0, 1);
        calls.up(session, [3; 16], false);
        let entry = entries(&spoken);
        let mut hello = ProtocolsBody::new_zeroed();
        hello.count.set(1);
        let hello = Header::with_body(Kind::Protocols, &hello);
        proptest::prop_assert!(calls.message(session, Kind::Protocols, &hello, &entry).is_ok());
        let (mut begun, mut ended) = (0, Vec::new());
        for (kind, bytes, payload_len) in messages {
            let ask = Ask { protocol: 1, method: 1, arguments: &inline(1), windows: 0 };
            if calls.call(session, &ask, begun, Instant::ZERO, Instant::FAR).is_ok() {
                begun += 1;
            }
            let kinds =
                [Kind::Call, Kind::Reply, Kind::Data, Kind::Notice, Kind::Cancel, Kind::NoticeCredit, Kind::Protocols];
            let mut header = Header::new(kinds[kind]);
            header.body[..16].copy_from_slice(&bytes);
            // Generations begin at 1, and credit of one message stays small.
            (header.body[4], header.flags) = (bytes[4] % 2, bytes[15] * 8);
            header.payload_len.set(payload_len as u32);
            let payload = vec![bytes[0]; payload_len];
            let event = match kinds[kind] {
                Kind::Data => Ok(calls.placed(session, Kind::Data, &header)),
                kind => calls.message(session, kind, &header, &payload),
            };
            match event {
                Ok(Event::Ended(call, ..)) => ended.push(call),
                Ok(_) => {}
                Err(_) => break,
            }
            proptest::prop_assert!(calls.calls_in(session) <= usize::from(GRANT.calls));
            proptest::prop_assert!(calls.outbox().len() <= 1000);
            calls.outbox().clear();
        }
        ended.extend(calls.down(session));
        ended.sort_unstable();
        proptest::prop_assert_eq!(ended, (0..begun).collect::<Vec<_>>());
    }
}
