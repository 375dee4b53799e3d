//! The client against byway's own server, in memory, and against servers that are old or wrong.

use proptest::prelude::*;

use super::*;
use crate::limits::{OPTION_REPLY_BYTES_MAX, REPLY_HEAD_BYTES_MAX};
use crate::nbd::block_status::Allocation;
use crate::nbd::errno::Errno;
use crate::nbd::export::{Export, Exports};
use crate::nbd::flags::{CommandFlags, TransmissionFlags};
use crate::nbd::handshake::{Handshake, HandshakeConfig, Negotiated, Step, TlsMode};
use crate::nbd::reply::Replies;
use crate::nbd::request::{BlockSizes, Command, Headers, Request, Rules};
use crate::nbd::transmission::{Parsed, Transmission};

struct Shelf(Vec<Export>);

impl Exports for Shelf {
    fn list(&self) -> Vec<Export> {
        self.0.clone()
    }

    fn find(&self, name: &str) -> Option<Export> {
        let name = if name.is_empty() { "disk" } else { name };
        self.0.iter().find(|export| export.name == name).cloned()
    }
}

fn shelf() -> Shelf {
    let disk = Export {
        name: "disk".into(),
        description: "a disk".into(),
        size_bytes: 1 << 40,
        block: BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 },
        flags: TransmissionFlags(0xd7d),
        allocation: true,
        tls_required: false,
    };
    let secret = Export { name: "secret".into(), tls_required: true, ..disk.clone() };
    Shelf(vec![disk, secret])
}

enum Talked {
    Open(Box<Session>, Box<Negotiated>),
    Listed(Vec<ListedExport>),
}

/// Lets the two talk until they agree or the client gives up, `piece` bytes at a time. TLS always
/// succeeds.
fn talk(server: HandshakeConfig, client: ClientConfig, piece: usize) -> Result<Talked, ClientHandshakeError> {
    let shelf = shelf();
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let mut server = Handshake::new(server, &mut to_client);
    let mut client = ClientHandshake::new(client)?;
    let mut negotiated = None;
    for _ in 0..100_000 {
        if !to_server.is_empty() && negotiated.is_none() {
            let end = piece.min(to_server.len());
            let (taken, step) = server.receive(&to_server[..end], &shelf, &mut to_client).unwrap();
            to_server.drain(..taken);
            match step {
                Step::Transmission(end) => negotiated = Some(end),
                Step::StartTls => server.tls_established(),
                Step::NeedMore | Step::Flush | Step::Closed => {}
            }
        }
        let end = piece.min(to_client.len());
        let (taken, step) = client.receive(&to_client[..end], &mut to_server)?;
        assert!(client.kept_bytes() <= OPTION_REPLY_BYTES_MAX);
        to_client.drain(..taken);
        match step {
            ClientStep::NeedMore => {}
            ClientStep::StartTls => client.tls_established(&mut to_server),
            ClientStep::Listed(exports) => return Ok(Talked::Listed(exports)),
            ClientStep::Transmission(session) => {
                assert!(to_client.is_empty() && to_server.is_empty());
                return Ok(Talked::Open(session, negotiated.expect("both sides are done")));
            }
        }
    }
    panic!("they talk without end");
}

#[test]
fn every_combination_of_options_agrees() {
    for bits in 0..32u32 {
        let bit = |index: u32| bits >> index & 1 == 1;
        for (server_tls, client_tls) in [
            (TlsMode::Off, Encryption::Off),
            (TlsMode::Off, Encryption::Preferred),
            (TlsMode::Optional, Encryption::Off),
            (TlsMode::Optional, Encryption::Required),
            (TlsMode::Required, Encryption::Preferred),
        ] {
            let server = HandshakeConfig { tls: server_tls, structured_replies: bit(0), extended_headers: bit(1) };
            let client = ClientConfig {
                tls: client_tls,
                structured_replies: bit(2),
                extended_headers: bit(3),
                allocation: bit(4),
                ..ClientConfig::default()
            };
            let Ok(Talked::Open(session, negotiated)) = talk(server, client, 7) else {
                panic!("no session: {bits:#b} {server_tls:?} {client_tls:?}");
            };
            let headers = match (bit(1) && bit(3), bit(0) && bit(2)) {
                (true, _) => Headers::Extended,
                (false, true) => Headers::Structured,
                (false, false) => Headers::Simple,
            };
            assert_eq!(session.rules, negotiated.rules);
            assert_eq!(session.rules.headers, headers);
            assert_eq!(session.rules.allocation_context.is_some(), bit(4) && headers != Headers::Simple);
            assert_eq!(session.tls, negotiated.tls);
            assert_eq!(session.tls, server_tls != TlsMode::Off && client_tls != Encryption::Off);
            assert_eq!((session.name.as_str(), session.description.as_str()), ("disk", "a disk"));
        }
    }
}

#[test]
fn refusals_have_names() {
    let server = |tls| HandshakeConfig { tls, ..HandshakeConfig::default() };
    let client = |tls, export: &str| ClientConfig { tls, export: export.into(), ..ClientConfig::default() };
    let error = |server, client| talk(server, client, 1000).err().expect("refused");
    let (off, optional, required) = (TlsMode::Off, TlsMode::Optional, TlsMode::Required);
    let unknown = error(server(off), client(Encryption::Off, "no"));
    assert!(matches!(unknown, ClientHandshakeError::UnknownExport(_)));
    let refused = error(server(off), client(Encryption::Required, ""));
    assert!(matches!(refused, ClientHandshakeError::TlsRefused(_)));
    assert_eq!(error(server(required), client(Encryption::Off, "")), ClientHandshakeError::TlsRequired);
    assert_eq!(error(server(optional), client(Encryption::Off, "secret")), ClientHandshakeError::TlsRequired);
    assert!(talk(server(optional), client(Encryption::Preferred, "secret"), 1000).is_ok());
}

#[test]
fn a_list_tells_what_each_export_is() {
    let server = HandshakeConfig { tls: TlsMode::Optional, ..HandshakeConfig::default() };
    for (tls, names) in [(Encryption::Off, vec!["disk"]), (Encryption::Required, vec!["disk", "secret"])] {
        let client = ClientConfig { purpose: Purpose::List, tls, ..ClientConfig::default() };
        let Ok(Talked::Listed(exports)) = talk(server, client, 11) else { panic!("no list") };
        assert_eq!(exports.iter().map(|export| export.name.as_str()).collect::<Vec<_>>(), names);
        for export in exports {
            assert_eq!(export.description, "a disk");
            assert_eq!(export.session.unwrap().rules.size_bytes, 1 << 40);
        }
    }
}

/// Talks to a server that says `greeting`, then answers each option with the next of `answers`.
fn scripted(
    config: ClientConfig,
    greeting: &[u8],
    answers: &[&[u8]],
) -> (Result<ClientStep, ClientHandshakeError>, Vec<u8>) {
    let mut client = ClientHandshake::new(config).unwrap();
    let mut out = Vec::new();
    for bytes in std::iter::once(&greeting).chain(answers) {
        match client.receive(bytes, &mut out) {
            Ok((taken, ClientStep::NeedMore)) => assert_eq!(taken, bytes.len()),
            Ok((_, step)) => return (Ok(step), out),
            Err(error) => return (Err(error), out),
        }
    }
    (Ok(ClientStep::NeedMore), out)
}

const EXPORT: &[u8] = &[0, 0, 0, 0, 0, 0x10, 0, 0, 0, 5];

#[test]
fn a_server_without_go_is_asked_by_name() {
    let unsupported =
        |option: u8| [&b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0"[..], &[option], b"\x80\0\0\x01\0\0\0\0"].concat();
    let config = ClientConfig { export: "old".into(), ..ClientConfig::default() };
    let answers = [unsupported(11), unsupported(8), unsupported(7), EXPORT.to_vec()];
    let answers: Vec<_> = answers.iter().map(Vec::as_slice).collect();
    let (step, out) = scripted(config.clone(), b"NBDMAGICIHAVEOPT\0\x03", &answers);
    let Ok(ClientStep::Transmission(session)) = step else { panic!("no session: {step:?}") };
    assert_eq!((session.rules.size_bytes, session.rules.block), (0x10_0000, BlockSizes::default()));
    assert!(out.ends_with(b"IHAVEOPT\0\0\0\x01\0\0\0\x03old"));
    // Before fixed newstyle there was nothing but the name, and zeroes after the reply.
    let reply = [EXPORT, &[0; 124]].concat();
    let (step, out) = scripted(config.clone(), b"NBDMAGICIHAVEOPT\0\0", &[&reply]);
    assert!(matches!(step, Ok(ClientStep::Transmission(_))));
    assert_eq!(out, b"\0\0\0\0IHAVEOPT\0\0\0\x01\0\0\0\x03old");
    let config = ClientConfig { tls: Encryption::Required, ..config };
    let (step, _) = scripted(config, b"NBDMAGICIHAVEOPT\0\0", &[]);
    assert_eq!(step, Err(ClientHandshakeError::NotFixedNewstyle));
}

#[test]
fn what_is_not_a_server_is_named() {
    let error = |greeting| scripted(ClientConfig::default(), greeting, &[]).0.unwrap_err();
    assert_eq!(error(b"HTTP/1.1 400 Bad"), ClientHandshakeError::NotNbd);
    assert_eq!(error(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0"), ClientHandshakeError::Oldstyle);
    let long = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x0b\x80\0\0\x01\xff\0\0\0";
    let (step, _) = scripted(ClientConfig::default(), b"NBDMAGICIHAVEOPT\0\x03", &[long]);
    assert!(matches!(step, Err(ClientHandshakeError::Misbehaved(_))));
    let down = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x0b\x80\0\0\x07\0\0\0\0";
    let (step, out) = scripted(ClientConfig::default(), b"NBDMAGICIHAVEOPT\0\x03", &[down]);
    assert_eq!(step, Err(ClientHandshakeError::ShuttingDown));
    assert!(out.ends_with(b"IHAVEOPT\0\0\0\x02\0\0\0\0"), "the client takes its leave");
}

fn rules(headers: Headers) -> Rules {
    Rules {
        headers,
        size_bytes: 1 << 40,
        block: BlockSizes::default(),
        flags: TransmissionFlags(0xdfd),
        allocation_context: (headers != Headers::Simple).then_some(1),
    }
}

const ALL: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

/// Takes a request off the front as a server would, without its payload.
fn served(rules: Rules, bytes: &[u8]) -> Request {
    match Transmission::new(rules).parse(bytes) {
        Parsed::Request { request, header_bytes } => {
            assert_eq!(header_bytes, bytes.len());
            request
        }
        other => panic!("refused: {other:?}"),
    }
}

/// Reads a whole reply, skipping payloads, and gives what it brought.
fn parts(client: &mut ClientTransmission, mut bytes: &[u8]) -> Result<Vec<String>, ReplyError> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let mut front = 0;
        let (content, taken, last, cookie) = loop {
            // A shorter front asks for more, and changes nothing.
            match client.parse(&bytes[..front])? {
                Received::Part { content, taken, last, cookie } => break (content, taken, last, cookie),
                Received::Incomplete { need } => assert!(need > front && need <= REPLY_HEAD_BYTES_MAX),
            }
            front += 1;
        };
        assert_eq!(taken, front);
        bytes = &bytes[taken..];
        if let Content::Data { length, .. } = content {
            bytes = &bytes[length as usize..];
        }
        parts.push(format!("{content:?}"));
        if last {
            parts.push(format!("{:?}", client.finish(cookie).expect("ended")));
        }
    }
    Ok(parts)
}

#[test]
fn every_command_round_trips() {
    for headers in ALL {
        let rules = rules(headers);
        let mut client = ClientTransmission::new(rules, 4);
        let replies = Replies::new(rules);
        let zero = CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO | CommandFlags::FUA;
        for (command, flags, offset, length) in [
            (Command::Read, CommandFlags::NONE, 8192, 4096),
            (Command::Write, CommandFlags::FUA, 4096, 512),
            (Command::Flush, CommandFlags::NONE, 0, 0),
            (Command::Trim, CommandFlags::NONE, 0, 1 << 20),
            (Command::Cache, CommandFlags::NONE, 0, 1 << 20),
            (Command::WriteZeroes, zero, 0, 1 << 31),
        ] {
            let mut wire = Vec::new();
            let cookie = client.submit(command, flags, offset, length, &mut wire).unwrap();
            let request = served(rules, &wire);
            assert_eq!(request, Request { command, flags, cookie, offset, length });
            assert_eq!(client.finish(cookie), None, "it has not ended");
            let (mut out, mut expected) = (Vec::new(), vec!["Nothing".into()]);
            if command == Command::Read {
                replies.read_whole(&mut out, &request);
                out.extend_from_slice(&[7; 4096]);
                expected = vec!["Data { offset: 8192, length: 4096 }".to_string()];
            } else {
                replies.success(&mut out, request.tag());
            }
            expected.push("Ok(())".into());
            assert_eq!(parts(&mut client, &out).unwrap(), expected);
            assert_eq!(client.in_flight(), 0);
        }
        let mut wire = Vec::new();
        client.disconnect(&mut wire);
        assert_eq!(served(rules, &wire).command, Command::Disconnect);
    }
}

#[test]
fn errors_round_trip() {
    for headers in ALL {
        let rules = rules(headers);
        let mut client = ClientTransmission::new(rules, 4);
        let (mut wire, mut out) = (Vec::new(), Vec::new());
        client.submit(Command::Read, CommandFlags::NONE, 4096, 8192, &mut wire).unwrap();
        let request = served(rules, &wire);
        Replies::new(rules).error_at(&mut out, request.tag(), Errno::InputOutput, 8192, "bad sector");
        let told = if headers == Headers::Simple {
            "Failed { errno: InputOutput, offset: None, message: [] }".to_string()
        } else {
            let message = format!("{:?}", b"bad sector");
            format!("Failed {{ errno: InputOutput, offset: Some(8192), message: {message} }}")
        };
        assert_eq!(parts(&mut client, &out).unwrap(), [told, "Err(InputOutput)".into()]);
    }
}

#[test]
fn a_read_comes_in_pieces_and_a_map_in_extents() {
    for headers in [Headers::Structured, Headers::Extended] {
        let rules = rules(headers);
        let replies = Replies::new(rules);
        let mut client = ClientTransmission::new(rules, 4);
        let (mut wire, mut out) = (Vec::new(), Vec::new());
        client.submit(Command::Read, CommandFlags::NONE, 4096, 8192, &mut wire).unwrap();
        let request = served(rules, &wire);
        replies.read_hole(&mut out, request.tag(), 8192, 4096, false);
        replies.read_data(&mut out, request.tag(), 4096, 4096, false);
        out.extend_from_slice(&[7; 4096]);
        replies.read_end(&mut out, request.tag());
        let expected =
            ["Hole { offset: 8192, length: 4096 }", "Data { offset: 4096, length: 4096 }", "Nothing", "Ok(())"];
        assert_eq!(parts(&mut client, &out).unwrap(), expected);

        wire.clear();
        out.clear();
        client.submit(Command::BlockStatus, CommandFlags::NONE, 0, 1 << 20, &mut wire).unwrap();
        let hole = Allocation { length: 65_536, hole: true, zero: true };
        let data = Allocation { length: 1 << 30, hole: false, zero: false };
        replies.block_status(&mut out, &served(rules, &wire), [hole, data]);
        let data = Allocation { length: (1 << 20) - 65_536, ..data };
        let expected = ["Nothing".into(), format!("Extent({hole:?})"), format!("Extent({data:?})"), "Ok(())".into()];
        assert_eq!(parts(&mut client, &out).unwrap(), expected);
    }
}

#[test]
fn wrong_replies_end_the_connection() {
    type Reply = fn(&Replies, &Request, &mut Vec<u8>);
    let wrong: [(Command, Reply); 10] = [
        (Command::Read, |replies, request, out| replies.read_end(out, request.tag())),
        (Command::Read, |replies, request, out| replies.read_hole(out, request.tag(), 0, 4096, true)),
        (Command::Read, |replies, request, out| replies.read_hole(out, request.tag(), 4096, 8192, true)),
        (Command::Read, |replies, request, out| replies.read_hole(out, request.tag(), u64::MAX, 512, true)),
        (Command::Read, |replies, request, out| {
            replies.read_hole(out, request.tag(), 4096, 4096, false);
            replies.read_hole(out, request.tag(), 4096, 4096, true);
        }),
        (Command::Read, |replies, request, out| {
            replies.read_hole(out, request.tag(), 4096, 2048, false);
            replies.read_hole(out, request.tag(), 4096, 2048, true);
        }),
        (Command::Read, |replies, request, out| replies.block_status(out, request, [])),
        (Command::Write, |replies, request, out| {
            replies.read_whole(out, &Request { command: Command::Read, ..*request });
        }),
        (Command::BlockStatus, |replies, request, out| replies.read_end(out, request.tag())),
        (Command::Trim, |replies, request, out| {
            replies.success(out, request.tag());
            replies.success(out, request.tag());
        }),
    ];
    for headers in [Headers::Structured, Headers::Extended] {
        for (index, (command, reply)) in wrong.iter().enumerate() {
            let rules = rules(headers);
            let mut client = ClientTransmission::new(rules, 4);
            let (mut wire, mut out) = (Vec::new(), Vec::new());
            client.submit(*command, CommandFlags::NONE, 4096, 4096, &mut wire).unwrap();
            reply(&Replies::new(rules), &served(rules, &wire), &mut out);
            assert!(parts(&mut client, &out).is_err(), "{headers:?} {index}");
        }
    }
}

#[test]
fn the_client_keeps_the_rules_and_its_depth() {
    let mut client = ClientTransmission::new(rules(Headers::Structured), 2);
    let mut out = Vec::new();
    let past_end = client.submit(Command::Read, CommandFlags::NONE, 1 << 40, 512, &mut out);
    assert!(matches!(past_end, Err(SubmitError::Violation(_))));
    let long = client.submit(Command::Trim, CommandFlags::NONE, 0, 1 << 33, &mut out);
    assert!(matches!(long, Err(SubmitError::Violation(_))));
    assert!(out.is_empty());
    let first = client.submit(Command::Flush, CommandFlags::NONE, 0, 0, &mut out).unwrap();
    let second = client.submit(Command::Flush, CommandFlags::NONE, 0, 0, &mut out).unwrap();
    assert_ne!(ClientTransmission::slot(first), ClientTransmission::slot(second));
    let third = client.submit(Command::Flush, CommandFlags::NONE, 0, 0, &mut out);
    assert_eq!(third, Err(SubmitError::Full));
}

proptest! {
    #[test]
    fn noise_is_survived(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        magic in 0usize..4, kind in 0u16..8, error in any::<bool>(), length in 0u32..64,
    ) {
        for config in [ClientConfig::default(), ClientConfig { purpose: Purpose::List, ..ClientConfig::default() }] {
            let mut client = ClientHandshake::new(config).unwrap();
            let mut out = Vec::new();
            let _ = client.receive(b"NBDMAGICIHAVEOPT\0\x03", &mut out);
            let _ = client.receive(&bytes, &mut out);
        }
        for headers in ALL {
            let mut client = ClientTransmission::new(rules(headers), 4);
            let mut out = Vec::new();
            let cookie = client.submit(Command::Read, CommandFlags::NONE, 0, 4096, &mut out).unwrap();
            let magic = [0x6744_6698u32, 0x668e_33ef, 0x6e8a_278c, 0][magic].to_be_bytes();
            let kind = (kind | u16::from(error) << 15).to_be_bytes();
            let plausible = [&magic[..], &[0, 1], &kind, &cookie.to_be_bytes(), &length.to_be_bytes(), &bytes].concat();
            if let Ok(Received::Incomplete { need }) = client.parse(&plausible) {
                prop_assert!(need > plausible.len() && need <= REPLY_HEAD_BYTES_MAX);
            }
        }
    }

    #[test]
    fn the_size_of_pieces_does_not_matter(piece in 1usize..400) {
        let client = ClientConfig { tls: Encryption::Preferred, ..ClientConfig::default() };
        let server = HandshakeConfig { tls: TlsMode::Optional, ..HandshakeConfig::default() };
        let Ok(Talked::Open(session, negotiated)) = talk(server, client.clone(), piece) else {
            return Err(TestCaseError::fail("no session"));
        };
        let Ok(Talked::Open(whole, _)) = talk(server, client, 10_000) else {
            return Err(TestCaseError::fail("no session"));
        };
        prop_assert_eq!(&session, &whole);
        prop_assert_eq!(session.rules, negotiated.rules);
    }
}
