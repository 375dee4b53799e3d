//! The `byway` program as a library: its command line, its configuration and the commands.
//!
//! `main.rs` only calls [`cli::run`].

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

pub mod admission;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod attach;
pub mod check;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod cli;
pub mod config;
pub mod confinement;
pub mod control;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod copy;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod demo;
pub mod doctor;
pub mod dsm;
pub mod executable;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod far;
mod help;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod inspect;
pub mod lend;
pub mod limits;
pub mod listening;
mod log;
pub mod memory;
mod mount;
pub mod node;
pub mod opener;
pub mod reload;
#[allow(rustdoc::broken_intra_doc_links, reason = "its texts are help for people, with optional parts in brackets")]
pub mod run;
mod secure_execution;
pub mod serve;
mod share_uri;
pub mod spec;
pub mod supervisor;
pub mod tls;

pub(crate) use byway_remote::uri::address;
pub(crate) use byway_remote::{self as remote, output, units};
