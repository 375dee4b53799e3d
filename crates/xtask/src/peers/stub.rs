//! A server that does nothing but answer: the same bytes to every read, nothing kept of a write. What a client reaches
//! against it is the most that it can reach against anybody.

use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
const OPTION_GO: u32 = 7;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
/// Bytes of requests that are taken at once.
const BATCH_BYTES: usize = 256 << 10;

/// Serves until it is ended.
pub fn serve(port: Option<u16>, unix: Option<PathBuf>) -> Result<()> {
    if let Some(path) = unix {
        let listener = UnixListener::bind(path)?;
        for stream in listener.incoming() {
            let stream = stream?;
            std::thread::spawn(move || talk(&stream, &stream));
        }
        return Ok(());
    }
    let listener = TcpListener::bind(("127.0.0.1", port.context("give --port or --unix")?))?;
    for stream in listener.incoming() {
        let stream = stream?;
        stream.set_nodelay(true)?;
        std::thread::spawn(move || talk(&stream, &stream));
    }
    Ok(())
}

fn talk(mut from: impl Read, mut to: impl Write) -> Result<()> {
    to.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    from.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        from.read_exact(&mut head)?;
        let field = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (option, len) = (field(8), field(12));
        if &head[..8] != IHAVEOPT || len > 1 << 16 {
            bail!("no option");
        }
        from.read_exact(&mut vec![0; len as usize])?;
        if option != OPTION_GO {
            // NBD_REP_ERR_UNSUP
            to.write_all(&reply(option, 1 << 31 | 1, &[]))?;
            continue;
        }
        // NBD_INFO_EXPORT: type, size, flags (has flags, flush, can multi-conn).
        let mut info = vec![0, 0];
        info.extend_from_slice(&super::FILE_BYTES.to_be_bytes());
        info.extend_from_slice(&(1u16 | 1 << 2 | 1 << 8).to_be_bytes());
        to.write_all(&reply(option, 3, &info))?;
        to.write_all(&reply(option, 1, &[]))?;
        return answer(from, to);
    }
}

fn reply(option: u32, kind: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn answer(mut from: impl Read, mut to: impl Write) -> Result<()> {
    let mut input = vec![0; BATCH_BYTES];
    let (mut start, mut end) = (0, 0);
    let mut output = Vec::new();
    loop {
        while end - start >= 28 {
            let head = &input[start..start + 28];
            let command = u16::from_be_bytes([head[6], head[7]]);
            let len = u32::from_be_bytes([head[24], head[25], head[26], head[27]]) as usize;
            if command == DISCONNECT {
                return Ok(());
            }
            output.extend_from_slice(&0x6744_6698_u32.to_be_bytes());
            output.extend_from_slice(&[0; 4]);
            output.extend_from_slice(&head[8..16]);
            start += 28;
            match command {
                READ => output.resize(output.len() + len, 0),
                WRITE => {
                    let here = len.min(end - start);
                    start += here;
                    let mut left = len - here;
                    while left > 0 {
                        let part = left.min(input.len());
                        from.read_exact(&mut input[..part])?;
                        left -= part;
                        (start, end) = (0, 0);
                    }
                }
                _ => {}
            }
        }
        to.write_all(&output)?;
        output.clear();
        input.copy_within(start..end, 0);
        (start, end) = (0, end - start);
        let n = from.read(&mut input[end..])?;
        if n == 0 {
            return Ok(());
        }
        end += n;
    }
}
