//! Peers of a node that are killed at random moments, many times, while they put into and get from memory that they were lent,
//! or lend their own (docs/decisions/0022). Whoever survives has every operation end once, finds right whatever was said to be
//! done and nothing else touched, has let go of all that the dead one brought, and lends the same memory to the next one.
//!
//! 20 kills in each test; `BYWAY_LONG=1` for 1,000. Moments are not repeatable; `BYWAY_KILL_SEED` repeats what is asked and
//! when the kill is meant to be.

mod bytes;
mod peer;
mod process;
mod resources;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_fabric::node::{Address, Deadline, Descriptor, Node, NodeError, NodeOptions, Op, OpError};
use byway_reactor::IoChoice;
use byway_skip::SkipReason;

use bytes::{CANARY, MARGIN, Random, WINDOW, read};
use peer::{Lent, Peer};
use process::Process;
use resources::{HeldResources, is_lent_to};

/// How long nothing takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often something that may have come is looked at.
const TICK: Duration = Duration::from_millis(2);

/// What the process that is killed does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It lends memory, and is lent none.
    Lender,
    /// It is lent memory, and lends none.
    Borrower,
    /// Both; and it is the one that listens.
    Both,
}

impl Role {
    fn lends(self) -> bool {
        self != Self::Borrower
    }

    fn borrows(self) -> bool {
        self != Self::Lender
    }
}

/// Kills in each test.
fn kills() -> u64 {
    if std::env::var_os("BYWAY_LONG").is_some() { 1000 } else { 20 }
}

/// Descriptors of this process are counted: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn random() -> Random {
    let given = std::env::var("BYWAY_KILL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("BYWAY_KILL_SEED={seed}");
    Random(seed)
}

/// A node, unless the kernel refuses the backend.
fn node(io: IoChoice) -> Option<Node> {
    let opened = Node::open(&NodeOptions { io, frame_bytes: 8 << 20, ..NodeOptions::default() });
    opened.inspect_err(|error| byway_skip::skip_this(SkipReason::Machine(&format!("no {io:?} here: {error}")))).ok()
}

fn soon() -> Deadline {
    Deadline::after(TICK)
}

/// Turns a node until it holds what it held at first; gives what it holds.
fn held_at_rest(node: &Node, at_first: &HeldResources, deadline: Instant) -> HeldResources {
    loop {
        let held = HeldResources::by(node);
        if held == *at_first || Instant::now() >= deadline {
            return held;
        }
        assert!(node.receive(soon()).is_err(), "nobody is there to send anything");
    }
}

/// When a victim dies: so long after it was started, which may be before it has done anything, or after it has begun.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Started(Duration),
    Busy(Duration),
}

impl Moment {
    fn any(random: &mut Random) -> Self {
        let after = Duration::from_micros(random.below(12_000));
        if random.below(3) == 0 { Self::Started(after) } else { Self::Busy(after) }
    }
}

/// Who survives, and what it lends to one victim after the other.
struct Survivor<'a> {
    node: &'a Node,
    lent: &'a Lent,
    role: Role,
    random: Random,
    /// Puts of victims that were heard of, and puts and gets of our own.
    did: (u64, u64),
}

impl Survivor<'_> {
    /// How a session with the victim begins.
    fn begin(&self, path: &Path) -> Op {
        let begun = match self.role {
            Role::Both => self.node.start_connect(&Address::Shared(path.to_owned())),
            Role::Lender | Role::Borrower => self.node.start_accept(),
        };
        begun.unwrap()
    }

    /// Whether the victim does what its role is, which it cannot but by what it was lent, or lends.
    fn is_busy(&self, peer: &Peer<'_>, victim: u32, at_first: &HeldResources) -> bool {
        if (self.role.borrows() && peer.heard == 0) || (self.role.lends() && peer.done == 0) {
            return false;
        }
        // Puts go through the stream until the memory has been taken: not busy yet.
        let is_taken = |memory, write| is_lent_to(victim, memory, write);
        if self.role.borrows() && !(is_taken(&self.lent.writable, true) && is_taken(&self.lent.readable, false)) {
            return false;
        }
        if self.role.lends() {
            assert!(HeldResources::by(self.node).lent_files > at_first.lent_files, "we have the victim's memory");
        }
        true
    }

    /// One victim from its start to its death; whether it was busy then.
    fn round(&mut self, io: IoChoice, path: &Path, at_first: &HeldResources) -> bool {
        let (moment, deadline) = (Moment::any(&mut self.random), Instant::now() + PATIENCE);
        let mut victim = Some(Process::start(self.role, io, self.random.below(u64::MAX), path));
        let id = victim.as_ref().map_or(0, Process::id);
        let mut killer = None;
        if let Moment::Started(after) = moment {
            killer = victim.take().map(|victim| victim.kill_after(after));
        }
        let seed = self.random.below(u64::MAX);
        let lent = self.role.borrows().then_some(self.lent);
        let mut peer = Peer::new(self.node, lent, self.begin(path), seed);
        let mut was_busy = false;
        while !(killer.as_ref().is_some_and(JoinHandle::is_finished) && self.is_over(&peer)) {
            assert!(Instant::now() < deadline, "{moment:?}: the death of the victim is not noticed");
            peer.step(soon());
            // One that does not listen yet.
            let is_dead = killer.as_ref().is_some_and(JoinHandle::is_finished);
            if peer.has_ended && peer.session().is_none() && !is_dead {
                peer = Peer::new(self.node, lent, self.begin(path), seed);
            }
            let Moment::Busy(after) = moment else { continue };
            if victim.is_some() && self.is_busy(&peer, id, at_first) {
                was_busy = true;
                killer = victim.take().map(|victim| victim.kill_after(after));
            }
        }
        killer.expect("it was killed").join().expect("by us");
        peer.give_up();
        while !peer.is_at_rest() {
            assert!(Instant::now() < deadline, "{moment:?}: not all that was asked for has ended");
            peer.step(soon());
        }
        self.lent.assert_is_whole();
        self.did.0 += peer.heard;
        self.did.1 += peer.done;
        drop(peer);
        assert_eq!(held_at_rest(self.node, at_first, deadline), *at_first, "{moment:?}");
        for memory in [&self.lent.writable, &self.lent.readable] {
            assert!(!memory.is_in_use());
        }
        self.lent.clear();
        was_busy
    }

    /// Nothing comes of a victim that is dead any more.
    fn is_over(&self, peer: &Peer<'_>) -> bool {
        peer.has_ended || (peer.session().is_none() && self.node.counters().unwrap().sessions == 0)
    }
}

fn a_node_survives(role: Role, io: IoChoice) {
    let _alone = alone();
    let Some(node) = node(io) else { return };
    let mut random = random();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    if role != Role::Both {
        node.listen(&Address::Shared(path.clone())).unwrap();
    }
    let lent = Lent::new(&node, random.below(u64::MAX));
    let at_first = HeldResources::by(&node);
    assert_eq!(at_first.counters(), (0, 0, 0, 0), "{at_first:?}");
    let mut survivor = Survivor { node: &node, lent: &lent, role, random, did: (0, 0) };
    let mut busy = 0;
    for number in 0..kills() {
        let path = if role == Role::Both { folder.path().join(format!("victim-{number}")) } else { path.clone() };
        busy += u64::from(survivor.round(io, &path, &at_first));
    }
    eprintln!(
        "{busy} of {} were busy; they did {} puts with a message, and we {} puts and gets",
        kills(),
        survivor.did.0,
        survivor.did.1
    );
    assert!(busy > kills() / 4, "{busy} of the killed were busy: the test kills too early");
}

#[test]
fn a_borrower_is_killed_over_epoll() {
    a_node_survives(Role::Borrower, IoChoice::Epoll);
}

#[test]
fn a_borrower_is_killed_over_uring() {
    a_node_survives(Role::Borrower, IoChoice::Uring);
}

#[test]
fn a_lender_is_killed_over_epoll() {
    a_node_survives(Role::Lender, IoChoice::Epoll);
}

#[test]
fn a_lender_is_killed_over_uring() {
    a_node_survives(Role::Lender, IoChoice::Uring);
}

#[test]
fn one_that_lends_and_borrows_is_killed_over_epoll() {
    a_node_survives(Role::Both, IoChoice::Epoll);
}

#[test]
fn one_that_lends_and_borrows_is_killed_over_uring() {
    a_node_survives(Role::Both, IoChoice::Uring);
}

/// A descriptor of a window for gets that nobody has opened.
fn guessed() -> Descriptor {
    let mut bytes = [0; 32];
    bytes[8..16].fill(0x5a);
    bytes[16..24].copy_from_slice(&4096u64.to_le_bytes());
    Descriptor::from_bytes(&bytes)
}

/// Says that something is over when dropped, also by a failure.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Writes beside a window and reads it again, and looks into the window, until told to end.
fn use_margin(lent: &Lent, is_over: &AtomicBool) {
    let mut round = 0u64;
    while !is_over.load(Ordering::Acquire) {
        round += 1;
        for at in [0, MARGIN + WINDOW] {
            lent.writable.write(at, &round.to_ne_bytes()).unwrap();
            assert_eq!(read(&lent.writable, at, 8), round.to_ne_bytes(), "what this process wrote is there");
        }
        let _ = read(&lent.writable, MARGIN + WINDOW / 2, 64);
    }
    for at in [0, MARGIN + WINDOW] {
        lent.writable.write(at, &[CANARY; 8]).unwrap();
    }
}

/// The victim is stopped in the middle of whatever it does, given up, and goes on with it until it is killed.
fn what_is_taken_back_is_out_of_reach(io: IoChoice) {
    let _alone = alone();
    let Some(node) = node(io) else { return };
    let mut random = random();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    node.listen(&Address::Shared(path.clone())).unwrap();
    let at_first = HeldResources::by(&node);
    let mut taken_back = 0;
    for number in 0..kills() {
        let deadline = Instant::now() + PATIENCE;
        let lent = Lent::new(&node, random.below(u64::MAX));
        let victim = Process::start(Role::Borrower, io, random.below(u64::MAX), &path);
        let mut peer = Peer::new(&node, Some(&lent), node.start_accept().unwrap(), random.below(u64::MAX));
        let last = 1 + random.below(40);
        while peer.heard < last {
            assert!(Instant::now() < deadline && !peer.has_ended, "the victim lives and works");
            peer.step(soon());
        }
        let (session, is_lent) = (peer.session().expect("it brought messages"), peer.has_windows());
        assert!(!victim.has_ended_within(Duration::from_micros(random.below(300))));
        victim.stop();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| use_margin(&lent, &is_over));
            let _over = SetWhenDropped(&is_over);
            // What is asked of one that is stopped takes longer than we wait.
            let asked = node.get_into(session, &guessed(), 0, &mut [0; 8], Deadline::after(TICK));
            assert_eq!(asked, Err(NodeError::Op(OpError::Deadline)), "kill {number}");
            while !(peer.has_ended && peer.is_at_rest()) {
                assert!(Instant::now() < deadline, "it is given up");
                peer.step(soon());
            }
        });
        drop(peer);
        assert!(!lent.writable.is_in_use());
        // A window that was being closed may have been left by the victim before.
        assert!(!(is_lent && lent.writable.is_exposed()), "kill {number}: it was not taken back");
        taken_back += u64::from(is_lent);
        lent.assert_is_whole();
        lent.clear();
        victim.go_on();
        // One that is left alone notices that its session has ended, and finds nothing wrong.
        let is_left_alone = random.below(2) == 0;
        let time = if is_left_alone { PATIENCE } else { Duration::from_micros(random.below(4000)) };
        assert!(victim.has_ended_within(time) || !is_left_alone, "it does not notice");
        assert_eq!(first_other(&lent), None, "written by one that has it no more");
        victim.kill_or_join();
        assert_eq!(first_other(&lent), None, "written by one that has it no more");
        lent.assert_is_whole();
        drop(lent);
        assert_eq!(held_at_rest(&node, &at_first, deadline), at_first, "kill {number}");
    }
    assert!(taken_back > kills() / 4, "in {taken_back} rounds there was something to be taken back");
}

/// Where in the window for puts something lies.
fn first_other(lent: &Lent) -> Option<usize> {
    read(&lent.writable, MARGIN, WINDOW).iter().position(|byte| *byte != CANARY)
}

#[test]
fn what_is_taken_back_is_out_of_reach_over_epoll() {
    what_is_taken_back_is_out_of_reach(IoChoice::Epoll);
}

#[test]
fn what_is_taken_back_is_out_of_reach_over_uring() {
    what_is_taken_back_is_out_of_reach(IoChoice::Uring);
}

/// What a process does that another of these tests has started; nothing otherwise.
#[test]
fn started_process() {
    let Some(asked) = process::asked_for() else { return };
    let node = node(asked.io).expect("who started this has one");
    let lent = asked.role.lends().then(|| Lent::new(&node, asked.seed));
    let address = Address::Shared(asked.path);
    let begun = if asked.role == Role::Both {
        node.listen(&address).unwrap();
        node.start_accept()
    } else {
        node.start_connect(&address)
    };
    let mut peer = Peer::new(&node, lent.as_ref(), begun.unwrap(), asked.seed);
    while !(peer.has_ended && peer.is_at_rest()) {
        peer.step(Deadline::after(PATIENCE));
    }
}
