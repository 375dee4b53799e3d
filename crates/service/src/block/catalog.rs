//! The volumes of a node, as one loop knows them.

use std::sync::Arc;

use byway_fabric::access::{Identity, Right};
use byway_reactor::Reactor;

use super::engine::{Engine, VolumeId};
use super::volume::Volume;

/// Volumes by name. A node has few, so a list does.
#[derive(Debug, Default)]
pub struct Catalog {
    entries: Vec<(Arc<Volume>, VolumeId)>,
}

/// A volume that a client may use.
#[derive(Clone, Copy, Debug)]
pub struct OpenTo<'a> {
    /// The volume.
    pub volume: &'a Arc<Volume>,
    /// Its id on this loop.
    pub id: VolumeId,
    /// What the client may do with it.
    pub right: Right,
}

/// What [`Catalog::replace`] changed, for the front ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Attached.
    pub new: Vec<VolumeId>,
    /// Let go of: connections on them end.
    pub gone: Vec<VolumeId>,
    /// In another size, with the bytes that they have now.
    pub resized: Vec<(VolumeId, u64)>,
}

impl Catalog {
    /// Takes `volumes` as the whole list: attaches new ones, lets go of those that are no longer there, goes on with
    /// those that are the same ([`Volume::is_same`]), perhaps in another size.
    pub fn replace(&mut self, engine: &mut Engine, reactor: &mut Reactor, volumes: &[Arc<Volume>]) -> Changes {
        let mut changes = Changes::default();
        let stays = |volume: &Arc<Volume>| volumes.iter().any(|new| new.is_same(volume));
        changes.gone = self.entries.extract_if(.., |(volume, _)| !stays(volume)).map(|(_, id)| id).collect();
        for &id in &changes.gone {
            engine.detach(reactor, id);
        }
        let mut entries = Vec::with_capacity(volumes.len());
        for volume in volumes {
            let id = match self.entries.iter().find(|(old, _)| old.is_same(volume)) {
                None => {
                    let id = engine.attach(reactor, Arc::clone(volume));
                    changes.new.push(id);
                    id
                }
                Some((old, id)) => {
                    if !Arc::ptr_eq(old, volume) {
                        engine.succeed(reactor, *id, Arc::clone(volume));
                        if old.len() != volume.len() {
                            changes.resized.push((*id, volume.len()));
                        }
                    }
                    *id
                }
            };
            entries.push((Arc::clone(volume), id));
        }
        self.entries = entries;
        changes
    }

    /// The volume of that name.
    pub fn find(&self, name: &str) -> Option<(&Arc<Volume>, VolumeId)> {
        self.entries.iter().find(|(volume, _)| volume.name() == name).map(|(volume, id)| (volume, *id))
    }

    /// The volumes that `client` may use.
    pub fn open_to<'a>(&'a self, client: &'a Identity) -> impl Iterator<Item = OpenTo<'a>> {
        self.entries.iter().filter_map(|(volume, id)| Some(OpenTo { volume, id: *id, right: volume.right(client)? }))
    }

    /// The volume of that name, if `client` may use it; the empty name is the only volume that it may use, if it is one.
    pub fn find_for<'a>(&'a self, client: &'a Identity, name: &str) -> Option<OpenTo<'a>> {
        if !name.is_empty() {
            return self.open_to(client).find(|open| open.volume.name() == name);
        }
        let mut open = self.open_to(client);
        open.next().filter(|_| open.next().is_none())
    }

    /// The ids of all volumes on this loop.
    pub fn ids(&self) -> impl Iterator<Item = VolumeId> + '_ {
        self.entries.iter().map(|(_, id)| *id)
    }

    /// All volumes with their ids on this loop, in the order in which they were given.
    pub fn entries(&self) -> impl Iterator<Item = (&Arc<Volume>, VolumeId)> {
        self.entries.iter().map(|(volume, id)| (volume, *id))
    }

    /// All volumes, in the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Volume>> {
        self.entries.iter().map(|(volume, _)| volume)
    }
}
