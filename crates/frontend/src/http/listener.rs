//! The HTTP front end's listener: so many connections, none of them silent for long; a new one takes the place of the oldest.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tokio_io_timeout::TimeoutStream;

use crate::limits::{HTTP_CONNECTION_SECONDS_MAX, HTTP_CONNECTIONS_MAX, HTTP_IDLE_SECONDS_MAX};

pub(super) struct Bounded {
    listener: TcpListener,
    /// The connections, oldest first: each ends when its sender is dropped.
    places: VecDeque<oneshot::Sender<()>>,
    admits: Admits,
}

/// The addresses that may connect.
pub(super) type Admits = Box<dyn Fn(SocketAddr) -> bool + Send + Sync>;

impl Bounded {
    pub(super) fn new(listener: TcpListener, admits: Admits) -> Self {
        Self { listener, places: VecDeque::new(), admits }
    }

    /// A place for a new connection; the oldest one loses its own if there is no other. A client whose request is
    /// answered at once is hardly ever the oldest; one that sends half a request and waits soon is.
    fn place(&mut self) -> oneshot::Receiver<()> {
        self.places.retain(|place| !place.is_closed());
        while self.places.len() >= HTTP_CONNECTIONS_MAX {
            self.places.pop_front();
        }
        let (sender, place) = oneshot::channel();
        self.places.push_back(sender);
        place
    }
}

/// A connection that has one of the [`HTTP_CONNECTIONS_MAX`] places.
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    end: Pin<Box<Sleep>>,
    place: oneshot::Receiver<()>,
}

impl axum::serve::Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((_, peer)) if !(self.admits)(peer) => {
                    tracing::warn!(%peer, "HTTP connection refused: not in an --allow range");
                }
                Ok((stream, peer)) => {
                    let mut stream = TimeoutStream::new(stream);
                    let limit = Some(Duration::from_secs(HTTP_IDLE_SECONDS_MAX));
                    stream.set_read_timeout(limit);
                    stream.set_write_timeout(limit);
                    let end = Box::pin(tokio::time::sleep(Duration::from_secs(HTTP_CONNECTION_SECONDS_MAX)));
                    return (Connection { stream: Box::pin(stream), end, place: self.place() }, peer);
                }
                Err(error) => {
                    tracing::warn!(%error, "the HTTP server cannot accept a connection");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Connection {
    /// An error from the end of its time on, or once its place is another's. Asked wherever it is read from or written to: requests that came all at once are
    /// answered without another read, each for as long as the peer takes.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> std::io::Result<()> {
        let is_over = self.end.as_mut().poll(cx).is_ready() || Pin::new(&mut self.place).poll(cx).is_ready();
        if is_over { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        self.poll_end(cx)?;
        self.stream.as_mut().poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.poll_end(cx)?;
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.poll_end(cx)?;
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.poll_end(cx)?;
        self.stream.as_mut().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::serve::Listener;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silent_connections_hold_up_no_new_one() {
        let mut bounded = Bounded::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), Box::new(|_| true));
        let address = bounded.local_addr().unwrap();
        let (mut clients, mut connections) = (Vec::new(), Vec::new());
        for _ in 0..HTTP_CONNECTIONS_MAX {
            clients.push(TcpStream::connect(address).await.unwrap());
            connections.push(bounded.accept().await.0);
        }
        let mut late = TcpStream::connect(address).await.unwrap();
        late.write_all(b"x").await.unwrap();
        let (mut served, _) = bounded.accept().await;
        served.read_exact(&mut [0]).await.unwrap();
        // The clock stands still unless all wait: had the oldest kept its place, it would end when its time is over.
        let now = Instant::now();
        let ended = connections[0].read_exact(&mut [0]).await.unwrap_err();
        assert_eq!((ended.kind(), Instant::now()), (std::io::ErrorKind::TimedOut, now), "the oldest lost its place");
        clients[1].write_all(b"x").await.unwrap();
        connections[1].read_exact(&mut [0]).await.unwrap();
    }

    fn assert_ended_in_time(ended: &std::io::Error, began: Instant) {
        assert_eq!(ended.kind(), std::io::ErrorKind::TimedOut);
        assert!(began.elapsed().as_secs() >= HTTP_CONNECTION_SECONDS_MAX - 10, "after {:?}", began.elapsed());
        assert!(began.elapsed().as_secs() <= HTTP_CONNECTION_SECONDS_MAX + 10, "after {:?}", began.elapsed());
    }

    /// The clock stands still while something can be done, so this takes no time.
    #[tokio::test(start_paused = true)]
    async fn who_sends_a_byte_now_and_then_keeps_no_place_for_ever() {
        let mut bounded = Bounded::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), Box::new(|_| true));
        let mut client = TcpStream::connect(bounded.local_addr().unwrap()).await.unwrap();
        let (mut connection, _) = bounded.accept().await;
        let began = Instant::now();
        tokio::spawn(async move {
            while client.write_all(b"x").await.is_ok() {
                sleep(Duration::from_secs(HTTP_IDLE_SECONDS_MAX - 1)).await;
            }
        });
        let mut byte = [0];
        let ended = loop {
            match connection.read_exact(&mut byte).await {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_ended_in_time(&ended, began);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_only_written_to_keeps_no_place_for_ever() {
        let mut bounded = Bounded::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), Box::new(|_| true));
        let mut client = TcpStream::connect(bounded.local_addr().unwrap()).await.unwrap();
        let (mut connection, _) = bounded.accept().await;
        let began = Instant::now();
        tokio::spawn(async move { while client.read(&mut [0; 64]).await.is_ok_and(|count| count > 0) {} });
        let ended = loop {
            if let Err(error) = connection.write_all(b"a page").await {
                break error;
            }
            sleep(Duration::from_secs(HTTP_IDLE_SECONDS_MAX - 1)).await;
        };
        assert_ended_in_time(&ended, began);
    }
}
