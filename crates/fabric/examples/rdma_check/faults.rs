//! Wrong keys, dead peers, refused memory.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Instant;

use byway_fabric::rdma::{EventKind, Fault, PostError, Report, Rights, Segment, WindowAddress, Work, WorkError};

use crate::memory::{Fenced, pattern};
use crate::node::{LISTENER, Node, Outcome, PATIENCE, Pair, ensure, established, sleep as doze, take_request};

const WINDOW_BYTES: usize = 10_000;

/// What a peer tries that it may not.
#[derive(Clone, Copy, Debug)]
enum Attempt {
    WrongKey,
    BeforeStart,
    PastEnd,
    WriteToReadOnly,
    ReadFromWriteOnly,
    AfterClose,
}

/// Each attempt fails with a remote access error, touches nothing, and flushes what is behind it.
pub fn keys(mut pair: Pair) -> Outcome<String> {
    use Attempt::{AfterClose, BeforeStart, PastEnd, ReadFromWriteOnly, WriteToReadOnly, WrongKey};
    let attempts = [WrongKey, BeforeStart, PastEnd, WriteToReadOnly, ReadFromWriteOnly, AfterClose];
    for attempt in attempts {
        attempt_once(&mut pair, attempt).map_err(|error| format!("{attempt:?}: {error}"))?;
    }
    Ok(format!("{} attempts refused, nothing touched", attempts.len()))
}

fn attempt_once(pair: &mut Pair, attempt: Attempt) -> Outcome<()> {
    let (client, server) = pair.connect()?;
    let content = pattern(1, WINDOW_BYTES);
    let mut fenced = Fenced::new(&content)?;
    let rights = if matches!(attempt, Attempt::WriteToReadOnly) { Rights::Read } else { Rights::Write };
    let mut window = Some(fenced.window(&pair.server.domain, rights)?);
    let right = window.as_ref().ok_or("no window")?.address();
    let to = match attempt {
        Attempt::WrongKey => WindowAddress { rkey: right.rkey ^ 0x00c0_ff00, ..right },
        Attempt::BeforeStart => right.at(1_u64.wrapping_neg()),
        Attempt::PastEnd => right.at(WINDOW_BYTES as u64 - 99),
        Attempt::WriteToReadOnly | Attempt::ReadFromWriteOnly | Attempt::AfterClose => right,
    };
    if matches!(attempt, Attempt::AfterClose) {
        window.take().and_then(byway_fabric::rdma::Window::close).ok_or("the window does not close")?;
    }
    let segment = pair.client.segment_of(&[0xee; 100])?;
    let work = if matches!(attempt, Attempt::ReadFromWriteOnly) {
        Work::Read { into: segment.into(), from: to }
    } else {
        Work::Write { payload: segment.into(), to }
    };
    client.post(work, 1, Report::Now).map_err(|refused| refused.error)?;
    client.post(Work::Write { payload: pair.client.segment_of(&[0xdd; 300])?.into(), to: right }, 2, Report::Now).ok();
    let end = pair.client.wait_for("the refusal", |node| node.take_sent(1))?;
    ensure(end.result == Err(WorkError::RemoteAccess), || format!("it ended with {:?}", end.result))?;
    ensure(end.result.err().map(WorkError::fault) == Some(Fault::Peer), || "the wrong one is blamed".into())?;
    let behind = pair.client.wait_for("the one behind it", |node| node.take_sent(2))?;
    ensure(behind.result == Err(WorkError::Flushed), || format!("the one behind it ended with {:?}", behind.result))?;
    if matches!(attempt, Attempt::ReadFromWriteOnly) {
        let segment = end.payload.into_segment().ok_or("no memory came back")?;
        ensure(segment.bytes() == [0xee; 100], || "the refused read brought bytes".into())?;
    }
    client.disconnect();
    drop((client, server));
    if let Some(window) = window {
        window.close().ok_or("the window does not close")?;
    }
    fenced.check(&content, "a refused attempt")?;
    pair.client.ended.clear();
    Ok(())
}

/// The device never writes into memory that others hold.
pub fn exclusive(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    let frame = Rc::new(pair.client.pool.alloc(100).ok_or("no frame")?);
    let shared =
        || Segment::of_shared_frame(&pair.client.region, Rc::clone(&frame), 0..100).map_err(|_| "not in the pool");
    let from = WindowAddress { address: 0, rkey: 0 };
    let refused = client.post(Work::Read { into: shared()?.into(), from }, 1, Report::Now).err();
    ensure(refused.is_some_and(|it| it.error == PostError::NotExclusive && it.work.is_some()), || "a read".into())?;
    let receive = pair.client.receives.post(shared()?.into(), 1).err().map(|(error, _)| error);
    ensure(receive == Some(PostError::NotExclusive), || format!("a receive: {receive:?}"))?;
    let foreign = Segment::of_frame(&pair.server.region, pair.client.pool.alloc(9).ok_or("no frame")?, 0..9);
    ensure(foreign.is_err(), || "a frame of another pool was taken".into())?;
    Ok("shared memory is not received into".to_owned())
}

/// A message longer than the receive that it meets breaks the connection, and only that.
pub fn receive_too_short(mut pair: Pair) -> Outcome<String> {
    let (client, server) = pair.connect()?;
    let (other, _other_server) = pair.connect()?;
    let work = Work::Send(pair.client.segment_of(&[1; 1000])?.into());
    client.post(work, 1, Report::Now).map_err(|refused| refused.error)?;
    let sent = pair.client.wait_for("the end of the message", |node| node.take_sent(1))?;
    ensure(sent.result.is_err(), || "a message of 1000 bytes went into 128".into())?;
    pair.server.gather()?;
    let received = pair.server.take_receive();
    ensure(received.as_ref().is_none_or(|it| it.result.is_err()), || format!("{received:?}"))?;
    drop((client, server));
    other.send_inline(b"still here", 2, Report::Now)?;
    let message = pair.server.wait_for("a message on the other connection", |node| {
        node.take_receive().filter(|message| message.result.is_ok())
    })?;
    ensure(message.result == Ok(10), || format!("{message:?}"))?;
    let said = received.map_or("no receive ended with it".to_owned(), |it| format!("the receive: {:?}", it.result));
    Ok(format!("the sender: {:?}, {said}", sent.result))
}

/// A process, killed by its id when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a child that has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(arguments: &[String]) -> Outcome<Process> {
    Ok(Process(Command::new(std::env::current_exe()?).args(arguments).stdin(Stdio::piped()).spawn()?))
}

const ROUNDS: usize = 6;
const OPERATIONS: u64 = 48;

/// A peer that is killed while it is written to and read from: everything ends, once.
pub fn killed(mut pair: Pair) -> Outcome<String> {
    let mut failed = 0;
    for round in 0..ROUNDS {
        failed += kill_once(&mut pair, round * 7).map_err(|error| format!("round {round}: {error}"))?;
    }
    ensure(failed > 0, || "no operation was under way when a peer died".into())?;
    Ok(format!("{ROUNDS} peers killed, {failed} of {} operations failed, each ended once", ROUNDS as u64 * OPERATIONS))
}

fn kill_once(pair: &mut Pair, kill_after: usize) -> Outcome<usize> {
    let to = pair.listener.local_address().ok_or("no address")?;
    let mut process = start(&[to.ip().to_string(), "peer".to_owned(), to.port().to_string()])?;
    let (mut endpoint, said) = pair.server.wait_for("the peer", take_request)?;
    let window = crate::peer::parse_window(&said).ok_or("the peer names no window")?;
    endpoint.set_token(LISTENER + 1);
    endpoint.create_queue_pair(&pair.server.receives, Node::options())?;
    endpoint.accept(b"")?;
    pair.server.wait_for("the connection", |node| node.take_event(LISTENER + 1, established))?;
    for token in 0..OPERATIONS {
        let segment = pair.server.segment_of(&pattern(token, 100_000))?;
        let work = match token % 3 {
            0 => Work::Write { payload: segment.into(), to: window },
            1 => Work::Read { into: segment.into(), from: window },
            _ => Work::Send(pair.server.segment_of(b"hello")?.into()),
        };
        endpoint.post(work, token, Report::Now).map_err(|refused| refused.error)?;
    }
    pair.server.wait_for("the first ends", |node| (node.ended.len() >= kill_after).then_some(()))?;
    process.0.kill()?;
    process.0.wait()?;
    let mut ends: HashMap<u64, Result<u32, WorkError>> = HashMap::new();
    let mut is_disconnected = false;
    let deadline = Instant::now() + PATIENCE;
    while ends.len() < OPERATIONS as usize || !is_disconnected {
        for completion in std::mem::take(&mut pair.server.ended) {
            let again = ends.insert(completion.token, completion.result);
            ensure(again.is_none(), || format!("operation {} ended twice", completion.token))?;
        }
        for event in std::mem::take(&mut pair.server.events) {
            if matches!(event.kind, EventKind::Disconnected) {
                is_disconnected = true;
                endpoint.disconnect();
            }
        }
        ensure(Instant::now() < deadline, || format!("{} ends, disconnected: {is_disconnected}", ends.len()))?;
        doze(&mut [&mut pair.server], deadline)?;
    }
    let late = endpoint.send_inline(b"too late", 1000, Report::Now);
    ensure(late == Err(PostError::NotConnected), || format!("posted to the dead: {late:?}"))?;
    Ok(ends.values().filter(|result| result.is_err()).count())
}

/// A user who may not lock memory is told so.
pub fn memory_limit(pair: Pair) -> Outcome<String> {
    let to = pair.listener.local_address().ok_or("no address")?;
    let mut process = start(&[to.ip().to_string(), "limited".to_owned()])?;
    let status = process.0.wait()?;
    ensure(status.success(), || format!("the limited process ended with {status}"))?;
    Ok("a pool beyond the limit is refused with the remedy".to_owned())
}
