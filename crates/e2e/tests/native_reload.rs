//! What clients of byway's own wire see of a reload: nothing, or a moment's pause.

use std::process::{Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, Server, binary, noise, run, until};

#[test]
fn a_copy_goes_on_when_its_volume_is_opened_anew_under_it() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let bytes = noise(24 << 20, 11);
    std::fs::write(at("disk"), &bytes).unwrap();
    let configure = |more: &str| {
        std::fs::write(at("byway.toml"), format!("volumes = ['v={},rate=8M{more}']", at("disk"))).unwrap();
    };
    configure("");
    let arguments = ["--config", &at("byway.toml"), "--ctl", &at("ctl"), "--listen", "tcp://127.0.0.1:0"];
    let server = Server::start(folder.path(), 1, &arguments);
    let uri = format!("byway://127.0.0.1:{}/v", server.port("byway"));
    let mut copy = Command::new(binary());
    copy.args(["copy", "--chunk", "256K", &uri, &at("copy")]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut copy = copy.stderr(Stdio::piped()).spawn().expect("byway starts");
    let begun = || {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(at("copy")).is_ok_and(|found| found.blocks() > 1024).then_some(())
    };
    until(Instant::now() + LIMIT, "the copy to begin", begun);
    configure(",ro");
    let reload = run(&binary(), &["ctl", "--socket", &at("ctl"), "reload"]);
    assert!(reload.status.success(), "{}", String::from_utf8_lossy(&reload.stderr));
    assert!(copy.try_wait().unwrap().is_none(), "the reload came too late to show anything");
    let ended = until(Instant::now() + LIMIT, "the copy to end", || copy.try_wait().unwrap());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut copy.stderr.take().unwrap(), &mut said).unwrap();
    assert!(ended.success(), "{said}");
    assert!(std::fs::read(at("copy")).unwrap() == bytes);
}
