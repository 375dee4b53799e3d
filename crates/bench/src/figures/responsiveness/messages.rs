//! Nodes that are asked by messages: a thread that waits for any of several operations, and threads that share a group. Nodes
//! with a thread for calls wait in `next_call`, which is in `program`.

use std::collections::BTreeMap;

use byway_fabric::node::{Completed, Deadline, Group, Node, Op, Outcome, Session};

use super::program::{ResponderError, failed};

/// Of a group: the receives of the sessions, and who comes next. More sessions than that are an error.
const GROUP_OPS: usize = 64;
/// The name of the operation that waits for the next session; others are named by the session whose next message they wait for.
const ACCEPT: u64 = 0;

/// An operation that is waited for.
struct Awaited {
    /// The session's, or [`ACCEPT`].
    name: u64,
    op: Op,
}

impl Awaited {
    /// The next session.
    fn accept(node: &Node) -> Result<Self, ResponderError> {
        Ok(Self { name: ACCEPT, op: node.start_accept().map_err(failed)? })
    }
}

/// Answers the messages of all sessions, waiting for any of its receives and for the next session; `counts` after each.
pub(super) fn answer_any(node: &Node, mut counts: impl FnMut()) -> Result<(), ResponderError> {
    let mut waiting = BTreeMap::from([(ACCEPT, node.start_accept().map_err(failed)?)]);
    loop {
        let (names, ops): (Vec<u64>, Vec<&Op>) = waiting.iter().map(|(&name, op)| (name, op)).unzip();
        let (place, result) = node.wait_any(&ops, Deadline::NEVER).map_err(failed)?;
        let name = names[place];
        waiting.remove(&name);
        for Awaited { name, op } in taken(node, name, result)? {
            waiting.insert(name, op);
        }
        counts();
    }
}

/// A group of the same operations, for threads to share.
pub(super) fn group(node: &Node) -> Result<Group, ResponderError> {
    let group = node.group(GROUP_OPS).map_err(failed)?;
    add(&group, Awaited::accept(node)?)?;
    Ok(group)
}

/// Answers what comes out of the group, which other threads do as well; `counts` after each.
pub(super) fn answer_group(node: &Node, group: &Group, mut counts: impl FnMut()) -> Result<(), ResponderError> {
    loop {
        let completion = group.wait(Deadline::NEVER).map_err(failed)?;
        for operation in taken(node, completion.context, completion.result)? {
            add(group, operation)?;
        }
        counts();
    }
}

fn add(group: &Group, Awaited { name, op }: Awaited) -> Result<(), ResponderError> {
    group.add(op, name).map(drop).map_err(|full| failed(full.reason).into())
}

/// Deals with what an operation brought; gives those that are to be waited for next.
fn taken(node: &Node, name: u64, result: Completed) -> Result<Vec<Awaited>, ResponderError> {
    let mut next = Vec::new();
    match result {
        Ok(Outcome::Message(message)) => {
            // Who has gone needs no answer.
            let _ = node.send(message.session, &[], &message.payload);
            next.extend(receive(node, message.session));
        }
        Ok(Outcome::Session(session)) => {
            next.push(Awaited::accept(node)?);
            next.extend(receive(node, session));
        }
        Err(error) if name == ACCEPT => return Err(failed(error).into()),
        // The session has ended, and nothing more comes of it.
        Ok(_) | Err(_) => {}
    }
    Ok(next)
}

/// Waits for a session's next message, unless it has ended.
fn receive(node: &Node, session: Session) -> Option<Awaited> {
    Some(Awaited { name: session.to_u64(), op: node.start_receive(Some(session)).ok()? })
}
