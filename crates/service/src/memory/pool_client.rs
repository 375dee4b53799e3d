//! Drives a [`Pool`]: its operations over the sessions of a node, and over a file.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU64;
use std::ops::Range;
use std::time::Duration;

use byway_fabric::node::{
    Completed, Descriptor, Group, Memory, Node, Op, OpError, Outcome, Segment, Session, SubmitError,
};
use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};
use byway_rpc::node::{Call, Reply, Rpc};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::borrower::{BorrowError, LeasedSlab};
use super::numbers::NumberMap;
use super::pager::{PAGE_BYTES, PLACES_PER_SLAB, Place};
use super::pool::{Action, Class, Failure, Lease, LenderState, Note, OpId, Pool, PoolCounters, Sum, Told};
use super::pool_frames::PoolFrames;
use super::pool_options::{Keeping, LenderAt, PoolError, Spill};
use super::sealing::Sealer;
use super::wire::{Arguments, LendError, Method, PROTOCOL, TakenSlab};
use crate::limits::{LENDER_SILENCE_MAX, SLABS_PER_SESSION_MAX};

/// Operations under way at most: each has a frame.
const OPERATIONS_MAX: usize = 1 << 14;

/// Pages that one put takes: a node takes 64 pieces of memory in one.
const BATCH_PAGES_MAX: usize = 64;

/// Pages that one get brings. All of them come when the last one is there, so a longer get would keep the first waiting.
const GET_PAGES_MAX: usize = 16;

/// The context of an operation whose end is not waited for.
const UNAWAITED: u64 = u64::MAX;

/// In the context of a put or get of several pages, with the number of their batch.
const BATCH: u64 = 1 << 32;

struct Lender {
    at: LenderAt,
    windows: HashMap<u64, Descriptor>,
    /// Its process, as its last lease in this session said, if it did.
    process: Option<NonZeroU64>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Connect(usize),
    Renew,
    Lease(usize),
}

/// Operations of the pool that are one of the node.
#[derive(Debug)]
enum Batch {
    Puts(Vec<OpId>),
    /// Each into that frame.
    Gets(Vec<(OpId, u32)>),
}

/// Operation, frame, and page of the slab.
type PageOp = (OpId, u32, u32);

/// Pages at lenders and in a file: see [`Pool`].
pub struct PoolClient {
    rpc: Rpc,
    group: Group,
    pool: Pool,
    /// Bytes that the pool's places of a slab take.
    slab_bytes: u64,
    lenders: Vec<Lender>,
    under_way: NumberMap<OpId, Kind>,
    /// Puts into each slab that have not begun.
    gathered_puts: BTreeMap<Lease, Vec<PageOp>>,
    /// Gets that have not begun, as they were asked for.
    gathered_gets: Vec<(Lease, PageOp)>,
    batches: NumberMap<u32, Batch>,
    next_batch: u32,
    frames: PoolFrames,
    spill: Option<Box<dyn Spill>>,
    class: Class,
    /// The last write to the file failed.
    is_file_refused: bool,
    /// Why the last lease was refused.
    refusal: Option<String>,
}

impl PoolClient {
    /// A pool over these lenders, all of one node, whose slabs have so many places: [`PLACES_PER_SLAB`], or fewer in a simulation. The last
    /// [`Class::frames`] pages of `frames` are the pool's own. [`Class::Disk`] needs a file.
    ///
    /// # Errors
    /// The node's and the kernel's.
    pub fn new(
        rpc: &Rpc,
        lenders: Vec<LenderAt>,
        Keeping { class, spill, encrypt }: Keeping,
        (frames, places): (Memory, u32),
    ) -> Result<Self, PoolError> {
        let first_frame = (frames.len() / PAGE_BYTES - class.frames()) as u32;
        let places = places.min(PLACES_PER_SLAB);
        let sealed = if encrypt {
            let wire = rpc.node().register(frames.len()).map_err(PoolError::Memory)?;
            Some((wire, Sealer::new().ok_or(PoolError::NoRandomness)?))
        } else {
            None
        };
        let up: Vec<bool> = lenders.iter().map(|lender| lender.session.is_some()).collect();
        Ok(Self {
            rpc: rpc.clone(),
            group: rpc.node().group(OPERATIONS_MAX)?,
            pool: Pool::new(class, &up, places, first_frame, rpc.node().now()),
            slab_bytes: u64::from(places) * PAGE_BYTES as u64,
            lenders: lenders.into_iter().map(|at| Lender { at, windows: HashMap::new(), process: None }).collect(),
            under_way: NumberMap::default(),
            gathered_puts: BTreeMap::new(),
            gathered_gets: Vec::new(),
            batches: NumberMap::default(),
            next_batch: 0,
            frames: PoolFrames::new(frames, sealed),
            spill,
            class,
            is_file_refused: false,
            refusal: None,
        })
    }

    /// What it has done.
    pub fn counters(&self) -> PoolCounters {
        self.pool.counters()
    }

    /// See [`Pool::is_slow`].
    pub fn is_slow(&self) -> bool {
        self.pool.is_slow()
    }

    /// The lenders by name.
    pub fn lenders(&self) -> impl Iterator<Item = (&str, LenderState)> {
        self.lenders.iter().map(|lender| lender.at.name.as_str()).zip(self.pool.lenders())
    }

    /// See [`Pool::class`].
    pub fn class(&self) -> Class {
        self.pool.class()
    }

    /// See [`Pool::is_settled`].
    pub fn is_settled(&self) -> bool {
        self.pool.is_settled()
    }

    /// When [`PoolClient::turn`] has something to do, if nothing ends before.
    pub fn next_tick(&self) -> Option<Instant> {
        self.pool.next_tick()
    }

    /// The frames.
    pub fn frames(&self) -> &Memory {
        self.frames.pages()
    }

    /// The page in a frame.
    pub fn read_frame(&self, frame: u32) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        self.read_frame_into(frame, &mut page);
        page
    }

    /// As [`PoolClient::read_frame`], to where it is needed.
    pub fn read_frame_into(&self, frame: u32, page: &mut [u8; PAGE_BYTES]) {
        self.frames.read(frame, page);
    }

    /// See [`Pool::want_slab`].
    pub fn want_slab(&mut self) {
        self.pool.want_slab(self.rpc.node().now());
        self.act();
    }

    /// Why no slab could be had.
    pub fn why_no_slab(&self) -> &str {
        self.refusal.as_deref().unwrap_or("no lender can be reached that has none of the slab's copies")
    }

    /// See [`Pool::put`]. It begins with the next [`PoolClient::flush`]. The frame's bytes stay as they are until the put has ended.
    pub fn put(&mut self, frame: u32, place: Place) {
        let sum = self.frames.depart(frame);
        self.pool.put(frame, place, sum, self.rpc.node().now());
        self.act();
    }

    /// See [`Pool::keep`].
    pub fn keep(&mut self, frame: u32, place: Place) {
        self.pool.keep(frame, place);
    }

    /// See [`Pool::has`].
    pub fn has(&self, place: Place) -> bool {
        self.pool.has(place)
    }

    /// See [`Pool::get`]. It begins with the next [`PoolClient::flush`].
    pub fn get(&mut self, frame: u32, place: Place) {
        self.pool.get(frame, place, self.rpc.node().now());
        self.act();
    }

    /// Has a test's bytes put over one copy of a place, behind the pool's back. False if there is no such copy.
    #[doc(hidden)]
    pub fn spoil(&self, place: Place, copy: usize, bytes: &Memory) -> bool {
        let Some(lease) = self.pool.lease_of(place, copy) else { return false };
        let (lender, offset) =
            (&self.lenders[lease.lender], u64::from(self.pool.page_at(place).index()) * PAGE_BYTES as u64);
        let Some((session, window)) = lender.at.session.zip(lender.windows.get(&lease.number)) else { return false };
        let put = self.rpc.node().put(session, &[bytes.segment(0..PAGE_BYTES)], window, offset);
        put.is_ok_and(|op| self.group.add(op, UNAWAITED).is_ok())
    }

    /// What the pager is to hear next.
    pub fn next_told(&mut self) -> Option<Told> {
        self.pool.next_told()
    }

    /// Takes what the node has ended, and does what is due. The node was turned before.
    pub fn turn(&mut self) {
        while let Ok(completion) = self.group.test() {
            match completion.context {
                UNAWAITED => continue,
                batch if batch & BATCH != 0 => {
                    let result = completion.result.map(drop).map_err(|error| failed(&error));
                    if let Some(batch) = self.batches.remove(&(batch as u32)) {
                        self.batch_ended(batch, result);
                    }
                }
                op => self.ended(OpId(op as u32), completion.result),
            }
            self.act();
        }
        let now = self.rpc.node().now();
        if self.pool.next_tick().is_some_and(|at| at <= now) {
            self.pool.tick(now);
            self.act();
        }
        self.flush();
        while let Some(note) = self.pool.next_note() {
            self.log(note);
        }
    }

    fn ended(&mut self, op: OpId, result: Completed) {
        let now = self.rpc.node().now();
        let Some(kind) = self.under_way.remove(&op) else { return };
        if let (Kind::Lease(lender), Err(error)) = (kind, &result) {
            let why = match error {
                OpError::Status(status) => LendError::from_status(*status).to_string(),
                other => other.to_string(),
            };
            self.refusal = Some(format!("{}: {why}", self.lenders[lender].at.name));
        }
        let result = result.map_err(|error| failed(&error));
        match kind {
            Kind::Connect(lender) => {
                if let Ok(Outcome::Session(session)) = result {
                    self.lenders[lender].at.session = Some(session);
                    self.pool.connected(op, true, now);
                } else {
                    self.pool.connected(op, false, now);
                }
            }
            Kind::Renew => {
                let taken = result.map(|outcome| Reply::of(outcome).map_or_else(|_| Vec::new(), |reply| taken(&reply)));
                self.pool.renewed(op, taken, now);
            }
            Kind::Lease(lender) => {
                let leased = result.and_then(|outcome| {
                    self.take_slab(lender, outcome).map_err(|error| {
                        self.refusal = Some(format!("{}: {error}", self.lenders[lender].at.name));
                        Failure::Refused
                    })
                });
                self.pool.leased(op, leased, now);
            }
        }
    }

    /// The number of a slab that was leased. One that is too small for the pool's places is given back.
    fn take_slab(&mut self, lender: usize, outcome: Outcome) -> Result<u64, BorrowError> {
        let reply = Reply::of(outcome).map_err(|_| BorrowError::Answer)?;
        let slab = LeasedSlab::of(&reply).ok_or(BorrowError::Answer)?;
        if slab.bytes < self.slab_bytes {
            self.give_back(lender, slab.number);
            return Err(BorrowError::SmallSlab { has: slab.bytes, needs: self.slab_bytes });
        }
        // A session that was opened again may lead to another process than the one before.
        if let Some(twin) = slab.lender.and_then(|process| self.twin(lender, process)) {
            let name = self.lenders[twin].at.name.clone();
            if std::mem::replace(&mut self.lenders[lender].process, slab.lender) != slab.lender {
                let lender = self.lenders[lender].at.name.as_str();
                tracing::error!(lender, twin = name, "two addresses are one lender by now: the second is not used");
            }
            self.give_back(lender, slab.number);
            return Err(BorrowError::SameLender(name));
        }
        self.lenders[lender].process = slab.lender;
        self.lenders[lender].windows.insert(slab.number, slab.window);
        Ok(slab.number)
    }

    /// Another lender with slabs that is the same process, where the class needs different ones.
    fn twin(&self, lender: usize, process: NonZeroU64) -> Option<usize> {
        let is_twin = |at: &usize| {
            *at != lender && self.lenders[*at].process == Some(process) && !self.lenders[*at].windows.is_empty()
        };
        (0..self.lenders.len()).filter(|_| self.class.lenders() > 1).find(is_twin)
    }

    fn give_back(&self, lender: usize, slab: u64) {
        if let Ok(op) = self.call(lender, Method::Return, slab) {
            let _ = self.group.add(op, UNAWAITED);
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.pool.next_action() {
            let now = |client: &Self| client.rpc.node().now();
            match action {
                Action::Connect(op, lender) => {
                    let begun = self.rpc.node().start_connect(&self.lenders[lender].at.address);
                    if self.add(op, Kind::Connect(lender), begun).is_err() {
                        self.pool.connected(op, false, now(self));
                    }
                }
                Action::Close(lender) => {
                    self.lenders[lender].windows.clear();
                    self.lenders[lender].process = None;
                    if let Some(session) = self.lenders[lender].at.session.take() {
                        let _ = self.rpc.node().close(session);
                    }
                }
                Action::Renew(op, lender) => {
                    let begun = self.call(lender, Method::Renew, 0);
                    if let Err(failure) = self.add_or_fail(op, Kind::Renew, begun) {
                        self.pool.renewed(op, Err(failure), now(self));
                    }
                }
                Action::Lease(op, lender) => {
                    let begun = self.call(lender, Method::Lease, 0);
                    if let Err(failure) = self.add_or_fail(op, Kind::Lease(lender), begun) {
                        self.pool.leased(op, Err(failure), now(self));
                    }
                }
                Action::Return(lease) => {
                    self.lenders[lease.lender].windows.remove(&lease.number);
                    self.give_back(lease.lender, lease.number);
                }
                Action::Put(op, frame, lease, page) => {
                    self.gathered_puts.entry(lease).or_default().push((op, frame, page));
                }
                Action::Get(op, frame, lease, page) => self.gathered_gets.push((lease, (op, frame, page))),
                Action::Xor(op, to, from) => {
                    self.frames.xor(to, &from);
                    let sum = self.frames.arrive(to, self.pool.expected(op));
                    self.pool.ended(op, Ok(sum), now(self));
                }
                Action::Write(op, frame, place) => {
                    let written = self.write_file(frame, place);
                    self.pool.ended(op, written, now(self));
                }
                Action::Read(op, frame, place) => {
                    let read = self.read_file(op, frame, place);
                    self.pool.ended(op, read, now(self));
                }
            }
        }
    }

    /// Begins the puts and gets that were asked for. Those of one slab go together: pages that lie side by side there go in one message.
    pub fn flush(&mut self) {
        self.pool.flush_rows(self.rpc.node().now());
        self.act();
        while !(self.gathered_gets.is_empty() && self.gathered_puts.is_empty()) {
            let gets = std::mem::take(&mut self.gathered_gets);
            for of_slab in gets.chunk_by(|(lease, _), (next, _)| lease == next) {
                let lease = of_slab[0].0;
                // In the order in which they were asked for: a thread waits for the first.
                for some in of_slab.chunks(GET_PAGES_MAX) {
                    let mut gets: Vec<PageOp> = some.iter().map(|(_, get)| *get).collect();
                    gets.sort_unstable_by_key(|(.., page)| *page);
                    for run in gets.chunk_by(|(.., page), (.., next)| page + 1 == *next) {
                        let begun = self.start_get(lease, run);
                        self.begin(Batch::Gets(run.iter().map(|(op, frame, _)| (*op, *frame)).collect()), begun);
                    }
                }
            }
            while let Some((lease, mut puts)) = self.gathered_puts.pop_first() {
                puts.sort_unstable_by_key(|(.., page)| *page);
                for batch in puts.chunks(BATCH_PAGES_MAX) {
                    let begun = self.start_put(lease, batch);
                    self.begin(Batch::Puts(batch.iter().map(|(op, ..)| *op).collect()), begun);
                }
            }
            self.act();
        }
    }

    fn begin(&mut self, batch: Batch, begun: Result<Op, Failure>) {
        let number = self.next_batch;
        self.next_batch = self.next_batch.wrapping_add(1);
        let added = begun.and_then(|op| self.group.add(op, BATCH | u64::from(number)).map_err(|_| Failure::Refused));
        match added {
            Ok(_) => drop(self.batches.insert(number, batch)),
            Err(failure) => self.batch_ended(batch, Err(failure)),
        }
    }

    fn batch_ended(&mut self, batch: Batch, result: Result<(), Failure>) {
        let now = self.rpc.node().now();
        match batch {
            Batch::Puts(puts) => {
                for op in puts {
                    self.pool.ended(op, result.map(|()| Sum::Checksum(0)), now);
                }
            }
            Batch::Gets(gets) => {
                for (op, frame) in gets {
                    let sum = result.map(|()| self.frames.arrive(frame, self.pool.expected(op)));
                    self.pool.ended(op, sum, now);
                }
            }
        }
    }

    fn segments(&self, pages: &[PageOp]) -> Vec<Segment<'_>> {
        let segment = |(_, frame, _): &PageOp| {
            let at = *frame as usize * PAGE_BYTES;
            self.frames.wire().segment(at..at + PAGE_BYTES)
        };
        pages.iter().map(segment).collect()
    }

    fn start_put(&self, lease: Lease, puts: &[PageOp]) -> Result<Op, Failure> {
        let (session, window) = self.window(lease)?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (.., page) in puts {
            let offset = u64::from(*page) * PAGE_BYTES as u64;
            match ranges.last_mut() {
                Some(last) if last.end == offset => last.end += PAGE_BYTES as u64,
                _ => ranges.push(offset..offset + PAGE_BYTES as u64),
            }
        }
        self.rpc.node().put_ranges(session, &self.segments(puts), window, &ranges).map_err(failure)
    }

    /// Gets pages that lie one behind the other.
    fn start_get(&self, lease: Lease, gets: &[PageOp]) -> Result<Op, Failure> {
        let (session, window) = self.window(lease)?;
        let first = gets.first().map_or(0, |(.., page)| *page);
        let offset = u64::from(first) * PAGE_BYTES as u64;
        let mut segments = self.segments(gets);
        if seeded::is(Bug::PoolGetsMixedUp) {
            segments.reverse();
        }
        self.rpc.node().get(session, window, offset, &segments).map_err(failure)
    }

    fn window(&self, lease: Lease) -> Result<(Session, &Descriptor), Failure> {
        let lender = &self.lenders[lease.lender];
        let session = lender.at.session.ok_or(Failure::Gone)?;
        Ok((session, lender.windows.get(&lease.number).ok_or(Failure::Refused)?))
    }

    fn call(&self, lender: usize, method: Method, slab: u64) -> Result<Op, Failure> {
        let session = self.lenders[lender].at.session.ok_or(Failure::Gone)?;
        let mut arguments = Arguments::new_zeroed();
        arguments.slab.set(slab);
        let call =
            Call { protocol: PROTOCOL, method: method as u16, arguments: arguments.as_bytes(), ..Call::default() };
        self.rpc.call_by(session, &call, self.rpc.node().now() + LENDER_SILENCE_MAX).map_err(failure)
    }

    fn add_or_fail(&mut self, op: OpId, kind: Kind, begun: Result<Op, Failure>) -> Result<(), Failure> {
        self.group.add(begun?, op.0.into()).map_err(|_| Failure::Refused)?;
        self.under_way.insert(op, kind);
        Ok(())
    }

    fn add(&mut self, op: OpId, kind: Kind, begun: Result<Op, SubmitError>) -> Result<(), Failure> {
        self.add_or_fail(op, kind, begun.map_err(failure))
    }

    fn write_file(&mut self, frame: u32, place: Place) -> Result<Sum, Failure> {
        let page = self.frames.read_wire(frame);
        let file = self.spill.as_mut().ok_or(Failure::Refused)?;
        let written = file.write(place, &page);
        if std::mem::replace(&mut self.is_file_refused, written.is_err()) != written.is_err() {
            match &written {
                Ok(()) => tracing::info!("the spill file can be written again"),
                Err(error) => tracing::error!(
                    %error,
                    "the spill file cannot be written: pages stay here, above the limit, until it can; make room, or name another folder with \
                     --spill"
                ),
            }
        }
        written.map(|()| Sum::Checksum(0)).map_err(|_| Failure::Refused)
    }

    fn read_file(&mut self, op: OpId, frame: u32, place: Place) -> Result<Sum, Failure> {
        let mut page = [0; PAGE_BYTES];
        let file = self.spill.as_mut().ok_or(Failure::Refused)?;
        file.read(place, &mut page).map_err(|error| {
            tracing::error!(%error, "the spill file cannot be read");
            Failure::Refused
        })?;
        self.frames.write_wire(frame, &page);
        Ok(self.frames.arrive(frame, self.pool.expected(op)))
    }

    fn log(&self, note: Note) {
        let name = |lender: usize| self.lenders[lender].at.name.as_str();
        let rest = match self.class {
            Class::None => "its pages are lost",
            Class::Disk => "its pages come from the spill file",
            Class::Parity => "its pages are computed from those of the others, and put to another lender",
            Class::Mirror => "its pages come from their second lender, and are copied to another",
        };
        match note {
            Note::GivenUp { lender, slabs, silent } => {
                let why = if silent { "it does not answer" } else { "its session has ended" };
                let rest = if slabs == 0 { "it had no pages" } else { rest };
                tracing::error!(lender = name(lender), why, slabs, "a lender is lost; {rest}");
            }
            Note::Whole => tracing::warn!("every page is at as many lenders as its class says again"),
            Note::Back(lender) => tracing::warn!(lender = name(lender), "a lender is back; it begins without pages"),
            Note::TakesBack(lender, slabs) => {
                tracing::warn!(lender = name(lender), slabs, "a lender takes memory back; its pages are moved");
            }
            Note::Corrupt(lender) => {
                tracing::error!(
                    lender = name(lender),
                    "a page has a wrong checksum at its lender; another copy is used"
                );
            }
            Note::CorruptFile => tracing::error!("a page has a wrong checksum in the spill file"),
        }
    }

    /// Ends all sessions, and with them all leases.
    pub fn close(self) {
        for session in self.lenders.iter().filter_map(|lender| lender.at.session) {
            let _ = self.node().close(session);
        }
        let _ = self.group.wait(byway_fabric::node::Deadline::now());
    }

    fn node(&self) -> &Node {
        self.rpc.node()
    }
}

fn failed(error: &OpError) -> Failure {
    match error {
        OpError::Ended(_) | OpError::Deadline | OpError::Io(_) => Failure::Gone,
        _ => Failure::Refused,
    }
}

fn failure(error: SubmitError) -> Failure {
    match error {
        SubmitError::NoSession | SubmitError::Ended(_) | SubmitError::Forked | SubmitError::Panicked => Failure::Gone,
        _ => Failure::Refused,
    }
}

/// The slabs that a reply to `Renew` names, and how long each stays open.
fn taken(reply: &Reply) -> Vec<(u64, Duration)> {
    let slabs = reply.payload.chunks_exact(size_of::<TakenSlab>()).take(SLABS_PER_SESSION_MAX);
    let slabs = slabs.filter_map(|bytes| TakenSlab::read_from_bytes(bytes).ok());
    slabs.map(|taken| (taken.slab.get(), Duration::from_millis(taken.within_ms.get().into()))).collect()
}
