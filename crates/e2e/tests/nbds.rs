//! `nbds://` on the client's side: copies to and from servers over TLS, and certificates that are not trusted.

use byway_e2e::{
    Certificates, ForeignServer, Server, SkipReason, backends, binary, find_tool, noise, run, run_well, skip,
};

const SIZE: usize = (24 << 20) + 512;

struct Rig {
    certificates: Certificates,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        Self { certificates: Certificates::new(folder.path()), folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Serves `disk`, a file of `bytes`; over TLS only and to clients with a certificate only, if it has `tls`.
    fn serve(&self, io: &str, bytes: &[u8], tls: bool) -> Server {
        std::fs::write(self.path("disk"), bytes).expect("room in memory");
        let (volume, socket) = (format!("disk={}", self.path("disk")), format!("unix://{}", self.path("socket")));
        let mut arguments = vec!["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0", "--nbd", &socket];
        let path = |name: &str| self.certificates.path(name);
        let (certificate, key, ca) = (path("server-cert.pem"), path("server-key.pem"), path("ca-cert.pem"));
        if tls {
            arguments.extend(["--tls-certificate", &certificate, "--tls-key", &key, "--tls-client-ca", &ca]);
        }
        Server::start(self.folder.path(), 2, &arguments)
    }

    fn arguments(&self, client: &str, rest: &[&str]) -> Vec<String> {
        let rest = rest.iter().map(|word| (*word).to_owned());
        rest.chain(if client.is_empty() { vec![] } else { self.certificates.flags(client) }).collect()
    }

    /// Runs byway as one of the clients: what it prints.
    fn run_as(&self, client: &str, rest: &[&str]) -> String {
        let arguments = self.arguments(client, rest);
        run_well(&binary(), &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// What byway says when it fails as one of the clients, as it must.
    fn fail_as(&self, client: &str, rest: &[&str]) -> String {
        let arguments = self.arguments(client, rest);
        let output = run(&binary(), &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(!output.status.success(), "{arguments:?} must fail");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Copies into and out of `uri`, which keeps its bytes in the file `backing`.
    fn copy_both_ways(&self, client: &str, uri: &str, backing: &str, connections: &str) {
        let bytes = std::fs::read(self.path(backing)).unwrap();
        let resume = self.path("resume");
        let copy = |from: &str, to: &str| {
            let ways = ["copy", from, to, "--resume", &resume, "--verify", "--overwrite", "--connections", connections];
            self.run_as(client, &ways);
        };
        copy(uri, &self.path("out"));
        assert!(std::fs::read(self.path("out")).unwrap() == bytes, "{uri}: what was read is in the file");
        let other = noise(bytes.len(), 99);
        std::fs::write(self.path("in"), &other).unwrap();
        copy(&self.path("in"), uri);
        assert!(std::fs::read(self.path(backing)).unwrap() == other, "{uri}: what was written is in the file");
        std::fs::remove_file(self.path("out")).unwrap();
    }
}

#[test]
fn byway_lists_describes_measures_and_copies_over_tls() {
    for io in backends() {
        let rig = Rig::new();
        let mut server = rig.serve(io, &noise(SIZE, 2), true);
        let port = server.port("nbd");
        let socket = format!("nbds+unix:///disk?socket={}", rig.path("socket"));
        for (uri, connections) in [
            (format!("nbds://localhost:{port}/disk"), "1"),
            (format!("nbds://127.0.0.1:{port}/disk"), "4"),
            (socket, "4"),
        ] {
            rig.copy_both_ways("client", &uri, "disk", connections);
            let info = rig.run_as("client", &["info", "--json", &uri]);
            assert!(info.contains(&format!("\"size_bytes\":{SIZE}")), "{info}");
        }
        let node = format!("nbds://localhost:{port}/");
        let listed = rig.run_as("client", &["ls", "--json", &node]);
        assert!(listed.contains(&format!("nbds://localhost:{port}/disk")) && listed.contains("25166336"), "{listed}");
        for (rw, bs) in [("randrw", "4K"), ("read", "1M"), ("write", "1M")] {
            let uri = format!("{node}disk");
            let run = ["bench", "volume", &uri, "--seconds", "1", "--json", "--overwrite", "--rw", rw, "--bs", bs];
            let said = rig.run_as("client", &[&run[..], &["--connections", "2"]].concat());
            assert!(said.contains("\"requests\":") && !said.contains("\"requests\":0,"), "{said}");
        }
        assert!(server.is_alive() && !server.log().contains("ended"), "no fault: {}", server.log());
    }
}

/// Of two ends one lends its memory to the other's node, so what TLS decrypts cannot be placed there directly.
#[test]
fn a_copy_between_tls_and_shared_memory_is_made_both_ways() {
    for io in backends() {
        let (rig, other) = (Rig::new(), tempfile::tempdir_in("/dev/shm").expect("a folder in memory"));
        let server = rig.serve(io, &noise(SIZE, 5), true);
        let path = |name: &str| other.path().join(name).display().to_string();
        std::fs::write(path("other"), vec![0; SIZE]).expect("room in memory");
        let (volume, socket) = (format!("other={}", path("other")), format!("shm://{}", path("socket")));
        let _near = Server::start(other.path(), 1, &["--io", io, "--volume", &volume, "--listen", &socket]);
        let far = format!("nbds://localhost:{}/disk", server.port("nbd"));
        let near = format!("byway+shm:///other?socket={}", path("socket"));
        let copy = |from: &str, to: &str| rig.run_as("client", &["copy", from, to, "--verify", "--overwrite"]);
        copy(&far, &near);
        assert!(std::fs::read(path("other")).unwrap() == noise(SIZE, 5), "{io}: what was read over TLS");
        std::fs::write(path("other"), noise(SIZE, 6)).unwrap();
        copy(&near, &far);
        assert!(std::fs::read(rig.path("disk")).unwrap() == noise(SIZE, 6), "{io}: what was written over TLS");
    }
}

#[test]
fn nbdkit_gives_and_takes_over_tls() {
    let Some(nbdkit) = find_tool("nbdkit") else {
        return skip("nbdkit_gives_and_takes_over_tls", SkipReason::MissingTool("nbdkit"));
    };
    let rig = Rig::new();
    let certificates = format!("--tls-certificates={}", rig.path(""));
    let tls = ["--tls=require", &certificates, "--tls-verify-peer"];
    let policies: [&[&str]; 4] =
        [&[], &["--filter=multi-conn", "multi-conn-mode=disable"], &["--filter=nozero"], &["--no-sr"]];
    for (index, policy) in policies.iter().enumerate() {
        let backing = format!("back{index}");
        std::fs::write(rig.path(&backing), noise(SIZE, 3)).unwrap();
        let (filters, parameters): (Vec<&str>, Vec<&str>) = policy.iter().partition(|word| word.starts_with("--"));
        let file = rig.path(&backing);
        let arguments = [&tls[..], &filters, &["file", &file], &parameters].concat();
        let socket = rig.folder.path().join(format!("s{index}"));
        let server = ForeignServer::nbdkit(&nbdkit, &socket, &arguments);
        let uri = server.uri("").replacen("nbd", "nbds", 1);
        rig.copy_both_ways("client", &uri, &backing, "4");
        assert!(rig.run_as("client", &["info", &uri]).contains("24.0"), "it tells its size");
        for (client, said) in [
            ("nobody", "TLS: the peer went away"),
            ("stranger", "TLS: the peer went away"),
            ("misled", "not signed by the authority"),
            ("", "--tls-ca"),
        ] {
            let stderr = rig.fail_as(client, &["info", &uri]);
            assert!(stderr.contains(said), "{client}: {stderr}");
        }
        let plain = rig.fail_as("", &["info", &server.uri("")]);
        assert!(plain.contains("needs TLS") && plain.contains("nbds://"), "{plain}");
    }
}

#[test]
fn who_is_not_to_be_trusted_is_refused_by_name() {
    for io in backends() {
        let rig = Rig::new();
        let mut server = rig.serve(io, &noise(1 << 20, 4), true);
        let uri = format!("nbds://localhost:{}/disk", server.port("nbd"));
        for (client, said, logged) in [
            ("misled", "not signed by the authority", "the peer refused"),
            ("nobody", "the peer refused: CertificateRequired", "the peer showed no certificate"),
            ("stranger", "the peer refused: UnknownCA", "not signed by the authority"),
            ("expired", "the peer refused: CertificateExpired", "has expired"),
        ] {
            for command in ["info", "ls"] {
                let node = uri.trim_end_matches("disk");
                let stderr = rig.fail_as(client, &[command, if command == "ls" { node } else { &uri }]);
                assert!(stderr.contains(said), "{command} as {client}: {stderr}");
            }
            assert!(server.log().contains(logged), "{client}: {logged:?} is not in {}", server.log());
        }
        let renamed = rig.fail_as("client", &["info", &uri, "--tls-hostname", "elsewhere"]);
        assert!(renamed.contains("for another name"), "{renamed}");
        let renamed = rig.fail_as("client", &["info", &format!("{uri}?tls-hostname=elsewhere")]);
        assert!(renamed.contains("for another name"), "{renamed}");
        rig.run_as("client", &["info", &format!("{uri}?tls-hostname=127.0.0.1")]);

        let plain = rig.fail_as("", &["info", &uri.replacen("nbds", "nbd", 1)]);
        assert!(plain.contains("needs TLS") && plain.contains("nbds://"), "{plain}");
        let flags = rig.fail_as("client", &["info", &uri.replacen("nbds", "nbd", 1)]);
        assert!(flags.contains("nbds://"), "{flags}");
        assert!(rig.fail_as("", &["info", &uri]).contains("--tls-ca"));
        let folder = rig.fail_as("client", &["info", &format!("{uri}?tls-certificates=/etc/pki")]);
        assert!(folder.contains("--tls-certificate DIR/client-cert.pem"), "{folder}");
        let unchecked = rig.fail_as("client", &["info", &format!("{uri}?tls-verify-peer=0")]);
        assert!(unchecked.contains("always checked"), "{unchecked}");
        assert!(server.is_alive());
        drop(server);

        let server = rig.serve(io, &noise(1 << 20, 4), false);
        let refused = rig.fail_as("client", &["info", &format!("nbds://localhost:{}/disk", server.port("nbd"))]);
        assert!(refused.contains("does not offer TLS"), "{refused}");
    }
}
