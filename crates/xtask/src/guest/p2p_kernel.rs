//! A kernel that hands out the memory of PCI devices, which no ready kernel of Debian does (`CONFIG_PCI_P2PDMA`).
//!
//! It is built from Debian's source package with `p2p.config` and nothing else: ten minutes of two cores, once. What the
//! build wants and a machine may lack (flex, bison, libelf's headers) is unpacked beside it and not installed.

use super::setup::{System, unpack};
use crate::process;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "linux-source-6.12";
const BUILD_PACKAGES: [&str; 6] = [SOURCE, "bison", "flex", "libelf-dev", "libelf1", "m4"];
/// What must be there: a compiler is not unpacked like the rest.
const TOOLS: [&str; 6] = ["bc", "gcc", "make", "perl", "tar", "xz"];
const CONFIG: &str = include_str!("p2p.config");
/// The folder of the built kernel: the ELF file, and the configuration that it was built with.
const FOLDER: &str = "p2p-kernel";

/// What of [`TOOLS`] this machine lacks.
pub fn missing_tools() -> Vec<&'static str> {
    TOOLS.into_iter().filter(|tool| process::find_program(tool).is_none()).collect()
}

/// The kernel, built unless it is there in this configuration.
pub fn provide(system: &System) -> Result<PathBuf> {
    let folder = system.scratch().join(FOLDER);
    let kernel = folder.join("vmlinux");
    if std::fs::read_to_string(folder.join("config")).is_ok_and(|config| config == CONFIG) && kernel.is_file() {
        return Ok(kernel);
    }
    println!("guest p2p: building a kernel with PCI_P2PDMA under {} (once, some ten minutes)", folder.display());
    let partial = tempfile::Builder::new().prefix("partial-").tempdir_in(system.scratch())?;
    let built = partial.path().join("built");
    std::fs::create_dir(&built)?;
    std::fs::write(built.join("config"), CONFIG)?;
    std::fs::copy(build(partial.path())?, built.join("vmlinux")).context("cannot keep the kernel")?;
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    std::fs::rename(&built, &folder).context("cannot put the kernel in place")?;
    Ok(kernel)
}

/// Unpacks and builds in `folder`; gives the kernel as an ELF file.
fn build(folder: &Path) -> Result<PathBuf> {
    let root = folder.join("root");
    unpack(&BUILD_PACKAGES.map(str::to_owned), &root)?;
    let archive = root.join("usr/src").join(format!("{SOURCE}.tar.xz"));
    process::run(Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(folder))?;
    let source = folder.join(SOURCE);
    let config = folder.join("config");
    std::fs::write(&config, CONFIG)?;
    process::run(make(&source, &root).arg(format!("KCONFIG_ALLCONFIG={}", config.display())).arg("allnoconfig"))?;
    let made = std::fs::read_to_string(source.join(".config")).context("no configuration was made")?;
    let lost = lost_options(CONFIG, &made);
    ensure!(lost.is_empty(), "this kernel cannot be had with {}: something that they need is not set", lost.join(", "));
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    process::run(make(&source, &root).arg(format!("-j{jobs}")).arg("vmlinux"))?;
    Ok(source.join("vmlinux"))
}

/// `make` in the source's folder, with the unpacked tools.
fn make(source: &Path, root: &Path) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let headers = root.join("usr/include");
    let mut make = Command::new("make");
    make.arg("-s")
        .arg("-C")
        .arg(source)
        .env("PATH", format!("{}:{path}", root.join("usr/bin").display()))
        .env("BISON_PKGDATADIR", root.join("usr/share/bison"))
        .env("M4", root.join("usr/bin/m4"))
        .env("HOSTCFLAGS", format!("-I{0} -I{0}/x86_64-linux-gnu", headers.display()))
        .env("HOSTLDFLAGS", format!("-L{}", libraries.display()))
        .env("LD_LIBRARY_PATH", &libraries)
        // What cargo sets for its own children is not for this build.
        .env_remove("MAKEFLAGS")
        .env_remove("MFLAGS");
    make
}

/// The lines of the wanted configuration that did not come into the made one.
fn lost_options<'a>(wanted: &'a str, made: &str) -> Vec<&'a str> {
    let made: std::collections::HashSet<&str> = made.lines().collect();
    wanted.lines().filter(|line| line.starts_with("CONFIG_") && !made.contains(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_was_dropped_is_noticed() {
        let made = "CONFIG_PCI=y\n# CONFIG_ZONE_DEVICE is not set\nCONFIG_HZ=250\n";
        assert_eq!(lost_options("# why\nCONFIG_PCI=y\nCONFIG_ZONE_DEVICE=y\n", made), ["CONFIG_ZONE_DEVICE=y"]);
        assert_eq!(lost_options("CONFIG_PCI=y\n", made), Vec::<&str>::new());
        assert!(CONFIG.contains("CONFIG_PCI_P2PDMA=y\n"));
    }
}
