//! The `byway` program.
#![forbid(unsafe_code)]

mod node;

use std::sync::Arc;
use std::time::Duration;

use byway_reactor::{Address, IoChoice};
use byway_service::block::{Store, StoreOptions, Volume, VolumeOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(2);
    let mut volumes = Vec::new();
    let mut nbd = Vec::new();
    let mut io = IoChoice::Auto;
    let mut threads = 2;
    while let Some(flag) = args.next() {
        let value = args.next().ok_or("a value")?;
        match flag.as_str() {
            "--volume" => {
                let (name, rest) = value.split_once('=').ok_or("NAME=STORE")?;
                let direct = rest.ends_with(",direct");
                let (rest, shared) = rest.strip_suffix(",shared").map_or((rest, false), |rest| (rest, true));
                let path = rest.trim_end_matches(",direct");
                let store = if let Some(size) = path.strip_prefix("mem:") {
                    Store::memory(name, size.parse()?)?
                } else {
                    Store::path(path.as_ref(), StoreOptions { direct, shared, ..Default::default() })?
                };
                volumes.push(Arc::new(Volume::new(name, store, VolumeOptions::default())));
            }
            "--nbd" => nbd.push(match value.strip_prefix("unix://") {
                Some(path) => Address::Unix(path.into()),
                None => Address::Tcp(value.trim_start_matches("tcp://").parse()?),
            }),
            "--io" => io = if value == "epoll" { IoChoice::Epoll } else { IoChoice::Uring },
            "--threads" => threads = value.parse()?,
            _ => return Err("what?".into()),
        }
    }
    let node = node::Node::start(node::NodeOptions {
        io,
        threads,
        frame_bytes: 64 << 20,
        volumes,
        nbd,
        nbd_inherited: Vec::new(),
        nbd_options: Default::default(),
    })?;
    for ready in node.ready() {
        println!("ready {} {}", ready.door, ready.address);
    }
    eprintln!("{}", node.io());
    let mut signals = signal_hook::iterator::Signals::new([15, 2])?;
    signals.forever().next();
    node.stop(Duration::from_secs(5));
    Ok(())
}
