//! Nodes that the server is told to forget although the kernel still knows them, so that a tree has no limit of files.
//!
//! The server holds a descriptor for each node of a session, and has a bound on them. A node that is not open and was not used for
//! a while is released: when it is used again, it is looked up by its name, as after a restart of the server.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use byway_reactor::{Errno, Instant};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::super::wire::{Forgotten, Method};
use super::caches::now;
use super::connection::{Failure, Live};
use super::table::{ROOT, Remote, Table};
use super::{Ask, Client, NONE};
use crate::limits::{BUSY_PAUSE_MIN, FILE_FREED_AFTER, FILE_NODES_HELD_MAX, FILE_NODES_MAX, FILE_NODES_RELEASED_MAX};

/// How often a call is made again at least for which the server had no room, if nodes are released in between.
const CALLS_AGAIN: usize = 16;

/// After so long, it is made no more often.
const CALLS_AGAIN_TIME: Duration = Duration::from_secs(1);

/// Releases of nodes of a client: one at a time.
#[derive(Debug, Default)]
pub(super) struct Releases {
    turn: Mutex<()>,
    /// How often the server was told of some.
    done: AtomicU64,
    /// When it was last told, in nanoseconds of [`now`].
    told: AtomicU64,
}

/// The nodes that the server of an epoch holds, without the root.
#[derive(Debug)]
pub(super) struct HeldNodes {
    pub(super) epoch: u64,
    /// In the order in which they are looked at for release; some may be gone.
    queue: VecDeque<u64>,
    count: usize,
    /// More than so many: some are to be released.
    max: usize,
}

impl Default for HeldNodes {
    fn default() -> Self {
        Self { epoch: 0, queue: VecDeque::new(), count: 0, max: FILE_NODES_HELD_MAX }
    }
}

impl HeldNodes {
    /// The server holds nothing yet of an epoch.
    pub(super) fn begin(&mut self, epoch: u64) {
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
    }

    /// A node has another name at the server.
    pub(super) fn renamed(&mut self, number: u64, before: Remote, now: Remote) {
        let [was_held, is_held] = [before, now].map(|remote| remote.epoch == self.epoch && number != ROOT);
        if is_held && !was_held {
            self.count += 1;
            self.queue.push_back(number);
        } else if was_held && !is_held {
            self.count -= 1;
        }
    }
}

impl Table {
    /// Whether the server holds so many nodes that some are to be released.
    pub(super) fn is_full(&self) -> bool {
        self.held.count > self.held.max
    }

    /// Releases some nodes that were not used for a while: files, or directories if there are no files. Gives what the server is told,
    /// as [`Table::forget`]. `is_leased` says of a node whether the server has something to recall: it stays.
    pub(super) fn release(&mut self, is_leased: impl Fn(u64) -> bool) -> Vec<(Remote, u64)> {
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        for _ in 0..self.held.queue.len() {
            if files.len() == FILE_NODES_RELEASED_MAX {
                break;
            }
            let Some(number) = self.held.queue.pop_front() else { break };
            let epoch = self.held.epoch;
            let Some(node) = self.nodes.get_mut(&number).filter(|node| node.remote.epoch == epoch) else { continue };
            let stays = std::mem::take(&mut node.is_used) || node.opens > 0 || node.is_removed || is_leased(number);
            if stays || node.is_directory && directories.len() == FILE_NODES_RELEASED_MAX {
                self.held.queue.push_back(number);
            } else if node.is_directory {
                directories.push(number);
            } else {
                files.push(number);
            }
        }
        let (released, stay) = if files.is_empty() { (directories, Vec::new()) } else { (files, directories) };
        self.held.queue.extend(stay);
        self.held.count -= released.len();
        // What is in use now is not looked at again for each further node.
        self.held.max = FILE_NODES_HELD_MAX.max(self.held.count + FILE_NODES_RELEASED_MAX / 2);
        let take = |number: u64| {
            let node = self.nodes.get_mut(&number)?;
            Some((std::mem::take(&mut node.remote), std::mem::take(&mut node.answers)))
        };
        released.into_iter().filter_map(take).collect()
    }

    /// A node was forgotten: its number leaves the queue later, and not too late.
    pub(super) fn tidy_held(&mut self) {
        if self.held.queue.len() > 2 * self.held.count + FILE_NODES_RELEASED_MAX {
            let (nodes, epoch) = (&self.nodes, self.held.epoch);
            self.held.queue.retain(|number| nodes.get(number).is_some_and(|node| node.remote.epoch == epoch));
        }
    }
}

impl Client {
    /// Nodes that were not used for a while. The server is to be told.
    fn released(&self) -> Vec<(u64, Forgotten)> {
        let release = || {
            let mut state = self.caches.state();
            let released = self.table().release(|node| state.leases.has_lease(node));
            for (remote, _) in &released {
                // Of a lease that it had before. An answer that names the node again comes later.
                state.names.remove(&remote.name);
            }
            released
        };
        let mut released = release();
        if released.is_empty() {
            // At the first time all that was used since the last time is passed over.
            released = release();
        }
        let told = |(remote, answers): (Remote, u64)| {
            (remote.epoch, Forgotten { node: U64::new(remote.name), count: U64::new(answers) })
        };
        released.into_iter().map(told).collect()
    }

    /// Has the server forget nodes that were not used for a while. False if there are none.
    pub(super) fn release_nodes(&self) -> bool {
        // Another thread that has released all that can be is waited for until the server has heard of it.
        let _turn = self.releases.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let released = self.released();
        self.tell_forgotten(&released);
        if !released.is_empty() {
            self.releases.told.store(now().nanos(), Ordering::Relaxed);
            self.releases.done.fetch_add(1, Ordering::AcqRel);
        }
        !released.is_empty()
    }

    /// The same by a call of this session alone, for calls that are made while a session begins.
    pub(super) fn release_nodes_in(&self, live: Live) -> Result<bool, Failure> {
        let released = self.released();
        let of_session = released.iter().filter(|(epoch, _)| *epoch == live.epoch);
        let data: Vec<u8> = of_session.flat_map(|(_, one)| one.as_bytes()).copied().collect();
        if data.is_empty() {
            return Ok(false);
        }
        self.connection.call_on(live.session, Method::Forget, &NONE, &data, None).map(|_| true)
    }

    /// The server did not forget nodes. If it had no room, they are named again with the next ones: it holds no more than that.
    pub(super) fn name_again(&self, error: Errno, all: &[(u64, Forgotten)]) {
        let mut forgotten = self.forgotten.lock().unwrap_or_else(PoisonError::into_inner);
        if error == Errno::AGAIN && forgotten.len() + all.len() <= FILE_NODES_MAX {
            forgotten.extend_from_slice(all);
        }
    }

    /// Makes a call; again while the server has no room and nodes are released, and when a node of it was released meanwhile. Other threads
    /// may take the room that this one has made, and the server closes what was released a moment after it has answered.
    pub(super) fn with_room<T>(&self, ask: &Ask<'_>, mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
        let releases = || self.releases.done.load(Ordering::Acquire);
        let (mut tries, mut until) = (0, None);
        loop {
            let before = releases();
            let answered = call();
            // Nothing was done.
            let is_again = match answered {
                Err(Errno::NFILE) => self.release_nodes() || releases() != before || self.waits_for_released(),
                Err(Errno::STALE) => self.was_released(ask),
                _ => false,
            };
            if !is_again || tries > CALLS_AGAIN && now() > *until.get_or_insert_with(|| now() + CALLS_AGAIN_TIME) {
                return answered;
            }
            tries += 1;
        }
    }

    /// Waits a little if the server may be closing what was released.
    fn waits_for_released(&self) -> bool {
        let told = Instant::from_nanos(self.releases.told.load(Ordering::Relaxed));
        let is_late = now() < told + FILE_FREED_AFTER;
        if is_late {
            std::thread::park_timeout(BUSY_PAUSE_MIN);
        }
        is_late
    }

    /// Whether another thread had the server forget a node of a call that was on its way.
    fn was_released(&self, ask: &Ask<'_>) -> bool {
        let table = self.table();
        [ask.node, ask.second_node].into_iter().flatten().any(|node| table.held_as(node).is_none())
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;
    use zerocopy::little_endian::{U32, U64};

    use super::super::super::wire::Attributes;
    use super::super::files::NamedIn;
    use super::super::table::Opened;
    use super::*;

    const FILE: u32 = 0o100_644;
    const DIRECTORY: u32 = 0o40_755;

    fn known(ino: u64, mode: u32) -> Attributes {
        Attributes { ino: U64::new(ino), mode: U32::new(mode), ..Attributes::new_zeroed() }
    }

    /// A table of a server's first epoch, with nodes of these modes. The server's names are 1,000 and more.
    fn table(modes: &[u32]) -> (Table, Vec<u64>) {
        let mut table = Table::default();
        assert!(table.attach(Remote { epoch: 1, name: 999 }, &known(1, DIRECTORY)));
        let nodes = modes.iter().zip(1000..).map(|(mode, name)| {
            let remote = Remote { epoch: 1, name };
            table.hold(NamedIn::new(ROOT, name.to_string().as_bytes()), remote, &known(name, *mode))
        });
        let nodes = nodes.collect();
        (table, nodes)
    }

    fn names(released: Vec<(Remote, u64)>) -> Vec<u64> {
        released.into_iter().map(|(remote, _)| remote.name).collect()
    }

    #[test]
    fn a_node_that_is_used_or_open_or_leased_stays() {
        let (mut table, nodes) = table(&[FILE; 6]);
        let handle = table.open(Opened { node: nodes[0], flags: 0, directory: false }, Remote { epoch: 1, name: 5 });
        table.removed(NamedIn::new(ROOT, b"1001"));
        assert!(table.release(|_| false).is_empty(), "all have just been found");
        table.remote(nodes[2]);
        assert_eq!(names(table.release(|node| node == nodes[3])), [1004, 1005]);
        assert_eq!(table.remote(nodes[4]), Some(Remote::default()), "to be looked up by its name");
        assert_eq!(table.place(nodes[4]), Some((ROOT, b"1004".to_vec())));
        table.close(handle);
        assert_eq!(names(table.release(|_| false)), [1000, 1002, 1003]);
        assert!(table.release(|_| false).is_empty());
    }

    #[test]
    fn directories_are_released_where_there_are_no_files() {
        let (mut table, nodes) = table(&[DIRECTORY, FILE, DIRECTORY]);
        assert!(table.release(|_| false).is_empty());
        assert_eq!(names(table.release(|_| false)), [1001]);
        assert_eq!(names(table.release(|_| false)), [1000, 1002]);
        let again = Remote { epoch: 1, name: 2000 };
        assert!(table.found_again(nodes[0], again, &known(1000, DIRECTORY)));
        assert_eq!(table.forget(nodes[0], 1), Some((again, 1)), "the answers before were told when it was released");
        assert!(table.release(|_| false).is_empty());
    }

    #[test]
    fn a_table_is_full_until_enough_are_released() {
        let mut table = table(&vec![FILE; FILE_NODES_HELD_MAX]).0;
        assert!(!table.is_full());
        table.hold(NamedIn::new(ROOT, b"more"), Remote { epoch: 1, name: 1 }, &known(1_000_000, FILE));
        assert!(table.is_full());
        assert!(table.release(|_| false).is_empty(), "each was used since the last time");
        assert!(!table.is_full(), "it is not looked through again for the next file");
        assert_eq!(table.release(|_| false).len(), FILE_NODES_RELEASED_MAX);
        table.attach(Remote { epoch: 2, name: 1 }, &known(1, DIRECTORY));
        assert!(table.release(|_| false).is_empty(), "another server process holds nothing");
    }

    #[test]
    fn forgotten_nodes_take_no_room() {
        let (mut table, _) = table(&[]);
        for name in 1000..1000 + 10 * FILE_NODES_RELEASED_MAX as u64 {
            let remote = Remote { epoch: 1, name };
            let node = table.hold(NamedIn::new(ROOT, b"file"), remote, &known(name, FILE));
            table.forget(node, 1);
        }
        assert!(table.held.queue.len() <= 2 * FILE_NODES_RELEASED_MAX);
    }
}
