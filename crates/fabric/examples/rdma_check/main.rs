//! Checks of the RDMA provider on real verbs: `cargo xtask guest rdma` runs them on soft-RoCE in a guest.
//!
//! `rdma_check ADDRESS [CHECK...]` with the address of an RDMA device. Most checks have both ends in this process; a peer
//! that dies is a process of its own, which this program starts with `rdma_check ADDRESS peer PORT`.

mod driven;
mod faults;
mod lifecycle;
mod memory;
mod messages;
mod node;
mod peer;
mod transfers;

use std::net::IpAddr;
use std::process::ExitCode;

use byway_fabric::rdma::{Library, PortState};
use node::{Outcome, Pair, ensure};

/// A check: what it says when all is well.
type Check = fn(Pair) -> Outcome<String>;

const CHECKS: [(&str, Check); 24] = [
    ("messages", messages::messages),
    ("sleep", messages::sleep),
    ("unreported", messages::unreported),
    ("full", messages::full),
    ("connections", messages::connections),
    ("write", transfers::write),
    ("read", transfers::read),
    ("segments", transfers::segments),
    ("keys", faults::keys),
    ("exclusive", faults::exclusive),
    ("receive-too-short", faults::receive_too_short),
    ("killed", faults::killed),
    ("memory-limit", faults::memory_limit),
    ("refusals", lifecycle::refusals),
    ("disconnect", lifecycle::disconnect),
    ("drop-posted", lifecycle::drop_posted),
    ("drop-order", lifecycle::drop_order),
    ("other-device", lifecycle::other_device),
    ("driven-messages", driven::messages),
    ("driven-transfers", driven::transfers),
    ("driven-slow", driven::slow),
    ("driven-probe", driven::probe),
    ("driven-keys", driven::keys),
    ("driven-rude", driven::rude),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(address) = arguments.first().and_then(|text| text.parse::<IpAddr>().ok()) else {
        eprintln!("usage: rdma_check ADDRESS [CHECK...]");
        return ExitCode::from(2);
    };
    let outcome = match arguments.get(1).map(String::as_str) {
        Some("peer") => peer::run(address, &arguments[2..]),
        Some("limited") => peer::run_limited(address),
        _ => return run_all(address, &arguments[1..]),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdma_check {}: {error}", arguments[1]);
            ExitCode::FAILURE
        }
    }
}

fn run_all(address: IpAddr, wanted: &[String]) -> ExitCode {
    let mut failed = 0;
    if let Err(error) = devices() {
        println!("FAILED devices: {error}");
        failed += 1;
    }
    for (name, check) in CHECKS {
        if !wanted.is_empty() && !wanted.iter().any(|word| word == name) {
            continue;
        }
        let start = std::time::Instant::now();
        match run(address, check) {
            Ok(said) => println!("ok {name}: {said} ({} ms)", start.elapsed().as_millis()),
            Err(error) => {
                println!("FAILED {name}: {error}");
                failed += 1;
            }
        }
    }
    if failed > 0 {
        println!("rdma_check: FAILED, {failed} checks");
        return ExitCode::FAILURE;
    }
    println!("rdma_check: PASSED");
    ExitCode::SUCCESS
}

/// One check with nodes of its own; afterwards every frame must be back in its pool.
fn run(address: IpAddr, check: Check) -> Outcome<String> {
    let pair = Pair::open(Library::load()?, address)?;
    let pools = [pair.client.pool.clone(), pair.server.pool.clone()];
    let said = check(pair)?;
    for pool in pools {
        ensure(pool.free_bytes() == pool.bytes(), || format!("frames are lost: {pool:?}"))?;
    }
    Ok(said)
}

fn devices() -> Outcome<()> {
    let devices = Library::load()?.devices()?;
    for device in &devices {
        println!("device {}: {:?}", device.name, device.ports);
    }
    let has_link = devices.iter().flat_map(|device| &device.ports).any(|port| port.state == PortState::Active);
    ensure(has_link, || "no port has a link".to_owned())
}
