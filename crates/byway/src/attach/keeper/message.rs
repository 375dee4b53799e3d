//! What a keeper and the process that serves a device tell each other: one byte, and descriptors with it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use byway_frontend::fuse::channel::Channel;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Of one device: the channel, the file, and the device.
const DESCRIPTORS_MAX: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Message {
    /// From the keeper, first: serve a new device, or go on with the one whose descriptors come.
    Begin = b'B',
    /// Keep these descriptors.
    Keep = b'K',
    /// Close the device, which the kernel is to remove.
    LetGo = b'L',
    /// The device has ended: no successor is to begin.
    End = b'E',
}

impl Message {
    fn of(byte: u8) -> Option<Self> {
        [Self::Begin, Self::Keep, Self::LetGo, Self::End].into_iter().find(|message| *message as u8 == byte)
    }
}

/// The descriptors of a device. The channel goes first: see [`Channel::above_devices`].
#[derive(Debug)]
pub(in crate::attach) struct Kept {
    pub channel: Channel,
    /// `None`: the kernel was told to remove the device, and may still have requests.
    pub device: Option<KeptDevice>,
}

/// The file, and the loop device on it.
#[derive(Debug)]
pub(in crate::attach) struct KeptDevice {
    pub file: OwnedFd,
    pub device: OwnedFd,
}

impl Kept {
    /// `None` of no descriptors.
    pub(super) fn of(fds: Vec<OwnedFd>) -> io::Result<Option<Self>> {
        let mut fds = fds.into_iter();
        let Some(channel) = fds.next() else { return Ok(None) };
        let device = fds.next().zip(fds.next()).map(|(file, device)| KeptDevice { file, device });
        Ok(Some(Self { channel: Channel::adopt(channel).above_devices()?, device }))
    }

    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let device = self.device.iter().flat_map(|device| [device.file.as_fd(), device.device.as_fd()]);
        std::iter::once(self.channel.as_fd()).chain(device).collect()
    }
}

/// The two ends of a conversation.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

pub(super) fn send(socket: &OwnedFd, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(socket, &[IoSlice::new(&[message as u8])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next message; `None` when the other process is gone.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    let message = Message::of(byte[0]).ok_or(io::ErrorKind::InvalidData)?;
    let fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(Some((message, fds.flatten().collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_arrive_in_order_and_the_channel_is_closed_first() {
        let (keeper, process) = pair().unwrap();
        let file = |text: &str| OwnedFd::from(std::fs::File::open(text).unwrap());
        let (channel, rest) = (file("/dev/null"), [file("/dev/zero"), file("/dev/full")]);
        send(&process, Message::Keep, &[channel.as_fd(), rest[0].as_fd(), rest[1].as_fd()]).unwrap();
        send(&process, Message::End, &[]).unwrap();
        let (message, fds) = receive(&keeper).unwrap().unwrap();
        assert_eq!((message, fds.len()), (Message::Keep, 3));
        let mut kept = Kept::of(fds).unwrap().unwrap();
        let target = |fd: BorrowedFd<'_>| {
            let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
            (std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap().display().to_string(), number)
        };
        let targets: Vec<_> = kept.descriptors().into_iter().map(target).collect();
        assert_eq!(
            targets.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(),
            ["/dev/null", "/dev/zero", "/dev/full"]
        );
        assert!(targets[0].1 > targets[2].1, "{targets:?}");
        kept.device = None;
        assert_eq!(kept.descriptors().len(), 1);
        assert_eq!(receive(&keeper).unwrap().unwrap().0, Message::End);
        drop(process);
        assert!(receive(&keeper).unwrap().is_none());
    }
}
