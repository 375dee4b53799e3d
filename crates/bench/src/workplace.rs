//! The one folder that a demonstration or experiment writes to. It is removed at the end, also after a signal.

use std::fs::{DirBuilder, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a program that a SIGINT ended.
const INTERRUPTED: i32 = 130;

/// A new folder that only this user can enter; removed when this is dropped, and when a signal ends the process.
#[derive(Debug)]
pub struct Workplace {
    folder: PathBuf,
    is_interrupted: Arc<AtomicBool>,
}

impl Workplace {
    /// Makes it in `within`; `purpose` is a word for its name, and for what is said when a signal comes.
    pub fn new(within: &Path, purpose: &'static str) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let folder = within.join(format!("byway-{purpose}-{:016x}", u64::from_ne_bytes(random)));
        // Before there is anything to be removed.
        let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
        let mut signals = signal_hook::iterator::Signals::new(signals)?;
        let (doomed, is_interrupted) = (folder.clone(), Arc::new(AtomicBool::new(false)));
        let interrupted = Arc::clone(&is_interrupted);
        std::thread::Builder::new().name("byway-signals".to_owned()).spawn(move || {
            if signals.forever().next().is_some() {
                interrupted.store(true, Ordering::SeqCst);
                // What is being made at this very moment can be in the way, once.
                let _ = std::fs::remove_dir_all(&doomed).or_else(|_| std::fs::remove_dir_all(&doomed));
                byway_remote::output::note(format_args!("{purpose}: interrupted; what it made is removed"));
                std::process::exit(INTERRUPTED);
            }
        })?;
        DirBuilder::new().mode(0o700).create(&folder)?;
        Ok(Self { folder, is_interrupted })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes an image of `bytes` that nothing can shrink.
    pub fn make_image(&self, name: &str, bytes: u64) -> io::Result<PathBuf> {
        let path = self.folder.join(name);
        let mut out = BufWriter::with_capacity(1 << 20, File::create_new(&path)?);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..bytes / 8 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            out.write_all(&state.to_le_bytes())?;
        }
        out.flush()?;
        Ok(path)
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        // Whatever failed for want of the folder: the signal decides how the process ends, and does so now.
        while self.is_interrupted.load(Ordering::SeqCst) {
            std::thread::park();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
