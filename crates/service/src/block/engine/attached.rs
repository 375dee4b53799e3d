//! The volumes of a loop: attaching, resizing, detaching.

use std::sync::Arc;

use byway_reactor::{File, Instant, OpenFile, Reactor};

use super::count::VolumeCounters;
use super::deferred_replies::DeferredReplies;
use super::shared_syncs::FileSyncs;
use super::stage::Stage;
use super::times::StoreTimes;
use super::{Engine, VolumeId};
use crate::block::changes::{EarlierChanges, LoopChanges, Presence};
use crate::block::error::BlockError;
use crate::block::store::Kind;
use crate::block::volume::{ServingLoop, Volume};
use crate::limits::{REPLACED_PAUSE, RETIRED_SIZES_MAX};

/// A volume on this loop.
pub(super) struct Attached {
    pub(super) generation: u32,
    pub(super) volume: Arc<Volume>,
    /// Held until the last request has ended; not read.
    _serving: ServingLoop,
    pub(super) files: Vec<File>,
    /// Of each, by other open file descriptions: for syncs alone.
    pub(super) more_descriptions: Vec<Vec<File>>,
    /// Of each file.
    pub(super) syncs: Vec<FileSyncs>,
    /// Where the bytes of each file are staged; empty where that is main memory.
    pub(super) stages: Vec<Stage>,
    /// Files of the sizes that it had before: replies that are on their way may still name them.
    retired: Vec<File>,
    pub(super) in_flight: u32,
    detached: bool,
    /// See [`Volume::waits_for_replaced`].
    waits: bool,
    pub(super) deferred: DeferredReplies,
    pub(super) counters: VolumeCounters,
    /// Those that are at the store.
    pub(super) changes: LoopChanges,
    pub(super) times: Box<StoreTimes>,
}

impl Engine {
    /// Makes a volume ready to be served on this loop.
    pub fn attach(&mut self, reactor: &mut Reactor, volume: Arc<Volume>) -> VolumeId {
        let files = add_files(reactor, &volume);
        let more_descriptions = add_more_descriptions(reactor, &volume);
        let syncs = files.iter().map(|_| FileSyncs::default()).collect();
        let stages = self.stages_of(&volume);
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let counters = VolumeCounters::default();
        let retired = Vec::new();
        let deferred = DeferredReplies::new(volume.sync_tracker().new_owner());
        let (in_flight, detached, waits, times) = (0, false, true, Box::default());
        let changes = volume.changes().join();
        let attached = Attached {
            generation,
            _serving: volume.serve(),
            volume,
            files,
            more_descriptions,
            syncs,
            stages,
            retired,
            in_flight,
            detached,
            waits,
            deferred,
            counters,
            changes,
            times,
        };
        VolumeId { index: self.volumes.insert(attached) as u32, generation }
    }

    /// Goes on with the successor of a volume ([`Volume::succeeded_by`]); requests in flight end as they began.
    pub fn succeed(&mut self, reactor: &mut Reactor, id: VolumeId, volume: Arc<Volume>) {
        let files = add_files(reactor, &volume);
        let stages = self.stages_of(&volume);
        let Some(attached) = self.volumes.get_mut(id.index as usize).filter(|a| a.generation == id.generation) else {
            return;
        };
        attached.retired.append(&mut attached.files);
        attached.files = files;
        attached.stages = stages;
        attached.volume = volume;
        let excess = attached.retired.len().saturating_sub(RETIRED_SIZES_MAX * attached.files.len());
        for file in attached.retired.drain(..excess) {
            reactor.remove_file(file);
        }
    }

    /// Lets go of a volume: new requests on it are answered [`BlockError::Closed`], and once those in flight have ended
    /// this loop no longer holds it.
    pub fn detach(&mut self, reactor: &mut Reactor, id: VolumeId) {
        let Some(attached) = self.volumes.get_mut(id.index as usize).filter(|a| a.generation == id.generation) else {
            return;
        };
        attached.detached = true;
        self.drop_if_unused(reactor, id);
    }

    pub(super) fn drop_if_unused(&mut self, reactor: &mut Reactor, id: VolumeId) {
        let attached = &self.volumes[id.index as usize];
        if attached.detached && attached.in_flight == 0 {
            let attached = self.volumes.remove(id.index as usize);
            let more = attached.more_descriptions.into_iter().flatten();
            for file in attached.files.into_iter().chain(attached.retired).chain(more) {
                reactor.remove_file(file);
            }
        }
    }

    pub(super) fn attached(&self, id: VolumeId) -> Result<&Attached, BlockError> {
        let attached = self.volumes.get(id.index as usize);
        attached.filter(|a| a.generation == id.generation && !a.detached).ok_or(BlockError::Closed)
    }

    pub(super) fn attached_mut(&mut self, id: VolumeId) -> Option<&mut Attached> {
        self.volumes.get_mut(id.index as usize).filter(|a| a.generation == id.generation)
    }

    /// A client of a volume has come: gives the changes that are at the store, on any loop, and that its own must not
    /// overtake.
    pub fn arrive(&self, id: VolumeId) -> Option<(Presence, EarlierChanges)> {
        let changes = self.attached(id).ok()?.volume.changes();
        // In this order: changes that begin in between see the client.
        let presence = changes.arrive();
        Some((presence, changes.earlier()))
    }

    /// A client of a volume has left while requests of it were in flight.
    pub fn depart(&self, id: VolumeId) {
        if let Ok(attached) = self.attached(id) {
            attached.volume.changes().depart();
        }
    }

    /// The changes of a volume that are at the store now, on any loop. Not within a batch ([`Engine::begin_batch`]).
    pub fn earlier_changes(&self, id: VolumeId) -> Option<EarlierChanges> {
        self.attached(id).ok().map(|attached| attached.volume.changes().earlier())
    }

    /// Whether a volume has other clients than this, on any loop, or had some since it came, or since this was last asked.
    pub fn has_other_clients(&self, id: VolumeId, client: &mut Presence) -> bool {
        self.attached(id).is_ok_and(|attached| attached.volume.changes().has_others(client))
    }

    /// How many clients of a volume have left ([`Engine::depart`]), on any loop.
    pub fn departures(&self, id: VolumeId) -> u64 {
        self.attached(id).map_or(0, |attached| attached.volume.changes().departures())
    }

    /// Changes of one connection to a volume are about to begin: [`Engine::earlier_changes`] on another loop waits for the end of the
    /// batch, and includes those changes. Call it before
    /// [`Engine::has_other_clients`] and [`Engine::departures`] are asked.
    pub fn begin_batch(&self, id: VolumeId) {
        if let Some(attached) = self.volumes.get(id.index as usize).filter(|a| a.generation == id.generation) {
            attached.changes.begin_batch();
        }
    }

    /// The changes of the batch have begun. The volume must be that of the last [`Engine::begin_batch`].
    pub fn end_batch(&self, id: VolumeId) {
        if let Some(attached) = self.volumes.get(id.index as usize).filter(|a| a.generation == id.generation) {
            attached.changes.end_batch();
        }
    }

    /// The volume behind an id; `None` once it is let go of.
    pub fn volume(&self, id: VolumeId) -> Option<&Arc<Volume>> {
        self.attached(id).ok().map(|attached| &attached.volume)
    }

    /// What was done on a volume, on this loop.
    pub fn counters(&self, id: VolumeId) -> VolumeCounters {
        self.attached(id).map_or_else(
            |_| VolumeCounters::default(),
            |attached| VolumeCounters { in_flight: attached.in_flight.into(), ..attached.counters },
        )
    }

    /// How long operations on a volume took at its store, on this loop.
    pub fn store_times(&self, id: VolumeId) -> StoreTimes {
        self.attached(id).map_or_else(|_| StoreTimes::default(), |attached| *attached.times)
    }

    /// Whether the volume has had its bytes for now, or waits for the last requests on the volume that it replaced; then [`Engine::throttled_until`] says when to ask again. Front ends ask
    /// before they take a write's payload; reads and small writes are answered
    /// [`Step::Busy`](super::Step::Busy).
    pub fn is_throttled(&mut self, reactor: &Reactor, id: VolumeId) -> bool {
        if self.waits_for_replaced(reactor, id) {
            return true;
        }
        let Ok(attached) = self.attached(id) else { return false };
        let Some(rate) = attached.volume.rate() else { return false };
        let Err(until) = rate.may_start(reactor.now()) else { return false };
        self.ask_again_at(until);
        true
    }

    /// Whether requests must wait for those on a volume that this one replaced.
    pub(super) fn waits_for_replaced(&mut self, reactor: &Reactor, id: VolumeId) -> bool {
        let Some(attached) = self.attached_mut(id).filter(|attached| attached.waits) else { return false };
        attached.waits = attached.volume.waits_for_replaced();
        if !attached.waits {
            return false;
        }
        self.ask_again_at(reactor.now() + REPLACED_PAUSE);
        true
    }

    fn ask_again_at(&mut self, until: Instant) {
        let first = self.throttled_until.map_or(until, |other| other.min(until));
        self.throttled_until = Some(first);
    }

    /// When the first volume whose requests were held back may be asked again; once.
    pub fn throttled_until(&mut self) -> Option<Instant> {
        self.throttled_until.take()
    }

    /// Counts bytes against the volume's rate.
    pub(super) fn charge(&self, reactor: &Reactor, id: VolumeId, len: usize) {
        if let Ok(attached) = self.attached(id)
            && let Some(rate) = attached.volume.rate()
        {
            rate.charge(len as u64, reactor.now());
        }
    }
}

fn add_files(reactor: &mut Reactor, volume: &Volume) -> Vec<File> {
    match volume.kind() {
        Kind::Files { files, .. } => files.iter().map(|file| reactor.add_file(Arc::clone(file))).collect(),
        Kind::Null => Vec::new(),
    }
}

fn add_more_descriptions(reactor: &mut Reactor, volume: &Volume) -> Vec<Vec<File>> {
    let mut add = |files: &Vec<Arc<OpenFile>>| files.iter().map(|file| reactor.add_file(Arc::clone(file))).collect();
    volume.store().more_descriptions().iter().map(&mut add).collect()
}
