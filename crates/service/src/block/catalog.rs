//! The volumes of a node, as one loop knows them.

use std::sync::Arc;

use byway_reactor::Reactor;

use super::engine::{Engine, VolumeId};
use super::volume::Volume;

/// Volumes by name. A node has few, so a list does.
#[derive(Debug, Default)]
pub struct Catalog {
    entries: Vec<(Arc<Volume>, VolumeId)>,
}

impl Catalog {
    /// Takes `volumes` as the whole list: attaches new ones, lets go of those that are no longer there. A volume that
    /// is the same object stays as it is. Gives the ids that are gone, for doors to end their connections.
    pub fn replace(&mut self, engine: &mut Engine, reactor: &mut Reactor, volumes: &[Arc<Volume>]) -> Vec<VolumeId> {
        let stays = |volume: &Arc<Volume>| volumes.iter().any(|new| Arc::ptr_eq(new, volume));
        let gone: Vec<_> = self.entries.extract_if(.., |(volume, _)| !stays(volume)).map(|(_, id)| id).collect();
        for &id in &gone {
            engine.detach(reactor, id);
        }
        let mut entries = Vec::with_capacity(volumes.len());
        for volume in volumes {
            let known = self.entries.iter().find(|(old, _)| Arc::ptr_eq(old, volume)).map(|(_, id)| *id);
            let id = known.unwrap_or_else(|| engine.attach(reactor, Arc::clone(volume)));
            entries.push((Arc::clone(volume), id));
        }
        self.entries = entries;
        gone
    }

    /// The volume of that name; the empty name is the only volume, if there is one only.
    pub fn find(&self, name: &str) -> Option<(&Arc<Volume>, VolumeId)> {
        if name.is_empty() {
            return match &self.entries[..] {
                [(volume, id)] => Some((volume, *id)),
                _ => self.find_named(""),
            };
        }
        self.find_named(name)
    }

    fn find_named(&self, name: &str) -> Option<(&Arc<Volume>, VolumeId)> {
        self.entries.iter().find(|(volume, _)| volume.name() == name).map(|(volume, id)| (volume, *id))
    }

    /// The ids of all volumes on this loop.
    pub fn ids(&self) -> impl Iterator<Item = VolumeId> + '_ {
        self.entries.iter().map(|(_, id)| *id)
    }

    /// All volumes, in the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Volume>> {
        self.entries.iter().map(|(volume, _)| volume)
    }
}
