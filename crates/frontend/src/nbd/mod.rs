//! The NBD protocol, both sides, without I/O.
//!
//! The protocol document is `doc/proto.md` of NetworkBlockDevice/nbd; extended headers and 64-bit
//! block status are in its branch `extension-ext-header`. A name in capitals (`NBD_OPT_GO`) is that
//! document's name. Nothing here uses a socket: a driver passes in received bytes and sends the output.
//!
//! - Server: [`handshake`] until a [`handshake::Negotiated`] comes out, then [`transmission`] reads
//!   requests and [`reply`] and [`block_status`] write the headers of the answers. Payloads never pass through here.
//! - Client: [`client`], the same two phases from the other side.
//! - Both: [`wire`] (layouts and numbers), [`flags`], [`errno`], [`request`] (requests and the rules that they must keep).

pub mod block_status;
pub mod client;
pub mod errno;
pub mod export;
pub mod flags;
pub mod handshake;
mod options;
pub mod reply;
pub mod request;
pub mod server;
pub mod transmission;
pub mod wire;
