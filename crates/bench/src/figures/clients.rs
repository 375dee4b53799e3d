//! Goglin: clients against throughput, by `byway bench fabric`.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::session::{RunError, Session};

/// Clients against throughput.
pub(super) const CLIENTS: Experiment = Experiment {
    description: Description {
        name: "goglin-clients",
        title: "Goglin: clients against throughput",
        source: "Goglin, Adapting distributed storage to high-speed networks, section 3.3, figs. 9 and 10",
        what: "Clients write blocks of 64 KiB to a server with 125 receive frames (byway bench fabric): sent unasked, as by GM, where a \
               block without a frame is thrown away and sent again, and driven by the server, which gets a block when it has a frame.",
        rule: "Holds if (1) sent unasked, 184 clients have at most 0.85 of the throughput of 92 (the paper: 163 of 233 MB/s, 0.70), \
               and (2) driven by the server, 184 clients have at least 0.95 of that of 92, and (3) 1,024 clients at least 0.95 of \
               that of 16.",
        absent: &[
            "Machines: all clients are on this one, in up to 4 processes (byway bench fabric's own number), and over loopback a wasted block costs CPU, not link.",
        ],
    },
    run,
    judge,
    beside,
};

const RATES: &str = "throughput by clients";
const UNASKED: &str = "sent unasked";
const DRIVEN: &str = "driven by the server";
/// As `byway bench fabric` names them.
const MODES: [(&str, &str); 2] = [("naive", UNASKED), ("driven", DRIVEN)];

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let counts = session.scale.points(&["1,16,92,184,512,1024"], &["16,92,184,1024"]);
    let (mut gathered, mut layout) = (Gathered::default(), BTreeMap::new());
    // A point of it takes a second and a half at least.
    let rounds = if session.scale.quick { 1 } else { session.scale.rounds };
    for round in 1..=rounds {
        session.say(&format!("goglin-clients, round {round}"));
        let program = std::env::current_exe().map_err(RunError::Child)?;
        let mut command = Command::new(program);
        // Its processes end with it, and it with its last point.
        command
            .args(["bench", "fabric", "--json", "--seconds", "1"])
            .args(counts.iter().flat_map(|counts| ["--clients", counts]));
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().map_err(RunError::Child)?;
        let points = points(&output.stdout)
            .ok_or(RunError::Machine("byway bench fabric returned no points; its messages are above"))?;
        for point in points {
            if let Some((_, series)) = MODES.iter().find(|(name, _)| *name == point.mode) {
                gathered.add(series, point.clients as f64, point.megabytes_per_second);
                layout.insert((*series, point.clients), (point.processes, point.connections));
            }
        }
    }
    let plot = Plot {
        name: RATES,
        title: "Throughput by clients, writes of 64 KiB, 125 receive frames".to_owned(),
        x: Axis { label: "clients", unit: "", scale: Scale::Powers },
        y: Axis { label: "throughput", unit: "MB/s", scale: Scale::Linear },
        series: gathered.series(),
    };
    let setup = "byway bench fabric, TCP over loopback, 1 s a point, data checked on arrival in both modes.".to_owned();
    Ok(Measured { setup: vec![setup, said_layout(&layout)], plots: vec![plot] })
}

/// What is taken of a point of its JSON.
#[derive(Debug, PartialEq, Deserialize)]
struct Point {
    mode: String,
    clients: u64,
    processes: u64,
    connections: u64,
    megabytes_per_second: f64,
}

/// The points of its JSON, each the median of its rounds.
fn points(json: &[u8]) -> Option<Vec<Point>> {
    #[derive(Deserialize)]
    struct Medians {
        medians: Vec<Point>,
    }
    Some(serde_json::from_slice::<Medians>(json).ok()?.medians)
}

/// For the report, by series and clients: how many processes the clients were, and how many connections they had in all.
fn said_layout(layout: &BTreeMap<(&str, u64), (u64, u64)>) -> String {
    let said = MODES.map(|(_, series)| {
        let of = layout.iter().filter(|((name, _), _)| *name == series);
        let each = of.map(|((_, clients), (processes, connections))| format!("{clients}: {processes}, {connections}"));
        format!("{series}, {}", each.collect::<Vec<_>>().join("; "))
    });
    format!("Clients: their processes, and their connections in all: {}.", said.join(". "))
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let ratio = |series, over, under| Ok(data.at(RATES, series, over)? / data.at(RATES, series, under)?.max(1e-9));
    Ok(vec![
        Check::at_most("sent unasked: 184 clients over 92", ratio(UNASKED, 184.0, 92.0)?, 0.85),
        Check::at_least("driven by the server: 184 clients over 92", ratio(DRIVEN, 184.0, 92.0)?, 0.95),
        Check::at_least("driven by the server: 1,024 clients over 16", ratio(DRIVEN, 1024.0, 16.0)?, 0.95),
    ])
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let here = |clients| {
        let at = |series| said(data.at(RATES, series, clients), "MB/s");
        format!("{} unasked, {} driven", at(UNASKED), at(DRIVEN))
    };
    let place = "section 3.3, fig. 9, sent unasked, of a link of 250 MB/s";
    vec![
        Beside { what: "92 clients", place, paper: "233 MB/s", here: here(92.0) },
        Beside { what: "184 clients", place, paper: "163 MB/s", here: here(184.0) },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    #[test]
    fn the_rule_says_yes_and_no() {
        let verdict = |unasked: f64, driven: f64, many: f64| {
            let unasked = [(92.0, 233.0), (184.0, unasked)];
            let driven = [(16.0, 230.0), (92.0, 233.0), (184.0, driven), (1024.0, many)];
            let plots = [made::plot(RATES, &[(UNASKED, &unasked), (DRIVEN, &driven)])];
            Verdict::of(judge(&Data(&plots))).word()
        };
        assert_eq!(verdict(163.0, 232.0, 231.0), "holds");
        assert_eq!(verdict(230.0, 232.0, 231.0), "does not hold", "nothing is lost without a driver");
        assert_eq!(verdict(163.0, 200.0, 231.0), "does not hold");
        assert_eq!(verdict(163.0, 232.0, 200.0), "does not hold");
    }

    #[test]
    fn points_are_read_and_damage_is_noticed() {
        let json = br#"{"run":{},"medians":[{"mode":"naive","clients":92,"processes":4,"connections":92,"drops":0,
                       "megabytes_per_second":233.5}]}"#;
        let (mode, megabytes_per_second) = ("naive".to_owned(), 233.5);
        let point = Point { mode, clients: 92, processes: 4, connections: 92, megabytes_per_second };
        assert_eq!(points(json), Some(vec![point]));
        assert_eq!(points(br#"{"medians":[{"mode":"naive"}]}"#), None);
        assert_eq!(points(b""), None);
    }

    #[test]
    fn processes_and_connections_are_said_of_each_point() {
        let layout = [((UNASKED, 92), (4, 92)), ((DRIVEN, 1024), (4, 2048)), ((DRIVEN, 1), (1, 2))].into();
        let said = said_layout(&layout);
        assert!(said.contains("sent unasked, 92: 4, 92."), "{said}");
        assert!(said.ends_with("driven by the server, 1: 1, 2; 1024: 4, 2048."), "{said}");
    }
}
