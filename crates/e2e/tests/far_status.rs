//! `byway ctl far`: where the pages of a job are, told while it runs; `byway ctl status` and the metrics of its lender.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use byway_e2e::far::{Lender, PagedProgram, can_page, command, python};
use byway_e2e::{LIMIT, Server, binary, run, run_well, until};
use serde_json::Value;

/// Fills 48 MiB, reads them twice, and waits.
const PROGRAM: &str = r#"
import sys
pages = [bytearray(b"%07d." % i * 512) for i in range(12000)]
for turn in range(2): assert all(pages[i] == b"%07d." % i * 512 for i in range(12000))
print("filled", flush=True)
sys.stdin.read(1)
"#;

#[test]
fn a_running_job_tells_where_its_pages_are_and_how_long_it_waits() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let [uri, _] = lender.uris();
    let mut job = command(&uri, "20M", &["--class", "disk"], &[python, "-c", PROGRAM]);
    let paged = PagedProgram::start_filled(job.stdin(Stdio::piped()));
    let process = paged.0.id().to_string();
    let status =
        || -> Value { serde_json::from_str(&run_well(&binary(), &["ctl", "--json", "far", &process])).expect("JSON") };
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} is a number"));
    let mib = |value: &Value| number(value) >> 20;
    let settled = until(Instant::now() + LIMIT, "pages that leave", || {
        Some(status()).filter(|status| mib(&status["resident_bytes"]) <= 22 && mib(&status["far_bytes"]) >= 20)
    });
    assert_eq!((number(&settled["programs"]), mib(&settled["limit_bytes"])), (1, 20), "{settled:#}");
    let lenders = settled["lenders"].as_array().expect("a list");
    assert!(lenders.len() == 1 && lenders[0]["connected"] == true, "{settled:#}");
    assert_eq!(lenders[0]["name"].as_str().map(|name| name.trim_end_matches('/')), Some(uri.trim_end_matches('/')));
    // A page of zeroes lies nowhere; all others of 48 MiB are here or there.
    assert!(number(&lenders[0]["slabs"]) >= 1 && mib(&lenders[0]["bytes"]) >= 20, "{settled:#}");
    assert_eq!(settled["file_bytes"], lenders[0]["bytes"], "the file has the same pages");

    let text = run_well(&binary(), &["ctl", "far", &process]);
    assert!(text.contains("1 program: ") && text.contains("of 20.0 MiB here"), "{text}");
    let lender = format!("lender {}/: connected; ", uri.trim_end_matches('/'));
    assert!(text.contains(&lender) && text.contains("spill file: "), "{text}");
    assert!(text.contains("waits for a page: 50 % at most ") && text.contains(" us: "), "{text}");

    let output = paged.finish();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(" unchanged") && said.contains("waits for a page: 50 % at most "), "{said}");
}

#[test]
fn a_process_that_byway_far_does_not_run_is_named() {
    let this = std::process::id().to_string();
    let refused = run(&binary(), &["ctl", "far", &this]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("is not run by byway far"), "{said}");
}

const SLAB: u64 = 64 << 20;

/// `lending` of `byway ctl --json status`.
fn lending(ctl: &Path) -> Value {
    let ctl = ctl.to_str().unwrap();
    let status: Value =
        serde_json::from_str(&run_well(&binary(), &["ctl", "--json", "--control-socket", ctl, "status"]))
            .expect("JSON");
    status["lending"].clone()
}

/// The value of a metric.
fn metric(server: &Server, name: &str) -> Option<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port("http"))).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn a_lender_tells_what_each_borrower_has_and_nothing_after_its_end() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let ctl = folder.path().join("ctl");
    let flags =
        ["--lend", "256M,guard=0", "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--control-socket"];
    let server = Server::start(folder.path(), 2, &[&flags[..], &[ctl.to_str().unwrap()]].concat());
    let number = |value: &Value, name: &str| value[name].as_u64().unwrap_or_else(|| panic!("{name} of {value:#}"));
    let all = ["byway_lent_bytes", "byway_lent_filled_bytes", "byway_borrowers"];
    assert_eq!(all.map(|name| metric(&server, name)), [Some(0); 3]);

    let uri = format!("byway://127.0.0.1:{}", server.port("byway"));
    let mut job = command(&uri, "20M", &["--class", "none"], &[python, "-c", PROGRAM]);
    let paged = PagedProgram::start_filled(job.stdin(Stdio::piped()));
    // The program has 48 MiB, and the lender counts twice a second.
    let now = until(Instant::now() + LIMIT, "filled pages", || {
        Some(lending(&ctl)).filter(|now| number(now, "filled_bytes") >= 20 << 20)
    });
    assert_eq!((number(&now, "limit_bytes"), number(&now, "borrowers")), (4 * SLAB, 1), "{now:#}");
    let (lent, filled) = (number(&now, "lent_bytes"), number(&now, "filled_bytes"));
    assert!(lent >= SLAB && lent % SLAB == 0 && filled <= lent, "{now:#}");
    let borrower = &now["largest"][0];
    assert_eq!(borrower["name"], "at 127.0.0.1", "{now:#}");
    let names = ["lent_bytes", "filled_bytes", "taken_back_bytes"];
    assert_eq!(names.map(|name| number(borrower, name)), [lent, filled, 0], "{now:#}");

    let text = run_well(&binary(), &["ctl", "--control-socket", ctl.to_str().unwrap(), "status"]);
    assert!(text.contains(&format!("memory: {lent} of {} bytes lent, to 1 borrowers; ", 4 * SLAB)), "{text}");
    assert!(text.contains(&format!("memory: borrower at 127.0.0.1: {lent} bytes lent, ")), "{text}");
    // A node that only lends has something to reload, too: nothing of it changes.
    run_well(&binary(), &["ctl", "--control-socket", ctl.to_str().unwrap(), "reload"]);
    let of_borrower = |name: &str| metric(&server, &format!("byway_borrower_{name}{{borrower=\"at 127.0.0.1\"}}"));
    assert_eq!([metric(&server, all[0]), metric(&server, all[2])], [Some(lent), Some(1)]);
    assert!(metric(&server, all[1]).is_some_and(|bytes| bytes >= 20 << 20));
    assert_eq!([of_borrower("lent_bytes"), of_borrower("taken_back_bytes")], [Some(lent), Some(0)]);
    assert!(of_borrower("filled_bytes").is_some_and(|bytes| bytes >= 20 << 20));

    let output = paged.finish();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    until(Instant::now() + LIMIT, "the end of all leases", || {
        (all.map(|name| metric(&server, name)) == [Some(0); 3]).then_some(())
    });
    let after = lending(&ctl);
    assert_eq!([number(&after, "lent_bytes"), number(&after, "filled_bytes")], [0, 0], "{after:#}");
    assert_eq!(after["largest"], Value::Array(Vec::new()), "{after:#}");
    assert_eq!(["lent_bytes", "filled_bytes", "taken_back_bytes"].map(of_borrower), [None; 3]);
}
