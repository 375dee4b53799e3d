//! Commands of a program's threads to the thread that drives the loop.

use std::ops::Range;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};

use byway_reactor::{Address, Mapping};

use super::memory::{HeldSegments, Places};
use super::shared::OpSlot;
use super::{NodeCounters, OpId, Session, SessionFeedback};
use crate::descriptor::{Descriptor, Rights};

use crate::tls::TlsClient;

/// One request. What has an operation ends with it.
#[derive(Debug)]
pub(super) enum Command {
    /// Counts what the loop has.
    Count {
        tell: SyncSender<NodeCounters>,
    },
    Listen {
        op: OpSlot,
        address: Address,
    },
    StopListening {
        op: OpSlot,
    },
    Connect {
        session: Session,
        address: Address,
        tls: Option<TlsClient>,
    },
    Close {
        session: Session,
    },
    Send {
        op: Option<OpSlot>,
        session: Session,
        header: Header,
        payload: Vec<u8>,
    },
    /// A message of the layer's.
    Say {
        session: Session,
        header: crate::wire::Header,
        payload: Vec<u8>,
    },
    Put {
        op: OpSlot,
        session: Session,
        segments: HeldSegments,
        to: Places,
        message: Option<Header>,
    },
    Get {
        op: OpSlot,
        session: Session,
        segments: HeldSegments,
        from: Places,
    },
    /// Ends a put or get at once, and its session if it has begun.
    GiveUp {
        op: Option<OpId>,
        session: Session,
    },
    Flush {
        op: OpSlot,
        session: Session,
    },
    Open {
        op: OpSlot,
        sessions: Vec<Session>,
        mapping: Mapping,
        range: Range<usize>,
        rights: Rights,
        once: bool,
    },
    CloseWindow {
        op: OpSlot,
        sessions: Vec<Session>,
        descriptor: Descriptor,
        mapping: Mapping,
    },
    /// Of an operation that the loop knows.
    Cancel {
        op: OpId,
        kind: super::shared::OpKind,
    },
    /// What a session's transfers are like.
    Look {
        op: OpSlot,
        session: Session,
        into: Arc<OnceLock<SessionFeedback>>,
    },
    /// The program has taken messages.
    GiveCredit {
        session: Session,
    },
    /// The layer's alarm.
    Alarm {
        at: byway_reactor::Instant,
    },
}

/// The header of a program's message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) bytes: [u8; crate::limits::MESSAGE_HEADER_BYTES_MAX],
    pub(super) len: u8,
}

impl Header {
    /// `None` if it is too long.
    pub(super) fn new(bytes: &[u8]) -> Option<Self> {
        let mut header = Self { bytes: [0; crate::limits::MESSAGE_HEADER_BYTES_MAX], len: bytes.len() as u8 };
        header.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(header)
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}
