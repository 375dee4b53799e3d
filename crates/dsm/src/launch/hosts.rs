//! The machines of a job.

use std::ffi::OsString;
use std::net::SocketAddr;

use byway_fabric::tls::GROUP_NAME;

/// The machines of a job, which get equal parts of the processes, in the order of ranks.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// Each machine: its name for `start`, and where the first of its processes listens; the others listen at the ports behind.
    pub hosts: Vec<(String, SocketAddr)>,
    /// The command that runs another command on a machine, as `ssh`: it is followed by the machine's name and the words of `agent`.
    pub start: Vec<OsString>,
    /// The command that takes an order from standard input and runs the process there: [`run_agent`](super::run_agent).
    pub agent: Vec<OsString>,
    /// How processes reach each other.
    pub link: HostLink,
}

/// How processes on several machines reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostLink {
    /// TLS over TCP, with a certificate and a key that the launcher makes for the job and hands to each process.
    #[default]
    Tls,
    /// TCP, readable for the network.
    Plain,
    /// RDMA, readable for the network.
    Rdma,
}

impl HostLink {
    /// The name of the transport.
    pub(super) fn wire(self) -> &'static str {
        if self == Self::Rdma { "rdma" } else { "tcp" }
    }
}

impl Hosts {
    /// The machine of each rank, and the address.
    pub(super) fn places(&self, ranks: usize) -> Vec<(&str, SocketAddr)> {
        let mut used = vec![0_u16; self.hosts.len()];
        let place = |rank: usize| {
            let host = rank * self.hosts.len() / ranks;
            let (name, mut address) = (self.hosts[host].0.as_str(), self.hosts[host].1);
            address.set_port(address.port().saturating_add(used[host]));
            used[host] += 1;
            (name, address)
        };
        (0..ranks).map(place).collect()
    }
}

/// A new certificate and its key, which the processes of one job have in common.
pub(super) fn job_key() -> Result<String, rcgen::Error> {
    let made = rcgen::generate_simple_self_signed([GROUP_NAME.to_owned()])?;
    Ok(made.cert.pem() + &made.signing_key.serialize_pem())
}
