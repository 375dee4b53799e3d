//! Every crate with queues, tables and buffers has one file that bounds them all.

use super::{Finding, tree::Tree};

const WITH_QUEUES: [&str; 6] = ["reactor", "fabric", "rpc", "service", "dsm", "frontend"];

/// Checks that `limits.rs` is there in each crate that has more than its root.
pub fn check(tree: &Tree) -> Vec<Finding> {
    WITH_QUEUES
        .iter()
        .filter_map(|name| {
            let source = format!("crates/{name}/src/");
            let root = format!("{source}lib.rs");
            let has_code = tree.paths().any(|path| path.starts_with(&source) && path != root);
            let limits = format!("{source}limits.rs");
            (has_code && !tree.contains(&limits)).then(|| {
                let remedy = format!("{limits} is missing: put the crate's limits there, each with what happens at it");
                Finding::new(&root, 1, "limits", remedy)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_without_limits_is_found() {
        let mut files = vec![("crates/rpc/src/lib.rs", ""), ("crates/rpc/src/queue.rs", "")];
        assert_eq!(check(&Tree::of(&files)).len(), 1);
        files.push(("crates/rpc/src/limits.rs", ""));
        assert!(check(&Tree::of(&files)).is_empty());
    }

    #[test]
    fn an_empty_crate_and_the_program_need_none() {
        assert!(check(&Tree::of(&[("crates/rpc/src/lib.rs", "")])).is_empty());
        assert!(check(&Tree::of(&[("crates/byway/src/a.rs", "")])).is_empty());
    }
}
