//! A crate depends only on crates below it.

use super::{Finding, tree::Tree};
use toml::{Table, Value};

/// The layers, from the lowest to the highest.
const LAYERS: [&str; 9] = [
    "byway-reactor",
    "byway-fabric",
    "byway-rpc",
    "byway-service",
    "byway-dsm",
    "byway-frontend",
    "byway-remote",
    "byway-bench",
    "byway",
];

/// Packages beside the layers: each may use any layer, and no layer uses them.
const BESIDE: [&str; 7] =
    ["byway-preload", "byway-run", "byway-capi", "byway-xtask", "byway-e2e", "byway-skip", "byway-fuzz"];

const RULE: &str = "layers";

/// Checks every manifest in `crates/`.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts("/Cargo.toml").filter(|(path, _)| path.starts_with("crates/")) {
        match text.parse::<Table>() {
            Ok(manifest) => check_manifest(path, text, &manifest, &mut findings),
            Err(error) => findings.push(Finding::new(path, 1, RULE, format!("not TOML: {error}"))),
        }
    }
    findings
}

fn check_manifest(path: &str, text: &str, manifest: &Table, findings: &mut Vec<Finding>) {
    let name =
        manifest.get("package").and_then(|package| package.get("name")).and_then(Value::as_str).unwrap_or_default();
    if BESIDE.contains(&name) {
        return;
    }
    let Some(layer) = LAYERS.iter().position(|candidate| *candidate == name) else {
        let remedy = format!("package {name:?} has no layer: give it one in tidy/layers.rs");
        findings.push(Finding::new(path, 1, RULE, remedy));
        return;
    };
    for dependency in dependencies(manifest).filter(|dependency| dependency.starts_with("byway")) {
        if LAYERS[..layer].contains(&dependency.as_str()) {
            continue;
        }
        let line = 1 + text.lines().position(|line| line.contains(&dependency)).unwrap_or(0);
        let below = LAYERS[..layer].join(", ");
        let remedy = format!(
            "{name} may depend only on what is below it ({below}), not on {dependency}: move the \
             shared part down to the lowest layer that owns it"
        );
        findings.push(Finding::new(path, line, RULE, remedy));
    }
}

/// The packages of the normal and build dependencies, those of each target too.
fn dependencies(manifest: &Table) -> impl Iterator<Item = String> {
    let targets = manifest.get("target").and_then(Value::as_table);
    let tables = std::iter::once(manifest)
        .chain(targets.into_iter().flat_map(|targets| targets.values().filter_map(Value::as_table)));
    tables
        .flat_map(|table| ["dependencies", "build-dependencies"].map(|key| table.get(key)))
        .flatten()
        .filter_map(Value::as_table)
        .flatten()
        .map(|(key, value)| {
            let package = value.get("package").and_then(Value::as_str);
            package.unwrap_or(key).to_owned()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(package: &str, rest: &str) -> Vec<Finding> {
        let text = format!("[package]\nname = \"{package}\"\n{rest}");
        check(&Tree::of(&[("crates/some/Cargo.toml", &text)]))
    }

    #[test]
    fn a_dependency_on_the_floor_above_is_found() {
        let found = findings("byway-rpc", "[dependencies]\nbyway-service = { workspace = true }\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 4);
        assert!(findings("byway-service", "[dependencies]\nbyway-rpc = \"1\"\nslab = \"1\"\n").is_empty());
    }

    #[test]
    fn a_renamed_build_or_target_dependency_is_found() {
        let build = "[build-dependencies]\nlower = { package = \"byway-frontend\" }\n";
        assert_eq!(findings("byway-fabric", build).len(), 1);
        let target = "[target.'cfg(unix)'.dependencies]\nbyway-frontend = \"1\"\n";
        assert_eq!(findings("byway-fabric", target).len(), 1);
    }

    #[test]
    fn tests_and_tools_are_exempt_but_nothing_may_use_the_tools() {
        assert!(findings("byway-rpc", "[dev-dependencies]\nbyway-service = \"1\"\n").is_empty());
        assert!(findings("byway-e2e", "[dependencies]\nbyway = \"1\"\n").is_empty());
        assert_eq!(findings("byway", "[dependencies]\nbyway-xtask = \"1\"\n").len(), 1);
        assert_eq!(findings("byway-common", "").len(), 1);
    }
}
