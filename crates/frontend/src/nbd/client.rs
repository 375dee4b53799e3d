//! The client's side of NBD, for copying from and to other servers.
//!
//! [`ClientHandshake`] negotiates the best that both sides have; [`ClientTransmission`] then writes
//! requests and reads replies. As on the server's side, payloads pass by: a read's data are moved by
//! the driver straight to where they belong: [`Client`], or [`BlockingClient`] for code that waits.

mod coverage;
mod driver;
mod handshake;
mod transmission;

pub use driver::{BlockingClient, Client, ClientError, ClientOptions, Completed, RequestError, list};
pub use handshake::{
    ClientConfig, ClientHandshake, ClientHandshakeError, ClientStep, Encryption, ListedExport, Purpose, Session,
};
pub use transmission::{ClientTransmission, Content, Received, ReplyError, SubmitError};

#[cfg(test)]
mod tests;
