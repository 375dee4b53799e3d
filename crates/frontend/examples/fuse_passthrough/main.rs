//! Mounts a local folder a second time, through FUSE: the measure of what FUSE itself costs.
//!
//! `fuse_passthrough FOLDER MOUNTPOINT [THREADS]`, as root; it ends with the mount (`umount MOUNTPOINT`).

mod passthrough;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use byway_frontend::fuse::Driver;
use byway_frontend::fuse::mount::{MountOptions, mount};
use byway_frontend::fuse::session::Wishes;
use passthrough::Passthrough;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, at, rest @ ..] = &arguments[..] else {
        eprintln!("usage: fuse_passthrough FOLDER MOUNTPOINT [THREADS]");
        return ExitCode::from(2);
    };
    let threads = rest.first().and_then(|count| count.parse().ok()).unwrap_or(4);
    let started = || -> Result<Driver, Box<dyn std::error::Error>> {
        let files = Passthrough::new(Path::new(folder))?;
        let options = MountOptions { source: folder.clone(), default_permissions: true, ..MountOptions::default() };
        let channel = mount(&options, Path::new(at))?;
        Ok(Driver::start(channel, Arc::new(files), Wishes::default(), threads)?)
    };
    match started() {
        Ok(driver) => {
            driver.wait();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fuse_passthrough: {error}");
            ExitCode::FAILURE
        }
    }
}
