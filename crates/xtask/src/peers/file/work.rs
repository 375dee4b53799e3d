//! What programs do with a mount, timed.

use crate::process;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PAGE: u64 = 4096;

/// Reads a file from its start to its end in pieces of 1 MiB; gives MB/s.
pub fn read(path: &Path) -> Result<f64> {
    let (mut buffer, mut bytes, begun) = (vec![0; MIB], 0, Instant::now());
    let mut file = File::open(path)?;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => bytes += count,
        }
    }
    Ok(megabytes_per_second(bytes, begun))
}

/// Writes a file of so many MiB and makes it durable; gives MB/s.
pub fn write(path: &Path, mebibytes: usize) -> Result<f64> {
    let (buffer, begun) = (vec![0xa5; MIB], Instant::now());
    let mut file = File::create(path)?;
    for _ in 0..mebibytes {
        file.write_all(&buffer)?;
    }
    file.sync_all()?;
    Ok(megabytes_per_second(mebibytes * MIB, begun))
}

fn megabytes_per_second(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

/// Threads read 4 KiB at random places, each once; gives reads/s and the median latency in us.
pub fn read_at_random(path: &Path, threads: u64, seconds: u32) -> Result<(f64, f64)> {
    let pages = std::fs::metadata(path)?.len() / PAGE;
    let (begun, limit) = (Instant::now(), Duration::from_secs(seconds.into()));
    let one = |number: u64| -> Result<Vec<f64>> {
        let (file, mut buffer, mut times) = (File::open(path)?, vec![0; PAGE as usize], Vec::new());
        let mut step = number;
        while begun.elapsed() < limit && step < pages {
            // An odd factor visits each page once: their number is a power of two.
            let page = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) & (pages - 1);
            let at = Instant::now();
            file.read_exact_at(&mut buffer, page * PAGE)?;
            times.push(at.elapsed().as_secs_f64() * 1e6);
            step += threads;
        }
        Ok(times)
    };
    let times = in_threads(threads, one)?.concat();
    let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
    Ok((rate, super::super::report::median(times)))
}

fn in_threads<T: Send>(threads: u64, work: impl Fn(u64) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|number| {
                let work = &work;
                scope.spawn(move || work(number))
            })
            .collect();
        started.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?).collect()
    })
}

/// What is done to each of many small files.
#[derive(Clone, Copy)]
pub enum Small {
    Create,
    Stat,
    Read,
    Remove,
}

/// Does it to so many files, shared out to threads; gives files/s.
pub fn small_files(folder: &Path, what: Small, files: u64, threads: u64) -> Result<f64> {
    let (content, begun) = ([7; 1000], Instant::now());
    let one = |number: u64| -> Result<()> {
        for file in (number..files).step_by(threads as usize) {
            let path = folder.join(format!("file-{file:05}"));
            match what {
                Small::Create => File::create(path)?.write_all(&content)?,
                Small::Stat => _ = std::fs::metadata(path)?,
                Small::Read => {
                    let mut buffer = Vec::with_capacity(1024);
                    if File::open(path)?.read_to_end(&mut buffer)? != content.len() {
                        bail!("a small file has another length");
                    }
                }
                Small::Remove => std::fs::remove_file(path)?,
            }
        }
        Ok(())
    };
    in_threads(threads, one)?;
    Ok(files as f64 / begun.elapsed().as_secs_f64())
}

/// Seconds that a program takes.
pub fn program(words: &[&str], folder: &Path) -> Result<f64> {
    let begun = Instant::now();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
    // A mount may show another owner.
    command.env("GIT_CONFIG_COUNT", "1").env("GIT_CONFIG_KEY_0", "safe.directory").env("GIT_CONFIG_VALUE_0", "*");
    let done = command.stderr(Stdio::piped()).output()?;
    if !done.status.success() {
        bail!("{words:?}: {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Clients read a file over and over, each from a place of its own, and keep nothing; gives MB/s of all together.
pub fn read_by_many(files: &[PathBuf], seconds: u32) -> Result<f64> {
    let (begun, limit) = (Instant::now(), Duration::from_secs(seconds.into()));
    let one = |number: u64| -> Result<usize> {
        let file = File::open(&files[number as usize])?;
        let length = file.metadata()?.len();
        let (mut buffer, mut bytes) = (vec![0; MIB], 0);
        let mut offset = length / files.len() as u64 * number / MIB as u64 * MIB as u64;
        while begun.elapsed() < limit {
            let count = file.read_at(&mut buffer, offset)?;
            rustix::fs::fadvise(&file, offset, std::num::NonZeroU64::new(MIB as u64), rustix::fs::Advice::DontNeed)?;
            bytes += count;
            offset = (offset + MIB as u64) % length;
        }
        Ok(bytes)
    };
    let bytes = in_threads(files.len() as u64, one)?.into_iter().sum();
    Ok(megabytes_per_second(bytes, begun))
}

/// Makes a git repository of this workspace's last commit in `folder`, and an archive of its files beside it. `None` if git or the
/// repository is missing.
pub fn source_tree(folder: &Path, archive: &Path) -> Result<Option<()>> {
    let root = process::workspace_root();
    let mut pack = Command::new("git");
    pack.arg("-C").arg(&root).args(["archive", "--format=tar", "-o"]).arg(archive).arg("HEAD");
    if !process::succeeds(&mut pack) {
        return Ok(None);
    }
    std::fs::create_dir_all(folder)?;
    process::output(Command::new("tar").arg("-xf").arg(archive).current_dir(folder))?;
    let git = |words: &[&str]| {
        let set = ["-c", "user.name=peers", "-c", "user.email=peers@localhost", "-c", "init.defaultBranch=main"];
        process::output(Command::new("git").args(set).args(words).current_dir(folder)).context("git")
    };
    for words in [&["init", "--quiet"][..], &["add", "."], &["commit", "--quiet", "-m", "tree"]] {
        git(words)?;
    }
    Ok(Some(()))
}
