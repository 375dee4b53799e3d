//! The server's cost of a measurement, from its `/metrics`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long the server may take for its metrics.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The longest page that is read.
const PAGE_BYTES_MAX: u64 = 8 << 20;

/// What a node has used and copied since it started.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ServerCost {
    pub(super) cpu_seconds: f64,
    pub(super) copied_bytes: f64,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    /// Nobody answers.
    #[error("cannot read metrics from {0}: {1}; give the address that the server has as --http")]
    Io(SocketAddr, std::io::Error),
    /// Somebody else answers.
    #[error("{0} does not answer with byway's metrics; give the address that the server has as --http")]
    Other(SocketAddr),
}

/// Asks a node.
pub(super) fn ask(at: SocketAddr) -> Result<ServerCost, CostError> {
    let page = fetch(at).map_err(|error| CostError::Io(at, error))?;
    parse(&page).ok_or(CostError::Other(at))
}

fn fetch(at: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&at, TIME_MAX)?;
    stream.set_read_timeout(Some(TIME_MAX))?;
    stream.set_write_timeout(Some(TIME_MAX))?;
    stream.write_all(format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut page = String::new();
    stream.take(PAGE_BYTES_MAX).read_to_string(&mut page)?;
    Ok(page)
}

fn parse(page: &str) -> Option<ServerCost> {
    let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
    let cpu_seconds = page.lines().find(|line| line.starts_with("byway_cpu_seconds_total ")).and_then(value)?;
    let copied = page
        .lines()
        .filter(|line| line.starts_with("byway_moved_bytes_total{") && line.contains("by=\"copied\""))
        .map(value)
        .sum::<Option<f64>>()?;
    Some(ServerCost { cpu_seconds, copied_bytes: copied })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_metrics_is_read() {
        let page = "HTTP/1.1 200 OK\r\n\r\n# HELP byway_cpu_seconds_total CPU\nbyway_cpu_seconds_total 1.25\n\
                    byway_moved_bytes_total{path=\"send\",by=\"copied\"} 100\n\
                    byway_moved_bytes_total{path=\"send\",by=\"spliced\"} 7000\n\
                    byway_moved_bytes_total{path=\"receive\",by=\"copied\"} 23\n";
        assert_eq!(parse(page), Some(ServerCost { cpu_seconds: 1.25, copied_bytes: 123.0 }));
        assert_eq!(parse("HTTP/1.1 200 OK\r\n\r\nhello"), None);
    }
}
