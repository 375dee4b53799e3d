//! `byway doctor`: the features of this machine, why some are missing, and how to enable them.

mod checks;
mod rdma;
mod wires;

use std::fmt;

use serde::Serialize;

use crate::output;

/// How well something works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// All of it.
    Ok,
    /// Some of it, or less than byway can use.
    Limited,
    /// Not at all.
    Missing,
}

impl fmt::Display for CheckStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        })
    }
}

/// What was found of one thing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub name: &'static str,
    /// How well it works.
    pub health: CheckStatus,
    /// What was seen.
    pub reason: String,
    /// What to do, unless it is [`CheckStatus::Ok`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

impl Finding {
    fn ok(name: &'static str, reason: impl Into<String>) -> Self {
        Self { name, health: CheckStatus::Ok, reason: reason.into(), remedy: None }
    }

    fn limited(name: &'static str, reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { name, health: CheckStatus::Limited, reason: reason.into(), remedy: Some(remedy) }
    }

    fn missing(name: &'static str, reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { name, health: CheckStatus::Missing, reason: reason.into(), remedy: Some(remedy) }
    }
}

/// The flags of `byway doctor`.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct DoctorArguments {
    /// Print a JSON array of {name, health, reason, remedy}
    #[arg(long)]
    pub json: bool,
}

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    checks::ALL.iter().map(|check| check()).collect()
}

/// Looks at everything and prints it; for a reader, also what each wire can do, which is the same on all machines.
///
/// # Errors
/// When it cannot be printed.
pub fn run(arguments: DoctorArguments) -> Result<(), serde_json::Error> {
    let findings = examine();
    if arguments.json {
        output::line(serde_json::to_string_pretty(&findings)?);
        return Ok(());
    }
    for Finding { name, health, reason, remedy } in findings {
        output::line(format_args!("{name:<22}{health:<9}{reason}"));
        if let Some(remedy) = remedy {
            output::line(format_args!("{:<31}-> {remedy}", ""));
        }
    }
    output::line(format_args!("\n{}", wires::table()));
    Ok(())
}
