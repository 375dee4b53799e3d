//! The `byway` program.
#![forbid(unsafe_code)]

fn main() {}
