//! A program that uses the library reads and writes a volume of a server.

mod harness;
#[allow(dead_code, reason = "its main function")]
#[path = "../examples/volume.rs"]
mod volume;

use std::process::Command;

use byway_fabric::Options;
use byway_fabric::node::NodeOptions;
use byway_reactor::{IoChoice, Reactor};
use harness::{PATHS, Path, Running, SERVER, Wire, each_io, memory};

fn server(wire: Wire) -> Running {
    Running::start(wire, None, 1, Options::new(SERVER), vec![memory(4 << 20)])
}

/// Each end on epoll and on io_uring.
#[test]
fn the_example_writes_and_reads_a_volume_over_each_wire() {
    for path in PATHS {
        if !path.is_there() {
            byway_skip::skip_part_of_this(byway_skip::NO_RDMA);
            continue;
        }
        each_io(|io| {
            let server = server(Wire { io, path });
            let address = server.address.to_string();
            for io in [IoChoice::Epoll, IoChoice::Uring] {
                if io == IoChoice::Uring && Reactor::open_for_threads(io, 1).is_err() {
                    byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
                    continue;
                }
                let options = NodeOptions { io, ..NodeOptions::default() };
                let run = |name, bytes| volume::run(&options, &address, name, bytes).map_err(|error| error.to_string());
                assert_eq!(run("disk", 1 << 20), Ok(()), "{address} {io:?}");
                assert_eq!(run("disk", 20_000), Ok(()), "{address} {io:?}");
                for (name, bytes, says) in [
                    ("disk", 8 << 20, "the request is longer than the server takes"),
                    ("another", 20_000, "no volume has that name"),
                ] {
                    let said = run(name, bytes).unwrap_err();
                    assert!(said.contains(says), "{address} {io:?}: {said}");
                }
            }
        });
    }
}

/// The example, as its first line says to run it.
#[test]
fn the_example_is_a_program() {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let program = path.join("examples/volume");
    let server = server(Wire { io: IoChoice::Epoll, path: Path::Tcp });
    let address = server.address.to_string();
    for (bytes, says) in
        [("20000", "20000 bytes came back as they were written"), ("8388608", "longer than the server takes")]
    {
        let ran = Command::new(&program).args([&address, "disk", bytes]).output().unwrap();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        assert!(said.contains(says), "{said}");
    }
}
