//! Checks of the workspace: `cargo xtask help`.
#![forbid(unsafe_code)]

fn main() {}
