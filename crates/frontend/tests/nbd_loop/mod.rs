//! A loop with an NBD front end on the thread of the test, turned by hand; clients are unix streams.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use byway_frontend::nbd::server::{LoopContext, NBD_CLASS, NbdFrontend, NbdOptions};
use byway_reactor::{IoChoice, Reactor, Token, Wait};
use byway_service::block::{Catalog, ENGINE_CLASS, Engine, Volume};

pub struct Loop {
    pub reactor: Reactor,
    pub engine: Engine,
    pub catalog: Catalog,
    pub frontend: NbdFrontend,
}

impl Loop {
    pub fn new(io: IoChoice, frames: usize, volumes: &[Arc<Volume>]) -> Self {
        let mut reactor = Reactor::open(io, frames).unwrap();
        let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
        catalog.replace(&mut engine, &mut reactor, volumes);
        Self { reactor, engine, catalog, frontend: NbdFrontend::new(NbdOptions::default()) }
    }

    /// A new client.
    pub fn connect(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let Self { reactor, engine, catalog, frontend } = self;
        let socket = reactor.adopt(OwnedFd::from(ours)).unwrap();
        frontend.open(&mut LoopContext { reactor, engine, catalog }, socket);
        theirs
    }

    /// One turn as a node's loop makes it, of a millisecond at most; gives whether anything had ended.
    pub fn turn(&mut self) -> bool {
        let Self { reactor, engine, catalog, frontend } = self;
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        let until = reactor.now() + Duration::from_millis(1);
        reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        let went_on = !completions.is_empty();
        for completion in completions {
            match completion.token.class() {
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                NBD_CLASS => frontend.handle(&mut LoopContext { reactor, engine, catalog }, completion),
                _ => assert!(completion.token == Token::WAKE),
            }
        }
        // As a loop does that sleeps until something ends: a stalled connection is not asked again without that.
        if went_on {
            for one in done {
                frontend.done(&mut LoopContext { reactor, engine, catalog }, one);
            }
            frontend.turn(&mut LoopContext { reactor, engine, catalog });
        }
        went_on
    }
}

/// io_uring, where the kernel allows it, and epoll.
pub fn backends() -> Vec<IoChoice> {
    let mut backends = vec![IoChoice::Epoll];
    if Reactor::open(IoChoice::Uring, 1).is_ok() {
        backends.push(IoChoice::Uring);
    } else {
        byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
    }
    backends
}

/// A request without structured replies or their like.
pub fn request(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0], &command.to_be_bytes(), &cookie.to_be_bytes()].concat();
    [&head[..], &offset.to_be_bytes(), &len.to_be_bytes()].concat()
}
