//! A program that uses the library reads and writes a volume of a server.

mod harness;

use std::process::Command;

use byway_fabric::Options;
use harness::{Running, SERVER, each_wire, memory};

/// The example, as its first line says to run it.
#[test]
fn the_example_writes_and_reads_a_volume_over_each_wire() {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let program = path.join("examples/volume");
    each_wire(|wire| {
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![memory(4 << 20)]);
        let address = server.address.to_string();
        for (name, bytes, says) in [
            ("disk", "1048576", "1048576 bytes came back as they were written"),
            ("disk", "20000", "20000 bytes came back as they were written"),
            ("disk", "8388608", "the request is longer than the server takes"),
            ("another", "20000", "no volume has that name"),
        ] {
            let ran = Command::new(&program).args([&address, name, bytes]).output().unwrap();
            let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
            assert!(said.contains(says), "{address} {name} {bytes}: {said}");
        }
    });
}
