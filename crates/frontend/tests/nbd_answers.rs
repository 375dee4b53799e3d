//! Every request that has been received is answered, though the client sends nothing more: whatever the sizes, however
//! the requests are cut into segments, whether the client takes replies at once or late, and wherever the data lie.

mod nbd_loop;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use byway_reactor::IoChoice;
use byway_service::block::{OpenHere, Store, StoreOptions, Volume, VolumeOptions};
use nbd_loop::{Loop, backends, request};
use proptest::prelude::*;

const MIB: usize = 1 << 20;
const VOLUME_BYTES: usize = 48 * MIB;
/// Bytes that the requests of one case name together, if it is more than one request.
const CASE_BYTES_MAX: usize = 64 * MIB;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const CACHE: u16 = 5;

/// What the volume's bytes lie in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Medium {
    /// A file whose pages are in memory.
    Cached,
    /// A file without pages.
    Sparse,
    Memory,
}

#[derive(Clone, Debug)]
struct Ask {
    command: u16,
    offset: usize,
    len: usize,
}

#[derive(Clone, Debug)]
struct Case {
    medium: Medium,
    asks: Vec<Ask>,
    structured: bool,
    /// Frames of the loop: `--buffer-memory` over `--threads`.
    frames: usize,
    /// Lengths of segments, over and over; none for all in one.
    segments: Vec<usize>,
    /// Turns of the loop between two segments.
    turns: usize,
    /// The client takes replies when the loop has nothing else to do, in pieces of so many bytes; at once if none.
    late: Option<usize>,
}

fn len() -> impl Strategy<Value = usize> {
    let near_a_power = (9u32..=25, 0usize..4, -1i64..=1).prop_map(|(power, times, off)| {
        let unit = 1i64 << power;
        (unit + times as i64 * unit / 4 + off * 1024).clamp(1, 32 << 20) as usize
    });
    prop_oneof![1usize..64 << 10, near_a_power.clone(), near_a_power, MIB..=32 * MIB]
}

fn ask() -> impl Strategy<Value = Ask> {
    let command = prop_oneof![5 => Just(READ), 2 => Just(WRITE), 2 => Just(FLUSH), 1 => Just(CACHE)];
    (command, len(), any::<prop::sample::Index>()).prop_map(|(command, len, at)| {
        let len = if command == FLUSH { 0 } else { len };
        // Sometimes beyond the end: refused, and a payload drained.
        let offset = if command == FLUSH { 0 } else { at.index(VOLUME_BYTES - len + 64 * 1024) };
        Ask { command, offset, len }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let medium = prop_oneof![3 => Just(Medium::Cached), 3 => Just(Medium::Sparse), 1 => Just(Medium::Memory)];
    let segments = prop_oneof![Just(Vec::new()), prop::collection::vec(1usize..100, 1..4), Just(vec![28, 1 << 20])];
    let late = prop_oneof![Just(None), (MIB / 4..2 * MIB).prop_map(Some)];
    let frames = prop::sample::select(vec![4 * MIB, 16 * MIB, 64 * MIB]);
    (medium, prop::collection::vec(ask(), 1..24), any::<bool>(), frames, segments, 0usize..4, late).prop_map(
        |(medium, mut asks, structured, frames, segments, turns, late)| {
            let mut bytes = 0;
            asks.retain(|ask| {
                bytes += ask.len;
                bytes <= CASE_BYTES_MAX
            });
            Case { medium, asks, structured, frames, segments, turns, late }
        },
    )
}

/// The loop, and the client's end of the one stream that it serves.
struct Rig {
    server: Loop,
    stream: UnixStream,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(io: IoChoice, medium: Medium, frames: usize, content: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let store = match medium {
            Medium::Memory => Store::memory("v", VOLUME_BYTES as u64).unwrap(),
            Medium::Cached | Medium::Sparse => {
                std::fs::write(&path, if medium == Medium::Cached { content } else { &[] }).unwrap();
                std::fs::File::options().write(true).open(&path).unwrap().set_len(VOLUME_BYTES as u64).unwrap();
                Store::path(&path, StoreOptions::default(), &OpenHere).unwrap()
            }
        };
        let volume = Volume::new("v", store, VolumeOptions::default());
        let mut server = Loop::new(io, frames, &[Arc::new(volume)]);
        let stream = server.connect();
        Self { server, stream, _folder: folder }
    }

    fn turn(&mut self) -> bool {
        self.server.turn()
    }

    /// Reads an exact answer of the handshake.
    fn expect(&mut self, bytes: usize) {
        let mut answer = vec![0; bytes];
        let mut filled = 0;
        while filled < bytes {
            self.turn();
            filled += read_some(&mut self.stream, &mut answer[filled..]);
        }
    }
}

fn read_some(stream: &mut UnixStream, into: &mut [u8]) -> usize {
    match stream.read(into) {
        Ok(0) => panic!("the server ended the connection"),
        Ok(n) => n,
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        Err(error) => panic!("{error}"),
    }
}

/// What the client still waits for, and the reply that it reads.
struct Answers<'a> {
    content: &'a [u8],
    asks: &'a [Ask],
    waiting: Vec<bool>,
    head: Vec<u8>,
    /// Data that follow: how much, where they lie in the volume, and whether the request is answered after them.
    data: Option<(usize, usize, Option<usize>)>,
}

impl Answers<'_> {
    fn left(&self) -> usize {
        self.waiting.iter().filter(|waits| **waits).count()
    }

    fn answered(&mut self, cookie: usize) {
        assert!(std::mem::replace(&mut self.waiting[cookie], false), "request {cookie} was answered twice");
    }

    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if let Some((left, at, ends)) = self.data {
                let n = left.min(bytes.len());
                assert!(bytes[..n] == self.content[at..at + n], "other bytes at {at}");
                bytes = &bytes[n..];
                self.data = (left > n).then_some((left - n, at + n, ends));
                if let (None, Some(cookie)) = (self.data, ends) {
                    self.answered(cookie);
                }
                continue;
            }
            self.head.push(bytes[0]);
            bytes = &bytes[1..];
            self.take_head();
        }
    }

    fn take_head(&mut self) {
        let head = &self.head;
        let number = |at: usize, len: usize| head[at..at + len].iter().fold(0, |n, byte| n << 8 | usize::from(*byte));
        if head.len() < 16 {
            return;
        }
        if head[..4] == [0x67, 0x44, 0x66, 0x98] {
            let (error, cookie) = (number(4, 4), number(8, 8));
            let ask = &self.asks[cookie];
            self.head.clear();
            if error != 0 || ask.command != READ {
                return self.answered(cookie);
            }
            self.data = Some((ask.len, ask.offset, Some(cookie)));
            return;
        }
        assert_eq!(head[..4], [0x66, 0x8e, 0x33, 0xef], "the head of a chunk");
        if head.len() < 20 {
            return;
        }
        let (done, kind, cookie, len) = (number(4, 2) == 1, number(6, 2), number(8, 8), number(16, 4));
        let rest = if kind == 1 { 8 } else { len };
        if head.len() < 20 + rest {
            return;
        }
        let ends = done.then_some(cookie);
        match kind {
            1 => self.data = Some((len - 8, number(20, 8), ends)),
            _ => assert!(kind == 0 || kind >> 15 == 1, "chunk {kind}"),
        }
        self.head.clear();
        if let (None, Some(cookie)) = (self.data, ends) {
            self.answered(cookie);
        }
    }
}

/// All that the client says once it has chosen the export.
fn said(asks: &[Ask], content: &[u8]) -> Vec<u8> {
    let mut said = Vec::new();
    for (cookie, ask) in asks.iter().enumerate() {
        said.extend(request(ask.command, cookie as u64, ask.offset as u64, ask.len as u32));
        if ask.command == WRITE {
            // What is there already, so that every read has one right answer.
            let here = &content[ask.offset.min(VOLUME_BYTES)..(ask.offset + ask.len).min(VOLUME_BYTES)];
            said.extend_from_slice(here);
            said.resize(said.len() + ask.len - here.len(), 0);
        }
    }
    said
}

/// Sends all of a case, and then only waits.
fn play(io: IoChoice, case: &Case) {
    let random = (0..VOLUME_BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8);
    let content: Vec<u8> = if case.medium == Medium::Cached { random.collect() } else { vec![0; VOLUME_BYTES] };
    let mut rig = Rig::new(io, case.medium, case.frames, &content);
    rig.stream.write_all(b"\0\0\0\x03").unwrap();
    rig.expect(18);
    if case.structured {
        rig.stream.write_all(b"IHAVEOPT\0\0\0\x08\0\0\0\0").unwrap();
        rig.expect(20);
    }
    rig.stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x01v").unwrap();
    rig.expect(10);
    let said = said(&case.asks, &content);
    let mut answers = Answers {
        content: &content,
        asks: &case.asks,
        waiting: vec![true; case.asks.len()],
        head: Vec::new(),
        data: None,
    };
    // A payload is not cut into more segments than a test has time for.
    let least = said.len() / 1000;
    let mut segments = case.segments.iter().map(|len| (*len).max(least)).cycle();
    let (mut sent, mut segment_end) = (0, 0);
    let mut taken = vec![0; 2 * MIB];
    let mut moved = std::time::Instant::now();
    while answers.left() > 0 {
        if sent == segment_end {
            segment_end = said.len().min(sent + segments.next().unwrap_or(said.len()));
        }
        match rig.stream.write(&said[sent..segment_end]) {
            Ok(0) => {}
            Ok(n) => {
                sent += n;
                moved = std::time::Instant::now();
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        let mut went_on = false;
        for _ in 0..case.turns.max(usize::from(sent == said.len() || sent < segment_end)) {
            went_on |= rig.turn();
        }
        if case.late.is_none() || !went_on {
            let n = read_some(&mut rig.stream, &mut taken[..case.late.unwrap_or(2 * MIB)]);
            answers.take(&taken[..n]);
            if n > 0 {
                moved = std::time::Instant::now();
            }
        }
        assert!(
            moved.elapsed() < Duration::from_secs(10),
            "{} of {} requests are not answered; {} of {} bytes were sent",
            answers.left(),
            case.asks.len(),
            sent,
            said.len()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 12, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_was_received_is_answered_without_more_input(case in case()) {
        for io in backends() {
            play(io, &case);
        }
    }
}

#[test]
fn requests_behind_long_reads_are_answered() {
    let read = |len| Ask { command: READ, offset: 0, len };
    let flush = Ask { command: FLUSH, offset: 0, len: 0 };
    let cases = [
        (Medium::Cached, 64 * MIB, vec![read(14 * MIB), flush.clone()]),
        (Medium::Cached, 64 * MIB, vec![read(32 * MIB); 8]),
        (Medium::Cached, 64 * MIB, vec![read(16 * MIB); 16]),
        (Medium::Sparse, 4 * MIB, vec![read(2 * MIB + 1024), flush]),
    ];
    for io in backends() {
        for (medium, frames, asks) in &cases {
            for structured in [false, true] {
                let asks = asks.clone();
                let (medium, frames) = (*medium, *frames);
                play(io, &Case { medium, asks, structured, frames, segments: Vec::new(), turns: 1, late: None });
            }
        }
    }
}
