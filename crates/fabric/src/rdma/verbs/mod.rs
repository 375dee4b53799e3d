//! `#[repr(C)]` definitions of the parts of libibverbs and librdmacm that byway uses.
//!
//! They are written by hand and kept small: private parts of the two libraries are opaque, and a structure that only they
//! allocate ends after the last field that byway reads. `tests.rs` compares each definition with the real headers.
//!
//! The libraries are loaded at run time ([`Functions`]). The calls on the data path are not symbols of the libraries: in C
//! they are inline functions that go through the table of the device's provider, [`ContextOps`].

/// Constants of the headers, and a list of them by that name for the comparison with the headers.
macro_rules! constants {
    ($all:ident; $($kind:ty: $($name:ident = $value:expr),+;)+) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`")]
            pub const $name: $kind = $value;
        )+)+
        #[cfg(test)]
        pub(super) const $all: &[(&str, u64)] = &[$($((stringify!($name), $name as u64)),+),+];
    };
}

mod connection;
mod functions;
mod structs;
#[cfg(test)]
mod tests;

pub use connection::*;
pub use functions::*;
pub use structs::*;
