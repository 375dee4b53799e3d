//! Requests of the kernel's FUSE: any bytes are taken apart or refused, in one piece as in two, and the session takes them.
#![no_main]

use byway_frontend::fuse::request::{Operation, WRITE_HEAD_BYTES, parse, parse_parts};
use byway_frontend::fuse::session::{Session, Step, Wishes};
use byway_frontend::limits::FUSE_WRITE_BYTES_MAX;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|requests: Vec<Vec<u8>>| {
    let mut session = Session::new(Wishes::default());
    for mut bytes in requests {
        // Most are honest about their length; the rest shows by the header's own.
        if bytes.len() >= 40 && bytes[0] & 7 != 0 {
            let len = bytes.len() as u32;
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
        }
        let (head, rest) = bytes.split_at(bytes.len().min(WRITE_HEAD_BYTES));
        let mut joined = Vec::new();
        let parsed = parse(&bytes);
        assert_eq!(parse_parts(head, rest, &mut joined), parsed);
        let Ok(parsed) = parsed else { continue };
        if let Operation::BatchForget { nodes } = parsed.operation {
            assert!(nodes.iter().count() * 16 <= bytes.len());
        }
        let before = session.under_way();
        match session.receive(&parsed) {
            Step::Serve { .. } => assert!(session.terms().is_some() && session.under_way() <= before + 1),
            Step::Welcome(out) => assert!(out.max_write <= FUSE_WRITE_BYTES_MAX),
            _ => assert_eq!(session.under_way(), before),
        }
    }
});
