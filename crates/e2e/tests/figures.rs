//! `byway bench figures`, quick: every experiment runs, and the report is whole.

use std::path::Path;

use byway_e2e::{binary, run, run_well};
use serde_json::Value;

/// Elements that are closed, in a page that was made here.
const PAIRED: [&str; 9] = ["section", "table", "tr", "td", "figure", "svg", "g", "div", "script"];

/// Runs the experiments whose names begin so, and looks at what they left.
fn quick_run(only: &str, count: usize) {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let out = folder.path().join("out");
    let (out_text, files) = (out.display().to_string(), std::env::temp_dir().display().to_string());
    let flags = ["bench", "figures", "--quick", "--only", only, "--out", &out_text, "--files", &files];
    let said = run_well(&binary(), &flags);
    let data = std::fs::read_to_string(out.join("data.json")).expect("the data");
    let data: Value = serde_json::from_str(&data).expect("JSON");
    let experiments = data["experiments"].as_array().expect("a list");
    assert_eq!(experiments.len(), count, "{said}");
    for experiment in experiments {
        let name = experiment["description"]["name"].as_str().expect("a name");
        assert!(said.contains(name), "{said}");
        let verdict = experiment["verdict"].as_str().expect("a verdict");
        // A quick run decides nothing, but has all the points that the rule asks for, unless the machine is too small.
        let why = experiment["why"].as_str().unwrap_or_default();
        let cannot = ["there is one CPU", "shared memory needs userfaultfd", "hands no page faults over"];
        let too_small = verdict == "could_not_be_run" && cannot.iter().any(|reason| why.contains(reason));
        let checked = experiment["checks"].as_array().is_some_and(|checks| !checks.is_empty());
        assert!(too_small || checked, "{name}: {why}");
        for plot in experiment["plots"].as_array().expect("plots") {
            check_plot(name, plot);
        }
        check_cpu(name, experiment);
    }
    check_page(&std::fs::read_to_string(out.join("report.html")).expect("the page"), experiments.len());
}

#[test]
fn gmblocks_paths_leave_a_whole_report() {
    quick_run("gmblock-paths", 1);
}

#[test]
fn the_slow_down_beside_gmblock_leaves_a_whole_report() {
    quick_run("gmblock-slow-down", 1);
}

#[test]
fn trapezes_figures_leave_a_whole_report() {
    quick_run("trapeze", 2);
}

#[test]
fn network_memorys_figures_leave_a_whole_report() {
    quick_run("network-memory", 1);
}

#[test]
fn goglins_figures_leave_a_whole_report() {
    quick_run("goglin-registration", 1);
    quick_run("goglin-access", 1);
}

#[test]
fn goglins_files_leave_a_whole_report() {
    if !byway_e2e::lacks_mounts() {
        quick_run("goglin-files", 1);
    }
}

#[test]
fn goglins_clients_leave_a_whole_report() {
    quick_run("goglin-clients", 1);
}

#[test]
fn rdma_sendfiles_figures_leave_a_whole_report() {
    quick_run("sendfile", 1);
}

#[test]
fn responsiveness_leaves_a_whole_report() {
    quick_run("responsiveness", 1);
}

#[test]
fn who_answers_leaves_a_whole_report() {
    quick_run("answers", 1);
}

fn check_plot(name: &str, plot: &Value) {
    let series = plot["series"].as_array().expect("series");
    assert!(!series.is_empty(), "{name}: {plot:#}");
    for one in series {
        let points = one["points"].as_array().expect("points");
        assert!(!points.is_empty(), "{name}: {one:#}");
        for point in points {
            assert!(point["median"].as_f64().is_some_and(|median| median >= 0.0), "{name}: {point:#}");
            let least = if name == "goglin-clients" { 1 } else { 3 };
            assert!(point["rounds"].as_array().is_some_and(|rounds| rounds.len() >= least), "{name}: {point:#}");
        }
    }
}

/// What is done one at a time has its CPU beside it.
fn check_cpu(name: &str, experiment: &Value) {
    if !["trapeze-fetch", "goglin-access", "gmblock-paths"].contains(&name) {
        return;
    }
    let plots = experiment["plots"].as_array().expect("plots");
    let cpu = plots.iter().filter(|plot| plot["name"].as_str().is_some_and(|name| name.starts_with("CPU")));
    let series: Vec<&Value> = cpu.flat_map(|plot| plot["series"].as_array().expect("series")).collect();
    // Without the kernel's count of other processes' time there is the client's alone.
    let ends = if Path::new("/proc/self/schedstat").exists() { &["client, ", "server, "][..] } else { &["client, "] };
    for end in ends {
        let of_end = |one: &&&Value| one["name"].as_str().is_some_and(|name| name.starts_with(end));
        let points = series.iter().filter(of_end).flat_map(|one| one["points"].as_array().expect("points"));
        let medians: Vec<f64> = points.filter_map(|point| point["median"].as_f64()).collect();
        // A server that does little on a busy machine may have used less than the kernel counts.
        let is_counted = |us: &f64| *us > 0.0 || *end == "server, " && *us >= 0.0;
        assert!(medians.iter().any(is_counted), "{name}: {end}{medians:?}");
    }
}

fn check_page(page: &str, experiments: usize) {
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for tag in PAIRED {
        let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    assert_eq!(page.matches("<section ").count(), experiments);
    assert!(page.matches("<svg ").count() >= experiments && !page.contains("NaN") && !page.contains(">inf<"));
    let elsewhere = ["src=", "href=\"http", "url(", "@import"];
    assert!(elsewhere.iter().all(|word| !page.contains(word)), "it needs nothing from elsewhere");
}

#[test]
fn an_unknown_experiment_is_named_and_nothing_is_written() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let out = folder.path().join("out");
    let refused = run(&binary(), &["bench", "figures", "--only", "nothing", "--out", &out.display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("`nothing`") && said.contains("gmblock-paths"), "{said}");
    assert!(!out.exists());
}
