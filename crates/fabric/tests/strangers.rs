//! Who may not come in comes in by no trick: neither plainly, nor by a connection that is reset before it is accepted, whose peer the
//! kernel does not tell any more though it still gives out what was sent.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{CloseReason, Fabric, Handler, Options, SessionId};
use byway_reactor::{Address, IoChoice, Reactor, Wait};

struct Nobody;

impl Handler for Nobody {
    fn up(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {
        panic!("a stranger has a session");
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, kind: Kind, _: &Header) {
        panic!("{kind:?} of a stranger");
    }

    fn drained(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {}

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, kind: Kind, _: &Header, _: &[u8]) {
        panic!("{kind:?} of a stranger");
    }

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, reason: CloseReason) {
        panic!("a stranger had a session: {reason}");
    }
}

#[test]
fn a_connection_that_was_reset_is_a_strangers() {
    for io in [IoChoice::Epoll, IoChoice::Uring] {
        let Ok(mut reactor) = Reactor::open(io, 8 << 20) else {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
            continue;
        };
        let mut fabric = Fabric::new(Options::new(7));
        let listener = fabric.listen(&mut reactor, &Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let at = reactor.local_address(listener).unwrap();
        fabric.admit(|_| false);
        let mut plain = TcpStream::connect(at).unwrap();
        plain.write_all(&[0; 128]).unwrap();
        let mut reset = TcpStream::connect(at).unwrap();
        reset.write_all(&[0; 128]).unwrap();
        rustix::net::sockopt::set_socket_linger(&reset, Some(Duration::ZERO)).unwrap();
        drop(reset);
        let mut completions = Vec::new();
        for _ in 0..1000 {
            fabric.flush(&mut reactor, &mut Nobody);
            let until = reactor.now() + Duration::from_millis(10);
            reactor.reap(&mut completions, Wait::Until(until)).unwrap();
            for completion in completions.drain(..) {
                fabric.handle(&mut reactor, completion, &mut Nobody);
            }
            if fabric.counters().refused == 2 {
                break;
            }
        }
        assert_eq!((fabric.counters().refused, fabric.lane_count(), fabric.session_count()), (2, 0, 0), "{io:?}");
    }
}
