use proptest::prelude::*;

use super::*;

const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// Serves the next request; gives the flow and the bytes that it was charged.
fn serve(deficit: &mut Deficit<u64>) -> Option<(usize, u64)> {
    let (flow, &mut bytes) = deficit.front()?;
    assert_eq!(deficit.take(flow), Some(bytes));
    deficit.charge(flow, bytes);
    Some((flow, bytes.max(CHARGE_BYTES_MIN)))
}

/// How a flow asks: always for so many bytes, or for any number up to that.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(4096), Just(REQUEST_BYTES_MAX), 0..=REQUEST_BYTES_MAX]
}

proptest! {
    /// Flows 0 and 1 always have something waiting; the others come and go.
    #[test]
    fn two_that_always_wait_get_the_same_bytes_within_a_quantum_and_a_request(
        quantum in prop_oneof![Just(QUANTUM_BYTES), 1..4 * REQUEST_BYTES_MAX],
        own in prop::array::uniform2(prop::collection::vec(bytes(), 1..8)),
        others in prop::collection::vec((2..6_usize, bytes()), 0..300),
        turns in 50..600_usize,
    ) {
        // A small quantum makes a turn of each 4 KiB; the bound holds, but it takes its time.
        let quantum = quantum.max(1 << 10);
        let mut deficit = Deficit::new(quantum);
        let (mut served, mut asked) = ([0_u64; 6], [0_usize; 2]);
        let mut others = others.into_iter();
        for _ in 0..turns {
            for flow in 0..2 {
                while !deficit.waits(flow) {
                    deficit.push(flow, own[flow][asked[flow] % own[flow].len()]);
                    asked[flow] += 1;
                }
            }
            for (flow, bytes) in others.by_ref().take(2) {
                deficit.push(flow, bytes);
            }
            let (flow, bytes) = serve(&mut deficit).unwrap();
            served[flow] += bytes;
            prop_assert!(served[0].abs_diff(served[1]) < quantum + REQUEST_BYTES_MAX, "{served:?}");
        }
    }

    /// Whatever comes and goes, what waits is served in its flow's order, and all of it within a bounded number of others'
    /// bytes.
    #[test]
    fn everything_is_served_once_in_order_and_nobody_starves(
        steps in prop::collection::vec((0..5_usize, bytes(), 0..4_u8), 1..400),
    ) {
        let mut deficit = Deficit::default();
        let mut model: [VecDeque<u64>; 5] = Default::default();
        // Bytes of others since a flow was served last, while it waits.
        let mut waited = [0_u64; 5];
        let bound = (REQUEST_BYTES_MAX / QUANTUM_BYTES + 2) * 5 * (QUANTUM_BYTES + REQUEST_BYTES_MAX);
        for (flow, bytes, what) in steps {
            match what {
                0 | 1 => {
                    deficit.push(flow, bytes);
                    model[flow].push_back(bytes);
                }
                2 if bytes == 0 => {
                    prop_assert_eq!(deficit.leave(flow), std::mem::take(&mut model[flow]));
                    waited[flow] = 0;
                }
                _ => {
                    let due = deficit.front().map(|(flow, bytes)| (flow, *bytes));
                    prop_assert_eq!(due.is_none(), model.iter().all(VecDeque::is_empty));
                    let Some((flow, charged)) = serve(&mut deficit) else { continue };
                    prop_assert_eq!(due.map(|due| due.1), model[flow].pop_front());
                    for (other, waited) in waited.iter_mut().enumerate() {
                        let waits = other != flow && !model[other].is_empty();
                        *waited = if waits { *waited + charged } else { 0 };
                        prop_assert!(*waited <= bound);
                    }
                }
            }
            prop_assert_eq!(deficit.len(), model.iter().map(VecDeque::len).sum::<usize>());
        }
    }
}

#[test]
fn small_requests_get_the_same_bytes_as_large_ones() {
    let mut deficit = Deficit::default();
    let mut served = [0, 0];
    for flow in [0, 1] {
        (0..256).for_each(|_| deficit.push(flow, [1 << 20, 4 << 10][flow]));
    }
    while deficit.waits(1) {
        let (flow, bytes) = serve(&mut deficit).unwrap();
        served[flow] += bytes;
    }
    assert_eq!(served, [1 << 20, 1 << 20], "not 256 times as much");
}

#[test]
fn a_turn_does_not_cost_more_where_more_wait() {
    const FLOWS: usize = 10_000;
    let mut deficit = Deficit::default();
    (0..FLOWS).for_each(|flow| deficit.push(flow, REQUEST_BYTES_MAX));
    (0..FLOWS).for_each(|flow| deficit.push(flow, REQUEST_BYTES_MAX));
    let mut order = Vec::new();
    while let Some((flow, _)) = serve(&mut deficit) {
        order.push(flow);
    }
    // One for each quantum of the debt that the first request leaves.
    assert!(deficit.idle_turns as u64 <= FLOWS as u64 * (REQUEST_BYTES_MAX / QUANTUM_BYTES + 1));
    assert_eq!(order, (0..FLOWS).chain(0..FLOWS).collect::<Vec<_>>());
}

#[test]
fn a_flow_that_is_passed_over_keeps_its_turn_for_the_next_round() {
    let mut deficit = Deficit::default();
    deficit.push(3, 'a');
    deficit.push(5, 'b');
    assert_eq!(deficit.front(), Some((3, &mut 'a')));
    deficit.pass_over();
    assert_eq!(deficit.front(), Some((5, &mut 'b')));
    deficit.pass_over();
    assert_eq!(deficit.front(), Some((3, &mut 'a')));
    assert_eq!(deficit.leave(3), ['a']);
    assert_eq!(deficit.front(), Some((5, &mut 'b')));
    assert_eq!(deficit.take(5), Some('b'));
    assert_eq!(deficit.front(), None);
    assert!(deficit.is_empty() && deficit.flows() == 0);
}
