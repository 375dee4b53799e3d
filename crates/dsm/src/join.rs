//! How the processes of a job find each other: each listens, connects to those of lower rank, and accepts those of higher rank.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use byway_fabric::CloseReason;
use byway_fabric::node::{Address, Deadline, Node, NodeError, NodeOptions, Op, OpError, Outcome, Session};
use byway_fabric::tls::ServerTls;
use byway_fabric::wire::RefuseCode;
use byway_reactor::Errno;
use byway_service::dsm::Rank;
use byway_service::dsm::wire::{Message, VERSION};
use rustix::event::{PollFd, PollFlags, poll};

use crate::area::AreaError;
use crate::checkpoint::CheckpointError;
use crate::environment::{Environment, EnvironmentError, Meeting, Wire};
use crate::job::CallError;
use crate::limits::{CUT_CONNECTS_MAX, JOIN_PAUSE, JOIN_TIME_MAX, MESSAGES, NODE_FRAME_BYTES, STRANGERS_MAX};

/// Why a process could not join its job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The environment names no job.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The process has joined already.
    #[error("this process has joined its job already, or has left it")]
    Joined,
    /// No memory.
    #[error(transparent)]
    Area(#[from] AreaError),
    /// No sessions.
    #[error("the processes of the job cannot reach each other: {0}")]
    Node(#[from] NodeError),
    /// The address that the job gives to this process cannot be had.
    #[error("the process cannot listen at {address}: {error}; give its host another port")]
    Listen {
        /// Which.
        address: Address,
        /// Why not.
        error: NodeError,
    },
    /// The kernel's.
    #[error("the process cannot join its job: {0}")]
    Io(#[from] std::io::Error),
    /// Another process has not come.
    #[error("rank {0} has not joined in {time:?}", time = JOIN_TIME_MAX)]
    Missing(Rank),
    /// What listens in a rank's place is no rank of this job.
    #[error("another program, or another version of byway, listens at the address of a process of this job")]
    Stranger,
    /// Not both ends have the job's certificate and key.
    #[error(
        "rank {rank} and this process have no key in common: {error}; start all processes by one `byway dsm run`, with the same byway on all hosts"
    )]
    Key {
        /// What listens in its place.
        rank: Rank,
        /// What failed.
        error: CloseReason,
    },
    /// A rank was started for the same job with other options.
    #[error(
        "rank {0} was started with another --consistency or --memory: give all processes of a job the same environment"
    )]
    OtherOptions(Rank),
    /// A rank on another host runs another program, or another build of it.
    #[error(
        "rank {0} runs another program than this process, or another build of it: install the same file on all hosts"
    )]
    OtherProgram(Rank),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The segments of the checkpoint cannot be had.
    #[error("the job cannot resume: {0}")]
    Resume(#[from] CallError),
}

fn until(deadline: std::time::Instant) -> Deadline {
    Deadline::after(deadline.saturating_duration_since(std::time::Instant::now()))
}

fn place(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

/// Sessions with all others, by rank.
pub(crate) fn join(environment: &Environment) -> Result<(Node, Vec<Option<Session>>), JoinError> {
    let options = NodeOptions {
        frame_bytes: NODE_FRAME_BYTES,
        messages: MESSAGES,
        keep_alive: environment.keep_alive,
        tls: environment.tls.as_ref().map_or(ServerTls::Off, |(server, _)| ServerTls::Required(server.clone())),
        ..NodeOptions::default()
    };
    let node = Node::open(&options)?;
    let deadline = std::time::Instant::now() + JOIN_TIME_MAX;
    listen(&node, environment)?;
    let mut sessions = vec![None; usize::from(environment.ranks)];
    for lower in 0..environment.rank {
        let session = connect(&node, environment, lower, deadline)?;
        node.send(session, &hello(environment).to_bytes(), &[]).map_err(NodeError::from)?;
        sessions[usize::from(lower)] = Some(session);
    }
    for lower in 0..environment.rank {
        let session = sessions[usize::from(lower)].ok_or(JoinError::Missing(lower))?;
        let message = node.receive_from(session, until(deadline))?;
        let rank = rank_of(&message.header, environment).ok_or(JoinError::Stranger)?;
        if rank? != lower {
            return Err(JoinError::Stranger);
        }
    }
    accept_higher(&node, environment, &mut sessions, deadline)?;
    // Strangers that connect from now on would take the pager's time.
    node.stop_listening()?;
    if let Meeting::Folder(folder, _) = &environment.meeting {
        // Some are gone with the listener.
        let _ = std::fs::remove_file(place(folder, environment.rank));
    }
    Ok((node, sessions))
}

/// All have joined: nothing of the job lies in the file system any more, however it ends.
pub(crate) fn remove_folder(environment: &Environment) {
    if let (0, Meeting::Folder(folder, _)) = (environment.rank, &environment.meeting) {
        // One that holds something else stays, and the launcher's own removal follows.
        let _ = std::fs::remove_dir(folder);
    }
}

/// Accepts the processes of higher rank, in any order. Others that connect, by mistake or with another version of byway, are turned away,
/// and one that says nothing holds up no other.
fn accept_higher(
    node: &Node,
    environment: &Environment,
    sessions: &mut [Option<Session>],
    deadline: std::time::Instant,
) -> Result<(), JoinError> {
    let mut strangers: Vec<(Session, Op)> = Vec::new();
    let mut accept = node.start_accept().map_err(NodeError::from)?;
    while let Some(missing) = sessions[usize::from(environment.rank) + 1..].iter().position(Option::is_none) {
        let missing = environment.rank + 1 + missing as Rank;
        let accepts = (strangers.len() < STRANGERS_MAX).then_some(&accept);
        let ops: Vec<&Op> = strangers.iter().map(|(_, op)| op).chain(accepts).collect();
        let (place, outcome) = node.wait_any(&ops, until(deadline)).map_err(|_| JoinError::Missing(missing))?;
        if place == strangers.len() {
            if let Ok(Outcome::Session(session)) = outcome
                && let Ok(receive) = node.start_receive(Some(session))
            {
                strangers.push((session, receive));
            }
            accept = node.start_accept().map_err(NodeError::from)?;
            continue;
        }
        let (session, _) = strangers.swap_remove(place);
        let rank = match outcome {
            Ok(Outcome::Message(message)) => rank_of(&message.header, environment).transpose()?,
            _ => None,
        };
        match rank.filter(|rank| *rank > environment.rank && sessions[usize::from(*rank)].is_none()) {
            Some(rank) => {
                node.send(session, &hello(environment).to_bytes(), &[]).map_err(NodeError::from)?;
                sessions[usize::from(rank)] = Some(session);
            }
            None => drop(node.close(session)),
        }
    }
    // Those that have said nothing yet are of no rank: all are here.
    for (session, receive) in strangers {
        drop(receive);
        let _ = node.close(session);
    }
    Ok(())
}

fn hello(environment: &Environment) -> Message {
    let Environment { rank, ranks, job, consistency, pages, program, .. } = *environment;
    Message::Hello { protocol: VERSION, rank, ranks, job, consistency, pages, program }
}

/// The rank that says hello, if it is of this job; an error if it has other options.
fn rank_of(header: &[u8], mine: &Environment) -> Option<Result<Rank, JoinError>> {
    match Message::from_bytes(header) {
        Some(Message::Hello { protocol: VERSION, rank, ranks, job, consistency, pages, program })
            if ranks == mine.ranks && rank < ranks && job == mine.job =>
        {
            let is_alike = (consistency, pages) == (mine.consistency, mine.pages);
            Some(if program != mine.program {
                Err(JoinError::OtherProgram(rank))
            } else if is_alike {
                Ok(rank)
            } else {
                Err(JoinError::OtherOptions(rank))
            })
        }
        _ => None,
    }
}

fn listen(node: &Node, environment: &Environment) -> Result<(), JoinError> {
    let (place, wire) = match &environment.meeting {
        Meeting::Folder(folder, wire) => (place(folder, environment.rank), *wire),
        Meeting::Addresses(addresses) => {
            let address = &addresses[usize::from(environment.rank)];
            let listening = node.listen(address).map(drop);
            return listening.map_err(|error| JoinError::Listen { address: address.clone(), error });
        }
    };
    let address = match wire {
        Wire::Shm => Address::Shared(place),
        Wire::Unix => Address::Unix(place),
        Wire::Tcp => {
            let at = node.listen(&Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 0))))?;
            let at = at.ok_or(std::io::ErrorKind::AddrNotAvailable).map_err(std::io::Error::from)?;
            // Whole when it is there.
            let unfinished = place.with_extension("new");
            std::fs::write(&unfinished, at.to_string())?;
            return Ok(std::fs::rename(&unfinished, &place)?);
        }
    };
    node.listen(&address)?;
    Ok(())
}

/// Where a rank listens, if it does.
fn address_of(rank: Rank, mine: &Environment) -> Option<Address> {
    let (place, wire) = match &mine.meeting {
        Meeting::Folder(folder, wire) => (place(folder, rank), wire),
        Meeting::Addresses(addresses) => return Some(addresses[usize::from(rank)].clone()),
    };
    let address = match wire {
        Wire::Shm => Address::Shared(place.clone()),
        Wire::Unix => Address::Unix(place.clone()),
        Wire::Tcp => Address::Tcp(std::fs::read_to_string(&place).ok()?.parse().ok()?),
    };
    place.exists().then_some(address)
}

/// What the end of a connection that was made says about the job's key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum KeyDoubt {
    None,
    /// The other process ends connections whose first bytes mean nothing to it. Or it has ended: then it listens no more.
    Possible,
    Certain,
}

impl Environment {
    fn key_doubt(&self, reason: &CloseReason) -> KeyDoubt {
        match reason {
            CloseReason::Tls(_) | CloseReason::Refused(RefuseCode::Auth) | CloseReason::NotByway => KeyDoubt::Certain,
            CloseReason::PeerClosed | CloseReason::Truncated | CloseReason::Io(Errno::CONNRESET)
                if self.tls.is_some() =>
            {
                KeyDoubt::Possible
            }
            _ => KeyDoubt::None,
        }
    }
}

/// Connects as soon as the other listens.
fn connect(node: &Node, mine: &Environment, rank: Rank, deadline: std::time::Instant) -> Result<Session, JoinError> {
    let mut cut = 0;
    loop {
        if let Some(address) = address_of(rank, mine) {
            let connected = match &mine.tls {
                Some((_, client)) => node.connect_secure(&address, client, until(deadline)),
                None => node.connect(&address, until(deadline)),
            };
            match connected {
                Ok(session) => return Ok(session),
                Err(NodeError::Op(OpError::Ended(error))) if mine.key_doubt(&error) > KeyDoubt::None => {
                    cut += 1;
                    if mine.key_doubt(&error) == KeyDoubt::Certain || cut == CUT_CONNECTS_MAX {
                        return Err(JoinError::Key { rank, error });
                    }
                }
                // The socket's file may be there before anybody listens.
                Err(error) if std::time::Instant::now() >= deadline => return Err(error.into()),
                Err(_) => {}
            }
        }
        if std::time::Instant::now() >= deadline {
            return Err(JoinError::Missing(rank));
        }
        // Others may connect to this process meanwhile.
        let pause = rustix::event::Timespec::try_from(JOIN_PAUSE).unwrap_or_default();
        let mut sources = [PollFd::from_borrowed_fd(node.descriptor()?, PollFlags::IN)];
        let _ = poll(&mut sources, Some(&pause));
        let _ = node.progress();
    }
}
