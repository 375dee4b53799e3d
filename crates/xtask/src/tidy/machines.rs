//! A protocol state machine takes events and the time as arguments and returns actions: it never
//! touches a socket, a file or a clock.

use super::tree::Tree;
use super::{Finding, tokens};

/// The machines. A path that ends with `/` means every Rust file right in that folder. One that is
/// not there is a finding: a renamed machine would lose its check.
const MACHINES: &[&str] = &[
    "crates/frontend/src/fuse/request.rs",
    "crates/frontend/src/fuse/reply.rs",
    "crates/frontend/src/fuse/session.rs",
    "crates/frontend/src/nbd/handshake.rs",
    "crates/frontend/src/nbd/transmission.rs",
    "crates/frontend/src/nbd/client/",
    "crates/fabric/src/session.rs",
    "crates/fabric/src/registration/cache.rs",
    "crates/service/src/block/rate.rs",
    "crates/rpc/src/",
    "crates/service/src/block/client/machine.rs",
    "crates/service/src/coherence/",
    "crates/service/src/dsm/",
    "crates/run/src/walk.rs",
];

/// Modules of `std` that reach outside.
const OUTSIDE: [&str; 2] = ["net", "fs"];
/// Clocks of `std`. A reactor's `Instant` is a number that comes in as an argument, and has no `now`.
const CLOCKS: [&str; 2] = ["Instant", "SystemTime"];

const RULE: &str = "pure-machine";

/// Checks the files in the list.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let found = tree.texts(".rs").filter(|(path, _)| MACHINES.iter().any(|machine| is_of(machine, path)));
    let mut findings: Vec<_> = found.flat_map(|(path, text)| check_file(path, text)).collect();
    if tree.texts(".rs").any(|(path, _)| path == THIS_FILE) {
        let is_there = |machine: &&&str| tree.texts(".rs").any(|(path, _)| is_of(machine, path));
        for machine in MACHINES.iter().filter(|machine| !is_there(machine)) {
            let remedy = format!("{machine} is in the list of state machines and not there: name its new place");
            findings.push(Finding::new(THIS_FILE, 1, RULE, remedy));
        }
    }
    findings
}

/// Where the list is.
const THIS_FILE: &str = "crates/xtask/src/tidy/machines.rs";

fn is_of(machine: &str, path: &str) -> bool {
    path == machine || machine.ends_with('/') && path.strip_prefix(machine).is_some_and(|name| !name.contains('/'))
}

fn check_file(path: &str, text: &str) -> Vec<Finding> {
    let tokens = tokens::of(text);
    let mut findings = Vec::new();
    let mut find = |line, what: &str| {
        let remedy = format!("a state machine mentions {what}: pass it in as an event or argument");
        findings.push(Finding::new(path, line, RULE, remedy));
    };
    let from_std = !tokens::find(&tokens, &["std", ":", ":", "time"]).is_empty();
    for clock in CLOCKS.iter().filter(|_| from_std) {
        let imported = text.contains("byway_reactor::Instant") || text.contains("byway_reactor::{");
        for line in tokens::find(&tokens, &[clock]).into_iter().filter(|_| *clock != "Instant" || !imported) {
            find(line, clock);
        }
    }
    for line in tokens::find(&tokens, &["Instant", ":", ":", "now"]) {
        find(line, "Instant::now");
    }
    for (index, window) in tokens.windows(4).enumerate() {
        let words: Vec<&str> = window.iter().map(|token| token.text.as_str()).collect();
        if words[..3] != ["std", ":", ":"] {
            continue;
        }
        if OUTSIDE.contains(&words[3]) {
            find(window[3].line, &format!("std::{}", words[3]));
        } else if words[3] == "{" {
            // `use std::{fs, net::TcpStream}`: a word right after `{` or `,` names a module.
            let list = &tokens[index + 3..];
            let end = list.iter().position(|token| token.text == ";").unwrap_or(list.len());
            for pair in list[..end].windows(2) {
                if ["{", ","].contains(&pair[0].text.as_str()) && OUTSIDE.contains(&pair[1].text.as_str()) {
                    find(pair[1].line, &format!("std::{}", pair[1].text));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = "crates/fabric/src/session.rs";

    fn findings(path: &str, text: &str) -> Vec<Finding> {
        check(&Tree::of(&[(path, text)]))
    }

    #[test]
    fn sockets_files_and_clocks_are_found() {
        for text in [
            "use std::net::TcpStream;\n",
            "fn f() { std::fs::read(\"a\"); }\n",
            "use std::{\n    collections::HashMap,\n    fs::File,\n};\n",
            "use std::time::{Duration, Instant};\n",
            "fn f() { let now = std::time::SystemTime::now(); }\n",
        ] {
            assert_eq!(findings(MACHINE, text).len(), 1, "{text}");
        }
    }

    #[test]
    fn time_as_an_argument_and_other_files_are_fine() {
        assert!(findings(MACHINE, "use std::time::Duration;\n/// Never std::fs.\nfn f() {}\n").is_empty());
        assert!(findings("crates/frontend/src/nbd/driver.rs", "use std::net::TcpStream;\n").is_empty());
        assert_eq!(findings("crates/rpc/src/connection.rs", "use std::net::TcpStream;\n").len(), 1);
    }
}
