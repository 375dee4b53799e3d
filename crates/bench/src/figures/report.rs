//! The report: one HTML file without external resources that contains the data, and the data again as a file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::experiment::{Axis, Beside, Check, Description, Measured, Plot, Scale, Verdict, short};
use super::machine::Machine;
use super::plot::{escape, svg};

/// What a run has found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of byway.
    pub(super) version: &'static str,
    /// A short run, whose verdicts say little.
    pub(super) quick: bool,
    /// Rounds of each point, interleaved.
    pub(super) rounds: usize,
    pub(super) seconds: f64,
    pub(super) machine: Machine,
    pub(super) experiments: Vec<Finding>,
}

/// One experiment's.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) description: Description,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
    /// The paper's figures, each with this run's.
    pub(super) beside: Vec<Beside>,
    #[serde(flatten)]
    pub(super) measured: Measured,
}

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--line:#d5dae0;--page:#fff;--card:#f6f8fa;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#8a6d00;--c5:#56b4e9;--c6:#e69f00;--c7:#444}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4af;--line:#39414a;--page:#14171a;--card:#1d2226;
--c0:#5ab0e6;--c1:#ff8b3d;--c2:#3fcf9f;--c3:#e6a3c8;--c4:#d8bd4a;--c5:#8fd0f5;--c6:#f2b84b;--c7:#c5c9cd}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:2rem auto;padding:0 1rem}
h1,h2,h3{line-height:1.25}h2{margin-top:3rem;border-top:1px solid var(--line);padding-top:1.5rem}
p.source,figcaption,.soft{color:var(--soft)}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}
th,td{border:1px solid var(--line);padding:.25rem .6rem;text-align:left;vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}
figure{margin:1.5rem 0;background:var(--card);padding:1rem;border-radius:6px}figcaption{margin-bottom:.5rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}svg text{fill:var(--ink)}
.axis{stroke:var(--soft)}.grid{stroke:var(--line)}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--c5)}.s6{--c:var(--c6)}.s7{--c:var(--c7)}
g polyline,g .spread{stroke:var(--c);stroke-width:1.8}g .spread{opacity:.45}g circle,g rect,g path{fill:var(--c)}
.legend{margin:.3rem 0 0}.legend span{display:inline-block;margin-right:1rem}.legend .sign{width:24px;height:12px;margin-right:.4em}
.verdict{border-left:6px solid var(--soft);padding:.4rem .9rem;background:var(--card)}
.verdict.holds{border-color:var(--c2)}.verdict.does{border-color:var(--c1)}
";

/// Writes `report.html` and `data.json`; gives their paths.
pub(super) fn write(report: &Report, folder: &Path) -> std::io::Result<[PathBuf; 2]> {
    std::fs::create_dir_all(folder)?;
    let json = serde_json::to_string_pretty(report).map_err(std::io::Error::other)?;
    let paths = ["report.html", "data.json"].map(|name| folder.join(name));
    std::fs::write(&paths[0], html(report, &json))?;
    std::fs::write(&paths[1], json)?;
    Ok(paths)
}

fn html(report: &Report, json: &str) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<meta name=\"viewport\" content=\"width=device-width\"><title>byway: figures of the papers</title>\
         <style>{STYLE}</style></head><body><h1>The papers' figures on this machine</h1>"
    );
    summary(&mut out, report);
    for finding in &report.experiments {
        section(&mut out, finding);
    }
    // Nothing in the data may end the element that they lie in.
    let data = json.replace('<', "\\u003c");
    let _ = writeln!(out, "<script type=\"application/json\" id=\"data\">{data}</script></body></html>");
    out
}

fn summary(out: &mut String, report: &Report) {
    let Machine { processor, cpus, kernel, memory_bytes, congestion_control, files } = &report.machine;
    let _ = write!(
        out,
        "<p>byway {}, {} rounds of each point, interleaved, medians; {:.0} s in all. {} with {cpus} CPUs, {} of memory, \
         Linux {}; TCP over loopback with {}; files on {}.</p>",
        report.version,
        report.rounds,
        report.seconds,
        escape(processor),
        byway_remote::units::show_size(*memory_bytes),
        escape(kernel),
        escape(congestion_control),
        escape(files),
    );
    if report.quick {
        out.push_str("<p><strong>A quick run: the points are few and short, and the verdicts say little.</strong></p>");
    }
    out.push_str("<table><tr><th>experiment</th><th>the paper's shape</th><th>because</th></tr>");
    for finding in &report.experiments {
        let Description { name, title, .. } = finding.description;
        let (word, why) = (finding.verdict.word(), escape(&finding.verdict.why()));
        let title = escape(title);
        let _ = write!(out, "<tr><td><a href=\"#{name}\">{title}</a></td><td>{word}</td><td>{why}</td></tr>");
    }
    out.push_str("</table>");
}

fn section(out: &mut String, finding: &Finding) {
    let Description { name, title, source, what, rule, absent } = finding.description;
    let [title, source, what, rule] = [title, source, what, rule].map(escape);
    let _ = write!(out, "<section id=\"{name}\"><h2>{title}</h2><p class=\"source\">{source}</p><p>{what}</p>");
    let class = finding.verdict.word().split(' ').next().unwrap_or_default();
    let (word, why) = (finding.verdict.word(), escape(&finding.verdict.why()));
    let _ = write!(out, "<div class=\"verdict {class}\"><p><strong>The shape {word}</strong>: {why}.</p>");
    let _ = write!(out, "<p class=\"soft\">The rule: {rule}</p>");
    if let Verdict::Holds { checks } | Verdict::DoesNotHold { checks } = &finding.verdict {
        let row = |Check { asked, found, holds }: &Check| {
            let holds = if *holds { "yes" } else { "no" };
            format!("<tr><td>{}</td><td>{}</td><td>{holds}</td></tr>", escape(asked), escape(found))
        };
        let rows: String = checks.iter().map(row).collect();
        let _ = write!(out, "<table><tr><th>asked</th><th>found</th><th>holds</th></tr>{rows}</table>");
    }
    out.push_str("</div>");
    beside(out, &finding.beside);
    for plot in &finding.measured.plots {
        let (title, drawn, table) = (escape(&plot.title), svg(plot), table(plot));
        let _ = write!(
            out,
            "<figure><figcaption>{title}</figcaption>{drawn}<details><summary>the medians</summary>{table}</details></figure>"
        );
    }
    list(out, "How it was measured", finding.measured.setup.iter().map(String::as_str));
    list(out, "What the paper has and this has not", absent.iter().copied());
    out.push_str("</section>");
}

fn beside(out: &mut String, rows: &[Beside]) {
    if rows.is_empty() {
        return;
    }
    out.push_str("<table><tr><th></th><th>the paper</th><th>here</th><th>where the paper says it</th></tr>");
    for Beside { what, place, paper, here } in rows {
        let [what, paper, here, place] = [what, paper, here.as_str(), place].map(escape);
        let _ = write!(out, "<tr><td>{what}</td><td>{paper}</td><td>{here}</td><td>{place}</td></tr>");
    }
    out.push_str("</table>");
}

fn list<'a>(out: &mut String, title: &str, lines: impl Iterator<Item = &'a str>) {
    let lines: Vec<String> = lines.map(escape).collect();
    if !lines.is_empty() {
        let _ = write!(out, "<h3>{title}</h3><ul><li>{}</li></ul>", lines.join("</li><li>"));
    }
}

/// The medians of a plot, a line for each place.
fn table(plot: &Plot) -> String {
    let mut places: Vec<f64> =
        plot.series.iter().flat_map(|series| series.points.iter().map(|point| point.x)).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut out = format!("<table><tr><th>{}</th>", escape(plot.x.label));
    for series in &plot.series {
        let _ = write!(out, "<th>{}</th>", escape(&series.name));
    }
    out.push_str("</tr>");
    for x in places {
        let _ = write!(out, "<tr><td>{}</td>", escape(&place(&plot.x, x)));
        for series in &plot.series {
            let found = series.points.iter().find(|point| point.is_at(x));
            let text = found.map_or_else(String::new, |point| short(point.median));
            let _ = write!(out, "<td class=\"n\">{text}</td>");
        }
        out.push_str("</tr>");
    }
    out + "</table>"
}

fn place(axis: &Axis, x: f64) -> String {
    match &axis.scale {
        Scale::Bytes => byway_remote::units::format_size(x as u64),
        Scale::Names(names) | Scale::Parts(names) => {
            names.get(x as usize).map_or_else(String::new, |name| (*name).to_owned())
        }
        Scale::Linear | Scale::Powers | Scale::Decades => short(x),
    }
}

#[cfg(test)]
mod tests {
    use super::super::experiment::made;
    use super::*;

    fn report(verdict: Verdict) -> Report {
        let description =
            Description { name: "one", title: "A < B", source: "s", what: "w", rule: "r", absent: &["nothing"] };
        let measured =
            Measured { setup: vec!["</script>".to_owned()], plots: vec![made::plot("p", &[("a", &[(1.0, 5.0)])])] };
        let beside = vec![Beside { what: "rate", place: "fig. 1", paper: "5", here: "6".to_owned() }];
        let experiments = vec![Finding { description, verdict, beside, measured }];
        Report { version: "0", quick: true, rounds: 3, seconds: 1.0, machine: Machine::default(), experiments }
    }

    #[test]
    fn a_report_is_one_file_whose_data_can_be_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let checks = vec![Check::at_least("is it", 1.0, 2.0)];
        let [page, data] = write(&report(Verdict::of(Ok(checks))), &folder.path().join("new")).unwrap();
        let (page, data) = (std::fs::read_to_string(page).unwrap(), std::fs::read_to_string(data).unwrap());
        let read: serde_json::Value = serde_json::from_str(&data).unwrap();
        assert_eq!(read["experiments"][0]["verdict"], "does_not_hold");
        assert_eq!(read["experiments"][0]["plots"][0]["series"][0]["points"][0]["median"], 5.0);
        assert!(page.contains("A &lt; B") && page.contains("does not hold") && page.contains("is it: 1.000"), "{page}");
        assert_eq!(page.matches("</script>").count(), 1, "the data cannot end their element");
        assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("src="), "{page}");
        let inside = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
        assert_eq!(serde_json::from_str::<serde_json::Value>(inside).unwrap(), read);
    }

    #[test]
    fn what_could_not_be_run_says_why() {
        let mut without = report(Verdict::CouldNotBeRun { why: "no disk".to_owned() });
        without.experiments[0].measured = Measured::default();
        let page = html(&without, "{}");
        assert!(page.contains("could not be run") && page.contains("no disk"), "{page}");
    }
}
