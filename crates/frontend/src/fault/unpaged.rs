//! Programs of a job that are not paged, because the library was not loaded into them: a paged program may execute a static program, one
//! with set-user-ID, or any with another `LD_PRELOAD`. The log names each such program once.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::getpid;

use super::children::children_of;

/// How often the processes of a job are looked through.
const LOOK: Duration = Duration::from_secs(1);

/// Processes that one look reads at most: faults wait for its end.
const PROCESSES_MAX: usize = 64;

/// Programs that the log names at most.
const NAMED_MAX: usize = 16;

/// A part of the library's name.
const LIBRARY: &[u8] = b"libbyway_preload";

/// `AT_BASE` and `AT_SECURE` of the auxiliary vector (getauxval(3)).
const AT_BASE: u64 = 7;
const AT_SECURE: u64 = 23;

/// See the module.
#[derive(Debug)]
pub(super) struct Unpaged {
    looked: Instant,
    named: BTreeSet<PathBuf>,
}

impl Unpaged {
    pub(super) fn new(now: Instant) -> Self {
        Self { looked: now, named: BTreeSet::new() }
    }

    /// Looks through the processes of the job, if it is time to. `paged` are those that need no look.
    pub(super) fn look(&mut self, now: Instant, paged: impl FnOnce() -> Vec<u32>) {
        if now.duration_since(self.looked) < LOOK || self.named.len() >= NAMED_MAX {
            return;
        }
        self.looked = now;
        let paged = paged();
        let own = getpid().as_raw_nonzero().get().unsigned_abs();
        let (mut found, mut index) = (children_of(own), 0);
        while index < found.len().min(PROCESSES_MAX) {
            found.extend(children_of(found[index]));
            index += 1;
        }
        for process in found.into_iter().take(PROCESSES_MAX).filter(|process| !paged.contains(process)) {
            let Some(why) = reason(process) else { continue };
            let Ok(program) = std::fs::read_link(format!("/proc/{process}/exe")) else { continue };
            if self.named.len() < NAMED_MAX && self.named.insert(program.clone()) {
                tracing::warn!(process, program = %program.display(), "a program of the job is not paged, its memory stays here: {why}");
            }
        }
    }
}

/// Why the library was not loaded into a process; `None` if it was, or the process has ended.
fn reason(process: u32) -> Option<&'static str> {
    let read = |name: &str| std::fs::read(format!("/proc/{process}/{name}")).ok();
    let why = not_loaded(&read("auxv")?, &read("environ")?)?;
    // The dynamic linker as the program has no base, and loads libraries.
    let maps = read("maps").filter(|maps| !maps.is_empty())?;
    (!has_library(&maps)).then_some(why)
}

fn not_loaded(auxiliary: &[u8], environment: &[u8]) -> Option<&'static str> {
    let (pairs, _) = auxiliary.as_chunks::<16>();
    let value = |kind: u64| {
        let pair = pairs.iter().find(|pair| pair[..8] == kind.to_ne_bytes())?;
        pair[8..].first_chunk().map(|value| u64::from_ne_bytes(*value))
    };
    let (base, secure) = (value(AT_BASE)?, value(AT_SECURE)?);
    let preload = environment.split(|byte| *byte == 0).find(|variable| variable.starts_with(b"LD_PRELOAD="));
    if base == 0 {
        Some("it is a static program")
    } else if secure != 0 {
        Some("its file gives it other rights (set-user-ID, set-group-ID or capabilities)")
    } else if !preload.is_some_and(has_library) {
        Some("it was started with another LD_PRELOAD than byway's")
    } else {
        None
    }
}

fn has_library(text: &[u8]) -> bool {
    text.windows(LIBRARY.len()).any(|part| part == LIBRARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_tells_why_no_library_was_loaded() {
        let auxiliary =
            |base: u64, secure: u64| [AT_BASE, base, AT_SECURE, secure, 0, 0].map(u64::to_ne_bytes).concat();
        let ours: &[u8] = b"A=1\0LD_PRELOAD=/usr/lib/byway/libbyway_preload.so:libjemalloc.so.2\0";
        assert_eq!(not_loaded(&auxiliary(4096, 0), ours), None);
        assert!(not_loaded(&auxiliary(0, 0), ours).is_some_and(|why| why.contains("static")));
        assert!(not_loaded(&auxiliary(4096, 1), ours).is_some_and(|why| why.contains("set-user-ID")));
        for other in [&b"A=1\0"[..], b"LD_PRELOAD=libjemalloc.so.2\0"] {
            assert!(not_loaded(&auxiliary(4096, 0), other).is_some_and(|why| why.contains("LD_PRELOAD")));
        }
        assert_eq!(not_loaded(b"", b""), None, "it has ended");
    }
}
