//! Two programs at the ends of a wire, for measuring it: `wire serve ADDRESS` answers, `wire MODE ADDRESS` asks and prints what it
//! took as JSON. `cargo xtask peers fabric` runs them beside their peers.
//!
//! ADDRESS is `tcp://IP:PORT`, `unix:///PATH` or `shm:///PATH`. Modes:
//!
//! - `call`: a message with `--bytes` of payload, answered by one with `--reply`; a large one goes into a window of ours.
//! - `echo`: `--bytes` there and back; large ones are got from a window and put into another.
//! - `give`: `--bytes` there, `--depth` under way; large ones are got.
//! - `get`: the server gets `--bytes` from us, `--depth` under way, and measures. Always the same bytes, or with `--region BYTES`
//!   (1 MiB to 128 MiB, a power of two) from all over a region. Over shared memory the server copies out of a mapping: nobody
//!   answers it, and we sleep until it says what it took.
//! - `memcpy`: no wire: what copying `--bytes` costs one thread, `--depth` buffers in turn.
//!
//! `--polling` never sleeps (both ends need it), `--seconds S`, `--io uring|epoll`.

mod asking;
mod command;
mod end;
mod serving;

use std::process::ExitCode;

use command::{Command, Mode};

fn main() -> ExitCode {
    let outcome = Command::parse(std::env::args().skip(1)).and_then(|command| match command.mode {
        Mode::Serve => serving::run(&command),
        Mode::Memcpy => {
            asking::memcpy(&command);
            Ok(())
        }
        _ => asking::run(&command),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wire: {error}");
            ExitCode::FAILURE
        }
    }
}
