//! `cargo xtask install --prefix DIR`: builds the library for C programs and installs it.

use crate::process;
use anyhow::Result;
use std::path::{Path, PathBuf};

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
    println!("installed in {}\n{}", prefix.display(), how_to_build(&prefix));
    Ok(())
}

/// The commands by which a program is built and run: those that find byway elsewhere than where all is looked for.
fn how_to_build(prefix: &Path) -> String {
    let build = "cc program.c $(pkg-config --cflags --libs byway) -lpthread -o program && ./program";
    if ["/usr", "/usr/local"].iter().any(|place| prefix == Path::new(place)) {
        return format!("ldconfig\n{build}");
    }
    let lib = prefix.join("lib");
    let lib = lib.display();
    format!("export PKG_CONFIG_PATH=\"{lib}/pkgconfig\" LD_LIBRARY_PATH=\"{lib}\"\n{build}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_of_ones_own_is_named_to_compiler_and_loader() {
        let own = how_to_build(Path::new("/opt/byway"));
        assert!(own.contains("PKG_CONFIG_PATH=\"/opt/byway/lib/pkgconfig\""), "{own}");
        assert!(own.contains("LD_LIBRARY_PATH=\"/opt/byway/lib\""), "{own}");
        assert!(how_to_build(Path::new("/usr/local")).starts_with("ldconfig\ncc "));
    }
}
