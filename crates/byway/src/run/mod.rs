//! `byway run`: runs a program whose calls on paths below a prefix go to a share, without a mount.
//!
//! The library `libbyway_run.so` (`crates/run`) is loaded into the program and does the work; this finds out beforehand what would fail.

mod report;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};
use std::str::FromStr;

use byway_reactor::Address;
use byway_service::file::client::Client;
use clap::Args;

use self::report::Report;
use crate::executable::{self, ExecutableError};
use crate::limits::RUN_MAPS_MAX;
use crate::remote::{RemoteUri, RemoteUriError};
use crate::share_uri::{ShareUriError, client_options, share_of};
use crate::tls::ClientTlsArguments;

/// The library's file, beside this program or where the installation has it.
const LIBRARY: &str = "libbyway_run.so";

/// What the library reads: a line for each map, with prefix, address and share between tabs (`crates/run/src/maps.rs`).
const MAPS_VARIABLE: &str = "BYWAY_RUN_MAPS";

/// The flags of `byway run`.
#[derive(Args, Debug)]
pub struct RunArguments {
    /// Paths below PREFIX are those of a share: PREFIX=URI; may be repeated
    ///
    /// PREFIX is an absolute path that does not exist on this machine: so a call that the program makes past byway fails instead of
    /// reaching local files. URI is byway://HOST[:PORT]/SHARE, byways://HOST[:PORT]/SHARE (TLS), byway+unix:///SHARE?socket=PATH, byway+shm:///SHARE?socket=PATH (shared
    /// memory) or byway+rdma://HOST[:PORT]/SHARE.
    #[arg(long = "map", value_name = "PREFIX=URI", required = true)]
    pub maps: Vec<MapArgument>,
    /// Print to standard error at the end which calls were answered by a share, and which were refused
    #[arg(long)]
    pub report: bool,
    /// Certificates for TLS
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A prefix and the share of its paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapArgument {
    prefix: PathBuf,
    uri: RemoteUri,
}

impl FromStr for MapArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (prefix, uri) = text.split_once('=').ok_or("write PREFIX=URI, for example /far=byway://store1/home")?;
        let prefix = Path::new(prefix);
        let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        if !prefix.is_absolute() || !prefix.components().all(is_plain) || prefix.components().count() < 2 {
            return Err("a prefix is an absolute path without .., below /".to_owned());
        }
        if prefix.as_os_str().as_bytes().iter().any(u8::is_ascii_control) {
            return Err("a prefix has no control characters".to_owned());
        }
        // Doubled slashes and one at the end are left out.
        let prefix = prefix.components().collect();
        Ok(Self { prefix, uri: uri.parse().map_err(|error: RemoteUriError| error.to_string())? })
    }
}

/// Why a program was not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// A path that the library cannot be told.
    #[error("{}: a path with control characters cannot be used by byway run; rename the file", .0.display())]
    Path(PathBuf),
    /// The share.
    #[error(transparent)]
    Share(#[from] ShareUriError),
    /// The prefix is in use.
    #[error(
        "--map {}: the path exists on this machine; choose one that does not exist, so that no call can reach local files by mistake",
        .0.display()
    )]
    Exists(PathBuf),
    /// Two prefixes of which one is below the other.
    #[error("--map {}: this prefix is below another one, or the same", .0.display())]
    Overlap(PathBuf),
    /// More than fit.
    #[error("at most {RUN_MAPS_MAX} maps; mount the shares instead")]
    TooMany,
    /// The path of a socket.
    #[error("the current directory is not known: {0}; give the socket's path from / on")]
    Directory(std::io::Error),
    /// The library.
    #[error(
        "{LIBRARY} is not beside this program, nor in ../lib/byway: build it with `cargo build -p byway-run`, or install byway"
    )]
    NoLibrary,
    /// The counts.
    #[error("--report: {0}; leave it out")]
    Report(std::io::Error),
    /// The program cannot be started.
    #[error("{program}: {source}")]
    Start {
        /// Which.
        program: String,
        /// Why not.
        source: std::io::Error,
    },
}

/// Runs the program in place of this one or, for a report, as its child. Gives the child's exit status, or 128 and the signal that ended
/// it.
///
/// # Errors
/// See [`RunError`].
pub fn run(arguments: &RunArguments) -> Result<ExitCode, RunError> {
    let name = arguments.command.first().ok_or(ExecutableError::NoName)?;
    let program = executable::find(name)?;
    executable::check(&program)?;
    let library = executable::library(LIBRARY).ok_or(RunError::NoLibrary)?;
    let maps = prepare(&arguments.maps, &arguments.tls)?;
    let mut command = Command::new(&program);
    command.arg0(name).args(&arguments.command[1..]);
    command.env(MAPS_VARIABLE, maps).env("LD_PRELOAD", executable::preload(&library));
    let failed = |source| RunError::Start { program: program.display().to_string(), source };
    if !arguments.report {
        return Err(failed(command.exec()));
    }
    let report = Report::begin(&mut command).map_err(RunError::Report)?;
    let status = report::wait(command.spawn().map_err(failed)?).map_err(RunError::Report)?;
    crate::output::note(report.text().map_err(RunError::Report)?);
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Checks all maps, each with its server; gives the variable for the library.
fn prepare(maps: &[MapArgument], tls: &ClientTlsArguments) -> Result<OsString, RunError> {
    if maps.len() > RUN_MAPS_MAX {
        return Err(RunError::TooMany);
    }
    tls.check(maps.iter().any(|map| map.uri.wants_tls())).map_err(ShareUriError::from)?;
    // The program may change its directory.
    let tls = tls.absolute().map_err(RunError::Directory)?;
    let mut lines = Vec::new();
    for (index, MapArgument { prefix, uri }) in maps.iter().enumerate() {
        let others = maps.iter().enumerate().filter(|(other, _)| *other != index);
        if others.map(|(_, other)| &other.prefix).any(|other| prefix.starts_with(other)) {
            return Err(RunError::Overlap(prefix.clone()));
        }
        if prefix.symlink_metadata().is_ok() {
            return Err(RunError::Exists(prefix.clone()));
        }
        let (address, share) = check(uri, &tls)?;
        let address = address.to_string();
        let mut fields = vec![prefix.as_os_str(), OsStr::new(&address), OsStr::new(&share)];
        if uri.wants_tls() {
            fields.push(OsStr::new(tls.tls_hostname.as_deref().unwrap_or(uri.host())));
            let files = [&tls.tls_ca, &tls.tls_certificate, &tls.tls_key].into_iter().flatten();
            fields.extend(files.map(|path| path.as_os_str()));
        }
        if let Some(wrong) = fields.iter().find(|field| field.as_bytes().iter().any(u8::is_ascii_control)) {
            return Err(RunError::Path(wrong.into()));
        }
        lines.push(fields.into_iter().map(OsStr::as_bytes).collect::<Vec<_>>().join(&b'\t'));
    }
    Ok(OsString::from_vec(lines.join(&b'\n')))
}

/// Finds a share's server and has it answer: a program that could reach nothing is not started.
fn check(uri: &RemoteUri, tls: &ClientTlsArguments) -> Result<(Address, String), RunError> {
    share_of(uri)?;
    // The program may change its directory.
    let uri = uri.absolute().map_err(RunError::Directory)?;
    let options = client_options(&uri, tls)?;
    let told = (options.address.clone(), options.share.clone());
    Client::connect(options).map_err(|source| ShareUriError::client(&uri, source))?;
    Ok(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::ClientTlsError;

    #[test]
    fn a_map_is_a_prefix_and_a_share() {
        let map: MapArgument = "/far//away/=byway://127.0.0.1:1/home".parse().unwrap();
        assert_eq!((map.prefix.as_path(), map.uri.volume()), (Path::new("/far/away"), Some("home")));
        for wrong in ["/far", "far=byway://h/s", "/=byway://h/s", "/a/../b=byway://h/s", "/a=ftp://h/s"] {
            assert!(wrong.parse::<MapArgument>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn maps_that_could_mislead_are_refused_before_a_server_is_asked() {
        let maps = |texts: &[&str]| {
            let maps: Vec<MapArgument> = texts.iter().map(|text| text.parse().unwrap()).collect();
            prepare(&maps, &ClientTlsArguments::default()).unwrap_err()
        };
        assert!(matches!(maps(&["/tmp=byway://127.0.0.1:1/home"]), RunError::Exists(_)));
        let nested = ["/no-such/a/b=byway://127.0.0.1:1/x", "/no-such/a=byway://127.0.0.1:1/y"];
        assert!(matches!(maps(&nested), RunError::Overlap(_)));
        assert!(matches!(
            maps(&["/no-such=byways://127.0.0.1:1/x"]),
            RunError::Share(ShareUriError::Tls(ClientTlsError::NoAuthority))
        ));
        assert!(matches!(maps(&["/no-such=byway://127.0.0.1:1/"]), RunError::Share(ShareUriError::NoShare(_))));
        assert!(matches!(maps(&["/no-such=nbd://127.0.0.1:1/x"]), RunError::Share(ShareUriError::Nbd(_))));
    }
}
