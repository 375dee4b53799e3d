//! Goglin: clients against throughput, by `byway bench fabric`.

use std::process::{Command, Stdio};

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
               and (2) driven by the server, 184 clients have at least 0.95 of that of 92, and (3) 512 clients at least 0.95 of \
               that of 16.",
        absent: &[
            "Machines: all clients are on this one, in 4 processes, and over loopback a wasted block costs CPU, not link.",
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
    let counts = session.scale.points(&["1,16,92,184,512"], &["16,92,184,512"]);
    let mut gathered = Gathered::default();
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
            .ok_or(RunError::Machine("byway bench fabric gave no points; what it said stands above"))?;
        for (mode, clients, rate) in points {
            if let Some((_, series)) = MODES.iter().find(|(name, _)| *name == mode) {
                gathered.add(series, clients, rate);
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
    Ok(Measured { setup: vec![setup], plots: vec![plot] })
}

/// Mode, clients and rate of each point of its JSON.
fn points(json: &[u8]) -> Option<Vec<(String, f64, f64)>> {
    let report: serde_json::Value = serde_json::from_slice(json).ok()?;
    let point = |point: &serde_json::Value| {
        let mode = point["mode"].as_str()?.to_owned();
        Some((mode, point["clients"].as_f64()?, point["megabytes_per_second"].as_f64()?))
    };
    report["medians"].as_array()?.iter().map(point).collect()
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let ratio = |series, over, under| Ok(data.at(RATES, series, over)? / data.at(RATES, series, under)?.max(1e-9));
    Ok(vec![
        Check::at_most("sent unasked: 184 clients over 92", ratio(UNASKED, 184.0, 92.0)?, 0.85),
        Check::at_least("driven by the server: 184 clients over 92", ratio(DRIVEN, 184.0, 92.0)?, 0.95),
        Check::at_least("driven by the server: 512 clients over 16", ratio(DRIVEN, 512.0, 16.0)?, 0.95),
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
            let driven = [(16.0, 230.0), (92.0, 233.0), (184.0, driven), (512.0, many)];
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
        let json = br#"{"medians":[{"mode":"naive","clients":92,"megabytes_per_second":233.5}]}"#;
        assert_eq!(points(json), Some(vec![("naive".to_owned(), 92.0, 233.5)]));
        assert_eq!(points(br#"{"medians":[{"mode":"naive"}]}"#), None);
        assert_eq!(points(b""), None);
    }
}
