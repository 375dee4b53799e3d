//! Files: a directory of one machine, used by others.
//!
//! A [`Share`] is a directory and its rules. The [`server`] answers the calls of [`wire`]: each path step is one name, opened
//! relative to a held descriptor and never out of the share. [`locks`] holds `flock` and POSIX locks across clients. The
//! [`client`] is for a mount and for commands; it finds its files again when the server was restarted.

pub mod client;
pub mod grace;
pub mod leases;
pub mod locks;
pub mod server;
pub mod share;
mod state;
mod sync_point;
pub mod user_map;
pub mod wire;

pub use self::share::{NOBODY, Share, ShareError, ShareSpec, Users, Writers};
