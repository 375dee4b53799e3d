//! RDMA WRITE and READ: every byte where it belongs, and none beside it.

use std::rc::Rc;

use byway_fabric::rdma::{Buffer, Endpoint, PostError, Report, Rights, Segment, Work};

use crate::memory::{CANARY_BYTES, Fenced, pattern};
use crate::node::{Node, Outcome, Pair, SEGMENTS, ensure};

const SIZES: [usize; 15] =
    [1, 2, 127, 128, 129, 1000, 1023, 1024, 1025, 4096, 65_537, 1 << 20, (1 << 20) + 1, (4 << 20) - 1, 4 << 20];

/// Posts and waits for the end.
fn run(node: &mut Node, endpoint: &Endpoint, work: Work, token: u64) -> Outcome<byway_fabric::rdma::Completion> {
    endpoint.post(work, token, Report::Now).map_err(|refused| refused.error)?;
    node.wait_for("the end of an operation", |node| node.take_sent(token))
}

/// Registered memory with this content.
fn region_of(node: &Node, content: &[u8]) -> Outcome<byway_fabric::rdma::Region> {
    let mut buffer = Buffer::zeroed(content.len()).ok_or("no memory")?;
    buffer.copy_from_slice(content);
    Ok(node.domain.register(buffer)?)
}

/// Into windows of the peer.
pub fn write(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    for (token, size) in (0..).zip(SIZES) {
        let content = pattern(token, size);
        let mut fenced = Fenced::new(&vec![0; size])?;
        let window = fenced.window(&pair.server.domain, Rights::Write)?;
        ensure(window.bytes().is_none(), || "a window that a peer writes to can be read".into())?;
        let region = region_of(&pair.client, &content)?;
        let segment = Segment::of_region(region, 0..size).map_err(|_| "too short")?;
        let work = Work::Write { payload: segment.into(), to: window.address() };
        let end = run(&mut pair.client, &client, work, token)?;
        ensure(end.result == Ok(size as u32), || format!("{size} bytes ended with {:?}", end.result))?;
        window.close().ok_or("a window does not close")?;
        fenced.check(&content, "write")?;
    }
    Ok(format!("{} sizes from 1 byte to 4 MiB", SIZES.len()))
}

/// Out of windows of the peer.
pub fn read(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    for (token, size) in (0..).zip(SIZES) {
        let content = pattern(token + 50, size);
        let mut fenced = Fenced::new(&content)?;
        let window = fenced.window(&pair.server.domain, Rights::Read)?;
        let region = region_of(&pair.client, &vec![0x5a; size + 2 * CANARY_BYTES])?;
        let segment = Segment::of_region(region, CANARY_BYTES..CANARY_BYTES + size).map_err(|_| "too short")?;
        let work = Work::Read { into: segment.into(), from: window.address() };
        let end = run(&mut pair.client, &client, work, token)?;
        ensure(end.result == Ok(size as u32), || format!("{size} bytes ended with {:?}", end.result))?;
        let region = end.payload.into_segment().and_then(Segment::into_region).ok_or("no region came back")?;
        ensure(region.bytes()[CANARY_BYTES..CANARY_BYTES + size] == content, || format!("{size} bytes are wrong"))?;
        let canaries = [&region.bytes()[..CANARY_BYTES], &region.bytes()[CANARY_BYTES + size..]].concat();
        ensure(canaries.iter().all(|byte| *byte == 0x5a), || format!("beside {size} bytes something was touched"))?;
        window.close().ok_or("a window does not close")?;
        fenced.check(&content, "read")?;
    }
    Ok(format!("{} sizes from 1 byte to 4 MiB", SIZES.len()))
}

/// Segments of odd lengths: frames, shared frames and regions.
fn odd_segments(node: &Node, content: &[u8]) -> Outcome<Vec<Segment>> {
    let count = SEGMENTS as usize;
    let mut segments = Vec::new();
    let mut at = 0;
    for number in 0..count {
        let left = content.len() - at;
        let len = if number + 1 == count { left } else { (number * 997 + 1).min(left) };
        let piece = &content[at..at + len];
        at += len;
        segments.push(match number % 3 {
            0 => node.segment_of(piece)?,
            1 => {
                let mut frame = node.pool.alloc(len + 100).ok_or("no frame")?;
                frame.write(100, piece);
                Segment::of_shared_frame(&node.region, Rc::new(frame), 100..100 + len).map_err(|_| "not in the pool")?
            }
            _ => Segment::of_region(region_of(node, piece)?, 0..len).map_err(|_| "too short")?,
        });
    }
    Ok(segments)
}

/// Several segments in one operation, there and back.
pub fn segments(mut pair: Pair) -> Outcome<String> {
    let (client, _server) = pair.connect()?;
    let size = 200_003;
    let content = pattern(9, size);
    let mut fenced = Fenced::new(&vec![0; size])?;
    let window = fenced.window(&pair.server.domain, Rights::Write)?;
    let work = Work::Write { payload: odd_segments(&pair.client, &content)?.into(), to: window.address() };
    let end = run(&mut pair.client, &client, work, 1)?;
    ensure(end.result == Ok(size as u32), || format!("the write ended with {:?}", end.result))?;
    window.close().ok_or("a window does not close")?;
    fenced.check(&content, "write of segments")?;

    let window = fenced.window(&pair.server.domain, Rights::Read)?;
    let lengths = [1, 4096, 70_000, 25_906, 100_000];
    let frames = lengths.iter().map(|len| pair.client.segment_of(&vec![0; *len]));
    let into = frames.collect::<Outcome<Vec<Segment>>>()?;
    let end = run(&mut pair.client, &client, Work::Read { into: into.into(), from: window.address() }, 2)?;
    ensure(end.result == Ok(size as u32), || format!("the read ended with {:?}", end.result))?;
    let found: Vec<u8> = end.payload.segments().iter().flat_map(|segment| segment.bytes().to_vec()).collect();
    ensure(found == content, || "the read brought other bytes".into())?;

    let many = (0..=SEGMENTS).map(|_| pair.client.segment_of(b"x")).collect::<Outcome<Vec<Segment>>>()?;
    let refused = client.post(Work::Send(many.into()), 3, Report::Now).err().map(|refused| refused.error);
    let expected = PostError::Segments { segments: SEGMENTS + 1, most: SEGMENTS };
    ensure(refused == Some(expected), || format!("too many segments: {refused:?}"))?;
    window.close().ok_or("a window does not close")?;
    Ok(format!("{SEGMENTS} segments written, {} read", lengths.len()))
}
