//! Files that a client had open when the server process before this one ended.
//!
//! A descriptor keeps its rights when a file's mode changes, and a file may be made with `O_RDWR` and the mode 0444, as git makes its
//! objects. The client opens such a file again with the flags of the first time, which its mode now forbids. A server that is root
//! opens it with its own rights then, if the call's user owns the file, before and after. The owner may change the mode, and could open the
//! file so; hence the server need not know whether the client had it open.

use std::os::fd::BorrowedFd;

use byway_fabric::access::Right;
use rustix::io::Errno;

use super::super::wire::{CallError, OPENS_AGAIN};
use super::calls::Asked;
use super::table::Node;
use super::tree;
use super::workers::as_server;

/// Whether a call opens again what the client had open, and for which user.
#[derive(Clone, Copy)]
pub(super) struct Reopening(Option<u32>);

impl Reopening {
    pub(super) fn of(asked: &Asked<'_>, node: &Node) -> Result<Self, CallError> {
        // Who may change nothing may not change a mode either.
        let is_again = asked.arguments.extra.get() == OPENS_AGAIN && node.right != Right::Read;
        Ok(Self(if is_again { Some(asked.user(node)?.uid) } else { None }))
    }

    /// Opens a node by `open`, on a worker's thread.
    pub(super) fn open<T>(self, node: BorrowedFd<'_>, open: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
        let opened = open();
        let is_refused = opened.as_ref().is_err_and(|error| *error == Errno::ACCESS);
        if is_refused && self.0.is_some() && self.0 == tree::owner(node) {
            let opened = as_server(open)??;
            // It may have got another owner meanwhile.
            return if self.0 == tree::owner(node) { Ok(opened) } else { Err(Errno::ACCESS) };
        }
        opened
    }
}
