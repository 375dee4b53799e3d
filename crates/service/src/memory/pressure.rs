//! Memory that a lender's machine keeps for itself.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::limits::{STALLED_PERCENT_MAX, STALLED_STEP_BYTES};

/// How a machine's memory stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Bytes that programs can have without swapping: `MemAvailable` of /proc/meminfo.
    pub available_bytes: u64,
    /// Percent of the last 10 s in which all tasks that had work waited for memory: `full avg10` of /proc/pressure/memory; 0 where the
    /// kernel does not tell.
    pub stalled_percent: f64,
}

type Source = Box<dyn FnMut() -> Option<Reading> + Send>;

/// Keeps so many bytes available: a lender leases no slab that would leave less, and takes slabs back when there is less.
pub struct Guard {
    bytes: u64,
    source: Source,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Guard {
    /// Keeps so many bytes available of this machine's.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read.
    pub fn new(bytes: u64) -> std::io::Result<Self> {
        // A confined node cannot open them later.
        let meminfo = File::open("/proc/meminfo")?;
        let pressure = File::open("/proc/pressure/memory").ok();
        let mut guard = Self::with_readings(bytes, move || read(&meminfo, pressure.as_ref()));
        guard.read().ok_or(std::io::ErrorKind::InvalidData)?;
        Ok(guard)
    }

    /// Memory of this machine in bytes: `MemTotal` of /proc/meminfo.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read.
    pub fn machine_bytes() -> std::io::Result<u64> {
        let meminfo = std::fs::read_to_string("/proc/meminfo")?;
        meminfo_bytes(&meminfo, "MemTotal:").ok_or_else(|| std::io::ErrorKind::InvalidData.into())
    }

    /// The same with readings from elsewhere.
    pub fn with_readings(bytes: u64, source: impl FnMut() -> Option<Reading> + Send + 'static) -> Self {
        Self { bytes, source: Box::new(source) }
    }

    /// How the memory stands now.
    pub fn read(&mut self) -> Option<Reading> {
        (self.source)()
    }

    /// Whether so many bytes more can be lent.
    pub fn allows(&mut self, bytes: u64) -> bool {
        self.read().is_some_and(|now| now.available_bytes >= self.bytes.saturating_add(bytes) && !is_stalled(&now))
    }

    /// Bytes that are to be taken back, those included that are taken back already.
    pub fn shortage(&mut self) -> u64 {
        let Some(now) = self.read() else { return 0 };
        let short = self.bytes.saturating_sub(now.available_bytes);
        if is_stalled(&now) { short.max(STALLED_STEP_BYTES) } else { short }
    }
}

fn is_stalled(reading: &Reading) -> bool {
    reading.stalled_percent > STALLED_PERCENT_MAX
}

fn read(meminfo: &File, pressure: Option<&File>) -> Option<Reading> {
    let available_bytes = meminfo_bytes(&text(meminfo)?, "MemAvailable:")?;
    let stalled_percent = pressure.and_then(text).and_then(|text| stalled_percent(&text)).unwrap_or(0.0);
    Some(Reading { available_bytes, stalled_percent })
}

fn text(file: &File) -> Option<String> {
    let mut text = vec![0; 4096];
    let len = file.read_at(&mut text, 0).ok()?;
    text.truncate(len);
    String::from_utf8(text).ok()
}

/// A line of /proc/meminfo.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// `avg10` of the line `full` of /proc/pressure/memory.
fn stalled_percent(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    line.split(' ').find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\nBuffers: 3 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(1_024_000));
        assert_eq!(meminfo_bytes(text, "MemTotal:"), Some(24_576_000_000));
        assert_eq!(meminfo_bytes("MemFree: 1 kB\n", "MemAvailable:"), None);
        let text = "some avg10=9.00 avg60=0.10 avg300=0.00 total=1\nfull avg10=2.50 avg60=0.00 avg300=0.00 total=5\n";
        assert_eq!(stalled_percent(text), Some(2.5));
        assert_eq!(stalled_percent("some avg10=9.00\n"), None);
        assert!(Guard::new(0).unwrap().allows(4096));
    }

    #[test]
    fn what_is_short_is_to_be_taken_back() {
        let guard = |available_bytes, stalled_percent| {
            Guard::with_readings(1000, move || Some(Reading { available_bytes, stalled_percent }))
        };
        assert_eq!((guard(1000, 0.0).shortage(), guard(900, 0.0).shortage()), (0, 100));
        assert_eq!(guard(1 << 40, STALLED_PERCENT_MAX + 1.0).shortage(), STALLED_STEP_BYTES);
        assert!(guard(1100, 0.0).allows(100) && !guard(1099, 0.0).allows(100));
        assert!(!guard(1 << 40, STALLED_PERCENT_MAX + 1.0).allows(1));
    }
}
