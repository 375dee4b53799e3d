//! A client whose old session still has I/O at a slow store waits for its end, and does not take the server for lost.

mod pair;
mod serving;

use std::time::Duration;

use byway_fabric::CloseReason;
use byway_fabric::limits::HANDSHAKE_TIME_MAX;
use byway_fabric::wire::RefuseCode;
use byway_service::block::client::Notice;
use pair::Pair;

/// How long the store takes for the first write.
const STORE_TIME: Duration = Duration::from_mins(1);

/// What a client hears whose write takes long, and whose connection breaks.
fn heard(seed: u64) -> Vec<Notice> {
    let mut pair = Pair::new(seed, 1 << 20, STORE_TIME, HANDSHAKE_TIME_MAX * 2);
    pair.write(0, 4096, 1);
    assert_eq!(pair.pass(Duration::from_secs(1)).len(), 0);
    assert_eq!(pair.serving.server.sessions().calls_in_flight(), 1, "the write is at the store");
    assert!(pair.serving.world.reset_random_connection());
    let (mut notices, mut answers) = (Vec::new(), Vec::new());
    for _ in 0..STORE_TIME.as_secs() * 2 {
        answers.extend(pair.pass(Duration::from_secs(1)));
        pair.client.take_notices(&mut notices);
    }
    assert_eq!(answers.len(), 1, "{notices:?}");
    assert_eq!(answers[0].result.as_ref().map(drop), Ok(()), "seed {seed}: {notices:?}");
    notices
}

#[test]
fn a_client_that_waits_for_its_old_session_is_told_so_in_time() {
    for seed in 0..20 {
        let heard = heard(seed);
        let busy = Notice::Disconnected(CloseReason::Refused(RefuseCode::Busy));
        let slow = Notice::Disconnected(CloseReason::SlowHandshake);
        assert!(heard.contains(&busy) && !heard.contains(&slow), "seed {seed}: {heard:?}");
    }
}
