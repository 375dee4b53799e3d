//! The end that answers.

use std::error::Error;
use std::sync::Arc;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{CloseReason, EndedGet, Fabric, Handler, PayloadMeta, Put, Registry, Remote, SessionId, WindowKey};
use byway_reactor::{Frame, Instant, Reactor};

use super::command::{Command, REGION_WINDOW_BYTES, REGION_WINDOWS_MAX};
use super::end::{Ask, Body, Latencies, WireEnd, cpu};

pub fn run(command: &Command) -> Result<(), Box<dyn Error>> {
    let mut end = WireEnd::new(command.io, command.polling)?;
    end.fabric.serve(&end.reactor, Arc::new(Registry::new(1)));
    let listener = end.fabric.listen(&mut end.reactor, &command.address)?;
    match end.reactor.local_address(listener) {
        Some(address) => println!("tcp://{address}"),
        None => println!("{}", command.address),
    }
    let mut serving = WireServer::default();
    loop {
        end.turn(&mut serving)?;
    }
}

/// One client at a time.
#[derive(Default)]
struct WireServer {
    /// A region has several, each of [`REGION_WINDOW_BYTES`].
    sources: Vec<WindowKey>,
    target: Option<WindowKey>,
    measured: Option<Measured>,
}

/// Gets that we measure.
struct Measured {
    places: Places,
    len: usize,
    started: Instant,
    until: Instant,
    begun: Vec<Instant>,
    latencies: Latencies,
    under_way: usize,
}

/// Where gets are from, one after the other. Numbers of sources and of places in each are powers of two.
struct Places {
    sources: Vec<WindowKey>,
    /// In each source.
    each: usize,
    next: usize,
}

impl Places {
    /// Odd, so that all of a power of two have their turn, and more than a core fetches ahead.
    const STEP: usize = 40_503;

    fn next(&mut self) -> Remote {
        let place = self.next;
        self.next = self.next.wrapping_add(Self::STEP) & (self.sources.len() * self.each - 1);
        let offset = (place & (self.each - 1)) * (REGION_WINDOW_BYTES / self.each);
        Remote { window: self.sources[place >> self.each.ilog2()], offset: offset as u64 }
    }
}

/// What a get is for, in the highest byte of its context.
const ECHO: u64 = 1 << 56;
const GIVE: u64 = 2 << 56;
const MEASURE: u64 = 3 << 56;

impl WireServer {
    fn answer(fabric: &mut Fabric, session: SessionId, body: Body) {
        // So that the client knows what we spent.
        let mut header = body.header(Kind::Reply);
        header.body[32..40].copy_from_slice(&(cpu().as_nanos() as u64).to_le_bytes());
        fabric.send(session, header);
    }

    fn put(fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, window: WindowKey, frame: Frame) {
        let (len, route) = (frame.len(), fabric.route(session));
        let (to, header) = (Remote { window, offset: 0 }, Body::default().header(Kind::Reply));
        let put = Put { session, route, to, header, payload: PayloadMeta { len, checksum: None } };
        let put = fabric.put(reactor, put, |gather| gather.push_frame(frame, 0, len));
        debug_assert!(put.is_ok(), "a frame can be read");
    }

    /// The source of what is got whole.
    fn source(&self) -> Remote {
        Remote { window: self.sources.last().copied().unwrap_or(WindowKey(0)), offset: 0 }
    }

    fn get(fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, (from, len): (Remote, usize), context: u64) {
        let Some(into) = reactor.frames().alloc(len) else { return };
        let _ = fabric.get(reactor, session, from, into, context);
    }

    fn measure(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, body: Body) {
        let now = reactor.now();
        let depth = body.depth as usize;
        let until = now + std::time::Duration::from_nanos(body.nanos);
        let is_region = body.places.is_power_of_two() && self.sources.len().is_power_of_two();
        let (sources, each) =
            if is_region { (self.sources.clone(), body.places as usize) } else { (vec![self.source().window], 1) };
        let mut places = Places { sources, each, next: 0 };
        let first: Vec<Remote> = (0..depth).map(|_| places.next()).collect();
        let len = body.len as usize;
        let (begun, latencies) = (vec![now; depth], Latencies::new());
        self.measured = Some(Measured { places, len, started: now, until, begun, latencies, under_way: depth });
        for (slot, from) in first.into_iter().enumerate() {
            Self::get(fabric, reactor, session, (from, len), MEASURE | slot as u64);
        }
    }

    fn measured(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, slot: usize) {
        let Some(measured) = &mut self.measured else { return };
        let now = reactor.now();
        measured.latencies.push(now.since(measured.begun[slot]));
        if now < measured.until {
            measured.begun[slot] = now;
            let from = (measured.places.next(), measured.len);
            return Self::get(fabric, reactor, session, from, MEASURE | slot as u64);
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

impl Handler for WireServer {
    fn up(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId) {
        *self = Self::default();
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        _: Kind,
        header: &Header,
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
                let meta = PayloadMeta { len: body.len as usize, checksum: None };
                fabric.send_with(session, body.header(Kind::Reply), meta, |gather| {
                    gather.push_zeroes(body.len as usize);
                });
            }
            ask if ask == Ask::Echo as u8 => {
                let meta = PayloadMeta { len: payload.len(), checksum: None };
                fabric.send_with(session, body.header(Kind::Reply), meta, |gather| gather.push_head(payload));
            }
            ask if ask == Ask::Source as u8 => {
                if self.sources.len() < REGION_WINDOWS_MAX {
                    self.sources.push(window);
                }
                Self::answer(fabric, session, body);
            }
            ask if ask == Ask::Target as u8 => {
                self.target = Some(window);
                Self::answer(fabric, session, body);
            }
            ask if ask == Ask::EchoLarge as u8 => {
                Self::get(fabric, reactor, session, (self.source(), body.len as usize), ECHO);
            }
            ask if ask == Ask::Give as u8 && payload.is_empty() => {
                Self::get(fabric, reactor, session, (self.source(), body.len as usize), GIVE);
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

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn got(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, get: EndedGet) {
        let context = get.context;
        let Ok(frame) = get.into_frame() else { return };
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

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: CloseReason) {}

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}
