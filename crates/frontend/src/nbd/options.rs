//! The options of the handshake, and their answers (proto.md, "Option types").

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use super::export::{Export, Exports};
use super::flags::TransmissionFlags;
use super::handshake::{Handshake, Negotiated, Refusal, TlsMode};
use super::reply::cut;
use super::request::{BlockSizes, Headers, Rules};
use super::wire::{
    BASE_ALLOCATION, EXPORT_NAME_ZEROES_BYTES, ExportNameReply, INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT,
    INFO_NAME, InfoBlockSize, InfoExport, OPT_ABORT, OPT_EXPORT_NAME, OPT_EXTENDED_HEADERS, OPT_GO, OPT_INFO, OPT_LIST,
    OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY, OPTION_REPLY_MAGIC,
    OptionReplyHeader, REP_ACK, REP_ERR_EXT_HEADER_REQD, REP_ERR_INVALID, REP_ERR_POLICY, REP_ERR_SHUTDOWN,
    REP_ERR_TLS_REQD, REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, REP_ERR_UNSUP, REP_INFO, REP_META_CONTEXT, REP_SERVER,
};
use crate::limits::{CROWDED_OUTPUT_BYTES_MAX, NAME_BYTES_MAX};

/// The id of `base:allocation` in replies; any number would do.
const ALLOCATION_ID: u32 = 1;

/// What an option led to.
pub(super) enum Outcome {
    Answered,
    StartTls,
    Aborted,
    Chosen(Box<Negotiated>),
}

/// An error reply: its type and a message for a person.
struct Denial(u32, &'static str);

type Answer = Result<Outcome, Denial>;

/// Answers one option that has come whole. An error is one that only closing can express.
pub(super) fn run_option(
    handshake: &mut Handshake,
    option: u32,
    body: &[u8],
    exports: &dyn Exports,
    out: &mut Vec<u8>,
) -> Result<Outcome, Refusal> {
    if option == OPT_EXPORT_NAME {
        return export_name(handshake, body, exports, out);
    }
    let answer = match gate(handshake, option) {
        Ok(()) => match option {
            OPT_ABORT => Ok(abort(out)),
            OPT_LIST => list(handshake, body, exports, out),
            OPT_STARTTLS => start_tls(handshake, body, out),
            OPT_INFO | OPT_GO => info(handshake, option, body, exports, out),
            OPT_STRUCTURED_REPLY => structured_reply(handshake, body, out),
            OPT_EXTENDED_HEADERS => extended_headers(handshake, body, out),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => meta_context(handshake, option, body, exports, out),
            _ => Err(Denial(REP_ERR_UNSUP, "this server does not know the option")),
        },
        Err(denial) => Err(denial),
    };
    Ok(answer.unwrap_or_else(|denial| deny(handshake, out, option, &denial)))
}

/// Answers an option whose body was skipped for its length.
pub(super) fn option_too_long(handshake: &mut Handshake, option: u32, out: &mut Vec<u8>) -> Outcome {
    let answer = match (gate(handshake, option), option) {
        (Err(denial), _) => Err(denial),
        // Whatever comes with an ABORT is to be ignored.
        (Ok(()), OPT_ABORT) => Ok(abort(out)),
        (Ok(()), OPT_LIST | OPT_STARTTLS..=OPT_EXTENDED_HEADERS) => {
            if option == OPT_SET_META_CONTEXT {
                handshake.negotiation.allocation_for = None;
            }
            Err(Denial(REP_ERR_TOO_BIG, "the option is too long"))
        }
        _ => Err(Denial(REP_ERR_UNSUP, "this server does not know the option")),
    };
    answer.unwrap_or_else(|denial| deny(handshake, out, option, &denial))
}

/// Whether the option may be looked at at all.
fn gate(handshake: &Handshake, option: u32) -> Result<(), Denial> {
    if option == OPT_ABORT {
        return Ok(());
    }
    if handshake.shutting_down {
        return Err(Denial(REP_ERR_SHUTDOWN, "the server is shutting down"));
    }
    let plain = handshake.config.tls == TlsMode::Required && !handshake.tls;
    if plain && option != OPT_STARTTLS {
        return Err(Denial(REP_ERR_TLS_REQD, "this server serves over TLS only"));
    }
    Ok(())
}

fn abort(out: &mut Vec<u8>) -> Outcome {
    ack(out, OPT_ABORT);
    Outcome::Aborted
}

fn no_body(body: &[u8]) -> Result<(), Denial> {
    if body.is_empty() { Ok(()) } else { Err(Denial(REP_ERR_INVALID, "the option takes no data")) }
}

fn list(handshake: &Handshake, body: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Answer {
    no_body(body)?;
    let exports: Vec<_> = exports.list().into_iter().filter(|export| handshake.tls || !export.tls_required).collect();
    let bytes = |export: &Export| {
        size_of::<OptionReplyHeader>() + size_of::<U32>() + cut(&export.name).len() + cut(&export.description).len()
    };
    if handshake.crowded && exports.iter().map(bytes).sum::<usize>() > CROWDED_OUTPUT_BYTES_MAX {
        return Err(Denial(REP_ERR_POLICY, "too many clients have not read their lists; try again"));
    }
    for export in exports {
        let (name, description) = (cut(&export.name), cut(&export.description));
        reply_header(out, OPT_LIST, REP_SERVER, 4 + name.len() + description.len());
        out.extend_from_slice(U32::new(name.len() as u32).as_bytes());
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(description.as_bytes());
    }
    ack(out, OPT_LIST);
    Ok(Outcome::Answered)
}

fn start_tls(handshake: &Handshake, body: &[u8], out: &mut Vec<u8>) -> Answer {
    if handshake.config.tls == TlsMode::Off {
        return Err(Denial(REP_ERR_POLICY, "this server does not offer TLS"));
    }
    no_body(body)?;
    if handshake.tls {
        return Err(Denial(REP_ERR_INVALID, "TLS is in use already"));
    }
    ack(out, OPT_STARTTLS);
    Ok(Outcome::StartTls)
}

fn structured_reply(handshake: &mut Handshake, body: &[u8], out: &mut Vec<u8>) -> Answer {
    if !handshake.config.structured_replies {
        return Err(Denial(REP_ERR_UNSUP, "structured replies are not offered"));
    }
    no_body(body)?;
    if handshake.negotiation.headers == Headers::Extended {
        return Err(Denial(REP_ERR_EXT_HEADER_REQD, "extended headers are in use already"));
    }
    handshake.negotiation.headers = Headers::Structured;
    ack(out, OPT_STRUCTURED_REPLY);
    Ok(Outcome::Answered)
}

fn extended_headers(handshake: &mut Handshake, body: &[u8], out: &mut Vec<u8>) -> Answer {
    if !handshake.config.extended_headers {
        return Err(Denial(REP_ERR_UNSUP, "extended headers are not offered"));
    }
    no_body(body)?;
    handshake.negotiation.headers = Headers::Extended;
    ack(out, OPT_EXTENDED_HEADERS);
    Ok(Outcome::Answered)
}

/// `NBD_OPT_INFO` and `NBD_OPT_GO`.
fn info(handshake: &mut Handshake, option: u32, body: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Answer {
    let mut reader = Reader(body);
    let name = reader.text()?;
    let count = reader.u16()?;
    let mut wanted = [false; 4];
    for _ in 0..count {
        let kind = reader.u16()?;
        if let Some(wanted) = wanted.get_mut(usize::from(kind)) {
            *wanted = true;
        }
    }
    reader.end()?;
    let negotiated = choose(handshake, name, exports).map_err(|refusal| match refusal {
        Refusal::TlsRequired => Denial(REP_ERR_TLS_REQD, "this export is served over TLS only"),
        Refusal::TlsOff => {
            Denial(REP_ERR_POLICY, "this export is served over TLS only, which this server does not offer")
        }
        _ => Denial(REP_ERR_UNKNOWN, "there is no such export"),
    })?;
    info_replies(&negotiated, option, wanted, out);
    if option == OPT_GO {
        ack(out, option);
        Ok(Outcome::Chosen(Box::new(negotiated)))
    } else {
        ack(out, option);
        Ok(Outcome::Answered)
    }
}

fn info_replies(negotiated: &Negotiated, option: u32, wanted: [bool; 4], out: &mut Vec<u8>) {
    let export = &negotiated.export;
    reply_header(out, option, REP_INFO, InfoExport::BYTES);
    let info = InfoExport {
        kind: INFO_EXPORT.into(),
        size: negotiated.rules.size_bytes.into(),
        flags: negotiated.rules.flags.0.into(),
    };
    out.extend_from_slice(info.as_bytes());
    for (kind, text) in [(INFO_NAME, &export.name), (INFO_DESCRIPTION, &export.description)] {
        if wanted[usize::from(kind)] && !(kind == INFO_DESCRIPTION && text.is_empty()) {
            let text = cut(text);
            reply_header(out, option, REP_INFO, 2 + text.len());
            out.extend_from_slice(U16::new(kind).as_bytes());
            out.extend_from_slice(text.as_bytes());
        }
    }
    // Constraints that differ from the defaults are told to everyone.
    if wanted[usize::from(INFO_BLOCK_SIZE)] || export.block != BlockSizes::default() {
        reply_header(out, option, REP_INFO, InfoBlockSize::BYTES);
        let info = InfoBlockSize {
            kind: INFO_BLOCK_SIZE.into(),
            minimum: export.block.minimum.into(),
            preferred: export.block.preferred.into(),
            maximum: export.block.maximum.into(),
        };
        out.extend_from_slice(info.as_bytes());
    }
}

fn export_name(
    handshake: &mut Handshake,
    body: &[u8],
    exports: &dyn Exports,
    out: &mut Vec<u8>,
) -> Result<Outcome, Refusal> {
    match gate(handshake, OPT_EXPORT_NAME) {
        Err(Denial(REP_ERR_SHUTDOWN, _)) => return Err(Refusal::Shutdown),
        Err(_) => return Err(Refusal::TlsRequired),
        Ok(()) => {}
    }
    if handshake.negotiation.headers == Headers::Extended {
        return Err(Refusal::ExtendedHeaders);
    }
    let name = std::str::from_utf8(body).map_err(|_| Refusal::Name)?;
    let negotiated = choose(handshake, name, exports)?;
    let reply = ExportNameReply { size: negotiated.rules.size_bytes.into(), flags: negotiated.rules.flags.0.into() };
    out.extend_from_slice(reply.as_bytes());
    if !handshake.no_zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_ZEROES_BYTES]);
    }
    Ok(Outcome::Chosen(Box::new(negotiated)))
}

/// `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
fn meta_context(
    handshake: &mut Handshake,
    option: u32,
    body: &[u8],
    exports: &dyn Exports,
    out: &mut Vec<u8>,
) -> Answer {
    let set = option == OPT_SET_META_CONTEXT;
    if set {
        // What was selected before is gone, even if this fails.
        handshake.negotiation.allocation_for = None;
    }
    if handshake.negotiation.headers == Headers::Simple {
        return Err(Denial(REP_ERR_INVALID, "negotiate structured replies first"));
    }
    let mut reader = Reader(body);
    let name = reader.text()?;
    let count = reader.u32()?;
    // Without queries, LIST means all contexts and SET none.
    let mut matches = count == 0 && !set;
    for _ in 0..count {
        let query = reader.text()?;
        matches |= query == BASE_ALLOCATION || (!set && query == "base:");
    }
    reader.end()?;
    // TLS_REQD is no answer to this option; what is served over TLS only does not exist here.
    let export =
        choose(handshake, name, exports).map_err(|_| Denial(REP_ERR_UNKNOWN, "there is no such export"))?.export;
    if matches && export.allocation {
        reply_header(out, option, REP_META_CONTEXT, 4 + BASE_ALLOCATION.len());
        let id = if set { ALLOCATION_ID } else { 0 };
        out.extend_from_slice(U32::new(id).as_bytes());
        out.extend_from_slice(BASE_ALLOCATION.as_bytes());
        if set {
            handshake.negotiation.allocation_for = Some(export.name);
        }
    }
    ack(out, option);
    Ok(Outcome::Answered)
}

/// Looks an export up and settles what a connection to it would be.
fn choose(handshake: &Handshake, name: &str, exports: &dyn Exports) -> Result<Negotiated, Refusal> {
    let export = exports.find(name).ok_or(Refusal::Unknown)?;
    if export.tls_required && !handshake.tls {
        return Err(match handshake.config.tls {
            TlsMode::Off => Refusal::TlsOff,
            TlsMode::Optional | TlsMode::Required => Refusal::TlsRequired,
        });
    }
    let headers = handshake.negotiation.headers;
    let mut flags = export.flags | TransmissionFlags::HAS_FLAGS;
    flags = flags.without(TransmissionFlags::SEND_DF);
    flags = flags.without(TransmissionFlags::BLOCK_STATUS_PAYLOAD);
    if headers != Headers::Simple {
        flags |= TransmissionFlags::SEND_DF;
    }
    if !flags.has(TransmissionFlags::SEND_WRITE_ZEROES) {
        flags = flags.without(TransmissionFlags::SEND_FAST_ZERO);
    }
    let selected = handshake.negotiation.allocation_for.as_ref() == Some(&export.name);
    let rules = Rules {
        headers,
        size_bytes: export.size_bytes,
        block: export.block,
        flags,
        allocation_context: (selected && export.allocation).then_some(ALLOCATION_ID),
    };
    Ok(Negotiated { export, rules, tls: handshake.tls })
}

fn ack(out: &mut Vec<u8>, option: u32) {
    reply_header(out, option, REP_ACK, 0);
}

fn deny(handshake: &mut Handshake, out: &mut Vec<u8>, option: u32, denial: &Denial) -> Outcome {
    handshake.refused_plain |= denial.0 == REP_ERR_TLS_REQD;
    reply_header(out, option, denial.0, denial.1.len());
    out.extend_from_slice(denial.1.as_bytes());
    Outcome::Answered
}

fn reply_header(out: &mut Vec<u8>, option: u32, kind: u32, length: usize) {
    let header = OptionReplyHeader {
        magic: OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        length: (length as u32).into(),
    };
    out.extend_from_slice(header.as_bytes());
}

/// Takes the fields of an option's body off its front.
struct Reader<'a>(&'a [u8]);

const SHORT: Denial = Denial(REP_ERR_INVALID, "the option's lengths do not fit its data");

impl<'a> Reader<'a> {
    fn u16(&mut self) -> Result<u16, Denial> {
        let (value, rest) = U16::read_from_prefix(self.0).map_err(|_| SHORT)?;
        self.0 = rest;
        Ok(value.get())
    }

    fn u32(&mut self) -> Result<u32, Denial> {
        let (value, rest) = U32::read_from_prefix(self.0).map_err(|_| SHORT)?;
        self.0 = rest;
        Ok(value.get())
    }

    /// A string with its 32-bit length before it.
    fn text(&mut self) -> Result<&'a str, Denial> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length).ok_or(SHORT)?;
        if length > NAME_BYTES_MAX {
            return Err(Denial(REP_ERR_TOO_BIG, "a string is longer than 4096 bytes"));
        }
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| Denial(REP_ERR_INVALID, "a string is not UTF-8"))
    }

    fn end(&self) -> Result<(), Denial> {
        if self.0.is_empty() { Ok(()) } else { Err(SHORT) }
    }
}
