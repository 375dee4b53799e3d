//! A node's memory with any behaviour of its clients: 64 MiB of frames and a bounded rest, never as much as they ask for.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Server, backends, binary, run_well, until};

/// Anonymous memory of a node with 64 MiB of frames stays below this.
const BYTES_MAX: u64 = 100 << 20;

/// An NBD option: its number and body.
fn option(number: u32, body: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &number.to_be_bytes()[..], &(body.len() as u32).to_be_bytes(), body].concat()
}

/// A connection in the transmission phase, with structured replies and `base:allocation`.
fn open_nbd(port: u16) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let context = [b"\0\0\0\x01d\0\0\0\x01\0\0\0\x0f", &b"base:allocation"[..]].concat();
    let said = [b"\0\0\0\x03", &option(8, &[])[..], &option(10, &context), &option(7, b"\0\0\0\x01d\0\0")].concat();
    stream.write_all(&said).unwrap();
    // The greeting, then replies until the ACK of GO.
    stream.read_exact(&mut [0; 18]).unwrap();
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        stream.read_exact(&mut vec![0; word(16) as usize]).unwrap();
        assert!(word(12) < 1 << 31, "option {} was refused", word(8));
        if (word(8), word(12)) == (7, 1) {
            return stream;
        }
    }
}

/// A request of 28 bytes.
fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let flags = 0u16;
    [&0x2560_9513u32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes(), &cookie.to_be_bytes()]
        .into_iter()
        .chain([&offset.to_be_bytes()[..], &len.to_be_bytes()])
        .flatten()
        .copied()
        .collect()
}

/// Sends as much of `bytes` as the peer takes now; whether that was all.
fn send_some(stream: &mut TcpStream, bytes: &[u8], sent: &mut usize) -> bool {
    stream.set_nonblocking(true).unwrap();
    while *sent < bytes.len() {
        match stream.write(&bytes[*sent..]) {
            Ok(n) => *sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => panic!("{error}"),
        }
    }
    true
}

/// The volume `d` over a new file with data and holes in turns: a block status has as many entries as one may have.
fn volume_in(folder: &Path, bytes: u64) -> String {
    let disk = folder.join("disk");
    let file = std::fs::File::create(&disk).unwrap();
    file.set_len(bytes).unwrap();
    (0..bytes / 8192).for_each(|at| file.write_all_at(&[1; 4096], at * 8192).unwrap());
    format!("d={}", disk.display())
}

#[test]
fn clients_that_ask_for_everything_and_take_nothing_cost_no_more_than_the_bound() {
    const CONNECTIONS: usize = 200;
    const BYTES: u64 = 64 << 20;
    const REQUESTS: u64 = 4000;
    for io in backends() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let volume = volume_in(folder.path(), BYTES);
        let arguments = ["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| (open_nbd(server.port("nbd")), 0)).collect();
        // Block status (7), reads (0), flushes (3) and caching (5), in turns.
        let flood: Vec<u8> = (0..REQUESTS)
            .flat_map(|cookie| {
                let (kind, len) = [(7, BYTES as u32), (0, 64 << 10), (3, 0), (5, 64 << 10)][cookie as usize % 4];
                request(kind, cookie, 0, len)
            })
            .collect();
        let (mut most, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_secs(3) {
            for (stream, sent) in &mut connections {
                send_some(stream, &flood, sent);
            }
            most = most.max(server.anonymous_bytes());
        }
        println!("{io}: at most {most} bytes");
        assert!(most < BYTES_MAX, "{io}: {most} bytes");
        // One that takes its answers is served, all of them.
        let (mut patient, sent) = connections.swap_remove(0);
        drop(connections);
        patient.set_nonblocking(false).unwrap();
        let mut writer = patient.try_clone().unwrap();
        let rest = flood[sent..].to_vec();
        let writer = std::thread::spawn(move || writer.write_all(&rest));
        let mut ended = 0;
        while u64::from(ended) < REQUESTS {
            let mut head = [0; 4];
            patient.read_exact(&mut head).unwrap();
            if u32::from_be_bytes(head) == 0x6744_6698 {
                patient.read_exact(&mut [0; 12]).unwrap();
                ended += 1;
                continue;
            }
            let mut chunk = [0; 16];
            patient.read_exact(&mut chunk).unwrap();
            assert!(chunk[2] < 0x80, "request {} failed", u64::from_be_bytes(chunk[4..12].try_into().unwrap()));
            let len = u32::from_be_bytes(chunk[12..16].try_into().unwrap());
            std::io::copy(&mut (&mut patient).take(len.into()), &mut std::io::sink()).unwrap();
            ended += u32::from(chunk[1] & 1);
        }
        writer.join().unwrap().unwrap();
        drop(patient);
        let uri = format!("nbd://127.0.0.1:{}/d", server.port("nbd"));
        until(Instant::now() + LIMIT, "an ordinary client", || Some(run_well(&binary(), &["info", &uri])));
        let after = server.anonymous_bytes();
        assert!(after < BYTES_MAX, "{io}: {after} bytes afterwards");
    }
}

/// The next chunk of a structured reply: its flags, type and payload.
fn chunk(stream: &mut TcpStream) -> (u16, u16, Vec<u8>) {
    let mut head = [0; 20];
    stream.read_exact(&mut head).unwrap();
    let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    assert_eq!(head[..4], 0x668e_33efu32.to_be_bytes());
    let mut payload = vec![0; u32::from_be_bytes(head[16..20].try_into().unwrap()) as usize];
    stream.read_exact(&mut payload).unwrap();
    (half(4), half(6), payload)
}

#[test]
fn replies_that_others_do_not_take_keep_nobody_from_a_block_status() {
    const HOARDERS: usize = 24;
    const BYTES: u64 = 4 << 20;
    const BLOCK_STATUS: u16 = 5;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let volume = volume_in(folder.path(), BYTES);
    let arguments = ["--threads", "1", "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"];
    let server = Server::start(folder.path(), 1, &arguments);
    let mut client = open_nbd(server.port("nbd"));
    // What is asked here is refused, each time in 45 bytes; nobody reads them, beyond what sockets hold.
    let mut hoarders: Vec<_> = (0..HOARDERS).map(|_| (open_nbd(server.port("nbd")), 0)).collect();
    let refused: Vec<u8> = (0..400_000).flat_map(|cookie| request(0, cookie, BYTES, 512)).collect();
    let began = Instant::now();
    let (mut last, mut sent_at) = (usize::MAX, Instant::now());
    while sent_at.elapsed() < Duration::from_secs(1) {
        for (stream, sent) in &mut hoarders {
            send_some(stream, &refused, sent);
        }
        let sent = hoarders.iter().map(|(_, sent)| sent).sum();
        assert!(hoarders.iter().all(|(_, sent)| *sent < refused.len()), "too few requests for what sockets hold");
        if std::mem::replace(&mut last, sent) != sent {
            sent_at = Instant::now();
        }
        assert!(began.elapsed() < LIMIT);
        std::thread::yield_now();
    }
    // Each is stopped by what waits for it, and together it is too much.
    let mut covered = 0;
    while covered < BYTES {
        client.write_all(&request(7, covered, covered, (BYTES - covered) as u32)).unwrap();
        let (flags, kind, payload) = chunk(&mut client);
        assert_eq!((flags & 1, kind), (1, BLOCK_STATUS), "a list, not an error");
        let word = |at: usize| u64::from(u32::from_be_bytes(payload[at..at + 4].try_into().unwrap()));
        let extents = (payload.len() - 4) / 8;
        assert!((1..=64).contains(&extents), "{extents} extents: the server does not find itself crowded");
        covered += (0..extents).map(|at| word(4 + at * 8)).sum::<u64>();
    }
    assert_eq!(covered, BYTES);
    drop(hoarders);
}
