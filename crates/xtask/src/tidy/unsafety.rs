//! `unsafe` only at the edges, and each use with the invariant that makes it sound.

use super::tree::{Tree, crate_of};
use super::{Finding, tokens};

/// The crates that may say `unsafe`; every other crate forbids it.
const EDGES: [&str; 7] = ["reactor", "fabric", "dsm", "frontend", "preload", "run", "capi"];

/// Roots that cannot carry the attribute: the fuzzer's macro expands to an exported symbol.
const WITHOUT_ATTRIBUTE: [&str; 1] = ["fuzz"];

/// How many lines that are not comments may stand between the comment and the word.
const COMMENT_DISTANCE_LINES: usize = 4;

const RULE: &str = "unsafe";

/// Checks every Rust file in `crates/`.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(".rs") {
        let Some(crate_name) = crate_of(path) else {
            continue;
        };
        if EDGES.contains(&crate_name) {
            check_comments(path, text, &mut findings);
            continue;
        }
        for line in tokens::find(&tokens::of(text), &["unsafe"]) {
            let remedy =
                format!("only {} may use unsafe: move this to one of them behind a safe function", EDGES.join(", "));
            findings.push(Finding::new(path, line, RULE, remedy));
        }
        if is_root(path, crate_name) && !WITHOUT_ATTRIBUTE.contains(&crate_name) {
            let forbid = ["#", "!", "[", "forbid", "(", "unsafe_code", ")", "]"];
            if tokens::find(&tokens::of(text), &forbid).is_empty() {
                let remedy = "add #![forbid(unsafe_code)] to this crate root";
                findings.push(Finding::new(path, 1, RULE, remedy));
            }
        }
    }
    findings
}

fn is_root(path: &str, crate_name: &str) -> bool {
    let rest = path.strip_prefix(&format!("crates/{crate_name}/src/")).unwrap_or_default();
    let binary = rest.strip_prefix("bin/").is_some_and(|name| !name.contains('/'));
    rest == "lib.rs" || rest == "main.rs" || binary
}

fn check_comments(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = text.lines().collect();
    let tokens = tokens::of(text);
    let mut places = tokens::find(&tokens, &["unsafe", "{"]);
    places.extend(tokens::find(&tokens, &["unsafe", "impl"]));
    for line in places {
        if !has_comment(&lines, line) {
            let remedy = "put a `// SAFETY:` comment that names the invariant just above";
            findings.push(Finding::new(path, line, RULE, remedy));
        }
    }
}

/// Comment lines between do not count, so that a long reason may be given.
fn has_comment(lines: &[&str], line: usize) -> bool {
    let mut others = 0;
    for above in lines[..line].iter().rev() {
        if above.contains("SAFETY:") {
            return true;
        }
        if !above.trim_start().starts_with("//") {
            others += 1;
        }
        // The word's own line is one of the others.
        if others > COMMENT_DISTANCE_LINES {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<Finding> {
        check(&Tree::of(&[(path, text)]))
    }

    #[test]
    fn a_block_without_a_comment_is_found() {
        let found = findings("crates/frontend/src/a.rs", "fn f() {\n    unsafe { g() }\n}\n");
        assert_eq!(found[0].line, 2);
        let good = "fn f() {\n    // SAFETY: g is always sound.\n    unsafe { g() }\n}\n";
        assert!(findings("crates/frontend/src/a.rs", good).is_empty());
        assert_eq!(findings("crates/frontend/src/a.rs", "unsafe impl Send for A {}\n").len(), 1);
    }

    #[test]
    fn a_comment_too_far_above_does_not_count() {
        let far = "// SAFETY: x\nfn a() {}\nfn b() {}\nfn c() {}\nfn d() {}\nfn e() { unsafe { g() } }\n";
        assert_eq!(findings("crates/frontend/src/a.rs", far).len(), 1);
        let near = "// SAFETY: x\nfn b() {}\nfn c() {}\nfn d() { unsafe { g() } }\n";
        assert!(findings("crates/frontend/src/a.rs", near).is_empty());
    }

    #[test]
    fn other_crates_must_forbid_it_and_do_without() {
        let text = "#![forbid(unsafe_code)]\nfn f() {}\n";
        assert!(findings("crates/rpc/src/lib.rs", text).is_empty());
        assert_eq!(findings("crates/rpc/src/lib.rs", "fn f() {}\n").len(), 1);
        assert_eq!(findings("crates/e2e/tests/a.rs", "fn f() { unsafe { g() } }\n").len(), 1);
    }
}
