//! Four nodes in a simulated world, whose programs call each other, hand calls on, and put into and get from each other's
//! windows. In half of the seeds nodes of one host have sessions over shared memory, and lend each other that of windows.
//!
//! Faults: partitions, resets and stalls of the network, crashes of a node, and programs that close a session. Rules, all checked
//! in every run:
//!
//! - a call comes to the node that it was sent to and to each that it was delegated to, once each, and is answered by the last;
//! - it ends once for its caller: with that answer, by its deadline, cancelled, or with a session that has ended;
//! - messages of a session come once and in order; those behind a put come when its bytes lie there;
//! - a get brings, of each word, the last put that had ended when it began, or a later one; puts into one window end up in their
//!   order; nothing is written into a window that is closed; an operation that has ended does not use its memory;
//! - a window that is open is not refused; a flush ends behind all puts before it;
//! - no session ends because one end found the other's messages wrong;
//! - once the faults have stopped everything ends within half a minute, all credit is back, deadlines and cancels are told; when
//!   all sessions are closed no window, operation, call or frame is left.

#![allow(dead_code, reason = "each test uses a part of it")]

mod blocks;
mod calls;
mod finish;
mod ledger;
mod life;
mod rules;

use std::time::Duration;

use byway_reactor::sim::{Crash, FaultPlan, LinkProfile, World};
use byway_skip::seeds::{Chance, catch_broken};

use self::ledger::Ledger;
pub use self::ledger::Report;
use self::life::{KEEP_ALIVE, Life, ip};
pub use self::rules::Broken;
use self::rules::rule;

const NODES: usize = 4;
const ROUNDS: usize = 60;
const CRASHES_MAX: u64 = 2;
/// Rounds in which two programs of one host do not hear of each other, some of them after each has given the other up.
const SILENT_ROUNDS: usize = 12;
/// The longest that a stall lasts.
const STALL_MAX: Duration = Duration::from_millis(100);
/// A call that is late by more is one that nobody looks after: nodes are turned whenever there is something to do.
const LATE_MAX: Duration = Duration::from_millis(1);
/// What every seed does at least.
pub const CALLS_MIN: u64 = 30;

/// One life of a whole world.
///
/// # Errors
/// The first rule that was broken.
///
/// # Panics
/// As the code under test does.
pub fn run(seed: u64) -> Result<Report, Broken> {
    catch_broken(|| Simulation::new(seed).run())
}

/// The host of each node: in half of the seeds of its own, else one of two.
fn hosts(seed: u64) -> [usize; NODES] {
    let mut chance = Chance::new(seed);
    let shares = matches!(seed % 4, 0 | 3);
    std::array::from_fn(|node| if shares { chance.below(2) } else { node })
}

struct Simulation {
    // Before the world, whose loops they have.
    nodes: Vec<Option<Life>>,
    /// To which nodes each connects.
    wanted: Vec<Vec<usize>>,
    ledger: Ledger,
    world: World,
    seed: u64,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let world = World::new(seed);
        let mut ledger = Ledger::new(seed, seed % 8 == 7, hosts(seed));
        let mut wanted = vec![Vec::new(); NODES];
        for node in 0..NODES {
            for other in 0..node {
                // Some pairs have no session: their answers are passed on. Others have two.
                match ledger.below(6) {
                    0 if node > other + 1 => {}
                    1 => wanted[other].push(node),
                    2 => {
                        wanted[node].push(other);
                        wanted[other].push(node);
                    }
                    _ => wanted[node].push(other),
                }
                if ledger.one_in(4) {
                    let slow = LinkProfile { bandwidth: 20_000_000, buffer_bytes: 10_000, ..LinkProfile::default() };
                    world.link(ip(node), ip(other), slow);
                }
            }
        }
        let mut run = Self { nodes: (0..NODES).map(|_| None).collect(), wanted, ledger, world, seed };
        (0..NODES).for_each(|node| run.start(node));
        run
    }

    fn start(&mut self, node: usize) {
        self.ledger.now = self.world.now();
        let life = Life::new(&self.world, &mut self.ledger, node, self.wanted[node].clone(), self.seed);
        self.nodes[node] = Some(life);
    }

    /// Moves the clock, with all nodes turned whenever they have something to do.
    fn pass(&mut self, time: Duration) {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        world.run_until(until, || self.turn());
        self.ledger.now = world.now();
    }

    fn turn(&mut self) {
        self.ledger.now = self.world.now();
        loop {
            let mut is_quiet = true;
            for (node, life) in self.nodes.iter_mut().enumerate() {
                if let Some(life) = life.as_mut().filter(|_| self.world.has_ready(ip(node))) {
                    life.turn(&self.world, &mut self.ledger);
                    is_quiet = false;
                }
            }
            if is_quiet {
                return;
            }
        }
    }

    fn run(&mut self) -> Report {
        self.world.faults(self.plan());
        for _ in 0..ROUNDS {
            let pause = Duration::from_micros(self.ledger.below(20_000) as u64);
            self.pass(pause);
            self.act();
            self.check_deadlines();
            if !self.ledger.is_calm && self.ledger.one_in(12) {
                self.strike();
            }
        }
        self.finish()
    }

    fn plan(&self) -> FaultPlan {
        if self.ledger.is_calm {
            return FaultPlan::default();
        }
        // In some runs no reset tells a node of the death of another.
        let often = |rate| if self.seed % 7 == 3 { 0.0 } else { rate };
        FaultPlan {
            partitions_per_second: 3.0,
            partition_max: Duration::from_millis(1500),
            resets_per_second: often(6.0),
            delays_per_second: 6.0,
            delay_max: STALL_MAX,
            ..FaultPlan::default()
        }
    }

    /// Each program does something.
    fn act(&mut self) {
        let (is_calm, ledger) = (self.ledger.is_calm, &mut self.ledger);
        for life in self.nodes.iter_mut().flatten() {
            life.reconnect(ledger);
            if ledger.one_in(2) {
                life.receive();
            }
            for _ in 0..ledger.below(5) {
                match ledger.below(100) {
                    0..34 => life.begin_call(ledger),
                    34..64 => life.serve(ledger),
                    64..70 => life.cancel_call(ledger),
                    70..78 => life.say_something(ledger),
                    78..86 => life.put_blocks(ledger, false),
                    86..89 => life.put_blocks(ledger, true),
                    89..94 => life.get_blocks(ledger),
                    94..97 => life.flush_puts(ledger),
                    97..99 => life.replace_window(ledger),
                    _ if is_calm => {}
                    _ => life.close_session(ledger),
                }
            }
            life.turn(&self.world, ledger);
        }
    }

    /// A node dies and another starts in its place, or two are cut off from each other.
    fn strike(&mut self) {
        let node = self.ledger.below(NODES);
        if self.ledger.one_in(3) {
            let other = (node + 1 + self.ledger.below(NODES - 1)) % NODES;
            self.world.partition(ip(node), ip(other));
            let pause = Duration::from_micros(self.ledger.below(900_000) as u64);
            self.pass(pause);
            if self.ledger.are_on_one_host(node, other) {
                self.go_on_while_silent();
            }
            self.world.heal(ip(node), ip(other));
        } else if self.ledger.report.crashes < CRASHES_MAX {
            self.ledger.report.crashes += 1;
            let is_power = self.ledger.one_in(2) && !self.ledger.has_neighbours(node);
            let how = if is_power { Crash::Power } else { Crash::Process };
            if let Some(life) = self.nodes[node].take() {
                self.world.crash(ip(node), how);
                self.count_calls(&life);
                drop(life);
                self.ledger.died(node);
            }
            let pause = Duration::from_micros(self.ledger.below(100_000) as u64);
            self.pass(pause);
            self.start(node);
        }
    }

    /// The programs go on while two of one host do not hear of each other. Nothing breaks their stream, and each gives the other up
    /// while that one still reaches the memory that it was lent.
    fn go_on_while_silent(&mut self) {
        for _ in 0..SILENT_ROUNDS {
            self.act();
            self.pass(KEEP_ALIVE / 4);
        }
    }

    /// Adds what a life's call protocol has counted.
    fn count_calls(&mut self, life: &Life) {
        let counted = life.rpc.counters().expect("not in a child").protocol;
        self.ledger.report.relayed += counted.relayed;
        self.ledger.report.late += counted.late;
        rule!(counted.forged == 0, "node {} takes {} answers for forged", life.index, counted.forged);
    }

    fn check_deadlines(&self) {
        let now = self.world.now();
        for (number, call) in &self.ledger.calls {
            let is_late = !call.is_over && call.deadline < now && now.since(call.deadline) > LATE_MAX;
            rule!(!is_late, "call {number} of node {} goes on after its deadline", call.caller);
        }
    }
}
