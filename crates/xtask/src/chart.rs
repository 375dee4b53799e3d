//! `cargo xtask chart`: draws the chart of README.md from the table of `cargo xtask peers block` in docs/figures.md.
//!
//! The document is the only source, so chart and table cannot differ: a test fails when the committed chart is not the one that the
//! table gives.

use crate::process;
use anyhow::{Context, Result, bail};
use std::fmt::Write as _;
use std::path::Path;

const TABLE: &str = "docs/figures.md";
const CHART: &str = "docs/peers-block.svg";
/// The table's header, which tells it from the other tables of the document.
const HEADER: &str = "| case | server | IOPS |";
/// Columns of a row, counted from 0.
const IOPS: usize = 2;
const SERVER_CPU: usize = 6;
/// The server that the others are divided by.
const REFERENCE: &str = "nbdkit";
/// Servers and their colours. The table's stubs are no servers that anybody runs, so the chart leaves them out.
const SERVERS: [(&str, &str); 4] =
    [("byway", "#0969da"), (REFERENCE, "#57606a"), ("nbd-server", "#9aa4af"), ("qemu-nbd", "#cfd6dd")];
const PANELS: [Panel; 2] = [
    Panel { title: "Requests per second (more is better)", column: IOPS, ratio_max: 2.0 },
    Panel { title: "Server CPU time per request (less is better)", column: SERVER_CPU, ratio_max: 4.0 },
];

/// Geometry in pixels of the view box.
const WIDTH: f64 = 960.0;
const LABELS: f64 = 180.0;
const TOP: f64 = 92.0;
const PANEL: f64 = 350.0;
const PANEL_GAP: f64 = 30.0;
const BAR: f64 = 8.0;
const GROUP: f64 = 4.0 * BAR + 12.0;

/// Bars of one column of the table.
struct Panel {
    title: &'static str,
    column: usize,
    /// Where the scale ends; every ratio of the table is below it.
    ratio_max: f64,
}

/// A row of the table: the case, the server, and all cells.
struct Row<'a> {
    case: &'a str,
    server: &'a str,
    cells: Vec<&'a str>,
}

/// Writes the chart.
pub fn run() -> Result<()> {
    let root = process::workspace_root();
    std::fs::write(root.join(CHART), render(&read_table(&root)?)?).with_context(|| format!("cannot write {CHART}"))?;
    println!("wrote {CHART}");
    Ok(())
}

fn read_table(root: &Path) -> Result<String> {
    std::fs::read_to_string(root.join(TABLE)).with_context(|| format!("cannot read {TABLE}"))
}

fn rows(document: &str) -> Vec<Row<'_>> {
    let table = document.lines().skip_while(|line| !line.starts_with(HEADER)).skip(2);
    let cells = table.take_while(|line| line.starts_with('|')).map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        cells
    });
    cells
        .filter(|cells| cells.len() > SERVER_CPU)
        .map(|cells| Row { case: cells[0], server: cells[1], cells })
        .collect()
}

/// The figure of a cell, without the ratio behind it.
fn figure(row: &Row<'_>, column: usize) -> Result<f64> {
    let cell = row.cells[column];
    let number = cell.split_whitespace().next().unwrap_or_default();
    number.parse().with_context(|| format!("{TABLE}: `{cell}` of {} by {} is no figure", row.case, row.server))
}

/// The chart of a document with the table.
fn render(document: &str) -> Result<String> {
    let rows = rows(document);
    let mut cases: Vec<&str> = rows.iter().map(|row| row.case).collect();
    cases.dedup();
    if cases.is_empty() {
        bail!("{TABLE} has no table that begins with `{HEADER}`");
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
            bars(&mut svg, panel, (left, TOP + group as f64 * GROUP), &rows, case)?;
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

fn bars(svg: &mut String, panel: &Panel, (left, top): (f64, f64), rows: &[Row<'_>], case: &str) -> Result<()> {
    let of = |server: &str| rows.iter().find(|row| row.case == case && row.server == server);
    let reference = of(REFERENCE).with_context(|| format!("{TABLE}: {case} has no row of {REFERENCE}"))?;
    let reference = figure(reference, panel.column)?;
    for (index, (server, colour)) in SERVERS.iter().enumerate() {
        let Some(row) = of(server) else { continue };
        let ratio = figure(row, panel.column)? / reference;
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
    fn the_chart_is_that_of_the_table() {
        let root = process::workspace_root();
        let chart = std::fs::read_to_string(root.join(CHART)).unwrap();
        let drawn = render(&read_table(&root).unwrap()).unwrap();
        assert!(chart == drawn, "{CHART} is not that of {TABLE}: run `cargo xtask chart`");
    }

    fn table(rows: &str) -> String {
        format!("text\n\n{HEADER} MB/s | p50 | p99 | server CPU |\n|---|---|---|---|---|---|---|\n{rows}\nmore\n")
    }

    #[test]
    fn a_bar_has_the_length_of_its_ratio() {
        let svg = render(&table(
            "| a | byway | 300 (1.50) | 1 | 1 | 1 | 2.0 (0.50) |\n| a | nbdkit | 200 | 1 | 1 | 1 | 4.0 |",
        ))
        .unwrap();
        let three_quarters =
            format!("width=\"{:.1}\" height=\"8\" fill=\"#0969da\"><title>a, byway: 1.50", 0.75 * PANEL);
        assert!(svg.contains(&three_quarters), "{svg}");
        assert!(svg.contains("a, byway: 0.50"), "{svg}");
    }

    #[test]
    fn a_table_without_the_reference_or_with_words_is_refused() {
        let refused = |rows| render(&table(rows)).unwrap_err().to_string();
        assert!(refused("| a | byway | 300 | 1 | 1 | 1 | 2.0 |").contains("no row of nbdkit"));
        assert!(refused("| a | nbdkit | many | 1 | 1 | 1 | 2.0 |").contains("`many` of a by nbdkit"));
        assert!(render("nothing").unwrap_err().to_string().contains("no table"));
    }
}
