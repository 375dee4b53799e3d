//! The kernel's state of a TCP connection's path.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// The state of a TCP connection's path, as the kernel sees it now (`TCP_INFO` of tcp(7), `struct tcp_info` of linux/tcp.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathState {
    /// Smoothed round trip.
    pub round_trip: Duration,
    /// How much it varies.
    pub round_trip_variance: Duration,
    /// Segments that were sent again since the connection was made.
    pub retransmits: u32,
    /// Bytes a second that the peer acknowledged, as of the last time that the path was kept full.
    pub delivery_rate: u64,
}

/// Bytes of the structure up to the end of `tcpi_delivery_rate`, which Linux 4.9 added.
const INFO_BYTES: usize = 168;

/// Asks the kernel; `None` if it is no TCP connection.
pub(crate) fn ask(socket: BorrowedFd<'_>) -> Option<PathState> {
    let mut info = [0_u8; INFO_BYTES];
    let mut len = INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which `info` has, and says how many.
    let answer = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    (answer == 0 && len as usize == INFO_BYTES).then(|| read(&info))
}

fn read(info: &[u8; INFO_BYTES]) -> PathState {
    let number = |at: usize| info[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let micros = |at: usize| Duration::from_micros(number(at).into());
    PathState {
        round_trip: micros(68),
        round_trip_variance: micros(72),
        retransmits: number(100),
        delivery_rate: info.last_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_connection_that_has_moved_bytes_has_a_round_trip_and_a_rate() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let writer = std::thread::spawn(move || {
            client.write_all(&vec![1; 4 << 20]).unwrap();
            client.read_exact(&mut [0]).unwrap();
            ask(client.as_fd()).unwrap()
        });
        server.read_exact(&mut vec![0; 4 << 20]).unwrap();
        server.write_all(&[0]).unwrap();
        let path = writer.join().unwrap();
        assert!(path.round_trip > Duration::ZERO && path.round_trip < Duration::from_secs(10), "{path:?}");
        assert!((1 << 16..1 << 40).contains(&path.delivery_rate), "{path:?}");
    }

    #[test]
    fn a_unix_stream_has_no_path() {
        assert_eq!(ask(UnixStream::pair().unwrap().0.as_fd()), None);
    }
}
