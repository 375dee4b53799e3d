//! The resume file: the pieces of a copy that are durable at the destination.
//!
//! Text, one record a line, appended only after the destination was flushed:
//!
//! ```text
//! byway-resume 1
//! source IDENTITY
//! destination IDENTITY
//! bytes SIZE
//! data OFFSET LENGTH CRC32C     (decimal, decimal, eight hex digits)
//! zero OFFSET LENGTH
//! drop OFFSET LENGTH            (cancels earlier records that overlap)
//! ```
//!
//! Reading stops at the first incomplete line: a crash may tear the end, never the middle. A file whose head differs from
//! the current copy belongs to another copy, and the copy starts over.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use byway_reactor::ByteRange;
use rustix::fs::OFlags;

use crate::limits::RESUME_BYTES_MAX;

/// The first bytes of every resume file: another file is left as it is.
const MAGIC: &str = "byway-resume ";

/// A piece that is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Bytes.
    pub len: u64,
    /// CRC32C of the source's bytes; `None`: all zeroes.
    pub crc: Option<u32>,
}

/// A resume file, locked for one copy.
#[derive(Debug)]
pub struct ResumeLog {
    file: File,
    path: PathBuf,
    text: String,
}

impl ResumeLog {
    /// Opens or makes the file and locks it. Call [`ResumeLog::load`] next. `ends` are the paths of the copy's source and
    /// destination, which need not be there.
    ///
    /// # Errors
    /// The kernel's; `ResourceBusy` if another copy holds it; `InvalidInput` for what is no resume file, or is one of the
    /// `ends`: the file is emptied and removed in the end. Nothing has been changed then.
    pub fn open(path: &Path, ends: &[&Path]) -> io::Result<Self> {
        let (file, made) = open_or_make(path)?;
        if is_one_of(&file, ends)? {
            // The path is the destination's, and no file was there: remove the one just made.
            if made {
                std::fs::remove_file(path)?;
            }
            return Err(refusal("it is the source or the destination; name another resume file"));
        }
        lock(&file)?;
        check_magic(&file)?;
        Ok(Self { file, path: path.to_owned(), text: String::new() })
    }

    /// Whether the file belongs to a copy from this source to this destination, which can then be resumed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_of(&mut self, source: &str, destination: &str, bytes: u64) -> io::Result<bool> {
        Ok(self.read()?.starts_with(&head_of(source, destination, bytes)))
    }

    /// Empties the file, durably: nothing of its copy counts any more. Called before the destination's contents are
    /// dropped, since a record must never outlive the data that it describes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn clear(&mut self) -> io::Result<()> {
        self.restart("")
    }

    /// The records, by offset, if the file is of this copy; else the file is begun anew and there are none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn load(&mut self, source: &str, destination: &str, bytes: u64) -> io::Result<BTreeMap<u64, Record>> {
        let head = head_of(source, destination, bytes);
        let text = self.read()?;
        let Some(body) = text.strip_prefix(&head) else {
            self.restart(&head)?;
            return Ok(BTreeMap::new());
        };
        let (records, body_bytes) = parse_body(body, bytes);
        // Cut the torn end off, so that the next record starts a line.
        self.file.set_len((head.len() + body_bytes) as u64)?;
        Ok(records)
    }

    /// Bytes of the pieces that the file tells of, which is of a copy of `bytes`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recorded_bytes(&mut self, bytes: u64) -> io::Result<u64> {
        let text = self.read()?;
        let body = text.splitn(HEAD_LINES + 1, '\n').nth(HEAD_LINES).unwrap_or_default();
        Ok(parse_body(body, bytes).0.values().map(|record| record.len).sum())
    }

    fn read(&mut self) -> io::Result<String> {
        use std::io::Seek;
        self.file.rewind()?;
        let mut bytes = Vec::new();
        (&self.file).take(RESUME_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > RESUME_BYTES_MAX {
            return Ok(String::new());
        }
        // A torn end need not be UTF-8; what is replaced is no record.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn restart(&mut self, head: &str) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all(head.as_bytes())?;
        self.file.sync_data()
    }

    /// Appends records, durably. The destination has been flushed since they were written.
    ///
    /// # Errors
    /// The kernel's.
    pub fn append(&mut self, records: &[(u64, Record)]) -> io::Result<()> {
        self.text.clear();
        for (offset, Record { len, crc }) in records {
            // Writing to a string does not fail.
            let _ = match crc {
                Some(crc) => writeln!(self.text, "data {offset} {len} {crc:08x}"),
                None => writeln!(self.text, "zero {offset} {len}"),
            };
        }
        self.file.write_all(self.text.as_bytes())?;
        self.file.sync_data()
    }

    /// Takes back, durably, what is recorded of these ranges (offset, bytes): they are about to be written with something
    /// else, or do not hold what they should.
    ///
    /// # Errors
    /// The kernel's.
    pub fn forget(&mut self, ranges: &[(u64, u64)]) -> io::Result<()> {
        self.text.clear();
        for (offset, len) in ranges {
            // Writing to a string does not fail.
            let _ = writeln!(self.text, "drop {offset} {len}");
        }
        self.file.write_all(self.text.as_bytes())?;
        self.file.sync_data()
    }

    /// Removes the file: the copy is complete.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove(self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

/// The file, and whether it was made.
fn open_or_make(path: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    // Whatever it may have become meanwhile is not waited for.
    options.read(true).append(true).custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32);
    match std::fs::metadata(path) {
        // Opening some devices does something.
        Ok(there) if !there.is_file() => Err(refusal("it is not a regular file; name another resume file")),
        Ok(_) => Ok((options.open(path)?, false)),
        // Through a link that leads nowhere no file is made.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok((options.create_new(true).open(path)?, true)),
        Err(error) => Err(error),
    }
}

fn is_one_of(file: &File, ends: &[&Path]) -> io::Result<bool> {
    let here = file.metadata()?;
    let is_here = |there: Metadata| (there.dev(), there.ino()) == (here.dev(), here.ino());
    Ok(ends.iter().any(|end| std::fs::metadata(end).is_ok_and(is_here)))
}

/// Refuses files that are not resume files.
fn check_magic(file: &File) -> io::Result<()> {
    let here = file.metadata()?;
    let mut begins = [0; MAGIC.len()];
    let mut is_ours = || file.read_exact_at(&mut begins, 0).is_ok() && begins == *MAGIC.as_bytes();
    if here.is_file() && (here.len() == 0 || is_ours()) {
        return Ok(());
    }
    Err(refusal("it is not a resume file; name another, or remove it if it is not needed"))
}

fn refusal(reason: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, reason)
}

fn lock(file: &File) -> io::Result<()> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            io::Error::new(ErrorKind::ResourceBusy, "another copy to this destination is running")
        }
        TryLockError::Error(error) => error,
    })
}

/// Lines of [`head_of`].
const HEAD_LINES: usize = 4;

fn head_of(source: &str, destination: &str, bytes: u64) -> String {
    format!("{MAGIC}1\nsource {source}\ndestination {destination}\nbytes {bytes}\n")
}

/// Puts a record in and takes out all that it overlaps: an earlier run may have cut its pieces otherwise.
pub(super) fn supersede(records: &mut BTreeMap<u64, Record>, offset: u64, record: Record) {
    remove_overlap(records, offset, record.len);
    records.insert(offset, record);
}

fn remove_overlap(records: &mut BTreeMap<u64, Record>, offset: u64, len: u64) {
    let end = offset + len;
    while let Some((&at, _)) = records.range(..end).next_back().filter(|(at, old)| *at + old.len > offset) {
        records.remove(&at);
    }
}

/// The records of the lines after the head, and the length of the whole ones.
fn parse_body(body: &str, bytes: u64) -> (BTreeMap<u64, Record>, usize) {
    let (mut records, mut whole_bytes) = (BTreeMap::new(), 0);
    for line in body.split_inclusive('\n') {
        match line.strip_suffix('\n').and_then(|line| parse_line(line, bytes)) {
            Some(Line::Done(offset, record)) => supersede(&mut records, offset, record),
            Some(Line::Drop(offset, len)) => remove_overlap(&mut records, offset, len),
            None => break,
        }
        whole_bytes += line.len();
    }
    (records, whole_bytes)
}

/// A line after the head.
enum Line {
    Done(u64, Record),
    Drop(u64, u64),
}

fn parse_line(line: &str, bytes: u64) -> Option<Line> {
    let mut words = line.split(' ');
    let kind = words.next()?;
    let offset: u64 = words.next()?.parse().ok()?;
    let len: u64 = words.next()?.parse().ok()?;
    let line = match kind {
        "data" => {
            let crc = words.next().filter(|word| word.len() == 8).and_then(|w| u32::from_str_radix(w, 16).ok())?;
            Line::Done(offset, Record { len, crc: Some(crc) })
        }
        "zero" => Line::Done(offset, Record { len, crc: None }),
        "drop" => Line::Drop(offset, len),
        _ => return None,
    };
    let inside = len > 0 && ByteRange::new(offset, len).ends_by(bytes);
    (inside && words.next().is_none()).then_some(line)
}
