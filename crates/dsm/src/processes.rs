//! The processes of this machine, and the environments with which they were started.

use std::path::Path;

/// The numbers of all processes; none if /proc cannot be read.
pub(crate) fn numbers() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The environment of a process; `None` if it has ended, or is another user's. Words `NAME=VALUE`, each with a zero byte behind it.
pub(crate) fn environment(process: i32) -> Option<Vec<u8>> {
    std::fs::read(Path::new("/proc").join(process.to_string()).join("environ")).ok()
}
