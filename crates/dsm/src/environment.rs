//! The environment variables by which a process learns of its job.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use byway_fabric::node::Address;
use byway_fabric::tls::{TlsClient, TlsServer};
use byway_service::dsm::Consistency;
use byway_service::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};

use crate::checkpoint::pages_of_segments;
use crate::limits::{
    AREA_BYTES_DEFAULT, KEEP_ALIVE_DEFAULT, KEEP_ALIVE_MAX, KEEP_ALIVE_MIN, PAGE_BYTES, PROGRAM_READ_BYTES,
};

/// The process's rank, from 0.
pub(crate) const RANK: &str = "BYWAY_DSM_RANK";
/// How many processes the job has.
pub(crate) const RANKS: &str = "BYWAY_DSM_RANKS";
/// A number that all processes of the job were given.
pub(crate) const JOB: &str = "BYWAY_DSM_JOB";
/// The folder in which the processes find each other.
pub(crate) const FOLDER: &str = "BYWAY_DSM_FOLDER";
/// `shm`, `unix` or `tcp`; over several hosts `tcp` or `rdma`.
pub(crate) const WIRE: &str = "BYWAY_DSM_WIRE";
/// Bytes of the area.
pub(crate) const BYTES: &str = "BYWAY_DSM_BYTES";

/// Of a job over several hosts, in place of the folder: where the ranks listen, one after the other.
pub(crate) const PEERS: &str = "BYWAY_DSM_PEERS";
/// Of a job over several hosts that encrypts: the job's certificate and its key, in PEM.
pub(crate) const TLS: &str = "BYWAY_DSM_TLS";
/// The keep-alive, in milliseconds.
pub(crate) const KEEP_ALIVE: &str = "BYWAY_DSM_KEEP_ALIVE";
/// `sleep`, `poll`, `spin` or `points`.
pub(crate) const WAITS: &str = "BYWAY_DSM_PAGER";

/// `sc` or `rc`.
pub(crate) const CONSISTENCY: &str = "BYWAY_DSM_CONSISTENCY";

/// The folder for checkpoints, if the job has one.
pub(crate) const CHECKPOINT: &str = "BYWAY_DSM_CHECKPOINT";
/// Set: the job resumes from the checkpoint there.
pub(crate) const RESUME: &str = "BYWAY_DSM_RESUME";
/// Set: the process tells its launcher at the end what it has counted.
pub(crate) const REPORT: &str = "BYWAY_DSM_REPORT";

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
    /// It answers the program's own faults alone. Other processes are answered at the program's safe points: [`Job::poll`](crate::Job::poll),
    /// and calls and faults that wait.
    Points,
}

impl Waits {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Poll => "poll",
            Self::Spin => "spin",
            Self::Points => "points",
        }
    }

    /// What has that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Sleep, Self::Poll, Self::Spin, Self::Points].into_iter().find(|waits| waits.name() == name)
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
    /// The job's certificate or its key cannot be used.
    #[error("{TLS} does not hold a certificate and its key: start the program by `byway dsm run`")]
    Tls,
}

/// How processes find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// On one machine: in this folder.
    Folder(PathBuf, Wire),
    /// Each rank listens at its address, of TCP or RDMA.
    Addresses(Vec<Address>),
}

/// Where a job has its checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointPlace {
    pub(crate) folder: PathBuf,
    pub(crate) resume: bool,
}

/// A process's place in its job.
#[derive(Clone, Debug)]
pub(crate) struct Environment {
    pub(crate) rank: u8,
    pub(crate) ranks: u8,
    pub(crate) job: u64,
    pub(crate) meeting: Meeting,
    /// Of all segments together.
    pub(crate) pages: u64,
    pub(crate) keep_alive: Duration,
    pub(crate) waits: Waits,
    pub(crate) consistency: Consistency,
    pub(crate) checkpoint: Option<CheckpointPlace>,
    pub(crate) reports: bool,
    /// Both sides of each session, if the job encrypts.
    pub(crate) tls: Option<(TlsServer, TlsClient)>,
    /// A checksum of the program, in a job over several hosts.
    pub(crate) program: u32,
}

impl Environment {
    /// This process's.
    pub(crate) fn of_process() -> Result<Self, EnvironmentError> {
        let read = Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))?;
        // On one machine different programs of a job are what its user wants.
        let program = if matches!(read.meeting, Meeting::Addresses(_)) { checksum_of_program() } else { 0 };
        Ok(Self { program, ..read })
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
        let wire = text(WIRE)?;
        let meeting = match variable(PEERS) {
            None => {
                let wire = Wire::from_name(&wire).ok_or(EnvironmentError::Wrong(WIRE, wire))?;
                Meeting::Folder(text(FOLDER)?.into(), wire)
            }
            Some(list) => {
                let over = match &*wire {
                    "tcp" => Address::Tcp,
                    "rdma" => Address::Rdma,
                    _ => return Err(EnvironmentError::Wrong(WIRE, wire)),
                };
                let addresses: Result<Vec<SocketAddr>, _> = list.split(',').map(str::parse).collect();
                match addresses {
                    Ok(all) if all.len() as u64 == ranks => Meeting::Addresses(all.into_iter().map(over).collect()),
                    _ => return Err(EnvironmentError::Wrong(PEERS, list)),
                }
            }
        };
        let tls = variable(TLS).map(|pem| TlsServer::of_group(pem.as_bytes()).map_err(|_| EnvironmentError::Tls));
        let checkpoint = variable(CHECKPOINT)
            .map(|folder| CheckpointPlace { folder: folder.into(), resume: variable(RESUME).is_some() });
        let (rank, ranks, pages) = (rank as u8, ranks as u8, bytes / PAGE_BYTES as u64);
        let pages = if checkpoint.is_some() { pages_of_segments(pages) } else { pages };
        let (job, tls, reports) = (number(JOB)?, tls.transpose()?, variable(REPORT).is_some());
        let program = 0;
        Ok(Self { rank, ranks, job, meeting, pages, keep_alive, waits, consistency, checkpoint, reports, tls, program })
    }
}

/// Of the file that this process runs; 0 if it may not be read.
fn checksum_of_program() -> u32 {
    use std::io::Read;
    let Ok(mut file) = std::fs::File::open("/proc/self/exe") else { return 0 };
    let (mut checksum, mut bytes) = (0, vec![0; PROGRAM_READ_BYTES]);
    loop {
        match file.read(&mut bytes) {
            Ok(count) if count > 0 => checksum = crc32c::crc32c_append(checksum, &bytes[..count]),
            _ => return checksum,
        }
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
        assert_eq!((place.rank, place.ranks, place.job), (1, 2, 7));
        assert_eq!(place.pages * PAGE_BYTES as u64, AREA_BYTES_DEFAULT);
        assert_eq!((place.keep_alive, place.waits), (KEEP_ALIVE_DEFAULT, Waits::Sleep));
        assert_eq!(read(&[(BYTES, Some("8192"))]).unwrap().pages, 2);
        assert_eq!(read(&[(KEEP_ALIVE, Some("2500"))]).unwrap().keep_alive, Duration::from_millis(2500));
        assert_eq!(place.meeting, Meeting::Folder("/x".into(), Wire::Tcp));
        assert!(place.tls.is_none());
        let peers = [(FOLDER, None), (PEERS, Some("10.0.0.1:7000,[::1]:7001"))];
        let addresses = ["10.0.0.1:7000", "[::1]:7001"].map(|address| address.parse().unwrap());
        assert_eq!(read(&peers).unwrap().meeting, Meeting::Addresses(addresses.map(Address::Tcp).to_vec()));
        let rdma = [peers[0], peers[1], (WIRE, Some("rdma"))];
        assert_eq!(read(&rdma).unwrap().meeting, Meeting::Addresses(addresses.map(Address::Rdma).to_vec()));
        assert_eq!((place.consistency, place.checkpoint), (Consistency::Sequential, None));
        let resumes = read(&[(CHECKPOINT, Some("/c")), (RESUME, Some("1"))]).unwrap().checkpoint.unwrap();
        assert_eq!(resumes, CheckpointPlace { folder: "/c".into(), resume: true });
        assert!(!place.reports && read(&[(REPORT, Some("1"))]).unwrap().reports);
        assert_eq!(read(&[(CONSISTENCY, Some("rc"))]).unwrap().consistency, Consistency::Release);
        assert_eq!(read(&[(WAITS, Some("poll"))]).unwrap().waits, Waits::Poll);
        assert_eq!(read(&[(WAITS, Some("spin"))]).unwrap().waits, Waits::Spin);
        assert_eq!(read(&[(WAITS, Some("points"))]).unwrap().waits, Waits::Points);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert_eq!(read(&[(JOB, None)]).unwrap_err(), EnvironmentError::Missing(JOB));
        for (name, value) in [
            (RANK, "2"),
            (RANKS, "0"),
            (RANKS, "65"),
            (WIRE, "smoke"),
            // Between hosts alone.
            (WIRE, "rdma"),
            (BYTES, "1"),
            (JOB, "x"),
            (KEEP_ALIVE, "0"),
            (WAITS, "nap"),
            (CONSISTENCY, "tso"),
            (PEERS, "10.0.0.1:7000"),
        ] {
            assert_eq!(read(&[(name, Some(value))]).unwrap_err(), EnvironmentError::Wrong(name, value.to_owned()));
        }
        // Its value is secret.
        assert_eq!(read(&[(TLS, Some("x"))]).unwrap_err(), EnvironmentError::Tls);
    }
}
