//! `cargo xtask chart`: draws the chart of README.md from what `cargo xtask peers block --json docs/peers-block.json` measured.
//!
//! Tests fail when the committed chart, or the table in docs/figures.md, has other figures than that file.

use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;

const MEASURED: &str = "docs/peers-block.json";
const CHART: &str = "docs/peers-block.svg";
/// The server that the others are divided by.
const REFERENCE: &str = "nbdkit";
/// Servers and their colours. The stubs are test servers, so the chart leaves them out.
const SERVERS: [(&str, &str); 4] =
    [("byway", "#0969da"), (REFERENCE, "#57606a"), ("nbd-server", "#9aa4af"), ("qemu-nbd", "#cfd6dd")];
const PANELS: [Panel; 2] = [
    Panel { title: "Requests per second (more is better)", metric: "iops", ratio_max: 2.0 },
    Panel {
        title: "Server CPU time per request (less is better)",
        metric: "server_cpu_us_per_operation",
        ratio_max: 4.0,
    },
];

/// Geometry in pixels of the view box.
const WIDTH: f64 = 960.0;
const LABELS: f64 = 180.0;
const TOP: f64 = 92.0;
const PANEL: f64 = 350.0;
const PANEL_GAP: f64 = 30.0;
const BAR: f64 = 8.0;
const GROUP: f64 = 4.0 * BAR + 12.0;

/// Bars of one metric.
struct Panel {
    title: &'static str,
    /// Its name in a median of the file.
    metric: &'static str,
    /// Where the scale ends; every ratio is below it.
    ratio_max: f64,
}

/// Writes the chart.
pub fn run() -> Result<()> {
    let root = process::workspace_root();
    std::fs::write(root.join(CHART), render(&read_medians(&root)?)?)
        .with_context(|| format!("cannot write {CHART}"))?;
    println!("wrote {CHART}");
    Ok(())
}

/// The medians of the file, in its order.
fn read_medians(root: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(root.join(MEASURED)).with_context(|| format!("cannot read {MEASURED}"))?;
    let mut report: Value = serde_json::from_str(&text).with_context(|| format!("{MEASURED} is not JSON"))?;
    let rows = report["rows"].as_array_mut().with_context(|| format!("{MEASURED} has no rows"))?;
    Ok(rows.iter_mut().map(|row| row["median"].take()).collect())
}

fn figure(median: &Value, metric: &str) -> Result<f64> {
    median[metric].as_f64().with_context(|| format!("{MEASURED} has no {metric} in {median}"))
}

fn render(medians: &[Value]) -> Result<String> {
    let mut cases: Vec<&str> = medians.iter().filter_map(|median| median["case"].as_str()).collect();
    cases.dedup();
    if cases.is_empty() {
        bail!("{MEASURED} has no cases");
    }
    let height = TOP + cases.len() as f64 * GROUP + 40.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <title>NBD servers compared with nbdkit</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    legend(&mut svg)?;
    for (index, case) in cases.iter().enumerate() {
        let y = TOP + index as f64 * GROUP + 2.0 * BAR + 4.0;
        text(&mut svg, LABELS - 10.0, y, "end", case)?;
    }
    for (index, panel) in PANELS.iter().enumerate() {
        let left = LABELS + index as f64 * (PANEL + PANEL_GAP);
        scale(&mut svg, panel, left, height - 40.0)?;
        for (group, case) in cases.iter().enumerate() {
            bars(&mut svg, panel, left, TOP + group as f64 * GROUP, medians, case)?;
        }
    }
    let note = "Ratios to nbdkit's file plugin. A file of 1 GiB in memory, fio as the client, one virtual machine with 4 CPUs; docs/figures.md.";
    text(&mut svg, 16.0, height - 12.0, "start", note)?;
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn legend(svg: &mut String) -> Result<()> {
    for (index, (server, colour)) in SERVERS.iter().enumerate() {
        let left = LABELS + index as f64 * 130.0;
        writeln!(svg, "<rect x=\"{left}\" y=\"18\" width=\"14\" height=\"14\" fill=\"{colour}\"/>")?;
        text(svg, left + 20.0, 29.0, "start", server)?;
    }
    Ok(())
}

/// Title, lines at each step, and a heavier one at nbdkit's 1.
fn scale(svg: &mut String, panel: &Panel, left: f64, bottom: f64) -> Result<()> {
    text(svg, left, 58.0, "start", panel.title)?;
    let step = panel.ratio_max / 4.0;
    for tick in 0..=4_u8 {
        let ratio = f64::from(tick) * step;
        let x = left + ratio / panel.ratio_max * PANEL;
        let colour = if (ratio - 1.0).abs() < f64::EPSILON { "#1f2328" } else { "#d8dee4" };
        writeln!(svg, "<line x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"{colour}\"/>", TOP - 8.0)?;
        text(svg, x, TOP - 14.0, "middle", &ratio.to_string())?;
    }
    Ok(())
}

fn bars(svg: &mut String, panel: &Panel, left: f64, top: f64, medians: &[Value], case: &str) -> Result<()> {
    let of = |server: &str| medians.iter().find(|median| median["case"] == case && median["server"] == server);
    let reference = of(REFERENCE).with_context(|| format!("{MEASURED}: {case} has no row of {REFERENCE}"))?;
    let reference = figure(reference, panel.metric)?;
    for (index, (server, colour)) in SERVERS.iter().enumerate() {
        let Some(median) = of(server) else { continue };
        let ratio = figure(median, panel.metric)? / reference;
        if ratio > panel.ratio_max {
            bail!("{case}: {server} has {ratio:.2} of {REFERENCE}; give the panel a longer scale");
        }
        let (y, width) = (top + index as f64 * BAR, ratio / panel.ratio_max * PANEL);
        writeln!(
            svg,
            "<rect x=\"{left}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\">\
             <title>{case}, {server}: {ratio:.2}</title></rect>"
        )?;
    }
    Ok(())
}

/// Text of our own documents: names of cases and servers, without markup.
fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) -> Result<()> {
    writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"#1f2328\">{text}</text>")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_and_the_table_have_the_measured_figures() {
        let root = process::workspace_root();
        let medians = read_medians(&root).unwrap();
        let chart = std::fs::read_to_string(root.join(CHART)).unwrap();
        assert!(chart == render(&medians).unwrap(), "{CHART} is not that of {MEASURED}: run `cargo xtask chart`");
        let figures = std::fs::read_to_string(root.join("docs/figures.md")).unwrap();
        for median in medians {
            let (case, server) = (median["case"].as_str().unwrap(), median["server"].as_str().unwrap());
            let [iops, rate, p50] =
                ["iops", "megabytes_per_second", "latency_p50_us"].map(|metric| figure(&median, metric).unwrap());
            let numbers: [String; 3] = [iops, rate, p50].map(|number| format!("{number:.0}"));
            let begin = format!("| {case} | {server} | ");
            let row = figures.lines().find_map(|line| line.strip_prefix(&begin)).unwrap_or_default();
            let cells = row.split('|').filter_map(|cell| cell.split_whitespace().next());
            assert!(cells.take(3).eq(&numbers), "docs/figures.md: {begin}{row} is not {numbers:?}");
        }
    }

    fn median(server: &str, iops: f64, server_cpu: f64) -> Value {
        serde_json::json!({"case": "a", "server": server, "iops": iops, "server_cpu_us_per_operation": server_cpu})
    }

    #[test]
    fn a_bar_has_the_length_of_its_ratio() {
        let svg = render(&[median("byway", 300.0, 2.0), median("nbdkit", 200.0, 4.0)]).unwrap();
        let three_quarters =
            format!("width=\"{:.1}\" height=\"8\" fill=\"#0969da\"><title>a, byway: 1.50", 0.75 * PANEL);
        assert!(svg.contains(&three_quarters), "{svg}");
        assert!(svg.contains("a, byway: 0.50"), "{svg}");
    }

    #[test]
    fn medians_without_the_reference_or_a_figure_are_refused() {
        let refused = |medians: &[Value]| render(medians).unwrap_err().to_string();
        assert!(refused(&[median("byway", 300.0, 2.0)]).contains("no row of nbdkit"));
        let without = serde_json::json!({"case": "a", "server": "nbdkit", "iops": "many"});
        assert!(refused(&[without]).contains("no iops in"));
        assert!(refused(&[]).contains("no cases"));
    }
}
