//! The NBD front end over TLS, with a client that is written out by hand and can misbehave.

mod nbd_certificates;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsError, TlsStream};
use byway_frontend::nbd::server::{CloseReason, LoopContext, NBD_CLASS, NbdFrontend, NbdOptions};
use byway_reactor::{IoChoice, Reactor, Wait};
use byway_service::block::{Catalog, ENGINE_CLASS, Engine, Store, Volume, VolumeOptions};
use nbd_certificates::Files;

const LIMIT: Duration = Duration::from_secs(30);
const VOLUME_BYTES: u64 = 32 << 20;
const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const STARTTLS_ACK: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0";
const LIST: &[u8] = b"IHAVEOPT\0\0\0\x03\0\0\0\0";
const ABORT: &[u8] = b"IHAVEOPT\0\0\0\x02\0\0\0\0";
/// EXPORT_NAME of `disk`: its answer is size and flags, and transmission begins.
const EXPORT_NAME: &[u8] = b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk";
const REP_SERVER: u32 = 2;
const REP_ACK: u32 = 1;
const REP_ERR_TLS_REQD: u32 = 0x8000_0005;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;

/// A front end on a thread of its own, until it is dropped.
struct Running {
    streams: Option<Sender<UnixStream>>,
    ends: Receiver<CloseReason>,
    waker: byway_reactor::Waker,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    /// Serves `disk`, which needs TLS, and `open`, which does not.
    fn start(io: IoChoice, tls: ServerTls) -> Self {
        let (streams, incoming) = channel::<UnixStream>();
        let (ended, ends) = channel();
        let (started, waker) = channel();
        let thread = std::thread::spawn(move || {
            let mut reactor = Reactor::open(io, 32 << 20).unwrap();
            started.send(reactor.waker()).unwrap();
            let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
            let options = VolumeOptions { tls_required: true, ..VolumeOptions::default() };
            let disk = Volume::new("disk", Store::memory("disk", VOLUME_BYTES).unwrap(), options);
            let open = Volume::new("open", Store::null(1 << 20), VolumeOptions::default());
            catalog.replace(&mut engine, &mut reactor, &[Arc::new(disk), Arc::new(open)]);
            let mut frontend = NbdFrontend::new(NbdOptions { tls, ..NbdOptions::default() });
            run(&mut reactor, &mut engine, &catalog, &mut frontend, (&incoming, &ended));
        });
        Self { streams: Some(streams), ends, waker: waker.recv().unwrap(), thread: Some(thread) }
    }

    fn connect(&self) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        self.streams.as_ref().unwrap().send(theirs).unwrap();
        self.waker.wake();
        let mut client = Client { socket: ours, tls: None, plaintext: Vec::new() };
        assert_eq!(client.take(18).unwrap()[..16], *b"NBDMAGICIHAVEOPT");
        client.push(&[0, 0, 0, 3]);
        client
    }

    /// A connection whose client may begin with TLS.
    fn connect_granted(&self) -> Client {
        let mut client = self.connect();
        client.push(STARTTLS);
        assert_eq!(client.take(20).unwrap(), STARTTLS_ACK);
        client
    }

    fn connect_over(&self, tls: &TlsClient) -> Client {
        let mut client = self.connect_granted();
        client.tls = Some(tls.connect().unwrap());
        client
    }

    fn end(&self) -> CloseReason {
        self.ends.recv_timeout(LIMIT).expect("a connection ends")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.streams = None;
        self.waker.wake();
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn run(
    reactor: &mut Reactor,
    engine: &mut Engine,
    catalog: &Catalog,
    frontend: &mut NbdFrontend,
    (incoming, ended): (&Receiver<UnixStream>, &Sender<CloseReason>),
) {
    let (mut completions, mut done) = (Vec::new(), Vec::new());
    let mut open = 0;
    loop {
        match incoming.try_recv() {
            Ok(stream) => {
                let socket = reactor.adopt(std::os::fd::OwnedFd::from(stream)).unwrap();
                frontend.open(&mut LoopContext { reactor, engine, catalog }, socket);
                open += 1;
                continue;
            }
            Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
        }
        reactor.reap(&mut completions, Wait::Block).unwrap();
        for completion in completions.drain(..) {
            match completion.token.class() {
                NBD_CLASS => frontend.handle(&mut LoopContext { reactor, engine, catalog }, completion),
                ENGINE_CLASS => engine.complete(reactor, completion, &mut done),
                _ => {}
            }
        }
        for one in done.drain(..) {
            frontend.done(&mut LoopContext { reactor, engine, catalog }, one);
        }
        frontend.turn(&mut LoopContext { reactor, engine, catalog });
        while frontend.connection_count() < open {
            open -= 1;
            let _ = ended.send(frontend.last_end().unwrap());
        }
    }
}

struct Client {
    socket: UnixStream,
    tls: Option<TlsStream>,
    plaintext: Vec<u8>,
}

impl Client {
    fn push(&mut self, mut bytes: &[u8]) {
        let Some(tls) = &mut self.tls else { return self.socket.write_all(bytes).unwrap() };
        loop {
            bytes = &bytes[tls.push(bytes)..];
            let mut ciphertext = Vec::new();
            tls.take_ciphertext(&mut ciphertext);
            // The server may be gone; what it said tells.
            let _ = self.socket.write_all(&ciphertext);
            if bytes.is_empty() || tls.is_handshaking() {
                assert!(bytes.is_empty(), "too much before the handshake is done");
                return;
            }
        }
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.tls.as_mut().unwrap().feed(bytes, &mut self.plaintext).unwrap();
        self.push(&[]);
    }

    /// The next bytes; `None` at the end of the stream or when TLS fails.
    fn take(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.plaintext.len() < n {
            let mut bytes = vec![0; 64 << 10];
            let got = match self.socket.read(&mut bytes) {
                Ok(0) => return None,
                Ok(got) => got,
                // A ring that this thread has closed interrupts it once more, when the kernel is done with it.
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    assert_ne!(error.kind(), ErrorKind::WouldBlock, "the server says nothing");
                    return None;
                }
            };
            match &mut self.tls {
                None => self.plaintext.extend_from_slice(&bytes[..got]),
                Some(tls) => {
                    tls.feed(&bytes[..got], &mut self.plaintext).ok()?;
                    self.push(&[]);
                }
            }
        }
        Some(self.plaintext.drain(..n).collect())
    }

    /// All that still comes.
    fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        while let Some(byte) = self.take(1) {
            rest.extend(byte);
        }
        rest
    }

    /// The kind of the next option reply, whose body is thrown away.
    fn option_reply(&mut self) -> u32 {
        let header = self.take(20).expect("a reply");
        let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        self.take(number(16) as usize).expect("its body");
        number(12)
    }

    fn request(&mut self, kind: u16, cookie: u64, (offset, length): (u64, u32), payload: &[u8]) {
        let magic = 0x2560_9513u32.to_be_bytes();
        let (kind, cookie) = (kind.to_be_bytes(), cookie.to_be_bytes());
        let (offset, length) = (offset.to_be_bytes(), length.to_be_bytes());
        self.push(&[&magic[..], &[0, 0], &kind, &cookie, &offset, &length, payload].concat());
    }

    /// The answer to a request that went well: its cookie, and `n` bytes of data.
    fn answer(&mut self, n: usize) -> (u64, Vec<u8>) {
        let header = self.take(16).expect("a reply");
        assert_eq!(header[..8], *b"\x67\x44\x66\x98\0\0\0\0");
        (u64::from_be_bytes(header[8..].try_into().unwrap()), self.take(n).expect("the data"))
    }

    fn choose_disk(&mut self) {
        self.push(EXPORT_NAME);
        assert_eq!(self.take(10).unwrap()[..8], VOLUME_BYTES.to_be_bytes());
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn each_io(test: impl Fn(IoChoice)) {
    for io in [IoChoice::Epoll, IoChoice::Uring] {
        if io == IoChoice::Uring && Reactor::open(io, 1).is_err() {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
            continue;
        }
        test(io);
    }
}

#[test]
fn what_is_written_over_tls_is_read_at_every_size_and_both_sides_say_the_end() {
    let files = Files::new();
    each_io(|io| {
        let server = Running::start(io, ServerTls::Required(files.server(ClientCertificates::Required)));
        let mut client = server.connect_over(&files.client(Some("client")));
        client.choose_disk();
        let mut offset = 0;
        for len in [1, 512, 4096, 16 << 10, (16 << 10) + 1, 70_000, 1 << 20, (5 << 20) + 13, 12 << 20] {
            let data = noise(len, len as u64);
            client.request(WRITE, 1, (offset, len as u32), &data);
            client.answer(0);
            client.request(READ, 2, (offset, len as u32), &[]);
            assert!(client.answer(len).1 == data, "{len} bytes came back changed");
            offset += len as u64;
        }
        // Many at once; answers come in any order.
        for n in 0..200 {
            client.request(WRITE, n, (n * 4096, 4096), &noise(4096, n));
        }
        (0..200).for_each(|_| drop(client.answer(0)));
        for n in 0..200 {
            client.request(READ, n, (n * 4096, 4096), &[]);
        }
        for _ in 0..200 {
            let (n, data) = client.answer(4096);
            assert!(data == noise(4096, n));
        }
        client.request(DISC, 0, (0, 0), &[]);
        assert_eq!(client.rest(), b"");
        assert_eq!(client.tls.as_ref().unwrap().end(), Ok(()), "the server says the end");
        assert_eq!(server.end(), CloseReason::Disconnected);
    });
}

#[test]
fn a_certificate_that_is_revoked_during_its_handshake_is_not_let_in() {
    let files = Files::new();
    each_io(|io| {
        let tls = files.server_with_list("none");
        let server = Running::start(io, ServerTls::Required(tls.clone()));
        let mut client = server.connect_over(&files.client(Some("client")));
        client.push(&[]);
        // The server's part of the handshake has come, so it has begun with the list of then.
        let mut hello = [0];
        client.socket.read_exact(&mut hello).unwrap();
        tls.replace(&files.server_with_list("client"));
        client.feed(&hello);
        while client.tls.as_ref().unwrap().is_handshaking() {
            let mut bytes = vec![0; 64 << 10];
            let got = client.socket.read(&mut bytes).unwrap();
            client.feed(&bytes[..got]);
        }
        client.push(EXPORT_NAME);
        assert_eq!(server.end(), CloseReason::AccessLost);
        assert_eq!(client.take(10), None, "it is told nothing of the disk");
    });
}

#[test]
fn bytes_behind_starttls_are_never_taken_for_what_was_said_over_tls() {
    let files = Files::new();
    each_io(|io| {
        let server = Running::start(io, ServerTls::Optional(files.server(ClientCertificates::Off)));
        // All at once: what somebody on the way puts behind the client's STARTTLS.
        for behind in [LIST, EXPORT_NAME, b"I", &[22, 3, 1]] {
            let mut client = server.connect();
            client.push(&[STARTTLS, behind].concat());
            let answer = client.rest();
            assert!(answer.is_empty() || answer == STARTTLS_ACK, "{answer:?}");
            assert_eq!(server.end(), CloseReason::EarlyBytes);
        }
        // In time, but still plain: it is fed to TLS, which wants none of it.
        let mut client = server.connect_granted();
        client.push(LIST);
        let answer = client.rest();
        assert!(answer.len() < 16 && answer.first() == Some(&21), "an alert and nothing else: {answer:?}");
        assert_eq!(server.end(), CloseReason::Tls(TlsError::NotTls));
        // Put in front of a client's handshake: that fails, and nothing of it was run.
        let mut client = server.connect_granted();
        client.push(EXPORT_NAME);
        client.tls = Some(files.client(None).connect().unwrap());
        client.push(LIST);
        assert_eq!(client.rest(), b"");
        assert_eq!(server.end(), CloseReason::Tls(TlsError::NotTls));
        // What was said before counts for nothing: the export that needs TLS is there after it, and works.
        let mut client = server.connect_over(&files.client(None));
        client.choose_disk();
    });
}

#[test]
fn without_tls_what_needs_it_is_refused_by_its_name() {
    let files = Files::new();
    each_io(|io| {
        let required = Running::start(io, ServerTls::Required(files.server(ClientCertificates::Off)));
        let mut client = required.connect();
        client.push(LIST);
        assert_eq!(client.option_reply(), REP_ERR_TLS_REQD);
        client.push(ABORT);
        assert_eq!(client.option_reply(), REP_ACK);
        assert_eq!((client.rest(), required.end()), (vec![], CloseReason::PlainRefused));

        let optional = Running::start(io, ServerTls::Optional(files.server(ClientCertificates::Off)));
        let list = |client: &mut Client| {
            client.push(LIST);
            std::iter::repeat_with(|| client.option_reply()).take_while(|kind| *kind == REP_SERVER).count()
        };
        let mut client = optional.connect();
        assert_eq!(list(&mut client), 1, "a plain client sees the open volume");
        client.push(b"IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x04disk\0\0");
        assert_eq!(client.option_reply(), REP_ERR_TLS_REQD);
        drop(client);
        assert_eq!(optional.end(), CloseReason::PlainRefused);
        let mut client = optional.connect_over(&files.client(None));
        assert_eq!(list(&mut client), 2, "over TLS it sees both");
        client.push(ABORT);
        assert_eq!(client.option_reply(), REP_ACK);
        assert_eq!((client.rest(), optional.end()), (vec![], CloseReason::Disconnected));
        assert_eq!(client.tls.as_ref().unwrap().end(), Ok(()));
    });
}

#[test]
fn clients_are_refused_for_what_is_wrong_with_their_certificates() {
    let files = Files::new();
    each_io(|io| {
        for (clients, own, refused) in [
            (ClientCertificates::Required, None, Some(TlsError::NoCertificate)),
            (ClientCertificates::Required, Some("stranger"), Some(TlsError::UnknownAuthority)),
            (ClientCertificates::Optional, Some("stranger"), Some(TlsError::UnknownAuthority)),
            (ClientCertificates::Optional, None, None),
        ] {
            let server = Running::start(io, ServerTls::Required(files.server(clients)));
            let mut client = server.connect_over(&files.client(own));
            client.push(LIST);
            match refused {
                Some(error) => {
                    assert_eq!(client.rest(), b"", "{clients:?} {own:?}");
                    assert_eq!(server.end(), CloseReason::Tls(error));
                }
                None => assert_eq!(client.option_reply(), REP_SERVER),
            }
        }
    });
}

#[test]
fn a_stream_that_was_cut_is_told_from_one_that_ended() {
    let files = Files::new();
    each_io(|io| {
        let server = Running::start(io, ServerTls::Required(files.server(ClientCertificates::Off)));
        let tls = files.client(None);
        let mut greeting = server.connect_over(&tls);
        greeting.push(LIST);
        assert_eq!(greeting.option_reply(), REP_SERVER);
        drop(greeting);
        assert_eq!(server.end(), CloseReason::Tls(TlsError::Cut));

        drop(server.connect_over(&tls));
        assert_eq!(server.end(), CloseReason::Tls(TlsError::GaveUp));

        let serving = || {
            let mut client = server.connect_over(&tls);
            client.choose_disk();
            client
        };
        drop(serving());
        assert_eq!(server.end(), CloseReason::Tls(TlsError::Cut));

        let mut client = serving();
        client.tls.as_mut().unwrap().push_end();
        client.push(&[]);
        assert_eq!((client.rest(), server.end()), (vec![], CloseReason::Disconnected));
        assert_eq!(client.tls.as_ref().unwrap().end(), Ok(()), "the server ends its side too");

        let mut client = serving();
        client.request(WRITE, 1, (0, 1 << 20), &[1; 1000]);
        client.tls.as_mut().unwrap().push_end();
        client.push(&[]);
        drop(client);
        assert_eq!(server.end(), CloseReason::Truncated, "the end may be said in the middle of a message");

        let mut client = serving();
        client.request(READ, 9, (0, 4096), &[]);
        client.answer(4096);
        client.socket.write_all(b"no record at all").unwrap();
        assert_eq!((client.rest(), server.end()), (vec![], CloseReason::Tls(TlsError::Broken)));
    });
}

#[test]
fn a_plain_client_that_goes_in_the_middle_of_a_write_is_gone() {
    each_io(|io| {
        let server = Running::start(io, ServerTls::Off);
        for len in [1000, 100_000, 1 << 20] {
            let mut client = server.connect();
            client.push(b"IHAVEOPT\0\0\0\x01\0\0\0\x04open");
            client.take(10).unwrap();
            client.request(WRITE, 1, (0, len), &vec![1; len as usize / 2]);
            drop(client);
            assert_eq!(server.end(), CloseReason::Truncated);
        }
    });
}

#[test]
fn a_certificate_is_replaced_for_new_connections_and_old_ones_go_on() {
    let (old, new) = (Files::new(), Files::new());
    each_io(|io| {
        let certificate = old.server(ClientCertificates::Required);
        let server = Running::start(io, ServerTls::Required(certificate.clone()));
        let mut before = server.connect_over(&old.client(Some("client")));
        before.choose_disk();
        certificate.replace(&new.server(ClientCertificates::Required));
        // Another authority signs clients now, so that the old one's are strangers; they would not trust the server either.
        let mut refused = server.connect_over(&old.client(Some("client")));
        refused.push(LIST);
        assert_eq!(refused.rest(), b"");
        drop(refused);
        assert_eq!(server.end(), CloseReason::Tls(TlsError::GaveUp));
        let mut after = server.connect_over(&new.client(Some("client")));
        after.choose_disk();
        for client in [&mut before, &mut after] {
            client.request(READ, 3, (4096, 4096), &[]);
            assert_eq!(client.answer(4096), (3, vec![0; 4096]));
        }
    });
}
