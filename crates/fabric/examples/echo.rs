//! Messages there and back: `echo listen tcp://127.0.0.1:4711`, then `echo say tcp://127.0.0.1:4711 hello`; `echo` is
//! `cargo run --release -p byway-fabric --example echo --`.

use byway_fabric::node::{Deadline, Node, NodeOptions, Outcome, parse_address};

type Error = Box<dyn std::error::Error>;

/// Says back whatever any client says, until the first client has gone.
fn listen(address: &str) -> Result<(), Error> {
    let node = Node::open(&NodeOptions::default())?;
    let at = node.listen(&parse_address(address)?)?;
    println!("listening at {}", at.map_or_else(|| address.to_owned(), |at| format!("tcp://{at}")));
    loop {
        match node.start_receive(None)?.wait(Deadline::NEVER)?? {
            Outcome::Message(message) => {
                node.send(message.session, &message.header, &message.payload)?;
            }
            _ => return Ok(()),
        }
    }
}

fn say(address: &str, words: &str) -> Result<(), Error> {
    let soon = Deadline::after(std::time::Duration::from_secs(10));
    let node = Node::open(&NodeOptions::default())?;
    let session = node.connect(&parse_address(address)?, soon)?;
    node.send(session, b"say", words.as_bytes())?;
    let answer = node.receive_from(session, soon)?;
    println!("{}", String::from_utf8_lossy(&answer.payload));
    node.close(session)?;
    Ok(())
}

fn run() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address] => listen(address),
        ["say", address, words] => say(address, words),
        _ => Err("usage: echo listen ADDRESS | echo say ADDRESS WORDS".into()),
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
