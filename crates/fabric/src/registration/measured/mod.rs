//! Benchmarks of memory registration: its cost by size (Goglin, fig. 6), and its effect on sending a file (Dalessandro and
//! Wyckoff, HotI 2007). For `byway bench figures` and the example `registration_cost`; nothing else uses it.

mod cost;
mod populated;
mod ring;
mod sends;

pub use cost::{Cost, CostMeter};
pub use sends::{FileSender, SendSizes, Sent, Way};

/// Why something was not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// The system.
    #[error("the system refused it: {0}")]
    System(#[from] std::io::Error),
    /// The registration.
    #[error(transparent)]
    Refused(#[from] super::Refused),
    /// The cache's.
    #[error(transparent)]
    Get(#[from] super::GetError),
    /// A range of no bytes.
    #[error("nothing can be measured of no bytes: give a size")]
    Empty,
}

impl From<rustix::io::Errno> for MeasureError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.into())
    }
}
