//! Certificates that a reload replaces, on both front ends, and the connections that were there before.

use std::path::Path;

use byway_e2e::{Certificates, LIBNBD_PRELUDE, Script, Server, SkipReason, binary, libnbd_python, run, run_well, skip};

/// A node over TLS with a configuration file and a control socket.
struct Rig {
    // Before the folder, which holds its log.
    server: Server,
    folder: tempfile::TempDir,
}

/// Puts the files of a server where the node looks for its own.
fn install(folder: &Path, certificates: &Certificates) {
    for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
        std::fs::copy(certificates.path(name), folder.join(name)).expect("room in memory");
    }
}

impl Rig {
    fn new(certificates: impl FnOnce(&Path) -> Certificates) -> (Self, Certificates) {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let first = certificates(folder.path());
        install(folder.path(), &first);
        let (certificate, key, ca) = (at("server-cert.pem"), at("server-key.pem"), at("ca-cert.pem"));
        let text = format!(
            "volumes = [\"m=mem:4M\"]\n[tls]\ncertificate = {certificate:?}\nkey = {key:?}\nclient_ca = {ca:?}\n"
        );
        std::fs::write(at("byway.toml"), text).expect("room in memory");
        let (config, ctl) = (at("byway.toml"), at("ctl"));
        let arguments = ["--config", &config, "--control-socket", &ctl, "--threads", "2"];
        let frontends = ["--nbd", "tcp://127.0.0.1:0", "--listen", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 2, &[&arguments[..], &frontends].concat());
        (Self { server, folder }, first)
    }

    fn reload(&self) -> Result<String, String> {
        let socket = self.folder.path().join("ctl").display().to_string();
        let output = run(&binary(), &["ctl", "--control-socket", &socket, "reload"]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Only clients of that authority get in, and trust the node.
    fn is_of(&self, ours: &Certificates, others: &Certificates) {
        for (frontend, scheme) in [("nbd", "nbds"), ("byway", "byways")] {
            let uri = format!("{scheme}://localhost:{}/m", self.server.port(frontend));
            let info = |certificates: &Certificates| {
                let flags = certificates.flags("client");
                let words = [vec!["info", &uri], flags.iter().map(String::as_str).collect()].concat();
                run(&binary(), &words)
            };
            let (let_in, refused) = (info(ours), info(others));
            assert!(let_in.status.success(), "{uri}: {}", String::from_utf8_lossy(&let_in.stderr));
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(said.contains("not signed by the authority"), "{uri}: {said}");
        }
    }
}

#[test]
fn a_reload_replaces_certificates_and_ends_no_connection() {
    let test = "a_reload_replaces_certificates_and_ends_no_connection";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    let (old, new) = ("old", "new");
    let made = |folder: &Path, name: &str| {
        std::fs::create_dir(folder.join(name)).expect("a folder");
        Certificates::new(&folder.join(name))
    };
    let (rig, old) = Rig::new(|folder| made(folder, old));
    let new = made(rig.folder.path(), new);
    let port = rig.server.port("nbd");
    let uri = |certificates: &Certificates| {
        format!("nbds://localhost:{port}/m?tls-certificates={}", certificates.path("client"))
    };
    let script = format!(
        "{LIBNBD_PRELUDE}h.set_uri_allow_local_file(True)\nh.connect_uri({:?})\nh.pwrite(b'k' * 65536, 4096)\n\
         for step in ('connected', 'reloaded', 'refused'):\n  print(step, flush=True); input()\n  \
         assert h.get_tls_negotiated() and h.pread(65536, 4096) == b'k' * 65536, step\n\
         h.pwrite(b'e' * 4096, 0)\nh.flush()\nassert h.pread(4096, 0) == b'e' * 4096\nh.shutdown()\n",
        uri(&old)
    );
    let mut client = Script::start(&python, &script);
    client.expect("connected");
    rig.is_of(&old, &new);

    install(rig.folder.path(), &new);
    rig.is_of(&old, &new);
    rig.reload().expect("the new files are good");
    rig.is_of(&new, &old);
    client.go_on();
    client.expect("reloaded");

    // What cannot be used changes nothing: no certificate, the key of another, nothing there.
    let file = |name: &str| rig.folder.path().join(name);
    let refused = |name: &str| {
        let said = rig.reload().expect_err("a broken file");
        assert!(said.contains(&file(name).display().to_string()), "{said}");
        rig.is_of(&new, &old);
        install(rig.folder.path(), &new);
    };
    std::fs::write(file("server-cert.pem"), "nothing of the kind").unwrap();
    refused("server-cert.pem");
    std::fs::copy(old.path("server-key.pem"), file("server-key.pem")).unwrap();
    refused("server-key.pem");
    std::fs::remove_file(file("ca-cert.pem")).unwrap();
    refused("ca-cert.pem");
    client.go_on();
    client.expect("refused");

    rig.reload().expect("all files are good again");
    rig.is_of(&new, &old);
    client.go_on();
    client.ends_well();
    let again = format!(
        "{LIBNBD_PRELUDE}h.set_uri_allow_local_file(True)\nh.connect_uri({:?})\n\
         assert h.pread(4096, 0) == b'e' * 4096\nh.shutdown()\n",
        uri(&new)
    );
    run_well(&python, &["-c", &again]);
}
