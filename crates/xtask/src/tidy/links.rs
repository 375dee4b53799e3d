//! Relative links in the documents lead somewhere.

use super::{Finding, tree::Tree};

/// Checks every Markdown file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(".md") {
        let mut in_code = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
            }
            if in_code {
                continue;
            }
            for target in targets(line) {
                let found = resolve(path, target).is_some_and(|resolved| tree.contains(&resolved));
                if !found {
                    let remedy = format!("link to {target} leads nowhere: correct or remove it");
                    findings.push(Finding::new(path, index + 1, "links", remedy));
                }
            }
        }
    }
    findings
}

/// The relative targets of `[text](target)` in a line, code spans left out, anchors cut off.
fn targets(line: &str) -> Vec<&str> {
    let mut targets = Vec::new();
    // Every second part between backquotes is code.
    for (index, text) in line.split('`').enumerate() {
        // A link whose text is code has its target in the part after it.
        if index % 2 == 1 {
            continue;
        }
        let mut rest = text;
        while let Some((_, after)) = rest.split_once("](") {
            let Some((inside, following)) = after.split_once(')') else {
                break;
            };
            rest = following;
            let target = inside.split_whitespace().next().unwrap_or_default();
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                targets.push(path);
            }
        }
    }
    targets
}

/// The path from the root; none where it leaves the tree.
fn resolve(file: &str, target: &str) -> Option<String> {
    let (mut parts, target): (Vec<&str>, &str) = match target.strip_prefix('/') {
        Some(from_root) => (Vec::new(), from_root),
        None => (file.split('/').collect(), target),
    };
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<Finding> {
        check(&Tree::of(&[("docs/wire.md", text), ("README.md", ""), ("crates/a/b.rs", "")]))
    }

    #[test]
    fn a_link_to_nothing_is_found() {
        assert_eq!(findings("text\n[a](nothing.md)\n")[0].line, 2);
        assert_eq!(findings("[a](../../outside.md) and [`b`](../crates/c)\n").len(), 2);
    }

    #[test]
    fn good_links_anchors_addresses_and_code_are_fine() {
        let text = "[a](../README.md#top) [b](https://example.org/a.md) [c](#here) [d](../crates/a/)\n\
                    `[e](nothing)`\n```\n[f](nothing)\n```\n[`g`](../crates/a/b.rs \"title\")\n";
        assert_eq!(findings(text), []);
    }
}
