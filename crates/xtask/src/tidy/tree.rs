//! The files that the rules look at.

use super::Finding;
use crate::process;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Ends of the names of files whose text some rule reads.
const TEXT: [&str; 6] = [".rs", ".md", ".toml", ".sh", ".yml", ".ci/run"];

/// All files that git knows or would add, and the text of those that rules read.
pub struct Tree {
    paths: BTreeSet<String>,
    texts: BTreeMap<String, String>,
}

impl Tree {
    /// Reads the working tree under `root`.
    pub fn read(root: &Path) -> Result<Self> {
        let listing = process::output(Command::new("git").arg("-C").arg(root).args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let mut tree = Self { paths: BTreeSet::new(), texts: BTreeMap::new() };
        for path in listing.split('\0').filter(|path| !path.is_empty()) {
            let file = root.join(path);
            if !file.is_file() {
                continue; // deleted and not yet committed
            }
            tree.paths.insert(path.to_owned());
            if TEXT.iter().any(|end| path.ends_with(end)) {
                let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
                tree.texts.insert(path.to_owned(), text);
            }
        }
        Ok(tree)
    }

    /// A tree of these files, for the tests of the rules.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let texts: BTreeMap<String, String> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        Self { paths: texts.keys().cloned().collect(), texts }
    }

    /// How many files there are.
    pub fn file_count(&self) -> usize {
        self.paths.len()
    }

    /// Whether a file or folder is there.
    pub fn contains(&self, path: &str) -> bool {
        let folder = format!("{}/", path.trim_end_matches('/'));
        path.is_empty()
            || self.paths.contains(path)
            || self.paths.range(folder.clone()..).next().is_some_and(|next| next.starts_with(&folder))
    }

    /// All paths.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.paths.iter().map(String::as_str)
    }

    /// Path and text of the files whose name ends so.
    pub fn texts<'a>(&'a self, end: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.texts
            .iter()
            .filter(move |(path, _)| path.ends_with(end))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }
}

/// The crate that a path lies in.
pub fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.split_once('/').map(|(name, _)| name)
}

/// Every other rule passes over a file that does not parse, so that is a finding of its own.
pub fn check_syntax(tree: &Tree) -> Vec<Finding> {
    tree.texts(".rs")
        .filter_map(|(path, text)| {
            let error = syn::parse_file(text).err()?;
            let line = error.span().start().line;
            Some(Finding::new(path, line, "syntax", format!("does not parse: {error}")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_parse_is_found() {
        let tree = Tree::of(&[("crates/rpc/src/lib.rs", "fn good() {}\nfn bad( {}\n")]);
        assert_eq!(check_syntax(&tree)[0].line, 2);
    }

    #[test]
    fn folders_are_known_by_their_files() {
        let tree = Tree::of(&[("docs/wire.md", "")]);
        assert!(tree.contains("docs") && tree.contains("docs/") && tree.contains("docs/wire.md"));
        assert!(!tree.contains("doc") && !tree.contains("docs/wire"));
    }
}
