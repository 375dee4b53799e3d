//! The files that ARCHITECTURE.md names exist.

use super::{Finding, tree::Tree};

const MAP: &str = "ARCHITECTURE.md";

/// Checks the places that the map names whole: `CRATE/PATH`, without `src`, a file with or without its ending or a folder.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(MAP).filter(|(path, _)| *path == MAP) {
        for (index, line) in text.lines().enumerate() {
            for place in line.split('`').skip(1).step_by(2).filter(|place| !is_there(tree, place)) {
                let remedy = format!("{place} is not in the tree: say where it lies now");
                findings.push(Finding::new(path, index + 1, "map", remedy));
            }
        }
    }
    findings
}

/// Whether a place is there; what does not begin with a crate is no place, or a part of one that was named before.
fn is_there(tree: &Tree, place: &str) -> bool {
    let Some((name, inside)) = place.split_once('/') else { return true };
    if name.is_empty() || !tree.contains(&format!("crates/{name}")) {
        return true;
    }
    let whole = format!("crates/{name}/src/{inside}");
    tree.contains(&whole) || tree.contains(&format!("{whole}.rs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_has_moved_is_found() {
        let tree = |text| Tree::of(&[(MAP, text), ("crates/a/src/b.rs", ""), ("crates/a/src/c/mod.rs", "")]);
        assert_eq!(
            check(&tree("`a/b.rs`, `a/c`, `a/c/` and `a/b` are in `crates/a`; `d/e.rs` is of no crate, `/f` no place")),
            []
        );
        let found = check(&tree("`a/b.rs`\nand `a/d.rs`, `a/c/b.rs`"));
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2, 2]);
    }
}
