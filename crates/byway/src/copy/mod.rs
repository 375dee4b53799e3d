//! `byway copy`: moves an image from one endpoint to another, many pieces at a time, holes as holes. An endpoint is a file,
//! a block device, or a volume of another machine over either protocol. Files of shares are copied by `tree`.
//!
//! The engine (`engine.rs`) does not depend on the protocol: it submits requests to two [`Endpoint`]s that share one loop,
//! and reaps. Done pieces are written to a resume file (`resume.rs`) only after the destination was flushed, so that a
//! killed copy, also one that lost power, continues from there.

mod claim;
mod command;
mod endpoint;
mod engine;
mod file;
mod location;
mod pieces;
mod progress;
mod remote;
mod resume;
mod tree;

#[cfg(test)]
mod tests;

pub use claim::{Claim, ClaimError};
pub use command::{CopyArguments, run};
pub use endpoint::{Answer, Done, Endpoint, EndpointError, Request};
pub use engine::{Copied, CopyError, CopyOptions, Phase, Progress, copy};
pub use file::FileEndpoint;
pub use location::{Location, LocationError, LocationNameError};
pub use remote::RemoteEndpoint;
pub use resume::{Record, ResumeLog};
