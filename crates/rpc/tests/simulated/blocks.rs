//! Puts and gets over a session into the window that its peer has opened. One program writes there: of each word it knows the
//! last write that has ended and the last that has begun.

use std::collections::BTreeSet;

use byway_fabric::node::{Completed, Descriptor, Memory, OpError, Outcome, Rights, Session, Window};

use super::ledger::Ledger;
use super::life::{BEHIND_PUT, Life, OFFERS_WINDOW, Pending};
use super::rules::{WORD, broken, pattern, rule, tag_of};

/// Words of a window.
const WORDS: usize = 4096;
/// Puts of a session that are under way at a time.
const PUTS_MAX: usize = 12;

/// A window that is open for a peer.
pub struct Mine {
    pub window: Window,
    pub memory: Memory,
}

/// A window that a peer has opened, and what was written there.
pub struct Theirs {
    descriptor: Descriptor,
    next_tag: u64,
    /// Of each word: the last put into it that has ended well, and the last that has begun.
    done: Vec<u64>,
    begun: Vec<u64>,
    /// Puts under way, by their tag, with their words.
    under_way: Vec<(u64, std::ops::Range<usize>)>,
    /// A put was refused: the window is closed, and the message of another is on its way.
    pub is_closed: bool,
}

/// A get under way.
pub struct Get {
    window: Descriptor,
    words: std::ops::Range<usize>,
    memory: Memory,
    /// What was done when it began.
    floor: Vec<u64>,
}

impl Theirs {
    pub fn new(descriptor: Descriptor) -> Self {
        let (done, begun) = (vec![0; WORDS], vec![0; WORDS]);
        Self { descriptor, next_tag: 1, done, begun, under_way: Vec::new(), is_closed: false }
    }
}

impl Life {
    /// Opens a window for a session's peer, and says so.
    pub fn offer_window(&mut self, ledger: &mut Ledger, session: Session) {
        let memory = self.window_memory(ledger, WORDS * WORD);
        let Ok(window) = self.node().open_window(session, &memory, 0..WORDS * WORD, Rights::BOTH) else { return };
        let descriptor = window.descriptor();
        if !self.send(session, OFFERS_WINDOW, &descriptor.to_bytes()) {
            return self.close_window(window, memory);
        }
        let Some(peer) = self.sessions.get_mut(&session) else { return self.close_window(window, memory) };
        if let Some(old) = peer.mine.replace(Mine { window, memory }) {
            self.close_window(old.window, old.memory);
        }
    }

    /// Zeroes for a window. Where there are peers to lend it to, it can be lent, and may be that of a window that was closed.
    pub fn window_memory(&mut self, ledger: &mut Ledger, len: usize) -> Memory {
        if !ledger.has_neighbours(self.index) {
            return self.node().register(len).expect("memory");
        }
        let last = self.closed.iter().rposition(|(memory, _)| memory.len() == len).filter(|_| ledger.one_in(2));
        if let Some(place) = last {
            let (memory, held) = self.closed.swap_remove(place);
            self.check_unchanged(&memory, &held);
            memory.write(0, &vec![0; len]).expect("its own range");
            return memory;
        }
        let is_private = ledger.one_in(4);
        let memory = if is_private { self.node().register(len) } else { self.node().register_shared(len) };
        memory.expect("memory")
    }

    /// Another window instead of one that may be in use.
    pub fn replace_window(&mut self, ledger: &mut Ledger) {
        if let Some((session, _)) = self.pick_session(ledger) {
            self.offer_window(ledger, session);
        }
    }

    pub fn put_blocks(&mut self, ledger: &mut Ledger, has_message: bool) {
        let Some((session, _)) = self.pick_session(ledger) else { return };
        let (first, words) = some_words(ledger);
        // With checksums bytes must not change while they are sent.
        let is_got =
            |(_, pending): &(_, Pending)| matches!(pending, Pending::GetBlocks { session: of, .. } if *of == session);
        if self.has_checksums && self.pending.values().any(is_got) {
            return;
        }
        let Some(theirs) = self.sessions.get_mut(&session).and_then(|peer| peer.theirs.as_mut()) else { return };
        if theirs.under_way.len() >= PUTS_MAX || theirs.is_closed {
            return;
        }
        let (tag, descriptor) = (theirs.next_tag, theirs.descriptor);
        let memory = self.node().register(words * WORD).expect("memory");
        memory.write(0, &pattern(tag, first, words)).expect("its own range");
        // In two pieces, which are cut anywhere.
        let cut = ledger.below(words * WORD);
        let segments = [memory.segment(0..cut), memory.segment(cut..words * WORD)];
        let offset = (first * WORD) as u64;
        let began = if has_message {
            let mut header = vec![BEHIND_PUT];
            for word in [tag, first as u64, words as u64, descriptor.put_key().0] {
                header.extend(word.to_le_bytes());
            }
            self.node().put_with_message(session, &segments, &descriptor, offset, &header)
        } else {
            self.node().put(session, &segments, &descriptor, offset)
        };
        let Ok(op) = began else { return };
        ledger.report.puts += 1;
        if let Some(theirs) = self.sessions.get_mut(&session).and_then(|peer| peer.theirs.as_mut()) {
            theirs.next_tag += 1;
            theirs.begun[first..first + words].fill(tag);
            theirs.under_way.push((tag, first..first + words));
        }
        self.add(op, Pending::PutBlocks { session, tag, memory });
    }

    /// The window that a session's peer has opened, unless it is another than that by now.
    fn theirs(&mut self, session: Session) -> Option<&mut Theirs> {
        self.sessions.get_mut(&session)?.theirs.as_mut()
    }

    pub fn put_ended(&mut self, ledger: &mut Ledger, session: Session, tag: u64, memory: &Memory, result: &Completed) {
        ledger.note(self.index, tag);
        rule!(!memory.is_in_use(), "a put of node {} has ended, and uses its memory", self.index);
        let index = self.index;
        let Some(theirs) = self.theirs(session) else { return };
        let Some(place) = theirs.under_way.iter().position(|(other, _)| *other == tag) else { return };
        let (_, words) = theirs.under_way.remove(place);
        match result {
            Ok(Outcome::Done) => theirs.done[words].iter_mut().for_each(|done| *done = tag.max(*done)),
            Err(OpError::Refused(_)) => theirs.is_closed = true,
            Err(OpError::Ended(_)) => {}
            other => broken(format!("a put of node {index} ended with {other:?}")),
        }
    }

    /// A message says that a put lies in the window that is open for its session.
    pub fn put_was_told(&mut self, session: Session, told: &[u8]) {
        let words: Vec<u64> = told.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let &[tag, first, count, window] = &words[..] else { broken("a message behind a put is cut".into()) };
        let Some(mine) = self.sessions.get(&session).and_then(|peer| peer.mine.as_ref()) else { return };
        if mine.window.descriptor().put_key().0 != window {
            return;
        }
        let mut bytes = vec![0; count as usize * WORD];
        mine.memory.read(first as usize * WORD, &mut bytes).expect("a range of the window");
        for (index, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
            let by = tag_of(word, first as usize + index);
            let lies = by.is_some_and(|by| by >= tag);
            rule!(lies, "node {} is told of put {tag}, and word {index} of it is from {by:?}", self.index);
        }
    }

    pub fn get_blocks(&mut self, ledger: &mut Ledger) {
        let Some((session, _)) = self.pick_session(ledger) else { return };
        let (first, words) = some_words(ledger);
        let has_checksums = self.has_checksums;
        let Some(theirs) = self.theirs(session) else { return };
        // As for puts.
        if theirs.is_closed || (has_checksums && !theirs.under_way.is_empty()) {
            return;
        }
        let (descriptor, floor) = (theirs.descriptor, theirs.done[first..first + words].to_vec());
        let memory = self.node().register(words * WORD).expect("memory");
        let cut = ledger.below(words * WORD);
        let segments = [memory.segment(0..cut), memory.segment(cut..words * WORD)];
        let Ok(op) = self.node().get(session, &descriptor, (first * WORD) as u64, &segments) else { return };
        ledger.report.gets += 1;
        let get = Get { window: descriptor, words: first..first + words, memory, floor };
        self.add(op, Pending::GetBlocks { session, get });
    }

    pub fn get_ended(&mut self, ledger: &mut Ledger, session: Session, get: &Get, result: &Completed) {
        ledger.note(self.index, 5);
        rule!(!get.memory.is_in_use(), "a get of node {} has ended, and uses its memory", self.index);
        let index = self.index;
        let Some(theirs) = self.theirs(session).filter(|theirs| theirs.descriptor == get.window) else { return };
        match result {
            Ok(Outcome::Done) => {}
            Err(OpError::Refused(_)) => return theirs.is_closed = true,
            Err(OpError::Ended(_)) => return,
            other => broken(format!("a get of node {index} ended with {other:?}")),
        }
        let mut bytes = vec![0; get.memory.len()];
        get.memory.read(0, &mut bytes).expect("its own range");
        for (place, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
            let (at, floor) = (get.words.start + place, get.floor[place]);
            let by = tag_of(word, at);
            // A word that a put is being received into may be half of it.
            let is_right = by.map_or(floor < theirs.begun[at], |by| (floor..=theirs.begun[at]).contains(&by));
            rule!(is_right, "node {index} got word {at} of put {by:?}, not {floor} to {}", theirs.begun[at]);
        }
    }

    pub fn flush_puts(&mut self, ledger: &mut Ledger) {
        let Some((session, _)) = self.pick_session(ledger) else { return };
        let Ok(op) = self.node().flush(session) else { return };
        let puts = self.pending.iter().filter(|(_, (_, pending))| is_put_of(pending, session));
        let before: BTreeSet<u64> = puts.map(|(key, _)| *key).collect();
        self.add(op, Pending::Flush { session, before });
    }

    pub fn flushed(&mut self, session: Session, before: &BTreeSet<u64>, result: &Completed) {
        if *result == Ok(Outcome::Done) {
            let left = before.iter().filter(|key| self.pending.contains_key(key)).count();
            rule!(left == 0, "{left} puts of node {} are under way behind the flush of {session:?}", self.index);
        }
    }

    /// Once all puts have ended: what lies in `owner`'s window for `session`, the last put into each word has left there.
    pub fn check_blocks(&self, session: Session, owner: &Self) {
        let Some(theirs) = self.sessions.get(&session).and_then(|peer| peer.theirs.as_ref()) else { return };
        let of_it = |mine: &&Mine| mine.window.descriptor() == theirs.descriptor;
        let Some(mine) = owner.sessions.values().filter_map(|peer| peer.mine.as_ref()).find(of_it) else { return };
        if theirs.is_closed {
            return;
        }
        let mut bytes = vec![0; WORDS * WORD];
        mine.memory.read(0, &mut bytes).expect("the whole window");
        for (index, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
            let (by, last) = (tag_of(word, index), theirs.begun[index]);
            rule!(by == Some(last), "word {index} of node {}'s window is of put {by:?}, not {last}", owner.index);
        }
    }
}

/// Where a put or get begins, and of how many words it is.
fn some_words(ledger: &mut Ledger) -> (usize, usize) {
    let max = if ledger.one_in(8) { WORDS } else { 64 };
    let words = 1 + ledger.below(max);
    (ledger.below(WORDS - words + 1), words)
}

fn is_put_of(pending: &Pending, session: Session) -> bool {
    matches!(pending, Pending::PutBlocks { session: of, .. } if *of == session)
}
