//! Processes on other machines. The launcher runs an agent there, by `ssh` or another command, and gives it an order: the process's environment,
//! program and arguments. They go by standard input: a command line shows them to all users of the machine, and the job's number lets into the job.
//! When that input ends, the launcher has gone or wants the process gone.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::process::{Input, Process};
use super::strays::kill_strays;
use crate::environment::{JOB, RANK};
use crate::limits::ORDER_BYTES_MAX;

/// An order: its length in bytes (4, little-endian), then strings, each ended by a zero byte: `NAME=VALUE`s, an empty one, program and arguments.
pub(super) fn order(variables: &[(&str, OsString)], program: &OsStr, arguments: &[OsString]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in variables {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(b'=');
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    bytes.push(0);
    for word in [program].into_iter().chain(arguments.iter().map(OsString::as_os_str)) {
        bytes.extend_from_slice(word.as_bytes());
        bytes.push(0);
    }
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
}

/// The command of an order.
fn read_order(mut from: impl Read) -> std::io::Result<Command> {
    let malformed = || std::io::Error::new(std::io::ErrorKind::InvalidData, "the order is malformed");
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > ORDER_BYTES_MAX {
        return Err(malformed());
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    let mut words = bytes.strip_suffix(&[0]).ok_or_else(malformed)?.split(|byte| *byte == 0);
    let mut variables = Vec::new();
    for word in words.by_ref().take_while(|word| !word.is_empty()) {
        let equals = word.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
        variables.push((OsStr::from_bytes(&word[..equals]), OsStr::from_bytes(&word[equals + 1..])));
    }
    let mut command = Command::new(OsString::from_vec(words.next().ok_or_else(malformed)?.to_vec()));
    command.args(words.map(OsStr::from_bytes)).envs(variables);
    Ok(command)
}

/// Takes an order from standard input and runs the process, until it ends or the input does. Gives its exit status, or 128 and the number of the
/// signal that ended it.
pub fn run_agent() -> ExitCode {
    let input = std::io::stdin();
    let mut variables = Vec::new();
    let done = read_order(input.lock()).and_then(|command| {
        let program = command.get_program().to_owned();
        let known = command.get_envs().filter(|(name, _)| [JOB, RANK].map(OsStr::new).contains(name));
        let text = |text: &OsStr| text.to_string_lossy().into_owned();
        variables = known.map(|(name, value)| (text(name), text(value.unwrap_or_default()))).collect();
        let started = Process::start_with(command, Input::None, Stdio::inherit);
        started.map_err(|error| std::io::Error::new(error.kind(), format!("{}: {error}", program.display())))
    });
    let mut process = match done {
        Ok(process) => process,
        Err(error) => {
            eprintln!("byway dsm: a process of the job cannot be started here: {error}");
            return ExitCode::FAILURE;
        }
    };
    let kill_strays = || {
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (&**name, &**value)).collect();
        // Without both, it would be any process's.
        if variables.len() == 2 {
            kill_strays(&variables);
        }
    };
    loop {
        let mut sources = [
            PollFd::from_borrowed_fd(process.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN),
        ];
        match poll(&mut sources, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return ExitCode::FAILURE,
        }
        let is_over = !sources[1].revents().is_empty();
        if let Some(status) = process.look_for_end() {
            process.kill_group();
            kill_strays();
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            return ExitCode::from(u8::try_from(code).unwrap_or(1));
        }
        if is_over {
            process.kill();
            kill_strays();
            return ExitCode::from(137);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_comes_back_from_its_bytes() {
        let variables = [("A", OsString::from("1=2")), ("B", OsString::new())];
        let bytes = order(&variables, OsStr::new("/bin/prog"), &["x y".into(), OsString::new(), "z\n".into()]);
        let command = read_order(&bytes[..]).unwrap();
        assert_eq!(command.get_program(), "/bin/prog");
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["x y", "", "z\n"]);
        let set: Vec<_> = command.get_envs().map(|(name, value)| (name, value.unwrap())).collect();
        assert_eq!(set, [(OsStr::new("A"), OsStr::new("1=2")), (OsStr::new("B"), OsStr::new(""))]);
    }

    #[test]
    fn what_is_no_order_is_refused() {
        let good = order(&[("A", "1".into())], OsStr::new("p"), &[]);
        for end in 0..good.len() {
            assert!(read_order(&good[..end]).is_err(), "{end} bytes");
        }
        assert!(read_order(&[255; 8][..]).is_err());
        let nameless = order(&[], OsStr::new(""), &[]);
        assert!(read_order(&[&[2, 0, 0, 0], b"A\0".as_slice()].concat()[..]).is_err(), "{nameless:?}");
    }
}
