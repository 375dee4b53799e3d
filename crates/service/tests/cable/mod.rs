//! A cable between a client and its server that a test cuts: connections over TCP, passed on until then.
#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use byway_reactor::Address;

#[derive(Default)]
struct State {
    streams: Mutex<Vec<TcpStream>>,
    /// What the server says does not arrive.
    deaf: AtomicBool,
    /// Bytes of it that did not arrive.
    swallowed: AtomicUsize,
    /// New connections end at once.
    unplugged: AtomicBool,
    is_done: AtomicBool,
}

/// See the module. It ends when this is dropped.
pub struct Cable {
    /// Where the client connects to.
    pub at: Address,
    state: Arc<State>,
    local: std::net::SocketAddr,
}

fn pass(mut from: TcpStream, mut to: TcpStream, is_dropped: impl Fn(usize) -> bool + Send + 'static) {
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if !is_dropped(count) && to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}

impl Cable {
    pub fn to(server: &Address) -> Self {
        let Address::Tcp(server) = *server else { panic!("a cable needs TCP") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.is_done.load(Ordering::Acquire) {
                    return;
                }
                let server = match TcpStream::connect(server) {
                    Ok(server) if !shared.unplugged.load(Ordering::Acquire) => server,
                    _ => continue,
                };
                for stream in [&client, &server] {
                    let _ = stream.set_nodelay(true);
                    shared.streams.lock().unwrap().push(stream.try_clone().unwrap());
                }
                let deaf = Arc::clone(&shared);
                pass(client.try_clone().unwrap(), server.try_clone().unwrap(), |_| false);
                pass(server, client, move |count| {
                    let is_deaf = deaf.deaf.load(Ordering::Acquire);
                    deaf.swallowed.fetch_add(if is_deaf { count } else { 0 }, Ordering::AcqRel);
                    is_deaf
                });
            }
        });
        Self { at: Address::Tcp(local), state, local }
    }

    /// What the server says from now on does not arrive, until the cable is cut.
    pub fn deafen(&self) {
        self.state.swallowed.store(0, Ordering::Release);
        self.state.deaf.store(true, Ordering::Release);
    }

    /// Bytes that have not arrived since then.
    pub fn swallowed(&self) -> usize {
        self.state.swallowed.load(Ordering::Acquire)
    }

    /// Ends all connections. New ones work.
    pub fn cut(&self) {
        let mut streams = self.state.streams.lock().unwrap();
        for stream in streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // New connections wait for the lock, and hear all.
        self.state.deaf.store(false, Ordering::Release);
    }

    /// Ends all connections, and lets none be made until it is plugged in again.
    pub fn unplug(&self) {
        self.state.unplugged.store(true, Ordering::Release);
        self.cut();
    }

    pub fn plug(&self) {
        self.state.unplugged.store(false, Ordering::Release);
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.state.is_done.store(true, Ordering::Release);
        self.cut();
        let _ = TcpStream::connect(self.local);
    }
}
