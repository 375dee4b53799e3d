//! Nodes over every wire and backend: what their programs are promised.

mod borrowed;
mod closed;
mod ends;
mod faults;
mod feedback;
mod kinds;
mod messages;
mod poll;
mod rig;
mod secure;
mod silent;
mod sparse;
mod threads;
mod transfers;
mod windows;
