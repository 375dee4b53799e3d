//! Which protocols the two ends of a session speak, and how much credit each has.

use zerocopy::{FromBytes, IntoBytes};

use super::Breach;
use crate::limits::PROTOCOLS_MAX;
use crate::message::{ProtocolEntry, Status};

/// This node's part in one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// The protocol.
    pub protocol: u8,
    /// The versions.
    pub versions: Versions,
    /// The calls that a peer may have in flight here; `None` if this node calls and does not serve.
    pub grant: Option<Grant>,
}

/// Versions of a protocol that a node speaks, with all between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Versions {
    /// One version.
    pub const fn only(version: u16) -> Self {
        Self { oldest: version, newest: version }
    }
}

/// The calls that a peer may have in flight at this node, in one protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Calls in flight.
    pub calls: u16,
    /// Notices that the receiver has not taken.
    pub notices: u16,
}

impl Spoken {
    /// The entry of a `Protocols` message.
    pub(crate) fn entry(&self) -> ProtocolEntry {
        let grant = self.grant.unwrap_or_default();
        ProtocolEntry {
            protocol: self.protocol,
            serves: u8::from(self.grant.is_some()),
            version_min: self.versions.oldest.into(),
            version_max: self.versions.newest.into(),
            calls: grant.calls.into(),
            notices: grant.notices.into(),
        }
    }
}

/// One protocol of a session.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) protocol: u8,
    /// `None` while the peer has not said what it speaks, or if the two have none in common.
    pub(super) version: Option<u16>,
    local: Option<Grant>,
    peer_serves: bool,
    /// Calls in flight and notices on the way to the peer, and what it granted.
    calls_out: u32,
    calls_granted: u32,
    notices_left: u32,
    /// Calls in flight and notices not taken from the peer.
    calls_in: u32,
    notices_in: u32,
    /// Notices taken whose credit the peer does not have yet.
    notices_owed: u32,
}

/// The protocols of a session. At most [`PROTOCOLS_MAX`], so a search costs less than a hash.
#[derive(Debug, Default)]
pub(super) struct Protocols {
    agreed: Vec<Agreed>,
    peer_known: bool,
}

/// Why a call or notice cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotSend {
    /// The peer has not said yet what it speaks, or its credit is used up: wait for [`Event::Ready`](super::Event::Ready)
    /// or [`Event::Ended`](super::Event::Ended). A call that is given up and the end of another session bring credit back too.
    #[error("no credit")]
    NoCredit,
    /// The peer does not serve the protocol, or no version that this node speaks; or this node does not
    /// [speak](super::Calls::speaks) it.
    #[error("{0}")]
    NotServed(Status),
    /// The session has ended.
    #[error("the session has ended")]
    Ended,
}

impl Protocols {
    pub(super) fn new(spoken: &[Spoken]) -> Self {
        let agreed = spoken.iter().take(PROTOCOLS_MAX).map(|one| Agreed {
            protocol: one.protocol,
            version: None,
            local: one.grant,
            peer_serves: false,
            calls_out: 0,
            calls_granted: 0,
            notices_left: 0,
            calls_in: 0,
            notices_in: 0,
            notices_owed: 0,
        });
        Self { agreed: agreed.collect(), peer_known: false }
    }

    pub(super) fn find(&mut self, protocol: u8) -> Option<&mut Agreed> {
        self.agreed.iter_mut().find(|agreed| agreed.protocol == protocol)
    }

    /// The highest number of calls that the peer may have in flight, of all protocols.
    pub(super) fn calls_in_max(&self) -> usize {
        self.agreed.iter().filter_map(|agreed| agreed.local).map(|grant| usize::from(grant.calls)).sum()
    }

    /// Takes what the peer speaks.
    pub(super) fn learn(&mut self, spoken: &[Spoken], count: usize, payload: &[u8]) -> Result<(), Breach> {
        let entries = <[ProtocolEntry]>::ref_from_bytes_with_elems(payload, count).map_err(|_| Breach::Form)?;
        if std::mem::replace(&mut self.peer_known, true) || count > PROTOCOLS_MAX {
            return Err(Breach::Form);
        }
        for entry in entries {
            let Some(ours) = spoken.iter().find(|ours| ours.protocol == entry.protocol) else { continue };
            let Some(agreed) = self.find(entry.protocol) else { continue };
            let newest = ours.versions.newest.min(entry.version_max.get());
            let oldest = ours.versions.oldest.max(entry.version_min.get());
            agreed.version = (newest >= oldest).then_some(newest);
            agreed.peer_serves = entry.serves != 0;
            agreed.calls_granted = u32::from(entry.calls.get());
            agreed.notices_left = u32::from(entry.notices.get());
        }
        Ok(())
    }

    fn sendable(&mut self, protocol: u8) -> Result<&mut Agreed, CannotSend> {
        if !self.peer_known {
            return Err(CannotSend::NoCredit);
        }
        let agreed = self.find(protocol).filter(|agreed| agreed.peer_serves);
        let agreed = agreed.ok_or(CannotSend::NotServed(Status::UnknownProtocol))?;
        if agreed.version.is_none() {
            return Err(CannotSend::NotServed(Status::Version));
        }
        Ok(agreed)
    }

    /// Whether a call can be sent now.
    pub(super) fn may_call(&mut self, protocol: u8) -> Result<(), CannotSend> {
        let agreed = self.sendable(protocol)?;
        if agreed.calls_out < agreed.calls_granted { Ok(()) } else { Err(CannotSend::NoCredit) }
    }

    /// Takes the credit for a call.
    pub(super) fn begin_call(&mut self, protocol: u8) -> Result<(), CannotSend> {
        self.may_call(protocol)?;
        self.sendable(protocol)?.calls_out += 1;
        Ok(())
    }

    /// A call has ended: its credit is back.
    pub(super) fn end_call(&mut self, protocol: u8) {
        if let Some(agreed) = self.find(protocol) {
            agreed.calls_out -= 1;
        }
    }

    /// Takes the credit for a notice.
    pub(super) fn begin_notice(&mut self, protocol: u8) -> Result<(), CannotSend> {
        let agreed = self.sendable(protocol)?;
        agreed.notices_left = agreed.notices_left.checked_sub(1).ok_or(CannotSend::NoCredit)?;
        Ok(())
    }

    /// The peer gave credit for notices.
    pub(super) fn credited(&mut self, protocol: u8, credits: u32) -> Result<(), Breach> {
        let agreed = self.find(protocol).filter(|agreed| agreed.peer_serves).ok_or(Breach::Form)?;
        agreed.notices_left = agreed.notices_left.checked_add(credits).ok_or(Breach::Credit)?;
        Ok(())
    }

    /// A call came. Its version, or why it is answered at once.
    pub(super) fn call_came(&mut self, protocol: u8) -> Result<Result<u16, Status>, Breach> {
        let peer_known = self.peer_known;
        let Some(agreed) = self.find(protocol) else { return Ok(Err(Status::UnknownProtocol)) };
        let Some(grant) = agreed.local else { return Ok(Err(Status::UnknownProtocol)) };
        if !peer_known || agreed.calls_in >= u32::from(grant.calls) {
            return Err(Breach::Credit);
        }
        let Some(version) = agreed.version else { return Ok(Err(Status::Version)) };
        agreed.calls_in += 1;
        Ok(Ok(version))
    }

    /// A call of the peer's was answered.
    pub(super) fn call_answered(&mut self, protocol: u8) {
        if let Some(agreed) = self.find(protocol) {
            agreed.calls_in -= 1;
        }
    }

    /// A notice came. False: this node does not serve the protocol; it is dropped.
    pub(super) fn notice_came(&mut self, protocol: u8) -> Result<bool, Breach> {
        let Some(agreed) = self.find(protocol).filter(|agreed| agreed.version.is_some()) else { return Ok(false) };
        let Some(grant) = agreed.local else { return Ok(false) };
        if agreed.notices_in >= u32::from(grant.notices) {
            return Err(Breach::Credit);
        }
        agreed.notices_in += 1;
        Ok(true)
    }

    /// The program has taken a notice. Credit to give back now: half of the grant at a time, so that most notices cost no
    /// message of their own.
    pub(super) fn notice_taken(&mut self, protocol: u8) -> Option<u32> {
        let agreed = self.find(protocol)?;
        agreed.notices_owed += 1;
        if agreed.notices_owed * 2 < u32::from(agreed.local?.notices) {
            return None;
        }
        if !crate::seeded::is(crate::seeded::Bug::NoticeNotTakenOff) {
            agreed.notices_in -= agreed.notices_owed;
        }
        Some(std::mem::take(&mut agreed.notices_owed))
    }

    #[cfg(test)]
    pub(super) fn calls_out(&self) -> u32 {
        self.agreed.iter().map(|agreed| agreed.calls_out).sum()
    }

    #[cfg(test)]
    pub(super) fn calls_in(&self) -> u32 {
        self.agreed.iter().map(|agreed| agreed.calls_in).sum()
    }
}

/// The payload of a `Protocols` message.
pub(super) fn entries(spoken: &[Spoken]) -> Vec<u8> {
    spoken.iter().take(PROTOCOLS_MAX).flat_map(|one| one.entry().as_bytes().to_vec()).collect()
}
