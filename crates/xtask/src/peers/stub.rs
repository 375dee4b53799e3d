//! A server that only answers. It discards writes, and answers every read with the same bytes or, given a file, with the right
//! bytes from its own memory. The first kind shows about the most that a client can reach with long requests against a server
//! that sleeps between them. The second adds a cost that every server has that sends from memory: bytes that no core's cache
//! holds.

use anyhow::{Context, Result, bail};
use std::io::{IoSlice, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
const OPTION_GO: u32 = 7;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
/// Bytes of requests that are taken at once.
const BATCH_BYTES: usize = 256 << 10;
/// Shorter payloads are copied behind their heads, to be sent with others in one call.
const GATHER_BYTES_MAX: usize = 16 << 10;

/// As byway sets it itself: with the kernel's 208 KiB another server may well be faster than this one.
const UNIX_SEND_BUFFER_BYTES: usize = 1 << 20;

/// What is answered to reads.
type Content = Option<Arc<Vec<u8>>>;

/// Serves until it is ended.
pub fn serve(options: &super::StubOptions) -> Result<()> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let content: Content = options.file.as_deref().map(read).transpose()?.map(Arc::new);
    if let Some(path) = &options.unix {
        let listener = UnixListener::bind(path)?;
        for stream in listener.incoming() {
            let (stream, content) = (stream?, content.clone());
            rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNIX_SEND_BUFFER_BYTES)?;
            std::thread::spawn(move || talk(&stream, &stream, &content));
        }
        return Ok(());
    }
    let listener = TcpListener::bind(("127.0.0.1", options.port.context("give --port or --unix")?))?;
    for stream in listener.incoming() {
        let (stream, content) = (stream?, content.clone());
        stream.set_nodelay(true)?;
        std::thread::spawn(move || talk(&stream, &stream, &content));
    }
    Ok(())
}

fn talk(mut from: impl Read, mut to: impl Write, content: &Content) -> Result<()> {
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
        return answer(from, to, content);
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

fn answer(mut from: impl Read, mut to: impl Write, content: &Content) -> Result<()> {
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
                READ => {
                    let offset = u64::from_be_bytes(*head[16..].first_chunk().context("28 bytes")?) as usize;
                    match content {
                        None => output.resize(output.len() + len, 0),
                        Some(content) => {
                            let bytes = content.get(offset..offset + len).context("a read beyond the end")?;
                            if len <= GATHER_BYTES_MAX {
                                output.extend_from_slice(bytes);
                            } else {
                                send_both(&mut to, &output, bytes)?;
                                output.clear();
                            }
                        }
                    }
                }
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

/// Sends the one and the other, in one call where they fit.
fn send_both(to: &mut impl Write, first: &[u8], second: &[u8]) -> Result<()> {
    let n = to.write_vectored(&[IoSlice::new(first), IoSlice::new(second)])?;
    to.write_all(first.get(n..).unwrap_or_default())?;
    Ok(to.write_all(&second[n.saturating_sub(first.len())..])?)
}
