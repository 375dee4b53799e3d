//! Block volumes: their stores, and the engine that serves their requests on one loop.

mod catalog;
mod changes;
pub mod client;
mod engine;
mod error;
mod failures;
mod identity;
mod image_format;
mod payload;
mod rate;
pub mod server;
pub mod spec;
mod store;
mod stripe;
mod sync_tracker;
mod volume;
pub mod wire;

pub use catalog::{Catalog, Changes, OpenTo};
pub use changes::{EarlierChanges, Presence};
pub use engine::{
    Begun, Done, ENGINE_CLASS, Engine, Operation, Outcome, ReadFlags, Slice, Slow, Step, StoreTimes, Tag,
    TimeHistogram, VolumeCounters, VolumeId, WriteFlags, ZeroFlags,
};
pub use error::{BlockError, OpenError};
pub use failures::StoreFailure;
pub use identity::FileIdentity;
pub use image_format::image_format;
pub use payload::Payload;
pub use store::{OpenHere, Opener, Store, StoreOptions, is_claimed, lock_for_writing};
pub use volume::{Volume, VolumeOptions};
