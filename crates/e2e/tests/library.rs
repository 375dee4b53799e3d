//! Programs that use the library, in C and in Rust, read and write a volume of `byway serve`.

#[allow(dead_code, reason = "its main function")]
#[path = "../../service/examples/volume.rs"]
mod volume;

use std::path::{Path, PathBuf};
use std::process::Command;

// Has the library built.
use byway as _;
use byway_e2e::{Server, SkipReason, backends, run, skip};
use byway_fabric::node::NodeOptions;

/// The static library, which lies beside this test or above it.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    let found = test.ancestors().map(|folder| folder.join("libbyway.a")).find(|path| path.exists());
    found.expect("libbyway.a was built with this test")
}

/// A server with the volume `disk`, and its addresses: each wire that needs no device.
fn serve(folder: &Path, io: &str) -> (Server, [String; 3]) {
    let [unix, shm] = ["unix", "shm"].map(|kind| format!("{kind}://{}", folder.join(kind).display()));
    let mut arguments = vec!["--io", io, "--volume", "disk=mem:8M", "--listen", "tcp://127.0.0.1:0"];
    arguments.extend(["--listen", &unix, "--listen", &shm]);
    let server = Server::start(folder, 3, &arguments);
    let tcp = format!("tcp://127.0.0.1:{}", server.port("byway"));
    (server, [tcp, unix, shm])
}

#[test]
fn the_rust_example_writes_and_reads_a_volume_over_each_wire() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    for io in backends() {
        let (_server, addresses) = serve(folder.path(), io);
        for address in &addresses {
            let run = |name, bytes| {
                volume::run(&NodeOptions::default(), address, name, bytes).map_err(|error| error.to_string())
            };
            assert_eq!(run("disk", 1 << 20), Ok(()), "{address} {io}");
            assert_eq!(run("disk", 20_000), Ok(()), "{address} {io}");
            let refused = run("another", 20_000).expect_err("there is no such volume");
            assert!(refused.contains("no volume has that name"), "{address} {io}: {refused}");
        }
    }
}

#[test]
fn the_c_example_writes_and_reads_a_volume_over_each_wire() {
    if Command::new("cc").arg("--version").output().is_err() {
        return skip("library", SkipReason::MissingTool("cc"));
    }
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
    let program = folder.path().join("volume");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror"]).arg("-I").arg(capi.join("include"));
    compile.arg(capi.join("examples/volume.c")).arg(library()).args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program);
    let compiled = compile.output().expect("cc runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    for io in backends() {
        let (_server, addresses) = serve(folder.path(), io);
        for address in &addresses {
            let ran = run(&program, &[address, "disk"]);
            let said = String::from_utf8_lossy(&ran.stderr).into_owned();
            assert_eq!(
                String::from_utf8_lossy(&ran.stdout),
                "1048576 bytes came back as they were written\n",
                "{said}"
            );
            let refused = run(&program, &[address, "another"]);
            assert_eq!(String::from_utf8_lossy(&refused.stderr), "open: the server says 10\n", "{address}");
        }
    }
}
