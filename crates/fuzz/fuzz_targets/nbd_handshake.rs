//! The server's NBD handshake: any bytes, in any pieces, keep it within its limits, and how they are
//! cut changes nothing.
#![no_main]

use byway_frontend::limits::{HANDSHAKE_OUTPUT_BYTES_MAX, OPTION_BYTES_MAX};
use byway_frontend::nbd::export::{Export, Exports};
use byway_frontend::nbd::flags::TransmissionFlags;
use byway_frontend::nbd::handshake::{Handshake, HandshakeConfig, HandshakeError, Step, TlsMode};
use byway_frontend::nbd::request::BlockSizes;
use libfuzzer_sys::fuzz_target;

struct Shelf;

impl Exports for Shelf {
    fn list(&self) -> Vec<Export> {
        ["a", "tls"]
            .map(|name| Export {
                name: name.into(),
                description: "one".into(),
                size_bytes: 1 << 20,
                block: BlockSizes::default(),
                flags: TransmissionFlags(0xd7d),
                allocation: true,
                tls_required: name == "tls",
            })
            .into()
    }

    fn find(&self, name: &str) -> Option<Export> {
        let name = if name.is_empty() { "a" } else { name };
        self.list().into_iter().find(|export| export.name == name)
    }
}

/// Feeds `bytes` at most `piece` at a time; gives all output and how it ended.
fn feed(config: HandshakeConfig, mut bytes: &[u8], piece: usize) -> (Vec<u8>, Result<Step, HandshakeError>) {
    let (mut all, mut out) = (Vec::new(), Vec::new());
    let mut handshake = Handshake::new(config, &mut out);
    loop {
        let result = handshake.receive(&bytes[..piece.min(bytes.len())], &Shelf, &mut out);
        assert!(out.len() < HANDSHAKE_OUTPUT_BYTES_MAX + 4096);
        assert!(handshake.kept_bytes() <= OPTION_BYTES_MAX);
        all.append(&mut out);
        match result {
            Err(error) => return (all, Err(error)),
            Ok((taken, step)) => {
                bytes = &bytes[taken..];
                match step {
                    Step::StartTls => handshake.tls_established(),
                    Step::NeedMore if !bytes.is_empty() => {}
                    Step::Flush => {}
                    step => return (all, Ok(step)),
                }
            }
        }
    }
}

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (choice, piece, bytes) = input;
    let tls = [TlsMode::Off, TlsMode::Optional, TlsMode::Required][usize::from(choice % 3)];
    let config = HandshakeConfig { tls, structured_replies: choice & 64 == 0, extended_headers: choice & 128 == 0 };
    let pieces = feed(config, bytes, usize::from(piece).max(1));
    assert_eq!(pieces, feed(config, bytes, usize::MAX));
});
