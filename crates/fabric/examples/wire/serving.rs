//! The end that answers.

use std::error::Error;
use std::sync::Arc;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{Announced, CloseReason, Fabric, GetError, Handler, Registry, Remote, Slot, WindowKey};
use byway_reactor::{Frame, Instant, Reactor};

use super::command::Command;
use super::end::{Ask, Body, End, Latencies, cpu};

pub fn run(command: &Command) -> Result<(), Box<dyn Error>> {
    let mut end = End::new(command.io, command.polling)?;
    end.fabric.serve(&end.reactor, Arc::new(Registry::new(1)));
    let listener = end.fabric.listen(&mut end.reactor, &command.address)?;
    match end.reactor.local_address(listener) {
        Some(address) => println!("tcp://{address}"),
        None => println!("{}", command.address),
    }
    let mut serving = Serving::default();
    loop {
        end.turn(&mut serving)?;
    }
}

/// One client at a time.
struct Serving {
    source: WindowKey,
    target: Option<WindowKey>,
    measured: Option<Measured>,
}

impl Default for Serving {
    fn default() -> Self {
        Self { source: WindowKey(0), target: None, measured: None }
    }
}

/// Gets that we measure.
struct Measured {
    source: WindowKey,
    len: usize,
    started: Instant,
    until: Instant,
    begun: Vec<Instant>,
    latencies: Latencies,
    under_way: usize,
}

/// What a get is for, in the highest byte of its context.
const ECHO: u64 = 1 << 56;
const GIVE: u64 = 2 << 56;
const MEASURE: u64 = 3 << 56;

impl Serving {
    fn answer(fabric: &mut Fabric, session: Slot, body: Body) {
        // So that the client knows what we spent.
        let mut header = body.header(Kind::Reply);
        header.body[32..40].copy_from_slice(&(cpu().as_nanos() as u64).to_le_bytes());
        fabric.send(session, header);
    }

    fn put(fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, window: WindowKey, frame: Frame) {
        let (len, route) = (frame.len(), fabric.route(session));
        let to = (Remote { window, offset: 0 }, Body::default().header(Kind::Reply));
        let announced = Announced { len, checksum: None };
        let put = fabric.put(reactor, (session, route), to, announced, |gather| gather.push_frame(frame, 0, len));
        debug_assert!(put.is_ok(), "a frame can be read");
    }

    fn get(fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, source: WindowKey, len: usize, context: u64) {
        let from = Remote { window: source, offset: 0 };
        let Some(into) = reactor.frames().alloc(len) else { return };
        let _ = fabric.get(reactor, session, from, into, context);
    }

    fn measure(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, body: Body) {
        let now = reactor.now();
        let depth = body.depth as usize;
        let until = now + std::time::Duration::from_nanos(body.nanos);
        self.measured = Some(Measured {
            source: self.source,
            len: body.len as usize,
            started: now,
            until,
            begun: vec![now; depth],
            latencies: Latencies::new(),
            under_way: depth,
        });
        for slot in 0..depth {
            Self::get(fabric, reactor, session, self.source, body.len as usize, MEASURE | slot as u64);
        }
    }

    fn measured(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, slot: usize) {
        let Some(measured) = &mut self.measured else { return };
        let now = reactor.now();
        measured.latencies.push(now.since(measured.begun[slot]));
        if now < measured.until {
            measured.begun[slot] = now;
            let (source, len) = (measured.source, measured.len);
            return Self::get(fabric, reactor, session, source, len, MEASURE | slot as u64);
        }
        measured.under_way -= 1;
        if measured.under_way == 0
            && let Some(mut measured) = self.measured.take()
        {
            let count = measured.latencies.count();
            let (p50_nanos, _) = measured.latencies.p50_p99();
            let mut header = Body::default().header(Kind::Reply);
            header.body[8..16].copy_from_slice(&count.to_le_bytes());
            header.body[16..24].copy_from_slice(&p50_nanos.to_le_bytes());
            let nanos = now.since(measured.started).as_nanos() as u64;
            header.body[24..32].copy_from_slice(&nanos.to_le_bytes());
            header.body[32..40].copy_from_slice(&(cpu().as_nanos() as u64).to_le_bytes());
            fabric.send(session, header);
        }
    }
}

impl Handler for Serving {
    fn up(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: Slot) {
        *self = Self::default();
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Slot,
        (_, header): (Kind, &Header),
        payload: &[u8],
    ) {
        let body = Body::of(header);
        let window = WindowKey(header.window.get());
        match body.ask {
            ask if ask == Ask::Call as u8 && window.0 != 0 => {
                let Some(frame) = reactor.frames().alloc(body.len as usize) else { return };
                Self::put(fabric, reactor, session, window, frame);
            }
            ask if ask == Ask::Call as u8 => {
                let announced = Announced { len: body.len as usize, checksum: None };
                fabric.send_with(session, body.header(Kind::Reply), announced, |gather| {
                    gather.push_zeroes(body.len as usize);
                });
            }
            ask if ask == Ask::Echo as u8 => {
                let announced = Announced { len: payload.len(), checksum: None };
                fabric.send_with(session, body.header(Kind::Reply), announced, |gather| gather.push_head(payload));
            }
            ask if ask == Ask::Source as u8 => {
                self.source = window;
                Self::answer(fabric, session, body);
            }
            ask if ask == Ask::Target as u8 => {
                self.target = Some(window);
                Self::answer(fabric, session, body);
            }
            ask if ask == Ask::EchoLarge as u8 => {
                Self::get(fabric, reactor, session, self.source, body.len as usize, ECHO);
            }
            ask if ask == Ask::Give as u8 && payload.is_empty() => {
                Self::get(fabric, reactor, session, self.source, body.len as usize, GIVE);
            }
            ask if ask == Ask::Give as u8 => {
                if body.depth > 0 {
                    fabric.send(session, body.header(Kind::Reply));
                }
            }
            ask if ask == Ask::Get as u8 => self.measure(fabric, reactor, session, body),
            _ => Self::answer(fabric, session, body),
        }
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot, _: (Kind, &Header)) {}

    fn got(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Slot,
        (frame, context): (Option<Frame>, u64),
        result: Result<(), GetError>,
    ) {
        let (Some(frame), Ok(())) = (frame, result) else { return };
        match context & 0xff << 56 {
            ECHO => {
                if let Some(target) = self.target {
                    Self::put(fabric, reactor, session, target, frame);
                }
            }
            GIVE => fabric.send(session, Body::default().header(Kind::Reply)),
            _ => {
                drop(frame);
                self.measured(fabric, reactor, session, (context & !(0xff << 56)) as usize);
            }
        }
    }

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot, _: CloseReason) {}

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: Slot) {
        fabric.release(session);
    }
}
