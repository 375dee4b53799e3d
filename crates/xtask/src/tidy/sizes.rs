//! Limits the sizes of files and functions.

use super::{Finding, tree::Tree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A file over this is listed, so that it is divided before it must be.
const FILE_NOTE_LINES: usize = 400;
/// A file over this fails.
const FILE_LINES_MAX: usize = 600;
/// Tests are read one by one, so a file of them may be longer.
const TEST_FILE_LINES_MAX: usize = 900;
/// A function over this fails; counted from `fn` to the closing brace.
const FUNCTION_LINES_MAX: usize = 70;

/// Checks every Rust file.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.texts(".rs") {
        let lines = text.lines().count();
        let limit = if is_test(path) { TEST_FILE_LINES_MAX } else { FILE_LINES_MAX };
        if lines > limit {
            let remedy = format!("{lines} lines, at most {limit}: give one of its jobs a file");
            findings.push(Finding::new(path, 1, "file-length", remedy));
        }
        if let Ok(file) = syn::parse_file(text) {
            let mut functions = Functions { path, findings: Vec::new() };
            functions.visit_file(&file);
            findings.append(&mut functions.findings);
        }
    }
    findings
}

/// Files that are getting long.
pub fn notes(tree: &Tree) -> Vec<String> {
    tree.texts(".rs")
        .filter(|(path, _)| !is_test(path))
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| (FILE_NOTE_LINES + 1..=FILE_LINES_MAX).contains(lines))
        .map(|(path, lines)| format!("{path} has {lines} lines (near {FILE_NOTE_LINES} is meant)"))
        .collect()
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs")
}

struct Functions<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let first = signature.fn_token.span().start().line;
        let lines = body.brace_token.span.close().end().line + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let name = &signature.ident;
            let remedy = format!("{name} has {lines} lines, at most {FUNCTION_LINES_MAX}: name its parts as functions");
            self.findings.push(Finding::new(self.path, first, "function-length", remedy));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.measure(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.measure(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(body) = &function.default {
            self.measure(&function.sig, body);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<Finding> {
        check(&Tree::of(&[(path, text)]))
    }

    #[test]
    fn a_long_file_is_found_and_tests_may_be_longer() {
        let long = "// line\n".repeat(FILE_LINES_MAX + 1);
        assert_eq!(findings("crates/rpc/src/a.rs", &long).len(), 1);
        assert!(findings("crates/rpc/src/a/tests.rs", &long).is_empty());
        assert!(findings("crates/rpc/tests/a.rs", &long).is_empty());
        let longer = "// line\n".repeat(TEST_FILE_LINES_MAX + 1);
        assert_eq!(findings("crates/rpc/tests/a.rs", &longer).len(), 1);
    }

    #[test]
    fn a_file_that_grows_is_noted() {
        let long = "// line\n".repeat(FILE_NOTE_LINES + 1);
        assert_eq!(notes(&Tree::of(&[("crates/rpc/src/a.rs", &long)])).len(), 1);
        assert!(findings("crates/rpc/src/a.rs", &long).is_empty());
    }

    #[test]
    fn long_functions_of_every_kind_are_found() {
        let body = "    g();\n".repeat(FUNCTION_LINES_MAX - 1);
        for (before, after) in [("", ""), ("impl A {\n", "}\n"), ("trait A {\n", "}\n")] {
            let text = format!("{before}/// Docs do not count.\nfn f() {{\n{body}}}\n{after}");
            assert_eq!(findings("crates/rpc/src/a.rs", &text).len(), 1, "{before}");
            let shorter = text.replacen("    g();\n", "", 1);
            assert!(findings("crates/rpc/src/a.rs", &shorter).is_empty(), "{before}");
        }
    }
}
