//! A volume of another node or an NBD server, over either protocol: for `copy`, `bench`, `ls` and `info`.
//!
//! Both clients accept the same requests; this module makes their answers and error messages the same too.

use std::rc::Rc;
use std::time::Duration;

use byway_fabric::tls::TlsClient;
use byway_frontend::nbd::client::{
    self as nbd, Client, ClientConfig, ClientError, ClientHandshakeError, ClientOptions, Completed, RequestError,
};
use byway_frontend::nbd::export::VOLATILE;
use byway_frontend::nbd::flags::TransmissionFlags;
use byway_reactor::{Completion, Frame, Instant, IoChoice, Reactor, Wait};
use byway_service::block::client::{
    self as native, Answer, ConnectError, Done, Notice, Request, Volume, VolumeError, VolumeOptions,
};
use byway_service::block::wire::CallError;

use crate::error::{RemoteError, native_failed, nbd_failed};
use crate::tls::ClientTlsArguments;
use crate::uri::RemoteUri;

/// How long a volume may take to open.
pub(crate) const OPEN_LIMIT: Duration = Duration::from_secs(15);

/// Memory of the loop that asks for the names of a server's volumes, and how many of them an error tells.
const LIST_FRAME_BYTES: usize = 8 << 20;
const NAMES_SHOWN_MAX: usize = 20;

/// How a volume is used.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions<'a> {
    /// The class of its tokens, 0x30 to 0x3f.
    pub class: u8,
    /// Streams for payloads, at least 1.
    pub connections: usize,
    /// Nothing will be written.
    pub read_only: bool,
    /// Certificates, for addresses that want TLS.
    pub tls: &'a ClientTlsArguments,
    /// Bytes of unflushed writes that a native volume keeps, to send them again to a server that was restarted.
    pub unflushed_bytes_max: usize,
}

/// What a server said of a volume, in the words of both wires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteInfo {
    /// Bytes.
    pub bytes: u64,
    /// What offsets and lengths must be multiples of.
    pub block_bytes: u32,
    /// The longest read or write of one request.
    pub request_bytes_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// All flags, as words.
    pub flags: Vec<&'static str>,
    /// For people; empty where the wire does not tell it at opening.
    pub description: String,
    /// Whether extents can be asked for.
    pub has_extents: bool,
    /// Names the server process, if the contents go with it and it tells.
    pub process: Option<u64>,
    /// Names what the bytes lie in, where the wire tells it.
    pub backing_id: Option<u64>,
}

impl RemoteInfo {
    /// What to add to the words that such a volume has something in it.
    pub fn contents_doubt(&self) -> &'static str {
        if self.has_extents { "" } else { ", or its server does not tell" }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// A native volume.
    #[error(transparent)]
    Native(#[from] VolumeError),
    /// An NBD export.
    #[error(transparent)]
    Nbd(#[from] RequestError),
}

/// The end of a request.
#[derive(Debug)]
pub struct RemoteDone {
    /// As it was given.
    pub tag: u64,
    /// What came of it.
    pub result: Result<Answer, TransferError>,
    /// A read's memory, if it is still there.
    pub buffer: Option<Frame>,
}

/// A volume. Driven like the clients under it: submit, flush, reap the loop, handle, reap.
pub struct Remote {
    uri: RemoteUri,
    class: u8,
    tls: ClientTlsArguments,
    secure: Option<TlsClient>,
    wire: Wire,
    native_done: Vec<Done<Frame>>,
    nbd_done: Vec<Completed>,
}

enum Wire {
    Native(Box<Volume>),
    Nbd(Box<Client>),
}

impl Remote {
    /// Begins to connect; [`open`] waits until that is done.
    ///
    /// # Errors
    /// The name or the host.
    pub fn connect(reactor: &mut Reactor, uri: &RemoteUri, options: RemoteOptions<'_>) -> Result<Self, RemoteError> {
        let name = uri.volume().ok_or_else(|| RemoteError::NoVolume(uri.to_string()))?;
        let address = uri.resolve()?;
        let class = options.class;
        let secure = uri.wants_tls().then(|| options.tls.client(uri.host())).transpose()?;
        let wire = match uri {
            RemoteUri::Native(_) => {
                let mut own = VolumeOptions::new(class);
                let lanes = options.connections.clamp(1, usize::from(byway_fabric::limits::BULK_LANES_MAX));
                own.fabric.terms.bulk_lanes = lanes as u16;
                own.read_only = options.read_only;
                own.bounds.unflushed_bytes_max = options.unflushed_bytes_max;
                let mut volume = Volume::connect(reactor, address, name, own);
                if let Some(tls) = &secure {
                    volume.set_tls(tls.clone());
                }
                Wire::Native(Box::new(volume))
            }
            RemoteUri::Nbd(_) => {
                let config = ClientConfig { export: name.to_owned(), ..ClientConfig::default() };
                let own = ClientOptions { class, connections: options.connections, tls: secure.clone() };
                Wire::Nbd(Box::new(Client::connect(reactor, address, config, own)))
            }
        };
        let (uri, tls) = (uri.clone(), options.tls.clone());
        Ok(Self { uri, class, tls, secure, wire, native_done: Vec::new(), nbd_done: Vec::new() })
    }

    /// Its name.
    pub fn uri(&self) -> &RemoteUri {
        &self.uri
    }

    /// The class of its tokens.
    pub fn class(&self) -> u8 {
        self.class
    }

    /// What the server said of it, once it was opened.
    pub fn info(&self) -> Option<RemoteInfo> {
        match &self.wire {
            Wire::Native(volume) => volume.info().map(|info| {
                let volatile = info.volatile.then_some("volatile");
                RemoteInfo {
                    bytes: info.len,
                    block_bytes: info.block_bytes,
                    request_bytes_max: info.request_max,
                    read_only: info.read_only,
                    flags: nbd_flags(native_flags(info.read_only)).into_iter().chain(volatile).collect(),
                    description: String::new(),
                    has_extents: true,
                    process: info.volatile.then_some(info.instance),
                    backing_id: Some(info.backing_id).filter(|backing_id| *backing_id != 0),
                }
            }),
            Wire::Nbd(client) => client.session().map(|session| {
                let rules = &session.rules;
                let (volatile, description) = nbd_description(&session.description);
                RemoteInfo {
                    bytes: rules.size_bytes,
                    block_bytes: rules.block.minimum,
                    request_bytes_max: rules.block.maximum,
                    read_only: rules.flags.has(TransmissionFlags::READ_ONLY),
                    flags: nbd_flags(rules.flags).into_iter().chain(volatile.then_some("volatile")).collect(),
                    description: description.to_owned(),
                    has_extents: rules.allocation_context.is_some(),
                    process: None,
                    backing_id: None,
                }
            }),
        }
    }

    /// A frame of memory that its server has mapped too, if there is any: requests with it cost a copy less.
    pub fn shared_frame(&self, len: usize) -> Option<Frame> {
        match &self.wire {
            Wire::Native(volume) => volume.shared_frame(len),
            Wire::Nbd(_) => None,
        }
    }

    /// Takes a request; its answer comes from [`Remote::reap`] with that tag.
    ///
    /// # Errors
    /// The request, when too many are waiting: take answers first.
    pub fn submit(&mut self, request: Request<Frame, Rc<Frame>>, tag: u64) -> Result<(), Request<Frame, Rc<Frame>>> {
        match &mut self.wire {
            Wire::Native(volume) => volume.submit(request, tag),
            Wire::Nbd(client) => client.submit(request, tag),
        }
    }

    /// Takes a completion of its class.
    pub fn handle(&mut self, reactor: &mut Reactor, completion: Completion) {
        match &mut self.wire {
            Wire::Native(volume) => volume.handle(reactor, completion),
            Wire::Nbd(client) => client.handle(reactor, completion),
        }
    }

    /// Sends what can be sent. Take answers before you wait.
    pub fn flush(&mut self, reactor: &mut Reactor) {
        match &mut self.wire {
            Wire::Native(volume) => volume.flush(reactor),
            Wire::Nbd(client) => client.flush(reactor),
        }
    }

    /// Appends the answers that have come.
    pub fn reap(&mut self, into: &mut Vec<RemoteDone>) {
        match &mut self.wire {
            Wire::Native(volume) => {
                volume.reap(&mut self.native_done);
                into.extend(self.native_done.drain(..).map(|Done { tag, result, buffer }| RemoteDone {
                    tag,
                    result: result.map_err(TransferError::from),
                    buffer,
                }));
            }
            Wire::Nbd(client) => {
                client.reap(&mut self.nbd_done);
                into.extend(self.nbd_done.drain(..).map(|Completed { tag, result, buffer }| RemoteDone {
                    tag,
                    result: result.map_err(TransferError::from),
                    buffer,
                }));
            }
        }
    }

    /// Whether sending has brought answers: of requests that the export does not accept. A native volume leaves that to
    /// its server.
    fn answered_by_itself(&self) -> bool {
        match &self.wire {
            Wire::Native(_) => false,
            Wire::Nbd(client) => client.has_answers(),
        }
    }

    /// When the requests of a server that cannot be reached fail; `None` while there is a session, and of NBD, whose requests
    /// fail with their connection.
    pub fn lost_at(&self) -> Option<Instant> {
        match &self.wire {
            Wire::Native(volume) => volume.lost_at(),
            Wire::Nbd(_) => None,
        }
    }

    /// Requests whose answers have not been taken.
    pub fn pending(&self) -> usize {
        match &self.wire {
            Wire::Native(volume) => volume.pending(),
            Wire::Nbd(client) => client.pending(),
        }
    }

    /// Whether it is open; the first failure is the answer.
    fn is_open(&mut self) -> Result<bool, RemoteError> {
        match &mut self.wire {
            Wire::Native(volume) => {
                let mut notices = Vec::new();
                volume.take_notices(&mut notices);
                let failure = notices.into_iter().find_map(|notice| match notice {
                    Notice::Disconnected(reason) => Some(ConnectError::Session(reason)),
                    Notice::Refused(error) => Some(ConnectError::Open(error)),
                    _ => None,
                });
                match failure.or(volume.failed().map(ConnectError::from)) {
                    Some(source) if volume.info().is_none() => Err(self.explain_native(source)),
                    _ => Ok(volume.info().is_some()),
                }
            }
            Wire::Nbd(client) => match client.failed() {
                Some(source) => {
                    let source = source.clone();
                    Err(self.explain_nbd(source))
                }
                None => Ok(client.session().is_some()),
            },
        }
    }

    fn explain_native(&self, source: ConnectError) -> RemoteError {
        match source {
            ConnectError::Open(CallError::NotFound) => self.no_such_volume(),
            source => native_failed(&self.uri, &self.tls, self.secure.as_ref(), source),
        }
    }

    fn explain_nbd(&self, source: ClientError) -> RemoteError {
        match source {
            ClientError::Handshake(ClientHandshakeError::UnknownExport(_)) => self.no_such_volume(),
            source => nbd_failed(&self.uri, &self.tls, self.secure.as_ref(), source),
        }
    }

    /// With the names that the server shows this client.
    fn no_such_volume(&self) -> RemoteError {
        let names = Reactor::open(IoChoice::Auto, LIST_FRAME_BYTES).ok().and_then(|reactor| self.names(reactor).ok());
        let others = match names.as_deref() {
            None => "see byway ls".to_owned(),
            Some([]) => "the server shows this client none".to_owned(),
            Some(names) if names.len() > NAMES_SHOWN_MAX => {
                format!("the server has {}, and more (byway ls)", names[..NAMES_SHOWN_MAX].join(", "))
            }
            Some(names) => format!("the server has {}", names.join(", ")),
        };
        RemoteError::NoSuchVolume { uri: self.uri.to_string(), others }
    }

    fn names(&self, reactor: Reactor) -> Result<Vec<String>, RemoteError> {
        let (address, tls) = (self.uri.resolve()?, self.secure.clone());
        Ok(match &self.uri {
            RemoteUri::Native(_) => {
                let listed = native::list(reactor, address, byway_fabric::Options::new(self.class), tls);
                let listed = listed.map_err(|source| self.explain_native(source))?;
                listed.into_iter().map(|volume| volume.name).collect()
            }
            RemoteUri::Nbd(_) => {
                let listed = nbd::list(reactor, address, self.class, tls).map_err(|source| self.explain_nbd(source))?;
                listed.into_iter().map(|export| export.name).filter(|name| !name.is_empty()).collect()
            }
        })
    }

    /// Leaves, as the protocol asks. What is in flight fails.
    fn leave(&mut self, reactor: &mut Reactor) {
        match &mut self.wire {
            Wire::Native(volume) => volume.close(reactor),
            Wire::Nbd(client) => client.close(reactor),
        }
    }

    fn is_closed(&self) -> bool {
        match &self.wire {
            Wire::Native(volume) => volume.is_closed(),
            Wire::Nbd(client) => client.is_closed(),
        }
    }
}

/// Sends, waits and hands out completions, once, to all volumes of a loop. Answers that are here end the wait at once.
///
/// # Errors
/// [`RemoteError::Loop`].
pub fn turn(reactor: &mut Reactor, remotes: &mut [&mut Remote], wait: Wait) -> Result<(), RemoteError> {
    let mut completions = Vec::new();
    for remote in remotes.iter_mut() {
        remote.flush(reactor);
    }
    let wait = if remotes.iter().any(|remote| remote.answered_by_itself()) { Wait::Poll } else { wait };
    reactor.reap(&mut completions, wait).map_err(RemoteError::Loop)?;
    for completion in completions {
        if let Some(remote) = remotes.iter_mut().find(|remote| remote.class == completion.token.class()) {
            remote.handle(reactor, completion);
        }
    }
    for remote in remotes.iter_mut() {
        remote.flush(reactor);
    }
    Ok(())
}

/// Waits until all are open.
///
/// # Errors
/// The first that is not, and why.
pub fn open(reactor: &mut Reactor, remotes: &mut [&mut Remote]) -> Result<(), RemoteError> {
    let opened = wait_until_open(reactor, remotes);
    if opened.is_err() {
        break_off(reactor, remotes);
    }
    opened
}

/// Leaves NBD servers, as the protocol asks, after a failure. A native server needs no farewell.
pub fn break_off(reactor: &mut Reactor, remotes: &mut [&mut Remote]) {
    let nbd = remotes.iter_mut().filter(|remote| matches!(remote.wire, Wire::Nbd(_)));
    close(reactor, &mut nbd.map(|remote| &mut **remote).collect::<Vec<_>>());
}

/// Leaves after a use that ended so: [`close`], or [`break_off`] after a failure.
pub fn leave_after<T, E>(reactor: &mut Reactor, remotes: &mut [&mut Remote], ended: &Result<T, E>) {
    match ended {
        Ok(_) => close(reactor, remotes),
        Err(_) => break_off(reactor, remotes),
    }
}

fn wait_until_open(reactor: &mut Reactor, remotes: &mut [&mut Remote]) -> Result<(), RemoteError> {
    let limit = reactor.now() + OPEN_LIMIT;
    loop {
        let mut all = true;
        for remote in remotes.iter_mut() {
            if !remote.is_open()? {
                all = false;
                if reactor.now() >= limit {
                    return Err(RemoteError::Silent(remote.uri.to_string()));
                }
            }
        }
        if all {
            return Ok(());
        }
        turn(reactor, remotes, Wait::Until(limit))?;
    }
}

/// Asks the first of `remotes` and waits for the answer. Nothing else may be in flight on it.
///
/// # Errors
/// The request's.
pub fn ask(
    reactor: &mut Reactor,
    remotes: &mut [&mut Remote],
    request: Request<Frame, Rc<Frame>>,
) -> Result<Answer, RemoteError> {
    let busy = || RemoteError::Loop(std::io::ErrorKind::ResourceBusy.into());
    let mut done = Vec::new();
    let [asked, ..] = remotes else { return Err(busy()) };
    asked.submit(request, 0).map_err(|_| busy())?;
    loop {
        if let [asked, ..] = remotes {
            asked.flush(reactor);
            asked.reap(&mut done);
            if let Some(RemoteDone { result, .. }) = done.pop() {
                return result.map_err(|source| RemoteError::Request { uri: asked.uri.to_string(), source });
            }
        }
        turn(reactor, remotes, Wait::Block)?;
    }
}

/// Whether the first of `remotes` reads as zeroes from end to end, as far as its server tells.
///
/// # Errors
/// The request's.
pub fn is_blank(reactor: &mut Reactor, remotes: &mut [&mut Remote], info: &RemoteInfo) -> Result<bool, RemoteError> {
    if !info.has_extents {
        return Ok(false);
    }
    let mut offset = 0;
    while offset < info.bytes {
        let request = Request::Extents { offset, len: info.bytes - offset };
        let Answer::Extents(extents) = ask(reactor, remotes, request)? else { return Ok(false) };
        let len: u64 = extents.iter().map(|extent| extent.len).sum();
        if len == 0 || !extents.iter().all(|extent| extent.hole) {
            return Ok(false);
        }
        offset += len;
    }
    Ok(true)
}

/// Leaves, and waits a moment for the last bytes to go out.
pub fn close(reactor: &mut Reactor, remotes: &mut [&mut Remote]) {
    for remote in remotes.iter_mut() {
        remote.leave(reactor);
    }
    let limit = reactor.now() + Duration::from_secs(2);
    while !remotes.iter().all(|remote| remote.is_closed()) && reactor.now() < limit {
        if turn(reactor, remotes, Wait::Until(limit)).is_err() {
            return;
        }
    }
}

/// Whether a description says that the volume is volatile, and the rest of it.
pub fn nbd_description(told: &str) -> (bool, &str) {
    told.strip_prefix(VOLATILE).map_or((false, told), |rest| (true, rest.trim_start()))
}

/// What every volume can do over byway's own protocol, in NBD's words.
fn native_flags(read_only: bool) -> TransmissionFlags {
    let always = TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::SEND_CACHE
        | TransmissionFlags::CAN_MULTI_CONN;
    always
        | if read_only {
            TransmissionFlags::READ_ONLY
        } else {
            TransmissionFlags::SEND_TRIM | TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO
        }
}

/// An export's flags as words, in the order of their bits.
fn nbd_flags(flags: TransmissionFlags) -> Vec<&'static str> {
    let words = [
        (TransmissionFlags::READ_ONLY, "read-only"),
        (TransmissionFlags::SEND_FLUSH, "flush"),
        (TransmissionFlags::SEND_FUA, "fua"),
        (TransmissionFlags::ROTATIONAL, "rotational"),
        (TransmissionFlags::SEND_TRIM, "trim"),
        (TransmissionFlags::SEND_WRITE_ZEROES, "zeroes"),
        (TransmissionFlags::SEND_FAST_ZERO, "fast-zero"),
        (TransmissionFlags::SEND_CACHE, "cache"),
        (TransmissionFlags::CAN_MULTI_CONN, "multi-conn"),
    ];
    words.into_iter().filter_map(|(flag, word)| flags.has(flag).then_some(word)).collect()
}
