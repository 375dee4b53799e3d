//! Writing a specification so that it reads back as the same one.

// Writing to a string does not fail: its results are dropped.
use std::fmt::Write;
use std::path::Path;

use byway_service::block::spec::{FaultEffect, FaultRule, Stage, StoreSpec, VolumeSpec};

use super::fault::{ERRORS, OPERATIONS};
use crate::units::{format_size, format_time};

/// Writes a specification that [`parse`](super::parse) reads back as `volume`, if its paths are UTF-8.
pub fn format(volume: &VolumeSpec) -> String {
    let mut text = format!("{}={}", volume.name, store(&volume.store));
    for (said, word) in
        [(volume.read_only, ",ro"), (volume.direct, ",direct"), (volume.shared, ",shared"), (volume.raw, ",format=raw")]
    {
        if said {
            text += word;
        }
    }
    match volume.stage {
        Some(Stage::Device) => text += ",stage=device",
        Some(Stage::Memory) => text += ",stage=memory",
        None => {}
    }
    if volume.tls_required {
        text += ",tls=required";
    }
    if let Some(rate) = volume.rate_bytes_per_second {
        let _ = write!(text, ",rate={}/s", format_size(rate));
    }
    if !volume.access.is_open() {
        let _ = write!(text, ",access={}", quote(&volume.access.to_string()));
    }
    if let Some(description) = &volume.description {
        let _ = write!(text, ",description={}", quote(description));
    }
    text
}

fn store(spec: &StoreSpec) -> String {
    match spec {
        StoreSpec::Path(path) => quote_path(path),
        StoreSpec::Memory { bytes } => format!("mem:{}", format_size(*bytes)),
        StoreSpec::Null { bytes } => format!("null:{}", format_size(*bytes)),
        StoreSpec::Stripe { chunk_bytes, paths } => {
            let paths: Vec<_> = paths.iter().map(|path| quote_path(path)).collect();
            format!("stripe:chunk={}:{}", format_size(*chunk_bytes), paths.join(":"))
        }
        StoreSpec::Fault { inner, rules } => {
            let rules: Vec<_> = rules.0.iter().map(rule).collect();
            format!("fault:{}:{}", rules.join(":"), store(inner))
        }
    }
}

fn rule(rule: &FaultRule) -> String {
    let operation = OPERATIONS.iter().find(|(_, known)| *known == rule.operation).map_or("any", |(name, _)| name);
    let effect = match rule.effect {
        FaultEffect::Delay(time) => format_time(time),
        FaultEffect::Short => "short".to_owned(),
        FaultEffect::Error(errno) => {
            // A rule made from text has one of these; one made by a program may have another, shown as the plainest.
            ERRORS.iter().find(|(_, known)| *known == errno).map_or("eio", |(name, _)| name).to_owned()
        }
    };
    let mut text = format!("{operation}={effect}");
    if let Some(range) = rule.range {
        let _ = write!(text, "@{}+{}", format_size(range.offset), format_size(range.len));
    }
    if let Some(count) = rule.count_max {
        let _ = write!(text, "#{count}");
    }
    text
}

fn quote_path(path: &Path) -> String {
    quote(&path.to_string_lossy())
}

/// Between quotes if it holds a mark; a reader may see a mark in more places than the parser does, so all count.
fn quote(text: &str) -> String {
    if !text.contains([',', ':', '=', '"', '\\', '@', '#', '+', '\'', ' ']) {
        return text.to_owned();
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
