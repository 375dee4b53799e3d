//! Memory of another process: `remote_memory lend tcp://127.0.0.1:4711 1048576`, then `remote_memory use tcp://127.0.0.1:4711`;
//! `remote_memory` is `cargo run --release -p byway-fabric --example remote_memory --`.
//!
//! Who lends opens a window and waits: the other reads and writes it without a word of the lender's program.

use byway_fabric::node::{Deadline, Descriptor, Node, NodeOptions, Outcome, Rights, parse_address};

type Error = Box<dyn std::error::Error>;

fn lend(address: &str, bytes: usize) -> Result<(), Error> {
    let node = Node::open(&NodeOptions::default())?;
    let at = node.listen(&parse_address(address)?)?;
    println!("lending at {}", at.map_or_else(|| address.to_owned(), |at| format!("tcp://{at}")));
    let session = node.accept(Deadline::NEVER)?;
    let memory = node.register(bytes)?;
    let window = node.open_window(session, &memory, 0..bytes, Rights::BOTH)?;
    node.send(session, b"window", &window.descriptor().to_bytes())?;
    // Until it goes, whoever waits here serves.
    while let Ok(Outcome::Message(_)) = node.start_receive(None)?.wait(Deadline::NEVER)? {}
    window.close()?.wait(Deadline::NEVER)??;
    let used = memory.bytes()?.iter().filter(|byte| **byte != 0).count();
    println!("{used} bytes are other than before");
    Ok(())
}

fn use_it(address: &str) -> Result<(), Error> {
    let soon = Deadline::after(std::time::Duration::from_secs(20));
    let node = Node::open(&NodeOptions::default())?;
    let session = node.connect(&parse_address(address)?, soon)?;
    let message = node.receive_from(session, soon)?;
    let theirs = Descriptor::from_bytes(message.payload.first_chunk().ok_or("no descriptor")?);
    let len = usize::try_from(theirs.len())?;
    let mut mine = node.register(len)?;
    mine.bytes_mut()?.fill(7);
    node.put(session, &[mine.segment(0..len)], &theirs, 0)?.wait(soon)??;
    mine.bytes_mut()?.fill(0);
    // In two pieces, both under way at once.
    let half = len / 2;
    let first = node.get(session, &theirs, 0, &[mine.segment(0..half)])?;
    let second = node.get(session, &theirs, half as u64, &[mine.segment(half..len)])?;
    first.wait(soon)??;
    second.wait(soon)??;
    let good = mine.bytes()?.iter().all(|byte| *byte == 7);
    println!("{len} bytes there and back: {}", if good { "the same" } else { "DIFFERENT" });
    node.close(session)?;
    if good { Ok(()) } else { Err("the bytes came back different".into()) }
}

fn run() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lend", address, bytes] => lend(address, bytes.parse()?),
        ["use", address] => use_it(address),
        _ => Err("usage: remote_memory lend ADDRESS BYTES | remote_memory use ADDRESS".into()),
    }
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
