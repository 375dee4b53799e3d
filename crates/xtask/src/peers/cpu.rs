//! CPU time as the kernel counts it, in its clock ticks of 10 ms: of a server with all its
//! processes, of the client, and of the whole machine.

use anyhow::{Context, Result};
use std::collections::BTreeMap;

/// `USER_HZ`, which every Linux architecture that byway runs on fixes at 100 for user space.
const MICROSECONDS_PER_TICK: f64 = 10_000.0;

/// A reading of CPU time spent, user and system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuClock {
    ticks: u64,
}

/// What of `/proc/PID/stat` is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    own_ticks: u64,
    /// Of children that have ended and were waited for.
    children_ticks: u64,
}

impl CpuClock {
    /// Of a process, its living descendants, and those of both that have ended.
    pub fn processes(root: u32) -> Result<Self> {
        let stats = read_all()?;
        let mut family = vec![root];
        let mut next = 0;
        while next < family.len() {
            let parent = family[next];
            family.extend(stats.iter().filter(|(_, stat)| stat.parent == parent).map(|(id, _)| *id));
            next += 1;
        }
        let own = stats.get(&root).with_context(|| format!("process {root} has ended"))?;
        let ticks = family[1..].iter().filter_map(|id| stats.get(id)).chain([own]);
        Ok(Self { ticks: ticks.map(|stat| stat.own_ticks + stat.children_ticks).sum() })
    }

    /// Of the programs that this one ran and waited for.
    pub fn children() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/self/stat")?;
        let stat = parse_stat(&text).context("/proc/self/stat is not as expected")?;
        Ok(Self { ticks: stat.children_ticks })
    }

    /// Of everything on the machine, interrupts too.
    pub fn machine() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat")?;
        parse_machine(&text).context("/proc/stat is not as expected")
    }

    /// The time between two readings.
    pub fn microseconds_since(&self, before: &Self) -> f64 {
        self.ticks.saturating_sub(before.ticks) as f64 * MICROSECONDS_PER_TICK
    }
}

fn read_all() -> Result<BTreeMap<u32, Stat>> {
    let mut stats = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(id) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end between the listing and the reading.
        let Ok(text) = std::fs::read_to_string(format!("/proc/{id}/stat")) else {
            continue;
        };
        if let Some(stat) = parse_stat(&text) {
            stats.insert(id, stat);
        }
    }
    Ok(stats)
}

/// proc_pid_stat(5): the name is in parentheses and may contain anything, also parentheses.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // Field 3, the state, is the first here.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Stat {
        parent: u32::try_from(field(4)?).ok()?,
        own_ticks: field(14)? + field(15)?,
        children_ticks: field(16)? + field(17)?,
    })
}

/// proc_stat(5): user nice system idle iowait irq softirq ...
fn parse_machine(text: &str) -> Option<CpuClock> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6];
    let ticks = busy.iter().map(|index| fields.get(*index)).sum::<Option<u64>>()?;
    Some(CpuClock { ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_kernel_are_understood() {
        let text = "7 (a) b) S 1 7 7 0 -1 4194304 10 0 0 0 20 3 400 5 20 0 1 0 99";
        let expected = Stat { parent: 1, own_ticks: 23, children_ticks: 405 };
        assert_eq!(parse_stat(text), Some(expected));
        let text = "cpu  1 2 4 100 100 8 16 100 0 0\ncpu0 1 1 1 1\n";
        assert_eq!(parse_machine(text), Some(CpuClock { ticks: 31 }));
        assert_eq!(parse_stat("7 (a) S"), None);
    }

    #[test]
    fn a_process_and_the_machine_can_be_read() {
        CpuClock::processes(std::process::id()).unwrap();
        CpuClock::children().unwrap();
        assert!(CpuClock::machine().unwrap().ticks > 0);
        assert!(CpuClock::processes(u32::MAX).is_err());
    }
}
