//! The NBD server over real sockets, where what it does depends on the store: long reads, and what waits besides.

mod nbd_rig;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::tls::ServerTls;
use byway_frontend::nbd::client::ClientConfig;
use byway_reactor::{Address, IoChoice};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{Store, Volume, VolumeOptions};
use nbd_rig::{IOS, Running, connect_as, loopback, pattern};

/// A volume that is never answered from memory at once, and whose writes take longer than the first parts of a read.
fn slow(bytes: u64) -> Arc<Volume> {
    let delay = |operation, ms| {
        let effect = FaultEffect::Delay(Duration::from_millis(ms));
        FaultRule { operation, effect, range: None, count_max: None }
    };
    let rules = vec![delay(FaultOperation::Write, 100), delay(FaultOperation::Read, 20)];
    let options = VolumeOptions { faults: FaultRules(rules), ..VolumeOptions::default() };
    Arc::new(Volume::new("v", Store::memory("v", bytes).unwrap(), options))
}

/// A connection without structured replies.
fn simple(address: &Address) -> TcpStream {
    let Address::Tcp(to) = address else { unreachable!("the rig listens on tcp") };
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01v").unwrap();
    stream.read_exact(&mut [0; 28]).unwrap();
    stream
}

fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &cookie.to_be_bytes()].concat();
    [&head[..], &offset.to_be_bytes(), &len.to_be_bytes()].concat()
}

#[test]
fn no_other_reply_comes_between_the_bytes_of_a_long_simple_read() {
    const LONG: usize = 12 << 20;
    for io in IOS {
        let server = Running::start(io, loopback(), vec![slow(32 << 20)], ServerTls::Off);
        let data = pattern(LONG, 3);
        server.connect(io, "v", 1, None).write(1 << 20, &data, false).unwrap();
        let mut stream = simple(&server.address);
        let write = [request(1, 1, 0, 512), vec![9; 512]].concat();
        stream.write_all(&[write, request(0, 2, 1 << 20, LONG as u32), request(3, 3, 0, 0)].concat()).unwrap();
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let mut head = [0; 16];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(head[..8], *b"\x67\x44\x66\x98\0\0\0\0", "{io:?}: the head of a reply that went well");
            seen.push(head[15]);
            if head[15] == 2 {
                let mut back = vec![0; LONG];
                stream.read_exact(&mut back).unwrap();
                assert!(back == data, "{io:?}: another reply lies between the bytes");
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3]);
    }
}

#[test]
fn a_loop_with_the_smallest_pool_answers_every_read() {
    let server = Running::start_with(IoChoice::Auto, loopback(), vec![slow(32 << 20)], ServerTls::Off, 1);
    for structured_replies in [false, true] {
        let config =
            ClientConfig { export: "v".into(), structured_replies, extended_headers: false, ..ClientConfig::default() };
        let mut client = connect_as(IoChoice::Auto, &server.address, config, 1, None).unwrap();
        for len in [4096, 300_000, 600 << 10, 1 << 20, 9 << 20] {
            let data = pattern(len, len as u32);
            client.write(77, &data, false).unwrap();
            let mut back = vec![0; len];
            client.read(77, &mut back).unwrap();
            assert!(back == data, "{len} bytes came back changed");
        }
        client.close();
    }
}
