//! The environment variables by which a process learns of its job.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use byway_service::dsm::Consistency;
use byway_service::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};

use crate::limits::{AREA_BYTES_DEFAULT, KEEP_ALIVE_DEFAULT, KEEP_ALIVE_MAX, KEEP_ALIVE_MIN, PAGE_BYTES};

/// The process's rank, from 0.
pub(crate) const RANK: &str = "BYWAY_DSM_RANK";
/// How many processes the job has.
pub(crate) const RANKS: &str = "BYWAY_DSM_RANKS";
/// A number that all processes of the job were given.
pub(crate) const JOB: &str = "BYWAY_DSM_JOB";
/// The folder in which the processes find each other.
pub(crate) const FOLDER: &str = "BYWAY_DSM_FOLDER";
/// `shm`, `unix` or `tcp`.
pub(crate) const WIRE: &str = "BYWAY_DSM_WIRE";
/// Bytes of the area.
pub(crate) const BYTES: &str = "BYWAY_DSM_BYTES";

/// Of a job over several hosts, in place of the folder: where the ranks listen by TCP, one after the other.
pub(crate) const PEERS: &str = "BYWAY_DSM_PEERS";
/// The keep-alive, in milliseconds.
pub(crate) const KEEP_ALIVE: &str = "BYWAY_DSM_KEEP_ALIVE";
/// `sleep`, `poll` or `spin`.
pub(crate) const WAITS: &str = "BYWAY_DSM_PAGER";

/// `sc` or `rc`.
pub(crate) const CONSISTENCY: &str = "BYWAY_DSM_CONSISTENCY";

/// What the pager of each process does while there is nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waits {
    /// It sleeps, and the kernel wakes it for a fault or a message.
    #[default]
    Sleep,
    /// It looks again and again for a moment while the program waits for it, which leaves a core idle, and sleeps otherwise.
    Poll,
    /// It looks again and again, and keeps a core busy.
    Spin,
}

impl Waits {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Poll => "poll",
            Self::Spin => "spin",
        }
    }

    /// What has that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Sleep, Self::Poll, Self::Spin].into_iter().find(|waits| waits.name() == name)
    }
}

/// How the processes of a job reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// Shared memory.
    #[default]
    Shm,
    /// Unix sockets.
    Unix,
    /// TCP.
    Tcp,
}

impl Wire {
    /// Its name in addresses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }

    /// The wire of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Shm, Self::Unix, Self::Tcp].into_iter().find(|wire| wire.name() == name)
    }
}

/// Why the environment names no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// The process was not started as part of a job.
    #[error("{0} is not set: start the program by `byway dsm run`")]
    Missing(&'static str),
    /// A variable holds what it cannot.
    #[error("{0} has the invalid value {1:?}: start the program by `byway dsm run`")]
    Wrong(&'static str, String),
}

/// How processes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// On one machine: in this folder.
    Folder(PathBuf),
    /// Each rank listens at its address.
    Addresses(Vec<SocketAddr>),
}

/// A process's place in its job.
#[derive(Clone, Debug)]
pub(crate) struct Environment {
    pub(crate) rank: u8,
    pub(crate) ranks: u8,
    pub(crate) job: u64,
    pub(crate) meeting: Meeting,
    pub(crate) wire: Wire,
    /// Of the area.
    pub(crate) pages: u64,
    pub(crate) keep_alive: Duration,
    pub(crate) waits: Waits,
    pub(crate) consistency: Consistency,
}

impl Environment {
    /// This process's.
    pub(crate) fn of_process() -> Result<Self, EnvironmentError> {
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let text = |name| variable(name).ok_or(EnvironmentError::Missing(name));
        let number = |name| {
            let text = text(name)?;
            text.parse::<u64>().map_err(|_| EnvironmentError::Wrong(name, text))
        };
        let within = |name, range: std::ops::RangeInclusive<u64>| {
            let value = number(name)?;
            if range.contains(&value) { Ok(value) } else { Err(EnvironmentError::Wrong(name, value.to_string())) }
        };
        let ranks = within(RANKS, 1..=DSM_RANKS_MAX as u64)?;
        let rank = within(RANK, 0..=ranks - 1)?;
        let bytes = match variable(BYTES) {
            Some(_) => within(BYTES, PAGE_BYTES as u64..=DSM_PAGES_MAX * PAGE_BYTES as u64)?,
            None => AREA_BYTES_DEFAULT,
        };
        let keep_alive = match variable(KEEP_ALIVE) {
            Some(_) => {
                let range = KEEP_ALIVE_MIN.as_millis() as u64..=KEEP_ALIVE_MAX.as_millis() as u64;
                Duration::from_millis(within(KEEP_ALIVE, range)?)
            }
            None => KEEP_ALIVE_DEFAULT,
        };
        let waits = match variable(WAITS) {
            Some(name) => Waits::from_name(&name).ok_or(EnvironmentError::Wrong(WAITS, name))?,
            None => Waits::default(),
        };
        let consistency = match variable(CONSISTENCY) {
            Some(name) => Consistency::from_name(&name).ok_or(EnvironmentError::Wrong(CONSISTENCY, name))?,
            None => Consistency::default(),
        };
        let name = text(WIRE)?;
        let wire = Wire::from_name(&name).ok_or(EnvironmentError::Wrong(WIRE, name))?;
        let meeting = match variable(PEERS) {
            None => Meeting::Folder(text(FOLDER)?.into()),
            Some(list) => {
                let addresses: Result<Vec<SocketAddr>, _> = list.split(',').map(str::parse).collect();
                match addresses {
                    Ok(all) if all.len() as u64 == ranks && wire == Wire::Tcp => Meeting::Addresses(all),
                    _ => return Err(EnvironmentError::Wrong(PEERS, list)),
                }
            }
        };
        let (rank, ranks, pages) = (rank as u8, ranks as u8, bytes / PAGE_BYTES as u64);
        Ok(Self { rank, ranks, job: number(JOB)?, meeting, wire, pages, keep_alive, waits, consistency })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(changes: &[(&str, Option<&str>)]) -> Result<Environment, EnvironmentError> {
        let good = [(RANK, "1"), (RANKS, "2"), (JOB, "7"), (FOLDER, "/x"), (WIRE, "tcp")];
        Environment::read(|name| {
            let changed = changes.iter().find(|(changed, _)| *changed == name).map(|(_, value)| *value);
            changed
                .unwrap_or_else(|| good.iter().find(|(good, _)| *good == name).map(|(_, value)| *value))
                .map(str::to_owned)
        })
    }

    #[test]
    fn a_process_learns_its_place() {
        let place = read(&[]).unwrap();
        assert_eq!((place.rank, place.ranks, place.job, place.wire), (1, 2, 7, Wire::Tcp));
        assert_eq!(place.pages * PAGE_BYTES as u64, AREA_BYTES_DEFAULT);
        assert_eq!((place.keep_alive, place.waits), (KEEP_ALIVE_DEFAULT, Waits::Sleep));
        assert_eq!(read(&[(BYTES, Some("8192"))]).unwrap().pages, 2);
        assert_eq!(read(&[(KEEP_ALIVE, Some("2500"))]).unwrap().keep_alive, Duration::from_millis(2500));
        assert_eq!(place.meeting, Meeting::Folder("/x".into()));
        let peers = [(FOLDER, None), (PEERS, Some("10.0.0.1:7000,[::1]:7001"))];
        let addresses = vec!["10.0.0.1:7000".parse().unwrap(), "[::1]:7001".parse().unwrap()];
        assert_eq!(read(&peers).unwrap().meeting, Meeting::Addresses(addresses));
        assert_eq!(place.consistency, Consistency::Sequential);
        assert_eq!(read(&[(CONSISTENCY, Some("rc"))]).unwrap().consistency, Consistency::Release);
        assert_eq!(read(&[(WAITS, Some("poll"))]).unwrap().waits, Waits::Poll);
        assert_eq!(read(&[(WAITS, Some("spin"))]).unwrap().waits, Waits::Spin);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert_eq!(read(&[(JOB, None)]).unwrap_err(), EnvironmentError::Missing(JOB));
        for (name, value) in [
            (RANK, "2"),
            (RANKS, "0"),
            (RANKS, "65"),
            (WIRE, "smoke"),
            (BYTES, "1"),
            (JOB, "x"),
            (KEEP_ALIVE, "0"),
            (WAITS, "nap"),
            (CONSISTENCY, "tso"),
            (PEERS, "10.0.0.1:7000"),
        ] {
            assert_eq!(read(&[(name, Some(value))]).unwrap_err(), EnvironmentError::Wrong(name, value.to_owned()));
        }
    }
}
