//! `cargo xtask tidy`: the rules of ARCHITECTURE.md that no compiler checks.
//!
//! Each rule is a file of its own with one function from the tree to its findings, and a test that shows that the rule can
//! fail.

mod banned;
mod bounds;
mod decisions;
mod layers;
mod links;
mod machines;
mod map;
mod sizes;
mod tokens;
mod tree;
mod unsafety;

use crate::process;
use anyhow::{Result, bail};
use std::fmt;
use tree::Tree;

/// A place where a rule is broken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Relative to the workspace root.
    file: String,
    /// From 1; 1 too where a whole file is meant.
    line: usize,
    /// The rule's short name.
    rule: &'static str,
    /// What is wrong and what to do about it.
    remedy: String,
}

impl Finding {
    fn new(file: &str, line: usize, rule: &'static str, remedy: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, rule, remedy: remedy.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}: {}: {}", self.file, self.line, self.rule, self.remedy)
    }
}

type Rule = fn(&Tree) -> Vec<Finding>;

const RULES: [Rule; 10] = [
    tree::check_syntax,
    layers::check,
    unsafety::check,
    sizes::check,
    machines::check,
    bounds::check,
    banned::check,
    links::check,
    map::check,
    decisions::check,
];

/// Checks the workspace that this program was built from.
pub fn run() -> Result<()> {
    let tree = Tree::read(&process::workspace_root())?;
    for note in sizes::notes(&tree) {
        println!("note: {note}");
    }
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(&tree)).collect();
    findings.sort();
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("tidy: {} findings in {} files", findings.len(), tree.file_count());
    }
    println!("tidy: {} files, no findings", tree.file_count());
    Ok(())
}
