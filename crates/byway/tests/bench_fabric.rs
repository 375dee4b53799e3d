//! `byway bench fabric` has figures over every wire, and leaves no process behind.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn byway() -> Command {
    Command::new(env!("CARGO_BIN_EXE_byway"))
}

fn measure(arguments: &[&str]) -> Vec<Value> {
    let out = byway().args(["bench", "fabric", "--json", "--seconds", "1"]).args(arguments).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    report["medians"].as_array().unwrap().clone()
}

fn check(point: &Value, clients: u64) {
    assert_eq!(point["clients"], clients);
    assert!(point["megabytes_per_second"].as_f64().unwrap() > 0.0, "{point}");
    let fairness = point["fairness"].as_f64().unwrap();
    assert!(fairness > 0.0 && fairness < 1.0 + 1e-9, "{point}");
}

#[test]
fn with_fewer_frames_than_clients_nothing_is_dropped_where_the_server_drives() {
    for wire in ["tcp", "unix", "shm"] {
        let points = measure(&["--clients", "1,24", "--frames", "3", "--mode", "driven", "--wire", wire]);
        for (point, clients) in points.iter().zip([1, 24]) {
            check(point, clients);
            assert_eq!((&point["drops"], &point["repeats"], &point["wasted_bytes"]), (&0.into(), &0.into(), &0.into()));
        }
        assert_eq!(points.len(), 2);
    }
}

#[test]
fn what_is_sent_unasked_comes_in_the_end() {
    let points = measure(&["--clients", "24", "--frames", "3", "--mode", "naive", "--store", "none"]);
    check(&points[0], 24);
}

fn children(parent: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

#[test]
fn its_processes_end_when_it_is_killed() {
    let mut bench = byway();
    bench.args(["bench", "fabric", "--clients", "4", "--seconds", "600"]).stdout(Stdio::null());
    let mut bench = bench.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let started = loop {
        let started = children(bench.id());
        if started.len() == 5 {
            break started;
        }
        assert!(Instant::now() < deadline, "{started:?}");
        std::thread::yield_now();
    };
    bench.kill().unwrap();
    bench.wait().unwrap();
    // What is gone, or a zombie that its new parent has not waited for, runs no more.
    let runs = |id: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
    };
    while started.iter().any(runs) {
        assert!(Instant::now() < deadline, "{started:?}");
        std::thread::yield_now();
    }
}
