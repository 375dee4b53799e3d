//! A connection over RDMA that a test speaks by hand: a message is what is written at once.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use byway_fabric::rdma::transport::{ConnectionId, Event, Received, Transport};
use byway_fabric::registration::Limits;
use byway_fabric::wire::HEADER_BYTES;
use byway_reactor::{Reactor, Token, Wait};

/// Nothing that a test waits for takes this long.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long a loop waits for something before it is looked whether it is enough.
const LOOK: Duration = Duration::from_millis(20);

pub struct RdmaConnection {
    transport: Transport,
    connection: ConnectionId,
    is_up: bool,
    is_down: bool,
    /// Messages that were not looked at: their sender waits for their credits.
    unread: VecDeque<Received>,
    /// Bytes of the message that is read.
    bytes: VecDeque<u8>,
}

impl RdmaConnection {
    pub fn connect(reactor: &mut Reactor, to: SocketAddr) -> Result<Self> {
        let mut transport = Transport::new(Token::new(2, 0, 0, 0), Limits::default());
        let connection = transport.connect(reactor, to).map_err(Error::other)?;
        let (unread, bytes) = Default::default();
        let mut this = Self { transport, connection, is_up: false, is_down: false, unread, bytes };
        this.wait_for(reactor, |this| this.is_up || this.is_down)?;
        if this.is_up { Ok(this) } else { Err(ErrorKind::ConnectionRefused.into()) }
    }

    /// A header, and what is behind it.
    pub fn write(&mut self, reactor: &mut Reactor, bytes: &[u8]) -> Result<usize> {
        let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(ErrorKind::InvalidInput)?;
        if self.is_down {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut gather = self.transport.gather();
        gather.push_head(payload);
        self.transport.send(self.connection, *header, gather);
        self.turn(reactor, Wait::Poll)?;
        // It went, even if the peer has answered by its end already.
        Ok(bytes.len())
    }

    /// Bytes of messages, one after the other; none when the connection has ended.
    pub fn read(&mut self, reactor: &mut Reactor, into: &mut [u8]) -> Result<usize> {
        self.wait_for(reactor, |this| this.is_down || !this.unread.is_empty() || !this.bytes.is_empty())?;
        if self.bytes.is_empty()
            && let Some(received) = self.unread.pop_front()
        {
            self.bytes.extend(received.header());
            self.bytes.extend(received.payload());
            self.transport.done_with(self.connection, received);
            self.turn(reactor, Wait::Poll)?;
        }
        let count = into.len().min(self.bytes.len());
        into.iter_mut().zip(self.bytes.drain(..count)).for_each(|(into, byte)| *into = byte);
        Ok(count)
    }

    /// Sends what may be sent, and looks at what has come.
    pub fn turn(&mut self, reactor: &mut Reactor, wait: Wait) -> Result<()> {
        self.transport.flush(reactor);
        self.hear();
        let mut completions = Vec::new();
        reactor.reap(&mut completions, wait)?;
        for completion in &completions {
            self.transport.handle(reactor, completion);
        }
        self.hear();
        self.transport.flush(reactor);
        Ok(())
    }

    fn hear(&mut self) {
        while let Some(event) = self.transport.next_event() {
            match event {
                Event::Connected(_) => self.is_up = true,
                Event::Message(_, received) => self.unread.push_back(received),
                Event::Down(..) => self.is_down = true,
                Event::Asked { .. } | Event::Sent(..) => {}
            }
        }
    }

    fn wait_for(&mut self, reactor: &mut Reactor, done: impl Fn(&Self) -> bool) -> Result<()> {
        let deadline = Instant::now() + DEADLINE;
        self.turn(reactor, Wait::Poll)?;
        while !done(self) {
            if Instant::now() >= deadline {
                return Err(ErrorKind::TimedOut.into());
            }
            self.turn(reactor, Wait::Until(reactor.now() + LOOK))?;
        }
        Ok(())
    }
}

impl Drop for RdmaConnection {
    fn drop(&mut self) {
        self.unread.drain(..).for_each(|received| self.transport.discard(received));
        self.transport.close(self.connection);
    }
}
