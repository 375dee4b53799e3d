//! Nodes over every wire and backend: what their programs are promised.

mod faults;
mod messages;
mod rig;
mod secure;
mod threads;
mod transfers;
