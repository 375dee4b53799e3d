//! The command lines of a device's processes.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::message::pair;
use crate::attach::background;
use crate::attach::command::AttachArguments;
use crate::remote::RemoteUri;
use crate::tls::ClientTlsArguments;

/// How the processes of a device are started, with paths that hold in any directory.
#[derive(Clone, Debug)]
pub(in crate::attach) struct ServingCommand {
    words: Vec<OsString>,
    /// `--log`.
    log: Option<String>,
}

impl ServingCommand {
    pub(in crate::attach) fn new(
        arguments: &AttachArguments,
        uri: &RemoteUri,
        tls: &ClientTlsArguments,
        name: &str,
    ) -> Self {
        let mut words: Vec<OsString> =
            ["attach", &uri.to_string(), "--as", name, "--via", "loop"].into_iter().map(OsString::from).collect();
        let mode = if arguments.in_background { background::FLAG } else { "--foreground" };
        let flags = [(arguments.read_only, "--read-only"), (arguments.shared, "--shared"), (true, mode)];
        words.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| OsString::from(flag)));
        let files =
            [("--tls-ca", &tls.tls_ca), ("--tls-certificate", &tls.tls_certificate), ("--tls-key", &tls.tls_key)];
        for (flag, file) in files {
            words.extend(file.iter().flat_map(|file| [OsString::from(flag), file.clone().into_os_string()]));
        }
        words.extend(tls.tls_hostname.iter().flat_map(|host| ["--tls-hostname".into(), OsString::from(host)]));
        Self { words, log: arguments.log.clone() }
    }

    /// Starts the process that serves the device; gives a socket to it.
    pub(super) fn start_serving(&self, output: Stdio) -> io::Result<(Child, OwnedFd)> {
        self.start(&["--kept".to_owned()], output)
    }

    /// Starts a keeper for this process; gives a socket to it.
    pub(super) fn start_keeper(&self) -> io::Result<(Child, OwnedFd)> {
        self.start(&["--keeper-of".to_owned(), std::process::id().to_string()], Stdio::null())
    }

    fn start(&self, more: &[String], output: Stdio) -> io::Result<(Child, OwnedFd)> {
        let (own, theirs) = pair()?;
        // The program that runs, also if another version has its path by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("byway").args(&self.words).args(more).stdin(theirs).stdout(output);
        // A signal of the terminal goes to the keeper, which passes it on once.
        command.process_group(0);
        if let Some(log) = &self.log {
            command.env("RUST_LOG", log);
        }
        Ok((command.spawn()?, own))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: AttachArguments,
    }

    #[test]
    fn a_successor_has_the_arguments_of_the_process_before() {
        let given = [
            "attach",
            "byways+unix:///disk?socket=/run/a%20b",
            "--read-only",
            "--in-background",
            "--tls-ca",
            "/ca",
            "--tls-certificate",
            "/certificate",
            "--tls-key",
            "/key",
            "--tls-hostname",
            "host",
        ];
        let given = Line::parse_from(given).arguments;
        let uri = given.uri.clone().unwrap();
        let command = ServingCommand::new(&given, &uri, &given.tls, "name");
        let read = Line::parse_from(&command.words).arguments;
        assert_eq!(read.uri.unwrap().to_string(), uri.to_string());
        assert_eq!(read.name.unwrap().to_string(), "name");
        assert!(read.read_only && read.in_background && !read.shared && !read.foreground);
        let tls = |tls: ClientTlsArguments| (tls.tls_ca, tls.tls_certificate, tls.tls_key, tls.tls_hostname);
        assert_eq!(tls(read.tls), tls(given.tls));
    }
}
