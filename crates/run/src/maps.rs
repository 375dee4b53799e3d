//! Which paths belong to which share, as `byway run` says in the environment.
//!
//! Each line of the variable is a prefix, an address and a share's name, with tabs between them. For TLS the name that the server's
//! certificate is to have follows, the file with authorities, and perhaps those with this client's certificate and its key.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use byway_reactor::Address;

/// The variable's name; `byway/src/run.rs` sets it.
pub(crate) const MAPS_VARIABLE: &str = "BYWAY_RUN_MAPS";

/// A prefix and its share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    /// Absolute, in its shortest form, without a slash at its end.
    pub(crate) prefix: Vec<u8>,
    pub(crate) address: Address,
    pub(crate) share: String,
    pub(crate) tls: Option<Tls>,
}

/// Where the client's side of TLS is to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tls {
    /// That the server's certificate is to have.
    pub(crate) name: String,
    pub(crate) authorities: PathBuf,
    /// This client's certificate and its key.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
}

impl Map {
    /// The share's address and name: text that is the same in all programs that have a map of the share, whatever its prefix. It has no
    /// line break.
    pub(crate) fn identity(&self) -> String {
        format!("{}\t{}", self.address, self.share)
    }
}

/// All of them; `None` for text that `byway run` has not written.
pub(crate) fn parse(text: &[u8]) -> Option<Vec<Map>> {
    text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(map).collect()
}

fn map(line: &[u8]) -> Option<Map> {
    let mut fields = line.split(|byte| *byte == b'\t');
    let (prefix, address, share) = (fields.next()?, fields.next()?, fields.next()?);
    let prefix = (prefix.first() == Some(&b'/')).then(|| prefix.to_vec())?;
    let tls = match fields.collect::<Vec<_>>()[..] {
        [] => None,
        [name, authorities] => Some(Tls { name: text(name)?, authorities: path(authorities), own: None }),
        [name, authorities, certificate, key] => {
            Some(Tls { name: text(name)?, authorities: path(authorities), own: Some((path(certificate), path(key))) })
        }
        _ => return None,
    };
    Some(Map { prefix, address: parse_address(address)?, share: text(share)?, tls })
}

fn text(bytes: &[u8]) -> Option<String> {
    String::from_utf8(bytes.to_vec()).ok()
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

/// As an address is displayed.
fn parse_address(text: &[u8]) -> Option<Address> {
    let socket = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse().ok();
    if let Some(rest) = text.strip_prefix(b"tcp://") {
        return socket(rest).map(Address::Tcp);
    }
    if let Some(rest) = text.strip_prefix(b"rdma://") {
        return socket(rest).map(Address::Rdma);
    }
    if let Some(rest) = text.strip_prefix(b"unix://") {
        return Some(Address::Unix(path(rest)));
    }
    text.strip_prefix(b"shm://").map(|rest| Address::Shared(path(rest)))
}

/// From the environment of this program.
pub(crate) fn from_environment() -> Option<Vec<Map>> {
    parse(std::env::var_os(MAPS_VARIABLE)?.as_bytes())
}

/// The map of an absolute path, and what of the path lies below the prefix. Slashes may be doubled, and `.` may stand between them;
/// `..` before the prefix is not taken.
pub(crate) fn find<'a>(maps: &[Map], path: &'a [u8]) -> Option<(usize, &'a [u8])> {
    maps.iter().enumerate().find_map(|(index, map)| below(&map.prefix, path).map(|rest| (index, rest)))
}

/// What of a path lies below a prefix.
pub(crate) fn below<'a>(prefix: &[u8], path: &'a [u8]) -> Option<&'a [u8]> {
    if path.first() != Some(&b'/') {
        return None;
    }
    // Most paths of a program are told apart by their first name.
    let mut rest = path;
    for wanted in prefix.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        let (name, behind) = next_name(rest);
        if name != wanted {
            return None;
        }
        rest = behind;
    }
    Some(rest)
}

/// The first name of a path that is not `.`, and what follows it.
fn next_name(mut path: &[u8]) -> (&[u8], &[u8]) {
    loop {
        let start = path.iter().position(|byte| *byte != b'/').unwrap_or(path.len());
        path = &path[start..];
        let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
        let (name, behind) = path.split_at(end);
        if name != b"." {
            return (name, behind);
        }
        path = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_as_they_are_written() {
        let maps = parse(b"/far\ttcp://127.0.0.1:4711\thome\n/a/b\tunix:///run/b\tx\n").unwrap();
        assert_eq!(maps[0].address.to_string(), "tcp://127.0.0.1:4711");
        assert_eq!(
            (maps[1].prefix.as_slice(), maps[1].address.to_string()),
            (&b"/a/b"[..], "unix:///run/b".to_owned())
        );
        let secure =
            parse(b"/far\ttcp://127.0.0.1:4711\thome\tstore1\t/ca\n/a\ttcp://[::1]:1\tx\tb\t/ca\t/c\t/k").unwrap();
        let tls: Vec<&Tls> = secure.iter().filter_map(|map| map.tls.as_ref()).collect();
        assert_eq!(
            (tls[0].name.as_str(), tls[0].authorities.as_path(), &tls[0].own),
            ("store1", "/ca".as_ref(), &None)
        );
        assert_eq!(tls[1].own, Some(("/c".into(), "/k".into())));
        assert_eq!(parse(b"/far\ttcp://127.0.0.1:4711\thome\tstore1"), None);
        assert_eq!(parse(b"far\ttcp://127.0.0.1:4711\thome"), None);
        assert_eq!(parse(b"/far\tftp://127.0.0.1\thome"), None);
    }

    #[test]
    fn paths_below_a_prefix_are_found() {
        let maps = parse(b"/far\ttcp://127.0.0.1:4711\thome\n/a/b\tunix:///run/b\tx").unwrap();
        let found = |path: &'static str| {
            find(&maps, path.as_bytes()).map(|(map, rest)| (map, std::str::from_utf8(rest).unwrap()))
        };
        assert_eq!(found("/far"), Some((0, "")));
        assert_eq!(found("//far/./x/../y"), Some((0, "/./x/../y")));
        assert_eq!(found("/./a//b/c/"), Some((1, "/c/")));
        assert_eq!(found("/farther"), None);
        assert_eq!(found("far/x"), None);
        assert_eq!(found("/a"), None);
        assert_eq!(found("/"), None);
    }
}
