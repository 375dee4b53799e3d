//! The cable between a node and its client is pulled: transferred data is right in the end, or the failure is reported by name.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, NEAR, Networks, Server, Side, binary, noise, run, until};

const SIZE: usize = 24 << 20;
/// A copy of it takes four seconds: there is a middle.
const RATE: &str = "6M/s";

/// How long a node keeps the session of a client that says nothing: twice the keep-alive of 5 s, and a little more.
const GONE_TIME: Duration = Duration::from_secs(30);

struct Rig {
    networks: Networks,
    server: Server,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new(test: &str) -> Option<Self> {
        let networks = Networks::new(test)?;
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let source = folder.path().join("source");
        std::fs::write(&source, noise(SIZE, 5)).expect("room in memory");
        let (volume, listen) = (format!("disk={},rate={RATE}", source.display()), format!("tcp://{NEAR}:0"));
        let ctl = folder.path().join("ctl").display().to_string();
        let arguments = [
            "--volume",
            &volume,
            "--listen",
            &listen,
            "--allow",
            "10.77.0.0/24",
            "--insecure",
            "--control-socket",
            &ctl,
        ];
        let arguments = [&arguments[..], &["--http", "127.0.0.1:0"]].concat();
        let server = Server::start_by(networks.command(Side::Near, &binary()), folder.path(), 3, &arguments);
        Some(Self { networks, server, folder })
    }

    fn copy(&self) -> Copy {
        let from = format!("byway://{NEAR}:{}/disk", self.server.port("byway"));
        let mut command = self.networks.command(Side::Far, &binary());
        command.arg("copy").arg(from).arg(self.copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Copy(Some(command.spawn().expect("byway starts")))
    }

    fn copied(&self) -> std::path::PathBuf {
        self.folder.path().join("copied")
    }

    /// Waits until a part of the file has been copied.
    fn wait_for_the_middle(&self) {
        until(Instant::now() + LIMIT, "the copy's middle", || (self.read_bytes() > SIZE as u64 / 4).then_some(()));
    }

    fn status(&self) -> serde_json::Value {
        let socket = self.folder.path().join("ctl").display().to_string();
        let output = run(&binary(), &["ctl", "--control-socket", &socket, "--json", "status"]);
        serde_json::from_slice(&output.stdout).expect("a status")
    }

    fn read_bytes(&self) -> u64 {
        self.status()["volumes"][0]["read_bytes"].as_u64().expect("a number")
    }

    fn connections(&self) -> u64 {
        let frontends = self.status()["frontends"].clone();
        let frontends = frontends.as_array().expect("frontends").iter();
        frontends.map(|frontend| frontend["connections"].as_u64().expect("a number")).sum()
    }

    /// A metric of the node, asked for on its side of the cable.
    fn metric(&self, name: &str) -> u64 {
        let port = self.server.port("http");
        let ask = format!(
            "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3"
        );
        let output = self.networks.command(Side::Near, Path::new("bash")).args(["-c", &ask]).output().expect("bash");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    /// Waits until the node has no connection any more, and has all its frames back.
    fn wait_until_let_go(&self) {
        let until_gone = Instant::now() + GONE_TIME;
        until(until_gone, "the node to let go", || (self.connections() == 0).then_some(()));
        let all = self.metric("byway_buffer_memory_bytes");
        until(until_gone, "its frames", || (self.metric("byway_buffer_memory_free_bytes") == all).then_some(()));
    }
}

/// A running copy; ended with the test.
struct Copy(Option<Child>);

impl Copy {
    fn is_running(&mut self) -> bool {
        self.0.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_none()))
    }

    fn end(mut self) -> Output {
        let deadline = Instant::now() + LIMIT;
        until(deadline, "the copy to end", || (!self.is_running()).then_some(()));
        self.0.take().and_then(|child| child.wait_with_output().ok()).expect("its output")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

#[test]
fn a_copy_goes_on_when_the_link_comes_back_after_its_session_was_given_up() {
    let Some(rig) = Rig::new("a_copy_goes_on_when_the_link_comes_back_after_its_session_was_given_up") else { return };
    let mut copy = rig.copy();
    rig.wait_for_the_middle();
    rig.networks.plug(false);
    // The node hears nothing from its client, and lets go of what it had for it.
    rig.wait_until_let_go();
    assert!(copy.is_running(), "the client waits for the node to come back");
    rig.networks.plug(true);
    let output = copy.end();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(same(&rig.copied(), &rig.folder.path().join("source")), "{said}");
    rig.wait_until_let_go();
}

#[test]
fn a_link_that_is_down_for_a_moment_is_not_noticed() {
    let Some(rig) = Rig::new("a_link_that_is_down_for_a_moment_is_not_noticed") else { return };
    let copy = rig.copy();
    rig.wait_for_the_middle();
    let before = rig.status()["frontends"][1]["accepted"].clone();
    rig.networks.plug(false);
    // As long as it takes to ask the node twice.
    assert!(rig.connections() > 0);
    rig.networks.plug(true);
    let output = copy.end();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(same(&rig.copied(), &rig.folder.path().join("source")));
    assert_eq!(rig.status()["frontends"][1]["accepted"], before, "on the connections that it had");
}

#[test]
fn a_client_that_dies_behind_a_broken_link_leaves_nothing() {
    let Some(rig) = Rig::new("a_client_that_dies_behind_a_broken_link_leaves_nothing") else { return };
    let copy = rig.copy();
    rig.wait_for_the_middle();
    assert!(rig.connections() > 0);
    rig.networks.plug(false);
    drop(copy);
    rig.wait_until_let_go();
}

#[test]
fn a_node_that_cannot_be_reached_is_named() {
    let Some(rig) = Rig::new("a_node_that_cannot_be_reached_is_named") else { return };
    rig.networks.plug(false);
    let from = format!("byway://{NEAR}:{}/disk", rig.server.port("byway"));
    let mut command: Command = rig.networks.command(Side::Far, &binary());
    let child = command.arg("info").arg(from).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let output = Copy(Some(child)).end();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(said.contains(NEAR) && said.contains("unreachable"), "{said}");
}
