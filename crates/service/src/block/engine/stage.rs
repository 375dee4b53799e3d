//! Staging memory of a direct volume, between its disk and the network: frames of main memory, or, on request, memory of the
//! disk's own device (docs/decisions/0019).
//!
//! Device memory is a bounded preference: a request that finds none free, and data that a CPU must read, is staged in main
//! memory. So no request waits for it.

use std::sync::Arc;

use byway_reactor::device_memory::DeviceMemory;
use byway_reactor::{Frame, FramePool, Reactor};

use super::{Engine, VolumeId};
use crate::block::store::Kind;
use crate::block::volume::Volume;
use crate::limits::DEVICE_POOL_BYTES;

/// The frames of one device on this loop.
#[derive(Clone)]
pub(super) struct Stage {
    memory: Arc<DeviceMemory>,
    /// `None` if the loop could have no part of the memory.
    pool: Option<FramePool>,
}

impl Engine {
    /// The stages of a volume's files. Volumes on one device share a pool.
    pub(super) fn stages_of(&self, volume: &Volume) -> Vec<Stage> {
        let mut stages: Vec<Stage> = Vec::new();
        for memory in volume.store().staging() {
            let attached = self.volumes.iter().flat_map(|(_, attached)| &attached.stages);
            let shared = attached.chain(&stages).find(|stage| stage.pool.is_some() && stage.memory.is_same(memory));
            let stage = shared.cloned().unwrap_or_else(|| Stage::new(memory, volume.name()));
            stages.push(stage);
        }
        stages
    }

    /// A frame for a piece of a write whose bytes the kernel alone puts there, from a plain socket: as long as
    /// `len`, else shorter, down to `least` (a power of two). `None` if none is free.
    pub fn frame_for_write(
        &self,
        reactor: &Reactor,
        id: VolumeId,
        offset: u64,
        len: usize,
        least: usize,
    ) -> Option<Frame> {
        let staged = || {
            let attached = self.attached(id).ok()?;
            let Kind::Files { layout, .. } = attached.volume.kind() else { return None };
            in_device(&attached.stages, layout.extent(offset, len as u64).file, len)
        };
        staged().or_else(|| reactor.frames().alloc_largest(len, least))
    }
}

impl Stage {
    fn new(memory: &Arc<DeviceMemory>, volume: &str) -> Self {
        let pool = memory.pool(DEVICE_POOL_BYTES);
        match &pool {
            Ok(pool) => {
                tracing::info!(
                    volume,
                    function = memory.function(),
                    bytes = pool.bytes(),
                    "volume uses device memory for its buffers"
                );
            }
            Err(error) => tracing::warn!(volume, %error, "cannot use device memory; a loop uses main memory"),
        }
        Self { memory: Arc::clone(memory), pool: pool.ok() }
    }
}

/// A frame of the device that a file is staged in, if it is staged and one is free.
pub(super) fn in_device(stages: &[Stage], file: usize, len: usize) -> Option<Frame> {
    stages.get(file)?.pool.as_ref()?.alloc(len)
}
