//! One end of a session, in the process that dies or in the one that survives it: it lends memory if it has some to lend, puts
//! into and gets from what it is lent, and looks at all that comes of it.

use std::collections::HashMap;
use std::ops::Range;

use byway_fabric::node::{
    Completed, Deadline, Descriptor, Group, Memory, Message, Node, NodeError, Op, OpError, OpId, Outcome, Rights,
    Session, SubmitError, WaitError, Window,
};
use byway_fabric::windows::WindowError;

use crate::bytes::{CANARY, MARGIN, Random, WINDOW, assert_margins, bytes, empty, first_wrong, read};

/// Puts and gets under way at a time.
const DEPTH: usize = 4;
/// Operations under way at a time, those that are not puts or gets too.
const OPS_MAX: usize = 64;
/// Messages that must have come before windows are closed and opened again.
const SETTLED: u64 = 4;

/// Kinds of messages, first in their header: windows were opened, or bytes lie in one.
const WINDOWS: u8 = 1;
const BYTES: u8 = 2;

/// Memory to be lent, again and again.
pub struct Lent {
    pub writable: Memory,
    pub readable: Memory,
    seed: u64,
    /// What lies in the one, and may be put into the other.
    bytes: Vec<u8>,
}

impl Lent {
    pub fn new(node: &Node, seed: u64) -> Self {
        let (writable, readable) = (empty(node, WINDOW, true), empty(node, WINDOW, true));
        let lent = Self { writable, readable, seed, bytes: bytes(seed) };
        lent.readable.write(MARGIN, &lent.bytes).unwrap();
        lent
    }

    /// Nothing was ever put there.
    pub fn clear(&self) {
        self.writable.write(MARGIN, &[CANARY; WINDOW]).unwrap();
    }

    /// Nothing lies there but what belongs there.
    pub fn assert_is_whole(&self) {
        assert_margins(&self.writable, WINDOW, "a window for puts");
        assert_eq!(first_wrong(&read(&self.writable, MARGIN, WINDOW), &self.bytes, false), None, "in it");
        assert_margins(&self.readable, WINDOW, "a window for gets");
        assert_eq!(first_wrong(&read(&self.readable, MARGIN, WINDOW), &self.bytes, true), None, "in it");
    }
}

/// What was lent to us, and what belongs there.
struct Theirs {
    writable: Descriptor,
    readable: Descriptor,
    seed: u64,
    bytes: Vec<u8>,
}

/// Where in a window something is put or got.
type WindowRange = Range<usize>;

enum Asked {
    Session,
    Receive,
    Send,
    Close,
    /// The bytes come from `buffer`; a message follows them or not.
    Put(WindowRange, Memory, bool),
    /// Into `buffer`: of what was put there before, or of what was always there.
    Get(WindowRange, Memory, bool),
}

/// See the module.
pub struct Peer<'a> {
    node: &'a Node,
    group: Group,
    random: Random,
    lent: Option<&'a Lent>,
    windows: Vec<Window>,
    closing: usize,
    theirs: Option<Theirs>,
    session: Option<Session>,
    begins: Option<OpId>,
    asked: HashMap<u64, Asked>,
    next: u64,
    buffers: Vec<Memory>,
    /// The session has ended, or none has come of it.
    pub has_ended: bool,
    /// Puts and gets that went well.
    pub done: u64,
    /// Messages of bytes that lay in what we lent.
    pub heard: u64,
}

impl<'a> Peer<'a> {
    /// A peer whose session `begin` brings.
    pub fn new(node: &'a Node, lent: Option<&'a Lent>, begin: Op, seed: u64) -> Self {
        let buffers = (0..2 * DEPTH).map(|number| empty(node, WINDOW, number % 2 == 0)).collect();
        let mut peer = Self {
            node,
            group: node.group(OPS_MAX).unwrap(),
            random: Random(seed),
            lent,
            windows: Vec::new(),
            closing: 0,
            theirs: None,
            session: None,
            begins: Some(begin.id()),
            asked: HashMap::new(),
            next: 0,
            buffers,
            has_ended: false,
            done: 0,
            heard: 0,
        };
        peer.add(Ok::<_, SubmitError>(begin), Asked::Session);
        peer
    }

    pub fn session(&self) -> Option<Session> {
        self.session
    }

    /// Whether windows are open, and none is being closed.
    pub fn has_windows(&self) -> bool {
        !self.windows.is_empty() && self.closing == 0
    }

    /// Whether all that was asked for has ended.
    pub fn is_at_rest(&self) -> bool {
        self.asked.is_empty()
    }

    /// Wants no session any more, if none has come.
    pub fn give_up(&mut self) {
        if let Some(begins) = self.begins {
            self.node.cancel(begins).unwrap();
        }
    }

    /// Does what has come, or waits for it, and asks for more.
    pub fn step(&mut self, until: Deadline) {
        let completion = match self.group.wait(until) {
            Ok(completion) => completion,
            Err(WaitError::Deadline) => return,
            Err(error) => panic!("{error}"),
        };
        let asked = self.asked.remove(&completion.context).expect("what was asked for ends once");
        self.take(asked, completion.result);
        for _ in DEPTH..self.buffers.len() {
            self.ask();
        }
    }

    fn add<E: Into<NodeError>>(&mut self, op: Result<Op, E>, asked: Asked) {
        match op.map_err(Into::into) {
            Ok(op) => {
                self.next += 1;
                self.group.add(op, self.next).expect("there is room for it");
                self.asked.insert(self.next, asked);
            }
            Err(error) => {
                assert!(is_over(error), "{error:?}");
                self.give_back(asked);
            }
        }
    }

    /// The buffer of something that came to nothing.
    fn give_back(&mut self, asked: Asked) {
        match asked {
            Asked::Put(_, buffer, _) | Asked::Get(_, buffer, _) => self.buffers.push(buffer),
            Asked::Close => self.closing -= 1,
            Asked::Session | Asked::Receive | Asked::Send => {}
        }
    }

    fn take(&mut self, asked: Asked, result: Completed) {
        match (asked, result) {
            (Asked::Session, result) => {
                self.begins = None;
                match result {
                    Ok(Outcome::Session(session)) => self.session = Some(session),
                    Err(OpError::Cancelled | OpError::Ended(_)) => self.has_ended = true,
                    other => panic!("{other:?}"),
                }
                if !self.has_ended {
                    self.add(self.node.start_receive(None), Asked::Receive);
                    self.open();
                }
            }
            (Asked::Receive, Ok(Outcome::Message(message))) => {
                self.add(self.node.start_receive(None), Asked::Receive);
                self.hear(&message);
            }
            (Asked::Receive, Ok(Outcome::Ended(session, _))) => {
                assert_eq!(Some(session), self.session);
                self.has_ended = true;
                // Nobody reaches them, but they have to be closed all the same.
                self.close();
            }
            (Asked::Put(place, buffer, told), result) => self.take_put(place, buffer, told, &result),
            (Asked::Get(place, buffer, whole), result) => self.take_get(place, buffer, whole, &result),
            (Asked::Close, Ok(Outcome::Done)) => {
                self.closing -= 1;
                if self.closing == 0 && !self.has_ended {
                    self.open();
                }
            }
            (Asked::Send, Ok(Outcome::Done) | Err(OpError::Ended(_))) => {}
            (_, other) => panic!("{other:?}"),
        }
    }

    /// Opens windows in what we lend, and tells of them.
    fn open(&mut self) {
        let (Some(lent), Some(session)) = (self.lent, self.session) else { return };
        let mut opened = Vec::new();
        for (memory, rights) in [(&lent.writable, Rights::BOTH), (&lent.readable, Rights::GET)] {
            match self.node.open_window(session, memory, MARGIN..MARGIN + WINDOW, rights) {
                Ok(window) => opened.push(window),
                Err(error) => assert!(is_over(error), "{error:?}"),
            }
        }
        let payload: Vec<u8> = opened.iter().flat_map(|window| window.descriptor().to_bytes()).collect();
        let header = header(WINDOWS, &[lent.seed]);
        self.windows.extend(opened);
        // One alone was opened when the session ended in between: whoever is told then hears nothing.
        self.add(self.node.send(session, &header, &payload), Asked::Send);
    }

    fn close(&mut self) {
        for window in std::mem::take(&mut self.windows) {
            self.closing += 1;
            self.add(window.close(), Asked::Close);
        }
    }

    fn hear(&mut self, message: &Message) {
        let word = |at: usize| u64::from_ne_bytes(message.header[1 + 8 * at..][..8].try_into().unwrap());
        if message.header[0] == WINDOWS {
            let descriptor =
                |at: usize| Descriptor::from_bytes(message.payload[32 * at..][..32].try_into().expect("two windows"));
            let (writable, readable, seed) = (descriptor(0), descriptor(1), word(0));
            let known = self.theirs.take().filter(|theirs| theirs.seed == seed);
            let bytes = known.map_or_else(|| bytes(seed), |theirs| theirs.bytes);
            self.theirs = Some(Theirs { writable, readable, seed, bytes });
            return;
        }
        let lent = self.lent.expect("nobody puts into what was not lent");
        let (at, len) = (word(0) as usize, word(1) as usize);
        let found = read(&lent.writable, MARGIN + at, len);
        assert_eq!(
            first_wrong(&found, &lent.bytes[at..at + len], true),
            None,
            "its bytes come before a message: {at} {len}"
        );
        self.heard += 1;
        if self.heard > SETTLED && self.random.below(16) == 0 {
            self.close();
        }
    }

    /// A put or a get of any length anywhere in what was lent to us.
    fn ask(&mut self) {
        let (Some(theirs), Some(session), false) = (&self.theirs, self.session, self.has_ended) else { return };
        let Some(buffer) = self.buffers.pop() else { return };
        let longest = WINDOW as u64 >> self.random.below(12);
        let len = 1 + self.random.below(longest) as usize;
        let at = self.random.below((WINDOW - len + 1) as u64) as usize;
        let place = at..at + len;
        let what = self.random.below(4);
        if what < 2 {
            let from = if what == 0 { theirs.readable } else { theirs.writable };
            return self.get((session, &from), (place, what == 0), buffer);
        }
        buffer.write(MARGIN, &theirs.bytes[place.clone()]).unwrap();
        let (segment, to, told) = ([buffer.segment(MARGIN..MARGIN + len)], &theirs.writable, what == 3);
        let put = if told {
            self.node.put_with_message(session, &segment, to, at as u64, &header(BYTES, &[at as u64, len as u64]))
        } else {
            self.node.put(session, &segment, to, at as u64)
        };
        self.add(put, Asked::Put(place, buffer, told));
    }

    fn get(&mut self, from: (Session, &Descriptor), (place, whole): (WindowRange, bool), buffer: Memory) {
        buffer.write(MARGIN, &vec![CANARY; place.len() + MARGIN]).unwrap();
        let segment = [buffer.segment(MARGIN..MARGIN + place.len())];
        let get = self.node.get(from.0, from.1, place.start as u64, &segment);
        self.add(get, Asked::Get(place, buffer, whole));
    }

    fn take_put(&mut self, place: WindowRange, buffer: Memory, told: bool, result: &Completed) {
        assert!(!buffer.is_in_use(), "a put that has ended: {place:?}");
        let well = went_well(result);
        self.done += u64::from(well);
        match (&self.theirs, self.session) {
            // What lies there now can be got, unless the window is closed.
            (Some(theirs), Some(session)) if well && !told => {
                let from = theirs.writable;
                self.get((session, &from), (place, true), buffer);
            }
            _ => self.buffers.push(buffer),
        }
    }

    fn take_get(&mut self, place: WindowRange, buffer: Memory, whole: bool, result: &Completed) {
        let well = went_well(result);
        assert_margins(&buffer, place.len(), "what was got");
        assert!(!buffer.is_in_use(), "a get that has ended: {place:?}");
        // Of one that failed nothing is said but where it may have written.
        if well {
            let theirs = self.theirs.as_ref().expect("it was got from there");
            let found = read(&buffer, MARGIN, place.len());
            assert_eq!(first_wrong(&found, &theirs.bytes[place.clone()], whole), None, "{place:?}");
        }
        self.done += u64::from(well);
        self.buffers.push(buffer);
    }
}

fn header(kind: u8, words: &[u64]) -> Vec<u8> {
    [kind].into_iter().chain(words.iter().flat_map(|word| word.to_ne_bytes())).collect()
}

/// Whether something could not be begun because the session has ended.
fn is_over(error: NodeError) -> bool {
    use NodeError::{Op, Submit};
    matches!(error, Submit(SubmitError::NoSession | SubmitError::Ended(_)) | Op(OpError::Ended(_)))
}

/// Whether it did, and not for the end of the session or of the window.
fn went_well(result: &Completed) -> bool {
    match result {
        Ok(Outcome::Done) => true,
        Err(OpError::Ended(_) | OpError::Refused(WindowError::Key)) => false,
        other => panic!("{other:?}"),
    }
}
