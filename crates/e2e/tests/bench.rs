//! `byway bench volume`, from the built binary to the built binary, over each wire.

use byway_e2e::{Server, backends, binary, noise, run, run_well};

#[test]
fn bench_volume_moves_bytes_both_ways_and_says_how_fast() {
    for io in backends() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let socket = format!("unix://{}/sock", folder.path().display());
        let arguments = ["--io", io, "--volume", "m=mem:16M", "--volume", "r=null:16M,ro", "--nbd", &socket];
        let frontends = ["--listen", "tcp://127.0.0.1:0", "--nbd", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0"];
        let server = Server::start(folder.path(), 4, &[&arguments[..], &frontends[..]].concat());
        let native = |name: &str| format!("byway://127.0.0.1:{}/{name}", server.port("byway"));
        let tcp = |name: &str| format!("nbd://127.0.0.1:{}/{name}", server.port("nbd"));
        let unix = |name: &str| format!("nbd+unix:///{name}?socket={}/sock", folder.path().display());
        let cases = [("randwrite", "4K"), ("randread", "4K"), ("write", "1M"), ("read", "1M"), ("randrw", "64K")];
        for (index, (rw, bs)) in cases.into_iter().enumerate() {
            // Over the two backends every wire gets small and large ones, and both ways.
            let uri = [native("m"), tcp("m"), unix("m")][(index + usize::from(io == "epoll")) % 3].clone();
            let how =
                ["--overwrite", "--rw", rw, "--bs", bs, "--seconds", "1", "--connections", "2", "--json", "--io", io];
            let said = run_well(&binary(), &[&["bench", "volume", &uri][..], &how[..]].concat());
            assert!(said.contains("\"requests_per_second\""), "{said}");
            assert!(!said.contains("\"requests\":0,"), "{said}");
        }
        let metrics = format!("127.0.0.1:{}", server.port("http"));
        let more = ["--bs", "64K", "--seconds", "1", "--json", "--metrics", &metrics];
        let said = run_well(&binary(), &[&["bench", "volume", &native("m")][..], &more[..]].concat());
        let figure = |name: &str| -> f64 {
            let rest = said.split_once(&format!("\"{name}\":")).expect("the figure is there").1;
            rest.split([',', '}']).next().unwrap().parse().unwrap_or_else(|_| panic!("{name} in {said}"))
        };
        assert!(figure("server_cpu_us_per_request") > 0.0, "{said}");
        // Reads of memory: one copy, into the socket, or none where it is spliced.
        assert!((0.0..1.2).contains(&figure("server_kernel_copied_bytes_per_byte")), "{said}");
        let wrong = format!("127.0.0.1:{}", server.port("nbd"));
        let refused = run(&binary(), &["bench", "volume", &native("m"), "--seconds", "1", "--metrics", &wrong]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--http"), "{refused:?}");
        for name in [&native as &dyn Fn(&str) -> String, &tcp, &unix] {
            let refused = run(&binary(), &["bench", "volume", &name("r"), "--rw", "randwrite", "--seconds", "1"]);
            assert!(String::from_utf8_lossy(&refused.stderr).contains("read-only"), "{refused:?}");
            let unknown = run(&binary(), &["bench", "volume", &name("other"), "--seconds", "1"]);
            let said = String::from_utf8_lossy(&unknown.stderr);
            assert!(
                said.contains("no volume has that name; the server has m, r") && said.lines().count() < 4,
                "{said}"
            );
        }
    }
}

#[test]
fn bench_volume_does_not_overwrite_contents_unless_told_to() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let disk = folder.path().join("disk");
    let contents = noise(1 << 20, 3);
    std::fs::write(&disk, &contents).unwrap();
    let volume = format!("disk={}", disk.display());
    let frontends = ["--listen", "tcp://127.0.0.1:0", "--nbd", "tcp://127.0.0.1:0"];
    let server = Server::start(folder.path(), 2, &[&["--volume", &volume][..], &frontends[..]].concat());
    let uris = [("byway", "byway"), ("nbd", "nbd")]
        .map(|(scheme, frontend)| format!("{scheme}://127.0.0.1:{}/disk", server.port(frontend)));
    for (uri, rw) in uris.iter().zip(["randwrite", "randrw"]) {
        let refused = run(&binary(), &["bench", "volume", uri, "--rw", rw, "--seconds", "1"]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains("contains data; ") && said.contains("--overwrite"),
            "{said}"
        );
        assert!(std::fs::read(&disk).unwrap() == contents, "nothing was written over {uri}");
        run_well(&binary(), &["bench", "volume", uri, "--rw", "randread", "--seconds", "1"]);
    }
    run_well(&binary(), &["bench", "volume", &uris[0], "--rw", "randwrite", "--seconds", "1", "--overwrite"]);
    assert!(std::fs::read(&disk).unwrap() != contents, "it was told to");
}
