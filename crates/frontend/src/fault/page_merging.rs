//! Whether the kernel merges equal pages (KSM, Documentation/admin-guide/mm/ksm.rst).
//!
//! A merged page loses its write protection (seen on Linux 6.18): a write to it is not told, and the pager would take it for
//! unchanged. So no page is protected while the kernel merges pages. KSM looks at a page twice before it merges it, so a look each
//! millisecond comes before the first merged page is written and leaves.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often the kernel is asked.
const LOOK: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct PageMerging {
    /// `/sys/kernel/mm/ksm/run`.
    run: Option<File>,
    /// This kernel merges no pages.
    is_absent: bool,
    looked: Instant,
    is_off: bool,
}

impl PageMerging {
    pub(crate) fn new(now: Instant) -> Self {
        Self::at(Path::new("/sys/kernel/mm"), now)
    }

    fn at(folder: &Path, now: Instant) -> Self {
        let run = File::open(folder.join("ksm/run")).ok();
        // Without sysfs nothing is known, and no page is protected.
        let is_absent = folder.exists() && !folder.join("ksm").exists();
        let mut merging = Self { run, is_absent, looked: now, is_off: false };
        merging.is_off = merging.read();
        merging
    }

    /// Whether no pages are merged; asked anew each millisecond.
    pub(crate) fn is_off(&mut self, now: Instant) -> bool {
        if now.duration_since(self.looked) >= LOOK {
            self.looked = now;
            self.is_off = self.read();
        }
        self.is_off
    }

    fn read(&self) -> bool {
        let mut byte = [0];
        let read = self.run.as_ref().map(|file| file.read_at(&mut byte, 0));
        self.is_absent || (matches!(read, Some(Ok(1))) && byte != *b"1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_merged_while_the_file_says_1_or_cannot_be_read() {
        let (folder, now) = (tempfile::tempdir().unwrap(), Instant::now());
        assert!(!PageMerging::at(&folder.path().join("none"), now).is_off(now), "no sysfs");
        assert!(PageMerging::at(folder.path(), now).is_off(now), "a kernel that cannot merge");
        std::fs::create_dir(folder.path().join("ksm")).unwrap();
        assert!(!PageMerging::at(folder.path(), now).is_off(now), "a file that cannot be read");
        let say = |text: &str| std::fs::write(folder.path().join("ksm/run"), text).unwrap();
        say("0\n");
        let mut merging = PageMerging::at(folder.path(), now);
        assert!(merging.is_off(now));
        say("1\n");
        assert!(merging.is_off(now), "not asked yet");
        assert!(!merging.is_off(now + LOOK));
        say("2\n");
        assert!(merging.is_off(now + 2 * LOOK), "stopped, and merged pages were taken apart");
    }
}
