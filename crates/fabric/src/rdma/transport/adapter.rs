//! A device as a loop uses it: one completion queue, one shared receive queue, the pool registered once.
//!
//! Receives are posted for connections, [`RDMA_RECEIVES`] for each, and are taken away again as they come back when a
//! connection has gone. When the last one has gone the whole queue is given up: that also brings back the receives that a
//! provider lost with the connections that broke in the middle of a message (soft-RoCE does); until then others are posted
//! in their place (`recv_credits.rs`).

use std::cell::OnceCell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::rc::Rc;

use byway_reactor::{Descriptor, FramePool, Op, Reactor, Token};

use super::super::completion::CompletionQueue;
use super::super::device::Device;
use super::super::domain::{Domain, PoolRegion};
use super::super::endpoint::Endpoint;
use super::super::error::RdmaError;
use super::super::local::LocalMemory;
use super::super::memory::{Payload, Segment};
use super::super::operations::{Completion, Kind};
use super::super::queue_pair::QueuePairOptions;
use super::super::receive::SharedReceiveQueue;
use super::ConnectionId;
use super::Down;
use super::recv_credits::{Epoch, RecvCredits};
use crate::limits::{
    RDMA_CONNECTION_OPERATIONS_MAX, RDMA_INLINE_BYTES, RDMA_OPERATIONS_MAX, RDMA_RECEIVES_MAX, RDMA_SEGMENTS_MAX,
    SMALL_BYTES_MAX,
};
use crate::registration::Limits;
use crate::wire::HEADER_BYTES;

/// Segments of a receive: the header, and the payload apart from it, so that the payload begins a page.
const RECEIVE_SEGMENTS: u32 = 2;

pub(super) struct Adapter {
    pub(super) device: Device,
    domain: Domain,
    completions: CompletionQueue,
    receives: Option<SharedReceiveQueue>,
    pub(super) region: Rc<PoolRegion>,
    pool: FramePool,
    /// Memory outside the pool, once there was any.
    local: OnceCell<LocalMemory>,
    /// How much of that stays registered.
    limits: Limits,
    descriptor: Descriptor,
    /// Whose a queue pair is, and how many others had ended when it last took a message, or began.
    queue_pairs: HashMap<u32, (ConnectionId, Epoch)>,
    receives_max: u32,
    recv_credits: RecvCredits,
    polled: Vec<Completion>,
}

impl Adapter {
    /// A device with nothing posted.
    pub(super) fn open(device: Device, reactor: &mut Reactor, limits: Limits) -> Result<Self, RdmaError> {
        let domain = Domain::new(&device)?;
        let receives_max = RDMA_RECEIVES_MAX.min(device.receives_max()).min(device.completions_max() / 2);
        let entries = (receives_max + RDMA_OPERATIONS_MAX).min(device.completions_max());
        let completions = CompletionQueue::new(&device, entries)?;
        let pool = reactor.frames().clone();
        let region = domain.register_pool(&pool)?;
        let fd = completions.as_fd().try_clone_to_owned();
        let added = fd.and_then(|fd| reactor.add_descriptor(fd));
        let descriptor = added.map_err(|error| RdmaError::System {
            call: "a loop waiting for completions",
            errno: byway_reactor::Errno::from_io_error(&error).unwrap_or(byway_reactor::Errno::OPNOTSUPP),
        })?;
        completions.arm()?;
        let (queue_pairs, polled) = Default::default();
        Ok(Self {
            device,
            domain,
            completions,
            receives: None,
            region,
            pool,
            local: OnceCell::new(),
            limits,
            descriptor,
            queue_pairs,
            receives_max,
            recv_credits: RecvCredits::new(receives_max),
            polled,
        })
    }

    /// Segments of one operation.
    pub(super) fn segments_max(&self) -> usize {
        self.device.segments_max().min(RDMA_SEGMENTS_MAX) as usize
    }

    /// Memory outside the pool.
    pub(super) fn local(&self) -> &LocalMemory {
        self.local.get_or_init(|| LocalMemory::new(&self.domain, self.limits))
    }

    /// What is known of memory outside the pool, if there was any.
    pub(super) fn known_local(&self) -> Option<&LocalMemory> {
        self.local.get()
    }

    /// Where windows of its connections are opened.
    pub(super) const fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Promises the peer of one more connection its receives, and posts them.
    pub(super) fn reserve(&mut self) -> Result<(), Down> {
        let posted = self.post_lacking();
        let doubted = self.recv_credits.doubted();
        if posted.is_err() && doubted > 0 {
            tracing::warn!(doubted, "connection refused: the device may have lost too many receives");
        }
        posted.map(|()| self.recv_credits.reserve())
    }

    fn post_lacking(&mut self) -> Result<(), Down> {
        let lacking = self.recv_credits.lacking().ok_or(Down::TooMany)?;
        if self.receives.is_none() {
            let made = SharedReceiveQueue::new(&self.domain, &self.completions, self.receives_max, RECEIVE_SEGMENTS);
            self.receives = Some(made.map_err(Down::Setup)?);
        }
        for _ in 0..lacking {
            // Half of the pool is for payloads.
            if self.pool.free_bytes() < self.pool.bytes() / 2 {
                return Err(Down::NoFrames);
            }
            let payload = self.new_receive().ok_or(Down::NoFrames)?;
            self.post(payload).map_err(Down::Setup)?;
        }
        Ok(())
    }

    fn new_receive(&self) -> Option<Payload> {
        let segment = |len| {
            let frame = self.pool.alloc(len)?;
            Segment::of_frame(&self.region, frame, 0..len).ok()
        };
        Some(vec![segment(HEADER_BYTES)?, segment(SMALL_BYTES_MAX)?].into())
    }

    fn post(&mut self, payload: Payload) -> Result<(), RdmaError> {
        let number = self.recv_credits.post();
        let posted = self.receives.as_ref().map(|receives| receives.post(payload, number));
        if !matches!(posted, Some(Ok(()))) {
            // There are fewer then: the connection for which it was posted is at its end, or the device is.
            self.recv_credits.drop_posted(number);
            return Err(RdmaError::State("a receive"));
        }
        Ok(())
    }

    /// A connection has gone that had receives reserved.
    pub(super) fn release(&mut self, into: &mut impl Extend<(Option<ConnectionId>, Completion)>) {
        if self.recv_credits.release() {
            self.receives = None;
            self.poll(into);
            self.recv_credits.forget();
        }
    }

    /// Takes back the memory of a message.
    pub(super) fn take_back(&mut self, payload: Payload) {
        if self.recv_credits.take_back() {
            // Of the device's end there is other news.
            let _ = self.post(payload);
        }
    }

    /// Gives an endpoint its queue pair, which is `connection`'s.
    pub(super) fn create_queue_pair(
        &mut self,
        endpoint: &mut Endpoint,
        connection: ConnectionId,
    ) -> Result<(), RdmaError> {
        let receives = self.receives.as_ref().ok_or(RdmaError::State("create_queue_pair"))?;
        let options = QueuePairOptions {
            sends_max: RDMA_CONNECTION_OPERATIONS_MAX.min(self.device.sends_max()),
            segments_max: self.segments_max() as u32,
            inline_bytes: RDMA_INLINE_BYTES,
        };
        endpoint.create_queue_pair(receives, options)?;
        self.queue_pairs.insert(endpoint.queue_pair_number(), (connection, self.recv_credits.epoch()));
        Ok(())
    }

    /// Ends a connection: all that it has posted has completed afterwards.
    pub(super) fn end(&mut self, endpoint: Endpoint, into: &mut impl Extend<(Option<ConnectionId>, Completion)>) {
        let number = endpoint.queue_pair_number();
        endpoint.disconnect();
        drop(endpoint);
        // While the number is this connection's: the next queue pair may have the same.
        self.poll(into);
        if self.queue_pairs.remove(&number).is_some() {
            self.recv_credits.end();
        }
    }

    /// Takes what has completed, with the connection of each.
    pub(super) fn poll(&mut self, into: &mut impl Extend<(Option<ConnectionId>, Completion)>) {
        if let Err(error) = self.completions.poll(&mut self.polled) {
            tracing::error!(%error, "a completion queue cannot be polled");
        }
        for completion in self.polled.drain(..) {
            let owner = self.queue_pairs.get_mut(&completion.queue_pair);
            let connection = owner.as_ref().map(|(connection, _)| *connection);
            if completion.kind == Kind::Receive {
                if completion.queue_pair == 0 {
                    // It was posted to a queue that is given up.
                    self.recv_credits.drop_posted(completion.token);
                    continue;
                }
                let took = owner.filter(|_| completion.result.is_ok());
                let begun = took.map(|(_, epoch)| std::mem::replace(epoch, self.recv_credits.epoch()));
                self.recv_credits.complete(completion.token, begun);
            }
            into.extend([(connection, completion)]);
        }
    }

    /// The descriptor was readable: takes the events from it, and asks for the next one. Completions that came before
    /// that are polled afterwards, because no event reports them.
    pub(super) fn rearm(&mut self, into: &mut impl Extend<(Option<ConnectionId>, Completion)>) {
        self.completions.acknowledge();
        self.poll(into);
        if let Err(error) = self.completions.arm() {
            tracing::error!(%error, "a completion queue cannot be armed");
        }
        self.poll(into);
    }

    /// Waits for the next event.
    pub(super) fn wait(&self, reactor: &mut Reactor, token: Token) {
        reactor.submit(Op::Readable { descriptor: self.descriptor }, token);
    }

    /// Its events are no longer waited for.
    pub(super) fn forget(&self, reactor: &mut Reactor) {
        reactor.remove_descriptor(self.descriptor);
    }
}
