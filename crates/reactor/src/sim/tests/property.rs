//! Random lives against models, and the same life twice.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::*;
use crate::Allocate;
use crate::sim::rng::Rng;
use crate::sim::{Crash, LinkProfile};

const SECTORS: usize = 16;
const SECTOR: usize = 512;

/// What the history of a file allows, told from the completions alone.
///
/// A sector may read as any of its values from the floor on: the newest that is certain to be durable.
#[derive(Default)]
struct Model {
    /// By sector: its values, and whether a sync covers each.
    values: Vec<Vec<(u64, bool)>>,
    floor: Vec<usize>,
    in_flight: BTreeMap<u32, (usize, Vec<u64>)>,
    /// By sync in flight: how many values each sector had when it was submitted.
    syncs: BTreeMap<u32, Vec<usize>>,
    /// Syncs and durable writes in flight: one of them is told of a loss, and the others that all is well.
    telling: BTreeSet<u32>,
    /// What good syncs said that ended before such others: the others, and the floors if they end well, too.
    unsure: Vec<(BTreeSet<u32>, Vec<usize>)>,
}

impl Model {
    fn new() -> Self {
        Self { values: vec![vec![(0, true)]; SECTORS], floor: vec![0; SECTORS], ..Self::default() }
    }

    fn written(&mut self, token: u32, certain: bool, durable: bool) {
        let (first, tags) = self.in_flight.remove(&token).expect("it was in flight");
        for (sector, tag) in (first..).zip(tags) {
            self.values[sector].push((tag, certain));
            if certain && durable {
                self.floor[sector] = self.values[sector].len() - 1;
            }
        }
        if durable {
            if !certain {
                self.forget(&self.values.iter().map(Vec::len).collect::<Vec<_>>());
            }
            self.told(token, certain);
        }
    }

    /// What was not durable may have been lost, and is clean.
    fn forget(&mut self, lens: &[usize]) {
        for ((values, len), floor) in self.values.iter_mut().zip(lens).zip(&self.floor) {
            values[..*len].iter_mut().skip(floor + 1).for_each(|(_, certain)| *certain = false);
        }
    }

    /// Somebody who syncs has ended.
    fn told(&mut self, token: u32, good: bool) {
        self.telling.remove(&token);
        self.unsure.retain(|(others, _)| good || !others.contains(&token));
        for (mut others, floors) in std::mem::take(&mut self.unsure) {
            others.remove(&token);
            if others.is_empty() {
                self.floor.iter_mut().zip(floors).for_each(|(floor, other)| *floor = other.max(*floor));
            } else {
                self.unsure.push((others, floors));
            }
        }
    }

    fn synced(&mut self, token: u32, good: bool) {
        let lens = self.syncs.remove(&token).expect("it was in flight");
        if good {
            let last = |(values, len): (&Vec<(u64, bool)>, &usize)| {
                values[..*len].iter().rposition(|(_, certain)| *certain).expect("the first value is certain")
            };
            let floors = self.values.iter().zip(&lens).map(last).collect();
            self.unsure.push((self.telling.clone(), floors));
        } else {
            self.forget(&lens);
        }
        self.told(token, good);
    }

    /// Checks what a crash left, and goes on from there.
    fn crashed(&mut self, how: Crash, left: &[u64], seed: u64) {
        let in_flight = std::mem::take(&mut self.in_flight);
        self.syncs.clear();
        // One of them may have been told of a loss, and died before it said so.
        let untold = !std::mem::take(&mut self.telling).is_empty();
        self.unsure.clear();
        for (sector, left) in left.iter().enumerate() {
            let flying: Vec<u64> = in_flight
                .values()
                .filter_map(|(first, tags)| sector.checked_sub(*first).and_then(|place| tags.get(place)).copied())
                .collect();
            let values = &mut self.values[sector];
            let last_certain = values.iter().rposition(|(_, certain)| *certain).unwrap_or(0);
            let from = if how == Crash::Power { self.floor[sector] } else { last_certain };
            let kept = values[from..].iter().any(|(tag, _)| tag == left);
            assert!(
                kept || flying.contains(left),
                "seed {seed}: after {how:?}, sector {sector} reads {left}: {:?} and {flying:?} are allowed",
                &values[from..]
            );
            if how == Crash::Power {
                *values = vec![(*left, true)];
                self.floor[sector] = 0;
            } else {
                values.extend(flying.into_iter().map(|tag| (tag, false)));
                // What is there is in the page cache; whether a sync covers it depends on whether it was forgotten.
                let certain = values.contains(&(*left, true));
                values.push((*left, certain));
            }
        }
        if untold {
            self.forget(&self.values.iter().map(Vec::len).collect::<Vec<_>>());
        }
    }
}

fn tags_of(bytes: &[u8], seed: u64) -> Vec<u64> {
    let tag = |word: &[u8]| u64::from_le_bytes(word.try_into().expect("eight bytes"));
    bytes
        .chunks(SECTOR)
        .map(|sector| {
            let words: Vec<u64> = sector.chunks(8).map(tag).collect();
            assert!(words.iter().all(|word| *word == words[0]), "seed {seed}: a torn sector");
            words[0]
        })
        .collect()
}

fn note(model: &mut Model, completions: &mut Vec<Completion>) {
    for completion in completions.drain(..) {
        let token = completion.token.index();
        match completion.outcome {
            Outcome::Written { result, .. } => model.written(token, result.is_ok(), completion.token.tag() == 1),
            Outcome::Synced(result) => model.synced(token, result.is_ok()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn files_keep_their_promises_over_many_crashes() {
    let mut lost = 0;
    for seed in 0..300 {
        let mut rig = Rig::new(seed, 1);
        let mut rng = Rng::new(seed ^ 0xd15c);
        let plan = FaultPlan { write_error: 0.05, sync_error: 0.2, no_space: 0.02, ..FaultPlan::default() };
        rig.world.faults(plan);
        let mut model = Model::new();
        let mut tag = 0;
        for _life in 0..4 {
            let (sim, file) = rig.open(0, "store", (SECTORS * SECTOR) as u64, FileOptions::default());
            for _ in 0..rng.below(80) {
                rig.next += 1;
                let durable = rng.one_in(8);
                let token = Token::new(1, u8::from(durable), rig.next, 0);
                let syncs = rng.one_in(6);
                if syncs || durable {
                    model.telling.insert(rig.next);
                }
                if syncs {
                    model.syncs.insert(rig.next, model.values.iter().map(Vec::len).collect());
                    rig.loops[0].submit(Op::Sync { file }, token);
                } else {
                    let first = rng.below(SECTORS as u64) as usize;
                    let count = rng.between(1, (SECTORS - first).min(4) as u64) as usize;
                    let tags: Vec<u64> = (0..count as u64).map(|sector| tag + 1 + sector).collect();
                    tag += count as u64;
                    let bytes: Vec<u8> = tags.iter().flat_map(|tag| tag.to_le_bytes().repeat(SECTOR / 8)).collect();
                    model.in_flight.insert(rig.next, (first, tags));
                    let op = rig.write_op(0, file, (first * SECTOR) as u64, &bytes, durable);
                    rig.loops[0].submit(op, token);
                }
                while rng.one_in(2) && rig.world.step() {
                    rig.turn();
                    note(&mut model, &mut rig.done[0]);
                }
            }
            let how = if rng.one_in(3) { Crash::Process } else { Crash::Power };
            rig.world.crash(ip(0), how);
            rig.restart(0);
            model.crashed(how, &tags_of(&sim.contents(), seed), seed);
        }
        lost += rig.world.fault_count().lost_sectors;
    }
    assert!(lost > 1000, "a power loss that loses nothing shows nothing");
}

#[test]
fn file_operations_agree_with_a_plain_array() {
    const REGION: u64 = 5000;
    for seed in 0..100 {
        let mut rig = Rig::new(seed, 1);
        let mut rng = Rng::new(seed ^ 0xf11e);
        let (sim, file) = rig.open(0, "store", 4 * REGION, FileOptions::default());
        let mut model = vec![0u8; 4 * REGION as usize];
        for round in 0..40u64 {
            // Four operations at a time, each in a region of its own.
            let mut reads = Vec::new();
            for region in 0..4 {
                let offset = region * REGION + rng.below(REGION - 1);
                let len = rng.between(1, (region + 1) * REGION - offset);
                let range = offset as usize..(offset + len) as usize;
                match rng.below(5) {
                    0 | 1 => {
                        let bytes = pattern(seed + round * 4 + region, len as usize);
                        let op = rig.write_op(0, file, offset, &bytes, rng.one_in(4));
                        rig.submit(0, op);
                        model[range].copy_from_slice(&bytes);
                    }
                    2 => {
                        let mode = if rng.one_in(2) { Allocate::PunchHole } else { Allocate::ZeroRange };
                        rig.submit(0, Op::Allocate { file, mode, offset, len });
                        model[range].fill(0);
                    }
                    3 => {
                        let bytes = pattern(seed + round, len as usize);
                        if rig.loops[0].try_write(file, offset, &bytes).is_ok() {
                            model[range].copy_from_slice(&bytes);
                        }
                    }
                    _ => {
                        let into = rig.loops[0].frames().alloc(len as usize).expect("room in the pool");
                        reads
                            .push((rig.submit(0, Op::Read { file, offset, into, start: 0, len: len as usize }), range));
                    }
                }
            }
            for (token, range) in reads {
                let Outcome::Read { into, result } = rig.wait(0, token) else { panic!("seed {seed}") };
                assert_eq!(result, Ok(range.len()));
                assert!(into.to_vec()[..] == model[range], "seed {seed}, round {round}: a read differs");
            }
            rig.settle();
            rig.done[0].clear();
            let mut at = 0;
            for extent in rig.extents(0, file, 4 * REGION, 1000) {
                let end = at + extent.len as usize;
                assert!(!extent.hole || model[at..end].iter().all(|byte| *byte == 0), "seed {seed}: data in a hole");
                at = end;
            }
            assert_eq!(at, model.len(), "seed {seed}");
        }
        assert!(sim.contents() == model, "seed {seed}");
        rig.assert_pools_full();
    }
}

/// One end of a stream.
#[derive(Clone, Copy)]
struct End {
    node: usize,
    socket: Socket,
}

/// One direction of a stream, and how far it is.
struct Flow {
    from: End,
    to: End,
    send: Option<Token>,
    receive: Option<Token>,
    expected: VecDeque<u8>,
    is_done: bool,
}

/// Random traffic between three nodes under `plan`; every byte is checked. Gives the trace and the bytes that arrived.
fn traffic(seed: u64, plan: FaultPlan) -> (u64, usize) {
    let mut rig = Rig::new(seed, 3);
    let mut rng = Rng::new(seed ^ 0x5eed);
    let mut flows = Vec::new();
    for (a, b) in [(0, 1), (1, 2), (2, 0), (0, 0)] {
        let profile = LinkProfile { buffer_bytes: rng.between(1, 40_000) as usize, ..LinkProfile::default() };
        rig.world.link(ip(a), ip(b), profile);
        let (client, server) = rig.connect(a, b);
        let (client, server) = (End { node: a, socket: client }, End { node: b, socket: server });
        for (from, to) in [(client, server), (server, client)] {
            flows.push(Flow { from, to, send: None, receive: None, expected: VecDeque::new(), is_done: false });
        }
    }
    rig.world.faults(plan);
    let until = rig.world.now() + Duration::from_millis(500);
    let mut arrived = 0;
    while rig.world.now() < until && flows.iter().any(|flow| !flow.is_done) {
        for flow in flows.iter_mut().filter(|flow| !flow.is_done) {
            if flow.send.is_none() && rng.one_in(2) {
                let bytes = pattern(rng.next(), rng.between(1, 30_000) as usize);
                flow.expected.extend(&bytes);
                flow.send = Some(rig.start_send(flow.from.node, flow.from.socket, &bytes));
            }
            if flow.receive.is_none() {
                let mut into = Scatter::new();
                for _ in 0..rng.between(1, 4) {
                    let frame = rig.loops[flow.to.node].frames().alloc(rng.between(1, 9000) as usize).expect("room");
                    let start = rng.below(frame.len() as u64) as usize;
                    let len = frame.len() - start;
                    into.push(frame, start, len);
                }
                let min = rng.between(1, into.len() as u64) as usize;
                flow.receive = Some(rig.submit(flow.to.node, Op::Recv { socket: flow.to.socket, into, min }));
            }
        }
        let at = rig.world.now() + Duration::from_micros(rng.between(1, 2000));
        rig.world.run_until(at, || {});
        for flow in flows.iter_mut().filter(|flow| !flow.is_done) {
            arrived += settle_flow(&mut rig, flow, seed);
        }
    }
    (rig.trace.finish(), arrived)
}

/// Takes what has ended of a flow, and checks its bytes.
fn settle_flow(rig: &mut Rig, flow: &mut Flow, seed: u64) -> usize {
    if let Some(Outcome::Sent { result, .. }) = flow.send.and_then(|send| rig.taken(flow.from.node, send)) {
        flow.send = None;
        flow.is_done |= result.is_err();
    }
    let Some(receive) = flow.receive else { return 0 };
    let Some(Outcome::Received { mut into, result }) = rig.taken(flow.to.node, receive) else { return 0 };
    flow.receive = None;
    let Ok(n) = result else {
        flow.is_done = true;
        return 0;
    };
    let mut bytes = Vec::new();
    into.drain().for_each(|piece| bytes.extend_from_slice(&piece.frame.bytes()[piece.start..][..piece.len]));
    assert!(n > 0, "seed {seed}: nobody ended the stream");
    let expected: Vec<u8> = flow.expected.drain(..n).collect();
    assert!(bytes[..n] == expected, "seed {seed}: bytes differ");
    n
}

fn rough() -> FaultPlan {
    FaultPlan {
        partitions_per_second: 5.0,
        partition_max: Duration::from_millis(300),
        delays_per_second: 10.0,
        ..FaultPlan::default()
    }
}

#[test]
fn streams_deliver_every_byte_in_order_through_partitions_and_stalls() {
    for seed in 0..10 {
        let (_, arrived) = traffic(seed, rough());
        assert!(arrived > 100_000, "seed {seed}: only {arrived} bytes went through");
    }
}

#[test]
fn streams_deliver_bytes_in_order_until_they_are_reset() {
    for seed in 0..30 {
        let (_, arrived) = traffic(seed, FaultPlan { resets_per_second: 3.0, ..rough() });
        assert!(arrived > 0, "seed {seed}");
    }
}

#[test]
fn the_same_seed_gives_the_same_life() {
    let plan = FaultPlan { resets_per_second: 1.0, ..rough() };
    let traces: Vec<u64> = (0..5).map(|seed| traffic(seed, plan).0).collect();
    assert_eq!(traces, (0..5).map(|seed| traffic(seed, plan).0).collect::<Vec<_>>());
    assert!((1..5).all(|seed| traces[seed] != traces[0]), "another seed gives another life");
}

#[test]
fn a_world_at_rest_comes_to_an_end() {
    let mut rig = Rig::new(1, 2);
    let (client, server) = rig.connect(0, 1);
    rig.world.faults(rough());
    rig.world.partition(ip(0), ip(1));
    rig.send(0, client, b"x").unwrap();
    rig.world.heal(ip(0), ip(1));
    assert_eq!(rig.receive(1, server, 1, 1).unwrap(), b"x");
    let before = rig.world.now();
    rig.settle();
    assert!(rig.world.now().since(before) < Duration::from_secs(1), "nothing of the past is left over");
}

#[test]
fn bytes_pass_a_buffer_that_became_small_after_the_stream_was_made() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = rig.connect(0, 1);
        rig.world.link(ip(0), ip(1), LinkProfile { buffer_bytes: 5000, ..LinkProfile::default() });
        let bytes = pattern(seed, 300_000);
        let send = rig.start_send(0, client, &bytes);
        let mut got = Vec::new();
        while got.len() < bytes.len() {
            let part = rig.receive(1, server, (bytes.len() - got.len()).min(100_000), 1).expect("the stream is whole");
            assert!(!part.is_empty(), "the stream ended early");
            got.extend(part);
        }
        assert!(got == bytes, "seed {seed}");
        assert_eq!(rig.sent(0, send), Ok(bytes.len()));
    }
}
