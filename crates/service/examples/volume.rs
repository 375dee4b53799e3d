//! Writes a pattern over the first bytes of a volume, flushes, and reads it back: `volume tcp://127.0.0.1:4711 NAME [BYTES]`.
//! `volume` is `cargo run --release -p byway-service --example volume --`.
//!
//! The program is a node: it could serve calls and move memory over the same session. What is read and written here is longer than
//! 16 KiB, so each call names a window of the program's memory, which the server fills, or reads from. (Shorter reads and writes travel
//! in the call and its answer.)

use std::time::Duration;

use byway_fabric::node::{Deadline, Memory, NodeOptions, OpError, Rights, Session, parse_address};
use byway_rpc::node::{Call, Reply, Rpc, VOLUMES};
use byway_service::block::wire::{Arguments, Method, OpenResult, read_status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

type Error = Box<dyn std::error::Error>;

/// A volume that is open over a session.
struct Volume<'a> {
    rpc: &'a Rpc,
    session: Session,
    handle: u32,
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Calls a server of volumes, and says what it says.
fn ask(rpc: &Rpc, session: Session, call: &Call<'_>) -> Result<Reply, Error> {
    match rpc.call(session, &Call { protocol: VOLUMES, ..*call }, soon())?.wait(soon())? {
        Ok(outcome) => Ok(Reply::of(outcome)?),
        Err(OpError::Status(status)) => Err(read_status(status, &[]).err().ok_or("no error")?.into()),
        Err(error) => Err(error.into()),
    }
}

impl<'a> Volume<'a> {
    fn open(rpc: &'a Rpc, session: Session, name: &str) -> Result<(Self, OpenResult), Error> {
        let arguments = Arguments::new_zeroed();
        let call = Call {
            method: Method::Open as u16,
            arguments: arguments.as_bytes(),
            payload: name.as_bytes(),
            ..Call::default()
        };
        let answer = ask(rpc, session, &call)?;
        let opened = OpenResult::read_from_bytes(&answer.result[..]).map_err(|_| "a short answer")?;
        Ok((Self { rpc, session, handle: opened.handle.get() }, opened))
    }

    /// Moves all of `memory` to or from the start of the volume.
    fn transfer(&self, method: Method, memory: &Memory, bytes: usize, rights: Rights) -> Result<(), Error> {
        let mut arguments = Arguments::new_zeroed();
        arguments.handle.set(self.handle);
        arguments.len.set(bytes as u64);
        let window = self.rpc.node().open_window(self.session, memory, 0..bytes, rights)?;
        let windows = [window.descriptor()];
        let call =
            Call { method: method as u16, arguments: arguments.as_bytes(), windows: &windows, ..Call::default() };
        let answer = ask(self.rpc, self.session, &call);
        window.close()?.wait(soon())??;
        answer.map(|_| ())
    }

    fn flush(&self) -> Result<(), Error> {
        let mut arguments = Arguments::new_zeroed();
        arguments.handle.set(self.handle);
        let call = Call { method: Method::Flush as u16, arguments: arguments.as_bytes(), ..Call::default() };
        ask(self.rpc, self.session, &call).map(|_| ())
    }
}

/// Writes, flushes and reads back `bytes` bytes of the volume `name`.
pub fn run(options: &NodeOptions, address: &str, name: &str, bytes: usize) -> Result<(), Error> {
    let rpc = Rpc::open(options)?;
    let session = rpc.node().connect(&parse_address(address)?, soon())?;
    let (volume, opened) = Volume::open(&rpc, session, name)?;
    println!("{name} has {} bytes", opened.len.get());
    let pattern: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    // Shared memory, so that a server on this machine copies straight into it and out of it.
    let mut memory = rpc.node().register_shared(bytes)?;
    memory.write(0, &pattern)?;
    volume.transfer(Method::Write, &memory, bytes, Rights::GET)?;
    volume.flush()?;
    memory = rpc.node().register_shared(bytes)?;
    volume.transfer(Method::Read, &memory, bytes, Rights::PUT)?;
    let mut back = vec![0; bytes];
    memory.read(0, &mut back)?;
    if back != pattern {
        return Err("other bytes came back".into());
    }
    println!("{bytes} bytes came back as they were written");
    rpc.node().close(session)?;
    Ok(())
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let run = |address, name, bytes| run(&NodeOptions::default(), address, name, bytes);
    let ran = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [address, name] => run(address, name, 1 << 20),
        [address, name, bytes] => bytes.parse().map_err(Error::from).and_then(|bytes| run(address, name, bytes)),
        _ => Err("usage: volume ADDRESS NAME [BYTES]".into()),
    };
    match ran {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
