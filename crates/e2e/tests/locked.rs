//! A small limit on locked memory (RLIMIT_MEMLOCK): frames are not registered with io_uring, the node says so, and all else
//! works, over TCP and over shared memory. RDMA needs locked memory; `cargo xtask guest rdma` tests it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use byway_e2e::{Server, SkipReason, binary, find_tool, noise, skip};
use byway_reactor::{IoChoice, Reactor};

const SIZE: usize = 8 << 20;
/// The choice of a backend, the limit on locked memory in bytes, and what is said besides the remedy. A ring fits where
/// frames do not; the newest kernels refuse even that where there is less, and epoll is left.
const CASES: [(&str, u64, &[&str]); 3] = [
    ("uring", 1 << 20, &["frames not registered"]),
    ("auto", 16 << 10, &["event loops"]),
    ("epoll", 16 << 10, &["event loops", "epoll: asked for"]),
];
/// Few enough for the limit of 8 MiB that systems have, if nobody has raised it.
const FRAMES: &str = "4M";
/// Ordinary users: one with the limit that there is, and those of the cases. What a process has locked counts for its user until
/// some time after its end.
const USERS: [u32; 4] = [61_230, 61_231, 61_232, 61_233];

/// Runs programs as a user with a limit on locked memory. Who may lock any memory (CAP_IPC_LOCK) has no limit.
struct Limited {
    prlimit: PathBuf,
    setpriv: PathBuf,
    is_root: bool,
}

impl Limited {
    /// As that user, and with that limit in bytes or the one that there is.
    fn command(&self, program: &Path, user: usize, limit: Option<u64>) -> Command {
        let mut command = Command::new(&self.prlimit);
        command.args(limit.map(|limit| format!("--memlock={limit}:{limit}")));
        if self.is_root {
            let user = USERS[user].to_string();
            command.arg(&self.setpriv).args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
            command.args(["--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]);
        }
        command.arg(program).env("RUST_LOG", "info");
        command
    }
}

#[test]
fn without_locked_memory_a_node_says_so_and_moves_the_same_bytes() {
    let test = "without_locked_memory_a_node_says_so_and_moves_the_same_bytes";
    let [Some(prlimit), Some(setpriv)] = ["prlimit", "setpriv"].map(find_tool) else {
        return skip(test, SkipReason::MissingTool("prlimit"));
    };
    if Reactor::open(IoChoice::Uring, 1).is_err() {
        return skip(test, byway_skip::NO_IO_URING);
    }
    let limited = Limited { prlimit, setpriv, is_root: rustix::process::geteuid().is_root() };
    let folder = tempfile::tempdir().expect("a folder");
    if limited.is_root {
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).expect("it is ours");
    }
    let path = |name: &str| folder.path().join(name).display().to_string();
    // Where the binary was built may be closed to that user.
    let program = folder.path().join("byway");
    std::fs::copy(binary(), &program).expect("room");
    std::fs::write(path("source"), noise(SIZE, 7)).expect("room");

    let serve = |user: usize, limit: Option<u64>, io: &str| {
        let (of_server, listen) =
            (folder.path().join(user.to_string()), format!("shm://{}", path(&format!("{user}.shm"))));
        std::fs::create_dir(&of_server).expect("a folder");
        let arguments = [
            "--io",
            io,
            "--threads",
            "1",
            "--buffer-memory",
            FRAMES,
            "--volume",
            "m=mem:8M",
            "--listen",
            "tcp://127.0.0.1:0",
        ];
        let arguments = [&arguments[..], &["--listen", &listen]].concat();
        Server::start_by(limited.command(&program, user, limit), &of_server, 2, &arguments)
    };
    for (index, (io, limit, says)) in CASES.into_iter().enumerate() {
        let user = index + 1;
        let server = serve(user, Some(limit), io);
        let said = server.log();
        assert!(says.iter().all(|word| said.contains(word)), "{said}");
        assert_eq!(said.contains("raise RLIMIT_MEMLOCK"), io != "epoll", "{said}");
        let tcp = format!("byway://127.0.0.1:{}/m", server.port("byway"));
        let shared = format!("byway+shm:///m?socket={}", path(&format!("{user}.shm")));
        // Longer pieces than are sent by copying them, over TCP.
        for (to, from) in [(&tcp, &shared), (&shared, &tcp)] {
            let back = path("back");
            for (from, to) in [(&path("source"), to), (from, &back)] {
                let mut copy = limited.command(&program, user, Some(limit));
                copy.env("XDG_STATE_HOME", path(&format!("{user}.state")));
                copy.args(["copy", "--overwrite", "--verify", "--chunk", "1M", "--depth", "2", from, to]);
                let copied = copy.output().expect("it starts");
                assert!(copied.status.success(), "{io}: {from} to {to}: {}", String::from_utf8_lossy(&copied.stderr));
            }
            assert!(std::fs::read(&back).expect("it was copied") == noise(SIZE, 7), "{io}: {from} has other bytes");
            std::fs::remove_file(&back).expect("it is there");
        }
    }
    // That is not said by who may lock its frames.
    if !serve(0, None, "uring").log().contains("frames registered (4 MiB)") {
        byway_skip::skip_part_of_this(SkipReason::Machine("less than 4 MiB may be locked (ulimit -l)"));
    }
}
