//! URIs of a directory of a share: the share's address with a path behind its name.

use std::fmt;
use std::str::FromStr;

use super::{RemoteUri, RemoteUriError, percent};

/// A server, a resource of it, and perhaps a path in that: `byway://HOST/SHARE/a/b`, `byway+unix:///SHARE/a/b?socket=PATH`. In the
/// path, `%` and two hexadecimal digits are a byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeUri {
    /// The server and the share.
    pub remote: RemoteUri,
    /// The names below the share, from the top.
    pub path: Vec<Vec<u8>>,
    /// A slash follows the share's name: it is not a volume's.
    pub is_below: bool,
    text: String,
}

impl TreeUri {
    /// The directory that a share is.
    pub fn top(remote: RemoteUri) -> Self {
        Self { path: Vec::new(), is_below: true, text: remote.to_string(), remote }
    }
}

impl FromStr for TreeUri {
    type Err = RemoteUriError;

    fn from_str(text: &str) -> Result<Self, RemoteUriError> {
        let whole = || Ok(Self { remote: text.parse()?, path: Vec::new(), is_below: false, text: text.to_owned() });
        let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| scheme.starts_with("byway")) else {
            return whole();
        };
        let (place, query) = rest.split_once('?').map_or((rest, None), |(place, query)| (place, Some(query)));
        let Some((authority, names)) = place.split_once('/') else { return whole() };
        let Some((share, path)) = names.split_once('/') else { return whole() };
        let query = query.map_or_else(String::new, |query| format!("?{query}"));
        let remote = format!("{scheme}://{authority}/{share}{query}").parse()?;
        let names = path.split('/').filter(|name| !name.is_empty()).map(percent::decode);
        let path: Option<Vec<_>> = names.collect();
        let path = path.ok_or_else(|| RemoteUriError::Path(text.to_owned()))?;
        Ok(Self { remote, path, is_below: true, text: text.to_owned() })
    }
}

impl fmt::Display for TreeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_follows_the_share() {
        for (text, remote, path) in [
            ("byway://h:1/share/a/b", "byway://h:1/share", &["a", "b"][..]),
            ("byway://h:1/share//a/", "byway://h:1/share", &["a"]),
            ("byway+unix:///share/a%20b?socket=/run/x", "byway+unix:///share?socket=/run/x", &["a b"]),
            ("byway://h:1/share", "byway://h:1/share", &[]),
            ("byway://h:1/", "byway://h:1/", &[]),
            ("nbd://h/a/b", "nbd://h/a/b", &[]),
        ] {
            let uri: TreeUri = text.parse().unwrap();
            let expected: Vec<_> = path.iter().map(|name| name.as_bytes().to_vec()).collect();
            assert_eq!((uri.remote.to_string().as_str(), uri.to_string().as_str()), (remote, text));
            assert_eq!(uri.path, expected);
            assert_eq!(
                uri.is_below,
                text.starts_with("byway") && text.contains("share") && text != "byway://h:1/share"
            );
        }
        let said = "byway://h/share/a%2".parse::<TreeUri>().unwrap_err().to_string();
        assert!(said.contains("%25"), "{said}");
        assert!("http://h/a/b".parse::<TreeUri>().is_err());
    }
}
