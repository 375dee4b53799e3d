//! An operator's work on a running node: reload it, inspect it, limit its rate, inject faults.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use byway_e2e::{
    LIMIT, Rig, Script, Server, SkipReason, backends, binary, libnbd_python, noise, run, run_well, skip, until,
};

/// Libnbd's Python, or a skip said aloud.
macro_rules! python {
    ($test:expr) => {
        match libnbd_python() {
            Some(python) => python,
            None => return skip($test, SkipReason::MissingTool("python3-libnbd")),
        }
    };
}

#[test]
fn a_reload_changes_volumes_under_their_clients() {
    let python = python!("a_reload_changes_volumes_under_their_clients");
    let rig = Rig::new("\"keep=mem:1M\", \"gone=mem:1M\"", &["--listen", "tcp://127.0.0.1:0"]);
    let disk = rig.file("disk", 1 << 20);
    let script = rig.script(
        "keep, gone = connect('keep'), connect('gone')\n\
         keep.pwrite(b'k' * 4096, 0)\n\
         assert fails(lambda: connect('disk'))\n\
         print('connected', flush=True); input()\n\
         assert keep.pread(4096, 0) == b'k' * 4096, 'the same connection goes on, with its bytes'\n\
         assert fails(lambda: gone.pread(4096, 0))\n\
         assert fails(lambda: connect('gone'))\n\
         again = connect('keep')\n\
         assert (keep.get_size(), again.get_size()) == (1 << 20, 2 << 20), 'seen at the next GO'\n\
         again.pwrite(b'n' * 4096, (2 << 20) - 4096)\n\
         assert connect('disk').get_size() == 1 << 20\n\
         print('reloaded', flush=True); input()\n\
         disk = connect('disk')\n\
         disk.pwrite(b'd' * 4096, (3 << 20) - 4096)\n\
         assert disk.pread(4096, (3 << 20) - 4096) == b'd' * 4096, 'the new end of the file'\n\
         assert keep.pread(4096, 0) == b'k' * 4096\n\
         print('grown', flush=True); input()\n\
         assert fails(lambda: disk.pwrite(b'x' * 4096, 2 << 20)) == 'ENOSPC', 'behind the new end'\n\
         disk.pwrite(b'x' * 4096, 0)\n",
    );
    let mut client = Script::start(&python, &script);
    client.expect("connected");
    rig.configure(&format!("\"keep=mem:2M\", \"disk={disk}\""));
    assert_eq!(rig.reload(), "added: disk\ndropped: gone\nresized: keep\n");
    client.go_on();
    client.expect("reloaded");
    rig.file("disk", 3 << 20);
    let id = rustix::process::Pid::from_raw(rig.server.id().cast_signed()).unwrap();
    rustix::process::kill_process(id, rustix::process::Signal::HUP).unwrap();
    until(Instant::now() + LIMIT, "the reload", || rig.server.log().contains("resized=[\"disk\"]").then_some(()));
    client.go_on();
    client.expect("grown");
    rig.file("disk", 2 << 20);
    assert_eq!(rig.reload(), "resized: disk\n");
    client.go_on();
    client.ends_well();
    assert_eq!(std::fs::metadata(disk).unwrap().len(), 2 << 20, "nobody wrote behind the end");
    let info =
        run_well(&binary(), &["info", "--json", &format!("byway://127.0.0.1:{}/keep", rig.server.port("byway"))]);
    assert!(info.contains("2097152"), "the native wire as well: {info}");
}

#[test]
fn a_reload_that_cannot_be_done_changes_nothing() {
    let rig = Rig::new("\"keep=mem:1M\"", &[]);
    let refused = |volumes: &str, want: &str| {
        rig.configure(volumes);
        let output = rig.ctl(&["reload"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(want), "should say {want:?}: {said}");
        let status = String::from_utf8_lossy(&rig.ctl(&["status", "--json"]).stdout).into_owned();
        assert!(status.contains("\"name\":\"keep\",\"bytes\":1048576"), "{status}");
        assert!(!status.contains("\"name\":\"new\""), "{status}");
    };
    refused("\"keep=mem:2M\", \"new=/nowhere\"", "create it first");
    refused("\"keep=mem:2M\", \"new=mem:1M\", \"new=mem:2M\"", "rename one");
    refused("\"keep=mem:2M\", \"new=mem:1M", "byway.toml");
    refused("\"keep=mem:2M\", \"new=mem:100T\"", "more than the memory of this machine");
    refused("", "names no volume, share or memory to lend");
    refused("\"keep=mem:2M\", \"new=mem:1M\"]\nthreads = 7\nallow = [", "threads cannot change");
    refused("\"keep=mem:2M\", \"new=mem:1M\"]\nmmap_limit = \"1G\"\nallow = [", "mmap_limit cannot change");
    let disk = rig.file("disk", 1 << 20);
    rig.configure(&format!("\"keep=mem:1M\", \"disk={disk}\""));
    rig.reload();
    refused(&format!("\"keep=mem:2M\", \"new={disk}\""), "this node serves it as `disk`");
    let output = run(&binary(), &["ctl", "--control-socket", "/nowhere/ctl", "reload"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is the node running"));
}

#[test]
fn a_file_can_be_served_under_another_name_once_a_reload_has_taken_it_out() {
    let test = "a_file_can_be_served_under_another_name_once_a_reload_has_taken_it_out";
    let python = python!(test);
    let rig = Rig::new("\"keep=mem:1M\"", &[]);
    let disk = rig.file("disk", 1 << 20);
    rig.configure(&format!("\"keep=mem:1M\", \"old=fault:write=5s:{disk}\""));
    rig.reload();
    // Its write is in flight, and the file locked, for longer than opening a file waits for its lock.
    let mut client = Script::start(
        &python,
        &rig.script(
            "old = connect('old')\n\
             old.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b'x' * 4096)), 0)\n\
             while old.aio_in_flight() and not old.aio_is_ready(): old.poll(-1)\n\
             print('written', flush=True); input()\n",
        ),
    );
    client.expect("written");
    until(Instant::now() + LIMIT, "the write to arrive", || {
        let status = String::from_utf8_lossy(&rig.ctl(&["status"]).stdout).into_owned();
        status.lines().any(|line| line.contains("volume old") && line.contains("1 in flight")).then_some(())
    });
    rig.configure("\"keep=mem:1M\"");
    assert_eq!(rig.reload(), "dropped: old\n");
    rig.configure(&format!("\"keep=mem:1M\", \"new={disk}\""));
    assert_eq!(rig.reload(), "added: new\n");
    client.go_on();
    client.ends_well();
}

#[test]
fn a_restored_image_is_served_after_a_reload() {
    let python = python!("a_restored_image_is_served_after_a_reload");
    let rig = Rig::new("\"keep=mem:1M\"", &["--listen", "tcp://127.0.0.1:0"]);
    let disk = rig.file("disk", 1 << 20);
    let volumes = format!("\"keep=mem:1M\", \"disk={disk}\"");
    rig.configure(&volumes);
    rig.reload();
    let mut client = Script::start(
        &python,
        &rig.script(
            "keep, disk = connect('keep'), connect('disk')\n\
             disk.pwrite(b'o' * 512, 0)\n\
             print('connected', flush=True); input()\n\
             assert keep.pread(512, 0) == bytes(512), 'this connection goes on'\n\
             assert fails(lambda: disk.pread(512, 0)), 'this one has ended'\n\
             assert connect('disk').pread(512, 0) == b'r' * 512\n",
        ),
    );
    client.expect("connected");
    assert_eq!(rig.reload(), "no volume changed\n");
    std::fs::write(rig.path("restored"), [b'r'; 1 << 20]).unwrap();
    std::fs::rename(rig.path("restored"), &disk).unwrap();
    assert_eq!(rig.reload(), "reopened: disk\n");
    client.go_on();
    client.ends_well();
    std::fs::remove_file(&disk).unwrap();
    let refused = rig.ctl(&["reload"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("volume `disk`") && said.contains(&disk), "{said}");
}

#[test]
fn a_node_that_gave_up_root_reloads_what_only_root_may_open() {
    let test = "a_node_that_gave_up_root_reloads_what_only_root_may_open";
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root"));
    }
    let python = python!(test);
    let mut rig = Rig::new("\"m=mem:1M\"", &["--user", "nobody"]);
    let disk = rig.file("disk", 1 << 20);
    for name in ["disk", "byway.toml"] {
        std::fs::set_permissions(rig.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    rig.configure(&format!("\"m=mem:1M\", \"disk={disk}\""));
    assert_eq!(rig.reload(), "added: disk\n");
    let status = std::fs::read_to_string(format!("/proc/{}/status", rig.server.id())).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    std::fs::set_permissions(rig.path("nbd"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let script = rig.script("h = connect('disk')\nh.pwrite(b'x' * 512, 512)\nh.flush()\n");
    run_well(&python, &["-c", &script]);
    assert_eq!(&std::fs::read(rig.path("disk")).unwrap()[512..1024], [b'x'; 512]);
    std::fs::rename(rig.file("restored", 2 << 20), &disk).unwrap();
    assert_eq!(rig.reload(), "resized: disk\nreopened: disk\n", "which file it is only the opener can see");
    let children = format!("/proc/{0}/task/{0}/children", rig.server.id());
    let opener = std::fs::read_to_string(children).unwrap();
    assert_eq!(opener.split_whitespace().count(), 1, "one opener: {opener}");
    rig.server.kill();
    let gone = || !Path::new("/proc").join(opener.trim()).exists();
    until(Instant::now() + LIMIT, "the opener to end with its node", || gone().then_some(()));
}

#[test]
fn a_confined_node_reloads_without_asking_the_resolver_again() {
    let test = "a_confined_node_reloads_without_asking_the_resolver_again";
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root"));
    }
    // A name of /etc/hosts, which the confinement hides.
    let rig = Rig::new("\"m=mem:1M\"", &["--user", "nobody", "--listen", "tcp://localhost:0"]);
    assert!(rig.server.port("byway") > 0);
    rig.configure("\"m=mem:1M\", \"more=mem:1M\"");
    assert_eq!(rig.reload(), "added: more\n");
}

/// In a folder that nothing else of the node is in.
#[test]
fn a_node_that_gave_up_root_shares_memory() {
    let test = "a_node_that_gave_up_root_shares_memory";
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root"));
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let socket = folder.path().join("shm").display().to_string();
    let rig = Rig::new("\"m=mem:1M\"", &["--user", "nobody", "--listen", &format!("shm://{socket}")]);
    let listed = run(&binary(), &["ls", &format!("byway+shm:///?socket={socket}")]);
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    assert!(String::from_utf8_lossy(&listed.stdout).contains('m'));
    drop(rig);
}

/// Landlock is there without --user too: a node opens nothing by its path, and its reloads work all the same.
#[test]
fn a_node_of_any_user_is_confined_and_reloads() {
    let test = "a_node_of_any_user_is_confined_and_reloads";
    if byway_skip::lacks_landlock() {
        return skip(test, byway_skip::NO_LANDLOCK);
    }
    let rig = Rig::new("\"m=mem:1M\"", &[]);
    // An older kernel knows of less.
    let log = rig.server.log();
    assert!(log.contains("landlock=Full") || log.contains("landlock=Partial"), "{log}");
    let disk = rig.file("disk", 1 << 20);
    rig.configure(&format!("\"m=mem:1M\", \"disk={disk}\""));
    assert_eq!(rig.reload(), "added: disk\n");
}

#[test]
fn sockets_have_the_mode_and_the_group_that_are_asked_for() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let group = if rustix::process::geteuid().is_root() { 6 } else { rustix::process::getegid().as_raw() };
    let (nbd, native) = (format!("unix://{},mode=0600", at("nbd")), format!("unix://{},group={group}", at("native")));
    let (ctl, shm) = (at("ctl"), format!("shm://{},mode=0666,group={group}", at("shm")));
    let arguments =
        ["--volume", "m=mem:1M", "--nbd", &nbd, "--listen", &native, "--listen", &shm, "--control-socket", &ctl];
    let mut server = Server::start(folder.path(), 4, &arguments);
    let own = rustix::process::getegid().as_raw();
    for (name, mode, gid) in [("nbd", 0o600, own), ("native", 0o660, group), ("shm", 0o666, group), ("ctl", 0o600, own)]
    {
        let metadata = std::fs::metadata(at(name)).unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.gid()), (mode, gid), "{name}");
    }
    assert_eq!(server.terminate(), Some(0));
    let unknown = format!("unix://{},group=no-such-group", at("other"));
    let output = run(&binary(), &["serve", "--volume", "m=mem:1M", "--nbd", &unknown]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("group=no-such-group: there is no such group"), "{said}");
}

/// An operator moves a socket away, or a new release is started beside the old one.
#[test]
fn a_node_that_stops_leaves_the_sockets_of_its_successor() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let names = ["nbd", "native", "ctl"];
    let (nbd, native, ctl) = (format!("unix://{}", at("nbd")), format!("unix://{}", at("native")), at("ctl"));
    let arguments = ["--volume", "m=mem:1M", "--nbd", &nbd, "--listen", &native, "--control-socket", &ctl];
    let mut first = Server::start(folder.path(), 3, &arguments);
    for name in names {
        std::fs::rename(at(name), at(&format!("{name}-of-the-first"))).unwrap();
    }
    let mut second = Server::start(folder.path(), 3, &arguments);
    assert_eq!(first.terminate(), Some(0));
    for uri in [format!("nbd+unix:///m?socket={}", at("nbd")), format!("byway+unix:///m?socket={}", at("native"))] {
        run_well(&binary(), &["info", &uri]);
    }
    run_well(&binary(), &["ctl", "--control-socket", &ctl, "status"]);
    assert_eq!(second.terminate(), Some(0));
    for name in names {
        assert!(!Path::new(&at(name)).exists(), "{name} must go with its node");
    }
}

/// While a node serves the same files, and without a trace.
#[test]
fn a_configuration_is_checked_without_serving_it() {
    let mut rig = Rig::new("\"m=mem:1M\"", &[]);
    let disk = rig.file("disk", 1 << 20);
    rig.configure(&format!("\"m=mem:1M\", \"disk={disk}\""));
    assert_eq!(rig.reload(), "added: disk\n");
    let (config, nbd) = (rig.path("byway.toml").display().to_string(), format!("unix://{}", rig.path("nbd").display()));
    let check = |more: &[&str]| {
        let output = run(&binary(), &[&["serve", "--check", "--config", &config, "--nbd", &nbd], more].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(check(&[]), (Some(0), "good: 2 volumes, 1 listeners\n".to_owned(), String::new()));
    let group = format!("{nbd}-2,group=no-such-group");
    for (more, reason) in [
        (["--volume", "gone=/no/such/file"], "volume `gone`: /no/such/file"),
        (["--user", "no-such-user"], "--user no-such-user"),
        (["--nbd", &group], "group=no-such-group: there is no such group; name a group"),
        (["--listen", "tcp://0.0.0.0"], "can be reached by other machines"),
    ] {
        let (code, out, said) = check(&more);
        assert!(code == Some(1) && out.is_empty() && said.contains(reason), "{reason}: {code:?} {said}");
    }
    assert!(rig.server.is_alive() && !rig.path("nbd-2").exists());
    let level = |level: &str| run(&binary(), &["--log", level, "serve", "--check", "--config", &config, "--nbd", &nbd]);
    assert!(String::from_utf8_lossy(&level("trace").stderr).contains("TRACE"));
    assert_eq!(level("loud").status.code(), Some(2));
}

#[test]
fn a_node_tells_how_it_is() {
    let python = python!("a_node_tells_how_it_is");
    // A rule of a fault keeps the other operations from answering out of memory at once.
    let volumes = "\"m=mem:1M\", \"slow=fault:write=5ms:mem:1M\", \"big=fault:trim=eio:mem:16M\", \"n=mem:16M\"";
    let rig = Rig::new(volumes, &["--slow-us", "1000", "--listen", "tcp://127.0.0.1:0"]);
    let script = rig.script(
        "m, slow, big = connect('m'), connect('slow'), connect('big')\n\
         big.pwrite(b'b' * (4 << 20), 0); big.pread(12 << 20, 0)\n\
         m.pwrite(bytes(4096), 0); m.pread(512, 0); m.pread(512, 0); m.flush()\n\
         slow.pwrite(bytes(8192), 4096)\n",
    );
    run_well(&python, &["-c", &script]);
    std::fs::write(rig.path("image"), noise(4 << 20, 1)).unwrap();
    let to = format!("byway://127.0.0.1:{}/n", rig.server.port("byway"));
    run_well(&binary(), &["copy", "--chunk", "1M", "--overwrite", &rig.path("image").display().to_string(), &to]);
    let metrics = rig.get("/metrics");
    for line in [
        "byway_ready 1",
        "byway_volume_writes_total{volume=\"big\"} 1",
        "byway_volume_written_bytes_total{volume=\"big\"} 4194304",
        "byway_volume_reads_total{volume=\"big\"} 1",
        "byway_volume_read_bytes_total{volume=\"big\"} 12582912",
        "byway_volume_store_seconds_count{volume=\"slow\",operation=\"write\"} 1",
        "byway_volume_store_seconds_bucket{volume=\"slow\",operation=\"write\",le=\"0.004096\"} 0",
        "byway_volume_writes_total{volume=\"n\"} 4",
        "byway_volume_written_bytes_total{volume=\"n\"} 4194304",
        "byway_volume_reads_total{volume=\"m\"} 2",
        "byway_volume_read_bytes_total{volume=\"m\"} 1024",
        "byway_volume_writes_total{volume=\"m\"} 1",
        "byway_volume_flushes_total{volume=\"m\"} 1",
        "byway_volume_written_bytes_total{volume=\"slow\"} 8192",
        "byway_connections_accepted_total{frontend=\"nbd\"} 3",
    ] {
        assert!(metrics.lines().any(|have| have == line), "{line}\n{metrics}");
    }
    let slow = rig.get("/slow");
    assert!(slow.contains("\"operation\":\"write\",\"volume\":\"slow\",\"offset\":4096,\"len\":8192"), "{slow}");
    assert!(!slow.contains("\"volume\":\"m\""), "{slow}");
    assert!(rig.get("/healthz").ends_with("ok\n"));
    let status = String::from_utf8_lossy(&rig.ctl(&["status"]).stdout).into_owned();
    assert!(
        status.contains(
            "volume m: 1048576 bytes; 2 reads, 1 writes, 1 flushes, 0 store errors, 0 bad requests, 0 in flight"
        ),
        "{status}"
    );
}

#[test]
fn the_status_shows_the_clients_of_both_wires() {
    let python = python!("the_status_shows_the_clients_of_both_wires");
    let frontends = ["--listen", "tcp://127.0.0.1:0", "--nbd", "tcp://127.0.0.1:0"];
    let rig = Rig::new("\"m=mem:1M\", \"slow=fault:read=300s:mem:1M\"", &frontends);
    let script = format!(
        "m = connect('m')\n\
         far = nbd.NBD(); far.set_export_name('slow'); far.connect_tcp('127.0.0.1', '{}')\n\
         far.aio_pread(nbd.Buffer(4096), 0)\n\
         while far.aio_in_flight() and not far.aio_is_ready(): far.poll(-1)\n\
         print(far.aio_in_flight(), flush=True); input()\n\
         import os; os._exit(0)\n",
        rig.server.port("nbd")
    );
    let mut client = Script::start(&python, &rig.script(&script));
    client.expect("1");
    let native = format!("byway://127.0.0.1:{}/m", rig.server.port("byway"));
    let arguments = ["bench", "volume", &native, "--rw", "randread", "--bs", "4K", "--depth", "8", "--seconds", "60"];
    let mut bench = std::process::Command::new(binary())
        .args(arguments)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    until(Instant::now() + LIMIT, "all three clients in the status", || {
        let status = String::from_utf8_lossy(&rig.ctl(&["status"]).stdout).into_owned();
        let shows = |begin: &str, words: &[&str]| {
            let mut lines = status.lines().filter(|line| line.starts_with(begin));
            lines.any(|line| words.iter().all(|word| line.contains(word)))
        };
        let busy = !status.contains("takes 0.0 MB/s; send delay");
        (shows("nbd client local on m: sends 0.0 MB/s, takes 0.0 MB/s; 0 requests", &[])
            && shows("nbd client 127.0.0.1:", &["on slow", "1 requests in flight"])
            && shows("byway client 127.0.0.1: ", &["sessions", "MB/s", "stalled", "ms in all"])
            && busy)
            .then_some(())
    });
    let _ = bench.kill();
    let _ = bench.wait();
    client.go_on();
    client.ends_well();
}

#[test]
fn a_volume_that_has_had_its_bytes_waits_and_no_other() {
    let python = python!("a_volume_that_has_had_its_bytes_waits_and_no_other");
    let volumes = "\"free=mem:1M\", \"held=mem:1M,rate=1K/s\", \"brief=mem:8M,rate=50M/s\"";
    let rig = Rig::new(volumes, &["--threads", "1"]);
    // 512 KiB at 1 KiB/s: the second read would wait for over eight minutes.
    let script = rig.script(
        "import threading\n\
         free, held = connect('free'), connect('held')\n\
         held.pread(512 << 10, 0)\n\
         read = threading.Thread(target=lambda: held.pread(4096, 0), daemon=True)\n\
         read.start()\n\
         other = connect('held')\n\
         write = threading.Thread(target=lambda: other.pwrite(b'w' * (256 << 10), 0), daemon=True)\n\
         write.start()\n\
         for i in range(256): free.pwrite(b'f' * 4096, i << 12)\n\
         brief = connect('brief')\n\
         for i in range(3): brief.pread(8 << 20, 0)  # waits for moments, and not for as long as the others\n\
         assert read.is_alive() and write.is_alive()\n\
         print('held', flush=True); input()\n\
         read.join(30); write.join(30)\n\
         assert not read.is_alive() and not write.is_alive(), 'the rate is gone'\n\
         assert connect('held').pread(256 << 10, 0) == b'w' * (256 << 10)\n",
    );
    let mut client = Script::start(&python, &script);
    client.expect("held");
    rig.configure("\"free=mem:1M\", \"held=mem:1M\", \"brief=mem:8M,rate=50M/s\"");
    assert_eq!(rig.reload(), "changed: held\n");
    client.go_on();
    client.ends_well();
}

#[test]
fn faults_put_in_reach_the_client_and_nothing_else_does() {
    let python = python!("faults_put_in_reach_the_client_and_nothing_else_does");
    for io in backends() {
        let volumes = "\"r=fault:read=eio@64K+4K:mem:1M\", \"w=fault:write=enospc@64K+4K:mem:1M\", \
                       \"s=fault:read=short#1:mem:1M\", \"f=fault:flush=eio#1:mem:1M\", \
                       \"ws=fault:write=short@0+4K#1:mem:1M\"";
        let rig = Rig::new(volumes, &["--io", io]);
        let script = rig.script(
            "import errno\n\
             r, w, s, f, ws = [connect(n) for n in ('r', 'w', 's', 'f', 'ws')]\n\
             r.pwrite(b'r' * (1 << 20), 0)\n\
             assert fails(lambda: r.pread(4096, 64 << 10)) == 'EIO'\n\
             assert fails(lambda: r.pread(128 << 10, 0)) == 'EIO'\n\
             assert r.pread(64 << 10, 0) == b'r' * (64 << 10), 'the bytes beside are right'\n\
             assert r.pread(64 << 10, 68 << 10) == b'r' * (64 << 10)\n\
             w.pwrite(b'a' * (64 << 10), 0)\n\
             assert fails(lambda: w.pwrite(b'b' * 4096, 64 << 10)) == 'ENOSPC'\n\
             assert fails(lambda: w.pwrite(b'b' * (512 << 10), 0)) == 'ENOSPC'\n\
             w.pwrite(b'c' * 4096, 68 << 10)\n\
             assert w.pread(4096, 64 << 10) == bytes(4096) and w.pread(4096, 68 << 10) == b'c' * 4096\n\
             s.pwrite(b's' * 8192, 0)\n\
             assert fails(lambda: s.pread(8192, 0)) == 'EIO', 'a short read is never filled up'\n\
             assert s.pread(8192, 0) == b's' * 8192\n\
             f.pwrite(b'f' * 512, 0)\n\
             assert fails(f.flush) == 'EIO'\n\
             assert fails(f.flush) == 'EIO', 'once lost, every flush says so'\n\
             assert fails(lambda: ws.pwrite(b'x' * 4096, 0)) == 'EIO'\n\
             ws.pwrite(b'y' * 4096, 0)\n\
             assert ws.pread(4096, 0) == b'y' * 4096\n",
        );
        run_well(&python, &["-c", &script]);
    }
}
