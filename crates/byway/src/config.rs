//! A node's configuration: `byway.toml` and the flags of `byway serve`, merged and checked.
//!
//! A flag overrides the file's key; lists (`volume`, `listen`, `nbd`, `allow`) of flags are added to the file's. A
//! reload reads the file again and merges the same flags.
//!
//! ```toml
//! listen = ["tcp://127.0.0.1:4711"]
//! nbd = ["unix:///run/byway/nbd.sock"]
//! http = "127.0.0.1:4712"
//! control_socket = "/run/byway/ctl.sock"
//! buffer_memory = "64M"
//! mmap_limit = "4G"
//! stage = "memory"
//! shares = ["home=/srv/home,ro"]              # specifications, as after --share ...
//! volumes = ["scratch=/srv/scratch.img,ro"]   # specifications, as after --volume ...
//!
//! [volume.data]                               # ... or tables
//! store = "stripe:chunk=64K:/dev/nvme0n1:/dev/nvme1n1"
//! direct = true
//! access = ["store2", "10.0.0.0/8:ro"]
//!
//! [share.work]
//! directory = "/srv/work"
//! users = "squash:1000:100"
//!
//! [tls]
//! certificate = "/etc/byway/node.pem"
//! key = "/etc/byway/node.key"
//! client_ca = "/etc/byway/ca.pem"
//! crl = "/etc/byway/crl.pem"
//! clients = "required"
//! mode = "required"
//! ```

mod share;
mod tls;
mod volume;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use byway_reactor::{Address, IoChoice};
use byway_service::block::spec::{Stage, VolumeName, VolumeSpec};
use byway_service::file::ShareSpec;
use serde::Deserialize;

use crate::address::{AddressError, BYWAY_PORT, Cidr, Listen, NBD_PORT};
use crate::admission::{ClientAuthentication, Guarded, Origin, admissible};
use crate::cli::ServeArguments;
use crate::lend::LendSpec;
use crate::memory::memory_bytes;
use crate::{limits, spec, units};

use self::share::ShareForm;
pub use self::tls::{Tls, TlsMode};
use self::volume::VolumeForm;

/// A node's configuration, checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Configuration {
    /// The volumes; names differ.
    pub volumes: Vec<VolumeSpec>,
    /// The shares; their names differ, also from those of the volumes.
    pub shares: Vec<ShareSpec>,
    /// Listeners of byway's own protocol.
    pub listen: Vec<Listen>,
    /// Listeners of the NBD front end.
    pub nbd: Vec<Listen>,
    /// Where `/metrics`, `/healthz` and `/slow` are served; `None`: nowhere.
    pub http: Option<SocketAddr>,
    /// The control socket; `None`: none.
    pub control_socket: Option<PathBuf>,
    /// Which backend the loops use.
    pub io: IoChoice,
    /// Bytes of all frame pools together.
    pub frame_bytes: u64,
    /// Bytes of mapped files that may be resident; `None`: [`default_mapped_bytes`](crate::memory::default_mapped_bytes).
    pub mapped_bytes: Option<u64>,
    /// Where direct volumes are staged that do not say it themselves; `None`: in main memory.
    pub stage: Option<Stage>,
    /// Memory that is lent; `None`: none.
    pub lend: Option<LendSpec>,
    /// Event loops; `None`: one per core.
    pub threads: Option<u16>,
    /// TLS, for both front ends; `None`: none.
    pub tls: Option<Tls>,
    /// The addresses that may connect; empty: all that the listeners admit.
    pub allow: Vec<Cidr>,
    /// Wider listeners without certificates are accepted.
    pub insecure: bool,
    /// The user to become once everything is open.
    pub user: Option<String>,
    /// Operations slower than that are logged, in microseconds.
    pub slow_us: u64,
    /// The file that it came from, for reloads.
    pub file: Option<PathBuf>,
}

/// The file as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    #[serde(default)]
    listen: Vec<String>,
    #[serde(default)]
    nbd: Vec<String>,
    http: Option<String>,
    control_socket: Option<PathBuf>,
    io: Option<String>,
    buffer_memory: Option<String>,
    mmap_limit: Option<String>,
    stage: Option<String>,
    lend: Option<String>,
    threads: Option<u64>,
    #[serde(default)]
    volumes: Vec<String>,
    #[serde(default)]
    volume: BTreeMap<String, VolumeForm>,
    #[serde(default)]
    shares: Vec<String>,
    #[serde(default)]
    share: BTreeMap<String, ShareForm>,
    tls: Option<Tls>,
    #[serde(default)]
    allow: Vec<String>,
    #[serde(default)]
    insecure: bool,
    user: Option<String>,
    slow_us: Option<u64>,
}

/// What is wrong with a configuration: where it was said, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}; check the path after --config and its permissions", file.display())]
    Read {
        /// Which file.
        file: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is not the TOML that it should be. The text names line and key.
    #[error("{}: {message}", file.display())]
    Syntax {
        /// Which file.
        file: PathBuf,
        /// What toml says: line, key, reason.
        message: String,
    },
    /// A value that does not do.
    #[error("{at}: {message}")]
    Value {
        /// The flag, or the file and the key.
        at: String,
        /// What is wrong and what to write.
        message: String,
    },
}

const DEFAULT_FRAME_BYTES: u64 = 64 << 20;
const DEFAULT_SLOW_US: u64 = 100_000;

impl Configuration {
    /// Reads the file (if one is named) and merges the flags.
    ///
    /// # Errors
    /// Names the flag, or the file and the key.
    pub fn load(arguments: &ServeArguments) -> Result<Self, ConfigError> {
        Self::load_by(arguments, &|file| std::fs::File::open(file), memory_bytes())
    }

    /// As [`Configuration::load`], for a node that is confined: the file is opened by `open`, and `memory` is what
    /// [`memory_bytes`] gave before.
    ///
    /// # Errors
    /// Names the flag, or the file and the key.
    pub fn load_by(
        arguments: &ServeArguments,
        open: &dyn Fn(&Path) -> std::io::Result<std::fs::File>,
        memory: Option<u64>,
    ) -> Result<Self, ConfigError> {
        let (form, place) = match &arguments.config {
            Some(file) => (read_form(file, open)?, format!("{}: ", file.display())),
            None => (FileForm::default(), String::new()),
        };
        let mut merged = Self::from_form(&form, &place)?;
        merged.add_flags(arguments)?;
        merged.stage_volumes();
        merged.file.clone_from(&arguments.config);
        merged.check()?;
        merged.check_memory(memory)?;
        Ok(merged)
    }

    fn from_form(form: &FileForm, place: &str) -> Result<Self, ConfigError> {
        let at = |key: &str| format!("{place}{key}");
        let mut volumes = Vec::new();
        for (index, text) in form.volumes.iter().enumerate() {
            volumes.push(spec::parse(text).map_err(|error| value(at(&format!("volumes[{index}] `{text}`")), error))?);
        }
        for (name, table) in &form.volume {
            volumes.push(table.volume(name, place)?);
        }
        let listen = listeners(&form.listen, BYWAY_PORT, &at("listen"))?;
        let nbd = nbd_listeners(&form.nbd, &at("nbd"))?;
        let http = form
            .http
            .as_deref()
            .map(|text| byway_remote::http_address(text).map_err(|e| value(at("http"), e)))
            .transpose()?;
        let io = form
            .io
            .as_deref()
            .map_or(Ok(IoChoice::Auto), |text| byway_remote::parse_io(text).map_err(|e| value(at("io"), e)))?;
        let frame_bytes = match &form.buffer_memory {
            Some(text) => units::parse_size(text).map_err(|error| value(at("buffer_memory"), error))?,
            None => DEFAULT_FRAME_BYTES,
        };
        let mapped =
            form.mmap_limit.as_deref().map(|text| units::parse_size(text).map_err(|e| value(at("mmap_limit"), e)));
        let stage = form.stage.as_deref().map(|text| parse_stage(text).map_err(|error| value(at("stage"), error)));
        let lend = form.lend.as_deref().map(|text| text.parse().map_err(|error| value(at("lend"), error)));
        let threads = form
            .threads
            .map(|threads| u16::try_from(threads).map_err(|_| value(at("threads"), too_many_threads(threads))));
        let allow = form.allow.iter().map(|text| text.parse().map_err(|error| value(at("allow"), error)));
        Ok(Self {
            volumes,
            shares: share::shares(form, place)?,
            listen,
            nbd,
            http,
            control_socket: form.control_socket.clone(),
            io,
            frame_bytes,
            mapped_bytes: mapped.transpose()?,
            stage: stage.transpose()?,
            lend: lend.transpose()?,
            threads: threads.transpose()?,
            tls: form.tls.clone(),
            allow: allow.collect::<Result<_, _>>()?,
            insecure: form.insecure,
            user: form.user.clone(),
            slow_us: form.slow_us.unwrap_or(DEFAULT_SLOW_US),
            file: None,
        })
    }

    fn add_flags(&mut self, flags: &ServeArguments) -> Result<(), ConfigError> {
        for text in &flags.volume {
            self.volumes.push(spec::parse(text).map_err(|error| value(format!("--volume `{text}`"), error))?);
        }
        self.add_shares(&flags.share)?;
        self.listen.extend(listeners(&flags.listen, BYWAY_PORT, "--listen")?);
        self.nbd.extend(nbd_listeners(&flags.nbd, "--nbd")?);
        self.http = flags.http.or(self.http);
        self.control_socket = flags.control_socket.clone().or(self.control_socket.take());
        self.io = flags.io.unwrap_or(self.io);
        self.frame_bytes = flags.buffer_memory.unwrap_or(self.frame_bytes);
        self.mapped_bytes = flags.mmap_limit.or(self.mapped_bytes);
        self.stage = flags.stage.or(self.stage);
        self.lend = flags.lend.or(self.lend);
        self.threads = flags.threads.or(self.threads);
        self.slow_us = flags.slow_us.unwrap_or(self.slow_us);
        self.allow.extend(&flags.allow);
        self.insecure |= flags.insecure;
        self.user = flags.user.clone().or(self.user.take());
        if let (Some(certificate), Some(key)) = (&flags.tls_certificate, &flags.tls_key) {
            self.tls = Some(Tls {
                certificate: certificate.clone(),
                key: key.clone(),
                client_ca: flags.tls_client_ca.clone(),
                crl: flags.tls_crl.clone(),
                clients: flags.tls_clients,
                mode: flags.tls.unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// Stages the direct volumes that do not say it themselves as the node does.
    fn stage_volumes(&mut self) {
        for volume in self.volumes.iter_mut().filter(|volume| volume.direct) {
            volume.stage = volume.stage.or(self.stage);
        }
    }

    /// Event loops: as many as was said, or one per core, as far as there are frames for each.
    pub fn event_loops(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let enough = usize::try_from(self.frame_bytes / limits::FRAME_BYTES_MIN).unwrap_or(usize::MAX).max(1);
        self.threads.map_or(cores.min(enough), usize::from)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let mut names: BTreeSet<&VolumeName> = BTreeSet::new();
        if let Some(twice) = self.volumes.iter().map(|volume| &volume.name).find(|name| !names.insert(name)) {
            return Err(value(format!("volume `{twice}`"), "this name is given to two volumes; rename one"));
        }
        self.check_shares(names)?;
        self.check_files()?;
        let bounds = [
            ("volumes", self.volumes.len(), limits::VOLUMES_MAX),
            ("shares", self.shares.len(), limits::SHARES_MAX),
            ("listen", self.listen.len(), limits::LISTENERS_MAX),
            ("nbd", self.nbd.len(), limits::LISTENERS_MAX),
            ("allow", self.allow.len(), limits::ALLOW_MAX),
        ];
        if let Some((what, count, max)) = bounds.iter().find(|(_, count, max)| count > max) {
            return Err(value((*what).to_owned(), format!("{count} of them; at most {max}")));
        }
        if self.frame_bytes < limits::FRAME_BYTES_MIN {
            return Err(value("buffer_memory".to_owned(), "too few bytes for one busy connection; give at least 4M"));
        }
        if self.frame_bytes > limits::FRAME_BYTES_MAX {
            return Err(value("buffer_memory".to_owned(), "more memory than a pool can have; give at most 1T"));
        }
        if self.mapped_bytes.is_some_and(|bytes| bytes < limits::MAPPED_BYTES_MIN) {
            return Err(value(
                "mmap_limit".to_owned(),
                "too few bytes, the program's own code counts; give at least 16M",
            ));
        }
        if let Some(threads) = self.threads.filter(|&threads| threads == 0 || threads > limits::THREADS_MAX) {
            return Err(value("threads".to_owned(), too_many_threads(threads.into())));
        }
        if self.stage == Some(Stage::Device) && !self.volumes.iter().any(|volume| volume.direct) {
            let message = "no volume is direct, and others have no stage; add ,direct to a volume, or leave stage out";
            return Err(value("stage".to_owned(), message));
        }
        let threads = u64::from(self.threads.unwrap_or(1));
        if self.frame_bytes / threads < limits::FRAME_BYTES_MIN {
            let message = format!("too few bytes for {threads} event loops; give at least {}M", threads * 4);
            return Err(value("buffer_memory".to_owned(), message));
        }
        self.check_tls()
    }

    /// Refuses two volumes that would have to lock the same file.
    fn check_files(&self) -> Result<(), ConfigError> {
        let mut files: BTreeMap<&Path, &VolumeName> = BTreeMap::new();
        for volume in self.volumes.iter().filter(|volume| !volume.read_only && !volume.shared) {
            for path in volume.store.paths() {
                if let Some(first) = files.insert(path, &volume.name).filter(|first| **first != volume.name) {
                    let message = format!(
                        "volume `{first}` writes to {} as well; name another file, or add ,ro to one of them",
                        path.display()
                    );
                    return Err(value(format!("volume `{}`", volume.name), message));
                }
            }
        }
        Ok(())
    }

    /// Refuses a size above the machine's memory, in bytes; `None` if the system does not tell its memory.
    fn check_memory(&self, memory: Option<u64>) -> Result<(), ConfigError> {
        let Some(memory) = memory else { return Ok(()) };
        let too_much = |bytes, example| {
            let (asked, all) = (units::show_size(bytes), units::show_size(memory));
            format!(
                "{asked} is more than the memory of this machine, or of the node's cgroup: {all}; give less, for example {example}"
            )
        };
        if self.frame_bytes > memory {
            return Err(value("buffer_memory".to_owned(), too_much(self.frame_bytes, "64M")));
        }
        let large = |volume: &&VolumeSpec| volume.store.memory_bytes().is_some_and(|bytes| bytes > memory);
        match self.volumes.iter().find(large) {
            Some(volume) => {
                let bytes = volume.store.memory_bytes().unwrap_or(0);
                Err(value(format!("volume `{}`", volume.name), too_much(bytes, "mem:1G")))
            }
            None => Ok(()),
        }
    }

    fn check_tls(&self) -> Result<(), ConfigError> {
        let shown = self.tls.as_ref().map_or(ClientAuthentication::Off, Tls::authentication);
        if self.tls.as_ref().is_some_and(|tls| tls.crl.is_some()) && shown == ClientAuthentication::Off {
            let message =
                "clients show no certificates that could be revoked; give --tls-client-ca, or leave --tls-crl out";
            return Err(value("tls".to_owned(), message));
        }
        let named = |volume: &&VolumeSpec| volume.access.names_certificates();
        if let Some(volume) = self.volumes.iter().find(named).filter(|_| shown == ClientAuthentication::Off) {
            let message = "access names a certificate, but clients show none here; give --tls-client-ca";
            return Err(value(format!("volume `{}`", volume.name), message));
        }
        match &self.tls {
            Some(tls) if tls.authentication() >= ClientAuthentication::Optional && tls.client_ca.is_none() => Err(
                value("tls".to_owned(), "clients' certificates cannot be checked without a CA; give --tls-client-ca"),
            ),
            None => match self.volumes.iter().find(|volume| volume.tls_required) {
                Some(volume) => Err(value(
                    format!("volume `{}`", volume.name),
                    "tls=required, but the node has no certificate; give --tls-certificate and --tls-key",
                )),
                None => Ok(()),
            },
            Some(_) => Ok(()),
        }
    }

    /// What every client must show: nothing, where there are plain connections.
    pub fn authentication(&self) -> ClientAuthentication {
        let always = self.tls.as_ref().filter(|tls| tls.mode == TlsMode::Required);
        always.map_or(ClientAuthentication::Off, Tls::authentication)
    }

    /// Judges listeners by [`admissible`]: before they are opened, and, since `allow` may have changed, at each reload.
    ///
    /// # Errors
    /// The first that is refused, with what to change.
    pub fn admit(&self, listeners: &[Guarded]) -> Result<(), ConfigError> {
        for Guarded { origin, address } in listeners {
            let judged = admissible(address, self.authentication(), &self.allow, self.insecure);
            judged.map_err(|refusal| match origin {
                // A name is told beside what it resolves to; an address is in the refusal already.
                Origin::Configured(listener) if listener.to_string() == address.to_string() => {
                    value("a listener".to_owned(), refusal)
                }
                Origin::Configured(listener) => value(listener.to_string(), refusal),
                Origin::Inherited => value(
                    format!("the passed socket {address}"),
                    format!(
                        "{refusal}; or change ListenStream= of the systemd socket unit, for example to 127.0.0.1:10809"
                    ),
                ),
            })?;
        }
        Ok(())
    }

    /// Where HTTP may listen: it has no TLS, so only loopback, or `allow` together with `insecure`.
    ///
    /// # Errors
    /// The refusal.
    pub fn admitted_http(&self) -> Result<Option<SocketAddr>, ConfigError> {
        let Some(http) = self.http else {
            return Ok(None);
        };
        admissible(&Address::Tcp(http), ClientAuthentication::Off, &self.allow, self.insecure)
            .map_err(|refusal| value("http".to_owned(), refusal))?;
        Ok(Some(http))
    }
}

#[allow(clippy::needless_pass_by_value)]
fn value(at: String, message: impl ToString) -> ConfigError {
    ConfigError::Value { at, message: message.to_string() }
}

fn read_form(file: &Path, open: &dyn Fn(&Path) -> std::io::Result<std::fs::File>) -> Result<FileForm, ConfigError> {
    let fail = |source| ConfigError::Read { file: file.to_owned(), source };
    let mut text = String::new();
    let open = open(file).map_err(fail)?;
    open.take(limits::CONFIG_BYTES_MAX + 1).read_to_string(&mut text).map_err(fail)?;
    let syntax = |message: String| ConfigError::Syntax { file: file.to_owned(), message };
    if text.len() as u64 > limits::CONFIG_BYTES_MAX {
        return Err(syntax(format!("over {} bytes; that is no configuration", limits::CONFIG_BYTES_MAX)));
    }
    toml::from_str(&text)
        .map_err(|error| syntax(format!("{}{}", error.to_string().trim_end(), remedy(error.message()))))
}

fn too_many_threads(threads: u64) -> String {
    format!("{threads} event loops; give 1 to {}, or leave it out for one per core", limits::THREADS_MAX)
}

/// What to write in place of a value of another type.
fn remedy(message: &str) -> &'static str {
    let expected = message.rsplit_once("expected ").map_or("", |(_, expected)| expected);
    match expected {
        "a string" | "path string" => "; write a text between quotes, for example \"64M\"",
        "a sequence" => "; write a list, for example [\"tcp://127.0.0.1\"]",
        "a boolean" => "; write true or false, without quotes",
        "u64" => "; write a whole number of at least 0, without quotes",
        "a map" => "; write volumes = [\"NAME=STORE\"] for a list, or a table [volume.NAME] for each volume",
        _ if expected.starts_with("a map") || expected.starts_with("struct") => {
            "; write a table, for example [tls] with its keys below"
        }
        _ => "",
    }
}

/// The addresses of listeners, resolved now: at start, while the resolver's files can still be read.
///
/// # Errors
/// A name that does not resolve.
pub fn resolve(listeners: &[Listen]) -> Result<Vec<Guarded>, ConfigError> {
    let mut resolved = Vec::new();
    for listener in listeners {
        let addresses = listener.resolve().map_err(|error| value(listener.to_string(), error))?;
        let guarded = |address| Guarded { origin: Origin::Configured(listener.clone()), address };
        resolved.extend(addresses.into_iter().map(guarded));
    }
    Ok(resolved)
}

fn listeners(texts: &[String], port: u16, at: &str) -> Result<Vec<Listen>, ConfigError> {
    texts.iter().map(|text| Listen::parse(text, port).map_err(|error| value(at.to_owned(), error))).collect()
}

/// NBD's clients share no memory, and speak TCP.
fn nbd_listeners(texts: &[String], at: &str) -> Result<Vec<Listen>, ConfigError> {
    let read = |text: &String| match Listen::parse(text, NBD_PORT) {
        Err(AddressError::Scheme(text)) => Err(value(at.to_owned(), AddressError::NbdScheme(text))),
        other => other.map_err(|error| value(at.to_owned(), error)),
    };
    let listeners: Vec<_> = texts.iter().map(read).collect::<Result<_, _>>()?;
    match listeners.iter().find(|listen| matches!(listen, Listen::Shared(_) | Listen::Rdma { .. })) {
        None => Ok(listeners),
        Some(listen) => {
            Err(value(at.to_owned(), format!("NBD does not go over {listen}; write tcp://HOST:PORT or unix:///PATH")))
        }
    }
}

/// Reads `--stage`.
///
/// # Errors
/// In words.
pub fn parse_stage(text: &str) -> Result<Stage, String> {
    match text {
        "memory" => Ok(Stage::Memory),
        "device" => Ok(Stage::Device),
        _ => Err(format!("`{text}` is not one of memory, device")),
    }
}

#[cfg(test)]
mod tests;
