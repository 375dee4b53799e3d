//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use byway_bench::{BenchCommand, MeasuredNode};
use byway_reactor::IoChoice;
use byway_service::block::spec::{Stage, VolumeName};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::address::Cidr;
use crate::admission::ClientAuthentication;
use crate::attach::{self, AttachArguments, DetachArguments};
use crate::check;
use crate::config::{TlsMode, parse_stage};
use crate::control::{self, ControlArguments};
use crate::copy::{self, CopyArguments};
use crate::demo::{self, DemoArguments};
use crate::doctor::{self, DoctorArguments};
use crate::dsm::{self, DsmCommand};
use crate::far::{self, FarArguments};
use crate::help;
use crate::inspect::{self, InfoArguments, LsArguments};
use crate::lend::LendSpec;
use crate::mount::{self, MountArguments, UmountArguments};
use crate::node::Measuring;
use crate::opener;
use crate::output;
use crate::serve;
use crate::units::parse_size;

/// Use the disks, files and idle memory of the other machines at the speed of the network.
#[derive(Parser, Debug)]
#[command(name = "byway", version, about, max_term_width = 100, disable_help_subcommand = true, after_long_help = help::BYWAY)]
pub struct Cli {
    /// How much is logged on standard error [default: info, or as RUST_LOG says]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub log: Option<String>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show what byway does, on this machine alone and without any set-up
    #[command(after_long_help = help::DEMO)]
    Demo(DemoArguments),
    /// Serve volumes and directories until SIGTERM
    #[command(after_long_help = help::SERVE)]
    Serve(Box<ServeArguments>),
    /// Copy an image from and to files and volumes: in parallel, holes as holes; resumes an interrupted copy
    #[command(after_long_help = help::COPY)]
    Copy(CopyArguments),
    /// Run a program whose memory lies on other machines
    #[command(after_long_help = help::FAR)]
    Far(FarArguments),
    /// Ask a running node: reload, reopen, status
    #[command(after_long_help = help::CTL)]
    Ctl(ControlArguments),
    /// List the volumes of a server
    #[command(after_long_help = help::INSPECT)]
    Ls(LsArguments),
    /// Describe a volume: its size, its block, its flags, how much of it is data
    #[command(after_long_help = help::INSPECT)]
    Info(InfoArguments),
    /// Make a volume a block device of this machine
    #[command(after_long_help = help::ATTACH)]
    Attach(AttachArguments),
    /// Take the block device of a volume apart
    #[command(after_long_help = help::DETACH)]
    Detach(DetachArguments),
    /// Use a share as a directory of this machine
    #[command(after_long_help = help::MOUNT)]
    Mount(MountArguments),
    /// Remove a mount of a share
    Umount(UmountArguments),
    /// Run programs whose processes share memory
    #[command(subcommand)]
    Dsm(DsmCommand),
    /// Measure
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Say what this machine can do, and what to do about the rest
    #[command(after_long_help = help::DOCTOR)]
    Doctor(DoctorArguments),
    /// The privileged part of a node with --user; started by the node itself
    #[command(hide = true)]
    Opener(Box<ServeArguments>),
    /// Print completions for a shell to standard output
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages, one file per command
    Man {
        /// The folder for them, made if it is not there.
        directory: PathBuf,
    },
}

/// The flags of `byway serve`.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArguments {
    /// Say whether the configuration is good, with all the files, users and addresses that it names, and serve nothing
    #[arg(long)]
    pub check: bool,
    /// A volume to serve; may be repeated.
    ///
    /// NAME=STORE[,ro][,direct][,stage=device][,shared][,format=raw][,tls=required][,rate=SIZE/s][,access=CLIENT[:ro]]...
    /// [,description=TEXT], where STORE is PATH, mem:SIZE, null:SIZE, stripe:chunk=SIZE:PATH:PATH...
    /// or fault:RULE[:RULE]...:STORE. Sizes have the suffixes K, M, G, T (binary). A comma or colon inside a path needs a backslash before it, or double quotes around the path. A file
    /// that looks like an image of a virtual machine (qcow2, vmdk, ...) is refused unless its bytes are to be served as they are:
    /// format=raw.
    ///
    /// With access=CLIENT the volume is for that client alone, and with :ro behind it to be read; repeat it for several. CLIENT is
    /// a subject alternative name of the client's certificate (DNS or URI), a range of addresses (10.0.0.0/8), or unix for clients
    /// of unix sockets and shared memory. For other clients the volume does not exist.
    ///
    /// fault: is another store with faults put in, to test clients: fault:flush=eio#1:PATH fails the first flush. RULE is
    /// OPERATION=EFFECT[@OFFSET+LENGTH][#COUNT]. OPERATION is any, read, write, flush, trim, zero or extents. EFFECT is a time
    /// to wait (10ms), short (half of what was asked for), or the error eio, enospc, enomem, eperm or etimedout. @OFFSET+LENGTH limits
    /// a rule to these bytes, #COUNT to so many operations. null: takes no faults.
    #[arg(long, value_name = "SPEC")]
    pub volume: Vec<String>,
    /// A directory to share; may be repeated. Clients come in where byway's own wire listens (--listen).
    ///
    /// NAME=DIR[,ro][,users=squash:UID[:GID]|trust|trust-root][,access=CLIENT[:ro]]...[,description=TEXT]. Without users, clients
    /// have the rights of the owner and group of DIR if the node runs as root, else those of the node's user; root as owner or
    /// group counts as nobody (65534). users=squash:UID[:GID] names another user (GID is UID if it is left out; squash:0 makes clients
    /// root). users=trust takes user and groups as each client's machine tells them, with root as nobody, and users=trust-root takes root,
    /// too. All three need root. A name is a volume's or a share's. CLIENT is as for --volume.
    #[arg(long, value_name = "SPEC")]
    pub share: Vec<String>,
    /// Refused, with what to write.
    #[arg(hide = true, value_name = "PATH", value_parser = refuse_unnamed)]
    pub unnamed: Vec<String>,
    /// Where byway's own wire listens: tcp://HOST[:PORT] (port 4711), unix:///PATH, shm:///PATH for clients of this
    /// machine that share memory with the node, or rdma://ADDRESS[:PORT] at an RDMA device (byway+unix:///NAME?socket=/PATH,
    /// byway+shm:///NAME?socket=/PATH and byway+rdma://HOST/NAME for byway's other commands); may be repeated. Sockets take
    /// ,mode=MODE and ,group=NAME as --nbd does
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Where NBD clients come in: tcp://HOST[:PORT] (port 10809) or unix:///PATH[,mode=MODE][,group=NAME]; may be repeated
    ///
    /// Clients of a unix socket need the right to write its file: with group=disk members of that group connect. MODE is octal,
    /// 0660 if there is a group, else what the umask leaves. A comma in PATH needs a backslash before it.
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<String>,
    /// Where /metrics, /healthz and /slow are served: ADDRESS:PORT [default: nowhere]
    #[arg(long, value_name = "ADDRESS", value_parser = byway_remote::http_address)]
    pub http: Option<SocketAddr>,
    /// The control socket, for `byway ctl` [default: nowhere]
    #[arg(long, value_name = "PATH")]
    pub ctl: Option<PathBuf>,
    /// What the event loops stand on: auto, uring or epoll [default: auto]
    #[arg(long, value_name = "BACKEND", value_parser = byway_remote::parse_io)]
    pub io: Option<IoChoice>,
    /// Memory for data in flight, in bytes, for all loops together; at least 4M [default: 64M]
    ///
    /// Connections receive into other memory: 4 KiB for each connection (a session of byway's own wire has three), 32 KiB
    /// while a longer message comes, and at most 192 MiB for each loop.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub frames: Option<u64>,
    /// Memory for mapped files: more of their bytes are let go of; at least 16M [default: half of the memory]
    ///
    /// What a node sends from a cached file or a memory volume counts as the node's resident memory (RssFile, RssShmem)
    /// until it is let go of. It stays in the page cache. The memory is the machine's, or that of the node's cgroup.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub mapped: Option<u64>,
    /// Lend memory to programs of other machines (byway far): SIZE[,guard=SIZE], in slabs of 64M [default: none]
    ///
    /// With guard=SIZE no slab is lent that would leave the machine less than SIZE of available memory. A slab takes memory as its
    /// borrower fills it, and is free again when the borrower gives it back or its session ends.
    #[arg(long, value_name = "SIZE")]
    pub lend: Option<LendSpec>,
    /// Event loops, 1 to 256, each with at least 4M of the frames [default: one per core, as far as there are frames]
    #[arg(long, value_name = "N")]
    pub threads: Option<u16>,
    /// Where the bytes of direct volumes are between disk and wire: memory, or device, the disk's own controller memory
    /// [default: memory]
    ///
    /// device needs an NVMe controller with a memory buffer for each direct volume, and a kernel with CONFIG_PCI_P2PDMA
    /// (byway doctor says whether both are there). Over TCP a CPU still reads the bytes out of it, which is slower than out of
    /// main memory; /metrics counts them. A volume's own stage= wins.
    #[arg(long, value_name = "WHERE", value_parser = parse_stage)]
    pub stage: Option<Stage>,
    /// A configuration file; flags win over its keys, and lists are added to its lists
    ///
    /// TOML. Keys are called as the flags are, with _ for -; but `volumes` is a list of SPECs, a volume can also be a table
    /// [volume.NAME], and what begins with --tls is in the table [tls]. dist/byway.toml in the sources shows all.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The certificate chain of this node, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// The private key of this node, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Who signs the certificates of clients, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_client_ca: Option<PathBuf>,
    /// Revocation lists of those who sign the certificates of clients, PEM; reloaded like the certificates
    ///
    /// FILE holds a list (X.509 CRL) of each authority that has signed a client's certificate: where there is none, the
    /// client is refused. A list stays in force past its nextUpdate. After a reload, connections whose certificate is on a list end.
    #[arg(long, value_name = "FILE", requires = "tls_client_ca")]
    pub tls_crl: Option<PathBuf>,
    /// Whether connections must be over TLS, or only those that ask for it and those of volumes with tls=required
    /// [default: required]
    #[arg(long, value_name = "WHEN", requires = "tls_certificate")]
    pub tls: Option<TlsMode>,
    /// Whether clients show certificates [default: required with --tls-client-ca, else off]
    #[arg(long, value_name = "WHEN", requires = "tls_certificate")]
    pub tls_clients: Option<ClientAuthentication>,
    /// Let only these addresses connect, ADDRESS/BITS; may be repeated. Loopback is always let in
    #[arg(long, value_name = "CIDR")]
    pub allow: Vec<Cidr>,
    /// Accept clients without certificates from the --allow ranges, although addresses can be forged
    #[arg(long)]
    pub insecure: bool,
    /// Become this user once everything is open
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Remember operations that take longer at the store than this, for /slow, in microseconds [default: 100000]
    #[arg(long, value_name = "MICROSECONDS")]
    pub slow_us: Option<u64>,
}

/// Refuses a volume without `--volume`, or without a name.
fn refuse_unnamed(text: &str) -> Result<String, String> {
    if text.contains('=') {
        return Err(format!("volumes are flags; write --volume {text}"));
    }
    let stem = Path::new(text).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let name = VolumeName::new(&stem).map_or_else(|_| "disk".to_owned(), |name| name.to_string());
    Err(format!("a volume has a name; write --volume {name}={text}"))
}

/// Runs the program. The exit code is 0 when it did what it was asked, 1 when it could not, 2 for a bad command line, 130 when a
/// signal stopped a copy.
pub fn run() -> ExitCode {
    byway_reactor::ignore_file_size_signal();
    let cli = Cli::parse();
    crate::log::to_stderr(cli.log.as_deref());
    let done = match cli.command {
        Command::Serve(arguments) if arguments.check => {
            check::run(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from)
        }
        Command::Serve(arguments) => {
            serve::run(&arguments, Measuring::default()).map(|()| ExitCode::SUCCESS).map_err(Failure::from)
        }
        Command::Demo(arguments) => demo::run(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Copy(arguments) => copy::run(&arguments).map_err(Failure::from),
        Command::Far(arguments) => far::run(&arguments).map_err(Failure::from),
        Command::Ctl(arguments) => control::run(&arguments).map_err(Failure::from),
        Command::Opener(arguments) => opener::run(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Ls(arguments) => inspect::ls(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Info(arguments) => inspect::info(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Attach(arguments) => attach::attach(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Mount(arguments) => mount::run(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Umount(arguments) => mount::umount(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Dsm(command) => dsm::run(&command).map_err(Failure::from),
        Command::Bench(command) => byway_bench::run(&command, measured_node).map(|()| ExitCode::SUCCESS),
        Command::Doctor(arguments) => doctor::run(arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Completions { shell } => {
            // It panics where it cannot write.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "byway", &mut script);
            output::line(String::from_utf8_lossy(&script).trim_end());
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { directory } => man(&directory).map(|()| ExitCode::SUCCESS),
    };
    let done = match output::take_failure() {
        Some(error) if done.is_ok() => Err(format!("standard output: {error}").into()),
        _ => done,
    };
    done.unwrap_or_else(|error| {
        output::note(harmless(&error.to_string()));
        ExitCode::FAILURE
    })
}

/// An error for a terminal: it may quote a server, and nothing in it shall move the cursor.
fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

type Failure = Box<dyn std::error::Error>;

/// A node that a measurement or the demonstration has started.
fn measured_node(node: &MeasuredNode) -> Result<(), Failure> {
    let words = ["byway", "serve"].into_iter().chain(node.serve.iter().map(String::as_str));
    let Command::Serve(arguments) = Cli::try_parse_from(words)?.command else { return Ok(()) };
    let staging_bytes = node.staging.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    Ok(serve::run(&arguments, Measuring { slice_bytes: node.slice, staging_bytes })?)
}

fn man(directory: &std::path::Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory)
        .and_then(|()| help::write_pages(Cli::command(), directory))
        .map_err(|error| format!("{}: {error}; name a folder that can be written", directory.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_cannot_steer_the_terminal() {
        assert_eq!(harmless("a\u{1b}[2Jb\nc\u{9b}"), "a\u{fffd}[2Jb\nc\u{fffd}");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
