//! Two nodes with a session that one thread turns by turns, so that nothing else runs.

use std::time::{Duration, Instant};

use byway_fabric::node::{Address, Node, NodeOptions, Op, Outcome, Session, WaitError};

/// Whatever hangs, hangs for so long.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Pair {
    pub server: Node,
    pub client: Node,
    pub to_client: Session,
    pub to_server: Session,
}

impl Pair {
    pub fn new(address: &Address, options: &NodeOptions) -> Self {
        let (server, client) = (Node::open(options).unwrap(), Node::open(options).unwrap());
        let bound = server.listen(address).unwrap();
        let address = bound.map_or_else(|| address.clone(), Address::Tcp);
        let (accept, connect) = (server.start_accept().unwrap(), client.start_connect(&address).unwrap());
        let [to_server, to_client] = [&connect, &accept].map(|op| match turn_until_ended(&[&server, &client], op) {
            Outcome::Session(session) => session,
            other => panic!("{other:?}"),
        });
        Self { server, client, to_client, to_server }
    }

    /// Turns both until an operation of the client is done.
    pub fn end(&self, op: &Op) {
        assert_eq!(turn_until_ended(&[&self.client, &self.server], op), Outcome::Done);
    }
}

pub fn turn_until_ended(nodes: &[&Node], op: &Op) -> Outcome {
    let began = Instant::now();
    loop {
        for node in nodes {
            node.progress().unwrap();
        }
        match op.test() {
            Ok(result) => return result.unwrap(),
            Err(WaitError::Deadline) => assert!(began.elapsed() < PATIENCE, "the operation does not end"),
            Err(error) => panic!("{error}"),
        }
    }
}
