//! Telling the service manager how the node is (sd_notify(3)), over a datagram socket.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The service manager, if there is one.
#[derive(Debug)]
pub struct Supervisor(Option<(UnixDatagram, SocketAddr)>);

impl Supervisor {
    /// The one that `NOTIFY_SOCKET` names. Connect before confinement and before root is dropped.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if the variable names no socket.
    pub fn from_environment() -> io::Result<Self> {
        match std::env::var("NOTIFY_SOCKET") {
            Ok(name) => Self::at(&name),
            Err(_) => Ok(Self(None)),
        }
    }

    /// The one at a path, or at an abstract name (`@...`).
    ///
    /// # Errors
    /// As for [`Supervisor::from_environment`].
    pub fn at(name: &str) -> io::Result<Self> {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None if name.starts_with('/') => SocketAddr::from_pathname(name)?,
            None => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not stop the node.
        socket.set_nonblocking(true)?;
        Ok(Self(Some((socket, address))))
    }

    /// Every front end is open.
    ///
    /// # Errors
    /// The kernel's.
    pub fn ready(&self, status: &str) -> io::Result<()> {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)))
    }

    /// A reload has begun; [`Supervisor::ready`] ends it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn reloading(&self) -> io::Result<()> {
        // The manager tells reloads apart by this clock.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}"))
    }

    /// Draining has begun.
    ///
    /// # Errors
    /// The kernel's.
    pub fn stopping(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STOPPING=1\nSTATUS={}", one_line(status)))
    }

    fn send(&self, message: &str) -> io::Result<()> {
        let Some((socket, address)) = &self.0 else {
            return Ok(());
        };
        socket.send_to_addr(message.as_bytes(), address).map(|_| ())
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let supervisor = Supervisor::at(path.to_str().unwrap()).unwrap();
        let receive = || {
            let mut text = [0; 256];
            let len = manager.recv(&mut text).unwrap();
            String::from_utf8(text[..len].to_vec()).unwrap()
        };
        supervisor.ready("2 volumes\nREADY=0").unwrap();
        assert_eq!(receive(), "READY=1\nSTATUS=2 volumes READY=0");
        supervisor.reloading().unwrap();
        let (head, clock) =
            receive().split_once("\nMONOTONIC_USEC=").map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        assert_eq!(head, "RELOADING=1");
        assert!(clock.parse::<u64>().unwrap() > 0);
        supervisor.stopping("draining").unwrap();
        assert_eq!(receive(), "STOPPING=1\nSTATUS=draining");
        assert!(Supervisor::at("relative").is_err());
    }
}
