//! byway's own wire, from the built binary to the built binary.

use byway_e2e::{Server, binary, run, run_well};

#[test]
fn bench_volume_moves_bytes_both_ways_and_says_how_fast() {
    for io in ["uring", "epoll"] {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let arguments =
            ["--io", io, "--volume", "m=mem:16M", "--volume", "r=null:16M,ro", "--listen", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let uri = |name: &str| format!("byway://127.0.0.1:{}/{name}", server.port("byway"));
        for (rw, bs) in [("randwrite", "4K"), ("randread", "4K"), ("write", "1M"), ("read", "1M"), ("randrw", "64K")] {
            let arguments = [
                "bench",
                "volume",
                &uri("m"),
                "--rw",
                rw,
                "--bs",
                bs,
                "--seconds",
                "1",
                "--connections",
                "2",
                "--json",
            ];
            let said = run_well(&binary(), &arguments);
            assert!(said.contains("\"requests_per_second\""), "{said}");
            assert!(!said.contains("\"requests\":0,"), "{said}");
        }
        let refused = run(&binary(), &["bench", "volume", &uri("r"), "--rw", "randwrite", "--seconds", "1"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("read-only"), "{refused:?}");
        let unknown = run(&binary(), &["bench", "volume", &uri("other"), "--seconds", "1"]);
        assert!(String::from_utf8_lossy(&unknown.stderr).contains("no volume has that name"), "{unknown:?}");
    }
}
