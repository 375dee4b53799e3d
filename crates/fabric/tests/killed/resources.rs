//! What this process holds of its peers' and its own, counted.

use byway_fabric::node::{Memory, Node, NodeCounters};

/// See the module. The program's operations are counted too.
#[derive(Debug, PartialEq, Eq)]
pub struct HeldResources {
    descriptors: usize,
    /// Mappings of memory that can be lent: our own, and what peers have lent us.
    pub lent_files: usize,
    /// Mappings of streams.
    streams: usize,
    counters: NodeCounters,
}

impl HeldResources {
    pub fn by(node: &Node) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let named = |name: &str| maps.lines().filter(|line| line.contains(name)).count();
        let lent_files = named("/memfd:byway-memory");
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            lent_files,
            streams: named("/memfd:byway-") - lent_files,
            // What was refused in all this time is not held.
            counters: NodeCounters { windows_refused: 0, ..node.counters().unwrap() },
        }
    }

    /// Sessions, windows, loans, operations.
    pub fn counters(&self) -> (usize, usize, usize, usize) {
        let NodeCounters { sessions, windows, loans, ops, .. } = self.counters;
        (sessions, windows, loans, ops)
    }
}

/// Which file a line of `/proc/PID/maps` is of, how it is mapped, and from where to where.
fn mapped(line: &str) -> Option<(&str, &str, std::ops::Range<usize>)> {
    let mut words = line.split_whitespace();
    let (range, access, inode) = (words.next()?, words.next()?, words.nth(2)?);
    let (start, end) = range.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((inode, access, address(start)?..address(end)?))
}

/// Whether another process has this memory mapped, for writing or for reading alone.
pub fn is_lent_to(process: u32, memory: &Memory, write: bool) -> bool {
    let maps = |process: &str| std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let (ours, theirs) = (maps("self"), maps(&process.to_string()));
    let start = memory.as_ptr() as usize;
    let ours = ours.lines().filter_map(mapped).find(|(_, _, range)| range.contains(&start));
    let (inode, ..) = ours.expect("it is mapped here");
    let wanted = if write { "rw-s" } else { "r--s" };
    theirs.lines().filter_map(mapped).any(|(other, access, _)| other == inode && access == wanted)
}
