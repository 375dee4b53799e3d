//! Messages: order, content, credit, waiting.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use byway_fabric::rdma::{Completion, Endpoint, Kind, Payload, PostError, Report, Work};

use crate::memory::pattern;
use crate::node::{ENTRIES, Node, Outcome, PATIENCE, Pair, RECEIVE_BYTES, RECEIVES, SENDS, ensure, sleep as doze};

const MESSAGES: u64 = 1000;
/// Messages on the way in one direction: as many as surely find a receive.
const CREDIT: u64 = RECEIVES as u64 / 2;
const CONNECTIONS: usize = 64;

/// One direction of a conversation.
#[derive(Default)]
struct Flow {
    sent: u64,
    retired: u64,
    received: u64,
}

impl Flow {
    fn is_done(&self) -> bool {
        self.retired == MESSAGES && self.received == MESSAGES
    }
}

/// A thousand messages each way; every other one from a frame, the rest from the stack.
pub fn messages(mut pair: Pair) -> Outcome<String> {
    let (client, server) = pair.connect()?;
    ensure(client.inline_bytes_max() >= RECEIVE_BYTES, || format!("inline: {}", client.inline_bytes_max()))?;
    let (mut there, mut back) = (Flow::default(), Flow::default());
    let deadline = Instant::now() + PATIENCE;
    loop {
        for completion in std::mem::take(&mut pair.client.ended) {
            take(&pair.client, completion, &mut there, &mut back, 2)?;
        }
        for completion in std::mem::take(&mut pair.server.ended) {
            take(&pair.server, completion, &mut back, &mut there, 1)?;
        }
        if there.is_done() && back.is_done() {
            break;
        }
        send(&pair.client, &client, &mut there, 1)?;
        send(&pair.server, &server, &mut back, 2)?;
        ensure(Instant::now() < deadline, || format!("only {} and {} came", there.received, back.received))?;
        doze(&mut [&mut pair.client, &mut pair.server], deadline)?;
    }
    Ok(format!("{MESSAGES} of {RECEIVE_BYTES} bytes each way, {} sleeps", pair.client.sleeps))
}

fn send(node: &Node, endpoint: &Endpoint, flow: &mut Flow, seed: u64) -> Outcome<()> {
    while flow.sent < MESSAGES && flow.sent - flow.received < CREDIT && flow.sent - flow.retired < u64::from(SENDS) {
        let message = pattern(seed * MESSAGES + flow.sent, RECEIVE_BYTES);
        if flow.sent.is_multiple_of(2) {
            endpoint.send_inline(&message, flow.sent, Report::Now)?;
        } else {
            let work = Work::Send(node.segment_of(&message)?.into());
            endpoint.post(work, flow.sent, Report::Now).map_err(|refused| refused.error)?;
        }
        flow.sent += 1;
    }
    Ok(())
}

/// A completion of a node that sends `mine` and receives `other`.
fn take(node: &Node, completion: Completion, mine: &mut Flow, other: &mut Flow, seed: u64) -> Outcome<()> {
    let bytes = completion.result? as usize;
    if completion.kind == Kind::Send {
        ensure(completion.token == mine.retired, || {
            format!("send {} ended before {}", completion.token, mine.retired)
        })?;
        mine.retired += 1;
        return Ok(());
    }
    let segment = completion.payload.into_segment().ok_or("a receive without memory")?;
    let expected = pattern(seed * MESSAGES + other.received, RECEIVE_BYTES);
    ensure(segment.bytes()[..bytes] == expected, || format!("message {} is not what was sent", other.received))?;
    other.received += 1;
    node.post_receive(segment, completion.token)
}

/// An idle node sleeps, and one message wakes it once.
pub fn sleep(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    doze(&mut [&mut pair.server], Instant::now() + Duration::from_millis(100))?;
    let (sleeps, wakes) = (pair.server.sleeps, pair.server.wakes);
    for _ in 0..3 {
        let is_news = doze(&mut [&mut pair.server], Instant::now() + Duration::from_millis(200))?;
        ensure(!is_news, || format!("news without a cause: {:?}", pair.server.ended))?;
    }
    ensure(pair.server.sleeps == sleeps + 3 && pair.server.wakes == wakes, || "an idle queue wakes its loop".into())?;
    for token in 0..10 {
        pair.server.completions.arm()?;
        client.send_inline(b"wake up", token, Report::Now)?;
        let message = pair.server.wait_for("a message", Node::take_receive)?;
        ensure(message.result == Ok(7), || format!("{message:?}"))?;
    }
    let slept = pair.server.sleeps - sleeps - 3;
    ensure(slept <= 20, || format!("{slept} sleeps for 10 messages"))?;
    Ok(format!("3 idle sleeps undisturbed, {slept} sleeps for 10 messages"))
}

/// Operations that are not reported end with one that is.
pub fn unreported(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    for token in 0..9 {
        client.send_inline(b"quiet", token, Report::WithNext)?;
    }
    for _ in 0..9 {
        pair.server.wait_for("a message", Node::take_receive)?;
    }
    pair.client.gather()?;
    ensure(pair.client.ended.is_empty(), || format!("reported all the same: {:?}", pair.client.ended))?;
    client.send_inline(b"loud", 9, Report::Now)?;
    pair.client.wait_for("ten ends", |node| (node.ended.len() == 10).then_some(()))?;
    let tokens: Vec<u64> = pair.client.ended.iter().map(|completion| completion.token).collect();
    ensure(tokens == (0..10).collect::<Vec<_>>(), || format!("the ends came as {tokens:?}"))?;
    Ok("9 operations ended with the tenth, in order".to_owned())
}

/// A queue that is full says so, and everything completes once.
pub fn full(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    let window = pair
        .server
        .domain
        .open_window(pair.server.pool.alloc(4096).ok_or("no frame")?, byway_fabric::rdma::Rights::Write)?;
    let mut posted = 0;
    let mut tries = 0;
    let mut seen = HashSet::new();
    while posted < 2000 {
        tries += 1;
        ensure(tries < 1_000_000, || "a full queue stays full".into())?;
        let work = Work::Write { payload: pair.client.segment_of(&pattern(posted, 100))?.into(), to: window.address() };
        match client.post(work, posted, Report::WithNext) {
            Ok(()) => posted += 1,
            Err(refused) if refused.error == PostError::Full => {
                ensure(refused.work.is_some(), || "the refused operation is lost".into())?;
                doze(&mut [&mut pair.client], Instant::now() + PATIENCE)?;
                let ended = std::mem::take(&mut pair.client.ended);
                ensure(ended.iter().all(|completion| seen.insert(completion.token)), || "an end came twice".into())?;
            }
            Err(refused) => return Err(refused.error.into()),
        }
    }
    client.post(Work::Write { payload: Payload::Empty, to: window.address() }, posted, Report::Now).ok();
    drop(client);
    pair.client.gather()?;
    ensure(pair.client.ended.iter().all(|completion| seen.insert(completion.token)), || "an end came twice".into())?;
    ensure(seen.len() as u64 >= posted, || format!("{} of {posted} ended", seen.len()))?;
    ensure(pair.client.completions.posted() == RECEIVES as usize, || "something is still posted".into())?;
    Ok(format!("{posted} writes through a queue of {SENDS}"))
}

/// Many connections at once on one receive queue and one completion queue.
pub fn connections(mut pair: Pair) -> Outcome<String> {
    let mut ends = Vec::new();
    for _ in 0..CONNECTIONS {
        ends.push(pair.connect()?);
    }
    // More sends could be posted than there are entries: the counting bounds it.
    ensure(CONNECTIONS as u32 * SENDS > ENTRIES, || "the check is too small".into())?;
    for (number, (client, server)) in ends.iter().enumerate() {
        client.send_inline(&(number as u64).to_le_bytes(), 1000, Report::Now)?;
        let message = pair.server.wait_for("a message", Node::take_receive)?;
        ensure(message.queue_pair == server.queue_pair_number(), || format!("{message:?} on another connection"))?;
        let segment = message.payload.into_segment().ok_or("no memory")?;
        ensure(segment.bytes()[..8] == (number as u64).to_le_bytes(), || "another connection's message".into())?;
        pair.server.post_receive(segment, message.token)?;
        server.send_inline(&(number as u64).to_be_bytes(), 1000, Report::Now)?;
        let message = pair.client.wait_for("an answer", Node::take_receive)?;
        ensure(message.queue_pair == client.queue_pair_number(), || format!("{message:?} on another connection"))?;
        let segment = message.payload.into_segment().ok_or("no memory")?;
        pair.client.post_receive(segment, message.token)?;
    }
    Ok(format!("{CONNECTIONS} connections, a message each way"))
}
