//! Calls with windows of memory: request, pull, push, reply.
//!
//! A caller sends 64 bytes of arguments, and a small payload or the key of a window. The server answers with a status, 64
//! bytes, and perhaps a payload: small ones with the reply, large ones straight into the caller's window. What the caller
//! wants written and is large, the server pulls when it has a frame for it. Both tables here are pure: [`Calls`] is the
//! caller's, [`Inbound`] the server's, one for each session.
//!
//! [`node`] is for programs: calls on a [`Node`](byway_fabric::node::Node), which can be handed on to a third node.

#![forbid(unsafe_code)]

pub mod limits;
pub mod node;
pub mod token;
pub mod wire;

mod calls;
mod inbound;

pub use calls::{Answer, Calls, Progress};
pub use inbound::{Inbound, InboundError};
