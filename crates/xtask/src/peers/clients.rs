//! `peers clients`: few and many clients of a server with few frames: `byway bench fabric`, driven by the server, beside a
//! program in C that does the same with epoll and sockets.

use super::report::median;
use crate::process;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const BY_HAND: &str = include_str!("clients.c");
/// As `byway bench fabric` has them by itself.
const PROCESSES: &str = "4";
const FRAMES: &str = "125";
const AHEAD: &str = "32";
const BLOCK_BYTES: f64 = 65_536.0;

/// What one run gave.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Figures {
    megabytes_per_second: f64,
    server_cpu_us_per_mib: f64,
    client_cpu_us_per_mib: f64,
    fairness: f64,
}

/// Medians of one program with so many clients.
#[derive(Debug, Serialize)]
pub struct Row {
    who: &'static str,
    clients: u16,
    figures: Figures,
}

type Run<'a> = Box<dyn Fn(u16) -> Result<Figures> + 'a>;

/// Runs all programs with all numbers of clients, in turns.
pub fn run(byway: &Path, folder: &Path, clients: &[u16], rounds: usize, seconds: u32) -> Result<Vec<Row>> {
    let by_hand = build(folder)?;
    let programs: [(&'static str, Run<'_>); 3] = [
        ("C, epoll", Box::new(|clients| by_c(&by_hand, clients, seconds))),
        ("byway, io_uring", Box::new(|clients| by_byway(byway, "uring", clients, seconds))),
        ("byway, epoll", Box::new(|clients| by_byway(byway, "epoll", clients, seconds))),
    ];
    let mut all: Vec<Vec<Figures>> = vec![Vec::new(); programs.len() * clients.len()];
    for round in 1..=rounds {
        for (at, &count) in clients.iter().enumerate() {
            for (which, (who, run)) in programs.iter().enumerate() {
                let one = run(count).with_context(|| format!("{who}, {count} clients"))?;
                eprintln!("round {round}: {who:<16} {count:>5} clients {:>7.0} MB/s", one.megabytes_per_second);
                all[which * clients.len() + at].push(one);
            }
        }
    }
    let row = |(at, figures): (usize, Vec<Figures>)| {
        let (who, clients) = (programs[at / clients.len()].0, clients[at % clients.len()]);
        Row { who, clients, figures: middle(&figures) }
    };
    Ok(all.into_iter().enumerate().map(row).collect())
}

fn build(folder: &Path) -> Result<PathBuf> {
    let (source, program) = (folder.join("clients.c"), folder.join("clients"));
    std::fs::write(&source, BY_HAND)?;
    process::output(Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&source)).context("a C compiler")?;
    Ok(program)
}

fn by_c(program: &Path, clients: u16, seconds: u32) -> Result<Figures> {
    let milliseconds = (seconds * 1000).to_string();
    let said = process::output(Command::new(program).arg(clients.to_string()).args([
        PROCESSES,
        FRAMES,
        AHEAD,
        &milliseconds,
    ]))?;
    let numbers: Vec<f64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [blocks, seconds, server_us, clients_us, fairness] = numbers[..] else { bail!("{said}") };
    let bytes = blocks * BLOCK_BYTES;
    let mib = (bytes / 1_048_576.0).max(1.0);
    Ok(Figures {
        megabytes_per_second: bytes / seconds / 1e6,
        server_cpu_us_per_mib: server_us / mib,
        client_cpu_us_per_mib: clients_us / mib,
        fairness,
    })
}

fn by_byway(byway: &Path, io: &str, clients: u16, seconds: u32) -> Result<Figures> {
    let said = process::output(
        Command::new(byway)
            .args(["bench", "fabric", "--json", "--mode", "driven", "--io", io])
            .args(["--clients", &clients.to_string(), "--seconds", &seconds.to_string()])
            .args(["--processes", PROCESSES, "--frames", FRAMES, "--ahead", AHEAD]),
    )?;
    let result: Value = serde_json::from_str(&said)?;
    let point = &result["medians"][0];
    let number = |name: &str| point[name].as_f64().with_context(|| format!("{name} is missing in byway's JSON"));
    if number("drops")? > 0.0 {
        bail!("blocks were dropped: {point}");
    }
    Ok(Figures {
        megabytes_per_second: number("megabytes_per_second")?,
        server_cpu_us_per_mib: number("server_cpu_us_per_mib")?,
        client_cpu_us_per_mib: number("client_cpu_us_per_mib")?,
        fairness: number("fairness")?,
    })
}

fn middle(figures: &[Figures]) -> Figures {
    let of = |field: fn(&Figures) -> f64| median(figures.iter().map(field).collect());
    Figures {
        megabytes_per_second: of(|one| one.megabytes_per_second),
        server_cpu_us_per_mib: of(|one| one.server_cpu_us_per_mib),
        client_cpu_us_per_mib: of(|one| one.client_cpu_us_per_mib),
        fairness: of(|one| one.fairness),
    }
}

/// Rows as a table for a document; rates also as a share of the same program's with the first number of clients.
pub fn markdown(rows: &[Row]) -> String {
    let mut text = "| who | clients | MB/s | of its first | Jain | server CPU us/MiB | clients' CPU us/MiB |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    for row in rows {
        let first = rows.iter().find(|other| other.who == row.who).unwrap_or(row);
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} | {:.2} | {:.3} | {:.0} | {:.0} |",
            row.who,
            row.clients,
            row.figures.megabytes_per_second,
            row.figures.megabytes_per_second / first.figures.megabytes_per_second,
            row.figures.fairness,
            row.figures.server_cpu_us_per_mib,
            row.figures.client_cpu_us_per_mib,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_shares_of_the_same_program_s_first() {
        let row = |who, clients, megabytes_per_second| Row {
            who,
            clients,
            figures: Figures {
                megabytes_per_second,
                server_cpu_us_per_mib: 1.0,
                client_cpu_us_per_mib: 2.0,
                fairness: 1.0,
            },
        };
        let text = markdown(&[row("a", 16, 10.0), row("a", 1024, 9.0), row("b", 16, 4.0), row("b", 1024, 1.0)]);
        assert!(text.contains("| a | 1024 | 9 | 0.90 |") && text.contains("| b | 1024 | 1 | 0.25 |"), "{text}");
    }

    #[test]
    fn the_program_in_c_moves_blocks_and_finds_none_damaged() {
        if process::find_program("cc").is_none() {
            return byway_skip::skip_this(byway_skip::SkipReason::MissingTool("cc"));
        }
        let folder = tempfile::tempdir().unwrap();
        let program = build(folder.path()).unwrap();
        let words = ["7", "2", "3", "2", "100"];
        let said = process::output(Command::new(program).args(words)).unwrap();
        let numbers: Vec<f64> = said.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert!(numbers[0] > 0.0 && (0.5..=1.0).contains(&numbers[4]), "{said}");
    }
}
