//! `byway ls` and `byway info`: the volumes and shares of a server, and the properties of one volume.

mod directory;

use std::io::Write;

use byway_frontend::nbd::client as nbd;
use byway_frontend::nbd::flags::TransmissionFlags;
use byway_reactor::{IoChoice, Reactor};
use byway_service::block::client as native;
use byway_service::block::client::{Answer, ListedVolume, Request};
use byway_service::file::client as files;
use byway_service::file::client::ClientError;
use clap::Args;
use serde::Serialize;

use crate::limits::INFO_EXTENTS_MAX;
use crate::remote::{self, Remote, RemoteError, RemoteInfo, RemoteOptions, RemoteUri, TreeUri};
use crate::tls::ClientTlsArguments;
use crate::units::show_size;

/// The class of the tokens of the one client here.
const CLASS: u8 = 0x30;
/// Memory of the loop.
const FRAME_BYTES: usize = 8 << 20;

/// The flags of `byway ls`.
#[derive(Args, Debug)]
pub struct LsArguments {
    /// Server, or directory of a share
    ///
    /// A server is byway://HOST[:PORT], byway+unix:///?socket=PATH, byway+shm:///?socket=PATH (shared memory),
    /// byway+rdma://HOST[:PORT], nbd://HOST[:PORT] or nbd+unix:///?socket=PATH; for TLS byways://, nbds:// or nbds+unix://. A directory
    /// of a share is byway://HOST[:PORT]/SHARE/PATH or byway+unix:///SHARE/PATH?socket=PATH.
    pub uri: TreeUri,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Kernel interface of the event loop: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = byway_remote::parse_io)]
    pub io: IoChoice,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The flags of `byway info`.
#[derive(Args, Debug)]
pub struct InfoArguments {
    /// Volume
    ///
    /// byway://HOST[:PORT]/NAME, byway+unix:///NAME?socket=PATH, byway+shm:///NAME?socket=PATH (shared memory),
    /// byway+rdma://HOST[:PORT]/NAME, nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; for TLS byways://, nbds:// or
    /// nbds+unix://.
    pub uri: RemoteUri,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Kernel interface of the event loop: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = byway_remote::parse_io)]
    pub io: IoChoice,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Why there is nothing to see.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The server.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A volume of an NBD server.
    #[error("{0} names a volume; leave its name out to list the server, or see byway info {0}")]
    OneVolume(String),
    /// A resource that is no share.
    #[error(
        "the server has no share of the name in {0}; leave the name out to list the server, or see byway info {0} for a volume"
    )]
    NoShare(String),
    /// A share, or a directory in it.
    #[error("{uri}: {source}")]
    Share {
        /// As it was written.
        uri: String,
        /// Why not.
        source: ClientError,
    },
    /// A directory of a share.
    #[error("{uri}: {source}; byway ls lists the directories above it")]
    Directory {
        /// As it was written.
        uri: String,
        /// The file system's word.
        source: byway_reactor::Errno,
    },
    /// Standard output.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// A volume or share of a list.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Entry {
    name: String,
    kind: &'static str,
    uri: String,
    /// Not told by servers that keep it to themselves until the export is opened.
    size_bytes: Option<u64>,
    block_bytes: Option<u32>,
    flags: Vec<&'static str>,
    description: String,
}

/// What one volume is.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Description {
    uri: String,
    size_bytes: u64,
    block_bytes: u32,
    request_bytes_max: u32,
    flags: Vec<&'static str>,
    description: String,
    contents: Option<Contents>,
}

/// How much of a volume is data, as its server tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Contents {
    data_bytes: u64,
    zero_bytes: u64,
    extents: u64,
    /// False: there were more extents than were counted.
    complete: bool,
}

/// Lists a server.
///
/// # Errors
/// See [`InspectError`].
pub fn ls(arguments: &LsArguments) -> Result<(), InspectError> {
    let uri = &arguments.uri.remote;
    arguments.tls.check(uri.wants_tls()).map_err(RemoteError::from)?;
    if let Some(name) = uri.volume().filter(|name| !name.is_empty()) {
        return match uri {
            RemoteUri::Nbd(_) => Err(InspectError::OneVolume(uri.to_string())),
            RemoteUri::Native(_) => directory::list(arguments, name),
        };
    }
    let reactor = Reactor::open(arguments.io, FRAME_BYTES).map_err(RemoteError::Loop)?;
    let entries = list(reactor, uri, &arguments.tls)?;
    let mut out = crate::output::stdout();
    if arguments.json {
        writeln!(out, "{}", serde_json::json!(entries))?;
    } else {
        write_table(&mut out, &entries)?;
    }
    Ok(())
}

fn list(reactor: Reactor, uri: &RemoteUri, tls: &ClientTlsArguments) -> Result<Vec<Entry>, InspectError> {
    let address = uri.resolve().map_err(RemoteError::from)?;
    let secure = uri.wants_tls().then(|| tls.client(uri.host())).transpose().map_err(RemoteError::from)?;
    let named = |name: &str| uri.with_volume(name).map_or_else(|_| name.to_owned(), |uri| uri.to_string());
    Ok(match uri {
        RemoteUri::Native(_) => {
            let failed = |source| remote::native_failed(uri, tls, secure.as_ref(), source);
            let listed_at = address.clone();
            let listed = native::list(reactor, address, byway_fabric::Options::new(CLASS), secure.clone());
            let listed = listed.map_err(failed)?;
            let mut entries: Vec<_> =
                listed.into_iter().map(|volume| native_entry(named(&volume.name), volume)).collect();
            let failed = |source| InspectError::Share { uri: uri.to_string(), source };
            let shares = files::list(&listed_at, secure.as_ref()).map_err(failed)?;
            entries.extend(shares.into_iter().map(|share| share_entry(named(&share.name), share)));
            entries
        }
        RemoteUri::Nbd(_) => {
            let failed = |source| remote::nbd_failed(uri, tls, secure.as_ref(), source);
            let listed = nbd::list(reactor, address, CLASS, secure.clone()).map_err(failed)?;
            listed.into_iter().map(|export| nbd_entry(named(&export.name), export)).collect()
        }
    })
}

fn share_entry(uri: String, share: files::ListedShare) -> Entry {
    Entry {
        kind: "share",
        uri,
        size_bytes: None,
        block_bytes: None,
        flags: share.read_only.then_some("read-only").into_iter().collect(),
        description: share.description,
        name: share.name,
    }
}

fn native_entry(uri: String, volume: ListedVolume) -> Entry {
    let words = [(volume.read_only, "read-only"), (volume.volatile, "volatile"), (volume.tls_required, "tls-required")];
    Entry {
        kind: "volume",
        uri,
        size_bytes: Some(volume.len),
        block_bytes: Some(volume.block_bytes),
        flags: words.into_iter().filter_map(|(set, word)| set.then_some(word)).collect(),
        description: volume.description,
        name: volume.name,
    }
}

fn nbd_entry(uri: String, export: nbd::ListedExport) -> Entry {
    let rules = export.session.as_ref().map(|session| session.rules);
    let told = export.session.map(|session| session.description).unwrap_or_default();
    let told = if export.description.is_empty() { told } else { export.description };
    let (volatile, description) = remote::nbd_description(&told);
    // What the protocol can do beside that is for `byway info`: over the native wire all volumes can do all.
    let read_only = rules.is_some_and(|rules| rules.flags.has(TransmissionFlags::READ_ONLY));
    let words = [(read_only, "read-only"), (volatile, "volatile")];
    Entry {
        kind: "volume",
        uri,
        size_bytes: rules.map(|rules| rules.size_bytes),
        block_bytes: rules.map(|rules| rules.block.minimum),
        flags: words.into_iter().filter_map(|(set, word)| set.then_some(word)).collect(),
        description: description.to_owned(),
        name: export.name,
    }
}

fn write_table(out: &mut impl Write, entries: &[Entry]) -> std::io::Result<()> {
    let mut rows = vec![["NAME", "KIND", "SIZE", "BLOCK", "FLAGS", "DESCRIPTION"].map(str::to_owned)];
    rows.extend(entries.iter().map(|entry| {
        let name = if entry.name.is_empty() { "(default)" } else { &entry.name };
        let unknown = if entry.kind == "share" { "-" } else { "?" };
        let or_unknown = |text: Option<String>| text.unwrap_or_else(|| unknown.to_owned());
        [
            printable(name),
            entry.kind.to_owned(),
            or_unknown(entry.size_bytes.map(show_size)),
            or_unknown(entry.block_bytes.map(|bytes| bytes.to_string())),
            if entry.flags.is_empty() { "-".to_owned() } else { entry.flags.join(",") },
            printable(&entry.description),
        ]
    }));
    let widths =
        [0, 1, 2, 3, 4].map(|column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for row in &rows {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(out, "{}", format!("{}  {}", cells.join("  "), row[5]).trim_end())?;
    }
    Ok(())
}

/// A server's words for a terminal: nothing that would move its cursor.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Describes a volume.
///
/// # Errors
/// See [`InspectError`].
pub fn info(arguments: &InfoArguments) -> Result<(), InspectError> {
    let mut reactor = Reactor::open(arguments.io, FRAME_BYTES).map_err(RemoteError::Loop)?;
    // A node tells whoever says that nothing will be written that nothing can be: then that flag would say nothing.
    let tls = &arguments.tls;
    tls.check(arguments.uri.wants_tls()).map_err(RemoteError::from)?;
    let options = RemoteOptions { class: CLASS, connections: 1, read_only: false, tls, unflushed_bytes_max: 1 << 20 };
    let mut remote = Remote::connect(&mut reactor, &arguments.uri, options)?;
    remote::open(&mut reactor, &mut [&mut remote])?;
    let info = remote.info().ok_or_else(|| RemoteError::Silent(arguments.uri.to_string()))?;
    let contents = info.has_extents.then(|| contents(&mut reactor, &mut remote, &info)).transpose();
    remote::leave_after(&mut reactor, &mut [&mut remote], &contents);
    let contents = contents?;
    let mut described = Description {
        uri: arguments.uri.to_string(),
        size_bytes: info.bytes,
        block_bytes: info.block_bytes,
        request_bytes_max: info.request_bytes_max,
        flags: info.flags,
        description: info.description,
        contents,
    };
    if let (RemoteUri::Native(_), Some(name)) = (&arguments.uri, arguments.uri.volume()) {
        // Opening does not tell the description; the list does.
        let listed = list(reactor, &arguments.uri, &arguments.tls)?.into_iter().find(|entry| entry.name == name);
        described.description = listed.map(|entry| entry.description).unwrap_or_default();
    }
    let mut out = crate::output::stdout();
    if arguments.json {
        writeln!(out, "{}", serde_json::json!(described))?;
    } else {
        write_description(&mut out, &described)?;
    }
    Ok(())
}

fn contents(reactor: &mut Reactor, remote: &mut Remote, info: &RemoteInfo) -> Result<Contents, RemoteError> {
    let mut contents = Contents::default();
    let (mut offset, mut last_hole) = (0, None);
    while offset < info.bytes && contents.extents < INFO_EXTENTS_MAX {
        let request = Request::Extents { offset, len: info.bytes - offset };
        let Answer::Extents(extents) = remote::ask(reactor, &mut [&mut *remote], request)? else { break };
        let before = offset;
        for extent in extents {
            let bytes = if extent.hole { &mut contents.zero_bytes } else { &mut contents.data_bytes };
            *bytes += extent.len;
            offset += extent.len;
            // A server may cut an extent in two between two answers.
            contents.extents += u64::from(last_hole != Some(extent.hole));
            last_hole = Some(extent.hole);
        }
        if offset == before {
            break;
        }
    }
    contents.complete = offset >= info.bytes;
    Ok(contents)
}

fn write_description(out: &mut impl Write, described: &Description) -> std::io::Result<()> {
    let size = |bytes: u64| format!("{} ({bytes} bytes)", show_size(bytes));
    writeln!(out, "{}", described.uri)?;
    writeln!(out, "  size         {}", size(described.size_bytes))?;
    writeln!(
        out,
        "  block        {} bytes, requests up to {}",
        described.block_bytes,
        show_size(described.request_bytes_max.into())
    )?;
    let flags = if described.flags.is_empty() { "none".to_owned() } else { described.flags.join(", ") };
    writeln!(out, "  flags        {flags}")?;
    match described.contents {
        Some(Contents { data_bytes, zero_bytes, extents, complete }) => {
            let more = if complete { "" } else { " at least" };
            writeln!(out, "  data        {more} {}", size(data_bytes))?;
            writeln!(out, "  zeroes      {more} {}", size(zero_bytes))?;
            writeln!(out, "  extents     {more} {extents}")?;
        }
        None => writeln!(out, "  data         not told by the server")?,
    }
    if !described.description.is_empty() {
        writeln!(out, "  description  {}", printable(&described.description))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned_and_harmless() {
        let entry = |name: &str, size_bytes, flags| Entry {
            name: name.to_owned(),
            kind: "volume",
            uri: String::new(),
            size_bytes,
            block_bytes: size_bytes.map(|_| 512),
            flags,
            description: "a\x1b[2J".to_owned(),
        };
        let entries = [entry("disk", Some(1 << 30), vec!["read-only", "flush"]), entry("", None, vec![])];
        let mut out = Vec::new();
        write_table(&mut out, &entries).unwrap();
        let expected = "NAME       KIND    SIZE     BLOCK  FLAGS            DESCRIPTION\n\
                        disk       volume  1.0 GiB  512    read-only,flush  a\u{fffd}[2J\n\
                        (default)  volume  ?        ?      -                a\u{fffd}[2J\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
