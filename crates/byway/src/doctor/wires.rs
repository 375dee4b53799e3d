//! The capabilities of each transport, independent of this machine.

use std::fmt::Write as _;

use byway_fabric::{Capabilities, WireKind};

/// The name of a column, and what is said of a wire there.
type Column = (&'static str, fn(&Capabilities) -> String);

const COLUMNS: [Column; 6] = [
    ("puts and gets", |wire| wire.one_sided.name().to_owned()),
    ("windows enforced", |wire| if wire.window_enforced { "yes" } else { "not where lent" }.to_owned()),
    ("zero-copy send", |wire| yes(wire.zero_copy_send)),
    ("segments", |wire| if wire.segments_max == usize::MAX { "any".to_owned() } else { wire.segments_max.to_string() }),
    ("registers memory", |wire| yes(wire.registers)),
    ("device memory", |wire| yes(wire.device_memory)),
];

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// A line for each wire under a line of names.
pub(super) fn table() -> String {
    let mut rows = WireKind::ALL.map(|wire| (wire.name().to_owned(), Capabilities::of(wire, false))).to_vec();
    rows.push(("tcp, TLS".to_owned(), Capabilities::of(WireKind::Tcp, true)));
    let mut lines = format!("{:<10}", "wire");
    for (name, _) in COLUMNS {
        let _ = write!(lines, "{name:<18}");
    }
    for (name, wire) in rows {
        let _ = write!(lines, "\n{name:<10}");
        for (_, says) in COLUMNS {
            let _ = write!(lines, "{:<18}", says(&wire));
        }
    }
    lines.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_wire_has_a_line_with_what_it_can_do() {
        let table = super::table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 6, "{table}");
        assert!(lines[0].starts_with("wire ") && lines[0].ends_with("device memory"), "{table}");
        let words = |wire: &str| {
            let line = lines.iter().find(|line| line.starts_with(wire)).expect("a line");
            line.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect::<Vec<_>>()
        };
        assert_eq!(words("shm"), ["shm", "where lent", "not where lent", "no", "any", "no", "no"]);
        assert_eq!(words("rdma"), ["rdma", "native", "yes", "yes", "16", "yes", "no"]);
    }
}
