//! The server's NBD transmission phase: any bytes are walked over to their end, what is accepted
//! keeps the rules of the export, and every answer can be written.
#![no_main]

use byway_frontend::limits::{EXTENTS_PER_REPLY_MAX, REQUEST_BYTES_MAX};
use byway_frontend::nbd::block_status::Allocation;
use byway_frontend::nbd::flags::{CommandFlags, TransmissionFlags};
use byway_frontend::nbd::reply::Replies;
use byway_frontend::nbd::request::{BlockSizes, Command, Headers, Rules};
use byway_frontend::nbd::transmission::{Parsed, Transmission};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u16, u64, &[u8])| {
    let (choice, flags, size_bytes, mut bytes) = input;
    let headers = [Headers::Simple, Headers::Structured, Headers::Extended][usize::from(choice % 3)];
    let minimum = 1 << (choice >> 4);
    let block = BlockSizes { minimum, preferred: 65_536, maximum: REQUEST_BYTES_MAX };
    let allocation_context = (choice & 4 != 0 && headers != Headers::Simple).then_some(1);
    let rules = Rules { headers, size_bytes, block, flags: TransmissionFlags(flags), allocation_context };
    let (transmission, replies) = (Transmission::new(rules), Replies::new(rules));
    let mut out = Vec::new();
    loop {
        out.clear();
        let (header_bytes, payload_bytes) = match transmission.parse(bytes) {
            Parsed::Incomplete { need } => {
                assert!(need > bytes.len());
                return;
            }
            Parsed::Bad(_) => return,
            Parsed::Rejected { tag, violation, header_bytes, drain_bytes } => {
                replies.error(&mut out, tag, violation.errno, violation.reason);
                (header_bytes, drain_bytes)
            }
            Parsed::Request { request, header_bytes } => {
                assert_eq!(rules.check(&request), Ok(()));
                assert!(!request.flags.has(CommandFlags::PAYLOAD_LEN));
                match request.command {
                    Command::Disconnect => return,
                    Command::Read => replies.read_whole(&mut out, &request),
                    Command::BlockStatus => {
                        let extents = bytes.iter().map(|&byte| Allocation {
                            length: u64::from(byte) << (byte % 40),
                            hole: byte & 1 != 0,
                            zero: byte & 2 != 0,
                        });
                        replies.block_status(&mut out, &request, extents);
                    }
                    _ => replies.success(&mut out, request.tag()),
                }
                (header_bytes, request.payload_bytes())
            }
        };
        assert!(!out.is_empty() && out.len() <= 64 + 16 * EXTENTS_PER_REPLY_MAX);
        assert!(payload_bytes <= u64::from(REQUEST_BYTES_MAX));
        bytes = bytes[header_bytes..].get(payload_bytes as usize..).unwrap_or_default();
    }
});
