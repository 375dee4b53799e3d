//! A C program that uses the library reads and writes a volume of `byway serve`.

use std::path::{Path, PathBuf};
use std::process::Command;

// Has the library built.
use byway as _;
use byway_e2e::{Server, SkipReason, backends, run, skip};

/// The static library, which lies beside this test or above it.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    let found = test.ancestors().map(|folder| folder.join("libbyway.a")).find(|path| path.exists());
    found.expect("libbyway.a was built with this test")
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
        let sockets = ["unix", "shm"].map(|kind| format!("{kind}://{}", folder.path().join(kind).display()));
        let mut arguments = vec!["--io", io, "--volume", "disk=mem:8M", "--listen", "tcp://127.0.0.1:0"];
        arguments.extend(["--listen", &sockets[0], "--listen", &sockets[1]]);
        let server = Server::start(folder.path(), 3, &arguments);
        let at = [format!("tcp://127.0.0.1:{}", server.port("byway")), sockets[0].clone(), sockets[1].clone()];
        for address in &at {
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
