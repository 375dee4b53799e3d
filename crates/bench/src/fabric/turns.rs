//! The turns of this benchmark's loops: a few completions at a time.
//!
//! A server that handled a hundred blocks before it requested the next ones would let its clients wait, and then wait for them.

use std::collections::VecDeque;

use byway_reactor::{Completion, Reactor, Wait};

use super::FabricBenchError;

/// Completions of a turn: about 8 blocks.
const TURN_COMPLETIONS: usize = 16;

/// See the module.
#[derive(Default)]
pub(super) struct Turns {
    ready: VecDeque<Completion>,
    reaped: Vec<Completion>,
}

impl Turns {
    /// Starts what was submitted, and gives the completions of the next turn; if there are none, it waits for one or not.
    pub(super) fn next(
        &mut self,
        reactor: &mut Reactor,
        wait: bool,
    ) -> Result<impl Iterator<Item = Completion> + '_, FabricBenchError> {
        let wait = if wait && self.ready.is_empty() { Wait::Block } else { Wait::Poll };
        reactor.reap(&mut self.reaped, wait).map_err(FabricBenchError::Loop)?;
        self.ready.extend(self.reaped.drain(..));
        let count = self.ready.len().min(TURN_COMPLETIONS);
        Ok(self.ready.drain(..count))
    }
}
