//! The lines that come out of a pipe.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::limits::OUTPUT_LINE_BYTES_MAX;

/// A pipe, and the beginning of a line that has not come whole.
#[derive(Debug)]
pub(super) struct Lines {
    pipe: OwnedFd,
    begun: Vec<u8>,
}

impl Lines {
    pub(super) fn of(pipe: OwnedFd) -> Self {
        Self { pipe, begun: Vec::new() }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// Takes what is there, and gives whole lines without their ends, and lines that are too long in parts. False at the end of the pipe, behind the last
    /// line, also if that one has no end.
    pub(super) fn read(&mut self, mut line: impl FnMut(&[u8])) -> bool {
        let mut bytes = vec![0; OUTPUT_LINE_BYTES_MAX];
        let count = match rustix::io::read(&self.pipe, &mut bytes[..]) {
            Err(rustix::io::Errno::INTR) => return true,
            Err(_) | Ok(0) => {
                if !self.begun.is_empty() {
                    line(&self.begun);
                }
                return false;
            }
            Ok(count) => count,
        };
        for part in bytes[..count].split_inclusive(|byte| *byte == b'\n') {
            let room = OUTPUT_LINE_BYTES_MAX - self.begun.len();
            let (first, rest) = part.split_at(part.len().min(room));
            self.begun.extend_from_slice(first);
            match self.begun.strip_suffix(b"\n") {
                Some(whole) => line(whole),
                None if self.begun.len() == OUTPUT_LINE_BYTES_MAX => line(&self.begun),
                None => continue,
            }
            self.begun.clear();
            // Shorter than a line, as a read is.
            match rest.strip_suffix(b"\n") {
                Some(whole) => line(whole),
                None => self.begun.extend_from_slice(rest),
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of what is written to a pipe, in these parts.
    fn lines(parts: &[&[u8]]) -> Vec<Vec<u8>> {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (mut pipe, mut lines) = (Lines::of(read), Vec::new());
        for part in parts {
            let mut sent = 0;
            while sent < part.len() {
                let end = part.len().min(sent + 4096);
                sent += rustix::io::write(&write, &part[sent..end]).unwrap();
                assert!(pipe.read(|line| lines.push(line.to_vec())));
            }
        }
        drop(write);
        assert!(!pipe.read(|line| lines.push(line.to_vec())));
        lines
    }

    #[test]
    fn lines_come_whole_however_they_are_written() {
        assert_eq!(lines(&[b"one\ntw", b"o\n\nthree"]), [&b"one"[..], b"two", b"", b"three"]);
        assert!(lines(&[]).is_empty());
    }

    #[test]
    fn a_line_without_an_end_comes_in_parts() {
        let long = vec![b'x'; OUTPUT_LINE_BYTES_MAX + 10];
        let parts = lines(&[&long, b"\nend\n"]);
        let lengths: Vec<usize> = parts.iter().map(Vec::len).collect();
        assert_eq!(lengths, [OUTPUT_LINE_BYTES_MAX, 10, 3]);
        let exact = vec![b'x'; OUTPUT_LINE_BYTES_MAX];
        assert_eq!(lines(&[&exact, b"\n"]).concat(), exact);
    }
}
