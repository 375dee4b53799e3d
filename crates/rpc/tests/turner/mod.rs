//! A thread that turns a node.

use std::sync::Arc;
use std::time::Duration;

use byway_fabric::node::{Deadline, Node, Op};

/// Turns a node until dropped.
pub struct Turner(Arc<Op>, Option<std::thread::JoinHandle<()>>);

impl Turner {
    pub fn of(node: &Node) -> Self {
        let op = Arc::new(node.start_accept().unwrap());
        let waited = Arc::clone(&op);
        Self(op, Some(std::thread::spawn(move || drop(waited.wait(Deadline::after(Duration::from_secs(100)))))))
    }
}

impl Drop for Turner {
    fn drop(&mut self) {
        self.0.cancel().unwrap();
        self.1.take().unwrap().join().unwrap();
    }
}
