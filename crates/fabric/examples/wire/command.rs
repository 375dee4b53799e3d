//! What is asked for on the command line.

use std::error::Error;
use std::time::Duration;

use byway_reactor::{Address, IoChoice};

/// A region is windows of so much: the largest frame.
pub const REGION_WINDOW_BYTES: usize = 1 << 20;
/// Of a region, at most: what the client's frames have room for.
pub const REGION_WINDOWS_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Serve,
    Call,
    Echo,
    Give,
    Get,
    Memcpy,
}

#[derive(Clone, Debug)]
pub struct Command {
    pub mode: Mode,
    pub address: Address,
    pub bytes: usize,
    pub reply: usize,
    /// What gets are taken from, in bytes; 0: the same place again and again.
    pub region: usize,
    pub depth: usize,
    pub time: Duration,
    pub polling: bool,
    pub io: IoChoice,
}

impl Command {
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mode = match words.next().as_deref() {
            Some("serve") => Mode::Serve,
            Some("call") => Mode::Call,
            Some("echo") => Mode::Echo,
            Some("give") => Mode::Give,
            Some("get") => Mode::Get,
            Some("memcpy") => Mode::Memcpy,
            _ => return Err("serve, call, echo, give, get or memcpy?".into()),
        };
        let address = words.next().ok_or("an address is missing")?;
        let mut command = Self {
            mode,
            address: parse_address(&address)?,
            bytes: 128,
            reply: 128,
            region: 0,
            depth: 1,
            time: Duration::from_secs(1),
            polling: false,
            io: IoChoice::Auto,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
            match word.as_str() {
                "--bytes" => command.bytes = value()?.parse()?,
                "--reply" => command.reply = value()?.parse()?,
                "--region" => command.region = value()?.parse()?,
                "--depth" => command.depth = value()?.parse()?,
                "--seconds" => command.time = Duration::try_from_secs_f64(value()?.parse()?)?,
                "--io" => {
                    command.io = if value()? == "epoll" { IoChoice::Epoll } else { IoChoice::Uring };
                }
                "--polling" => command.polling = true,
                other => return Err(format!("{other} is not known").into()),
            }
        }
        let lens = [command.bytes, command.reply];
        if lens.iter().any(|len| *len == 0 || *len > 1 << 20) || command.depth == 0 || command.depth > 64 {
            return Err("1 byte to 1 MiB, depth 1 to 64".into());
        }
        let windows = command.region / REGION_WINDOW_BYTES;
        let is_whole = windows.is_power_of_two() && command.region.is_multiple_of(REGION_WINDOW_BYTES);
        if command.region > 0 && !(is_whole && windows <= REGION_WINDOWS_MAX && command.bytes.is_power_of_two()) {
            return Err("a region of 1, 2, 4, ... to 128 MiB, of which pieces of a power of two are got".into());
        }
        Ok(command)
    }
}

fn parse_address(text: &str) -> Result<Address, Box<dyn Error>> {
    Ok(match text.split_once("://") {
        Some(("tcp", address)) => Address::Tcp(address.parse()?),
        Some(("unix", path)) => Address::Unix(path.into()),
        Some(("shm", path)) => Address::Shared(path.into()),
        _ => return Err(format!("{text}: tcp://IP:PORT, unix:///PATH or shm:///PATH").into()),
    })
}
