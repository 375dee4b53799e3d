//! byway's own wire over a unix socket: every command that takes a volume, and what is left of the socket afterwards.

use byway_e2e::{Certificates, Server, binary, noise, run, run_well};

const SIZE: usize = (5 << 20) + 4096;

/// A node whose sockets have names that a URI must encode.
struct Rig {
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let rig = Self { folder: tempfile::tempdir_in("/dev/shm").expect("a folder in memory") };
        std::fs::write(rig.path("disk"), noise(SIZE, 3)).expect("room in memory");
        rig
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn serve(&self, more: &[&str]) -> Server {
        let (disk, wire) = (format!("disk={}", self.path("disk")), format!("unix://{}", self.path("a b")));
        let nbd = format!("unix://{}", self.path("nbd"));
        let mut arguments = vec!["--volume", &disk, "--volume", "m=mem:8M", "--listen", &wire, "--nbd", &nbd];
        arguments.extend(more);
        Server::start(self.folder.path(), 2, &arguments)
    }

    fn uri(&self, scheme: &str, volume: &str) -> String {
        format!("{scheme}:///{volume}?socket={}", self.path("a%20b"))
    }
}

#[test]
fn every_command_takes_a_socket_and_it_goes_with_the_node() {
    let rig = Rig::new();
    let mut server = rig.serve(&[]);
    let uri = |volume| rig.uri("byway+unix", volume);
    let listed = run_well(&binary(), &["ls", "--json", &uri("")]);
    assert!(listed.contains(&format!("\"uri\":\"{}\"", uri("disk"))), "{listed}");
    let told = run_well(&binary(), &["info", "--json", &uri("disk")]);
    assert!(told.contains(&format!("\"size_bytes\":{SIZE}")), "{told}");
    for (from, to) in [(uri("disk"), uri("m")), (uri("disk"), rig.path("out")), (rig.path("out"), uri("disk"))] {
        let copied = run_well(&binary(), &["copy", "--verify", "--overwrite", "--json", &from, &to]);
        assert!(copied.contains("\"verified\":true"), "{copied}");
    }
    assert!(std::fs::read(rig.path("out")).unwrap() == noise(SIZE, 3));
    let measured = run_well(&binary(), &["bench", "volume", "--seconds", "1", "--json", &uri("disk")]);
    assert!(measured.contains("\"requests\":") && !measured.contains("\"requests\":0,"), "{measured}");
    assert_eq!(server.terminate(), Some(0));
    for socket in ["a b", "nbd"] {
        assert!(!rig.folder.path().join(socket).exists(), "{socket} must go with the node");
    }
    let output = run(&binary(), &["ls", &uri("")]);
    assert!(!output.status.success(), "nobody is there any more");
    let output = run(&binary(), &["ls", "byway+unix:///disk"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("byway+unix:///NAME?socket=PATH"), "{said}");
}

#[test]
fn a_socket_is_reached_over_tls_too() {
    let rig = Rig::new();
    let certificates = Certificates::new(rig.folder.path());
    let [certificate, key, ca] =
        ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(|name| certificates.path(name));
    let _server = rig.serve(&["--tls-certificate", &certificate, "--tls-key", &key]);
    let uri = rig.uri("byways+unix", "disk");
    let told = run_well(&binary(), &["info", "--json", "--tls-ca", &ca, &uri]);
    assert!(told.contains(&format!("\"uri\":\"{uri}\"")), "{told}");
}
