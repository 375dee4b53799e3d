//! Decisions are numbered in the order in which they were taken, without gaps.

use super::{Finding, tree::Tree};

const FOLDER: &str = "docs/decisions/";

/// Checks the names of the files in `docs/decisions`; only README.md has no number.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut next = 1;
    for path in tree.paths() {
        let Some(name) = path.strip_prefix(FOLDER) else {
            continue;
        };
        if name == "README.md" {
            continue;
        }
        // The paths come in order, so numbers of four digits do too.
        let number = name.split_once('-').filter(|(digits, _)| digits.len() == 4);
        match number.and_then(|(digits, _)| digits.parse::<usize>().ok()) {
            Some(number) if number == next => next += 1,
            Some(number) => {
                let remedy = format!("numbered {number:04}, expected {next:04}: number without gaps");
                findings.push(Finding::new(path, 1, "decisions", remedy));
                next = number + 1;
            }
            None => {
                let remedy = "name it NNNN-title.md, with the next free number";
                findings.push(Finding::new(path, 1, "decisions", remedy));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(names: &[&str]) -> usize {
        let paths: Vec<String> = names.iter().map(|name| format!("{FOLDER}{name}")).collect();
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (path.as_str(), "")).collect();
        check(&Tree::of(&files)).len()
    }

    #[test]
    fn gaps_twins_and_missing_numbers_are_found() {
        assert_eq!(findings(&["README.md", "0001-a.md", "0002-b.md"]), 0);
        assert_eq!(findings(&["0001-a.md", "0003-b.md"]), 1);
        assert_eq!(findings(&["0001-a.md", "0001-b.md"]), 1);
        assert_eq!(findings(&["0001-a.md", "why.md"]), 1);
    }
}
