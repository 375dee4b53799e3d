//! Block volumes: what they are made of.

pub mod spec;
