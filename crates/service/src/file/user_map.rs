//! Which user of this machine each user of a client is (`users=map:FILE`).
//!
//! A line is `CLIENTUID SERVERUID[:SERVERGID[,SERVERGID]...]`; the first group is the user's own, and without one it has the user's
//! number. `#` begins a comment. Groups that a client names do not count: its numbers mean nothing here.

use std::collections::HashMap;
use std::io::{self, Read};

use byway_reactor::privilege::User;

use super::share::NOBODY;
use crate::limits::{CALL_GROUPS_MAX, FILE_USER_MAP_BYTES_MAX, FILE_USERS_MAPPED_MAX};

/// Why a map is not used.
#[derive(Debug, thiserror::Error)]
pub enum UserMapError {
    /// It cannot be read.
    #[error("{0}; name a file that the node can read")]
    Read(#[from] io::Error),
    /// Over [`FILE_USER_MAP_BYTES_MAX`].
    #[error("it is longer than {FILE_USER_MAP_BYTES_MAX} bytes; write a shorter one")]
    Long,
    /// Something else than text.
    #[error("it is not text in UTF-8; write lines of CLIENTUID SERVERUID")]
    NotText,
    /// A wrong line.
    #[error("line {line}: {fault}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong, and what to write.
        fault: &'static str,
    },
    /// Over [`FILE_USERS_MAPPED_MAX`].
    #[error("it has more than {FILE_USERS_MAPPED_MAX} users; write fewer")]
    Many,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserMap(HashMap<u32, User>);

impl UserMap {
    /// Reads a map.
    ///
    /// # Errors
    /// See [`UserMapError`].
    pub fn read(file: impl Read) -> Result<Self, UserMapError> {
        let mut bytes = Vec::new();
        file.take(FILE_USER_MAP_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        if bytes.len() > FILE_USER_MAP_BYTES_MAX {
            return Err(UserMapError::Long);
        }
        let text = String::from_utf8(bytes).map_err(|_| UserMapError::NotText)?;
        let mut users = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            let wrong = |fault| UserMapError::Line { line: index + 1, fault };
            let line = line.split_once('#').map_or(line, |(before, _)| before);
            let mut words = line.split_ascii_whitespace();
            let Some(client) = words.next() else { continue };
            let (Some(user), None) = (words.next(), words.next()) else {
                return Err(wrong("write CLIENTUID SERVERUID[:SERVERGID[,SERVERGID]...]"));
            };
            let client = number(client).map_err(wrong)?;
            if users.insert(client, parse_user(user).map_err(wrong)?).is_some() {
                return Err(wrong("this user of clients has a line already; leave one"));
            }
            if users.len() > FILE_USERS_MAPPED_MAX {
                return Err(UserMapError::Many);
            }
        }
        Ok(Self(users))
    }

    /// The user here that a client's user is: [`NOBODY`] if the map does not name it.
    pub(super) fn user(&self, client: u32) -> User {
        self.0.get(&client).cloned().unwrap_or(User { uid: NOBODY, gid: NOBODY, groups: vec![NOBODY] })
    }
}

fn parse_user(text: &str) -> Result<User, &'static str> {
    let (uid, groups) = text.split_once(':').unwrap_or((text, text));
    let uid = number(uid)?;
    let groups = groups.split(',').map(number).collect::<Result<Vec<_>, _>>()?;
    if groups.len() > CALL_GROUPS_MAX {
        return Err("too many groups");
    }
    let gid = groups.first().copied().ok_or("the group is missing")?;
    Ok(User { uid, gid, groups })
}

fn number(text: &str) -> Result<u32, &'static str> {
    // The last number stands for none in the kernel's calls.
    text.parse().ok().filter(|number| *number != u32::MAX).ok_or("users and groups are numbers from 0 to 4294967294")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: impl AsRef<[u8]>) -> Result<UserMap, String> {
        UserMap::read(text.as_ref()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_names_a_user_and_its_groups() {
        let map = read("# clients of the lab\n1000 5000\n\n  1001\t5001:100,200 # two groups\n0 5000:7\n").unwrap();
        let user = |uid, groups: &[u32]| User { uid, gid: groups[0], groups: groups.to_vec() };
        assert_eq!(map.user(1000), user(5000, &[5000]));
        assert_eq!(map.user(1001), user(5001, &[100, 200]));
        assert_eq!(map.user(0), user(5000, &[7]));
        assert_eq!(map.user(1002), user(NOBODY, &[NOBODY]), "users without a line are nobody");
    }

    #[test]
    fn a_wrong_map_is_refused_with_its_line() {
        let many = (0..=FILE_USERS_MAPPED_MAX).map(|uid| format!("{uid} 1")).collect::<Vec<_>>().join("\n");
        let groups = vec!["1"; CALL_GROUPS_MAX + 1].join(",");
        for (text, said) in [
            ("1000 5000\n1000 5001\n", "line 2: this user of clients has a line already"),
            ("1000", "line 1: write CLIENTUID SERVERUID"),
            ("1 2 3", "line 1: write CLIENTUID SERVERUID"),
            ("\nalice 5000", "line 2: users and groups are numbers"),
            ("1000 4294967295", "line 1: users and groups are numbers"),
            ("1000 -1", "line 1: users and groups are numbers"),
            ("1000 5000:", "line 1: users and groups are numbers"),
            ("1000 5000\0", "line 1: users and groups are numbers"),
            (&format!("1000 1:{groups}"), "line 1: too many groups"),
            (&many, "more than"),
            (&" ".repeat(FILE_USER_MAP_BYTES_MAX + 1), "longer than"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(said), "{said}: {refused}");
        }
        assert!(read([0xff, b'1']).unwrap_err().contains("UTF-8"));
    }
}
