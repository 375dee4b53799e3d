//! Checks of the RDMA provider on real verbs: `cargo xtask guest rdma` runs them on soft-RoCE in a guest.
//!
//! `rdma_check ADDRESS` with the address of an RDMA device. Most checks have both ends in this process; a peer that dies is a
//! process of its own, which this program starts with `rdma_check ADDRESS peer PORT`.

mod node;

use std::net::IpAddr;
use std::process::ExitCode;

use byway_fabric::rdma::Library;
use node::{Outcome, Pair};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(address) = arguments.first().and_then(|text| text.parse::<IpAddr>().ok()) else {
        eprintln!("usage: rdma_check ADDRESS");
        return ExitCode::from(2);
    };
    match one_message(address) {
        Ok(()) => {
            println!("rdma_check: PASSED");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("rdma_check: FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn one_message(address: IpAddr) -> Outcome<()> {
    let library = Library::load()?;
    println!("{:?}", library.devices()?);
    let mut pair = Pair::open(library, address)?;
    let (client, _server) = pair.connect()?;
    client.send_inline(b"hello", 1, byway_fabric::rdma::Report::Now)?;
    let received = pair.server.wait_for("a message", |node| node.take_receive())?;
    println!("{:?}", received.result);
    Ok(())
}
