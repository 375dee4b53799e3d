//! `byway ctl far`: where the pages of a job are, told while it runs.

use std::process::Stdio;
use std::time::Instant;

use byway_e2e::far::{Lender, PagedProgram, can_page, command, python};
use byway_e2e::{LIMIT, binary, run, run_well, until};
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
