//! A service manager opens the listeners and passes them on (`sd_listen_fds(3)`).

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use byway_e2e::{LIBNBD_PRELUDE, LIMIT, SkipReason, binary, libnbd_python, run, run_well, skip, until};

/// A `byway serve` that was given one socket as descriptor 3, as systemd gives it.
struct Activated {
    child: Child,
    folder: tempfile::TempDir,
}

impl Activated {
    /// Starts it with a control socket and these lines of `byway.toml`.
    fn start(socket: OwnedFd, configuration: &str, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(at("byway.toml"), configuration).unwrap();
        let log = std::fs::File::create(at("log")).unwrap();
        // The shell's process id becomes the node's.
        let pass = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" serve \"$@\"";
        let child = Command::new("sh")
            .args(["-c", pass])
            .arg(binary())
            .args(["--config", &at("byway.toml"), "--control-socket", &at("ctl")])
            .args(more)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn wait_until_ready(&mut self) {
        let out = self.child.stdout.take().unwrap();
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        // The last line of those that say so.
        while !lines.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("not ready:\n{}", self.log())).contains("ready ctl")
        {
        }
    }

    fn reload(&self, configuration: &str) -> Result<String, String> {
        std::fs::write(self.folder.path().join("byway.toml"), configuration).unwrap();
        let socket = self.folder.path().join("ctl").display().to_string();
        let output = run(&binary(), &["ctl", "--control-socket", &socket, "reload"]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

impl Drop for Activated {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket bound to every address of this machine. It does not listen: nobody can come in while the test runs.
fn wide_socket() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketType, bind, socket};
    let fd = socket(AddressFamily::INET6, SocketType::STREAM, None).unwrap();
    bind(&fd, &"[::]:0".parse::<SocketAddr>().unwrap()).unwrap();
    fd
}

#[test]
fn a_passed_socket_is_served_and_reloads_ask_nothing_of_listeners_that_were_not_opened() {
    let test = "a_passed_socket_is_served_and_reloads_ask_nothing_of_listeners_that_were_not_opened";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // Never opened, since the manager decides: neither start nor a reload may judge it, or ask a resolver for it.
    let ignored = "nbd = ['tcp://0.0.0.0:1', 'tcp://no-such-host.invalid:1']\n";
    let mut node = Activated::start(listener.into(), &format!("{ignored}volumes = ['a=mem:1M']"), &[]);
    node.wait_until_ready();
    assert!(node.log().contains("`listen` and `nbd` are ignored"), "{}", node.log());
    assert_eq!(node.reload(&format!("{ignored}volumes = ['a=mem:1M', 'b=mem:2M']")).unwrap(), "added: b\n");
    let body =
        format!("h.set_export_name('b')\nh.connect_tcp('127.0.0.1', '{port}')\nassert h.get_size() == 2 << 20\n");
    run_well(&python, &["-c", &format!("{LIBNBD_PRELUDE}{body}")]);
}

#[test]
fn a_passed_socket_that_others_can_reach_needs_a_guard() {
    let mut node = Activated::start(wide_socket(), "volumes = ['a=mem:1M']", &[]);
    let ended = until(Instant::now() + LIMIT, "the node to refuse", || node.child.try_wait().unwrap());
    let log = node.log();
    assert_eq!(ended.code(), Some(1), "{log}");
    for part in ["[::]:", "--tls-client-ca", "--allow", "systemd socket unit", "ListenStream="] {
        assert!(log.contains(part), "should say {part}: {log}");
    }
    assert!(!Path::new(&node.folder.path().join("ctl")).exists());
}

#[test]
fn a_reload_may_not_take_the_guard_of_a_passed_socket_away() {
    let guarded = "volumes = ['a=mem:1M']\nallow = ['192.0.2.0/24']";
    let mut node = Activated::start(wide_socket(), guarded, &["--insecure"]);
    node.wait_until_ready();
    assert!(!node.log().contains("are ignored"), "{}", node.log());
    let refused = node.reload("volumes = ['a=mem:1M', 'b=mem:1M']").unwrap_err();
    assert!(refused.contains("systemd socket unit") && refused.contains("--allow"), "{refused}");
    assert_eq!(node.reload(&format!("{guarded}\n[volume.b]\nstore = 'mem:1M'")).unwrap(), "added: b\n");
}
