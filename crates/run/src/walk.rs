//! Paths: from a text to a node of the share, one name at a time.
//!
//! Pure but for [`Names`], which asks the server. A symbolic link is followed as a mount's would be: an absolute target is a path of
//! this machine, and may lead back below the prefix, or out of the share.

use byway_service::file::client::Found;
use rustix::io::Errno;

/// The kernel's own bound on symbolic links in a path.
const LINKS_MAX: u32 = 40;

/// Bytes of a path, as the kernel bounds them.
const PATH_MAX: usize = 4096;

/// What the walk asks of the share.
pub(crate) trait Names {
    /// Finds a name. The node is held until it is forgotten.
    fn look_up(&self, directory: u64, name: &[u8]) -> Result<Found, Errno>;
    /// The target of a symbolic link.
    fn target(&self, link: u64) -> Result<Vec<u8>, Errno>;
    /// The root's attributes.
    fn root(&self) -> Result<Found, Errno>;
    /// What of a path of this machine lies below the prefix of this share; `None` if the path does not.
    fn below<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]>;
    /// The prefix.
    fn prefix(&self) -> &[u8];
}

/// A name in a directory, and its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: Vec<u8>,
    pub(crate) found: Found,
}

/// Where a path leads.
#[derive(Debug)]
pub(crate) enum Walked {
    /// Into the share.
    Inside(Place),
    /// To this path of the machine.
    Outside(Vec<u8>),
}

/// A place in the share, which may be empty.
#[derive(Debug)]
pub(crate) struct Place {
    /// The directories from the root, which is not among them, to the last name's.
    pub(crate) above: Vec<Step>,
    /// The last name. None: the path ends with a directory that it does not name (the root, `.`, `..`).
    pub(crate) name: Option<Vec<u8>>,
    /// The directory of the last name; the directory itself if there is none.
    pub(crate) directory: u64,
    /// What is there.
    pub(crate) found: Option<Found>,
    /// The path ends with a slash.
    pub(crate) wants_directory: bool,
}

impl Place {
    /// What is there.
    ///
    /// # Errors
    /// `ENOENT`; `ENOTDIR` for a file whose path ends with a slash.
    pub(crate) fn there(&self) -> Result<Found, Errno> {
        let found = self.found.ok_or(Errno::NOENT)?;
        if self.wants_directory && !is(&found, libc::S_IFDIR) { Err(Errno::NOTDIR) } else { Ok(found) }
    }

    /// The path below the prefix, without symbolic links.
    pub(crate) fn path(&self) -> Vec<u8> {
        let names = self.above.iter().map(|step| step.name.as_slice()).chain(self.name.as_deref());
        names.collect::<Vec<_>>().join(&b'/')
    }
}

/// Whether it is of that type (`S_IFMT`).
pub(crate) fn is(found: &Found, kind: u32) -> bool {
    found.attributes.mode.get() & libc::S_IFMT == kind
}

/// Walks a path from a directory on. `follow`: also a symbolic link at its end.
///
/// # Errors
/// The server's; `ELOOP`, `ENOTDIR`, `ENAMETOOLONG`; `ENOENT` for a missing directory, or an empty path.
pub(crate) fn walk(names: &impl Names, start: &[Step], root: u64, path: &[u8], follow: bool) -> Result<Walked, Errno> {
    let mut walk = Walk { above: start.to_vec(), root, rest: Vec::new(), links: 0 };
    walk.push(path)?;
    walk.run(names, follow)
}

struct Walk {
    above: Vec<Step>,
    root: u64,
    /// Names still to go, the next one last.
    rest: Vec<Vec<u8>>,
    links: u32,
}

impl Walk {
    /// Puts a path before what is left.
    fn push(&mut self, path: &[u8]) -> Result<(), Errno> {
        if path.len() >= PATH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        // The name behind a last slash is empty: it wants a directory.
        let mut parts: Vec<Vec<u8>> = path.split(|byte| *byte == b'/').map(<[u8]>::to_vec).collect();
        let ends = parts.last().is_some_and(Vec::is_empty) && parts.iter().any(|part| !part.is_empty());
        parts.retain(|part| !part.is_empty());
        if ends && self.rest.is_empty() {
            parts.push(Vec::new());
        }
        self.rest.extend(parts.into_iter().rev());
        Ok(())
    }

    fn directory(&self) -> u64 {
        self.above.last().map_or(self.root, |step| step.found.node)
    }

    fn run(mut self, names: &impl Names, follow: bool) -> Result<Walked, Errno> {
        while let Some(name) = self.rest.pop() {
            if name.is_empty() || name == b"." {
                continue;
            }
            if name == b".." {
                if self.above.pop().is_none() {
                    // The prefix itself is no directory of this machine.
                    let prefix = names.prefix();
                    let above = prefix.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
                    return Ok(Walked::Outside(self.outside(&prefix[..above])));
                }
                continue;
            }
            let wants_directory = self.rest.last().is_some_and(Vec::is_empty);
            let is_last = self.rest.is_empty() || (wants_directory && self.rest.len() == 1);
            let found = match names.look_up(self.directory(), &name) {
                Err(Errno::NOENT) if is_last => return Ok(self.end(Some(name), None, wants_directory)),
                found => found?,
            };
            if is(&found, libc::S_IFLNK) && (!is_last || follow || wants_directory) {
                let target = names.target(found.node)?;
                if let Some(outside) = self.follow(names, &target)? {
                    return Ok(Walked::Outside(outside));
                }
            } else if is_last {
                return Ok(self.end(Some(name), Some(found), wants_directory));
            } else if is(&found, libc::S_IFDIR) {
                self.above.push(Step { name, found });
            } else {
                return Err(Errno::NOTDIR);
            }
        }
        let found = self.above.last().map_or_else(|| names.root(), |step| Ok(step.found))?;
        Ok(self.end(None, Some(found), true))
    }

    /// Goes on with a link's target; a path of this machine if it leads out of the share.
    fn follow(&mut self, names: &impl Names, target: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(Errno::LOOP);
        }
        if target.first() != Some(&b'/') {
            self.push(target)?;
            return Ok(None);
        }
        let Some(below) = names.below(target) else {
            return Ok(Some(self.outside(target)));
        };
        self.above.clear();
        self.push(below)?;
        Ok(None)
    }

    fn outside(&self, from: &[u8]) -> Vec<u8> {
        let mut path = from.to_vec();
        for name in self.rest.iter().rev().filter(|name| !name.is_empty()) {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        if path.is_empty() {
            path.push(b'/');
        }
        path
    }

    fn end(self, name: Option<Vec<u8>>, found: Option<Found>, wants_directory: bool) -> Walked {
        let directory = self.directory();
        Walked::Inside(Place { above: self.above, name, directory, found, wants_directory })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use byway_service::file::wire::Attributes;

    use super::*;

    const ROOT: u64 = 1;

    /// A tree in memory: names by directory, and targets of links.
    #[derive(Default)]
    struct Tree {
        names: HashMap<(u64, Vec<u8>), Found>,
        targets: HashMap<u64, Vec<u8>>,
    }

    impl Tree {
        fn add(&mut self, directory: u64, name: &str, node: u64, kind: u32) -> u64 {
            let found = Found { node, attributes: Attributes { mode: kind.into(), ..Attributes::default() } };
            self.names.insert((directory, name.into()), found);
            node
        }

        fn link(&mut self, directory: u64, name: &str, node: u64, target: &str) {
            self.add(directory, name, node, libc::S_IFLNK);
            self.targets.insert(node, target.into());
        }

        /// The path and the node that a path leads to; `>` before one that leads out of the share.
        fn leads(&self, path: &str, follow: bool) -> Result<(String, Option<u64>), Errno> {
            Ok(match walk(self, &[], ROOT, path.as_bytes(), follow)? {
                Walked::Inside(place) => {
                    (String::from_utf8(place.path()).unwrap(), place.found.map(|found| found.node))
                }
                Walked::Outside(path) => (format!(">{}", String::from_utf8(path).unwrap()), None),
            })
        }
    }

    impl Names for Tree {
        fn look_up(&self, directory: u64, name: &[u8]) -> Result<Found, Errno> {
            self.names.get(&(directory, name.to_vec())).copied().ok_or(Errno::NOENT)
        }

        fn target(&self, link: u64) -> Result<Vec<u8>, Errno> {
            Ok(self.targets[&link].clone())
        }

        fn root(&self) -> Result<Found, Errno> {
            Ok(Found { node: ROOT, attributes: Attributes { mode: libc::S_IFDIR.into(), ..Attributes::default() } })
        }

        fn below<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
            path.strip_prefix(b"/share")
        }

        fn prefix(&self) -> &[u8] {
            b"/share"
        }
    }

    fn tree() -> Tree {
        let mut tree = Tree::default();
        let a = tree.add(ROOT, "a", 10, libc::S_IFDIR);
        tree.add(a, "file", 11, libc::S_IFREG);
        tree.link(a, "near", 12, "../a/file");
        tree.link(a, "far", 13, "/etc/hosts");
        tree.link(a, "back", 14, "/share/a");
        tree.link(ROOT, "circle", 15, "circle");
        tree
    }

    #[test]
    fn a_path_leads_to_what_a_mount_would_show() {
        let tree = tree();
        let at = |path: &str, node| Ok((path.to_owned(), node));
        assert_eq!(tree.leads("a/file", true), at("a/file", Some(11)));
        assert_eq!(tree.leads("/a//./file", true), at("a/file", Some(11)));
        assert_eq!(tree.leads("", true), at("", Some(ROOT)));
        assert_eq!(tree.leads("a/..", true), at("", Some(ROOT)));
        assert_eq!(tree.leads("a/new", true), at("a/new", None));
        assert_eq!(tree.leads("a/new/", true), at("a/new", None), "mkdir takes it");
        assert_eq!(tree.leads("a/none/file", true), Err(Errno::NOENT));
        assert_eq!(tree.leads("a/file/x", true), Err(Errno::NOTDIR));
    }

    #[test]
    fn links_are_followed_where_they_are_to_be() {
        let tree = tree();
        let at = |path: &str, node| Ok((path.to_owned(), node));
        assert_eq!(tree.leads("a/near", true), at("a/file", Some(11)));
        assert_eq!(tree.leads("a/near", false), at("a/near", Some(12)));
        assert_eq!(tree.leads("a/back/back/file", false), at("a/file", Some(11)));
        assert_eq!(tree.leads("a/back/", false), at("a", Some(10)), "a slash behind a link follows it");
        assert_eq!(tree.leads("circle", true), Err(Errno::LOOP));
    }

    #[test]
    fn a_path_may_lead_out_of_the_share() {
        let tree = tree();
        let out = |path: &str| Ok((format!(">{path}"), None));
        assert_eq!(tree.leads("a/far", true), out("/etc/hosts"));
        assert_eq!(tree.leads("a/../../etc/x", true), out("/etc/x"));
        assert_eq!(tree.leads("a/far/x/y", true), out("/etc/hosts/x/y"));
    }

    #[test]
    fn a_file_with_a_slash_behind_it_is_no_directory() {
        let Walked::Inside(place) = walk(&tree(), &[], ROOT, b"a/file/", true).unwrap() else { panic!("inside") };
        assert_eq!(place.there().unwrap_err(), Errno::NOTDIR);
    }
}
