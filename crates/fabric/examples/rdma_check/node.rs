//! One end of the checks' connections, and two of them.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use byway_fabric::rdma::{
    Completion, CompletionQueue, Device, Domain, Endpoint, Event, EventChannel, EventKind, Kind, Library, Listener,
    Payload, PoolRegion, QueuePairOptions, Segment, SharedReceiveQueue,
};
use byway_reactor::FramePool;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A check's end; the error is shown.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What is waited for comes within this, or never.
pub const PATIENCE: Duration = Duration::from_mins(1);
/// Completion queue entries of a node.
pub const ENTRIES: u32 = 1024;
/// Receives that a node has posted.
pub const RECEIVES: u32 = 64;
/// Bytes of each receive.
pub const RECEIVE_BYTES: usize = 128;
/// Operations of one connection.
pub const SENDS: u32 = 64;
/// Segments of one operation.
pub const SEGMENTS: u32 = 16;
const POOL_BYTES: usize = 8 << 20;

/// A device with all that its connections share.
pub struct Node {
    pub device: Device,
    pub domain: Domain,
    pub completions: CompletionQueue,
    pub receives: SharedReceiveQueue,
    pub pool: FramePool,
    pub region: Rc<PoolRegion>,
    pub channel: EventChannel,
    /// What has arrived and was not taken.
    pub events: Vec<Event>,
    pub ended: Vec<Completion>,
    /// How often this node slept, and how often it was woken by the completion queue.
    pub sleeps: u32,
    pub wakes: u32,
}

/// Fails with the reason unless `condition` holds.
pub fn ensure(condition: bool, reason: impl FnOnce() -> String) -> Outcome<()> {
    if condition { Ok(()) } else { Err(reason().into()) }
}

impl Node {
    /// A node on the device of `address`, with all its receives posted.
    pub fn open(library: Library, address: IpAddr) -> Outcome<Self> {
        let device = Device::open(library, address)?;
        let domain = Domain::new(&device)?;
        let completions = CompletionQueue::new(&device, ENTRIES)?;
        let receives = SharedReceiveQueue::new(&domain, &completions, RECEIVES, 1)?;
        let pool = FramePool::new(POOL_BYTES)?;
        let region = domain.register_pool(&pool)?;
        let channel = EventChannel::new(library)?;
        let (events, ended) = Default::default();
        let (sleeps, wakes) = (0, 0);
        let node = Self { device, domain, completions, receives, pool, region, channel, events, ended, sleeps, wakes };
        for token in 0..u64::from(RECEIVES) {
            let frame = node.pool.alloc(RECEIVE_BYTES).ok_or("the pool is empty")?;
            node.post_receive(
                Segment::of_frame(&node.region, frame, 0..RECEIVE_BYTES).map_err(|_| "not in the pool")?,
                token,
            )?;
        }
        Ok(node)
    }

    /// Posts memory for a message.
    pub fn post_receive(&self, segment: Segment, token: u64) -> Outcome<()> {
        self.receives.post(Payload::from(segment), token).map_err(|(error, _)| error.into())
    }

    /// What connections of this node are made with.
    pub fn options() -> QueuePairOptions {
        QueuePairOptions { sends_max: SENDS, segments_max: SEGMENTS, inline_bytes: RECEIVE_BYTES as u32 }
    }

    /// Looks for news without waiting; whether there were any.
    pub fn gather(&mut self) -> Outcome<bool> {
        let before = (self.events.len(), self.ended.len());
        while let Some(event) = self.channel.next_event()? {
            self.events.push(event);
        }
        self.completions.poll(&mut self.ended)?;
        Ok(before != (self.events.len(), self.ended.len()))
    }

    /// Waits until `look` finds something among the news.
    pub fn wait_for<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> Outcome<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.gather()?;
            if let Some(found) = look(self) {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                let (events, ended) = (&self.events, &self.ended);
                return Err(format!("waited in vain for {what}; events {events:?}, completions {ended:?}").into());
            }
            sleep(&mut [self], deadline)?;
        }
    }

    /// The first event of `token` that `pick` wants.
    pub fn take_event<T>(&mut self, token: u64, pick: impl Fn(EventKind) -> Result<T, EventKind>) -> Option<T> {
        for at in 0..self.events.len() {
            if self.events[at].token != token {
                continue;
            }
            match pick(self.events.remove(at).kind) {
                Ok(picked) => return Some(picked),
                Err(kind) => self.events.insert(at, Event { token, kind }),
            }
        }
        None
    }

    /// A frame with these bytes, as a segment.
    pub fn segment_of(&self, bytes: &[u8]) -> Outcome<Segment> {
        let mut frame = self.pool.alloc(bytes.len()).ok_or("the pool is empty")?;
        frame.write(0, bytes);
        Segment::of_frame(&self.region, frame, 0..bytes.len()).map_err(|_| "not in the pool".into())
    }

    /// The first message that came.
    pub fn take_receive(&mut self) -> Option<Completion> {
        let at = self.ended.iter().position(|completion| completion.kind == Kind::Receive)?;
        Some(self.ended.remove(at))
    }

    /// The end of the operation called `token`.
    pub fn take_sent(&mut self, token: u64) -> Option<Completion> {
        let is_it = |completion: &Completion| completion.kind != Kind::Receive && completion.token == token;
        let at = self.ended.iter().position(is_it)?;
        Some(self.ended.remove(at))
    }
}

/// Waits for news of any node, asleep, at most until `deadline`; whether there were any.
pub fn sleep(nodes: &mut [&mut Node], deadline: Instant) -> Outcome<bool> {
    if gather(nodes)? {
        return Ok(true);
    }
    for node in nodes.iter_mut() {
        node.completions.arm()?;
    }
    // What came before the arming causes no event.
    if gather(nodes)? {
        return Ok(true);
    }
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
    let mut fds = Vec::new();
    for node in nodes.iter() {
        fds.push(PollFd::from_borrowed_fd(node.completions.as_fd(), PollFlags::IN));
        fds.push(PollFd::from_borrowed_fd(node.channel.as_fd(), PollFlags::IN));
    }
    poll(&mut fds, Some(&timeout))?;
    let woken: Vec<bool> = fds.iter().step_by(2).map(|fd| !fd.revents().is_empty()).collect();
    drop(fds);
    for (node, is_woken) in nodes.iter_mut().zip(woken) {
        node.sleeps += 1;
        node.wakes += u32::from(is_woken);
        node.completions.acknowledge();
    }
    gather(nodes)
}

fn gather(nodes: &mut [&mut Node]) -> Outcome<bool> {
    let mut any = false;
    for node in nodes.iter_mut() {
        any |= node.gather()?;
    }
    Ok(any)
}

/// Two nodes on one device.
pub struct Pair {
    pub client: Node,
    pub server: Node,
    pub listener: Listener,
    next_token: u64,
}

/// The token of the listener.
pub const LISTENER: u64 = 1;

impl Pair {
    /// Both, with the server listening.
    pub fn open(library: Library, address: IpAddr) -> Outcome<Self> {
        let client = Node::open(library, address)?;
        let server = Node::open(library, address)?;
        let listener = server.channel.listen(SocketAddr::new(address, 0), LISTENER)?;
        Ok(Self { client, server, listener, next_token: 100 })
    }

    /// A new connection: the client's end and the server's.
    pub fn connect(&mut self) -> Outcome<(Endpoint, Endpoint)> {
        let token = self.next_token;
        self.next_token += 1;
        let to = self.listener.local_address().ok_or("the listener has no address")?;
        let client = start(&mut self.client, to, token, b"from the client")?;
        let (server, asked) = self.server.wait_for("a connect request", take_request)?;
        ensure(asked.starts_with(b"from the client"), || format!("the server was told {asked:?}"))?;
        let mut server = server;
        server.set_token(token);
        server.create_queue_pair(&self.server.receives, Node::options())?;
        server.accept(b"from the server")?;
        let told = self.client.wait_for("the connection", |node| node.take_event(token, established))?;
        ensure(told.starts_with(b"from the server"), || format!("the client was told {told:?}"))?;
        self.server.wait_for("the connection", |node| node.take_event(token, established))?;
        Ok((client, server))
    }
}

/// A client's way to the connect request.
pub fn start(node: &mut Node, to: SocketAddr, token: u64, private_data: &[u8]) -> Outcome<Endpoint> {
    let mut endpoint = node.channel.connect(to, None, token)?;
    node.wait_for("the address", |node| {
        node.take_event(token, |kind| if matches!(kind, EventKind::AddressResolved) { Ok(()) } else { Err(kind) })
    })?;
    endpoint.resolve_route()?;
    node.wait_for("the route", |node| {
        node.take_event(token, |kind| if matches!(kind, EventKind::RouteResolved) { Ok(()) } else { Err(kind) })
    })?;
    endpoint.create_queue_pair(&node.receives, Node::options())?;
    endpoint.connect(private_data)?;
    Ok(endpoint)
}

/// A connect request's endpoint and private data.
pub fn take_request(node: &mut Node) -> Option<(Endpoint, Vec<u8>)> {
    node.take_event(LISTENER, |kind| match kind {
        EventKind::ConnectRequest { endpoint, private_data } => Ok((endpoint, private_data)),
        other => Err(other),
    })
}

/// The peer's private data in the event that a connection is there.
pub fn established(kind: EventKind) -> Result<Vec<u8>, EventKind> {
    match kind {
        EventKind::Established { private_data } => Ok(private_data),
        other => Err(other),
    }
}
