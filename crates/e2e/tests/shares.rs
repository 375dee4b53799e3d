//! Shares of a node: how they are listed, looked into, and changed by a reload.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use byway_e2e::{LIMIT, MountRig, Server, binary, lacks_mounts, run, run_well, until};

/// Two folders that are shared, and a configuration that a test rewrites.
struct Rig {
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let rig = Self { folder: tempfile::tempdir().unwrap() };
        for name in ["shared/a/b", "other"] {
            std::fs::create_dir_all(rig.folder.path().join(name)).unwrap();
        }
        std::fs::write(rig.folder.path().join("shared/a/file"), "12345").unwrap();
        std::os::unix::fs::symlink("/etc", rig.folder.path().join("shared/a/link")).unwrap();
        rig
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn configure(&self, shares: &str) {
        let (listen, ctl) = (self.path("wire"), self.path("ctl"));
        let text = format!("listen = ['unix://{listen}']\ncontrol_socket = '{ctl}'\nthreads = 2\n{shares}");
        std::fs::write(self.folder.path().join("byway.toml"), text).unwrap();
    }

    fn serve(&self) -> Server {
        Server::start(self.folder.path(), 2, &["--config", &self.path("byway.toml")])
    }

    fn uri(&self, path: &str) -> String {
        format!("byway+unix:///{path}?socket={}", self.path("wire"))
    }

    fn ls(&self, path: &str) -> String {
        run_well(&binary(), &["ls", &self.uri(path)])
    }

    /// What `byway ls` says of something that it cannot list.
    fn ls_fails(&self, path: &str) -> String {
        let output = run(&binary(), &["ls", &self.uri(path)]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn ctl(&self, command: &str) -> std::process::Output {
        run(&binary(), &["ctl", command, "--control-socket", &self.path("ctl")])
    }
}

#[test]
fn shares_are_listed_beside_volumes_and_looked_into() {
    let rig = Rig::new();
    let shared = rig.path("shared");
    rig.configure(&format!("volumes = ['disk=mem:1M']\nshares = ['home={shared},ro,description=ours']\n"));
    let _server = rig.serve();
    let table = rig.ls("");
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..3], ["disk", "volume", "1.0"], "{table}");
    assert_eq!(lines[2], ["home", "share", "-", "-", "read-only", "ours"], "{table}");
    let json = run_well(&binary(), &["ls", "--json", &rig.uri("")]);
    assert!(json.contains("\"kind\":\"share\"") && json.contains(&rig.uri("home")), "{json}");
    let names = |path: &str| -> Vec<String> {
        rig.ls(path).lines().map(|line| line.split_whitespace().last().unwrap().to_owned()).collect()
    };
    assert_eq!(names("home"), ["a"]);
    assert_eq!(names("home/a"), ["b", "file", "link"]);
    assert_eq!(names("home/a/b/"), [""; 0]);
    let file = rig.ls("home/a/file");
    assert!(file.starts_with("file ") && file.contains(" 5  file"), "{file}");
    assert!(rig.ls_fails("home/a/none").contains("No such file"));
    assert!(rig.ls_fails("home/a/link/passwd").contains("Not a directory"), "links are data");
    assert!(rig.ls_fails("home/../shared").contains("Invalid argument"));
    let said = rig.ls_fails("disk");
    assert!(said.contains("the server has no share of the name") && said.contains("byway info"), "{said}");
}

#[test]
fn a_reload_changes_shares_that_the_node_can_reach() {
    let rig = Rig::new();
    let (shared, other) = (rig.path("shared"), rig.path("other"));
    rig.configure(&format!("shares = ['home={shared}', 'old={shared}']\n"));
    let server = rig.serve();
    rig.configure(&format!("shares = ['home={shared},ro', 'deep={shared}/a']\n"));
    let said = rig.ctl("reload");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let table = rig.ls("");
    assert!(!table.contains("old") && table.contains("read-only") && table.contains("deep"), "{table}");
    assert!(rig.ls("deep").contains("file"));
    assert!(rig.ls_fails("old").contains("the server has no share of the name"));
    if byway_skip::lacks_landlock() || !rustix::process::geteuid().is_root() {
        byway_skip::skip_part_of_this(byway_skip::NO_LANDLOCK);
    } else {
        rig.configure(&format!("shares = ['home={shared}', 'other={other}']\n"));
        let said = rig.ctl("reload");
        let text = String::from_utf8_lossy(&said.stderr).into_owned() + &String::from_utf8_lossy(&said.stdout);
        assert!(!said.status.success() && text.contains("at its start; restart it"), "{text}\n{}", server.log());
        assert!(rig.ls("").contains("deep"), "nothing has changed");
    }
    rig.configure("");
    assert!(!rig.ctl("reload").status.success(), "nothing would be left");
}

#[test]
fn a_client_that_stays_over_a_reload_leaves_no_entry_on_the_list() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new();
    let shared = rig.path("shared");
    let configure = |description: &str| {
        rig.configure(&format!("shares = ['home={shared},users=squash:0,description={description}']\n"));
    };
    configure("before");
    let _server = rig.serve();
    let mounts = MountRig::new("");
    let mount = mounts.mount("mount", &rig.uri("home"), &[]);
    let file = File::open(mount.path("a/file")).unwrap();
    file.lock_shared().unwrap();
    drop(file);
    let listed = || std::fs::read_dir(Path::new(&shared).join(".byway-state")).unwrap().count();
    assert_eq!(listed(), 1);
    configure("after");
    assert!(rig.ctl("reload").status.success());
    // It is back, and takes no lock.
    assert_eq!(std::fs::read(mount.path("a/file")).unwrap(), b"12345");
    mount.unmount();
    until(Instant::now() + LIMIT, "an empty list", || (listed() == 0).then_some(()));
}

#[test]
fn what_clients_do_with_a_share_is_counted_over_reloads() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new();
    let shared = rig.path("shared");
    let configure = |description: &str| {
        rig.configure(&format!(
            "shares = ['home={shared},users=squash:0,description={description}', 'other={shared}']\n"
        ));
    };
    configure("before");
    let _server = rig.serve();
    let mounts = MountRig::new("");
    let mount = mounts.mount("mount", &rig.uri("home"), &[]);
    let said = || -> [String; 2] {
        let status = rig.ctl("status");
        let text = String::from_utf8(status.stdout).unwrap();
        let of = |share| text.lines().find(|line| line.starts_with(share)).unwrap_or_default().to_owned();
        [of("share home:"), of("share other:")]
    };
    let mut file = File::create(mount.path("new")).unwrap();
    file.write_all(&[7; 100_000]).unwrap();
    file.sync_all().unwrap();
    drop(file);
    std::fs::remove_file(mount.path("new")).unwrap();
    assert_eq!(std::fs::read(mount.path("a/file")).unwrap(), b"12345");
    let [home, other] = said();
    assert!(
        home.contains(": 1 clients; 2 reads of 5 bytes, ") && home.contains(" writes of 100000 bytes, 1 syncs, "),
        "{home}"
    );
    assert!(home.contains(" 2 other changes, ") && home.ends_with(" 0 store errors"), "{home}");
    assert!(other.contains(": 0 clients; 0 reads of 0 bytes, ") && other.contains(" 0 queries, "), "{other}");
    configure("after");
    assert!(rig.ctl("reload").status.success());
    std::fs::write(mount.path("a/file"), "123").unwrap();
    let [home, _] = said();
    assert!(home.contains(" writes of 100003 bytes, 1 syncs, "), "{home}");
    mount.unmount();
    until(Instant::now() + LIMIT, "no client", || said()[0].contains(": 0 clients; ").then_some(()));
}

#[test]
fn a_reload_reads_the_map_of_users_again() {
    if lacks_mounts() {
        return;
    }
    let rig = Rig::new();
    let (shared, map) = (rig.path("shared"), rig.path("users"));
    std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    std::fs::write(&map, "0 4711\n").unwrap();
    rig.configure(&format!("shares = ['home={shared},users=map:{map}']\n"));
    let _server = rig.serve();
    let mounts = MountRig::new("");
    let mount = mounts.mount("mount", &rig.uri("home"), &[]);
    let owner_of_new = |name: &str| {
        File::create(mount.path(name)).unwrap();
        std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(Path::new(&shared).join(name)).unwrap())
    };
    assert_eq!(owner_of_new("one"), 4711);
    let same = rig.ctl("reload");
    assert!(same.status.success() && !String::from_utf8_lossy(&same.stdout).contains("home"), "nothing has changed");
    // As an editor replaces it: another file of the same name.
    std::fs::write(rig.path("users.new"), "0 4712:100\n").unwrap();
    std::fs::rename(rig.path("users.new"), &map).unwrap();
    let reload = rig.ctl("reload");
    assert!(reload.status.success(), "{}", String::from_utf8_lossy(&reload.stderr));
    assert_eq!(owner_of_new("two"), 4712);
    std::fs::write(&map, "0 4713\n0 4714\n").unwrap();
    let refused = rig.ctl("reload");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned() + &String::from_utf8_lossy(&refused.stdout);
    assert!(!refused.status.success() && said.contains("line 2: this user of clients has a line already"), "{said}");
    assert_eq!(owner_of_new("three"), 4712, "the running map is unchanged");
    mount.unmount();
}

#[test]
fn what_cannot_be_shared_is_said_at_the_start() {
    let rig = Rig::new();
    let refused = |arguments: &[&str], said: &str| {
        let output = run(&binary(), &[&["serve"], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(said), "{arguments:?}: {stderr}");
    };
    let missing = format!("home={}", rig.path("missing"));
    let listen = ["--listen", "tcp://127.0.0.1:0"];
    refused(&["--share", &missing, listen[0], listen[1]], "name a directory that exists");
    let file = format!("home={}", rig.path("shared/a/file"));
    refused(&["--share", &file, listen[0], listen[1]], "name a directory that exists");
    let home = format!("home={}", rig.path("shared"));
    refused(&["--share", &home, "--nbd", "tcp://127.0.0.1:0"], "give --listen");
    refused(&["--share", &home], "give --listen");
    refused(&[listen[0], listen[1]], "--share NAME=DIR");
    let good = run_well(&binary(), &["serve", "--check", "--share", &home, listen[0], listen[1]]);
    assert_eq!(good, "good: 0 volumes, 1 shares, 1 listeners\n");
    assert!(Path::new(&rig.path("shared")).exists());
}
