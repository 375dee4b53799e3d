//! Block devices: loop devices over a file that can have holes, and over one that cannot. Needs root; skips aloud.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use byway_skip::{SkipReason, skip_this};

use super::*;

const LEN: usize = 1 << 20;

/// A loop device, all ones, and what is under it; taken down in reverse.
struct Device {
    path: PathBuf,
    backing: PathBuf,
    ramfs: Option<PathBuf>,
    folder: tempfile::TempDir,
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/local/sbin:/usr/sbin:/sbin";
    let output = Command::new(program).args(arguments).env("PATH", path).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

impl Device {
    /// `None`, and a word why, where none can be had. The one without `holes` has no offload: neither zeroing nor discard.
    fn new(holes: bool) -> Option<Self> {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let skip = |why: &String| skip_this(SkipReason::Machine(&format!("no such loop device here: {why}")));
        Self::attach(folder, holes).inspect_err(skip).ok()
    }

    fn attach(folder: tempfile::TempDir, holes: bool) -> Result<Self, String> {
        let at = folder.path().to_str().unwrap().to_owned();
        if !holes {
            run("mount", &["-t", "ramfs", "ramfs", &at])?;
        }
        let backing = folder.path().join("backing");
        let ramfs = (!holes).then(|| folder.path().to_owned());
        let mut device = Self { path: PathBuf::new(), backing, ramfs, folder };
        std::fs::write(&device.backing, vec![1; LEN]).unwrap();
        device.path = run("losetup", &["--find", "--show", device.backing.to_str().unwrap()])?.into();
        Ok(device)
    }

    fn rig(&self, io: IoChoice) -> Rig {
        std::fs::write(&self.backing, vec![1; LEN]).unwrap();
        run("blockdev", &["--flushbufs", self.path.to_str().unwrap()]).unwrap();
        Rig::new(io, path_store(&self.path), VolumeOptions::default())
    }

    /// Bytes that the backing file takes.
    fn taken(&self) -> u64 {
        std::fs::metadata(&self.backing).unwrap().blocks() * 512
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = run("losetup", &["--detach", self.path.to_str().unwrap()]);
        }
        if self.ramfs.is_some() {
            // Lazily: the loop device lets go of the file a moment after it is detached.
            let _ = run("umount", &["-l", self.folder.path().to_str().unwrap()]);
        }
    }
}

/// Reads the whole volume: zeroes in the range, ones elsewhere.
fn assert_zeroed(rig: &mut Rig, start: usize, end: usize, what: &str) {
    let mut want = vec![1; LEN];
    want[start..end].fill(0);
    let got = rig.read(0, LEN).unwrap();
    let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "{what}: {start}..{end}");
}

#[test]
fn any_range_of_a_cached_device_is_zeroed_and_trimmed() {
    for holes in [true, false] {
        let Some(device) = Device::new(holes) else { continue };
        for io in BACKENDS {
            for (start, len) in [(7, 100), (7, 700), (500, 4096), (512, 100), (4096, 65536), (1000, LEN - 1000)] {
                for keep_space in [false, true] {
                    let mut rig = device.rig(io);
                    let flags = ZeroFlags { keep_space, durable: true, ..ZeroFlags::default() };
                    assert_eq!(
                        rig.zero(ByteRange::new(start as u64, len as u64), flags),
                        Ok(()),
                        "{len} bytes at {start}"
                    );
                    assert_zeroed(&mut rig, start, start + len, "zero");
                }
                for durable in [false, true] {
                    let mut rig = device.rig(io);
                    assert_eq!(
                        rig.trim(ByteRange::new(start as u64, len as u64), durable),
                        Ok(()),
                        "{len} bytes at {start}"
                    );
                    let bytes = rig.read(0, LEN).unwrap();
                    assert!(bytes[..start].iter().chain(&bytes[start + len..]).all(|byte| *byte == 1), "too much");
                }
            }
        }
    }
}

#[test]
fn a_fast_zero_of_a_device_is_never_written_out() {
    const FAST: ZeroFlags = ZeroFlags { keep_space: false, fast: true, durable: true };
    for io in BACKENDS {
        if let Some(device) = Device::new(false) {
            let mut rig = device.rig(io);
            assert_eq!(rig.zero(ByteRange::new(0, 65536), FAST), Err(BlockError::Unsupported));
            assert_eq!(
                rig.zero(ByteRange::new(0, 65536), ZeroFlags { keep_space: true, ..FAST }),
                Err(BlockError::Unsupported)
            );
            assert_zeroed(&mut rig, 0, 0, "refused");
            assert_eq!(rig.flush(), Ok(()));
        }
        if let Some(device) = Device::new(true) {
            let mut rig = device.rig(io);
            assert_eq!(
                rig.zero(ByteRange::new(0, 65536), ZeroFlags { keep_space: true, ..FAST }),
                Err(BlockError::Unsupported)
            );
            assert_eq!(rig.zero(ByteRange::new(0, 65536), FAST), Ok(()));
            assert_zeroed(&mut rig, 0, 65536, "fast");
        }
    }
}

#[test]
fn a_device_gets_space_back_by_trims_and_by_zeroes_that_may_be_holes() {
    let Some(device) = Device::new(true) else { return };
    for io in BACKENDS {
        for durable in [false, true] {
            let mut rig = device.rig(io);
            let before = device.taken();
            assert_eq!(rig.trim(ByteRange::new(0, LEN as u64 / 2), durable), Ok(()));
            assert_eq!(rig.flush(), Ok(()));
            assert!(device.taken() <= before / 2, "trim, durable: {durable}: {} of {before}", device.taken());
            assert_eq!(rig.zero(ByteRange::new(0, LEN as u64), ZeroFlags { durable, ..ZeroFlags::default() }), Ok(()));
            assert_eq!(rig.flush(), Ok(()));
            assert_eq!(device.taken(), 0, "zero, durable: {durable}");
            assert_zeroed(&mut rig, 0, LEN, "holes");
        }
    }
}

#[test]
fn a_durable_trim_of_a_device_without_discard_writes_nothing() {
    let Some(device) = Device::new(false) else { return };
    for io in BACKENDS {
        let mut rig = device.rig(io);
        assert_eq!(rig.trim(ByteRange::new(0, 65536), true), Ok(()));
        assert_zeroed(&mut rig, 0, 0, "trim");
    }
}
