//! Servers, volumes and shares as a command line names them: by URI, whichever wire leads there.
//!
//! - [`uri`] reads and writes every address: of listeners, of byway's own protocol, of NBD.
//! - [`Remote`] is a volume of a node or of an NBD server: `copy`, `bench`, `ls` and `info` use it alike.
//! - [`tls`] has the flags for certificates, [`units`] sizes and times, [`output`] standard output of all commands.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod error;
pub mod output;
pub mod tls;
pub mod units;
pub mod uri;
mod volume;

pub use error::{RemoteError, native_failed, nbd_failed};
pub use uri::{RemoteUri, RemoteUriError, TreeUri};
pub use volume::{
    Remote, RemoteDone, RemoteInfo, RemoteOptions, TransferError, ask, break_off, close, is_blank, leave_after,
    nbd_description, open, turn,
};

use std::net::SocketAddr;

use byway_reactor::IoChoice;

/// Reads an address of a node's metrics: `ADDRESS:PORT`, also with `http://` before it, as `byway serve` prints it.
///
/// # Errors
/// In words.
pub fn http_address(text: &str) -> Result<SocketAddr, String> {
    let address = text.strip_prefix("http://").unwrap_or(text);
    address.parse().map_err(|_| format!("invalid address `{text}`; write ADDRESS:PORT, for example 127.0.0.1:4712"))
}

/// Reads `--io`.
///
/// # Errors
/// In words.
pub fn parse_io(text: &str) -> Result<IoChoice, String> {
    match text {
        "auto" => Ok(IoChoice::Auto),
        "uring" => Ok(IoChoice::Uring),
        "epoll" => Ok(IoChoice::Epoll),
        _ => Err(format!("`{text}` is not one of auto, uring, epoll")),
    }
}
