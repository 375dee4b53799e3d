//! A connection over TLS: payloads are decrypted to where they belong, replies are read by us, so they lie in frames.

use byway_reactor::{ByteRange, Reactor, ReceiveBuffers, Scatter};
use byway_service::block::{BlockError, Engine, Payload, ReadFlags, Step, Tag};

use super::{CloseReason, Connection, Context, Expect, Incoming, Piece};

impl Connection {
    /// Whether TLS's own end is on its way, or was sent.
    pub(in crate::nbd::server) fn has_said_end(&self) -> bool {
        self.secure.as_ref().is_some_and(|secure| secure.has_said_end())
    }

    /// Decrypts some of what has come to where it is expected. False if there is nothing more, or no room for it.
    pub(super) fn decrypt(&mut self, buffers: &ReceiveBuffers) -> bool {
        let Some(secure) = &mut self.secure else { return false };
        if self.draining.is_some() || self.closing.is_some() || self.receiving || self.stalled {
            return false;
        }
        let went = match &mut self.expect {
            Expect::Parts(_) => return false,
            Expect::Payload(Incoming { piece: Some(Piece { frame: Some(frame), filled, len }), .. }) => {
                let went = secure.decrypt(&mut frame.bytes_mut()[*filled..*len]);
                *filled += went.unwrap_or(0);
                Some(went)
            }
            _ => secure.decrypt_to(&mut self.input, buffers),
        };
        match went {
            None => self.stalled = true,
            Some(Ok(0)) if secure.has_ended() => self.at_end_of_stream(),
            Some(Ok(n)) => return n > 0,
            Some(Err(error)) => self.closing = Some(CloseReason::Tls(error)),
        }
        false
    }

    /// The stream ended: by close_notify, or an attacker may have cut it.
    pub(in crate::nbd::server) fn hung_up(&mut self) {
        match self.secure.as_mut().map_or(Ok(()), |secure| secure.hang_up()) {
            Ok(()) => self.at_end_of_stream(),
            Err(error) => {
                self.draining.get_or_insert(CloseReason::Tls(error));
            }
        }
    }

    /// When all has been answered and nothing more is read, says so by TLS.
    pub(super) fn say_end(&mut self, context: &mut Context<'_>) {
        if self.draining.is_some()
            && self.is_idle(context.pending)
            && let Some(secure) = &mut self.secure
        {
            secure.say_end();
            self.send(context.reactor);
        }
    }

    /// Reads, into memory that the way to the client can use: what is encrypted must be read by us, and not change. Of `flags`,
    /// `private` and `device` are set here.
    pub(super) fn read(
        &self,
        reactor: &mut Reactor,
        engine: &mut Engine,
        range: ByteRange,
        flags: ReadFlags,
        tag: Tag,
    ) -> Result<Step<Payload>, BlockError> {
        let private = self.secure.is_some();
        let flags = ReadFlags { private, device: !private, ..flags };
        engine.read(reactor, self.volume, range, flags, tag)
    }

    pub(super) fn receive_ciphertext(&mut self, reactor: &mut Reactor) {
        let lent = self.secure.as_mut().and_then(|secure| secure.lend(reactor.receive_buffers()));
        let Some((frame, at)) = lent else {
            self.stalled = true;
            return;
        };
        let room = frame.len() - at;
        self.submit_receive(reactor, Scatter::one(frame, at, room), 1);
    }
}
