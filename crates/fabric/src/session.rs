//! Sessions, without I/O: what two sides negotiate, in which order lanes come up, and when a silent peer is dead.
//!
//! A client makes a session by the `Hello` of its control lane, and adds bulk lanes by `Hello`s with the same nonce. No
//! order is promised between lanes. A session lives and dies as a whole: a lane that breaks ends it, since the data in
//! flight on that lane would never arrive.

use std::time::Duration;

use byway_reactor::{Errno, Instant};
use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::limits::{BULK_LANES_MAX, PAYLOAD_BYTES_MAX, SMALL_BYTES_MAX, TAKE_TIME_MAX};
use crate::rdma::transport::Down;
use crate::tls::TlsError;
use crate::wire::{
    FEATURE_PAYLOAD_CHECKSUM, FEATURES, Header, HeaderError, Hello, Kind, MAGIC, Refuse, RefuseCode, VERSIONS, Welcome,
};

/// Why a session ended, or never came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer closed the connection between two messages.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The connection ended within a message.
    #[error("the connection ended in the middle of a message")]
    Truncated,
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(Errno),
    /// What came first is not byway's wire: an address of something else, or a TLS listener.
    #[error("the peer does not speak byway's wire; check the address, and whether it wants TLS")]
    NotByway,
    /// An NBD server's greeting came first.
    #[error("the server speaks NBD; write nbd:// instead of byway://")]
    SpeaksNbd,
    /// TLS failed: no certificate that both sides accept, or an attacker on the path.
    #[error("TLS: {0}")]
    Tls(TlsError),
    /// A header cannot be trusted.
    #[error("bad header: {0}")]
    Header(HeaderError),
    /// A payload is longer than was agreed.
    #[error("a payload of {0} bytes is longer than agreed")]
    Oversize(u32),
    /// A payload's checksum is wrong: something on the way changes bytes.
    #[error("a payload's checksum is wrong; something on the way changes bytes")]
    PayloadChecksum,
    /// A message that has no place there.
    #[error("a message of kind {0:?} came where it is not allowed")]
    Unexpected(Kind),
    /// The handshake took too long.
    #[error("the handshake took too long")]
    SlowHandshake,
    /// The peer sends nothing while this side expects a reply.
    #[error("the peer owes an answer and has been silent for too long")]
    Silent,
    /// The peer takes no answers, and they have filled the memory that there is for them.
    #[error("the peer has not received answers for too long, and there is no memory for more")]
    TakesNothing,
    /// The peer asks and asks, and takes too few of the answers.
    #[error("the peer asks for more than it receives: too many answers are queued for it")]
    AsksTooMuch,
    /// More calls than the server allows.
    #[error("the peer has more calls in flight than it was granted")]
    Credit,
    /// The other side refused, or said goodbye.
    #[error("the peer refused: {0}")]
    Refused(RefuseCode),
    /// We refused.
    #[error("refused: {0}")]
    WeRefused(RefuseCode),
    /// No memory for its receive buffer.
    #[error("no memory for the connection's receive buffer")]
    NoFrames,
    /// Something of RDMA.
    #[error("RDMA: {0}")]
    Rdma(Down),
    /// The owner closed it.
    #[error("closed")]
    Closed,
}

impl From<Down> for CloseReason {
    /// What other wires have a word for is called by that.
    fn from(down: Down) -> Self {
        match down {
            Down::PeerClosed => Self::PeerClosed,
            Down::Refused(code) => Self::Refused(code),
            Down::WeRefused(code) => Self::WeRefused(code),
            Down::NotByway => Self::NotByway,
            Down::NoFrames => Self::NoFrames,
            Down::NobodyListens => Self::Io(Errno::CONNREFUSED),
            Down::Unreachable(errno) => Self::Io(errno),
            other => Self::Rdma(other),
        }
    }
}

impl CloseReason {
    /// Whether something went wrong: what both sides meant to do is no fault.
    pub fn is_fault(self) -> bool {
        !matches!(
            self,
            Self::PeerClosed
                | Self::Closed
                | Self::NoFrames
                | Self::Refused(_)
                | Self::WeRefused(
                    RefuseCode::ShuttingDown | RefuseCode::Drained | RefuseCode::Busy | RefuseCode::Superseded
                )
        )
    }
}

/// Whether payloads carry a checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PayloadChecksum {
    /// Only if the peer requires it.
    #[default]
    Off,
    /// If the peer can.
    Wanted,
    /// Or no session.
    Required,
}

/// A side's parameters for the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Payload checksums.
    pub checksum: PayloadChecksum,
    /// Bulk lanes: those that a client opens.
    pub bulk_lanes: u16,
}

/// A client's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientId(pub [u8; 16]);

/// A session as its client describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The client; the same over all its sessions.
    pub client: ClientId,
    /// Which of its sessions; a higher one replaces a lower.
    pub number: u64,
    /// Names the session; unguessable.
    pub nonce: [u8; 16],
}

/// The negotiated parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Feature bits.
    pub features: u32,
    /// The server process.
    pub instance: u64,
}

impl Agreed {
    /// Whether payloads carry a checksum.
    pub fn payload_checksum(&self) -> bool {
        self.features & FEATURE_PAYLOAD_CHECKSUM != 0
    }
}

/// The client's first message on a lane.
pub fn hello(identity: &Identity, terms: &Terms, lane: u16) -> Header {
    let features = if terms.checksum == PayloadChecksum::Off { 0 } else { FEATURE_PAYLOAD_CHECKSUM };
    let required = if terms.checksum == PayloadChecksum::Required { FEATURE_PAYLOAD_CHECKSUM } else { 0 };
    let hello = Hello {
        magic: MAGIC,
        version_min: U16::new(*VERSIONS.start()),
        version_max: U16::new(*VERSIONS.end()),
        lane: U16::new(lane),
        bulk_lanes: U16::new(terms.bulk_lanes),
        features: U32::new(features),
        features_required: U32::new(required),
        nonce: identity.nonce,
        client: identity.client.0,
        session: U64::new(identity.number),
        payload_max: U32::new(PAYLOAD_BYTES_MAX as u32),
        reserved: [0; 4],
    };
    Header::with_body(Kind::Hello, &hello)
}

/// Reads the first message of a lane, at the server.
///
/// # Errors
/// The lane ends: it is not ours, or something else than a `Hello`.
pub fn read_hello(header: &Header, kind: Kind) -> Result<(Hello, Identity), CloseReason> {
    let hello: Hello = header.body();
    if kind != Kind::Hello || hello.magic != MAGIC || header.payload_len() != 0 {
        return Err(CloseReason::NotByway);
    }
    let identity = Identity { client: ClientId(hello.client), number: hello.session.get(), nonce: hello.nonce };
    Ok((hello, identity))
}

/// What the server makes of a `Hello`: the features of the session, or why there will be none.
///
/// # Errors
/// The code to refuse it with.
pub fn negotiate(hello: &Hello, terms: &Terms) -> Result<u32, RefuseCode> {
    if hello.version_min.get() > *VERSIONS.end() || hello.version_max.get() < *VERSIONS.start() {
        return Err(RefuseCode::Version);
    }
    // Payloads have one size for all; a client that takes less is another version's.
    let takes_all = hello.payload_max.get() >= PAYLOAD_BYTES_MAX as u32;
    if hello.features_required.get() & !FEATURES != 0 || hello.lane.get() > BULK_LANES_MAX || !takes_all {
        return Err(RefuseCode::Feature);
    }
    let wanted = (hello.features.get() | hello.features_required.get()) & FEATURES;
    let checksum = wanted & FEATURE_PAYLOAD_CHECKSUM != 0;
    match terms.checksum {
        PayloadChecksum::Required if !checksum => Err(RefuseCode::Feature),
        PayloadChecksum::Off => Ok(hello.features_required.get() & FEATURES),
        _ => Ok(wanted),
    }
}

/// The server's answer to a `Hello` that it accepts.
pub fn welcome(hello: &Hello, agreed: &Agreed) -> Header {
    let version = (*VERSIONS.end()).min(hello.version_max.get());
    let body = Welcome {
        magic: MAGIC,
        version: U16::new(version),
        lane: hello.lane,
        small_max: U32::new(SMALL_BYTES_MAX as u32),
        payload_max: U32::new(PAYLOAD_BYTES_MAX as u32),
        features: U32::new(agreed.features),
        nonce: hello.nonce,
        reserved: [0; 40],
    };
    let mut header = Header::with_body(Kind::Welcome, &body);
    header.instance.set(agreed.instance);
    header
}

/// A `Refuse` or `Goodbye`.
pub fn refuse(kind: Kind, code: RefuseCode) -> Header {
    let mut body = Refuse::new_zeroed();
    body.magic = MAGIC;
    body.code.set(code as u16);
    body.version_min.set(*VERSIONS.start());
    body.version_max.set(*VERSIONS.end());
    body.features.set(FEATURES);
    Header::with_body(kind, &body)
}

/// What the first bytes of a server are that cannot be a `Welcome`: NBD's greeting, or something unknown.
pub(crate) fn foreign(first: &[u8]) -> CloseReason {
    if first.starts_with(NBD_MAGIC) { CloseReason::SpeaksNbd } else { CloseReason::NotByway }
}

/// How every NBD server's greeting begins (NBD protocol, "Newstyle negotiation" and "Oldstyle negotiation").
const NBD_MAGIC: &[u8] = b"NBDMAGIC";

/// Reads the server's answer to a `Hello`.
///
/// # Errors
/// Why there is no session.
pub fn read_welcome(header: &Header, kind: Kind, identity: &Identity, terms: &Terms) -> Result<Agreed, CloseReason> {
    if kind == Kind::Refuse {
        let refuse: Refuse = header.body();
        let ours = refuse.magic == MAGIC;
        let code = RefuseCode::from_number(refuse.code.get());
        return Err(if ours { CloseReason::Refused(code) } else { CloseReason::NotByway });
    }
    let welcome: Welcome = header.body();
    if kind != Kind::Welcome || welcome.magic != MAGIC || welcome.nonce != identity.nonce {
        return Err(CloseReason::NotByway);
    }
    if !VERSIONS.contains(&welcome.version.get()) {
        return Err(CloseReason::WeRefused(RefuseCode::Version));
    }
    let features = welcome.features.get();
    let lacks = terms.checksum == PayloadChecksum::Required && features & FEATURE_PAYLOAD_CHECKSUM == 0;
    let takes_all =
        welcome.small_max.get() >= SMALL_BYTES_MAX as u32 && welcome.payload_max.get() >= PAYLOAD_BYTES_MAX as u32;
    if features & !FEATURES != 0 || lacks || !takes_all {
        return Err(CloseReason::WeRefused(RefuseCode::Feature));
    }
    Ok(Agreed { features, instance: header.instance.get() })
}

/// Watches a peer from which a reply is expected.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    keep_alive: Duration,
    /// The last sign of life, or when this side began to expect a reply.
    since: Instant,
    probed: Option<Instant>,
    /// The time for an answer was over at the last look, after which what had come was taken.
    overdue: bool,
    expects_reply: bool,
}

/// The action for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepAliveStep {
    /// Nothing.
    Wait,
    /// Send a `Ping`.
    Probe,
    /// Give it up.
    Dead,
}

impl Liveness {
    /// A peer from which no reply is expected.
    pub fn new(keep_alive: Duration, now: Instant) -> Self {
        Self { keep_alive, since: now, probed: None, overdue: false, expects_reply: false }
    }

    /// Something came.
    pub fn heard(&mut self, now: Instant) {
        self.since = self.since.max(now);
        self.probed = None;
        self.overdue = false;
    }

    /// A reply is expected from now on, or no longer.
    pub fn set_expects_reply(&mut self, expects_reply: bool, now: Instant) {
        if expects_reply && !self.expects_reply {
            self.heard(now);
        }
        self.expects_reply = expects_reply;
    }

    /// Whether a reply is expected.
    pub fn expects_reply(&self) -> bool {
        self.expects_reply
    }

    /// The next step. A peer is not declared dead before it was probed, nor while its answer may lie here unread: a loop that was not
    /// turned has received nothing. So the second check after the time for an answer has passed counts.
    pub fn check(&mut self, now: Instant) -> KeepAliveStep {
        let silence = now - self.since;
        if !self.expects_reply || silence < self.keep_alive {
            return KeepAliveStep::Wait;
        }
        match self.probed {
            None => {
                self.probed = Some(now);
                KeepAliveStep::Probe
            }
            Some(at) if now - at >= self.keep_alive => {
                if std::mem::replace(&mut self.overdue, true) {
                    KeepAliveStep::Dead
                } else {
                    KeepAliveStep::Wait
                }
            }
            Some(_) => KeepAliveStep::Wait,
        }
    }
}

/// Watches a peer for which answers wait, while there is little memory for more.
#[derive(Clone, Copy, Debug, Default)]
pub struct Intake {
    /// The first look, since the peer last took something, at which there was little memory.
    since: Option<Instant>,
}

impl Intake {
    /// The peer took something.
    pub fn took(&mut self) {
        self.since = None;
    }

    /// Looks at the peer, again and again: whether it has taken nothing for [`TAKE_TIME_MAX`], while memory was short at
    /// each look.
    pub fn has_stopped(&mut self, short: bool, now: Instant) -> bool {
        if !short {
            self.since = None;
            return false;
        }
        now - *self.since.get_or_insert(now) >= TAKE_TIME_MAX
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::HEADER_BYTES;

    const IDENTITY: Identity = Identity { client: ClientId([1; 16]), number: 3, nonce: [2; 16] };

    fn terms(checksum: PayloadChecksum) -> Terms {
        Terms { checksum, bulk_lanes: 2 }
    }

    fn over_the_wire(mut header: Header) -> (Header, Kind) {
        header.seal(0);
        let bytes: [u8; HEADER_BYTES] = zerocopy::transmute!(header);
        Header::open(&bytes, 0).unwrap()
    }

    fn shake(client: PayloadChecksum, server: PayloadChecksum) -> Result<Agreed, CloseReason> {
        let (header, kind) = over_the_wire(hello(&IDENTITY, &terms(client), 0));
        let (hello, identity) = read_hello(&header, kind).unwrap();
        assert_eq!(identity, IDENTITY);
        let answer = match negotiate(&hello, &terms(server)) {
            Ok(features) => welcome(&hello, &Agreed { features, instance: 9 }),
            Err(code) => refuse(Kind::Refuse, code),
        };
        let (header, kind) = over_the_wire(answer);
        read_welcome(&header, kind, &IDENTITY, &terms(client))
    }

    /// A header as a program of version 1 sent it.
    fn golden(hex: &str) -> (Header, Kind) {
        let byte = |at: usize| u8::from_str_radix(hex.get(at * 2..at * 2 + 2).unwrap_or("00"), 16).unwrap();
        Header::open(&std::array::from_fn(byte), 0).unwrap()
    }

    #[test]
    fn version_1_of_the_wire_is_refused_by_name_on_either_side() {
        let hello = "5d0be9f10100000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
                     627977617946414201000100000001000000000000000000020202020202020202020202020202020101010101010101\
                     010101010101010103000000000000000000100000000000";
        let (header, kind) = golden(hello);
        let (hello, identity) = read_hello(&header, kind).unwrap();
        assert_eq!((identity, hello.version_max.get()), (IDENTITY, 1));
        assert_eq!(negotiate(&hello, &terms(PayloadChecksum::Off)), Err(RefuseCode::Version));
        let refused = refuse(Kind::Refuse, RefuseCode::Version);
        let body: Refuse = refused.body();
        assert_eq!((body.version_min.get(), body.version_max.get()), (2, 2), "it says what would do");

        let welcome = "304ab1680200000100000000000000000000000000000000000000000000000000000000000000000900000000000000\
                       627977617946414201000000004000000000100000000000020202020202020202020202020202020000000000000000";
        let (header, kind) = golden(welcome);
        let read = read_welcome(&header, kind, &IDENTITY, &terms(PayloadChecksum::Off));
        assert_eq!(read, Err(CloseReason::WeRefused(RefuseCode::Version)));
        let message = read.unwrap_err().to_string();
        assert_eq!(message, "refused: version (no version of byway's wire in common)");
    }

    #[test]
    fn checksums_are_agreed_on_or_refused() {
        use PayloadChecksum::{Off, Required, Wanted};
        for (client, server, agreed) in [
            (Off, Off, Some(false)),
            (Wanted, Off, Some(false)),
            (Off, Wanted, Some(false)),
            (Wanted, Wanted, Some(true)),
            (Required, Off, Some(true)),
            (Wanted, Required, Some(true)),
            (Off, Required, None),
        ] {
            let result = shake(client, server);
            match agreed {
                Some(checksum) => {
                    let result = result.unwrap();
                    assert_eq!(result.payload_checksum(), checksum, "{client:?} {server:?}");
                    assert_eq!(result.instance, 9);
                }
                None => assert_eq!(result, Err(CloseReason::Refused(RefuseCode::Feature))),
            }
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let (mut header, kind) = over_the_wire(hello(&IDENTITY, &terms(PayloadChecksum::Off), 0));
        header.body[8..12].copy_from_slice(&[9, 0, 9, 0]);
        let (hello, _) = read_hello(&header, kind).unwrap();
        assert_eq!(negotiate(&hello, &terms(PayloadChecksum::Off)), Err(RefuseCode::Version));
    }

    #[test]
    fn a_peer_that_takes_shorter_payloads_is_refused() {
        let (mut header, kind) = over_the_wire(hello(&IDENTITY, &terms(PayloadChecksum::Off), 0));
        header.body[64..68].copy_from_slice(&4096u32.to_le_bytes());
        let (mut hello, _) = read_hello(&header, kind).unwrap();
        assert_eq!(negotiate(&hello, &terms(PayloadChecksum::Off)), Err(RefuseCode::Feature));
        hello.payload_max.set(PAYLOAD_BYTES_MAX as u32);
        let agreed = Agreed { features: 0, instance: 9 };
        for at in [12, 16] {
            let (mut header, kind) = over_the_wire(welcome(&hello, &agreed));
            header.body[at..at + 4].copy_from_slice(&4096u32.to_le_bytes());
            let read = read_welcome(&header, kind, &IDENTITY, &terms(PayloadChecksum::Off));
            assert_eq!(read, Err(CloseReason::WeRefused(RefuseCode::Feature)));
        }
    }

    #[test]
    fn a_silent_debtor_is_probed_once_and_then_dead_and_others_may_be_silent() {
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let mut peer = Liveness::new(Duration::from_millis(100), at(0));
        assert_eq!(peer.check(at(100_000)), KeepAliveStep::Wait);
        peer.set_expects_reply(true, at(100_000));
        assert_eq!(peer.check(at(100_099)), KeepAliveStep::Wait);
        assert_eq!(peer.check(at(100_100)), KeepAliveStep::Probe);
        assert_eq!(peer.check(at(100_150)), KeepAliveStep::Wait);
        peer.heard(at(100_160));
        assert_eq!(peer.check(at(100_260)), KeepAliveStep::Probe);
        assert_eq!(peer.check(at(100_360)), KeepAliveStep::Wait, "what came before this look is not read yet");
        assert_eq!(peer.check(at(100_361)), KeepAliveStep::Dead);
        peer.set_expects_reply(false, at(100_361));
        assert_eq!(peer.check(at(200_000)), KeepAliveStep::Wait);
        // No check was made for long.
        peer.set_expects_reply(true, at(200_000));
        assert_eq!(peer.check(at(300_000)), KeepAliveStep::Probe);
        assert_eq!(peer.check(at(300_099)), KeepAliveStep::Wait);
        assert_eq!(peer.check(at(300_100)), KeepAliveStep::Wait);
        assert_eq!(peer.check(at(300_200)), KeepAliveStep::Dead);
        // Checks are rare, and the answer to each probe is received after the check.
        peer.set_expects_reply(false, at(400_000));
        peer.set_expects_reply(true, at(400_000));
        assert_eq!(peer.check(at(500_000)), KeepAliveStep::Probe);
        assert_eq!(peer.check(at(600_000)), KeepAliveStep::Wait);
        peer.heard(at(600_000));
        assert_eq!(peer.check(at(700_000)), KeepAliveStep::Probe);
    }

    #[test]
    fn who_takes_nothing_for_a_minute_while_memory_is_short_has_stopped() {
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let mut peer = Intake::default();
        assert!(!peer.has_stopped(true, at(1000)) && !peer.has_stopped(true, at(1059)));
        assert!(peer.has_stopped(true, at(1060)));
        peer.took();
        assert!(!peer.has_stopped(true, at(1061)) && !peer.has_stopped(true, at(1120)));
        assert!(!peer.has_stopped(false, at(1122)), "others may be slow while there is room");
        assert!(!peer.has_stopped(true, at(2000)) && !peer.has_stopped(true, at(2059)));
        assert!(peer.has_stopped(true, at(2060)));
    }

    proptest! {
        #[test]
        fn no_hello_makes_the_server_panic(body in proptest::collection::vec(any::<u8>(), 80)) {
            let mut header = Header::new(Kind::Hello);
            header.body.copy_from_slice(&body);
            if let Ok((hello, _)) = read_hello(&header, Kind::Hello) {
                let _ = negotiate(&hello, &terms(PayloadChecksum::Wanted));
            }
            header.body[..8].copy_from_slice(&MAGIC);
            let (hello, _) = read_hello(&header, Kind::Hello).unwrap();
            let _ = negotiate(&hello, &terms(PayloadChecksum::Required));
        }
    }
}
