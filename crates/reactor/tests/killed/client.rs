//! A client with one request at a time, that looks at all that comes of it, also of those whose server died.

use std::path::Path;

use byway_reactor::{
    Address, Errno, Frame, FramePool, Gather, Instant, IoChoice, Op, Outcome, Reactor, Scatter, Socket, Token, Wait,
};

use crate::wire::{CANARY, Kind, LEN_MAX, REQUEST_BYTES, Random, Request, byte, fill, is_right};

const ARENA: usize = 1 << 20;

/// What is done while a client waits: something may be due, and says when it wants to be asked again.
pub type Meanwhile<'a> = &'a mut dyn FnMut(Instant) -> Instant;

/// A loop, and streams to servers.
pub struct Client {
    pub reactor: Reactor,
    random: Random,
    done: Vec<(Token, Outcome)>,
    next: u32,
}

/// A stream to a server, and what was lent to it.
pub struct Session {
    socket: Socket,
    pub arena: FramePool,
}

impl Client {
    pub fn new(io: IoChoice, seed: u64) -> Self {
        Self { reactor: Reactor::open(io, 8 << 20).unwrap(), random: Random(seed), done: Vec::new(), next: 0 }
    }

    fn submit(&mut self, op: Op) -> Token {
        self.next += 1;
        let token = Token::new(1, 0, self.next, 0);
        self.reactor.submit(op, token);
        token
    }

    fn wait(&mut self, token: Token, meanwhile: Meanwhile<'_>) -> Outcome {
        loop {
            if let Some(place) = self.done.iter().position(|done| done.0 == token) {
                return self.done.swap_remove(place).1;
            }
            let until = meanwhile(self.reactor.now());
            let mut reaped = Vec::new();
            self.reactor.reap(&mut reaped, Wait::Until(until)).unwrap();
            self.done.extend(reaped.into_iter().map(|completion| (completion.token, completion.outcome)));
        }
    }

    /// Connects, and lends an arena.
    pub fn open(&mut self, to: &Path, meanwhile: Meanwhile<'_>) -> Result<Session, Errno> {
        let connect = self.submit(Op::Connect { to: Address::Shared(to.to_owned()) });
        let Outcome::Connected(connected) = self.wait(connect, meanwhile) else { unreachable!() };
        let session = Session { socket: connected?, arena: FramePool::shared(ARENA).unwrap() };
        let lent = self.reactor.lend_arena(session.socket, &session.arena);
        let take = Request { kind: Kind::Take, len: ARENA, offset: 0, seed: 0 };
        if let Err(error) = lent.and_then(|()| self.ask(&session, take, None, meanwhile).map(drop)) {
            self.close(session);
            return Err(error);
        }
        Ok(session)
    }

    pub fn close(&mut self, session: Session) {
        self.reactor.close(session.socket);
        assert_eq!(session.arena.free_bytes(), session.arena.bytes(), "nothing holds its frames");
    }

    /// Lets a moment pass.
    pub fn pause(&mut self, meanwhile: Meanwhile<'_>) {
        let at = self.reactor.now() + std::time::Duration::from_millis(1);
        let timer = self.submit(Op::Timer { at });
        self.wait(timer, meanwhile);
    }

    /// One request of any kind, and a look at what it did: all that was asked for, if the server says so; and nothing else,
    /// whatever the server says.
    pub fn step(&mut self, session: &Session, meanwhile: Meanwhile<'_>) -> Result<(), Errno> {
        let seed = self.random.below(u64::MAX);
        let longest = (LEN_MAX as u64) >> self.random.below(16);
        let len = 1 + self.random.below(longest) as usize;
        if self.random.below(3) == 0 {
            let mut frame = self.reactor.frames().alloc(len).unwrap();
            fill(frame.bytes_mut(), seed);
            let request = Request { kind: Kind::Echo, len, offset: 0, seed };
            let back = self.ask(session, request, Some(frame), meanwhile)?.unwrap();
            assert!(is_right(&back.to_vec()[..len], seed), "what came back: {request:?}");
            return Ok(());
        }
        let kind = if self.random.below(2) == 0 { Kind::Put } else { Kind::Get };
        let (before, behind) = (self.random.below(5000) as usize, self.random.below(5000) as usize);
        let mut frame = session.arena.alloc(before + len + behind).unwrap();
        frame.fill(CANARY);
        if kind == Kind::Get {
            let mut bytes = vec![0; len];
            fill(&mut bytes, seed);
            frame.write(before, &bytes);
        }
        let offset = frame.arena_offset().unwrap() + before;
        let request = Request { kind, len, offset: offset as u64, seed };
        let asked = self.ask(session, request, None, meanwhile);
        let bytes = frame.to_vec();
        let (window, around) = (&bytes[before..before + len], [&bytes[..before], &bytes[before + len..]]);
        assert!(around.concat().iter().all(|byte| *byte == CANARY), "beside the window: {request:?}");
        let cut_short = asked.is_err() && kind == Kind::Put;
        let is_right = |at: usize, found: u8| found == byte(seed, at) || cut_short && found == CANARY;
        assert!(window.iter().enumerate().all(|(at, found)| is_right(at, *found)), "in the window: {request:?}");
        asked.map(drop)
    }

    /// Sends a request and waits for its reply; gives the bytes that came with it.
    fn ask(
        &mut self,
        session: &Session,
        request: Request,
        payload: Option<Frame>,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Option<Frame>, Errno> {
        let (socket, echo) = (session.socket, payload.is_some());
        let mut gather = Gather::new();
        gather.push_head(&request.to_bytes());
        if let Some(frame) = payload {
            gather.push_frame(frame, 0, request.len);
        }
        let send = self.submit(Op::Send { socket, gather });
        let len = REQUEST_BYTES + if echo { request.len } else { 0 };
        let into = Scatter::one(self.reactor.frames().alloc(len).unwrap(), 0, len);
        let receive = self.submit(Op::Recv { socket, into, min: len });
        let Outcome::Received { mut into, result } = self.wait(receive, meanwhile) else { unreachable!() };
        let frame = into.drain().next().unwrap().frame;
        let came = result.and_then(|n| if n == len { Ok(()) } else { Err(Errno::CONNRESET) });
        let Outcome::Sent { result: sent, .. } = self.wait(send, meanwhile) else { unreachable!() };
        came.and(sent)?;
        assert_eq!(Request::from_bytes(&frame.to_vec()[len - REQUEST_BYTES..]), request);
        Ok(echo.then_some(frame))
    }
}
