//! The start and the early end of operations.

use super::disk::SimFile;
use super::events::Event;
use super::node::{InFlight, Sending, Work};
use super::world::Inner;
use crate::byte_range::ByteRange;
use crate::file::Backing;
use crate::gather::{Gather, Segment};
use crate::limits::OPS_MAX;
use crate::op::{Errno, File, Op, Outcome, Token};

/// A simulated file that is open, and how it was opened.
pub(super) struct OpenSimFile {
    pub(super) sim: SimFile,
    pub(super) options: crate::FileOptions,
    pub(super) block_bytes: u32,
}

impl Inner {
    pub(super) fn submit(&mut self, id: u64, op: Op, token: Token) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if node.dead || node.ops.len() >= OPS_MAX {
            let error = if node.dead { Errno::CANCELED } else { Errno::AGAIN };
            node.push(token, crate::os::failed(op, error));
            return;
        }
        match op {
            Op::Accept { .. } | Op::Connect { .. } | Op::Recv { .. } | Op::Send { .. } => {
                self.submit_network(id, op, token);
            }
            Op::Timer { at } => {
                let key = self.new_id();
                let event = Some(self.events.add(at, Event::Timer { node: id, op: key }));
                self.insert(id, key, InFlight { token, work: Work::Timer, event });
            }
            // No descriptor lives in a simulation, so this is a handle of another loop.
            Op::Readable { .. } => self.refuse(id, op, token, Errno::BADF),
            file_op => self.submit_disk(id, file_op, token),
        }
    }

    fn submit_network(&mut self, id: u64, op: Op, token: Token) {
        match self.network_work(id, op) {
            Ok(work) => {
                let key = self.new_id();
                self.insert(id, key, InFlight { token, work, event: None });
                self.start(id, key);
            }
            Err((op, error)) => self.refuse(id, op, token, error),
        }
    }

    /// What an operation of the network becomes, if its handles are good.
    fn network_work(&self, id: u64, op: Op) -> Result<Work, (Op, Errno)> {
        let Some(node) = self.nodes.get(&id) else { return Err((op, Errno::BADF)) };
        let socket_known = |socket: crate::Socket| node.sockets.get(socket.index, socket.generation);
        let error = match &op {
            Op::Accept { listener } => match node.listeners.get(listener.index, listener.generation) {
                None => Some(Errno::BADF),
                Some(entry) => entry.accept.map(|_| Errno::BUSY),
            },
            Op::Recv { socket, into, min } => match socket_known(*socket) {
                None => Some(Errno::BADF),
                Some(_) if into.is_empty() || into.len() < *min => Some(Errno::INVAL),
                Some((connection, end)) => self.net.busy(*connection, *end, false).then_some(Errno::BUSY),
            },
            Op::Send { socket, .. } => match socket_known(*socket) {
                None => Some(Errno::BADF),
                Some((connection, end)) => self.net.busy(*connection, *end, true).then_some(Errno::BUSY),
            },
            _ => None,
        };
        if let Some(error) = error {
            return Err((op, error));
        }
        Ok(match op {
            Op::Accept { listener } => Work::Accept { listener },
            Op::Connect { to } => Work::Connect { to, from: None },
            Op::Recv { socket, into, min } => Work::Recv { socket, into, min: min.max(1), got: 0 },
            Op::Send { socket, gather } => match self.maps(id, &gather) {
                Ok(maps) => Work::Send { socket, sending: Sending::new(gather, maps) },
                Err(error) => return Err((Op::Send { socket, gather }, error)),
            },
            other => return Err((other, Errno::INVAL)),
        })
    }

    /// The files of the mapped segments, in order.
    fn maps(&self, id: u64, gather: &Gather) -> Result<Vec<SimFile>, Errno> {
        let mut maps = Vec::new();
        for segment in &gather.segments {
            if let Segment::Map { file, offset, len } = segment {
                let open = self.nodes.get(&id).and_then(|node| node.files.get(file.index, file.generation));
                let open = open.ok_or(Errno::BADF)?;
                let inside = ByteRange::new(*offset, *len as u64).ends_by(open.len());
                match &open.backing {
                    Backing::Sim(file) if inside && open.is_mapped() => maps.push(file.clone()),
                    _ => return Err(Errno::FAULT),
                }
            }
        }
        Ok(maps)
    }

    fn start(&mut self, id: u64, op: u64) {
        match self.nodes.get(&id).and_then(|node| node.ops.get(&op)).map(|op| &op.work) {
            Some(Work::Accept { listener }) => self.start_accept(id, op, *listener),
            Some(Work::Connect { .. }) => self.start_connect(id, op),
            Some(Work::Recv { socket, .. }) => self.start_stream(id, op, *socket, false),
            Some(Work::Send { socket, .. }) => self.start_stream(id, op, *socket, true),
            _ => {}
        }
    }

    pub(super) fn insert(&mut self, id: u64, op: u64, in_flight: InFlight) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.ops.insert(op, in_flight);
        }
    }

    pub(super) fn refuse(&mut self, id: u64, op: Op, token: Token, error: Errno) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.push(token, crate::os::failed(op, error));
        }
    }

    /// Ends an operation with an error, and takes back its event.
    pub(super) fn fail(&mut self, id: u64, op: u64, error: Errno) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if let Some(in_flight) = node.ops.get(&op) {
            self.events.remove(in_flight.event);
            node.complete(op, |work, _| work.fail(error));
        }
    }

    pub(super) fn timer_due(&mut self, id: u64, op: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.complete(op, |_, _| Outcome::TimedOut(Ok(())));
        }
    }

    pub(super) fn cancel(&mut self, id: u64, token: Token) {
        let Some(node) = self.nodes.get(&id) else { return };
        let of_token: Vec<u64> = node.ops.iter().filter(|(_, op)| op.token == token).map(|(op, _)| *op).collect();
        for op in of_token {
            let is_disk =
                |node: &super::node::Node| node.ops.get(&op).is_some_and(|op| matches!(op.work, Work::Disk { .. }));
            if self.nodes.get(&id).is_some_and(is_disk) {
                self.cancel_disk(id, op);
            } else {
                self.forget_stream_op(id, op);
                self.fail(id, op, Errno::CANCELED);
            }
        }
    }

    /// Every operation of a loop that dies ends.
    pub(super) fn cancel_everything(&mut self, id: u64) {
        let Some(node) = self.nodes.get(&id) else { return };
        let all: Vec<u64> = node.ops.keys().copied().collect();
        for op in all {
            self.fail(id, op, Errno::CANCELED);
        }
    }

    /// The simulated file behind a handle.
    pub(super) fn sim_file(&self, id: u64, file: File) -> Result<OpenSimFile, Errno> {
        let node = self.nodes.get(&id).filter(|node| !node.dead).ok_or(Errno::BADF)?;
        let open = node.files.get(file.index, file.generation).ok_or(Errno::BADF)?;
        match &open.backing {
            Backing::Sim(sim) => {
                Ok(OpenSimFile { sim: sim.clone(), options: open.options(), block_bytes: open.block_bytes() })
            }
            Backing::Os(_) => Err(Errno::BADF),
        }
    }

    pub(super) fn resident(&mut self, id: u64, file: File, offset: u64, len: usize) -> bool {
        let Ok(OpenSimFile { sim, options, .. }) = self.sim_file(id, file) else { return false };
        options.map && len > 0 && ByteRange::new(offset, len as u64).ends_by(sim.len()) && self.rng.one_in(2)
    }
}
