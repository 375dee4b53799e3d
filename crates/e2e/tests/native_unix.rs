//! byway's own protocol within a machine, over a unix socket and over shared memory: every command that takes a volume, and the
//! socket file afterwards.

use byway_e2e::{Certificates, Server, backends, binary, noise, run, run_well};

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
        let (nbd, shared) = (format!("unix://{}", self.path("nbd")), format!("shm://{}", self.path("s m")));
        let mut arguments = vec!["--volume", &disk, "--volume", "m=mem:8M", "--listen", &wire, "--nbd", &nbd];
        arguments.extend(["--listen", &shared]);
        arguments.extend(more);
        Server::start(self.folder.path(), 3, &arguments)
    }

    fn uri(&self, scheme: &str, volume: &str) -> String {
        let socket = if scheme.ends_with("+shm") { "s%20m" } else { "a%20b" };
        format!("{scheme}:///{volume}?socket={}", self.path(socket))
    }
}

#[test]
fn every_command_takes_a_socket_and_it_goes_with_the_node() {
    let rig = Rig::new();
    for io in backends() {
        for scheme in ["byway+unix", "byway+shm"] {
            // Several loops hand lanes to each other.
            every_command(&rig, scheme, rig.serve(&["--io", io, "--threads", "3"]));
        }
    }
}

fn every_command(rig: &Rig, scheme: &str, mut server: Server) {
    let uri = |volume| rig.uri(scheme, volume);
    let listed = run_well(&binary(), &["ls", "--json", &uri("")]);
    assert!(listed.contains(&format!("\"uri\":\"{}\"", uri("disk"))), "{listed}");
    let told = run_well(&binary(), &["info", "--json", &uri("disk")]);
    assert!(told.contains(&format!("\"size_bytes\":{SIZE}")), "{told}");
    std::fs::remove_file(rig.path("out")).unwrap_or_default();
    for (from, to) in [(uri("disk"), uri("m")), (uri("disk"), rig.path("out")), (rig.path("out"), uri("disk"))] {
        let copied = run_well(&binary(), &["copy", "--verify", "--overwrite", "--json", &from, &to]);
        assert!(copied.contains("\"verified\":true"), "{copied}");
    }
    assert!(std::fs::read(rig.path("out")).unwrap() == noise(SIZE, 3));
    let measured = run_well(&binary(), &["bench", "volume", "--seconds", "1", "--json", &uri("disk")]);
    assert!(measured.contains("\"requests\":") && !measured.contains("\"requests\":0,"), "{measured}");
    assert_eq!(server.terminate(), Some(0));
    for socket in ["a b", "s m", "nbd"] {
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
    for scheme in ["byways+unix", "byways+shm"] {
        let uri = rig.uri(scheme, "disk");
        let told = run_well(&binary(), &["info", "--json", "--tls-ca", &ca, &uri]);
        assert!(told.contains(&format!("\"uri\":\"{uri}\"")), "{told}");
    }
}
