//! A server of one loop. It takes nothing for granted of its clients but what they say in requests.

use std::collections::HashMap;
use std::path::Path;

use byway_reactor::{
    Address, Completion, Frame, FramePool, Gather, Instant, IoChoice, LentPlace, Listener, Op, Outcome, Reactor,
    Scatter, Socket, Token, Wait,
};

use crate::wire::{Kind, REQUEST_BYTES, Request, fill, is_right};

const ACCEPT: Token = Token::new(1, 0, 0, 0);
const REQUEST: u8 = 1;
const PAYLOAD: u8 = 2;
const REPLY: u8 = 3;

struct Client {
    socket: Socket,
    /// What is being answered.
    request: Option<Request>,
    answered: u64,
}

pub struct Server {
    pub reactor: Reactor,
    listener: Listener,
    clients: HashMap<u32, Client>,
    next: u32,
    /// While it is set, requests are read and not answered.
    holds: bool,
    pub accepted: u64,
}

impl Server {
    pub fn new(io: IoChoice, at: &Path) -> Self {
        let mut reactor = Reactor::open(io, 8 << 20).unwrap();
        let listener = reactor.listen(&Address::Shared(at.to_owned())).unwrap();
        reactor.submit(Op::Accept { listener }, ACCEPT);
        Self { reactor, listener, clients: HashMap::new(), next: 0, holds: false, accepted: 0 }
    }

    pub fn client_count(&self) -> usize {
        self.clients.len()
    }

    /// Requests answered to the clients that are here.
    pub fn answered(&self) -> u64 {
        self.clients.values().map(|client| client.answered).sum()
    }

    /// Whether every client waits for an answer, and nothing is on its way.
    pub fn is_held(&self) -> bool {
        self.holds && self.clients.values().all(|client| client.request.is_some())
    }

    /// Reads requests from now on and answers none; or answers them again.
    pub fn hold(&mut self, holds: bool) {
        self.holds = holds;
        if !holds {
            let waiting: Vec<u32> = self.clients.keys().copied().collect();
            for number in waiting {
                self.answer(number);
            }
        }
    }

    pub fn turn(&mut self, until: Instant) {
        let mut completions = Vec::new();
        self.reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        for completion in completions {
            self.take(completion);
        }
    }

    fn take(&mut self, Completion { token, outcome }: Completion) {
        let number = token.index();
        match outcome {
            Outcome::Accepted(Ok(socket)) => {
                self.next += 1;
                self.accepted += 1;
                self.clients.insert(self.next, Client { socket, request: None, answered: 0 });
                self.receive(self.next, REQUEST, REQUEST_BYTES);
            }
            Outcome::Accepted(Err(error)) => panic!("no more clients: {error}"),
            Outcome::Received { mut into, result } => {
                let Some(client) = self.clients.get_mut(&number) else { return };
                let piece = into.drain().next().unwrap();
                if result != Ok(piece.len) {
                    return self.close(number);
                }
                if token.tag() == PAYLOAD {
                    return self.echo(number, piece.frame);
                }
                client.request = Some(Request::from_bytes(&piece.frame.to_vec()));
                drop(piece);
                self.answer(number);
            }
            Outcome::Sent { result, .. } => {
                let Some(client) = self.clients.get_mut(&number) else { return };
                if result.is_err() {
                    return self.close(number);
                }
                client.answered += 1;
                self.receive(number, REQUEST, REQUEST_BYTES);
            }
            _ => {}
        }
    }

    fn receive(&mut self, number: u32, tag: u8, len: usize) {
        let into = Scatter::one(self.frame(len), 0, len);
        let socket = self.clients[&number].socket;
        self.reactor.submit(Op::Recv { socket, into, min: len }, Token::new(1, tag, number, 0));
    }

    fn frame(&self, len: usize) -> Frame {
        let pool: &FramePool = self.reactor.frames();
        pool.alloc(len).expect("the clients ask for no more than there is")
    }

    fn answer(&mut self, number: u32) {
        let Some((socket, Some(request))) = self.clients.get(&number).map(|client| (client.socket, client.request))
        else {
            return;
        };
        if self.holds {
            return;
        }
        match request.kind {
            Kind::Take => {
                let taken = self.reactor.take_memory(socket, 0);
                assert_eq!(taken, Ok(request.len as u64), "a client lends before it says so");
            }
            Kind::Put => {
                let mut gather = Gather::new();
                let mut frame = self.frame(request.len);
                fill(frame.bytes_mut(), request.seed);
                gather.push_frame(frame, 0, request.len);
                self.reactor.put(socket, &gather, LentPlace { memory: 0, offset: request.offset }).unwrap();
            }
            Kind::Get => {
                let mut frame = self.frame(request.len);
                let place = LentPlace { memory: 0, offset: request.offset };
                self.reactor.get(socket, place, &mut frame, 0..request.len).unwrap();
                assert!(is_right(&frame.to_vec(), request.seed), "what lay there before it was asked for: {request:?}");
            }
            Kind::Echo => return self.receive(number, PAYLOAD, request.len),
        }
        self.reply(number, Gather::new());
    }

    fn echo(&mut self, number: u32, frame: Frame) {
        let Some(request) = self.clients[&number].request else { return };
        assert!(is_right(&frame.to_vec(), request.seed), "bytes of the stream: {request:?}");
        let mut gather = Gather::new();
        gather.push_frame(frame, 0, request.len);
        self.reply(number, gather);
    }

    fn reply(&mut self, number: u32, mut payload: Gather) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Some(request) = client.request.take() else { return };
        payload.push_head(&request.to_bytes());
        self.reactor.submit(Op::Send { socket: client.socket, gather: payload }, Token::new(1, REPLY, number, 0));
    }

    fn close(&mut self, number: u32) {
        if let Some(client) = self.clients.remove(&number) {
            self.reactor.close(client.socket);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.reactor.close_listener(self.listener);
        let numbers: Vec<u32> = self.clients.keys().copied().collect();
        for number in numbers {
            self.close(number);
        }
    }
}
