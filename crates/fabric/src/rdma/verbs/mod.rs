//! The parts of libibverbs and librdmacm that are used here, as `#[repr(C)]` definitions of our own.
//!
//! Written by hand and kept small: what the two libraries hold for themselves is opaque, and a structure that only they
//! allocate ends after its last field that is read here. `tests.rs` compares each definition with the real headers.
//!
//! The libraries are loaded at run time ([`Functions`]). The calls on the data path are no symbols of the libraries: in C
//! they are inline functions that go through the table of the device's provider, [`ContextOps`].

mod connection;
mod functions;
mod structs;
#[cfg(test)]
mod tests;

pub use connection::*;
pub use functions::*;
pub use structs::*;
