//! Lanes over TLS: the same messages, received as ciphertext and taken from the plaintext.
//!
//! Decryption needs a buffer, so a payload is copied once more here than on a plain lane. A stream that ends between two
//! messages is an end like any other, with or without close_notify: the end of a stream never completes a session.

use byway_reactor::limits::RECEIVE_MESSAGE_BYTES;
use byway_reactor::{Frame, Gather, Need, Reactor};

use super::lane::LaneId;
use super::lane::{PausedRecv, Phase, Placing};
use super::receive::{HEADER_FRAME_BYTES, check_bulk};
use super::{Fabric, Handler};
use crate::session::{self, CloseReason};
use crate::slots::SessionId;
use crate::tls::{PeerIdentity, TlsError, TlsStream};
use crate::windows::WindowKey;
use crate::wire::{HEADER_BYTES, Header};

/// What a busy lane receives ciphertext into: two of TLS's longest records. An idle one has [`HEADER_FRAME_BYTES`].
const CIPHERTEXT_FRAME_BYTES: usize = RECEIVE_MESSAGE_BYTES;

/// The TLS of a lane.
#[derive(Debug)]
pub(super) struct Secure {
    stream: TlsStream,
    /// Plaintext that is no whole message yet.
    plaintext: Vec<u8>,
    /// What a bulk lane fills: the window's frame, the next byte, the bytes left.
    pub(super) target: Option<(Frame, usize, usize)>,
}

impl Secure {
    pub(super) fn new(stream: TlsStream) -> Self {
        Self { stream, plaintext: Vec::new(), target: None }
    }

    /// The TLS alone, for a lane that goes to another loop: nothing but its `Hello` has come.
    pub(super) fn into_stream(self) -> TlsStream {
        self.stream
    }

    /// Encrypts a portion of what shall be sent; `last`: if nothing is left then, nothing more will come.
    pub(super) fn seal(&mut self, pending: &mut Gather, sealed: &mut Gather, last: bool) {
        self.stream.seal(pending, sealed);
        if last && pending.is_empty() && !self.stream.is_handshaking() {
            self.stream.push_end();
            self.stream.seal(pending, sealed);
        }
    }

    /// Whether a part of a message has come.
    pub(super) fn is_midway(&self) -> bool {
        !self.plaintext.is_empty()
    }

    /// The peer's identity.
    pub(super) fn peer(&self) -> PeerIdentity {
        self.stream.peer()
    }
}

impl Fabric {
    /// Starts to receive ciphertext on a new lane. False without frames.
    pub(super) fn receive_ciphertext(&mut self, reactor: &mut Reactor, slot: LaneId) -> bool {
        let Some(lane) = self.lanes.get_mut(slot) else { return false };
        lane.frame = reactor.receive_buffers().alloc(HEADER_FRAME_BYTES);
        let has_frame = lane.frame.is_some();
        self.receive_ciphertext_again(reactor, slot);
        has_frame
    }

    pub(super) fn receive_ciphertext_again(&mut self, reactor: &mut Reactor, slot: LaneId) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        lane.filled = 0;
        let len = lane.frame.as_ref().map_or(0, Frame::len);
        self.receive_own(reactor, slot, len, 1);
    }

    /// Ciphertext has come: decrypts it and takes what messages it holds.
    pub(super) fn ciphertext_came<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        n: usize,
        handler: &mut H,
    ) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        let (Some(frame), Some(mut secure)) = (lane.frame.take(), lane.secure.take()) else { return };
        let foreign = Some(session::foreign(&frame.bytes()[..n]))
            .filter(|reason| *reason == CloseReason::SpeaksNbd && lane.phase == Phase::AwaitWelcome);
        let fed = secure.stream.feed(&frame.bytes()[..n], &mut secure.plaintext);
        let plaintext = std::mem::take(&mut secure.plaintext);
        let wants_send = secure.stream.wants_send();
        // All of it has been used up, so the next buffer may be shorter, too.
        let (held, buffers) = (frame.len(), reactor.receive_buffers());
        let wanted = if n == held { CIPHERTEXT_FRAME_BYTES } else { held };
        let next_len = buffers.len_for(Need { held, wanted, ..Need::default() });
        let next = if next_len == held { None } else { buffers.alloc(next_len) };
        lane.frame = next.or(Some(frame));
        let ended = secure.stream.has_ended();
        lane.secure = Some(secure);
        if let Err(error) = fed {
            let reason = foreign.filter(|_| error == TlsError::NotTls).unwrap_or(CloseReason::Tls(error));
            return self.tls_failed(reactor, slot, reason);
        }
        // A lane that goes to another loop takes what TLS wants to send along: a send in flight would keep it here.
        let taken = self.take_plaintext(reactor, slot, &plaintext, handler);
        let taken = match taken {
            Ok(taken) => taken,
            Err(reason) => return self.lane_failed(reactor, slot, reason),
        };
        if ended {
            return self.stream_ended(reactor, slot, taken < plaintext.len());
        }
        if wants_send {
            self.lanes.start_send(reactor, slot, self.clock);
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase == Phase::Closing {
            return self.forget_lane_if_done(slot);
        }
        if let Some(secure) = &mut lane.secure {
            let mut plaintext = plaintext;
            plaintext.drain(..taken);
            secure.plaintext = plaintext;
        }
        let session = lane.session;
        if session.is_some_and(|session| self.is_held(session)) {
            if let Some(lane) = self.lanes.get_mut(slot) {
                (lane.paused, lane.paused_at) = (Some(PausedRecv::Messages), self.clock);
            }
            return;
        }
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        // A fenced lane and one that is being refused say no more.
        if lane.phase != Phase::Fenced && lane.close_when_sent.is_none() && !lane.receiving {
            self.receive_ciphertext_again(reactor, slot);
        }
    }

    /// TLS failed: the peer is told why if that may help it, then the lane ends.
    fn tls_failed(&mut self, reactor: &mut Reactor, slot: LaneId, reason: CloseReason) {
        let Some(lane) = self.lanes.get_mut(slot) else { return };
        if lane.phase == Phase::Up {
            return self.lane_failed(reactor, slot, reason);
        }
        lane.close_when_sent = Some(reason);
        self.lanes.start_send(reactor, slot, self.clock);
        if self.lanes.get(slot).is_some_and(|lane| !lane.is_busy()) {
            self.lane_failed(reactor, slot, reason);
        }
    }

    /// The peer has said by TLS that it will send no more.
    fn stream_ended(&mut self, reactor: &mut Reactor, slot: LaneId, midway: bool) {
        let Some(lane) = self.lanes.get(slot) else { return };
        let midway = midway || lane.placing.is_some();
        self.lane_failed(reactor, slot, if midway { CloseReason::Truncated } else { CloseReason::PeerClosed });
    }

    /// Makes a lane whose first bytes, which lie in its frame, are none of ours a TLS lane, if they may be TLS.
    pub(super) fn try_tls<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        n: usize,
        handler: &mut H,
    ) -> Result<bool, CloseReason> {
        let Some(lane) = self.lanes.get_mut(slot) else { return Ok(false) };
        let (Some(server), Some(first)) = (lane.tls_offered.take(), lane.frame.as_ref()) else { return Ok(false) };
        if first.bytes().first_chunk::<HEADER_BYTES>().is_some_and(|bytes| Header::open(bytes, 0).is_ok()) {
            return Ok(false);
        }
        let stream = server.accept().map_err(CloseReason::Tls)?;
        lane.secure = Some(Box::new(Secure::new(stream)));
        self.ciphertext_came(reactor, slot, n, handler);
        Ok(true)
    }

    /// Takes all that is whole from the front of `bytes`; gives how much.
    fn take_plaintext<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        bytes: &[u8],
        handler: &mut H,
    ) -> Result<usize, CloseReason> {
        let mut at = 0;
        loop {
            let Some(lane) = self.lanes.get(slot) else { return Ok(at) };
            let rest = &bytes[at..];
            match (lane.phase, lane.session, lane.number) {
                (Phase::AwaitHello | Phase::AwaitWelcome, _, _) if rest.len() >= HEADER_BYTES => {
                    self.handshake_message(reactor, slot, rest)?;
                    at += HEADER_BYTES;
                    if self.lanes.get(slot).is_some_and(|lane| lane.close_when_sent.is_some()) {
                        return Ok(bytes.len());
                    }
                }
                (Phase::Up, Some(session), 0) => {
                    let (taken, _) = self.take_messages(reactor, slot, session, rest, handler)?;
                    return Ok(at + taken);
                }
                (Phase::Up, Some(session), _) => match self.take_bulk(reactor, slot, session, rest, handler)? {
                    0 => return Ok(at),
                    taken => at += taken,
                },
                _ => return Ok(at),
            }
        }
    }

    /// Takes a bulk lane's next header, or the next bytes of its payload; 0 if more must come first.
    fn take_bulk<H: Handler>(
        &mut self,
        reactor: &mut Reactor,
        slot: LaneId,
        session: SessionId,
        bytes: &[u8],
        handler: &mut H,
    ) -> Result<usize, CloseReason> {
        let Some(lane) = self.lanes.get_mut(slot) else { return Ok(0) };
        match &mut lane.placing {
            Some(Placing::Drain(left)) => {
                let taken = bytes.len().min(*left);
                *left -= taken;
                if *left == 0 {
                    lane.placing = None;
                }
                Ok(taken)
            }
            Some(Placing::Window(header)) => {
                let header = *header;
                let Some((frame, start, left)) = lane.secure.as_mut().and_then(|secure| secure.target.as_mut()) else {
                    return Err(CloseReason::Closed);
                };
                let taken = bytes.len().min(*left);
                frame.write(*start, &bytes[..taken]);
                *start += taken;
                *left -= taken;
                if *left == 0 {
                    lane.placing = None;
                    let target = lane.secure.as_mut().and_then(|secure| secure.target.take());
                    let Some((frame, _, _)) = target else { return Err(CloseReason::Closed) };
                    self.payload_placed(reactor, session, &header, frame, handler)?;
                }
                Ok(taken)
            }
            None if bytes.len() < HEADER_BYTES => Ok(0),
            None => {
                let (header, kind) = self.open_header(slot, bytes)?;
                check_bulk(&header, kind)?;
                let (key, len) = (WindowKey(header.window.get()), header.payload_len());
                let lent = self.windows.lend(session, key, header.window_offset.get(), len);
                if let Err(error) = lent {
                    self.nack(session, &header, error);
                }
                if let Some(lane) = self.lanes.get_mut(slot) {
                    lane.placing = Some(if lent.is_ok() { Placing::Window(header) } else { Placing::Drain(len) });
                    if let (Some(secure), Ok((frame, start))) = (&mut lane.secure, lent) {
                        secure.target = Some((frame, start, len));
                    }
                }
                Ok(HEADER_BYTES)
            }
        }
    }
}
