//! How byway's commands leave NBD servers that they refuse to use: as the protocol asks (`NBD_CMD_DISC`, or `NBD_OPT_ABORT`
//! before the transmission phase), so that the server does not report a failure.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use byway_e2e::{LIMIT, Server, binary, run, until};

/// What a client sent last: enough for the head of a request.
const TAIL_BYTES: usize = 32;

/// By connection: what its client has sent last, and whether it has ended.
type Connections = Arc<Mutex<Vec<(Vec<u8>, bool)>>>;

/// Passes connections to `from` on to `to`, and looks at what clients say.
fn listen_in(from: &Path, to: &Path) -> Connections {
    let listener = UnixListener::bind(from).unwrap();
    let (connections, to) = (Connections::default(), to.to_owned());
    let seen = Arc::clone(&connections);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = UnixStream::connect(&to) else { return };
            let number = {
                let mut seen = seen.lock().unwrap();
                seen.push((Vec::new(), false));
                seen.len() - 1
            };
            let (mut answers, mut reader) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut answers, &mut &client));
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(count @ 1..) = reader.read(&mut bytes) {
                    let tail = &mut seen.lock().unwrap()[number].0;
                    tail.extend_from_slice(&bytes[..count]);
                    tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
                    let _ = (&server).write_all(&bytes[..count]);
                }
                let _ = server.shutdown(std::net::Shutdown::Both);
                seen.lock().unwrap()[number].1 = true;
            });
        }
    });
    connections
}

/// Whether a client's last bytes are a leave: by a request with a plain or an extended head, or by an option.
fn is_farewell(tail: &[u8]) -> bool {
    let ends = |len: usize, begin: &[u8]| tail.len() >= len && tail[tail.len() - len..].starts_with(begin);
    ends(28, b"\x25\x60\x95\x13\0\0\0\x02")
        || ends(32, b"\x21\xe4\x1c\x71\0\0\0\x02")
        || ends(16, b"IHAVEOPT\0\0\0\x02\0\0\0\0")
}

#[test]
fn a_command_that_refuses_to_go_on_takes_leave_of_its_servers() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["disk", "source", "copy"] {
        std::fs::write(at(name), vec![7; 1 << 20]).unwrap();
    }
    let volumes = [format!("disk={}", at("disk")), format!("ro={},ro", at("disk")), "small=mem:64K".to_owned()];
    let nbd = format!("unix://{}", at("nbd"));
    let mut arguments = vec!["--nbd", &nbd];
    arguments.extend(volumes.iter().flat_map(|volume| ["--volume", volume]));
    let _server = Server::start(folder.path(), 1, &arguments);
    let connections = listen_in(&folder.path().join("proxy"), &folder.path().join("nbd"));
    let [disk, ro, small] = ["disk", "ro", "small"].map(|name| format!("nbd+unix:///{name}?socket={}", at("proxy")));
    let (source, copy, nowhere) = (at("source"), at("copy"), at("nowhere/resume"));
    let cases: [(&[&str], &str); 8] = [
        (&["copy", &source, &disk], "contains data; name another destination"),
        (&["copy", &disk, &copy], "contains data; name another destination"),
        (&["copy", &disk, &disk], "is both source and destination"),
        (&["copy", &source, &ro], "is read-only"),
        (&["copy", &disk, &small], "and 1048576 are to be copied"),
        (&["copy", &source, &small, "--resume", &nowhere, "--overwrite"], "are to be copied"),
        (&["copy", &disk, &copy, "--resume", &nowhere, "--overwrite"], "the resume file"),
        (&["bench", "volume", &disk, "--rw", "write", "--seconds", "1"], "contains data; name another volume"),
    ];
    for (arguments, words) in cases {
        let before = connections.lock().unwrap().len();
        // A second connection may be amid its handshake.
        let refused = run(&binary(), &[arguments, &["--connections", "1"]].concat());
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(words), "{arguments:?}: {said}");
        let ended = || connections.lock().unwrap().iter().all(|(_, ended)| *ended).then_some(());
        until(Instant::now() + LIMIT, "the connections to end", ended);
        let connections = connections.lock().unwrap();
        assert!(connections.len() > before, "{arguments:?} connected");
        for (tail, _) in &connections[before..] {
            assert!(is_farewell(tail), "{arguments:?}: its last bytes are {tail:02x?}");
        }
    }
}
