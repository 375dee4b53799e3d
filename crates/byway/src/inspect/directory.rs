//! `byway ls` of a directory of a share.

use std::io::Write;
use std::time::Duration;

use byway_reactor::Errno;
use byway_rpc::message::Status;
use byway_service::file::client::{Caller, Client, ClientError, ClientOptions, Found, Listed, ROOT};
use byway_service::file::wire::{Attributes, CallError};
use rustix::fs::FileType;
use serde::Serialize;

use super::{InspectError, LsArguments, RemoteError, printable};

/// How long the server may take to come back while it is listed.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// An entry of a directory.
#[derive(Debug, Serialize)]
struct File {
    name: String,
    kind: &'static str,
    /// Permission bits.
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    size_bytes: u64,
    /// Seconds since 1970.
    modified_s: i64,
}

/// Lists the directory that the arguments name, or the one file.
///
/// # Errors
/// See [`InspectError`].
pub(super) fn list(arguments: &LsArguments, share: &str) -> Result<(), InspectError> {
    let uri = &arguments.uri.remote;
    let tls = uri.wants_tls().then(|| arguments.tls.client(uri.host())).transpose().map_err(RemoteError::from)?;
    let address = uri.resolve().map_err(RemoteError::from)?;
    let options = ClientOptions { tls, lost_after: LOST_AFTER, ..ClientOptions::new(address, share) };
    let text = || arguments.uri.to_string();
    let client = Client::connect(options).map_err(|source| match source {
        ClientError::Refused { error: CallError::NoShare | CallError::NotServed(Status::UnknownProtocol), .. } => {
            InspectError::NoShare(uri.to_string())
        }
        source => InspectError::Share { uri: text(), source },
    })?;
    let files = files(&client, &arguments.uri.path);
    client.close();
    let files = files.map_err(|source| InspectError::Directory { uri: text(), source })?;
    let mut out = crate::output::stdout();
    if arguments.json {
        writeln!(out, "{}", serde_json::json!(files))?;
    } else {
        write_table(&mut out, &files)?;
    }
    Ok(())
}

fn files(client: &Client, path: &[Vec<u8>]) -> Result<Vec<File>, Errno> {
    let groups: Vec<u32> =
        rustix::process::getgroups().unwrap_or_default().iter().map(|group| group.as_raw()).collect();
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let me = Caller { uid, gid, groups: &groups };
    let mut found = Found { node: ROOT, attributes: client.attributes(me, ROOT, None)? };
    for name in path {
        found = client.look_up(me, found.node, name)?;
    }
    if FileType::from_raw_mode(found.attributes.mode.get()) != FileType::Directory {
        return Ok(path.last().map(|name| file(name, &found.attributes)).into_iter().collect());
    }
    let handle = client.open_directory(me, found.node)?;
    let (mut files, mut cookie) = (Vec::new(), 0);
    loop {
        let part: Vec<Listed> = client.read_directory(me, handle, cookie, usize::MAX, false)?;
        let Some(last) = part.last() else { break };
        cookie = last.cookie;
        let named = part.iter().filter(|one| one.name != b"." && one.name != b"..");
        files.extend(named.map(|one| file(&one.name, &one.attributes)));
    }
    client.close_handle(handle);
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn file(name: &[u8], attributes: &Attributes) -> File {
    let mode = attributes.mode.get();
    File {
        name: String::from_utf8_lossy(name).into_owned(),
        kind: match FileType::from_raw_mode(mode) {
            FileType::RegularFile => "file",
            FileType::Directory => "directory",
            FileType::Symlink => "link",
            FileType::Fifo => "fifo",
            FileType::Socket => "socket",
            FileType::BlockDevice | FileType::CharacterDevice => "device",
            FileType::Unknown => "?",
        },
        mode: mode & 0o7777,
        links: attributes.links.get(),
        uid: attributes.uid.get(),
        gid: attributes.gid.get(),
        size_bytes: attributes.size.get(),
        modified_s: attributes.modified_s.get(),
    }
}

fn write_table(out: &mut impl Write, files: &[File]) -> std::io::Result<()> {
    let width = |size: fn(&File) -> u64| files.iter().map(size).max().unwrap_or(0).to_string().len();
    let (uid, gid) = (width(|file| file.uid.into()), width(|file| file.gid.into()));
    let bytes = width(|file| file.size_bytes);
    for File { name, kind, mode, uid: user, gid: group, size_bytes, .. } in files {
        let name = printable(name);
        writeln!(out, "{kind:<9}  {mode:04o}  {user:>uid$}  {group:>gid$}  {size_bytes:>bytes$}  {name}")?;
    }
    Ok(())
}
