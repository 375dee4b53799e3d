//! `cargo xtask install --prefix DIR`: builds the library for C programs and installs it.

use crate::process;
use anyhow::Result;
use std::path::PathBuf;

#[path = "../../capi/install.rs"]
mod files;

#[derive(clap::Args)]
pub struct Options {
    /// Where to: `include`, `lib` and `lib/pkgconfig` are made there.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
}

pub fn run(options: &Options) -> Result<()> {
    let prefix = std::path::absolute(&options.prefix)?;
    process::run(process::cargo().args(["build", "--release", "--package", "byway-capi"]))?;
    let built = process::target_directory()?.join("release");
    files::install(&built, &process::workspace_root().join("crates/capi"), &prefix)?;
    println!("installed in {}: cc program.c $(pkg-config --cflags --libs byway)", prefix.display());
    Ok(())
}
