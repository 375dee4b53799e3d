//! Negotiation, from the server's greeting to an open export or a list of exports.

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use crate::limits::{
    LISTED_EXPORTS_MAX, NAME_BYTES_MAX, OPTION_REPLY_BYTES_MAX, REPLIES_PER_OPTION_MAX, REQUEST_BYTES_MAX,
};
use crate::nbd::flags::TransmissionFlags;
use crate::nbd::request::{BlockSizes, Headers, Rules};
use crate::nbd::wire::{
    BASE_ALLOCATION, EXPORT_NAME_ZEROES_BYTES, ExportNameReply, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Greeting,
    INFO_BLOCK_SIZE, INFO_DESCRIPTION, INFO_EXPORT, INFO_NAME, InfoBlockSize, InfoExport, NBD_MAGIC, OLDSTYLE_MAGIC,
    OPT_ABORT, OPT_EXPORT_NAME, OPT_EXTENDED_HEADERS, OPT_GO, OPT_INFO, OPT_LIST, OPT_SET_META_CONTEXT, OPT_STARTTLS,
    OPT_STRUCTURED_REPLY, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReplyHeader, REP_ACK, REP_ERR_SHUTDOWN,
    REP_ERR_TLS_REQD, REP_ERR_UNKNOWN, REP_ERR_UNSUP, REP_ERROR_BIT, REP_INFO, REP_META_CONTEXT, REP_SERVER,
};

/// Whether the client wants TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// Never.
    #[default]
    Off,
    /// Where the server offers it. A man in the middle can take it away.
    Preferred,
    /// Or not at all.
    Required,
}

/// What the connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    /// To use an export.
    #[default]
    Open,
    /// To learn which exports there are; the connection ends with the answer.
    List,
}

/// What to negotiate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// What for.
    pub purpose: Purpose,
    /// The export to open; empty for the default one.
    pub export: String,
    /// TLS.
    pub tls: Encryption,
    /// Whether to ask for structured replies (where extended headers are not to be had).
    pub structured_replies: bool,
    /// Whether to ask for extended headers.
    pub extended_headers: bool,
    /// Whether to ask for `base:allocation`.
    pub allocation: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        ClientConfig {
            purpose: Purpose::Open,
            export: String::new(),
            tls: Encryption::Off,
            structured_replies: true,
            extended_headers: true,
            allocation: true,
        }
    }
}

/// An open export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The server's name for it, where it tells.
    pub name: String,
    /// For a person to read; often empty.
    pub description: String,
    /// What requests are held to. Its maximum payload is at most [`REQUEST_BYTES_MAX`], whatever the
    /// server allows.
    pub rules: Rules,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

/// One export of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedExport {
    /// Its name.
    pub name: String,
    /// For a person to read; often empty.
    pub description: String,
    /// What the server says about it, unless it refuses to (an old server, or TLS missing).
    pub session: Option<Session>,
}

/// What the driver does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientStep {
    /// Send the output, then receive more.
    NeedMore,
    /// Do the TLS handshake (the bytes left over belong to it), then call
    /// [`ClientHandshake::tls_established`]. If TLS fails, close.
    StartTls,
    /// The export is open; the bytes left over are replies.
    Transmission(Box<Session>),
    /// Send the output, then close.
    Listed(Vec<ListedExport>),
}

/// Why there will be no session. Send the output (the client's leave), then close.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientHandshakeError {
    /// Something else listens there.
    #[error("the server does not speak NBD")]
    NotNbd,
    /// A server older than 2011.
    #[error("the server speaks oldstyle NBD only, which is not supported")]
    Oldstyle,
    /// The server cannot list, or not encrypt, before an export is chosen.
    #[error("the server does not speak fixed newstyle NBD, which TLS and lists need")]
    NotFixedNewstyle,
    /// The export's name is longer than the protocol allows.
    #[error("the export name is longer than {NAME_BYTES_MAX} bytes")]
    NameTooLong,
    /// The server insists on TLS; try with it.
    #[error("the server needs TLS for this; use nbds://")]
    TlsRequired,
    /// The server has no TLS and we insist on it.
    #[error("the server does not offer TLS ({0}); nothing was sent unencrypted")]
    TlsRefused(String),
    /// No such export.
    #[error("the server has no such export: {0}")]
    UnknownExport(String),
    /// The server is going away; try later.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server says no.
    #[error("the server refuses option {option} with {kind:#x}: {message}")]
    Refused {
        /// `NBD_OPT_*`
        option: u32,
        /// `NBD_REP_ERR_*`
        kind: u32,
        /// Its words.
        message: String,
    },
    /// The server breaks the protocol.
    #[error("the server broke the protocol: {0}")]
    Misbehaved(&'static str),
    /// The driver called after the end, or during the TLS handshake.
    #[error("bytes were handed over after the handshake had ended")]
    Ended,
}

use ClientHandshakeError as Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    ReplyHeader,
    ReplyBody { kind: u32, length: usize },
    ExportName { length: usize },
    Tls,
    Ended,
}

/// What the server has told about an export so far.
#[derive(Debug, Clone, Default)]
struct Told {
    name: Option<String>,
    description: String,
    size: Option<(u64, TransmissionFlags)>,
    block: Option<BlockSizes>,
}

/// The machine of one connection.
#[derive(Debug)]
pub struct ClientHandshake {
    config: ClientConfig,
    phase: Phase,
    partial: Vec<u8>,
    /// The option that waits for its last reply, and how many replies it had.
    option: u32,
    replies: u32,
    fixed_newstyle: bool,
    no_zeroes: bool,
    tls: bool,
    headers: Headers,
    allocation_context: Option<u32>,
    told: Told,
    listed: Vec<ListedExport>,
    /// How many of `listed` have been asked about.
    asked: usize,
}

impl ClientHandshake {
    /// A machine for a new connection. The server speaks first.
    pub fn new(config: ClientConfig) -> Result<ClientHandshake, ClientHandshakeError> {
        if config.export.len() > NAME_BYTES_MAX {
            return Err(Error::NameTooLong);
        }
        Ok(ClientHandshake {
            config,
            phase: Phase::Greeting,
            partial: Vec::new(),
            option: 0,
            replies: 0,
            fixed_newstyle: false,
            no_zeroes: false,
            tls: false,
            headers: Headers::Simple,
            allocation_context: None,
            told: Told::default(),
            listed: Vec::new(),
            asked: 0,
        })
    }

    /// The TLS handshake that [`ClientStep::StartTls`] asked for has succeeded; the next option goes
    /// onto `out`.
    pub fn tls_established(&mut self, out: &mut Vec<u8>) {
        if self.phase == Phase::Tls {
            self.tls = true;
            self.after_tls(out);
        }
    }

    /// Bytes that the machine keeps; at most [`OPTION_REPLY_BYTES_MAX`].
    pub fn kept_bytes(&self) -> usize {
        self.partial.len()
    }

    /// Takes bytes that have come and appends options to `out`. Says how many it took and what to do
    /// next.
    pub fn receive(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(usize, ClientStep), ClientHandshakeError> {
        let mut taken = 0;
        loop {
            let length = match self.phase {
                Phase::Greeting => Greeting::BYTES,
                Phase::ReplyHeader => OptionReplyHeader::BYTES,
                Phase::ReplyBody { length, .. } | Phase::ExportName { length } => length,
                Phase::Tls | Phase::Ended => return Err(Error::Ended),
            };
            let here = (bytes.len() - taken).min(length - self.partial.len());
            self.partial.extend_from_slice(&bytes[taken..taken + here]);
            taken += here;
            if self.phase == Phase::Greeting && self.partial.len() >= 8 {
                // Do not wait for the rest from something that is not NBD.
                check_magic(&self.partial)?;
            }
            if self.partial.len() < length {
                return Ok((taken, ClientStep::NeedMore));
            }
            let message = std::mem::take(&mut self.partial);
            let step = self.message(&message, out).inspect_err(|error| {
                self.phase = Phase::Ended;
                if self.fixed_newstyle && !matches!(error, Error::Misbehaved(_)) {
                    send_option(out, OPT_ABORT, &[]);
                }
            })?;
            if let Some(step) = step {
                return Ok((taken, step));
            }
        }
    }

    fn message(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<Option<ClientStep>, Error> {
        match self.phase {
            Phase::Greeting => self.greeting(message, out).map(|()| None),
            Phase::ReplyHeader => self.reply_header(message).map(|()| None),
            Phase::ReplyBody { kind, .. } => {
                self.phase = Phase::ReplyHeader;
                self.replies += 1;
                if self.replies > REPLIES_PER_OPTION_MAX && self.option != OPT_LIST {
                    return Err(Error::Misbehaved("too many replies to one option"));
                }
                if kind & REP_ERROR_BIT != 0 {
                    self.denied(kind, message, out)
                } else if kind == REP_ACK {
                    self.acknowledged(out)
                } else {
                    self.told(kind, message).map(|()| None)
                }
            }
            Phase::ExportName { .. } => {
                let Ok((reply, _)) = ExportNameReply::ref_from_prefix(message) else {
                    return Err(Error::Ended);
                };
                self.told.size = Some((reply.size.get(), TransmissionFlags(reply.flags.get())));
                self.opened().map(Some)
            }
            Phase::Tls | Phase::Ended => Err(Error::Ended),
        }
    }

    fn greeting(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<(), Error> {
        let greeting = Greeting::ref_from_bytes(message).map_err(|_| Error::NotNbd)?;
        match greeting.option_magic.get() {
            OPTION_MAGIC => {}
            OLDSTYLE_MAGIC => return Err(Error::Oldstyle),
            _ => return Err(Error::NotNbd),
        }
        let flags = greeting.flags.get() & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        self.no_zeroes = flags & FLAG_NO_ZEROES != 0;
        let fixed = flags & FLAG_FIXED_NEWSTYLE != 0;
        let plain = self.config.tls != Encryption::Required && self.config.purpose == Purpose::Open;
        if !fixed && !plain {
            return Err(Error::NotFixedNewstyle);
        }
        self.fixed_newstyle = fixed;
        out.extend_from_slice(U32::new(u32::from(flags)).as_bytes());
        if !fixed {
            self.send_export_name(out);
        } else if self.config.tls == Encryption::Off {
            self.after_tls(out);
        } else {
            self.send(OPT_STARTTLS, &[], out);
        }
        Ok(())
    }

    fn after_tls(&mut self, out: &mut Vec<u8>) {
        if self.config.purpose == Purpose::List {
            self.send(OPT_LIST, &[], out);
        } else if self.config.extended_headers {
            self.send(OPT_EXTENDED_HEADERS, &[], out);
        } else {
            self.after_extended(out);
        }
    }

    fn after_extended(&mut self, out: &mut Vec<u8>) {
        if self.headers == Headers::Simple && self.config.structured_replies {
            self.send(OPT_STRUCTURED_REPLY, &[], out);
        } else {
            self.after_headers(out);
        }
    }

    fn after_headers(&mut self, out: &mut Vec<u8>) {
        if self.headers == Headers::Simple || !self.config.allocation {
            return self.send_info(OPT_GO, out);
        }
        let mut body = text(&self.config.export);
        body.extend_from_slice(U32::new(1).as_bytes());
        body.extend_from_slice(&text(BASE_ALLOCATION));
        self.send(OPT_SET_META_CONTEXT, &body, out);
    }

    fn send(&mut self, option: u32, body: &[u8], out: &mut Vec<u8>) {
        self.option = option;
        self.replies = 0;
        self.phase = Phase::ReplyHeader;
        send_option(out, option, body);
    }

    fn send_info(&mut self, option: u32, out: &mut Vec<u8>) {
        self.told = Told::default();
        let mut body = match self.listed.get(self.asked) {
            Some(export) if option == OPT_INFO => text(&export.name),
            _ => text(&self.config.export),
        };
        for number in [3, INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE] {
            body.extend_from_slice(U16::new(number).as_bytes());
        }
        self.send(option, &body, out);
    }

    fn send_export_name(&mut self, out: &mut Vec<u8>) {
        send_option(out, OPT_EXPORT_NAME, self.config.export.as_bytes());
        let zeroes = if self.no_zeroes { 0 } else { EXPORT_NAME_ZEROES_BYTES };
        self.phase = Phase::ExportName { length: ExportNameReply::BYTES + zeroes };
        self.told = Told::default();
    }

    fn reply_header(&mut self, message: &[u8]) -> Result<(), Error> {
        let header = OptionReplyHeader::ref_from_bytes(message).map_err(|_| Error::NotNbd)?;
        if header.magic.get() != OPTION_REPLY_MAGIC {
            return Err(Error::Misbehaved("wrong magic in an option reply"));
        }
        if header.option.get() != self.option {
            return Err(Error::Misbehaved("a reply to an option that was not sent"));
        }
        let (kind, length) = (header.kind.get(), header.length.get() as usize);
        if length > OPTION_REPLY_BYTES_MAX {
            return Err(Error::Misbehaved("an option reply is too long"));
        }
        self.phase = Phase::ReplyBody { kind, length };
        Ok(())
    }

    /// The last reply to the option was an error.
    fn denied(&mut self, kind: u32, message: &[u8], out: &mut Vec<u8>) -> Result<Option<ClientStep>, Error> {
        let message = || String::from_utf8_lossy(message).into_owned();
        if kind == REP_ERR_SHUTDOWN {
            return Err(Error::ShuttingDown);
        }
        match self.option {
            OPT_STARTTLS if self.config.tls == Encryption::Required => {
                let said = message();
                return Err(Error::TlsRefused(if said.is_empty() { "it gives no reason".to_owned() } else { said }));
            }
            OPT_STARTTLS => self.after_tls(out),
            OPT_INFO => return Ok(self.next_listed(out)),
            _ if kind == REP_ERR_TLS_REQD => return Err(Error::TlsRequired),
            OPT_EXTENDED_HEADERS => self.after_extended(out),
            OPT_STRUCTURED_REPLY => self.after_headers(out),
            OPT_SET_META_CONTEXT => {
                self.allocation_context = None;
                self.send_info(OPT_GO, out);
            }
            OPT_GO if kind == REP_ERR_UNSUP && self.headers != Headers::Extended => {
                self.send_export_name(out);
            }
            OPT_GO if kind == REP_ERR_UNKNOWN => return Err(Error::UnknownExport(message())),
            option => return Err(Error::Refused { option, kind, message: message() }),
        }
        Ok(None)
    }

    /// The last reply to the option was `NBD_REP_ACK`.
    fn acknowledged(&mut self, out: &mut Vec<u8>) -> Result<Option<ClientStep>, Error> {
        match self.option {
            OPT_STARTTLS => {
                self.phase = Phase::Tls;
                return Ok(Some(ClientStep::StartTls));
            }
            OPT_EXTENDED_HEADERS => {
                self.headers = Headers::Extended;
                self.after_extended(out);
            }
            OPT_STRUCTURED_REPLY => {
                self.headers = Headers::Structured;
                self.after_headers(out);
            }
            OPT_SET_META_CONTEXT => self.send_info(OPT_GO, out),
            OPT_GO => return self.opened().map(Some),
            OPT_LIST if self.listed.is_empty() => return Ok(Some(self.leave(out))),
            OPT_LIST => self.send_info(OPT_INFO, out),
            OPT_INFO => {
                self.listed[self.asked].session = Some(self.session()?);
                return Ok(self.next_listed(out));
            }
            _ => return Err(Error::Misbehaved("an unexpected acknowledgement")),
        }
        Ok(None)
    }

    /// A reply that is not the last one.
    fn told(&mut self, kind: u32, message: &[u8]) -> Result<(), Error> {
        match (kind, self.option) {
            (REP_SERVER, OPT_LIST) => self.told_server(message),
            (REP_INFO, OPT_GO | OPT_INFO) => self.told_info(message),
            (REP_META_CONTEXT, OPT_SET_META_CONTEXT) => {
                let (id, name) = U32::read_from_prefix(message)
                    .map_err(|_| Error::Misbehaved("a metadata context without an id"))?;
                if name == BASE_ALLOCATION.as_bytes() {
                    self.allocation_context = Some(id.get());
                }
                Ok(())
            }
            _ => Err(Error::Misbehaved("a reply of a type that does not fit the option")),
        }
    }

    fn told_server(&mut self, message: &[u8]) -> Result<(), Error> {
        const BAD: Error = Error::Misbehaved("a malformed entry in the list of exports");
        if self.listed.len() == LISTED_EXPORTS_MAX {
            return Err(Error::Misbehaved("more exports than can be listed"));
        }
        let (length, rest) = U32::read_from_prefix(message).map_err(|_| BAD)?;
        let (name, description) = rest.split_at_checked(length.get() as usize).ok_or(BAD)?;
        if name.len() > NAME_BYTES_MAX {
            return Err(BAD);
        }
        let name = str::from_utf8(name).map_err(|_| BAD)?.to_owned();
        let description = String::from_utf8_lossy(description).into_owned();
        self.listed.push(ListedExport { name, description, session: None });
        Ok(())
    }

    fn told_info(&mut self, message: &[u8]) -> Result<(), Error> {
        const BAD: Error = Error::Misbehaved("a malformed information reply");
        let (kind, rest) = U16::read_from_prefix(message).map_err(|_| BAD)?;
        match kind.get() {
            INFO_EXPORT => {
                let info = InfoExport::ref_from_bytes(message).map_err(|_| BAD)?;
                self.told.size = Some((info.size.get(), TransmissionFlags(info.flags.get())));
            }
            INFO_NAME => self.told.name = Some(str::from_utf8(rest).map_err(|_| BAD)?.to_owned()),
            INFO_DESCRIPTION => self.told.description = String::from_utf8_lossy(rest).into_owned(),
            INFO_BLOCK_SIZE => {
                let info = InfoBlockSize::ref_from_bytes(message).map_err(|_| BAD)?;
                let (minimum, maximum) = (info.minimum.get(), info.maximum.get());
                if !minimum.is_power_of_two() || minimum > 65_536 || maximum < minimum {
                    return Err(Error::Misbehaved("impossible block sizes"));
                }
                let maximum = maximum.min(REQUEST_BYTES_MAX) & !(minimum - 1);
                let preferred = info.preferred.get().clamp(minimum, maximum);
                self.told.block = Some(BlockSizes { minimum, preferred, maximum });
            }
            _ => {}
        }
        Ok(())
    }

    fn session(&mut self) -> Result<Session, Error> {
        let told = std::mem::take(&mut self.told);
        let (size_bytes, flags) = told.size.ok_or(Error::Misbehaved("an export without its size"))?;
        let asked_for = match self.listed.get(self.asked) {
            Some(export) if self.option == OPT_INFO => &export.name,
            _ => &self.config.export,
        };
        Ok(Session {
            name: told.name.unwrap_or_else(|| asked_for.clone()),
            description: told.description,
            rules: Rules {
                headers: self.headers,
                size_bytes,
                block: told.block.unwrap_or_default(),
                flags,
                allocation_context: self.allocation_context,
            },
            tls: self.tls,
        })
    }

    fn opened(&mut self) -> Result<ClientStep, Error> {
        let session = self.session()?;
        self.phase = Phase::Ended;
        Ok(ClientStep::Transmission(Box::new(session)))
    }

    fn next_listed(&mut self, out: &mut Vec<u8>) -> Option<ClientStep> {
        self.asked += 1;
        if self.asked == self.listed.len() {
            return Some(self.leave(out));
        }
        self.send_info(OPT_INFO, out);
        None
    }

    /// The list is complete: a soft disconnect, whose reply need not be waited for.
    fn leave(&mut self, out: &mut Vec<u8>) -> ClientStep {
        send_option(out, OPT_ABORT, &[]);
        self.phase = Phase::Ended;
        ClientStep::Listed(std::mem::take(&mut self.listed))
    }
}

fn check_magic(greeting: &[u8]) -> Result<(), Error> {
    match greeting.first_chunk::<8>() {
        Some(magic) if u64::from_be_bytes(*magic) == NBD_MAGIC => Ok(()),
        _ => Err(Error::NotNbd),
    }
}

fn text(text: &str) -> Vec<u8> {
    [U32::new(text.len() as u32).as_bytes(), text.as_bytes()].concat()
}

fn send_option(out: &mut Vec<u8>, option: u32, body: &[u8]) {
    let header = OptionHeader { magic: OPTION_MAGIC.into(), option: option.into(), length: (body.len() as u32).into() };
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(body);
}
