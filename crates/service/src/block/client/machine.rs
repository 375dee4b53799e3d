//! Replay of a client's writes when servers die: which requests may be sent now, and which writes must be repeated.
//!
//! Every write that was acknowledged and not flushed is kept. It may be lost when the session's server is not the process
//! that acknowledged it, or has since opened other files under the volume's name. Then all such writes are repeated, in
//! order, before anything else. A request that was not answered when its connection broke is repeated in any case.
//!
//! Three rules make that safe:
//! - Changes that overlap are never in flight together, so they have an order, and a repeated one cannot overtake another.
//! - A flush covers the writes that were acknowledged when it was sent, and counts only if the server process that
//!   acknowledged them is the one that flushed, over the same open files. The session guarantees that: another process is
//!   another session, and a server ends the sessions of a volume that it replaces.
//! - A durable change removes the range that it covers from the older kept writes: those must never overwrite it, not even
//!   until the change itself would be repeated.
//!
//! The machine uses no socket and no clock. `R` is memory that a read fills, `W` (cheap to clone) the payload of a write.

mod log;
mod pause;
mod room;

use std::collections::VecDeque;
use std::time::Duration;

use byway_fabric::tls::{AlertDescription, TlsError};
use byway_fabric::{Slot, Slots};
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{ByteRange, Instant};

use self::log::{Name, Unflushed};
use self::pause::Pause;
use self::room::Room;
use super::super::engine::ZeroFlags;
use super::super::wire::CallError;
use super::request::{Answer, Bounds, Done, Request, VolumeError};

/// Where acknowledged changes are until they are flushed. In another epoch they may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerEpoch {
    /// The server process.
    pub(super) instance: u64,
    /// The files that it has open for the volume.
    pub(super) store: u64,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write { durable: bool },
    Flush,
    Trim { durable: bool },
    Zero(ZeroFlags),
    Extents,
    Prefetch,
}

impl Kind {
    fn changes(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Trim { .. } | Self::Zero(_))
    }

    fn durable(self) -> bool {
        match self {
            Self::Write { durable } | Self::Trim { durable } => durable,
            Self::Zero(flags) => flags.durable,
            _ => false,
        }
    }
}

/// What the name of an operation is a name of: see [`OpId`].
pub(super) enum OperationKind {}

/// Names an operation to be sent.
pub(super) type OpId = Slot<OperationKind>;

pub(super) struct Operation<R, W> {
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) into: Option<R>,
    pub(super) from: Option<W>,
    /// Where in `from` the payload starts.
    pub(super) start: usize,
    purpose: Purpose,
    sent: bool,
    /// It was sent, now or in a session that ended.
    attempted: bool,
    /// Its user no longer wants it: it is not sent again.
    cancelled: bool,
    /// Its place in the order of submission.
    order: u64,
}

impl<R, W> Operation<R, W> {
    fn range(&self) -> ByteRange {
        ByteRange::new(self.offset, self.len)
    }

    /// Whether a program asked for it; else the client does it by itself.
    pub(super) fn is_users(&self) -> bool {
        matches!(self.purpose, Purpose::User(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    User(u64),
    /// Sends the log's entry of that name again.
    Replay(Name),
    /// Makes room in the log.
    OwnFlush,
}

/// A change in flight, of the bytes from `start` to `end`.
struct SentChange {
    start: u64,
    end: u64,
    id: OpId,
}

/// See the module.
pub(super) struct Machine<R, W> {
    bounds: Bounds,
    operations: Slots<Operation<R, W>, OperationKind>,
    queue: VecDeque<OpId>,
    next_order: u64,
    /// Changes in flight.
    changing: Vec<SentChange>,
    log: VecDeque<Unflushed<W>>,
    next_sequence: u64,
    log_bytes: usize,
    /// No entry of the log in front of this index is to be sent again. Each replay that looked at all of those that went
    /// before would be quadratic: of trims, hundreds of thousands may be kept.
    replay_from: usize,
    /// Entries that were looked at to send some again.
    #[cfg(test)]
    steps: std::cell::Cell<u64>,
    /// Of each flush in flight: the first log entry that it does not cover.
    flushing: Vec<(OpId, u64)>,
    own_flush: bool,
    /// Whether flushes make room in the log.
    room: Room,
    epoch: Option<ServerEpoch>,
    /// What the volume's bytes lie in; 0 if that is not known.
    backing_id: u64,
    /// Why the server would not open the volume again, when it was asked last.
    refusal: Option<VolumeError>,
    connected: bool,
    replaying: bool,
    replays_in_flight: usize,
    volatile: bool,
    lost_since: Option<Instant>,
    pause: Pause,
    failed: Option<VolumeError>,
    done: Vec<Done<R>>,
    replayed: u64,
}

impl<R, W: Clone> Machine<R, W> {
    pub(super) fn new(bounds: Bounds, now: Instant) -> Self {
        Self {
            bounds,
            operations: Slots::default(),
            queue: VecDeque::new(),
            next_order: 0,
            changing: Vec::new(),
            log: VecDeque::new(),
            next_sequence: 0,
            log_bytes: 0,
            replay_from: 0,
            #[cfg(test)]
            steps: std::cell::Cell::default(),
            flushing: Vec::new(),
            own_flush: false,
            room: Room::ByFlush,
            epoch: None,
            backing_id: 0,
            refusal: None,
            connected: false,
            replaying: false,
            replays_in_flight: 0,
            volatile: false,
            lost_since: Some(now),
            pause: Pause::default(),
            failed: None,
            done: Vec::new(),
            replayed: 0,
        }
    }

    /// Takes a request.
    ///
    /// # Errors
    /// The request, when too many are waiting.
    pub(super) fn submit(&mut self, request: Request<R, W>, tag: u64) -> Result<(), Request<R, W>> {
        if self.operations.len() >= self.bounds.requests_max {
            return Err(request);
        }
        let (kind, offset, len, into, from) = match request {
            Request::Read { offset, len, into } => (Kind::Read, offset, len as u64, Some(into), None),
            Request::Write { offset, len, from, durable } => {
                (Kind::Write { durable }, offset, len as u64, None, Some(from))
            }
            Request::Flush => (Kind::Flush, 0, 0, None, None),
            Request::Trim { offset, len, durable } => (Kind::Trim { durable }, offset, len, None, None),
            Request::Zero { offset, len, flags } => (Kind::Zero(flags), offset, len, None, None),
            Request::Extents { offset, len } => (Kind::Extents, offset, len, None, None),
            Request::Prefetch { offset, len } => (Kind::Prefetch, offset, len, None, None),
        };
        if let Some(error) = self.failed {
            self.done.push(Done { tag, result: Err(error), buffer: into });
            return Ok(());
        }
        let id = self.add(kind, ByteRange::new(offset, len), into, from, Purpose::User(tag));
        self.queue.push_back(id);
        Ok(())
    }

    fn add(
        &mut self,
        kind: Kind,
        ByteRange { offset, len }: ByteRange,
        into: Option<R>,
        from: Option<W>,
        purpose: Purpose,
    ) -> OpId {
        self.next_order += 1;
        let order = self.next_order;
        self.operations.insert(Operation {
            kind,
            offset,
            len,
            into,
            from,
            start: 0,
            purpose,
            sent: false,
            attempted: false,
            cancelled: false,
            order,
        })
    }

    /// Ends a request at once if it is not at a server; else as soon as its session ends, or as its server answers. False
    /// if there is none with that tag.
    pub(super) fn cancel(&mut self, tag: u64) -> bool {
        let of_user = |operation: &Operation<R, W>| operation.purpose == Purpose::User(tag);
        let Some(id) = self.operations.iter().find(|(_, operation)| of_user(operation)).map(|(id, _)| id) else {
            return false;
        };
        if let Some(operation) = self.operations.get_mut(id).filter(|operation| operation.sent) {
            operation.cancelled = true;
        } else {
            self.queue.retain(|queued| *queued != id);
            self.end_cancelled(id);
        }
        true
    }

    fn end_cancelled(&mut self, id: OpId) {
        if let Some(operation) = self.operations.remove(id)
            && let Purpose::User(tag) = operation.purpose
        {
            let result = Err(VolumeError::Cancelled { sent: operation.attempted });
            self.done.push(Done { tag, result, buffer: operation.into });
        }
    }

    /// The user's requests that have not been answered, and answers that have not been taken.
    pub(super) fn pending(&self) -> usize {
        self.operations.len() - self.replays_in_flight - usize::from(self.own_flush) + self.done.len()
    }

    /// Operations that have no answer: sent, or to be sent.
    pub(super) fn unanswered(&self) -> usize {
        self.operations.len()
    }

    /// Why everything fails, if it does.
    pub(super) fn failed(&self) -> Option<VolumeError> {
        self.failed
    }

    /// Changes that were sent again so far.
    pub(super) fn replayed(&self) -> u64 {
        self.replayed
    }

    /// Whether the server that there is has every acknowledged change.
    pub(super) fn settled(&self) -> bool {
        self.connected && !self.replaying && self.replays_in_flight == 0
    }

    /// Bytes of acknowledged changes that are kept.
    pub(super) fn unflushed_bytes(&self) -> usize {
        self.log_bytes
    }

    pub(super) fn operation(&mut self, id: OpId) -> Option<&mut Operation<R, W>> {
        self.operations.get_mut(id)
    }

    /// A session is up and the volume open in it, over a backing_id by that name (0 if its server does not know).
    pub(super) fn connected(&mut self, epoch: ServerEpoch, backing_id: u64, volatile: bool) {
        if self.failed.is_some() {
            return;
        }
        let other = self.epoch.is_some_and(|old| old != epoch);
        if other && (self.volatile || volatile) {
            return self.fail(VolumeError::VolatileLost);
        }
        // What was kept belongs to the old backing_id alone.
        if self.backing_id != 0 && backing_id != 0 && backing_id != self.backing_id {
            return self.fail(VolumeError::Replaced);
        }
        if other {
            self.room = Room::ByFlush;
        }
        self.backing_id = backing_id;
        self.refusal = None;
        self.volatile = volatile;
        self.epoch = Some(epoch);
        self.connected = true;
        self.lost_since = None;
        self.begin_replay(epoch);
    }

    /// The session ended, and everything that was in flight with it.
    pub(super) fn disconnected(&mut self, now: Instant) {
        self.connected = false;
        self.pause = Pause::default();
        self.lost_since.get_or_insert(now);
        self.changing.clear();
        self.flushing.clear();
        self.own_flush = false;
        self.replaying = false;
        self.replays_in_flight = 0;
        self.replay_from = 0;
        self.log.iter_mut().for_each(|entry| entry.sent = false);
        let mut again: Vec<(u64, OpId)> = Vec::new();
        let (mut dropped, mut cancelled) = (Vec::new(), Vec::new());
        for (id, operation) in self.operations.iter_mut().filter(|(_, operation)| operation.sent) {
            operation.sent = false;
            match operation.purpose {
                Purpose::User(_) if seeded::is(Bug::RequestNotResent) => {}
                Purpose::User(_) if operation.cancelled => cancelled.push(id),
                Purpose::User(tag) => {
                    if seeded::is(Bug::AnsweredAndResent) {
                        self.done.push(Done { tag, result: Err(VolumeError::Closed), buffer: None });
                    }
                    again.push((operation.order, id));
                }
                Purpose::Replay(_) | Purpose::OwnFlush => dropped.push(id),
            }
        }
        for id in dropped {
            self.operations.remove(id);
        }
        for id in cancelled {
            self.end_cancelled(id);
        }
        again.sort_unstable();
        for (_, id) in again.into_iter().rev() {
            self.queue.push_front(id);
        }
        if self.failed.is_some() {
            self.answer_queued();
        }
    }

    /// Fails everything from now on; what is in flight fails when its session has ended.
    pub(super) fn fail(&mut self, error: VolumeError) {
        self.failed.get_or_insert(error);
        self.connected = false;
        self.log.clear();
        self.replay_from = 0;
        self.log_bytes = 0;
        self.answer_queued();
    }

    fn answer_queued(&mut self) {
        let error = self.failed.unwrap_or(VolumeError::Closed);
        for id in std::mem::take(&mut self.queue) {
            if let Some(operation) = self.operations.remove(id)
                && let Purpose::User(tag) = operation.purpose
            {
                self.done.push(Done { tag, result: Err(error), buffer: operation.into });
            }
        }
    }

    /// When the server counts as lost; `None` while there is a session.
    pub(super) fn lost_at(&self) -> Option<Instant> {
        Some(self.lost_since? + self.bounds.lost_after)
    }

    /// A server that cannot take the session yet says so: it is not lost.
    pub(super) fn heard_from_server(&mut self, now: Instant) {
        if let Some(since) = &mut self.lost_since {
            *since = now;
        }
    }

    /// Looks at the time: without a server for too long, everything fails.
    pub(super) fn tick(&mut self, now: Instant) {
        if let Some(since) = self.lost_since
            && now - since >= self.bounds.lost_after
            && self.failed.is_none()
        {
            let lost = VolumeError::Lost(self.bounds.lost_after);
            self.fail(self.refusal.unwrap_or(lost));
        }
    }

    /// The server would not open the volume. Before it ever did, that is its user's to judge; later, waiting may help
    /// against some refusals, as long as it would against silence.
    pub(super) fn refused(&mut self, error: CallError) {
        if self.epoch.is_none() || self.failed.is_some() {
            return;
        }
        self.refusal = Some(VolumeError::Refused(error));
        if error == CallError::TlsRequired {
            self.fail(VolumeError::Refused(error));
        }
    }

    /// TLS with the server has failed. A revoked certificate stays revoked; other reasons may be mended while the client waits, as
    /// long as it would against silence.
    pub(super) fn tls_failed(&mut self, error: TlsError) {
        if self.epoch.is_none() || self.failed.is_some() {
            return;
        }
        match error {
            TlsError::Refused(AlertDescription::CertificateRevoked) => self.fail(VolumeError::Tls(error)),
            // So ends a connection to a server that is killed.
            TlsError::Cut | TlsError::Broken | TlsError::GaveUp => {}
            _ => self.refusal = Some(VolumeError::Tls(error)),
        }
    }

    fn overlaps_change(&self, ByteRange { offset, len }: ByteRange) -> bool {
        let end = offset.saturating_add(len);
        let overlaps = |change: &SentChange| change.start < end && offset < change.end;
        !seeded::is(Bug::OverlappingWrites) && self.changing.iter().any(overlaps)
    }

    /// When [`Machine::next`] is to be asked again: the server was busy, or changes wait for room in the log.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        let pause = self.pause.until().filter(|until| now < *until);
        pause.or_else(|| self.looks_for_room_at(now)).filter(|_| self.connected)
    }

    /// The next operation that may be sent now; the caller sends it.
    pub(super) fn next(&mut self, now: Instant) -> Option<OpId> {
        if !self.connected || self.pause.is_on(now) {
            return None;
        }
        if self.replaying
            && let Some(id) = self.next_replay()
        {
            return Some(id);
        }
        if self.replaying {
            return None;
        }
        if self.replays_in_flight > 0 && !seeded::is(Bug::ReplayNotAwaited) {
            return None;
        }
        if self.wants_flush() {
            self.own_flush = true;
            let id = self.add(Kind::Flush, ByteRange::new(0, 0), None, None, Purpose::OwnFlush);
            return Some(self.send(id));
        }
        self.end_changes_without_room(now);
        let id = *self.queue.front()?;
        let operation = self.operations.get(id)?;
        let waits = operation.kind.changes() && (self.log_is_full() || self.overlaps_change(operation.range()));
        if waits {
            return None;
        }
        self.queue.pop_front();
        Some(self.send(id))
    }

    fn send(&mut self, id: OpId) -> OpId {
        let Some(operation) = self.operations.get_mut(id) else { return id };
        operation.sent = true;
        operation.attempted = true;
        let (start, end) = (operation.offset, operation.offset.saturating_add(operation.len));
        match operation.kind {
            Kind::Flush => self.flushing.push((id, self.next_sequence)),
            kind if kind.changes() => self.changing.push(SentChange { start, end, id }),
            _ => {}
        }
        id
    }

    /// An operation that was sent is answered.
    pub(super) fn complete(&mut self, id: OpId, result: Result<Answer, CallError>, now: Instant) {
        if result == Err(CallError::Busy) {
            self.pause.begin(now);
            return self.send_again(id);
        }
        self.pause.shorten();
        let Some(operation) = self.operations.remove(id) else { return };
        self.changing.retain(|change| change.id != id);
        match operation.purpose {
            Purpose::User(tag) => {
                let result = match operation.kind {
                    Kind::Flush => self.flushed(id, result.map(|_| ())).map(|()| Answer::Unit),
                    kind if kind.changes() && result.is_ok() => {
                        self.keep(&operation);
                        result
                    }
                    _ => result,
                };
                let buffer = operation.into;
                self.done.push(Done { tag, result: result.map_err(VolumeError::Call), buffer });
            }
            Purpose::Replay(name) => {
                self.replays_in_flight -= 1;
                match result {
                    Ok(_) => self.replay_went(name),
                    Err(error) => self.fail(VolumeError::ReplayFailed(error)),
                }
            }
            Purpose::OwnFlush => {
                self.own_flush = false;
                if let Err(error) = self.flushed(id, result.map(|_| ())) {
                    self.room = Room::Awaited { error, since: None };
                }
            }
        }
    }

    /// The server had no memory for it: it keeps its place in the order.
    fn send_again(&mut self, id: OpId) {
        self.changing.retain(|change| change.id != id);
        self.flushing.retain(|(flush, _)| *flush != id);
        let Some(operation) = self.operations.get_mut(id) else { return };
        operation.sent = false;
        match operation.purpose {
            Purpose::User(_) if operation.cancelled => self.end_cancelled(id),
            Purpose::User(_) => self.queue.push_front(id),
            Purpose::Replay(name) => {
                self.operations.remove(id);
                self.replays_in_flight -= 1;
                self.replay_waits(name);
            }
            Purpose::OwnFlush => {
                self.operations.remove(id);
                self.own_flush = false;
            }
        }
    }

    fn count_step(&self) {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
    }

    /// See the field.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps.get()
    }

    /// Appends the answers that there are.
    pub(super) fn reap(&mut self, into: &mut Vec<Done<R>>) {
        into.append(&mut self.done);
    }
}
