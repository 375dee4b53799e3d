//! `byway ls` and `byway info` against the built server and against nbdkit.

use std::os::unix::fs::FileExt;

use byway_e2e::{ForeignServer, Server, SkipReason, binary, find_tool, noise, run, run_well, skip};

/// A node with a file that is half a hole, a read-only volume and one in memory.
fn node(folder: &std::path::Path) -> Server {
    let half = folder.join("half");
    let file = std::fs::File::create(&half).unwrap();
    file.set_len(4 << 20).unwrap();
    file.write_all_at(&noise(1 << 20, 3), 0).unwrap();
    file.write_all_at(&noise(1 << 20, 4), 2 << 20).unwrap();
    let half = format!("half={},description=two of four", half.display());
    let socket = format!("unix://{}/sock", folder.display());
    let volumes = ["--volume", &half, "--volume", "ro=null:1G,ro", "--volume", "mem=mem:16M,description=for scratch"];
    let frontends = ["--listen", "tcp://127.0.0.1:0", "--nbd", "tcp://127.0.0.1:0", "--nbd", &socket];
    Server::start(folder, 3, &[&volumes[..], &frontends[..]].concat())
}

fn servers(server: &Server, folder: &std::path::Path) -> [(String, String); 3] {
    let tcp = |scheme: &str, frontend: &str| format!("{scheme}://127.0.0.1:{}/", server.port(frontend));
    let unix = format!("?socket={}/sock", folder.display());
    [(tcp("byway", "byway"), String::new()), (tcp("nbd", "nbd"), String::new()), ("nbd+unix:///".to_owned(), unix)]
}

#[test]
fn ls_shows_the_volumes_over_each_wire() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let server = node(folder.path());
    let mut tables = Vec::new();
    for (front, back) in servers(&server, folder.path()) {
        let uri = format!("{front}{back}");
        let table = run_well(&binary(), &["ls", &uri]);
        tables.push(table.clone());
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4, "{table}");
        for (line, words) in [
            (1, ["half", "4.0 MiB", "two of four"]),
            (2, ["ro", "1.0 GiB", "read-only"]),
            (3, ["mem", "16.0 MiB", "volatile"]),
        ] {
            assert!(words.iter().all(|word| lines[line].contains(word)), "{uri}: {table}");
        }
        let json = run_well(&binary(), &["ls", &uri, "--json"]);
        for want in ["\"name\":\"half\"", "\"size_bytes\":4194304", &format!("\"uri\":\"{front}half{back}\"")] {
            assert!(json.contains(want), "{want} in {json}");
        }
        let one = run(&binary(), &["ls", &format!("{front}half{back}")]);
        assert!(String::from_utf8_lossy(&one.stderr).contains("byway info"), "{one:?}");
    }
    assert!(tables.iter().all(|table| *table == tables[0]), "different facts: {tables:#?}");
}

#[test]
fn the_wrong_wire_is_named() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let server = node(folder.path());
    let tcp = |frontend: &str| format!("127.0.0.1:{}", server.port(frontend));
    let (native, nbd) = (tcp("byway"), tcp("nbd"));
    let socket = format!("?socket={}/sock", folder.path().display());
    for (server, volume, speaks) in [
        (format!("nbd://{native}/"), format!("nbd://{native}/half"), "speaks byway's own protocol; write byway://"),
        (format!("byway://{nbd}/"), format!("byway://{nbd}/half"), "speaks NBD; write nbd://"),
        (format!("byway+unix:///{socket}"), format!("byway+unix:///half{socket}"), "speaks NBD; write nbd+unix://"),
    ] {
        for arguments in [["ls", &server], ["info", &volume]] {
            let said = run(&binary(), &arguments);
            assert!(String::from_utf8_lossy(&said.stderr).contains(speaks), "{arguments:?}: {said:?}");
        }
    }
}

#[test]
fn where_nobody_serves_it_is_said_what_to_check() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    for scheme in ["byway+unix", "nbd+unix", "byway+shm"] {
        let uri = format!("{scheme}:///?socket={}/nobody", folder.path().display());
        let said = run(&binary(), &["ls", &uri]);
        let stderr = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.status.success() && stderr.contains("check the address"), "{stderr}");
    }
}

#[test]
fn info_says_how_much_is_data() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let server = node(folder.path());
    for (front, back) in servers(&server, folder.path()) {
        let uri = format!("{front}half{back}");
        let said = run_well(&binary(), &["info", &uri]);
        for want in ["4.0 MiB (4194304 bytes)", "data         2.0 MiB (2097152 bytes)", "extents      4", "two of four"]
        {
            assert!(said.contains(want), "{want} in {said}");
        }
        assert!(!said.contains("read-only"), "{said}");
        let json = run_well(&binary(), &["info", &uri, "--json"]);
        for want in ["\"data_bytes\":2097152", "\"zero_bytes\":2097152", "\"complete\":true", "\"two of four\""] {
            assert!(json.contains(want), "{want} in {json}");
        }
        let said = run_well(&binary(), &["info", &format!("{front}ro{back}")]);
        assert!(said.contains("read-only"), "{said}");
        let none = run(&binary(), &["info", &format!("{front}none{back}")]);
        assert!(!none.status.success() && !none.stderr.is_empty(), "{none:?}");
    }
}

#[test]
fn other_servers_are_listed_and_described() {
    const TEST: &str = "other_servers_are_listed_and_described";
    let Some(nbdkit) = find_tool("nbdkit") else { return skip(TEST, SkipReason::MissingTool("nbdkit")) };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let socket = folder.path().join("sock");
    let arguments =
        ["--filter=exportname", "memory", "8M", "exportname-list=explicit", "exportname=one", "exportname=two"];
    let server = ForeignServer::nbdkit(&nbdkit, &socket, &arguments);
    let table = run_well(&binary(), &["ls", &server.uri("")]);
    assert!(table.contains("\none ") && table.contains("\ntwo ") && table.contains("8.0 MiB"), "{table}");
    let said = run_well(&binary(), &["info", &server.uri("one")]);
    assert!(said.contains("8.0 MiB (8388608 bytes)") && said.contains("multi-conn"), "{said}");
}
