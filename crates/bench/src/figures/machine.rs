//! The machine on which a report was made.

use std::path::Path;

use serde::Serialize;

/// What figures of this machine depend on.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Machine {
    pub(super) processor: String,
    pub(super) cpus: usize,
    pub(super) kernel: String,
    pub(super) memory_bytes: u64,
    pub(super) congestion_control: String,
    /// The file system of the files that are read and written.
    pub(super) files: String,
}

impl Machine {
    /// This one; what cannot be found out is said to be unknown.
    pub(super) fn here(files: &Path) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
        };
        let unknown = || "unknown".to_owned();
        let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib = memory.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        Self {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            memory_bytes: kib << 10,
            congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control").trim().to_owned(),
            files: file_system(files, &read("/proc/self/mounts")).unwrap_or_else(unknown),
        }
    }
}

/// The type of the file system that a path lies in, by the table of mounts: of the longest mount point above it.
fn file_system(path: &Path, mounts: &str) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (_, at, kind) = (words.next()?, words.next()?, words.next()?);
        path.starts_with(at).then_some((at.len(), kind))
    });
    mounts.max_by_key(|(len, _)| *len).map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_that_of_the_longest_mount_point() {
        let mounts = "/dev/a / ext4 rw 0 0\nproc /proc proc rw 0 0\ntmpfs /p tmpfs rw 0 0\n";
        assert_eq!(file_system(Path::new("/proc/self"), mounts).as_deref(), Some("proc"));
        assert_eq!(file_system(Path::new("/"), mounts).as_deref(), Some("ext4"));
        assert_eq!(file_system(Path::new("/does/not/exist"), mounts), None);
    }

    #[test]
    fn this_machine_says_something() {
        let here = Machine::here(Path::new("/"));
        assert!(here.cpus > 0 && here.memory_bytes > 0 && !here.kernel.is_empty() && here.files != "unknown");
    }
}
