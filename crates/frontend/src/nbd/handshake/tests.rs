//! The server's handshake against bytes written by hand, and against noise.

use proptest::prelude::*;

use super::*;
use crate::nbd::flags::TransmissionFlags;
use crate::nbd::request::BlockSizes;
use crate::nbd::wire::*;

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
        size_bytes: 0x10_0000,
        block: BlockSizes::default(),
        flags: TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_FAST_ZERO,
        allocation: true,
        tls_required: false,
    };
    let secret = Export { name: "secret".into(), tls_required: true, ..disk.clone() };
    Shelf(vec![disk, secret])
}

/// A connection to a server, without the wire.
struct Wire {
    handshake: Handshake,
    shelf: Shelf,
}

impl Wire {
    fn new(config: HandshakeConfig, client_flags: u32) -> Wire {
        let mut out = Vec::new();
        let handshake = Handshake::new(config, &mut out);
        assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
        let mut wire = Wire { handshake, shelf: shelf() };
        assert_eq!(wire.send(&client_flags.to_be_bytes()), Ok((vec![], Step::NeedMore)));
        wire
    }

    fn with_tls(tls: TlsMode) -> Wire {
        Wire::new(HandshakeConfig { tls, ..HandshakeConfig::default() }, 3)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(Vec<u8>, Step), HandshakeError> {
        let mut out = Vec::new();
        let (taken, step) = self.handshake.receive(bytes, &self.shelf, &mut out)?;
        assert_eq!(taken, bytes.len());
        Ok((out, step))
    }

    /// Sends an option and gives the types of its replies, with what came in them.
    fn option(&mut self, number: u32, body: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.option_step(number, body).0
    }

    fn option_step(&mut self, number: u32, body: &[u8]) -> (Vec<(u32, Vec<u8>)>, Step) {
        let (out, step) = self.send(&option(number, body)).unwrap();
        (replies(number, &out), step)
    }
}

fn option(number: u32, body: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &(body.len() as u32).to_be_bytes(), body].concat()
}

fn replies(number: u32, mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let (header, rest) = OptionReplyHeader::ref_from_prefix(bytes).unwrap();
        assert_eq!((header.magic.get(), header.option.get()), (OPTION_REPLY_MAGIC, number));
        let (body, rest) = rest.split_at(header.length.get() as usize);
        replies.push((header.kind.get(), body.to_vec()));
        bytes = rest;
    }
    replies
}

fn kinds(replies: &[(u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|(kind, _)| *kind).collect()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut body = text(name);
    body.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    for info in infos {
        body.extend_from_slice(&info.to_be_bytes());
    }
    body
}

fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut body = text(name);
    body.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    for query in queries {
        body.extend_from_slice(&text(query));
    }
    body
}

fn negotiated(step: Step) -> Negotiated {
    match step {
        Step::Transmission(negotiated) => *negotiated,
        other => panic!("not in transmission: {other:?}"),
    }
}

#[test]
fn go_tells_what_was_asked() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    let (replies, step) = wire.option_step(OPT_GO, &go("", &[3, 1, 2, 99]));
    assert_eq!(kinds(&replies), [REP_INFO, REP_INFO, REP_INFO, REP_INFO, REP_ACK]);
    // FAST_ZERO without WRITE_ZEROES is not said, nor DF without chunks.
    assert_eq!(replies[0].1, b"\0\0\0\0\0\0\0\x10\0\0\0\x05");
    assert_eq!(replies[1].1, b"\0\x01disk");
    assert_eq!(replies[2].1, b"\0\x02a disk");
    assert_eq!(replies[3].1, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
    let negotiated = negotiated(step);
    assert_eq!(negotiated.export.name, "disk");
    assert_eq!((negotiated.rules.headers, negotiated.tls), (Headers::Simple, false));
    assert_eq!(wire.send(b"x"), Err(HandshakeError::Ended));
}

#[test]
fn info_does_not_choose_and_sees_changes() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    let replies = wire.option(OPT_INFO, &go("disk", &[]));
    assert_eq!(kinds(&replies), [REP_INFO, REP_ACK]);
    wire.shelf.0[0].size_bytes = 0x20_0000;
    wire.shelf.0[0].block.minimum = 512;
    let (replies, step) = wire.option_step(OPT_GO, &go("disk", &[]));
    assert_eq!(kinds(&replies), [REP_INFO, REP_INFO, REP_ACK], "odd blocks are told unasked");
    assert_eq!(negotiated(step).rules.size_bytes, 0x20_0000);
}

#[test]
fn export_name_with_and_without_zeroes() {
    for (flags, length) in [(1, 134), (3, 10), (0, 134)] {
        let mut wire = Wire::new(HandshakeConfig::default(), flags);
        let (out, step) = wire.send(&option(OPT_EXPORT_NAME, b"disk")).unwrap();
        assert_eq!(out.len(), length);
        assert_eq!(out[..10], *b"\0\0\0\0\0\x10\0\0\0\x05");
        negotiated(step);
    }
    let mut wire = Wire::new(HandshakeConfig::default(), 3);
    let refused = Err(HandshakeError::ExportName(Refusal::Unknown));
    assert_eq!(wire.send(&option(OPT_EXPORT_NAME, b"other")), refused);
}

#[test]
fn headers_are_negotiated() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    assert_eq!(kinds(&wire.option(OPT_STRUCTURED_REPLY, b"x")), [REP_ERR_INVALID]);
    assert_eq!(kinds(&wire.option(OPT_STRUCTURED_REPLY, b"")), [REP_ACK]);
    assert_eq!(kinds(&wire.option(OPT_EXTENDED_HEADERS, b"")), [REP_ACK]);
    assert_eq!(kinds(&wire.option(OPT_STRUCTURED_REPLY, b"")), [REP_ERR_EXT_HEADER_REQD]);
    let refused = Err(HandshakeError::ExportName(Refusal::ExtendedHeaders));
    assert_eq!(wire.send(&option(OPT_EXPORT_NAME, b"disk")), refused);
    let (_, step) = wire.option_step(OPT_GO, &go("disk", &[]));
    let rules = negotiated(step).rules;
    assert_eq!(rules.headers, Headers::Extended);
    assert!(rules.flags.has(TransmissionFlags::SEND_DF));
}

#[test]
fn contexts_are_listed_and_selected() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    let set = queries("disk", &["base:allocation", "base:other", "x-y:", "base:allocation"]);
    assert_eq!(kinds(&wire.option(OPT_SET_META_CONTEXT, &set)), [REP_ERR_INVALID]);
    wire.option(OPT_STRUCTURED_REPLY, b"");
    let listed = [(REP_META_CONTEXT, b"\0\0\0\0base:allocation".to_vec()), (REP_ACK, vec![])];
    assert_eq!(wire.option(OPT_LIST_META_CONTEXT, &queries("disk", &[])), listed);
    assert_eq!(wire.option(OPT_LIST_META_CONTEXT, &queries("disk", &["base:"])), listed);
    assert_eq!(kinds(&wire.option(OPT_LIST_META_CONTEXT, &queries("disk", &["x-y:"]))), [REP_ACK]);
    assert_eq!(kinds(&wire.option(OPT_SET_META_CONTEXT, &queries("no", &[]))), [REP_ERR_UNKNOWN]);
    assert_eq!(kinds(&wire.option(OPT_SET_META_CONTEXT, &queries("disk", &["base:"]))), [REP_ACK]);
    let selected = [(REP_META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec()), (REP_ACK, vec![])];
    assert_eq!(wire.option(OPT_SET_META_CONTEXT, &set), selected);
    // The default export is the same one under another name.
    let (_, step) = wire.option_step(OPT_GO, &go("", &[]));
    assert_eq!(negotiated(step).rules.allocation_context, Some(1));
}

#[test]
fn a_failed_selection_selects_nothing() {
    for spoil in [queries("disk", &[]), queries("no", &["base:allocation"]), vec![0; 20_000]] {
        let mut wire = Wire::with_tls(TlsMode::Off);
        wire.option(OPT_EXTENDED_HEADERS, b"");
        wire.option(OPT_SET_META_CONTEXT, &queries("disk", &["base:allocation"]));
        wire.option(OPT_SET_META_CONTEXT, &spoil);
        let (_, step) = wire.option_step(OPT_GO, &go("disk", &[]));
        assert_eq!(negotiated(step).rules.allocation_context, None);
    }
}

#[test]
fn list_hides_what_needs_tls() {
    let mut wire = Wire::with_tls(TlsMode::Optional);
    let replies = wire.option(OPT_LIST, b"");
    assert_eq!(replies, [(REP_SERVER, b"\0\0\0\x04diska disk".to_vec()), (REP_ACK, vec![])]);
    assert_eq!(kinds(&wire.option(OPT_LIST, b"x")), [REP_ERR_INVALID]);
    assert_eq!(kinds(&wire.option(OPT_INFO, &go("secret", &[]))), [REP_ERR_TLS_REQD]);
    assert_eq!(kinds(&wire.option(OPT_GO, &go("secret", &[]))), [REP_ERR_TLS_REQD]);
    assert_eq!(wire.option_step(OPT_STARTTLS, b"").1, Step::StartTls);
    wire.handshake.tls_established();
    assert_eq!(kinds(&wire.option(OPT_LIST, b"")), [REP_SERVER, REP_SERVER, REP_ACK]);
    let (_, step) = wire.option_step(OPT_GO, &go("secret", &[]));
    assert!(negotiated(step).tls);
    let mut wire = Wire::with_tls(TlsMode::Optional);
    let refused = Err(HandshakeError::ExportName(Refusal::TlsRequired));
    assert_eq!(wire.send(&option(OPT_EXPORT_NAME, b"secret")), refused);
}

#[test]
fn where_memory_is_short_a_list_is_refused_if_its_answer_is_long_however_short_the_names_are() {
    for (count, is_short) in [(100, true), (200, false)] {
        let mut wire = Wire::with_tls(TlsMode::Off);
        let export =
            |number: usize| Export { name: format!("{number}"), description: String::new(), ..wire.shelf.0[0].clone() };
        wire.shelf = Shelf((0..count).map(export).collect());
        wire.handshake.set_crowded(true);
        let (out, _) = wire.send(&option(OPT_LIST, b"")).unwrap();
        assert_eq!(kinds(&replies(OPT_LIST, &out)).contains(&REP_ERR_POLICY), !is_short, "{count}");
        // The acknowledgement comes behind the list.
        assert!(out.len() <= CROWDED_OUTPUT_BYTES_MAX + size_of::<OptionReplyHeader>(), "{} bytes", out.len());
        wire.handshake.set_crowded(false);
        assert_eq!(wire.option(OPT_LIST, b"").len(), count + 1);
    }
}

#[test]
fn tls_required_shuts_every_other_door() {
    let mut wire = Wire::with_tls(TlsMode::Required);
    for number in [OPT_LIST, OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY, OPT_EXTENDED_HEADERS, 4, 99] {
        assert_eq!(kinds(&wire.option(number, b"")), [REP_ERR_TLS_REQD]);
        assert_eq!(kinds(&wire.option(number, &vec![0; 20_000])), [REP_ERR_TLS_REQD]);
    }
    assert_eq!(kinds(&wire.option(OPT_STARTTLS, b"x")), [REP_ERR_INVALID]);
    let refused = Err(HandshakeError::ExportName(Refusal::TlsRequired));
    assert_eq!(wire.send(&option(OPT_EXPORT_NAME, b"disk")), refused);
    assert_eq!(wire.option_step(OPT_ABORT, b"").1, Step::Closed);
}

#[test]
fn tls_starts_negotiation_anew() {
    let mut wire = Wire::with_tls(TlsMode::Optional);
    wire.option(OPT_EXTENDED_HEADERS, b"");
    wire.option(OPT_SET_META_CONTEXT, &queries("disk", &["base:allocation"]));
    assert_eq!(wire.option_step(OPT_STARTTLS, b"").1, Step::StartTls);
    // What a man in the middle appends to the plain option is not taken for an option.
    assert_eq!(wire.send(&option(OPT_LIST, b"")), Err(HandshakeError::Ended));
    wire.handshake.tls_established();
    assert_eq!(kinds(&wire.option(OPT_STARTTLS, b"")), [REP_ERR_INVALID]);
    let (_, step) = wire.option_step(OPT_GO, &go("disk", &[]));
    let negotiated = negotiated(step);
    assert_eq!(negotiated.rules.headers, Headers::Simple);
    assert_eq!(negotiated.rules.allocation_context, None);
}

#[test]
fn without_tls_nothing_demands_it() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    assert_eq!(kinds(&wire.option(OPT_STARTTLS, b"")), [REP_ERR_POLICY]);
    assert_eq!(kinds(&wire.option(OPT_GO, &go("secret", &[]))), [REP_ERR_POLICY]);
}

#[test]
fn malformed_options_are_answered() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    wire.option(OPT_STRUCTURED_REPLY, b"");
    let long_name = go(&"x".repeat(NAME_BYTES_MAX + 1), &[]);
    for (number, body, answer) in [
        (OPT_GO, b"".to_vec(), REP_ERR_INVALID),
        (OPT_GO, b"\xff\xff\xff\xffdisk\0\0".to_vec(), REP_ERR_INVALID),
        (OPT_GO, b"\0\0\0\x01\xff\0\0".to_vec(), REP_ERR_INVALID),
        (OPT_GO, b"\0\0\0\x04disk\0\x01".to_vec(), REP_ERR_INVALID),
        (OPT_GO, b"\0\0\0\x04disk\0\0x".to_vec(), REP_ERR_INVALID),
        (OPT_GO, go("nothing", &[]), REP_ERR_UNKNOWN),
        (OPT_GO, long_name, REP_ERR_TOO_BIG),
        (OPT_GO, vec![0; OPTION_BYTES_MAX + 1], REP_ERR_TOO_BIG),
        (OPT_SET_META_CONTEXT, b"\0\0\0\x04disk\xff\xff\xff\xff".to_vec(), REP_ERR_INVALID),
        (4, b"".to_vec(), REP_ERR_UNSUP),
        (99, vec![0; OPTION_BYTES_MAX + 1], REP_ERR_UNSUP),
    ] {
        assert_eq!(kinds(&wire.option(number, &body)), [answer], "option {number}");
    }
}

#[test]
fn what_is_not_nbd_ends() {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(HandshakeConfig::default(), &mut out);
    let error = handshake.receive(b"GET / HTTP/1.1\r\n\r\n", &shelf(), &mut out).unwrap_err();
    assert_eq!(error, HandshakeError::ClientFlags(0x4745_5420));
    let mut wire = Wire::with_tls(TlsMode::Off);
    let error = wire.send(b"IHAVEOPS\0\0\0\x01\0\0\0\0").unwrap_err();
    assert_eq!(error, HandshakeError::Magic(OPTION_MAGIC - 1));
    let mut wire = Wire::new(HandshakeConfig::default(), 0);
    let error = wire.send(&option(OPT_LIST, b"")).unwrap_err();
    assert_eq!(error, HandshakeError::NotFixedNewstyle(OPT_LIST));
}

#[test]
fn options_are_counted() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    for _ in 0..OPTIONS_MAX {
        wire.option(99, b"");
    }
    assert_eq!(wire.send(&option(99, b"")), Err(HandshakeError::TooManyOptions));
}

#[test]
fn output_is_bounded_while_nobody_reads() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    wire.shelf.0[0].description = "x".repeat(4000);
    let flood = option(OPT_LIST, b"").repeat(100);
    let mut out = Vec::new();
    let (taken, step) = wire.handshake.receive(&flood, &wire.shelf, &mut out).unwrap();
    assert_eq!(step, Step::Flush);
    assert!(out.len() < HANDSHAKE_OUTPUT_BYTES_MAX + 5000);
    assert_eq!(taken % 16, 0);
    out.clear();
    assert_eq!(wire.handshake.receive(&flood[taken..], &wire.shelf, &mut out).unwrap().1, Step::Flush);
}

#[test]
fn a_draining_server_says_so() {
    let mut wire = Wire::with_tls(TlsMode::Off);
    wire.handshake.shut_down();
    assert_eq!(kinds(&wire.option(OPT_GO, &go("disk", &[]))), [REP_ERR_SHUTDOWN]);
    assert_eq!(wire.option_step(OPT_ABORT, b"bye"), (vec![(REP_ACK, vec![])], Step::Closed));
}

/// Feeds bytes in pieces as a driver would, and gives all output and the end.
fn feed(config: HandshakeConfig, bytes: &[u8], cuts: &[usize]) -> (Vec<u8>, Result<Step, HandshakeError>, usize) {
    let (mut all, mut out) = (Vec::new(), Vec::new());
    let mut handshake = Handshake::new(config, &mut out);
    let shelf = shelf();
    let mut at = 0;
    let mut cuts = cuts.iter().cycle();
    let mut end = bytes.len().min(*cuts.next().unwrap());
    loop {
        match handshake.receive(&bytes[at..end], &shelf, &mut out) {
            Err(error) => {
                all.append(&mut out);
                return (all, Err(error), 0);
            }
            Ok((taken, step)) => {
                at += taken;
                assert!(handshake.kept_bytes() <= OPTION_BYTES_MAX);
                all.append(&mut out);
                match step {
                    Step::NeedMore => {
                        assert_eq!(at, end);
                        if end == bytes.len() {
                            return (all, Ok(Step::NeedMore), at);
                        }
                        end = bytes.len().min(end + cuts.next().unwrap());
                    }
                    Step::Flush => {}
                    Step::StartTls => handshake.tls_established(),
                    step => return (all, Ok(step), at),
                }
            }
        }
    }
}

fn bodies() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(vec![]),
        prop::collection::vec(any::<u8>(), 0..64),
        Just(vec![7; OPTION_BYTES_MAX + 3]),
        prop::sample::select(vec!["", "disk", "secret", "no"]).prop_map(|name| go(name, &[3, 1])),
        prop::sample::select(vec!["", "disk", "secret", "no"])
            .prop_map(|name| queries(name, &["base:", "base:allocation"])),
        Just(b"disk".to_vec()),
    ]
}

fn configs() -> impl Strategy<Value = HandshakeConfig> {
    let tls = prop::sample::select(vec![TlsMode::Off, TlsMode::Optional, TlsMode::Required]);
    (tls, any::<bool>(), any::<bool>()).prop_map(|(tls, structured_replies, extended_headers)| HandshakeConfig {
        tls,
        structured_replies,
        extended_headers,
    })
}

proptest! {
    #[test]
    fn noise_is_survived(
        config in configs(),
        bytes in prop::collection::vec(any::<u8>(), 0..256),
        cut in 1usize..64,
    ) {
        let _ = feed(config, &bytes, &[cut]);
        let plausible = [&[0, 0, 0, 3][..], b"IHAVEOPT\0\0\0\x07", &bytes].concat();
        let _ = feed(config, &plausible, &[cut]);
    }

    #[test]
    fn pieces_do_not_matter(
        config in configs(),
        options in prop::collection::vec((0u32..13, bodies()), 0..8),
        cuts in prop::collection::vec(1usize..200, 1..20),
    ) {
        let mut bytes = vec![0, 0, 0, 3];
        for (number, body) in &options {
            bytes.extend_from_slice(&option(*number, body));
        }
        let whole = feed(config, &bytes, &[bytes.len()]);
        prop_assert_eq!(&feed(config, &bytes, &cuts).1, &whole.1);
        prop_assert_eq!(feed(config, &bytes, &cuts), whole);
    }
}
