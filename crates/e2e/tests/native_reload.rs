//! A reload as clients of byway's own protocol see it: no effect, or a short pause.

use std::process::{Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, Rig, Server, binary, noise, run, run_well, until};

/// Copies a volume of 24 MiB that is served so slowly that no copy of it ends within a test, and makes its file or options
/// others by a reload meanwhile. Gives what the copy said at its end, and the copy's bytes if it ended well.
fn copy_through_a_reload(after: impl Fn(&str) -> String) -> Result<(Vec<u8>, Vec<u8>), String> {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let bytes = noise(24 << 20, 11);
    std::fs::write(at("disk"), &bytes).unwrap();
    std::fs::write(at("other"), noise(24 << 20, 12)).unwrap();
    let configure = |volume: &str| std::fs::write(at("byway.toml"), format!("volumes = ['{volume}']")).unwrap();
    configure(&format!("v={},rate=64K", at("disk")));
    let arguments = ["--config", &at("byway.toml"), "--control-socket", &at("ctl"), "--listen", "tcp://127.0.0.1:0"];
    let server = Server::start(folder.path(), 1, &arguments);
    let uri = format!("byway://127.0.0.1:{}/v", server.port("byway"));
    let mut copy = Command::new(binary());
    copy.args(["copy", "--chunk", "4K", "--depth", "4", &uri, &at("copy")]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut copy = copy.stderr(Stdio::piped()).spawn().expect("byway starts");
    let begun = || {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(at("copy")).is_ok_and(|found| found.blocks() > 0).then_some(())
    };
    until(Instant::now() + LIMIT, "the copy to begin", begun);
    configure(&after(&folder.path().display().to_string()));
    let reload = run(&binary(), &["ctl", "--control-socket", &at("ctl"), "reload"]);
    assert!(reload.status.success(), "{}", String::from_utf8_lossy(&reload.stderr));
    let ended = until(Instant::now() + LIMIT, "the copy to end", || copy.try_wait().unwrap());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut copy.stderr.take().unwrap(), &mut said).unwrap();
    if ended.success() { Ok((bytes, std::fs::read(at("copy")).unwrap())) } else { Err(said) }
}

#[test]
fn a_copy_goes_on_when_its_volume_is_opened_anew_under_it() {
    let (bytes, copied) = copy_through_a_reload(|folder| format!("v={folder}/disk,ro")).unwrap();
    assert!(copied == bytes);
}

#[test]
fn a_copy_does_not_go_on_with_another_file_under_the_name() {
    let said = copy_through_a_reload(|folder| format!("v={folder}/other")).unwrap_err();
    assert!(said.contains("another file or device under the volume's name"), "{said}");
}

#[test]
fn memory_that_becomes_read_only_keeps_its_bytes() {
    let rig = Rig::new("\"m=mem:1M\"", &["--listen", "tcp://127.0.0.1:0"]);
    let at = |name: &str| rig.path(name).display().to_string();
    let uris =
        [format!("byway://127.0.0.1:{}/m", rig.server.port("byway")), format!("nbd+unix:///m?socket={}", at("nbd"))];
    let bytes = noise(1 << 20, 13);
    std::fs::write(at("image"), &bytes).unwrap();
    run_well(&binary(), &["copy", "--overwrite", &at("image"), &uris[0]]);
    for (options, writable) in [(",ro", false), (",shared", true)] {
        rig.configure(&format!("\"m=mem:1M{options}\""));
        assert_eq!(rig.reload(), "changed: m\n");
        for (wire, uri) in uris.iter().enumerate() {
            let copy = at(&format!("copy{options}{wire}"));
            run_well(&binary(), &["copy", uri, &copy]);
            assert!(std::fs::read(&copy).unwrap() == bytes, "{options} {uri}");
            let written = run(&binary(), &["copy", "--overwrite", &at("image"), uri]);
            let said = String::from_utf8_lossy(&written.stderr);
            assert_eq!(written.status.success(), writable, "{options} {uri}: {said}");
        }
    }
}
