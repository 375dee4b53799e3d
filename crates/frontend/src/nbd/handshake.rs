//! The server's side of the handshake: from the greeting to the choice of an export.
//!
//! The machine takes all received bytes, keeps at most one option of [`OPTION_BYTES_MAX`], and appends its replies to a
//! buffer. `options.rs` has the meaning of each option. This module does the framing: where an option starts and ends, which
//! bytes are skipped, and when the phase is over.
//!
//! ```text
//! client flags -> [option header -> body | skipped body]* -> transmission | TLS | closed
//!                        ^                                        |
//!                        +------------ tls_established -----------+
//! ```

use zerocopy::{FromBytes, IntoBytes};

use super::export::{Export, Exports};
use super::options::{Outcome, option_too_long, run_option};
use super::request::{Headers, Rules};
use super::wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Greeting, NBD_MAGIC, OPT_EXPORT_NAME, OPTION_MAGIC, OptionHeader,
};
use crate::limits::{
    CROWDED_OUTPUT_BYTES_MAX, HANDSHAKE_OUTPUT_BYTES_MAX, NAME_BYTES_MAX, OPTION_BYTES_MAX, OPTIONS_MAX,
};

/// Whether connections are encrypted (proto.md, "TLS support").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// NOTLS: not offered.
    #[default]
    Off,
    /// SELECTIVETLS: offered, and needed by the exports that say so.
    Optional,
    /// FORCEDTLS: nothing is served without.
    Required,
}

/// How a listener negotiates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Encryption.
    pub tls: TlsMode,
    /// Whether structured replies are offered.
    pub structured_replies: bool,
    /// Whether extended headers are offered.
    pub extended_headers: bool,
}

impl Default for HandshakeConfig {
    fn default() -> Self {
        HandshakeConfig { tls: TlsMode::Off, structured_replies: true, extended_headers: true }
    }
}

/// What the handshake ended with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// The export as it was told to the client.
    pub export: Export,
    /// What the connection's requests are held to.
    pub rules: Rules,
    /// Whether the connection is encrypted.
    pub tls: bool,
}

/// What the driver does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// All bytes are taken: send the output, then receive more.
    NeedMore,
    /// There is much to send: send the output, then call again with the bytes left over.
    Flush,
    /// Send the output, then do the TLS handshake, then call [`Handshake::tls_established`]. If TLS
    /// fails, close. Bytes left over came before the client could know the answer: discard
    /// them, because TLS does not protect them.
    StartTls,
    /// Send the output; the bytes left over are requests.
    Transmission(Box<Negotiated>),
    /// The client has taken its leave: send the output, then close.
    Closed,
}

/// Why a connection must end before it began: send what answers earlier options, then close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client's flags hold one that the server did not offer.
    #[error("client sent unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not start as it must.
    #[error("client sent option magic {0:#018x}; it does not speak NBD")]
    Magic(u64),
    /// The client never ends.
    #[error("client sent more than {OPTIONS_MAX} options")]
    TooManyOptions,
    /// An option of fixed newstyle from a client that did not announce it.
    #[error("client sent option {0} without announcing fixed newstyle")]
    NotFixedNewstyle(u32),
    /// EXPORT_NAME of something that cannot be served; the option has no error reply.
    #[error("client chose by EXPORT_NAME: {0}")]
    ExportName(Refusal),
    /// The driver called after the end, or during the TLS handshake.
    #[error("bytes were handed over after the handshake had ended")]
    Ended,
}

/// Why an export is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is none of that name.
    #[error("there is no such export")]
    Unknown,
    /// The export needs TLS and the connection has none.
    #[error("the export is served over TLS only")]
    TlsRequired,
    /// The export needs TLS and the server does not offer it.
    #[error("the export is served over TLS only, which this server does not offer")]
    TlsOff,
    /// The name is not a string of the protocol.
    #[error("the name is too long or not UTF-8")]
    Name,
    /// The server is draining.
    #[error("the server is shutting down")]
    Shutdown,
    /// EXPORT_NAME is forbidden after extended headers.
    #[error("EXPORT_NAME cannot be used with extended headers")]
    ExtendedHeaders,
}

/// What the client has negotiated so far; TLS starts it anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Negotiation {
    pub(super) headers: Headers,
    /// The canonical name of the export for which `base:allocation` was selected.
    pub(super) allocation_for: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    ClientFlags,
    OptionHeader,
    OptionBody { option: u32, length: usize },
    SkipBody { option: u32, remaining: u32 },
    StartTls,
    Ended,
}

/// The machine of one connection.
#[derive(Debug)]
pub struct Handshake {
    pub(super) config: HandshakeConfig,
    phase: Phase,
    /// The part of the current message that has come, while it is not whole.
    partial: Vec<u8>,
    options: u32,
    pub(super) negotiation: Negotiation,
    pub(super) fixed_newstyle: bool,
    pub(super) no_zeroes: bool,
    pub(super) tls: bool,
    /// Something was refused for want of TLS.
    pub(super) refused_plain: bool,
    pub(super) shutting_down: bool,
    /// Replies to many clients wait.
    pub(super) crowded: bool,
}

impl Handshake {
    /// A machine for a new connection; its greeting goes onto `out`.
    pub fn new(config: HandshakeConfig, out: &mut Vec<u8>) -> Handshake {
        let greeting = Greeting {
            magic: NBD_MAGIC.into(),
            option_magic: OPTION_MAGIC.into(),
            flags: (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).into(),
        };
        out.extend_from_slice(greeting.as_bytes());
        Handshake {
            config,
            phase: Phase::ClientFlags,
            partial: Vec::new(),
            options: 0,
            negotiation: Negotiation::default(),
            fixed_newstyle: false,
            no_zeroes: false,
            tls: false,
            refused_plain: false,
            shutting_down: false,
            crowded: false,
        }
    }

    /// The TLS handshake that [`Step::StartTls`] asked for has succeeded: everything from here on is
    /// encrypted, and nothing that was negotiated before it counts (proto.md, `NBD_OPT_STARTTLS`).
    pub fn tls_established(&mut self) {
        if self.phase == Phase::StartTls {
            self.phase = Phase::OptionHeader;
            self.negotiation = Negotiation::default();
            self.tls = true;
            self.refused_plain = false;
        }
    }

    /// Whether something was refused because the connection is not encrypted, and it still is not.
    pub fn refused_plain(&self) -> bool {
        self.refused_plain
    }

    /// From now on every option but ABORT is answered with `NBD_REP_ERR_SHUTDOWN`.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// Says whether the replies that wait for all clients are so many that long ones are refused and others go out before more is
    /// read ([`GREETINGS_HEAP_BYTES_MAX`](crate::limits::GREETINGS_HEAP_BYTES_MAX)).
    pub fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    /// Bytes that the machine keeps; at most [`OPTION_BYTES_MAX`].
    pub fn kept_bytes(&self) -> usize {
        self.partial.len()
    }

    /// Takes bytes that have come and appends replies to `out`. Says how many bytes it took and what
    /// to do next; an error means to send the output and close.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, Step), HandshakeError> {
        let mut taken = 0;
        let output_max = if self.crowded { CROWDED_OUTPUT_BYTES_MAX } else { HANDSHAKE_OUTPUT_BYTES_MAX };
        loop {
            if out.len() >= output_max {
                return Ok((taken, Step::Flush));
            }
            let step = match self.phase {
                Phase::ClientFlags => {
                    let Some(flags) = self.gather(bytes, &mut taken, 4) else {
                        return Ok((taken, Step::NeedMore));
                    };
                    let flags = u32::read_from_bytes(&flags).map_or(0, u32::from_be);
                    self.client_flags(flags)?;
                    None
                }
                Phase::OptionHeader => {
                    let Some(header) = self.gather(bytes, &mut taken, OptionHeader::BYTES) else {
                        return Ok((taken, Step::NeedMore));
                    };
                    self.option_header(&header)?;
                    None
                }
                Phase::OptionBody { option, length } => {
                    let Some(body) = self.gather(bytes, &mut taken, length) else {
                        return Ok((taken, Step::NeedMore));
                    };
                    self.phase = Phase::OptionHeader;
                    let outcome = run_option(self, option, &body, exports, out);
                    self.after_option(outcome)?
                }
                Phase::SkipBody { option, remaining } => {
                    let here = (bytes.len() - taken).min(remaining as usize);
                    taken += here;
                    let remaining = remaining - here as u32;
                    if remaining > 0 {
                        self.phase = Phase::SkipBody { option, remaining };
                        return Ok((taken, Step::NeedMore));
                    }
                    self.phase = Phase::OptionHeader;
                    let outcome = Ok(option_too_long(self, option, out));
                    self.after_option(outcome)?
                }
                Phase::StartTls | Phase::Ended => return Err(HandshakeError::Ended),
            };
            if let Some(step) = step {
                return Ok((taken, step));
            }
        }
    }

    /// Collects a message of `length` bytes from what was kept and what is new.
    fn gather(&mut self, bytes: &[u8], taken: &mut usize, length: usize) -> Option<Vec<u8>> {
        let here = (bytes.len() - *taken).min(length - self.partial.len());
        self.partial.extend_from_slice(&bytes[*taken..*taken + here]);
        *taken += here;
        (self.partial.len() == length).then(|| std::mem::take(&mut self.partial))
    }

    fn client_flags(&mut self, flags: u32) -> Result<(), HandshakeError> {
        let fixed = u32::from(FLAG_FIXED_NEWSTYLE);
        let no_zeroes = u32::from(FLAG_NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(HandshakeError::ClientFlags(flags));
        }
        self.fixed_newstyle = flags & fixed != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        self.phase = Phase::OptionHeader;
        Ok(())
    }

    fn option_header(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let Ok(header) = OptionHeader::ref_from_bytes(bytes) else {
            return Ok(());
        };
        if header.magic.get() != OPTION_MAGIC {
            return Err(HandshakeError::Magic(header.magic.get()));
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(HandshakeError::TooManyOptions);
        }
        let (option, length) = (header.option.get(), header.length.get() as usize);
        if !self.fixed_newstyle && option != OPT_EXPORT_NAME {
            return Err(HandshakeError::NotFixedNewstyle(option));
        }
        if option == OPT_EXPORT_NAME && length > NAME_BYTES_MAX {
            return Err(HandshakeError::ExportName(Refusal::Name));
        }
        self.phase = if length <= OPTION_BYTES_MAX {
            Phase::OptionBody { option, length }
        } else {
            Phase::SkipBody { option, remaining: header.length.get() }
        };
        Ok(())
    }

    fn after_option(&mut self, outcome: Result<Outcome, Refusal>) -> Result<Option<Step>, HandshakeError> {
        match outcome.map_err(HandshakeError::ExportName)? {
            Outcome::Answered => Ok(None),
            Outcome::StartTls => {
                self.phase = Phase::StartTls;
                Ok(Some(Step::StartTls))
            }
            Outcome::Aborted => {
                self.phase = Phase::Ended;
                Ok(Some(Step::Closed))
            }
            Outcome::Chosen(negotiated) => {
                self.phase = Phase::Ended;
                Ok(Some(Step::Transmission(negotiated)))
            }
        }
    }
}

#[cfg(test)]
mod tests;
