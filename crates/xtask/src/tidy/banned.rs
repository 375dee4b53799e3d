//! What must not be committed: ignored tests, tests that skip in silence, holes in the code, and notes to oneself.

use super::tree::Tree;
use super::{Finding, tokens};

/// Token sequences and what to do instead.
const CODE: [(&[&str], &str); 4] = [
    (&["#", "[", "ignore"], "mend the test or take it out; a skip is printed at run time"),
    (&["todo", "!"], "write it, or leave it out"),
    (&["unimplemented", "!"], "return an error that says so, or leave it out"),
    (&["dbg", "!"], "take it out, or trace it with the `tracing` crate"),
];

/// Written apart, so that this file does not find itself.
const NOTES: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Ends of the names of files that are searched for notes.
const NOTED: [&str; 5] = [".rs", ".toml", ".sh", ".yml", ".ci/run"];

/// How a test that cannot run speaks to nobody: what a test prints that passes is hidden. In small letters.
const SILENT_SKIP: &str = concat!("println!(\"", "skip");

/// Whose prints are read by people.
const TASKS: &str = "crates/xtask/";

const RULE: &str = "banned";

/// Checks every file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(".rs") {
        let tokens = tokens::of(text);
        for (words, instead) in CODE {
            for line in tokens::find(&tokens, words) {
                let remedy = format!("`{}` is not committed: {instead}", words.concat());
                findings.push(Finding::new(path, line, RULE, remedy));
            }
        }
        let is_silent = |line: &str| line.to_ascii_lowercase().contains(SILENT_SKIP);
        for (index, _) in text.lines().enumerate().filter(|(_, line)| !path.starts_with(TASKS) && is_silent(line)) {
            let remedy = "nobody sees what a test prints that passes: say it by byway_skip, which also counts it";
            findings.push(Finding::new(path, index + 1, RULE, remedy));
        }
    }
    for (path, text) in NOTED.iter().flat_map(|end| tree.texts(end)) {
        for (index, line) in text.lines().enumerate() {
            let mut words = line.split(|character: char| !character.is_alphanumeric());
            if let Some(note) = words.find(|word| NOTES.contains(word)) {
                let remedy = format!("{note} has no owner here: do it, or open an issue");
                findings.push(Finding::new(path, index + 1, RULE, remedy));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_and_ignored_tests_are_found() {
        for text in [
            "#[ignore]\n#[test]\nfn f() {}\n",
            "#[ignore = \"slow\"]\n#[test]\nfn f() {}\n",
            "fn f() { todo!() }\n",
            "fn f() { vec![dbg!(1)]; }\n",
            "fn f() { unimplemented!(\"later\") }\n",
        ] {
            let found = check(&Tree::of(&[("crates/rpc/src/a.rs", text)]));
            assert_eq!(found.len(), 1, "{text}");
        }
    }

    #[test]
    fn a_skip_that_is_only_printed_is_found() {
        let text = "fn f() {\n    return e!(\"SKIP: no device\");\n}\n".replace("e!", "eprintln!");
        let found = check(&Tree::of(&[("crates/rpc/tests/a.rs", &text)]));
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2]);
        assert!(check(&Tree::of(&[("crates/xtask/src/peers.rs", &text)])).is_empty());
    }

    #[test]
    fn notes_are_found_in_code_and_scripts() {
        for path in ["crates/rpc/src/a.rs", "deny.toml", ".ci/run"] {
            let text = format!("\n# {}: later\n", NOTES[0]);
            let found = check(&Tree::of(&[(path, &text)]));
            assert!(found.iter().any(|finding| finding.line == 2), "{path}");
        }
        assert!(check(&Tree::of(&[("a.rs", "// a todo list is fine\n")])).is_empty());
    }
}
