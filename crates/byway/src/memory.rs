//! How much memory this process may have: the machine's, or less by its cgroup. The default limit on mapped files comes
//! from it.

use std::path::Path;

use crate::limits::MAPPED_BYTES_MIN;

const CGROUPS: &str = "/sys/fs/cgroup";

/// The memory that this process may have, in bytes; `None` if the system does not say, or the process is confined.
pub fn memory_bytes() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| total_bytes(&text));
    let cgroup = read(Path::new("/proc/self/cgroup")).and_then(|text| cgroup_bytes(&text, &read));
    machine.into_iter().chain(cgroup).min()
}

/// The default limit on the bytes of mapped files: half of the memory that [`memory_bytes`] gave, the other half being for
/// whoever else needs some.
pub fn default_mapped_bytes(memory: u64) -> u64 {
    (memory / 2).max(MAPPED_BYTES_MIN)
}

/// `MemTotal` of `/proc/meminfo`.
fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The least `memory.max` of the process's cgroup and of those above it; of version 2 only (the line `0::/PATH` of
/// `/proc/self/cgroup`). In a container the path may be one that is not to be seen here: then the root's counts.
fn cgroup_bytes(cgroup: &str, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = Path::new(CGROUPS).join(path);
    let folders = own.ancestors().take_while(|folder| folder.starts_with(CGROUPS));
    folders.filter_map(|folder| read(&folder.join("memory.max"))?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_how_much_it_has() {
        assert_eq!(total_bytes("MemTotal:       24684092 kB\nMemFree:        1 kB\n"), Some(24_684_092 << 10));
        assert_eq!(total_bytes("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn the_tightest_cgroup_above_counts() {
        let files = [("a/b/memory.max", "max\n"), ("a/memory.max", "1073741824\n"), ("memory.max", "4294967296\n")];
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(CGROUPS).join(name) == path)?;
            Some(file.1.to_owned())
        };
        assert_eq!(cgroup_bytes("0::/a/b\n", &read), Some(1 << 30));
        assert_eq!(cgroup_bytes("0::/elsewhere/c\n", &read), Some(4 << 30));
        assert_eq!(cgroup_bytes("4:memory:/a\n0::/\n", &read), Some(4 << 30));
        assert_eq!(cgroup_bytes("4:memory:/a\n", &read), None, "version 1 is not asked");
        assert_eq!(cgroup_bytes("0::/a/b\n", &|_| None), None);
    }

    #[test]
    fn this_machine_has_a_default() {
        assert!(memory_bytes().map(default_mapped_bytes).is_some_and(|bytes| bytes >= MAPPED_BYTES_MIN));
    }
}
