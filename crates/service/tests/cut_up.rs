//! A large write goes on in a pool that idle connections have cut up, while others are under way.

mod pair;
mod serving;

use std::time::Duration;

use byway_reactor::Frame;
use pair::Pair;

/// How long the store takes for the first write.
const STORE_TIME: Duration = Duration::from_mins(1);

#[test]
fn a_large_write_is_pulled_in_smaller_pieces_while_another_is_under_way() {
    let mut pair = Pair::new(1, 8 << 20, STORE_TIME, STORE_TIME * 10);
    assert!(pair.pass(Duration::from_secs(1)).is_empty());
    // One page of four stays taken.
    let mut taken: Vec<Frame> = std::iter::from_fn(|| pair.serving.reactor.frames().alloc(4096)).collect();
    taken.sort_by_key(byway_reactor::Frame::as_ptr);
    let mut at = 0_usize;
    taken.retain(|_| (at.is_multiple_of(4), at += 1).0);
    assert!(pair.serving.reactor.frames().alloc(16 << 10).is_none());
    pair.write(0, 20 << 10, 1);
    assert!(pair.pass(Duration::from_secs(1)).is_empty(), "it is at the store");
    pair.write(256 << 10, 256 << 10, 2);
    let answers = pair.pass(Duration::from_secs(1));
    let answers: Vec<_> = answers.iter().map(|done| (done.tag, done.result.is_ok())).collect();
    assert_eq!(answers, [(2, true)], "it waits for what will not help it");
    assert_eq!(pair.pass(STORE_TIME).len(), 1);
}
