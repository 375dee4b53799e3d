//! The command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use byway_bench::{BenchCommand, BenchError, MeasuredNode};
use byway_reactor::IoChoice;
use byway_service::block::spec::{Stage, VolumeName};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::address::Cidr;
use crate::admission::ClientAuthentication;
use crate::attach::{self, AttachArguments, DetachArguments};
use crate::check;
use crate::config::{ConfigError, TlsMode, parse_stage};
use crate::control::{self, ControlArguments};
use crate::copy::{self, CopyArguments};
use crate::demo::{self, DemoArguments};
use crate::doctor::{self, DoctorArguments};
use crate::dsm::{self, DsmCommand};
use crate::far::{self, FarArguments};
use crate::help;
use crate::inspect::{self, InfoArguments, LsArguments};
use crate::lend::LendSpec;
use crate::mount::helper::Helper;
use crate::mount::{self, MountArguments, UmountArguments};
use crate::node::Measuring;
use crate::opener;
use crate::output;
use crate::run::{self as run_program, RunArguments};
use crate::serve::{self, ServeError};
use crate::units::parse_size;

/// Share disks, files and memory between the machines of a cluster.
#[derive(Parser, Debug)]
#[command(name = "byway", version, about, max_term_width = 100, disable_help_subcommand = true, after_long_help = help::BYWAY)]
pub struct Cli {
    /// Log level on standard error [default: info, or the value of RUST_LOG]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub log: Option<String>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show byway at work on this machine, without any configuration
    #[command(after_long_help = help::DEMO)]
    Demo(DemoArguments),
    /// Serve volumes and directories until SIGTERM
    #[command(after_long_help = help::SERVE)]
    Serve(Box<ServeArguments>),
    /// Copy an image between files, devices and volumes: parallel, sparse, resumable
    #[command(after_long_help = help::COPY)]
    Copy(CopyArguments),
    /// Run a program with part of its memory on other machines
    #[command(after_long_help = help::FAR)]
    Far(FarArguments),
    /// Control a running node: status, reload, reopen; and see the state of mounts and of byway far
    #[command(after_long_help = help::CTL)]
    Ctl(ControlArguments),
    /// List the volumes and shares of a server
    #[command(after_long_help = help::INSPECT)]
    Ls(LsArguments),
    /// Show a volume's size, block size, flags and allocated space
    #[command(after_long_help = help::INSPECT)]
    Info(InfoArguments),
    /// Attach a volume as a block device of this machine
    #[command(after_long_help = help::ATTACH)]
    Attach(AttachArguments),
    /// Detach the block device of a volume
    #[command(after_long_help = help::DETACH)]
    Detach(DetachArguments),
    /// Mount a share on a directory of this machine
    #[command(after_long_help = help::MOUNT)]
    Mount(MountArguments),
    /// Unmount a share
    Umount(UmountArguments),
    /// Run a program that uses a share below a path, without a mount
    #[command(after_long_help = help::RUN)]
    Run(RunArguments),
    /// Run programs whose processes share memory
    #[command(subcommand)]
    Dsm(DsmCommand),
    /// Measure a volume, the fabric, or the papers' figures
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Check which features this machine supports, and how to enable the others
    #[command(after_long_help = help::DOCTOR)]
    Doctor(DoctorArguments),
    /// The privileged part of a node with --user; started by the node itself
    #[command(hide = true)]
    Opener(Box<ServeArguments>),
    /// Print completions for a shell to standard output
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages, one file per command
    Man {
        /// The folder to write to; created if it does not exist.
        directory: PathBuf,
    },
}

/// The flags of `byway serve`.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArguments {
    /// Check the configuration and the files, users and addresses that it names, then exit
    #[arg(long)]
    pub check: bool,
    /// A volume to serve; may be repeated
    ///
    /// SPEC is NAME=STORE[,ro][,direct][,stage=device][,shared][,format=raw][,tls=required][,rate=SIZE/s][,access=CLIENT[:ro]]...
    /// [,description=TEXT]. STORE is PATH (a file or block device), mem:SIZE, null:SIZE, stripe:chunk=SIZE:PATH:PATH...
    /// or fault:RULE[:RULE]...:STORE. Sizes take the suffixes K, M, G, T (powers of 1,024). In a path, write a comma or colon with a
    /// backslash before it, or put the path in double quotes. An image in another format than raw (qcow2, vmdk, ...) is refused;
    /// format=raw serves its bytes unchanged.
    ///
    /// access=CLIENT restricts the volume to that client, access=CLIENT:ro to reads by it; repeat it for several clients. CLIENT is
    /// a subject alternative name of the client's certificate (DNS or URI), an address range (10.0.0.0/8), or unix for clients
    /// of unix sockets and shared memory. Other clients do not see the volume.
    ///
    /// fault: injects faults into another store, to test clients: fault:flush=eio#1:PATH fails the first flush. RULE is
    /// OPERATION=EFFECT[@OFFSET+LENGTH][#COUNT]. OPERATION is any, read, write, flush, trim, zero or extents. EFFECT is a delay
    /// (10ms), short (half of the request is done), or an error: eio, enospc, enomem, eperm or etimedout. @OFFSET+LENGTH limits
    /// a rule to these bytes, #COUNT to that many operations. null: stores cannot have faults.
    #[arg(long, value_name = "SPEC")]
    pub volume: Vec<String>,
    /// A directory to share; may be repeated. Clients connect to the addresses of --listen
    ///
    /// SPEC is NAME=DIR[,ro][,users=squash:UID[:GID]|map:FILE|trust|trust-root][,writers=local|exclusive][,access=CLIENT[:ro]]...
    /// [,description=TEXT]. Without users, clients
    /// have the rights of DIR's owner and group if the node runs as root, else those of the node's user; if the owner or group is root,
    /// they have those of nobody (65534). users=squash:UID[:GID] names another user (GID defaults to UID; squash:0 makes clients
    /// root). users=trust takes user and groups from each client's machine and maps root to nobody; users=trust-root keeps root.
    /// users=map:FILE takes the user from each client's machine, and FILE has lines CLIENTUID SERVERUID[:SERVERGID[,SERVERGID]...];
    /// users without a line are nobody. A reload reads FILE again. All four need a node that runs as root. writers=exclusive says that only clients change the directory's files: then mounts keep
    /// data, attributes and names until another client changes them. Volumes and shares have one name space. CLIENT is as for --volume.
    #[arg(long, value_name = "SPEC")]
    pub share: Vec<String>,
    /// Refused, with what to write.
    #[arg(hide = true, value_name = "PATH", value_parser = refuse_unnamed)]
    pub unnamed: Vec<String>,
    /// Address for clients of byway's own protocol; may be repeated
    ///
    /// ADDRESS is tcp://HOST[:PORT] (default port 4711), unix:///PATH, shm:///PATH (shared memory, for clients of this machine) or
    /// rdma://ADDRESS[:PORT] (the address of an RDMA device). The matching URIs for byway's other commands are byway://HOST/NAME,
    /// byway+unix:///NAME?socket=/PATH, byway+shm:///NAME?socket=/PATH and byway+rdma://HOST/NAME. unix and shm take ,mode=MODE and
    /// ,group=NAME as --nbd does.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Address for NBD clients: tcp://HOST[:PORT] (default port 10809) or unix:///PATH[,mode=MODE][,group=NAME]; may be repeated
    ///
    /// A client of a unix socket needs write permission on the socket's file: with group=disk, members of that group can connect. MODE is
    /// octal; it defaults to 0660 with group=, else to the umask. A comma in PATH needs a backslash before it.
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Vec<String>,
    /// Address of the HTTP server for /metrics, /healthz and /slow: ADDRESS:PORT [default: none]
    #[arg(long, value_name = "ADDRESS", value_parser = byway_remote::http_address)]
    pub http: Option<SocketAddr>,
    /// Path of the control socket, for `byway ctl` [default: none]
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// Kernel interface of the event loops: auto, uring or epoll [default: auto]
    #[arg(long, value_name = "BACKEND", value_parser = byway_remote::parse_io)]
    pub io: Option<IoChoice>,
    /// Memory for data in flight, shared by all event loops; at least 4M for each loop [default: 64M]
    ///
    /// Receive buffers are separate memory: 4 KiB for each connection (a session of byway's own protocol has three), 32 KiB
    /// while it receives a longer message, at most 192 MiB for each loop.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub buffer_memory: Option<u64>,
    /// Limit on resident bytes of mapped files; above it the node unmaps pages; at least 16M [default: half of the memory]
    ///
    /// Pages that the node sends from a cached file or a memory volume count as its resident memory (RssFile, RssShmem). Unmapped
    /// pages stay in the page cache. The default is half of the machine's memory, or of the limit of the node's cgroup.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub mmap_limit: Option<u64>,
    /// Lend up to this much memory to programs of other machines (byway far): SIZE[,guard=SIZE][,quota=SIZE] [default: none]
    ///
    /// Memory is lent in slabs of 64M. The node lends no slab that would leave this machine less available memory than guard=SIZE [default:
    /// 5 % of its memory, at least 512M]. It takes slabs back when less is available, or when tasks stall for memory; borrowers have 5 s to
    /// move their pages. With guard=0 it looks at neither.
    /// quota=SIZE limits what one borrower gets. A slab uses memory as its borrower fills it. It is freed when the borrower returns it, its
    /// session ends, or the borrower is silent for 10 s.
    #[arg(long, value_name = "SIZE")]
    pub lend: Option<LendSpec>,
    /// Number of event loops, 1 to 256 [default: one per core, at most one for each 4M of buffer memory]
    #[arg(long, value_name = "N")]
    pub threads: Option<u16>,
    /// Buffers of direct volumes: memory, or device (the memory buffer of the disk's NVMe controller) [default: memory]
    ///
    /// device needs, for each direct volume, an NVMe controller with a memory buffer, and a kernel with CONFIG_PCI_P2PDMA; byway doctor
    /// checks both. Over TCP a CPU still reads the bytes out of that buffer, more slowly than out of main memory; /metrics counts
    /// them. A volume's own stage= takes precedence.
    #[arg(long, value_name = "WHERE", value_parser = parse_stage)]
    pub stage: Option<Stage>,
    /// Configuration file in TOML; flags override its keys, and lists of flags extend its lists
    ///
    /// Keys have the names of the flags, with _ for -. Exceptions: `volumes` and `shares` are lists of SPECs, a volume can be a table
    /// [volume.NAME] and a share a table [share.NAME], and the --tls flags are keys of the table [tls]. dist/byway.toml in the sources
    /// shows every key.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// This node's certificate chain, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// This node's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities that sign client certificates, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_client_ca: Option<PathBuf>,
    /// Certificate revocation lists of the authorities that sign client certificates, PEM; a reload reads them again
    ///
    /// FILE needs a list (X.509 CRL) for each authority in the chain of a client's certificate; without one the
    /// client is refused. A list stays in force after its nextUpdate. A reload ends connections whose certificate is on a list.
    #[arg(long, value_name = "FILE", requires = "tls_client_ca")]
    pub tls_crl: Option<PathBuf>,
    /// Whether connections must use TLS; with optional, only connections to volumes with tls=required must [default: required]
    #[arg(long, value_name = "WHEN", requires = "tls_certificate")]
    pub tls: Option<TlsMode>,
    /// Whether clients must present certificates [default: required with --tls-client-ca, else off]
    #[arg(long, value_name = "WHEN", requires = "tls_certificate")]
    pub tls_clients: Option<ClientAuthentication>,
    /// Addresses that may connect, ADDRESS/BITS; may be repeated. Loopback may always connect
    #[arg(long, value_name = "CIDR")]
    pub allow: Vec<Cidr>,
    /// Accept clients without certificates from the --allow ranges; addresses can be forged
    #[arg(long)]
    pub insecure: bool,
    /// User to switch to once all files and sockets are open
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Store operations that take longer than this are listed in /slow, in microseconds [default: 100000]
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
    let mut words = std::env::args_os();
    if let Some(helper) = mount::helper::called(words.next().as_deref()) {
        return help_mount(helper, words);
    }
    let cli = Cli::parse();
    // The server of a demonstration is no news: its clients come and go.
    let is_quiet = matches!(cli.command, Command::Demo(_)) && std::env::var_os("RUST_LOG").is_none();
    crate::log::to_stderr(cli.log.as_deref().or(is_quiet.then_some("warn")));
    let has_file = matches!(&cli.command, Command::Serve(arguments) if arguments.config.is_some());
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
        Command::Attach(mut arguments) => {
            arguments.log = cli.log;
            attach::attach(&arguments).map_err(Failure::from)
        }
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Mount(arguments) => mount::run(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Umount(arguments) => mount::umount(&arguments).map(|()| ExitCode::SUCCESS).map_err(Failure::from),
        Command::Run(arguments) => run_program::run(&arguments).map_err(Failure::from),
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
        if is_command_line(&*error, has_file) { ExitCode::from(WRONG_COMMAND_LINE) } else { ExitCode::FAILURE }
    })
}

/// `mount.byway` and `umount.fuse.byway`: does it by `byway mount` or `byway umount`.
fn help_mount(helper: Helper, words: std::env::ArgsOs) -> ExitCode {
    match mount::helper::run(helper, words) {
        Ok(status) => status,
        Err(error) => {
            output::note(harmless(&error.to_string()));
            ExitCode::from(error.status())
        }
    }
}

/// As clap ends the program.
pub(crate) const WRONG_COMMAND_LINE: u8 = 2;

/// Whether another command line mends an error. What a configuration file (`has_file`) has a part in may be the file's fault.
fn is_command_line(error: &(dyn std::error::Error + 'static), has_file: bool) -> bool {
    let is = |error: &ServeError| match error {
        ServeError::Nothing(_) => !has_file,
        ServeError::Config(ConfigError::Value { at, .. }) => !has_file || at.starts_with("--"),
        _ => false,
    };
    error.downcast_ref().is_some_and(is) || error.downcast_ref().is_some_and(BenchError::is_command_line)
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
    fn only_a_wrong_command_line_has_its_status() {
        let serve = |words: &[&str]| {
            let words = ["byway", "serve"].iter().chain(words);
            let Command::Serve(arguments) = Cli::try_parse_from(words).unwrap().command else { unreachable!() };
            is_command_line(&check::check(&arguments).unwrap_err(), arguments.config.is_some())
        };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("byway.toml");
        std::fs::write(&file, "volumes = [\"a=mem:1Q\"]").unwrap();
        for wrong in
            [&["--volume", "a=mem:1Q"][..], &["--volume", "a=mem:1M", "--listen", "x://y"], &["--threads", "999"], &[]]
        {
            assert!(serve(wrong), "{wrong:?}");
        }
        assert!(!serve(&["--config", file.to_str().unwrap()]), "the file is wrong");
        assert!(!serve(&["--volume", "a=/no/such/file", "--listen", "tcp://127.0.0.1"]), "the file may come");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
