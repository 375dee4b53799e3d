//! Writes: small ones from the input, large ones piece by piece as their payload comes, refused ones drained.

use byway_reactor::{FrameRange, Op, Reactor, Scatter};
use byway_service::block::{Begun, Outcome, Step, WriteFlags};
use slab::Slab;

use super::{Answer, Connection, Context, Expect, Incoming, Pending, Piece, Progress, TAG_RECEIVE, tag_of};
use crate::limits::{PAYLOAD_SHARE_MAX, SMALL_WRITE_BYTES_MAX};
use crate::nbd::flags::CommandFlags;
use crate::nbd::request::Request;

impl Connection {
    pub(super) fn start_write(&mut self, context: &mut Context<'_>, request: Request, header_bytes: usize) -> Progress {
        let len = request.length as usize;
        if !self.may_change(context) {
            return Progress::Waits;
        }
        if context.engine.is_throttled(context.reactor, self.volume) {
            self.stalled = true;
            return Progress::Waits;
        }
        if len > SMALL_WRITE_BYTES_MAX {
            self.input.consume(header_bytes);
            self.input.want_little();
            let pending = Pending { connection: self.index, request, left: 0, receiving: true, error: None };
            let pending = self.note_pending(context, pending);
            let incoming = Incoming { pending, offset: request.offset, left: request.length, piece: None };
            self.expect = Expect::Payload(incoming);
            return Progress::Moved;
        }
        let whole = header_bytes + len;
        self.input.want(whole);
        if self.input.bytes().len() < whole {
            return Progress::NeedsInput;
        }
        let flags = WriteFlags { durable: request.flags.has(CommandFlags::FUA) };
        let tag = tag_of(context.pending.vacant_key());
        let payload = &self.input.bytes()[header_bytes..whole];
        let step = context.engine.write_small(context.reactor, self.volume, request.offset, payload, flags, tag);
        match step {
            Ok(Step::Busy | Step::InParts) => {
                self.stalled = true;
                return Progress::Waits;
            }
            Ok(Step::Now(())) => self.reply(&request, Outcome::Unit(Ok(()))),
            Ok(Step::Later) => {
                self.note_pending(
                    context,
                    Pending { connection: self.index, request, left: 1, receiving: false, error: None },
                );
            }
            Err(error) => self.fail(&request, error),
        }
        self.input.consume(whole);
        Progress::Moved
    }

    /// Moves a large payload on: takes what the input has of it, gives whole pieces to the store.
    pub(super) fn step_payload(&mut self, context: &mut Context<'_>) -> Progress {
        if !self.may_change(context) {
            return Progress::Waits;
        }
        let Expect::Payload(incoming) = &mut self.expect else { return Progress::Waits };
        if incoming.piece.is_none() {
            let left = usize::try_from(incoming.left).unwrap_or(usize::MAX);
            let plain = self.secure.is_none();
            if plain && self.input.bytes().is_empty() && !context.pending[incoming.pending].durable() {
                let Context { reactor, engine, .. } = context;
                let n = engine.receive_into(reactor, self.volume, self.socket, incoming.offset, left);
                if n > 0 {
                    incoming.offset += n as u64;
                    incoming.left -= n as u64;
                    if incoming.left == 0 {
                        self.end_payload(context);
                    }
                    return Progress::Moved;
                }
            }
            let len = if plain {
                context.engine.write_piece_len(self.volume, incoming.offset, left)
            } else {
                context.engine.write_run_len(self.volume, incoming.offset, left)
            };
            let Context { reactor, engine, payload_bytes, .. } = context;
            let len = if *payload_bytes + len > reactor.frames().bytes() / PAYLOAD_SHARE_MAX {
                // Many clients are sending: a frame only for bytes that have arrived, so that a client that pauses holds none.
                let here = self.input.bytes().len() + if plain { reactor.readable_bytes(self.socket) } else { 0 };
                let piece = engine.piece_bytes_min(self.volume);
                if here >= len { len } else { here / piece * piece }
            } else {
                len
            };
            if len == 0 {
                self.input.want_whole(engine.piece_bytes_min(self.volume));
                return Progress::NeedsInput;
            }
            // With nothing at the stores that will end, small pieces must do: the pool may be cut up.
            let least = if engine.in_flight() > 0 { len } else { engine.piece_bytes_min(self.volume) };
            // What lies in our own input already we would have to put there ourselves.
            let by_kernel = plain && self.input.bytes().is_empty();
            let frame = if by_kernel {
                engine.frame_for_write(reactor, self.volume, incoming.offset, len, least)
            } else {
                reactor.frames().alloc_largest(len, least)
            };
            let Some(frame) = frame else {
                self.stalled = true;
                return Progress::Waits;
            };
            let len = frame.len();
            incoming.left -= len as u64;
            incoming.piece = Some(Piece { frame: Some(frame), filled: 0, len });
        }
        let Some(piece) = &mut incoming.piece else { return Progress::Waits };
        let Some(frame) = &mut piece.frame else { return Progress::Waits };
        let n = self.input.bytes().len().min(piece.len - piece.filled);
        frame.write(piece.filled, &self.input.bytes()[..n]);
        piece.filled += n;
        self.input.consume(n);
        if piece.filled < piece.len {
            return Progress::NeedsInput;
        }
        self.store_piece(context);
        Progress::Moved
    }

    /// Gives the piece, all of which is here, to the store; after the last, ends the receiving of the payload.
    pub(super) fn store_piece(&mut self, context: &mut Context<'_>) {
        let Expect::Payload(incoming) = &mut self.expect else { return };
        let Some(Piece { frame: Some(frame), len, .. }) = incoming.piece.take() else { return };
        let id = incoming.pending;
        let at = incoming.offset;
        incoming.offset += len as u64;
        let last = incoming.left == 0;
        let pending = &mut context.pending[id];
        let flags = WriteFlags { durable: pending.durable() };
        match context.engine.write(context.reactor, self.volume, at, FrameRange::new(frame, 0, len), flags, tag_of(id))
        {
            Ok(Begun::Later) => pending.left += 1,
            Ok(Begun::Now) => {}
            Err(error) => {
                pending.error.get_or_insert(error);
            }
        }
        if last || pending.error.is_some() {
            self.end_payload(context);
        }
    }

    /// All of a payload is here, or the rest of it is not wanted.
    pub(super) fn end_payload(&mut self, context: &mut Context<'_>) {
        let Expect::Payload(Incoming { pending: id, left, .. }) = self.expect else { return };
        self.expect = Expect::Drain { left, then: Answer::Pending(id) };
        self.step_drain(context);
    }

    pub(super) fn step_drain(&mut self, context: &mut Context<'_>) -> Progress {
        let Expect::Drain { left, then } = &mut self.expect else { return Progress::Waits };
        let n = (*left).min(self.input.bytes().len() as u64);
        self.input.consume(n as usize);
        *left -= n;
        if *left > 0 {
            return Progress::NeedsInput;
        }
        let then = *then;
        self.expect = Expect::Header;
        match then {
            Answer::Refuse(tag, violation) => {
                self.out.push_head_with(|out| self.replies.error(out, tag, violation.errno, violation.reason));
            }
            Answer::Pending(id) => {
                context.pending[id].receiving = false;
                self.finish_if_done(context.engine, context.pending, id);
            }
        }
        Progress::Moved
    }

    /// The connection is gone: forgets the write whose payload was being received, unless pieces of it are at the store.
    pub(in crate::nbd::server) fn abandon(&mut self, pending: &mut Slab<Pending>) {
        let expected = std::mem::replace(&mut self.expect, Expect::Header);
        let (Expect::Payload(Incoming { pending: id, .. }) | Expect::Drain { then: Answer::Pending(id), .. }) =
            expected
        else {
            return;
        };
        pending[id].receiving = false;
        if pending[id].left == 0 {
            self.forget_pending(pending, id);
        }
    }

    /// Receives: the rest of a payload piece into its frame, with what follows it into the input; else the input alone.
    pub(super) fn receive(&mut self, reactor: &mut Reactor) {
        if self.secure.is_some() {
            return self.receive_ciphertext(reactor);
        }
        let mut into = Scatter::new();
        let mut min = 1;
        let mut ends_payload = true;
        if let Expect::Payload(Incoming { piece: Some(piece), left, .. }) = &mut self.expect
            && let Some(frame) = piece.frame.take()
        {
            min = piece.len - piece.filled;
            ends_payload = *left == 0;
            into.push(frame, piece.filled, min);
        }
        if ends_payload {
            let Some((frame, at)) = self.input.lend(reactor.receive_buffers()) else {
                self.stalled = into.is_empty();
                if into.is_empty() {
                    return;
                }
                return self.submit_receive(reactor, into, min);
            };
            let room = frame.len() - at;
            into.push(frame, at, room);
        }
        self.submit_receive(reactor, into, min);
    }

    pub(super) fn submit_receive(&mut self, reactor: &mut Reactor, into: Scatter, min: usize) {
        self.receiving = true;
        reactor.submit(Op::Recv { socket: self.socket, into, min }, self.token.with_tag(TAG_RECEIVE));
    }
}
