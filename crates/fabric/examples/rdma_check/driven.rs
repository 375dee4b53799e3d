//! The transport, driven by two loops of this process.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use byway_fabric::rdma::transport::{ConnectionId, CreditError, Down, Event, GetFailed, Got, Received, Transport};
use byway_fabric::rdma::{Report, Window, WindowAddress, WorkError};
use byway_fabric::registration::Limits;
use byway_reactor::{Frame, FrameRange, Gather, IoChoice, Reactor, Token, Wait};

use crate::memory::pattern;
use crate::node::{Node, Outcome, PATIENCE, Pair, ensure};

const POOL_BYTES: usize = 16 << 20;
/// What byway's peers say first: see docs/wire.md.
const GREETING: &[u8; 16] = b"byway-rd\x01\0\0\0\x10\0\0\0";
/// Messages without an answer.
const CREDITS: usize = 16;

/// A loop with its transport, and what has happened on it.
struct Side {
    reactor: Reactor,
    transport: Transport,
    messages: VecDeque<(ConnectionId, Received)>,
    connected: Vec<ConnectionId>,
    downs: Vec<(ConnectionId, Down)>,
    gots: Vec<Got>,
}

impl Side {
    fn open() -> Outcome<Self> {
        let reactor = Reactor::open(IoChoice::Auto, POOL_BYTES)?;
        let transport = Transport::new(Token::new(1, 1, 0, 0), Limits::default());
        let (messages, connected, downs, gots) = Default::default();
        Ok(Self { reactor, transport, messages, connected, downs, gots })
    }

    /// Goes on for a moment.
    fn turn(&mut self) -> Outcome<()> {
        self.transport.flush(&mut self.reactor);
        let mut completions = Vec::new();
        let until = self.reactor.now() + Duration::from_millis(1);
        self.reactor.reap(&mut completions, Wait::Until(until))?;
        for completion in &completions {
            self.transport.handle(&mut self.reactor, completion);
        }
        self.gots.extend(self.transport.take_gots());
        while let Some(event) = self.transport.next_event() {
            match event {
                Event::Asked { connection, .. } => self.transport.accept(&mut self.reactor, connection),
                Event::Connected(connection) => self.connected.push(connection),
                Event::Message(connection, received) => self.messages.push_back((connection, received)),
                Event::Sent(..) => {}
                Event::Down(connection, down) => self.downs.push((connection, down)),
            }
        }
        self.gots.extend(self.transport.take_gots());
        Ok(())
    }

    /// The next message, as its header's first byte and its payload; its memory goes back.
    fn take_message(&mut self) -> Option<(u8, Vec<u8>)> {
        let (connection, received) = self.messages.pop_front()?;
        let said = (received.header()[0], received.payload().to_vec());
        self.transport.done_with(connection, received);
        Some(said)
    }

    fn frame(&self, bytes: &[u8]) -> Outcome<Frame> {
        let mut frame = self.reactor.frames().alloc(bytes.len()).ok_or("the pool is empty")?;
        frame.write(0, bytes);
        Ok(frame)
    }

    fn say(&mut self, connection: ConnectionId, first: u8, payload: Gather) {
        let mut header = [0x5a; 128];
        header[0] = first;
        self.transport.send(connection, header, payload);
    }
}

/// A client and a server.
struct Sides {
    client: Side,
    server: Side,
    to: SocketAddr,
}

impl Sides {
    fn open(address: IpAddr) -> Outcome<Self> {
        let (client, mut server) = (Side::open()?, Side::open()?);
        let to = server.transport.listen(&mut server.reactor, SocketAddr::new(address, 0))?;
        Ok(Self { client, server, to })
    }

    fn wait_for<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> Outcome<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self) {
                return Ok(found);
            }
            ensure(Instant::now() < deadline, || {
                format!("waited in vain for {what}; downs {:?} and {:?}", self.client.downs, self.server.downs)
            })?;
            self.client.turn()?;
            self.server.turn()?;
        }
    }

    fn connect(&mut self) -> Outcome<(ConnectionId, ConnectionId)> {
        let client = self.client.transport.connect(&mut self.client.reactor, self.to)?;
        self.wait_for("both ends", |sides| {
            (sides.client.connected.contains(&client) && !sides.server.connected.is_empty()).then_some(())
        })?;
        let server = self.server.connected.pop().ok_or("no server's end")?;
        Ok((client, server))
    }

    /// Ends everything; then all memory must be back.
    fn end(mut self, connections: &[(ConnectionId, ConnectionId)]) -> Outcome<()> {
        for (client, _) in connections {
            self.client.transport.close(*client);
        }
        self.wait_for("the end at the server", |sides| sides.server.transport.is_empty().then_some(()))?;
        for side in [&mut self.client, &mut self.server] {
            while side.take_message().is_some() {}
            side.gots.clear();
            let frames = side.reactor.frames();
            ensure(frames.free_bytes() == frames.bytes(), || format!("frames are lost: {frames:?}"))?;
        }
        Ok(())
    }
}

/// Messages of all lengths and kinds both ways, many more than there are credits.
pub fn messages(pair: Pair) -> Outcome<String> {
    let mut sides = sides(pair)?;
    let (client, server) = sides.connect()?;
    let lens = [0, 1, 24, 127, 128, 129, 4000, 4096, 16_000, 16 << 10];
    let count = 200;
    for number in 0..count {
        let bytes = pattern(number as u64, lens[number % lens.len()]);
        for (side, connection) in [(&mut sides.client, client), (&mut sides.server, server)] {
            let mut gather = side.transport.gather();
            match number % 3 {
                0 => gather.push_head(&bytes),
                1 if !bytes.is_empty() => gather.push_shared(Rc::new(side.frame(&bytes)?), 0, bytes.len()),
                _ => bytes.chunks(700).for_each(|chunk| gather.push_head(chunk)),
            }
            side.say(connection, number as u8, gather);
        }
    }
    for number in 0..count {
        let expected = (number as u8, pattern(number as u64, lens[number % lens.len()]));
        for at_server in [false, true] {
            let take = |sides: &mut Sides| if at_server { &mut sides.server } else { &mut sides.client }.take_message();
            let said = sides.wait_for("a message", take)?;
            ensure(said == expected, || format!("message {number}: {} with {} bytes", said.0, said.1.len()))?;
        }
    }
    sides.end(&[(client, server)])?;
    Ok(format!("{count} messages each way, in order, {CREDITS} at a time"))
}

/// Puts and gets of all lengths, from and to inside of a frame, with a message behind each put.
pub fn transfers(pair: Pair) -> Outcome<String> {
    const FENCE: usize = 100;
    let mut sides = sides(pair)?;
    let (client, server) = sides.connect()?;
    let lens = [1, 4095, 65_536, 100_001, (1 << 20) - 2 * FENCE];
    for (number, len) in lens.into_iter().enumerate() {
        let bytes = pattern(number as u64, len);
        let free = sides.server.reactor.frames().free_bytes();
        let target = sides.client.frame(&vec![0xa5; len + 2 * FENCE])?;
        let window = sides
            .client
            .transport
            .open_target(client, FrameRange::new(target, FENCE, len))
            .map_err(|(error, _)| error)?;
        let mut gather = sides.server.transport.gather();
        for piece in bytes.chunks(len.div_ceil(40)) {
            if piece.len() % 2 == 0 {
                gather.push_head(piece);
            } else {
                gather.push_frame(sides.server.frame(piece)?, 0, piece.len());
            }
        }
        sides.server.transport.put(server, window.address(), gather);
        sides.server.say(server, number as u8, Gather::new());
        let said = sides.wait_for("the message behind a put", |sides| sides.client.take_message())?;
        ensure(said.0 == number as u8, || "another message".into())?;
        let frame = close(window)?;
        sides.wait_for("the frames of a put", |sides| {
            (sides.server.reactor.frames().free_bytes() == free).then_some(())
        })?;
        let fence = [&frame.to_vec()[..FENCE], &frame.to_vec()[FENCE + len..]].concat();
        ensure(frame.to_vec()[FENCE..FENCE + len] == bytes, || format!("a put of {len} bytes has others"))?;
        ensure(fence.iter().all(|byte| *byte == 0xa5), || "bytes around a window were touched".into())?;

        let source = Rc::new(frame);
        let window = sides.client.transport.open_source(client, FrameRange::new(Rc::clone(&source), FENCE, len))?;
        let into = sides.server.frame(&vec![0; len])?;
        sides.server.transport.get(server, window.address(), into, 7).map_err(|_| "not up")?;
        let got = sides.wait_for("a get", |sides| sides.server.gots.pop())?;
        ensure(got.result.is_ok() && got.token == 7, || format!("a get of {len} bytes: {:?}", got.result))?;
        ensure(got.frame.is_some_and(|frame| frame.to_vec()[..] == bytes[..]), || {
            format!("a get of {len} bytes brought others")
        })?;
        drop(window);
    }
    sides.end(&[(client, server)])?;
    Ok(format!("{} sizes up to {} bytes, put and got back", lens.len(), lens[lens.len() - 1]))
}

/// Who does not deal with its messages stops their sender at its credits, and nobody else.
pub fn slow(pair: Pair) -> Outcome<String> {
    let mut sides = sides(pair)?;
    let (client, server) = sides.connect()?;
    let (other_client, other_server) = sides.connect()?;
    for number in 0..100 {
        sides.client.say(client, number, Gather::new());
    }
    sides.wait_for("what the credits allow", |sides| (sides.server.messages.len() == CREDITS).then_some(()))?;
    sides.client.say(other_client, 200, Gather::new());
    sides.wait_for("the other's message", |sides| {
        sides.server.messages.back().is_some_and(|(connection, _)| *connection == other_server).then_some(())
    })?;
    ensure(sides.server.messages.len() == CREDITS + 1, || "the slow one's sender went on".into())?;
    for number in 0..100 {
        let said = sides.wait_for("the rest", |sides| {
            // Among them is the other's.
            sides.server.take_message().map(|said| said.0).filter(|first| *first != 200)
        })?;
        ensure(said == number, || format!("{said} in place of {number}"))?;
    }
    sides.end(&[(client, server), (other_client, other_server)])?;
    Ok(format!("stopped after {CREDITS} messages, and went on"))
}

/// A silent peer is probed by its device, which answers; one of whom something was heard is not.
pub fn probe(pair: Pair) -> Outcome<String> {
    let mut sides = sides(pair)?;
    let (client, server) = sides.connect()?;
    let probes = 40;
    for number in 0..probes {
        // Short, so that nobody would hear of its end.
        sides.server.say(server, number, Gather::new());
        sides.wait_for("a message", |sides| sides.client.take_message())?;
        sides.client.say(client, number, Gather::new());
        let said = sides.wait_for("a message", |sides| sides.server.take_message())?;
        ensure(said.0 == number, || "another message".into())?;
        sides.server.transport.probe(server);
        ensure(!sides.server.transport.is_probed(server), || "probed a peer that was heard".into())?;
        sides.server.transport.probe(server);
        ensure(sides.server.transport.is_probed(server), || "did not probe a silent peer".into())?;
        sides.wait_for("the answer", |sides| (!sides.server.transport.is_probed(server)).then_some(()))?;
        ensure(sides.client.messages.is_empty(), || "the client heard of it".into())?;
    }
    ensure(sides.server.downs.is_empty() && sides.client.downs.is_empty(), || "an end".into())?;
    sides.end(&[(client, server)])?;
    Ok(format!("{probes} probes"))
}

/// A wrong key and a closed window: refused by the device, the connection ends, nothing was touched.
pub fn keys(pair: Pair) -> Outcome<String> {
    let mut sides = sides(pair)?;
    for attempt in ["a put with a wrong key", "a put past the end", "a get from a closed window"] {
        let (client, server) = sides.connect()?;
        let target = sides.client.frame(&[0xa5; 10_000])?;
        let window = sides
            .client
            .transport
            .open_target(client, FrameRange::new(target, 1000, 8000))
            .map_err(|(error, _)| error)?;
        let right = window.address();
        let mut gather = Gather::new();
        gather.push_head(&[0xee; 100]);
        let window = match attempt {
            "a put with a wrong key" => {
                sides.server.transport.put(server, WindowAddress { rkey: right.rkey ^ 0x00c0_ff00, ..right }, gather);
                Some(window)
            }
            "a put past the end" => {
                sides.server.transport.put(server, right.at(7901), gather);
                Some(window)
            }
            _ => {
                close(window)?;
                let into = sides.server.frame(&[0xdd; 100])?;
                sides.server.transport.get(server, right, into, 9).map_err(|_| "not up")?;
                None
            }
        };
        sides.server.say(server, 1, Gather::new());
        let down = sides.wait_for("the refusal", |sides| sides.server.downs.pop())?;
        let expected = (server, Down::Work(WorkError::RemoteAccess));
        ensure(down == expected, || format!("{attempt} ended with {down:?}"))?;
        let told = sides.wait_for("the client's end", |sides| sides.client.downs.pop())?;
        ensure(told.0 == client, || format!("{attempt}: {told:?}"))?;
        ensure(sides.client.messages.is_empty(), || "the message behind it arrived".into())?;
        if let Some(window) = window {
            ensure(close(window)?.to_vec().iter().all(|byte| *byte == 0xa5), || format!("{attempt} wrote"))?;
        } else {
            let got = sides.server.gots.pop().ok_or("the get did not end")?;
            ensure(got.result == Err(GetFailed::Work(WorkError::RemoteAccess)), || format!("{:?}", got.result))?;
            ensure(got.frame.is_some_and(|frame| frame.to_vec().iter().all(|byte| *byte == 0xdd)), || {
                "a refused get brought bytes".into()
            })?;
        }
    }
    sides.end(&[])?;
    Ok("refused, and nothing touched".to_owned())
}

/// A peer that sends without credits is closed for that; one that is something else does not get in.
pub fn rude(mut pair: Pair) -> Outcome<String> {
    let address = pair.listener.local_address().ok_or("no address")?.ip();
    let mut sides = Sides::open(address)?;
    // Whose receives it would take.
    let honest = sides.connect()?;
    let mut stranger = pair.client.channel.connect(sides.to, None, 49)?;
    let mut meet = |sides: &mut Sides, greeting: &[u8]| -> Outcome<bool> {
        use byway_fabric::rdma::EventKind;
        stranger = pair.client.channel.connect(sides.to, None, 50)?;
        let node: &mut Node = &mut pair.client;
        loop {
            node.gather()?;
            sides.server.turn()?;
            let Some(event) = node.events.pop() else { continue };
            match event.kind {
                EventKind::AddressResolved if event.token == 50 => stranger.resolve_route()?,
                EventKind::RouteResolved => {
                    stranger.create_queue_pair(&node.receives, Node::options())?;
                    stranger.connect(greeting)?;
                }
                EventKind::Established { .. } => return Ok(true),
                EventKind::Rejected { .. } => return Ok(false),
                _ => {}
            }
        }
    };
    ensure(!meet(&mut sides, b"something else")?, || "something else got in".into())?;
    ensure(meet(&mut sides, GREETING)?, || "a greeting was refused".into())?;
    for number in 0..=CREDITS as u64 {
        stranger.send_inline(&[7; 128], number, Report::Now)?;
    }
    let down = sides.wait_for("its end", |sides| sides.server.downs.pop())?;
    ensure(down.1 == Down::Credit(CreditError::Overrun), || format!("it ended with {down:?}"))?;
    sides.server.messages.drain(..).for_each(|(connection, received)| {
        sides.server.transport.done_with(connection, received);
    });
    sides.client.say(honest.0, 3, Gather::new());
    let said = sides.wait_for("an honest message", |sides| sides.server.take_message())?;
    ensure(said.0 == 3, || "another message".into())?;
    drop(stranger);
    sides.end(&[honest])?;
    Ok("closed for its message without a credit; the other went on".to_owned())
}

fn sides(pair: Pair) -> Outcome<Sides> {
    let address = pair.listener.local_address().ok_or("no address")?.ip();
    Sides::open(address)
}

/// Closes a window over a frame of our own.
fn close(window: Window) -> Outcome<Frame> {
    use byway_fabric::rdma::{Exposed, Registrable};
    match window.close() {
        Some(Exposed::Own(Registrable::Frame(frame))) => Ok(frame),
        other => Err(format!("the window closed with {other:?}").into()),
    }
}
