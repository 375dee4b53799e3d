//! A file server: `file_server serve tcp://127.0.0.1:4711 FOLDER`, then `file_server fetch tcp://127.0.0.1:4711 NAME`;
//! `file_server` is `cargo run --release -p byway-rpc --example file_server --`.
//!
//! One call asks for a file's length, and one more for each MiB of it: that names a window of the caller's memory, into which the
//! server puts the bytes before it answers.

use std::io::{Read, Write};
use std::path::{Component, Path};

use byway_fabric::node::{Deadline, NodeOptions, OpError, Rights, parse_address};
use byway_rpc::node::{Call, Reply, Request, Rpc};

type Error = Box<dyn std::error::Error>;

/// Asks for the bytes of a file, and then for a piece of it.
const LENGTH: u16 = 1;
const READ: u16 = 2;
/// What is fetched by one call.
const CHUNK_BYTES: usize = 1 << 20;
const NOT_FOUND: u16 = 1;

fn serve(address: &str, folder: &Path) -> Result<(), Error> {
    let rpc = Rpc::open(&NodeOptions::default())?;
    let at = rpc.node().listen(&parse_address(address)?)?;
    println!("serving at {}", at.map_or_else(|| address.to_owned(), |at| format!("tcp://{at}")));
    // More threads would share the calls.
    loop {
        let request = rpc.next_call(Deadline::NEVER)?;
        if let Err(error) = answer(&rpc, folder, request) {
            eprintln!("{error}");
        }
    }
}

fn answer(rpc: &Rpc, folder: &Path, request: Request) -> Result<(), Error> {
    let name = String::from_utf8(request.payload.clone())?;
    let plain = Path::new(&name).components().all(|part| matches!(part, Component::Normal(_)));
    let file = if plain { std::fs::File::open(folder.join(&name)) } else { Err(std::io::ErrorKind::NotFound.into()) };
    let Ok(mut file) = file else { return Ok(request.token.reply(NOT_FOUND, &[], &[])?) };
    if request.method == LENGTH {
        return Ok(request.token.reply(0, &file.metadata()?.len().to_le_bytes(), &[])?);
    }
    let offset = u64::from_le_bytes(*request.arguments.first_chunk().ok_or("no offset")?);
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(offset))?;
    let mut memory = rpc.node().register(CHUNK_BYTES)?;
    let window = request.windows.first().ok_or("no window")?;
    let room = CHUNK_BYTES.min(usize::try_from(window.len())?);
    let len = file.read(&mut memory.bytes_mut()?[..room])?;
    rpc.node().put(request.session, &[memory.segment(0..len)], window, 0)?.wait(Deadline::NEVER)??;
    Ok(request.token.reply(0, &(len as u64).to_le_bytes(), &[])?)
}

fn fetch(address: &str, name: &str) -> Result<(), Error> {
    let rpc = Rpc::open(&NodeOptions::default())?;
    let soon = || Deadline::after(std::time::Duration::from_secs(20));
    let session = rpc.node().connect(&parse_address(address)?, soon())?;
    let number = |reply: Reply| reply.result.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).ok_or("no number");
    let call = Call { method: LENGTH, payload: name.as_bytes(), ..Call::default() };
    let answer = rpc.call(session, &call, soon())?.wait(soon())?;
    if answer == Err(OpError::Status(NOT_FOUND)) {
        return Err(format!("the server has no file {name}").into());
    }
    let len = number(Reply::of(answer?)?)?;
    let memory = rpc.node().register(CHUNK_BYTES)?;
    let mut at = 0;
    while at < len {
        let window = rpc.node().open_window(session, &memory, 0..CHUNK_BYTES, Rights::PUT)?;
        let windows = [window.descriptor()];
        let offset = at.to_le_bytes();
        let call =
            Call { method: READ, arguments: &offset, windows: &windows, payload: name.as_bytes(), ..Call::default() };
        let got = number(Reply::of(rpc.call(session, &call, soon())?.wait(soon())??)?)?;
        window.close()?.wait(soon())??;
        std::io::stdout().write_all(&memory.bytes()?[..usize::try_from(got)?])?;
        if got == 0 {
            return Err("the file has become shorter meanwhile".into());
        }
        at += got;
    }
    rpc.node().close(session)?;
    Ok(())
}

fn run() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address, folder] => serve(address, Path::new(folder)),
        ["fetch", address, name] => fetch(address, name),
        _ => Err("usage: file_server serve ADDRESS FOLDER | file_server fetch ADDRESS NAME".into()),
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
