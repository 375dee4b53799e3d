//! The kernel's NBD client: a block device whose requests come, as NBD, over a socket of this process.
//!
//! Netlink tells the kernel which socket, and all that a handshake would: nothing but requests and replies passes over the socket.
//! The numbers are those of `linux/nbd-netlink.h`, `linux/netlink.h` and `linux/genetlink.h`; numbers are in the machine's byte order.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::nbd::flags::TransmissionFlags;

const FAMILY: &str = "nbd";
/// `GENL_ID_CTRL`, which knows the families, and what it is asked.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_BYTES: u16 = 3;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const IDENTIFIER: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_DESCRIPTOR: u16 = 1;
/// An attribute of attributes.
const NESTED: u16 = 1 << 15;

const REQUEST_WITH_ACK: u16 = 1 | 4;
/// The type of an acknowledgement; its first number is 0 or an error.
const ACK: u16 = 2;
/// An answer on a family is the longest: some hundred bytes.
const ANSWER_BYTES_MAX: usize = 8192;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdDeviceError {
    /// No NBD client.
    #[error("the kernel has no NBD client: {0}; load its module (modprobe nbd)")]
    Missing(io::Error),
    /// A command that the kernel refused.
    #[error("nbd: the kernel refuses to {what}: {source}")]
    Command {
        /// What was asked for.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// What a device is to be.
#[derive(Clone, Copy, Debug)]
pub struct NbdDeviceOptions<'a> {
    /// Its size, in bytes; what is over a whole number of blocks is left out.
    pub bytes: u64,
    /// Its logical block: 512 to 4096 bytes, a power of two.
    pub block_bytes: u32,
    /// The longest request, in bytes: a multiple of 1024.
    pub request_bytes_max: u32,
    /// What the kernel may ask for.
    pub flags: TransmissionFlags,
    /// Its maker's name for it ([`disconnect_left`]).
    pub identifier: &'a str,
}

/// A device that this process has made. It outlives this object and this process, until it is disconnected.
#[derive(Debug)]
pub struct NbdDevice {
    netlink: Netlink,
    number: u32,
    block_bytes: u32,
    identifier: String,
}

impl NbdDevice {
    /// Makes a device whose requests come over the other end of `socket`, a stream.
    ///
    /// # Errors
    /// See [`NbdDeviceError`].
    pub fn connect(socket: BorrowedFd<'_>, options: &NbdDeviceOptions<'_>) -> Result<Self, NbdDeviceError> {
        let mut netlink = Netlink::open()?;
        let what = "make a device";
        let failed = |source| NbdDeviceError::Command { what, source };
        let descriptor = attribute(SOCKET_DESCRIPTOR, &socket.as_raw_fd().to_ne_bytes());
        let sockets = attribute(NESTED | SOCKETS, &attribute(NESTED | SOCKET_ITEM, &descriptor));
        let attributes = [
            attribute(SIZE_BYTES, &whole_blocks(options.bytes, options.block_bytes).to_ne_bytes()),
            attribute(BLOCK_BYTES, &u64::from(options.block_bytes).to_ne_bytes()),
            attribute(SERVER_FLAGS, &u64::from(options.flags.0).to_ne_bytes()),
            attribute(IDENTIFIER, &text(options.identifier)),
            sockets,
        ];
        let answer = netlink.command(what, CONNECT, &attributes.concat())?;
        let number = find(&answer, INDEX).and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?)));
        let number = number.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        let identifier = options.identifier.to_owned();
        let mut device = Self { netlink, number, block_bytes: options.block_bytes, identifier };
        let limit = format!("/sys/block/nbd{number}/queue/max_sectors_kb");
        if let Err(error) = std::fs::write(limit, (options.request_bytes_max / 1024).to_string()) {
            let _ = device.disconnect();
            return Err(failed(error));
        }
        Ok(device)
    }

    /// `/dev/nbdN`.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/nbd{}", self.number))
    }

    /// Tells the kernel another size, in bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resize(&mut self, bytes: u64) -> Result<(), NbdDeviceError> {
        let attributes = [
            attribute(INDEX, &self.number.to_ne_bytes()),
            attribute(IDENTIFIER, &text(&self.identifier)),
            attribute(SIZE_BYTES, &whole_blocks(bytes, self.block_bytes).to_ne_bytes()),
        ];
        self.netlink.command("resize the device", RECONFIGURE, &attributes.concat()).map(drop)
    }

    /// Ends the device: its users get errors from then on, also for what the kernel has not written yet. The kernel sends a
    /// Disconnect over the socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn disconnect(&mut self) -> Result<(), NbdDeviceError> {
        self.netlink.disconnect(self.number)
    }
}

/// Whether this machine can make such devices.
///
/// # Errors
/// Why not.
pub fn check() -> Result<(), NbdDeviceError> {
    Netlink::open().map(drop)
}

/// Disconnects the devices whose identifier is `meant`: those that a process has left.
///
/// # Errors
/// The kernel's.
pub fn disconnect_left(meant: impl Fn(&str) -> bool) -> Result<(), NbdDeviceError> {
    // Without NBD client there are none.
    let Ok(devices) = std::fs::read_dir("/sys/block") else { return Ok(()) };
    for device in devices.flatten() {
        let name = device.file_name();
        let Some(number) = name.to_str().and_then(|name| name.strip_prefix("nbd")?.parse().ok()) else { continue };
        let identifier = std::fs::read_to_string(Path::new("/sys/block").join(&name).join("backend"));
        if identifier.is_ok_and(|identifier| meant(identifier.trim_end())) {
            Netlink::open()?.disconnect(number)?;
        }
    }
    Ok(())
}

/// The header of a message of generic netlink.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    bytes: u32,
    family: u16,
    flags: u16,
    sequence: u32,
    port: u32,
    command: u8,
    version: u8,
    reserved: u16,
}

const _: () = assert!(size_of::<Header>() == 20);

/// A socket for commands to the NBD client, one at a time.
#[derive(Debug)]
struct Netlink {
    socket: OwnedFd,
    family: u16,
}

impl Netlink {
    fn open() -> Result<Self, NbdDeviceError> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC));
        let socket = socket.map_err(|error| NbdDeviceError::Missing(error.into()))?;
        let answer = exchange(&socket, CONTROL, GET_FAMILY, &attribute(FAMILY_NAME, &text(FAMILY)));
        let answer = answer.map_err(NbdDeviceError::Missing)?;
        let family = find(&answer, FAMILY_ID).and_then(|bytes| Some(u16::from_ne_bytes(bytes.try_into().ok()?)));
        let family = family.ok_or_else(|| NbdDeviceError::Missing(io::ErrorKind::InvalidData.into()))?;
        Ok(Self { socket, family })
    }

    fn command(&mut self, what: &'static str, command: u8, attributes: &[u8]) -> Result<Vec<u8>, NbdDeviceError> {
        let answer = exchange(&self.socket, self.family, command, attributes);
        answer.map_err(|source| NbdDeviceError::Command { what, source })
    }

    fn disconnect(&mut self, number: u32) -> Result<(), NbdDeviceError> {
        self.command("end the device", DISCONNECT, &attribute(INDEX, &number.to_ne_bytes())).map(drop)
    }
}

/// Sends a command and waits until the kernel has carried it out; gives the attributes of its answer.
fn exchange(socket: &OwnedFd, family: u16, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
    let bytes = (size_of::<Header>() + attributes.len()) as u32;
    let header =
        Header { bytes, family, flags: REQUEST_WITH_ACK, sequence: 1, port: 0, command, version: 1, reserved: 0 };
    let message = [header.as_bytes(), attributes].concat();
    retry_on_intr(|| send(socket, &message, SendFlags::empty()))?;
    let (mut buffer, mut answer) = (vec![0; ANSWER_BYTES_MAX], Vec::new());
    loop {
        let (received, _) = retry_on_intr(|| recv(socket, &mut buffer[..], RecvFlags::empty()))?;
        if let Some(acknowledged) = take_messages(&buffer[..received], &mut answer)? {
            return acknowledged.map(|()| answer);
        }
    }
}

/// Takes apart what was received at once: the attributes of an answer, and at last the acknowledgement.
fn take_messages(mut received: &[u8], answer: &mut Vec<u8>) -> io::Result<Option<io::Result<()>>> {
    while let Ok((header, _)) = Header::read_from_prefix(received) {
        let end = (header.bytes as usize).max(size_of::<Header>());
        let message = received.get(..end).ok_or(io::ErrorKind::InvalidData)?;
        if header.family == ACK {
            // Its error stands where other messages have their command.
            let error = message[16..20].try_into().map_or(0, i32::from_ne_bytes);
            return Ok(Some(if error == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(-error).into()) }));
        }
        answer.extend_from_slice(&message[size_of::<Header>()..]);
        received = received.get(end.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(None)
}

/// An attribute: its length, its kind, and its contents, filled up to a multiple of 4 bytes.
fn attribute(kind: u16, contents: &[u8]) -> Vec<u8> {
    let len = 4 + contents.len();
    let mut bytes = [&(len as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), contents].concat();
    bytes.resize(len.next_multiple_of(4), 0);
    bytes
}

/// A text with its end.
fn text(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

/// The contents of an attribute.
fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let Some((&[a, b, c, d], _)) = attributes.split_first_chunk() {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        if u16::from_ne_bytes([c, d]) & !NESTED == wanted {
            return attributes.get(4..len);
        }
        attributes = attributes.get(len.max(4).next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

fn whole_blocks(bytes: u64, block_bytes: u32) -> u64 {
    bytes / u64::from(block_bytes) * u64::from(block_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_behind_others() {
        let attributes = [attribute(IDENTIFIER, &text("ab")), attribute(INDEX, &7u32.to_ne_bytes())].concat();
        assert_eq!(attributes.len(), 16);
        assert_eq!(find(&attributes, IDENTIFIER), Some(&b"ab\0"[..]));
        assert_eq!(find(&attributes, INDEX), Some(&7u32.to_ne_bytes()[..]));
        assert_eq!(find(&attributes, SIZE_BYTES), None);
        // One that says that it is longer than it is, and one of no length.
        assert_eq!(find(&[200, 0, 1, 0, 9], INDEX), None);
        assert_eq!(find(&[0, 0, 9, 0], INDEX), None);
    }

    #[test]
    fn an_answer_comes_before_its_acknowledgement() {
        let message = |family: u16, contents: &[u8]| {
            let bytes = (16 + contents.len()) as u32;
            [&bytes.to_ne_bytes()[..], &family.to_ne_bytes(), &[0; 10], contents].concat()
        };
        let index = attribute(INDEX, &3u32.to_ne_bytes());
        let received = [message(99, &[&[1, 1, 0, 0][..], &index].concat()), message(ACK, &[0; 20])].concat();
        let mut answer = Vec::new();
        assert!(matches!(take_messages(&received, &mut answer), Ok(Some(Ok(())))));
        assert_eq!(answer, index);
        let refused = message(ACK, &(-16i32).to_ne_bytes());
        let Ok(Some(Err(error))) = take_messages(&refused, &mut answer) else { panic!("an error") };
        assert_eq!(error.raw_os_error(), Some(Errno::BUSY.raw_os_error()));
        assert!(take_messages(&received[..20], &mut answer).is_err());
    }

    #[test]
    fn a_machine_without_the_client_is_told_what_to_load() {
        if Path::new("/sys/block/nbd0").exists() {
            byway_skip::skip_this(byway_skip::SkipReason::Machine("has the kernel's NBD client"));
            return;
        }
        let error = check().unwrap_err().to_string();
        assert!(error.contains("modprobe nbd"), "{error}");
        // The kernel was asked: it knows no such family.
        assert!(error.contains("No such file"), "{error}");
    }
}
