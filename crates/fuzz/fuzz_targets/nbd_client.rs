//! The NBD client: whatever a server sends, the client keeps within its limits and gives out data
//! only where they were asked for.
#![no_main]

use byway_frontend::limits::{OPTION_REPLY_BYTES_MAX, REPLY_HEAD_BYTES_MAX};
use byway_frontend::nbd::client::{
    ClientConfig, ClientHandshake, ClientStep, ClientTransmission, Content, Encryption, Purpose, Received,
};
use byway_frontend::nbd::flags::{CommandFlags, TransmissionFlags};
use byway_frontend::nbd::request::{BlockSizes, Command, Headers, Rules};
use libfuzzer_sys::fuzz_target;

fn handshake(choice: u8, piece: usize, bytes: &[u8]) -> Option<()> {
    let config = ClientConfig {
        purpose: if choice & 1 == 0 { Purpose::Open } else { Purpose::List },
        tls: if choice & 2 == 0 { Encryption::Off } else { Encryption::Preferred },
        structured_replies: choice & 4 == 0,
        extended_headers: choice & 8 == 0,
        allocation: choice & 16 == 0,
        ..ClientConfig::default()
    };
    let mut client = ClientHandshake::new(config).ok()?;
    let mut out = Vec::new();
    // The rest of the input is the server's answers; most inputs should come past the greeting.
    client.receive(b"NBDMAGICIHAVEOPT\0\x03", &mut out).ok()?;
    for mut chunk in bytes.chunks(piece) {
        while !chunk.is_empty() {
            out.clear();
            let (taken, step) = client.receive(chunk, &mut out).ok()?;
            assert!(client.kept_bytes() <= OPTION_REPLY_BYTES_MAX);
            chunk = &chunk[taken..];
            match step {
                ClientStep::NeedMore => {}
                ClientStep::StartTls => client.tls_established(&mut out),
                ClientStep::Transmission(_) | ClientStep::Listed(_) => return Some(()),
            }
        }
    }
    Some(())
}

fn transmission(choice: u8, mut bytes: &[u8]) -> Option<()> {
    let headers = [Headers::Simple, Headers::Structured, Headers::Extended][usize::from(choice % 3)];
    let rules = Rules {
        headers,
        size_bytes: 1 << 20,
        block: BlockSizes::default(),
        flags: TransmissionFlags(0xdfd),
        allocation_context: (headers != Headers::Simple).then_some(1),
    };
    let mut client = ClientTransmission::new(rules, 4);
    let mut out = Vec::new();
    for command in [Command::Read, Command::Write, Command::BlockStatus, Command::Flush] {
        let (offset, length) = if command == Command::Flush { (0, 0) } else { (4096, 8192) };
        let _ = client.submit(command, CommandFlags::NONE, offset, length, &mut out);
    }
    loop {
        match client.parse(bytes).ok()? {
            Received::Incomplete { need } => {
                assert!(need > bytes.len() && need <= REPLY_HEAD_BYTES_MAX);
                return Some(());
            }
            Received::Part { cookie, content, last, taken } => {
                bytes = &bytes[taken..];
                if let Content::Data { offset, length } | Content::Hole { offset, length } = content {
                    assert!(offset >= 4096 && offset + u64::from(length) <= 4096 + 8192);
                    if matches!(content, Content::Data { .. }) {
                        bytes = bytes.get(length as usize..).unwrap_or_default();
                    }
                }
                if last {
                    assert!(client.finish(cookie).is_some());
                }
            }
        }
    }
}

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (choice, piece, bytes) = input;
    if choice & 128 == 0 {
        let _ = handshake(choice, usize::from(piece).max(1), bytes);
    } else {
        let _ = transmission(choice, bytes);
    }
});
