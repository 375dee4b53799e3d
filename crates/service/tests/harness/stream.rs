//! A stream to a server whose bytes a test writes and reads itself.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::time::Duration;

use byway_reactor::{Address, FramePool, Gather, IoChoice, Op, Outcome, Reactor, Scatter, Socket, Token, Wait};

use super::rdma_connection::RdmaConnection;

/// A connection over RDMA has 360 KiB of it, and connections have half.
const POOL_BYTES: usize = 1 << 20;
/// Nothing that a test waits for takes this long.
const DEADLINE: Duration = Duration::from_secs(30);

/// Blocks, over a loop of its own; closed when dropped.
pub struct Stream {
    // First, since it holds frames of the loop.
    way: Option<Way>,
    reactor: Reactor,
}

/// What the bytes go by.
enum Way {
    Socket(Socket),
    /// Each write is a message.
    Rdma(Box<RdmaConnection>),
}

impl Stream {
    pub fn connect(to: &Address) -> Result<Self> {
        let mut stream = Self { way: None, reactor: Reactor::open(IoChoice::Epoll, POOL_BYTES)? };
        stream.way = Some(if let Address::Rdma(to) = to {
            Way::Rdma(Box::new(RdmaConnection::connect(&mut stream.reactor, *to)?))
        } else {
            let Outcome::Connected(connected) = stream.run(Op::Connect { to: to.clone() })? else { unreachable!() };
            Way::Socket(connected?)
        });
        Ok(stream)
    }

    /// Lends the server an arena.
    pub fn lend(&mut self, arena: &FramePool) {
        self.reactor.lend_arena(self.socket(), arena).unwrap();
    }

    /// A connection over RDMA sends what it may send now; the kernel does so by itself for sockets.
    pub fn turn(&mut self) {
        if let Some(Way::Rdma(connection)) = &mut self.way {
            connection.turn(&mut self.reactor, Wait::Poll).unwrap();
        }
    }

    fn socket(&self) -> Socket {
        let Some(Way::Socket(socket)) = &self.way else { panic!("no socket") };
        *socket
    }

    fn run(&mut self, op: Op) -> Result<Outcome> {
        let token = Token::new(1, 0, 0, 0);
        self.reactor.submit(op, token);
        let (until, mut reaped) = (self.reactor.now() + DEADLINE, Vec::new());
        loop {
            self.reactor.reap(&mut reaped, Wait::Until(until))?;
            if let Some(place) = reaped.iter().position(|completion| completion.token == token) {
                return Ok(reaped.swap_remove(place).outcome);
            }
            if self.reactor.now() >= until {
                return Err(Error::from(ErrorKind::TimedOut));
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        if let Some(Way::Rdma(connection)) = &mut self.way {
            return connection.read(&mut self.reactor, bytes);
        }
        let len = bytes.len().min(256 << 10);
        let frame = self.reactor.frames().alloc(len.max(1)).expect("nothing else is lent");
        let op = Op::Recv { socket: self.socket(), into: Scatter::one(frame, 0, len), min: len.min(1) };
        let Outcome::Received { mut into, result } = self.run(op)? else { unreachable!() };
        let n = result?;
        bytes[..n].copy_from_slice(&into.drain().next().expect("one piece").frame.bytes()[..n]);
        Ok(n)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if let Some(Way::Rdma(connection)) = &mut self.way {
            return connection.write(&mut self.reactor, bytes);
        }
        let mut gather = Gather::new();
        gather.push_head(bytes);
        let Outcome::Sent { result, .. } = self.run(Op::Send { socket: self.socket(), gather })? else {
            unreachable!()
        };
        Ok(result?)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(Way::Socket(socket)) = self.way.take() {
            self.reactor.close(socket);
        }
    }
}
