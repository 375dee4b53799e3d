//! Which groups a calling program has.

use byway_frontend::fuse::request::Caller;

/// Further groups of the thread that calls: the kernel does not tell them. None if it has gone; root needs none.
pub(super) fn groups_of(caller: &Caller) -> Vec<u32> {
    if caller.uid == 0 || caller.pid == 0 {
        return Vec::new();
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", caller.pid)).unwrap_or_default();
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    groups.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_groups_are_found() {
        let me = Caller { uid: 1, gid: 1, pid: std::process::id() };
        let expected: Vec<_> = rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        assert_eq!(groups_of(&me), expected);
        assert!(groups_of(&Caller { uid: 0, ..me }).is_empty());
        assert!(groups_of(&Caller { pid: u32::MAX, ..me }).is_empty());
    }
}
