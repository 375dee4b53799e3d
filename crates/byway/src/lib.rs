//! The `byway` program as a library: its command line, its configuration and the commands.
//!
//! `main.rs` only calls [`cli::run`].

#![forbid(unsafe_code)]

pub mod address;
pub mod admission;
pub mod cli;
pub mod config;
pub mod copy;
pub mod limits;
pub mod node;
pub mod serve;
pub mod spec;
pub mod units;
