//! Beginnings and ends of connections, and of what they are made from.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use byway_fabric::rdma::{
    Buffer, CompletionQueue, Device, EventKind, Library, PostError, RdmaError, Report, Rights, Work, WorkError,
};
use byway_reactor::Frame;

use crate::memory::pattern;
use crate::node::{Node, Outcome, Pair, RECEIVES, ensure, start, take_request};

/// A server that refuses, one that drops the request, and nobody.
pub fn refusals(mut pair: Pair) -> Outcome<String> {
    let to = pair.listener.local_address().ok_or("no address")?;
    let endpoint = start(&mut pair.client, to, 7, b"please")?;
    ensure(endpoint.connect(&[0; 57]).is_err(), || "57 bytes of private data went out".into())?;
    let early = endpoint.send_inline(b"early", 1, Report::Now);
    ensure(early == Err(PostError::NotConnected), || format!("posted before the connection: {early:?}"))?;
    let (request, _) = pair.server.wait_for("a request", take_request)?;
    request.reject(b"go away")?;
    let said = pair.client.wait_for("the refusal", |node| {
        node.take_event(7, |kind| match kind {
            EventKind::Rejected { private_data } => Ok(private_data),
            other => Err(other),
        })
    })?;
    ensure(said.starts_with(b"go away"), || format!("the refusal says {said:?}"))?;

    let _second = start(&mut pair.client, to, 8, b"")?;
    drop(pair.server.wait_for("a request", take_request)?);
    pair.client.wait_for("the refusal of a dropped request", |node| {
        node.take_event(8, |kind| if matches!(kind, EventKind::Rejected { .. }) { Ok(()) } else { Err(kind) })
    })?;

    let nobody = SocketAddr::new(to.ip(), if to.port() == 9 { 10 } else { 9 });
    let _third = start(&mut pair.client, nobody, 9, b"")?;
    pair.client.wait_for("that nobody listens", |node| {
        node.take_event(9, |kind| if matches!(kind, EventKind::NobodyListens) { Ok(()) } else { Err(kind) })
    })?;
    Ok("refused with a word, dropped, and nobody there".to_owned())
}

/// One side disconnects: both are told, and what is posted ends.
pub fn disconnect(mut pair: Pair) -> Outcome<String> {
    let (client, server) = pair.connect()?;
    server.disconnect();
    let is_end = |kind| if matches!(kind, EventKind::Disconnected) { Ok(()) } else { Err(kind) };
    pair.client.wait_for("the news", |node| node.take_event(100, is_end))?;
    let late = client.send_inline(b"late", 1, Report::Now);
    ensure(late == Err(PostError::NotConnected), || format!("{late:?}"))?;
    // Which is the answer.
    client.disconnect();
    pair.server.wait_for("the answer", |node| node.take_event(100, is_end))?;
    Ok("both sides were told".to_owned())
}

/// An endpoint that is dropped over what it has posted completes all of it, once.
pub fn drop_posted(mut pair: Pair) -> Outcome<String> {
    let mut flushed = 0;
    for round in 0..8 {
        let (client, server) = pair.connect()?;
        let buffer = Buffer::zeroed(200_000).ok_or("no memory")?;
        let window = pair.server.domain.open_window(buffer, Rights::Write)?;
        for token in 0..20 {
            let segment = pair.client.segment_of(&pattern(token, 200_000))?;
            let report = if token % 2 == 0 { Report::Now } else { Report::WithNext };
            let work = Work::Write { payload: segment.into(), to: window.address() };
            client.post(work, token, report).map_err(|refused| refused.error)?;
        }
        if round % 2 == 0 {
            drop(server);
        }
        drop(client);
        pair.client.gather()?;
        let ended = std::mem::take(&mut pair.client.ended);
        let tokens: HashSet<u64> = ended.iter().map(|completion| completion.token).collect();
        ensure(ended.len() == 20 && tokens.len() == 20, || format!("{} ends of 20", ended.len()))?;
        flushed += ended.iter().filter(|completion| completion.result == Err(WorkError::Flushed)).count();
        ensure(pair.client.completions.posted() == RECEIVES as usize, || "something is still posted".into())?;
    }
    ensure(flushed > 0, || "everything was done before the drop".into())?;
    Ok(format!("160 operations, {flushed} of them flushed"))
}

/// Parents are dropped before their children, with operations posted.
pub fn drop_order(mut pair: Pair) -> Outcome<String> {
    let (client, server) = pair.connect()?;
    let frame: Frame = pair.server.pool.alloc(100_000).ok_or("no frame")?;
    let window = pair.server.domain.open_window(frame, Rights::Write)?;
    for token in 0..20 {
        let segment = pair.client.segment_of(&pattern(token, 100_000))?;
        let work = Work::Write { payload: segment.into(), to: window.address() };
        client.post(work, token, Report::Now).map_err(|refused| refused.error)?;
    }
    let Pair { client: node, server: other, listener, .. } = pair;
    let Node { device, domain, completions, receives, pool, region, channel, .. } = node;
    drop((pool, region, device, domain, channel));
    drop((completions, receives));
    drop(other);
    drop(window);
    drop(client);
    drop(server);
    drop(listener);
    Ok("pools, queues and devices dropped before their connections".to_owned())
}

/// What is asked of a device that is not there, or beyond what it can.
pub fn other_device(pair: Pair) -> Outcome<String> {
    let nowhere = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    let error = Device::open(Library::load()?, nowhere).err();
    ensure(error == Some(RdmaError::NoDeviceAt(nowhere)), || format!("{error:?}"))?;
    let too_many = pair.client.device.completions_max() + 1;
    let error = CompletionQueue::new(&pair.client.device, too_many).err();
    ensure(matches!(error, Some(RdmaError::Capacity { .. })), || format!("{error:?}"))?;
    Ok(format!("refused; {:?}", pair.client.device))
}
