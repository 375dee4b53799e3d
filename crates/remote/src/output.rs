//! Standard output and standard error of the commands.
//!
//! `println!` and `eprintln!` panic when the reader has gone, as in `byway bench volume ... | head`; clippy refuses them in
//! this crate. A reader that has gone is not a failure of the command. Other write errors, such as a full disk, fail it.

use std::fmt::Display;
use std::io::{self, ErrorKind, StdoutLock, Write};
use std::sync::Mutex;

/// The first failure of [`line`], for the end of the program.
static FAILURE: Mutex<Option<io::Error>> = Mutex::new(None);

/// Standard output, which takes everything once its reader has gone.
#[derive(Debug)]
pub struct Output(StdoutLock<'static>);

/// Locks standard output.
pub fn stdout() -> Output {
    Output(io::stdout().lock())
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        unless_closed(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        unless_closed(self.0.flush(), ())
    }
}

fn unless_closed<T>(result: io::Result<T>, instead: T) -> io::Result<T> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(instead),
        result => result,
    }
}

/// Prints a line to standard output. A failure is for [`take_failure`].
pub fn line(text: impl Display) {
    let mut out = stdout();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush())
        && let Ok(mut failure) = FAILURE.lock()
    {
        failure.get_or_insert(error);
    }
}

/// Prints a line to standard error, if anybody reads that.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "byway: {text}");
}

/// Why not all of the output was written, once.
pub fn take_failure() -> Option<io::Error> {
    FAILURE.lock().ok()?.take()
}
