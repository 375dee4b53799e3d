//! Access lists of volumes: which clients see them, open them and write to them, over every wire, and what a reload changes
//! under running clients.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use byway_e2e::{
    Certificates, LIBNBD_PRELUDE, LIMIT, Script, Server, SkipReason, backends, binary, find_tool, libnbd_python, run,
    run_well, skip, until,
};

/// A node with a configuration file, TLS for those who ask for it, and a listener of each kind.
struct Rig {
    // Before the folder, which holds its log.
    server: Server,
    certificates: Certificates,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new(io: &str, volumes: &[&str]) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let certificates = Certificates::new(folder.path());
        certificates.revoke(&[]);
        for name in ["disk", "a", "b"] {
            std::fs::write(folder.path().join(name), vec![7; 1 << 20]).expect("room in memory");
        }
        configure(folder.path(), &certificates, volumes);
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (config, ctl) = (at("byway.toml"), at("ctl"));
        let (nbd, unix, shm) = (at("nbd"), at("unix"), at("shm"));
        let (nbd, unix, shm) = (format!("unix://{nbd}"), format!("unix://{unix}"), format!("shm://{shm}"));
        let arguments = ["--config", &config, "--control-socket", &ctl, "--threads", "2", "--io", io];
        let frontends = ["--nbd", "tcp://127.0.0.1:0", "--nbd", &nbd, "--listen", "tcp://127.0.0.1:0"];
        let near = ["--listen", &unix, "--listen", &shm];
        let server = Server::start(folder.path(), 6, &[&arguments[..], &frontends, &near].concat());
        Self { server, certificates, folder }
    }

    fn reload(&self, volumes: &[&str]) {
        configure(self.folder.path(), &self.certificates, volumes);
        let ctl = self.path("ctl");
        run_well(&binary(), &["ctl", "--control-socket", &ctl, "reload"]);
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// The address of a volume, or of the node, by that wire.
    fn uri(&self, wire: &str, volume: &str) -> String {
        match wire {
            "nbd" | "nbds" => format!("{wire}://localhost:{}/{volume}", self.server.port("nbd")),
            "byway" | "byways" => format!("{wire}://localhost:{}/{volume}", self.server.port("byway")),
            "nbd+unix" | "nbds+unix" => format!("{wire}:///{volume}?socket={}", self.path("nbd")),
            "byway+shm" => format!("{wire}:///{volume}?socket={}", self.path("shm")),
            _ => format!("{wire}:///{volume}?socket={}", self.path("unix")),
        }
    }

    fn byway(&self, client: &str, command: &[&str]) -> Result<String, String> {
        let mut arguments: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
        if command.iter().any(|word| word.starts_with("nbds") || word.starts_with("byways")) {
            arguments.extend(self.certificates.flags(client));
        }
        let output = run(&binary(), &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// What a client sees, each with whether it may only be read; `None`: it is not let in at all.
    fn listed(&self, wire: &str, client: &str) -> Option<BTreeMap<String, bool>> {
        let said = self.byway(client, &["ls", &self.uri(wire, ""), "--json"]).ok()?;
        let listed: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let entry = |entry: &serde_json::Value| {
            let read_only = entry["flags"].as_array().expect("a list").iter().any(|flag| flag == "read-only");
            (entry["name"].as_str().expect("a name").to_owned(), read_only)
        };
        Some(listed.as_array().expect("a list").iter().map(entry).collect())
    }
}

fn configure(folder: &Path, certificates: &Certificates, volumes: &[&str]) {
    let place = folder.display().to_string();
    let volumes: Vec<String> = volumes.iter().map(|volume| format!("{:?}", volume.replace("DIR", &place))).collect();
    let path = |name: &str| certificates.path(name);
    let text = format!(
        "volumes = [{}]\n[tls]\ncertificate = {:?}\nkey = {:?}\nclient_ca = {:?}\ncrl = {:?}\nmode = \"optional\"\n",
        volumes.join(", "),
        path("server-cert.pem"),
        path("server-key.pem"),
        path("ca-cert.pem"),
        path("crl.pem"),
    );
    std::fs::write(folder.join("byway.toml"), text).expect("room in memory");
}

/// A volume over each kind of store for `client` and, to be read, for `other`; and one for each other kind of client.
const VOLUMES: [&str; 9] = [
    "file=DIR/disk,access=client.test,access=other.test:ro",
    "memory=mem:1M,access=client.test,access=other.test:ro",
    "null=null:1M,access=client.test,access=other.test:ro",
    "stripe=stripe:chunk=64K:DIR/a:DIR/b,access=client.test,access=other.test:ro",
    "fault=fault:read=1us:mem:1M,access=client.test,access=other.test:ro",
    "near=mem:1M,access=127.0.0.0/8:ro,access=::1:ro",
    "far=mem:1M,access=10.0.0.0/8",
    "here=mem:1M,access=unix",
    "all=mem:1M",
];

const CERTIFIED: [&str; 5] = ["file", "memory", "null", "stripe", "fault"];

#[test]
fn each_client_sees_and_opens_what_is_for_it_over_every_wire() {
    for io in backends() {
        let rig = Rig::new(io, &VOLUMES);
        for wire in
            ["nbds", "byways", "nbds+unix", "byways+unix", "nbd", "byway", "nbd+unix", "byway+unix", "byway+shm"]
        {
            let secure = wire.starts_with("nbds") || wire.starts_with("byways");
            let all = ["nobody", "client", "other", "expired", "stranger"];
            let clients = if secure { &all[..] } else { &all[..1] };
            for &client in clients {
                let mut expected: BTreeMap<String, bool> = BTreeMap::from([("all".to_owned(), false)]);
                if wire.contains('+') {
                    expected.insert("here".to_owned(), false);
                } else {
                    expected.insert("near".to_owned(), true);
                }
                if matches!(client, "client" | "other") {
                    expected.extend(CERTIFIED.map(|name| (name.to_owned(), client == "other")));
                }
                let let_in = !secure || matches!(client, "client" | "other");
                let expected = let_in.then_some(expected);
                assert_eq!(rig.listed(wire, client), expected, "{io} {wire} {client}");
                let Some(expected) = expected else { continue };
                for name in CERTIFIED.into_iter().chain(["near", "far", "here", "all"]) {
                    let info = |name: &str| rig.byway(client, &["info", &rig.uri(wire, name)]);
                    match (info(name), expected.contains_key(name)) {
                        (Ok(_), true) => {}
                        // It cannot be told from what does not exist.
                        (Err(said), false) => {
                            let said = said.replace(&format!("/{name}"), "/nothing");
                            assert_eq!(said, info("nothing").unwrap_err(), "{wire} {client}");
                        }
                        (outcome, _) => panic!("{io} {wire} {client} {name}: {outcome:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_client_that_may_read_cannot_write_whatever_it_sends() {
    let test = "a_client_that_may_read_cannot_write_whatever_it_sends";
    let rig = Rig::new("auto", &VOLUMES);
    std::fs::write(rig.path("image"), vec![9; 1 << 20]).expect("room in memory");
    for wire in ["nbds", "byways", "nbds+unix", "byways+unix"] {
        let copy =
            |client: &str| rig.byway(client, &["copy", &rig.path("image"), &rig.uri(wire, "file"), "--overwrite"]);
        let said = copy("other").expect_err("it may only read");
        assert!(said.contains("read-only"), "{wire}: {said}");
        assert!(std::fs::read(rig.path("disk")).unwrap() == vec![7; 1 << 20], "{wire}: nothing was written");
        copy("client").expect("it may write");
        assert!(std::fs::read(rig.path("disk")).unwrap() == vec![9; 1 << 20], "{wire}");
        std::fs::write(rig.path("disk"), vec![7; 1 << 20]).expect("room in memory");
    }
    // A client that keeps to no flag of its server.
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    let uri = format!("{}?tls-certificates={}", rig.uri("nbds", "file"), rig.certificates.path("other"));
    let script = format!(
        "{LIBNBD_PRELUDE}h.set_strict_mode(0)\nh.set_uri_allow_local_file(True)\nh.connect_uri({uri:?})\n\
         for ask in (lambda: h.pwrite(b'x' * 512, 0), lambda: h.zero(512, 0), lambda: h.trim(512, 0)):\n  \
         try: ask(); raise SystemExit('it was let')\n  except nbd.Error as e: assert e.errno == 'EPERM', e\n\
         assert h.pread(512, 0) == b'\\x07' * 512\nh.shutdown()\n"
    );
    run_well(&python, &["-c", &script]);
    assert!(std::fs::read(rig.path("disk")).unwrap() == vec![7; 1 << 20], "nothing was written");
}

#[test]
fn the_only_volume_of_a_client_is_its_default_export() {
    let test = "the_only_volume_of_a_client_is_its_default_export";
    let Some(nbdinfo) = find_tool("nbdinfo") else { return skip(test, SkipReason::MissingTool("nbdinfo")) };
    let rig = Rig::new("epoll", &["a=mem:1M,access=client.test", "b=mem:2M,access=other.test"]);
    for (client, size) in [("client", "1048576"), ("other", "2097152")] {
        let uri = format!("{}?tls-certificates={}", rig.uri("nbds", ""), rig.certificates.path(client));
        assert_eq!(run_well(&nbdinfo, &["--size", &uri]).trim(), size, "{client}");
    }
    let plain = run(&nbdinfo, &["--size", &rig.uri("nbd", "")]);
    assert!(!plain.status.success(), "there is no volume for it");
}

/// A libnbd client that reads once at each step, and says at the end whether its connection was still there.
fn reader(rig: &Rig, python: &Path, client: &str) -> Script {
    let uri = format!("{}?tls-certificates={}", rig.uri("nbds", "disk"), rig.certificates.path(client));
    let script = format!(
        "{LIBNBD_PRELUDE}h.set_uri_allow_local_file(True)\nh.connect_uri({uri:?})\n\
         while True:\n  try: h.pread(512, 0); print('read', flush=True)\n  except nbd.Error: print('ended', flush=True)\n  \
         input()\n"
    );
    let mut script = Script::start(python, &script);
    script.expect("read");
    script
}

#[test]
fn a_reload_ends_the_connections_that_have_lost_by_it_and_no_other() {
    let test = "a_reload_ends_the_connections_that_have_lost_by_it_and_no_other";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    for io in backends() {
        let rig = Rig::new(io, &["disk=DIR/disk,access=client.test,access=other.test"]);
        let (mut client, mut other) = (reader(&rig, &python, "client"), reader(&rig, &python, "other"));
        let step = |script: &mut Script, said: &str| {
            script.go_on();
            script.expect(said);
        };
        rig.reload(&["disk=DIR/disk,access=client.test,access=other.test,access=10.0.0.0/8"]);
        step(&mut client, "read");
        step(&mut other, "read");
        // What it may do has become less, for one of them.
        rig.reload(&["disk=DIR/disk,access=client.test,access=other.test:ro"]);
        step(&mut client, "read");
        step(&mut other, "ended");
        let mut other = reader(&rig, &python, "other");
        rig.reload(&["disk=DIR/disk,access=client.test"]);
        step(&mut client, "read");
        step(&mut other, "ended");
        for wire in ["nbds", "byways"] {
            assert!(rig.byway("other", &["info", &rig.uri(wire, "disk")]).is_err(), "{wire}");
        }
        // A certificate that was stolen.
        rig.reload(&["disk=DIR/disk,access=client.test,access=other.test"]);
        let mut other = reader(&rig, &python, "other");
        rig.certificates.revoke(&["client"]);
        rig.reload(&["disk=DIR/disk,access=client.test,access=other.test"]);
        step(&mut client, "ended");
        step(&mut other, "read");
        for wire in ["nbds", "byways"] {
            assert!(rig.byway("other", &["info", &rig.uri(wire, "disk")]).is_ok(), "{wire}");
            assert!(rig.byway("client", &["info", &rig.uri(wire, "disk")]).is_err(), "{wire}");
        }
        until(Instant::now() + LIMIT, "the reason in the log", || {
            rig.server.log().contains("the peer's certificate is revoked").then_some(())
        });
    }
}

#[test]
fn a_wrong_name_is_answered_with_the_names_that_the_client_may_know() {
    let rig = Rig::new("epoll", &VOLUMES);
    for (wire, client, names) in [
        ("nbds", "client", "file, memory, null, stripe, fault, near, all"),
        ("byways", "other", "file, memory, null, stripe, fault, near, all"),
        ("nbd", "nobody", "near, all"),
        ("byway+unix", "nobody", "here, all"),
    ] {
        let said = rig.byway(client, &["info", &rig.uri(wire, "fiel")]).unwrap_err();
        let expected = format!(
            "/fiel{}: no volume has that name; the server has {names}\n",
            &rig.uri(wire, "").split_once('?').map_or(String::new(), |(_, query)| format!("?{query}"))
        );
        assert!(said.ends_with(&expected), "{wire}: {said}");
    }
    rig.reload(&["file=mem:1M,access=client.test"]);
    let said = rig.byway("other", &["info", &rig.uri("byways", "file")]).unwrap_err();
    assert!(said.ends_with("no volume has that name; the server shows this client none\n"), "{said}");
}
