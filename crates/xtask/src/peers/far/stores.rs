//! Stores of keys and values over TCP. A pager could keep pages there as well; a get of a page from each, beside byway's own,
//! tells the fabric apart from the pager.

use super::super::native::wait_for_port;
use super::super::report::median;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const PORT: u16 = 4714;
const PAGE_BYTES: usize = 4096;
/// 64 MiB of pages, as much as the program of the other rows keeps far.
const PAGES: u64 = 16 << 10;

/// What is asked, and how.
#[derive(Clone, Copy)]
pub enum Kind {
    Redis,
    Memcached,
}

pub const KINDS: [Kind; 2] = [Kind::Redis, Kind::Memcached];

/// A store with pages in it, and a connection.
pub struct Store {
    kind: Kind,
    connection: BufReader<TcpStream>,
    _server: Background,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Memcached => "memcached",
        }
    }

    fn server(self, port: &str) -> Command {
        let (program, flags): (_, &[&str]) = match self {
            Self::Redis => ("redis-server", &["--bind", "127.0.0.1", "--save", "", "--port"]),
            Self::Memcached => ("memcached", &["-l", "127.0.0.1", "-U", "0", "-u", "root", "-m", "256", "-p"]),
        };
        let mut command = Command::new(program);
        command.args(flags).arg(port);
        command
    }
}

impl Store {
    /// Starts it in `folder` and fills it. `None`, and a line that says so, where it is missing.
    pub fn start(kind: Kind, folder: &Path) -> Result<Option<Self>> {
        let port = PORT + kind as u16 * 10;
        let mut command = kind.server(&port.to_string());
        let program = command.get_program().to_string_lossy().into_owned();
        if process::find_program(&program).is_none() {
            println!("SKIP read of 4 KiB from {}: there is no {program}", kind.name());
            return Ok(None);
        }
        let server = Background::start(command.current_dir(folder), &folder.join(format!("{}.log", kind.name())))?;
        wait_for_port(port)?;
        let connection = TcpStream::connect(("127.0.0.1", port))?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut store =
            Self { kind, connection: BufReader::with_capacity(2 * PAGE_BYTES, connection), _server: server };
        for number in 0..PAGES {
            store.set(number).with_context(|| format!("{} does not take a page", kind.name()))?;
        }
        Ok(Some(store))
    }

    fn set(&mut self, number: u64) -> Result<()> {
        let page = [number as u8; PAGE_BYTES];
        let mut request = match self.kind {
            Kind::Redis => format!("*3\r\n$3\r\nSET\r\n$8\r\n{number:08}\r\n${PAGE_BYTES}\r\n"),
            Kind::Memcached => format!("set {number:08} 0 0 {PAGE_BYTES}\r\n"),
        }
        .into_bytes();
        request.extend_from_slice(&page);
        request.extend_from_slice(b"\r\n");
        self.connection.get_mut().write_all(&request)?;
        let said = self.line()?;
        if !["+OK", "STORED"].contains(&said.as_str()) {
            bail!("it answered {said:?}");
        }
        Ok(())
    }

    fn get(&mut self, number: u64, page: &mut [u8; PAGE_BYTES]) -> Result<()> {
        let request = match self.kind {
            Kind::Redis => format!("*2\r\n$3\r\nGET\r\n$8\r\n{number:08}\r\n"),
            Kind::Memcached => format!("get {number:08}\r\n"),
        };
        self.connection.get_mut().write_all(request.as_bytes())?;
        let said = self.line()?;
        if !["$4096", &format!("VALUE {number:08} 0 4096")].contains(&said.as_str()) {
            bail!("it answered {said:?}");
        }
        self.connection.read_exact(page)?;
        // The end of the value, and of memcached's answer.
        self.line()?;
        if matches!(self.kind, Kind::Memcached) {
            self.line()?;
        }
        if page.iter().any(|byte| *byte != number as u8) {
            bail!("page {number} has other bytes");
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.connection.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// The median time of a get, in microseconds, of pages at random, one at a time.
    pub fn read_micros(&mut self, seconds: u32) -> Result<f64> {
        let (mut micros, mut number, mut page) = (Vec::new(), 1u64, [0; PAGE_BYTES]);
        let end = Instant::now() + Duration::from_secs(seconds.into());
        while Instant::now() < end {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let began = Instant::now();
            self.get((number >> 32) % PAGES, &mut page)?;
            micros.push(began.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(micros))
    }
}
