//! The root of a guest: one script to run, and all that the script needs.

use super::cpio::Archive;
use super::kernel;
use super::modules::Modules;
use super::setup::System;
use crate::process;
use anyhow::{Context, Result, bail};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the libraries lie in the guest; `init.sh` names it in `LD_LIBRARY_PATH`.
const LIBRARIES: &str = "lib/x86_64-linux-gnu";
/// Modules that all guests load. The crypto API asks for crc32c by name, at run time, so that no
/// line of `modules.dep` tells of it; a kernel that does it inside ext4 has no such module to load.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "nbd"];
/// Programs that all guests have, besides busybox: its own dd cannot do what the writers need.
const PROGRAMS: [&str; 4] = ["dd", "e2fsck", "mkfs.ext4", "nbd-client"];

pub struct Initramfs<'a> {
    system: &'a System,
    archive: Archive,
}

impl<'a> Initramfs<'a> {
    /// A root with the modules and programs that all guests have, the binary under test as
    /// `/bin/byway`, and `script`, which starts with `settings` as shell variables.
    pub fn new(system: &'a System, byway: &Path, settings: &[(&str, usize)], script: &str) -> Result<Self> {
        let mut initramfs = Self::bare(system, &MODULES, settings, script)?;
        for program in PROGRAMS {
            initramfs.add_program(program, &system.program(program)?)?;
        }
        initramfs.add_program("byway", byway)?;
        Ok(initramfs)
    }

    /// A root with busybox, `modules` (and what they need) and `script`, which starts with `settings` as shell variables and
    /// the functions of `prelude.sh`.
    pub fn bare(system: &'a System, modules: &[&str], settings: &[(&str, usize)], script: &str) -> Result<Self> {
        let mut initramfs = Self { system, archive: Archive::default() };
        for folder in ["dev", "mnt", "proc", "run", "sys", "tmp", "usr/bin"] {
            initramfs.archive.add_directory(folder);
        }
        initramfs.archive.add_file("init", include_bytes!("init.sh").to_vec());
        let mut lines: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        lines.extend([include_str!("prelude.sh").to_owned(), script.to_owned()]);
        initramfs.archive.add_file("job/script", lines.join("\n").into_bytes());
        initramfs.archive.add_file("bin/busybox", read(&system.program("busybox")?)?);
        initramfs.archive.add_link("bin/sh", "busybox");
        initramfs.add_modules(modules)?;
        Ok(initramfs)
    }

    /// Adds a file that the script wants.
    pub fn add_file(&mut self, path: &str, content: Vec<u8>) {
        self.archive.add_file(path, content);
    }

    /// Adds a folder of this machine and all that is in it: files, folders and links.
    pub fn add_tree(&mut self, place: &str, folder: &Path) -> Result<()> {
        for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            let (path, place) = (entry.path(), format!("{place}/{}", entry.file_name().to_string_lossy()));
            let kind = entry.file_type()?;
            if kind.is_symlink() {
                self.archive.add_link(&place, &std::fs::read_link(&path)?.to_string_lossy());
            } else if kind.is_dir() {
                self.archive.add_directory(&place);
                self.add_tree(&place, &path)?;
            } else {
                self.archive.add_file_with(&place, entry.metadata()?.permissions().mode(), read(&path)?);
            }
        }
        Ok(())
    }

    /// Adds a file that is not to be run.
    pub fn add_text(&mut self, path: &str, content: Vec<u8>) {
        self.archive.add_file_with(path, 0o644, content);
    }

    /// Writes the archive for qemu.
    pub fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.archive.to_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Adds a program and the libraries it is linked to.
    pub fn add_program(&mut self, name: &str, program: &Path) -> Result<()> {
        self.archive.add_file(&format!("bin/{name}"), self.stripped(program)?);
        self.add_libraries_of(program)
    }

    /// Adds a library that is loaded at run time, where it is looked for, and the libraries it is linked to.
    pub fn add_library(&mut self, path: &str, library: &Path) -> Result<()> {
        self.archive.add_file(path, read(library)?);
        self.add_libraries_of(library)
    }

    /// A program without its debug information, which is most of it: the archive and what is unpacked of it share the guest's memory.
    fn stripped(&self, program: &Path) -> Result<Vec<u8>> {
        let folder = tempfile::Builder::new().prefix("strip-").tempdir_in(self.system.scratch())?;
        let stripped = folder.path().join("program");
        process::output(Command::new("strip").arg("--strip-debug").arg("-o").arg(&stripped).arg(program))?;
        read(&stripped)
    }

    fn add_libraries_of(&mut self, file: &Path) -> Result<()> {
        let listing =
            process::output(Command::new("ldd").arg(file).env("LD_LIBRARY_PATH", self.system.userland_libraries()))?;
        for library in linked(&listing)? {
            let file = library.file_name().context("a library has a name")?.to_string_lossy();
            // The loader is found by its whole path, which is part of each program.
            let place = if file.starts_with("ld-linux") { "lib64" } else { LIBRARIES };
            let path = format!("{place}/{file}");
            if !self.archive.contains(&path) {
                self.archive.add_file(&path, read(&library)?);
            }
        }
        Ok(())
    }

    /// Adds the modules, unpacked, and the list in which `init.sh` finds their order.
    fn add_modules(&mut self, wanted: &[&str]) -> Result<()> {
        let folder = self.system.modules()?;
        let text = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let modules = Modules::parse(&text("modules.dep")?, &text("modules.builtin")?);
        let mut order = Vec::new();
        for path in modules.closure(wanted)? {
            let bytes = read(&folder.join(path))?;
            let (path, bytes) = match path.strip_suffix(".xz") {
                Some(plain) => (plain, kernel::decompress(self.system, "xz", &bytes)?),
                None => (path, bytes),
            };
            let place = format!("/modules/{}", path.rsplit('/').next().unwrap_or(path));
            self.archive.add_file(&place, bytes);
            order.push(place);
        }
        // With an end to the last line too, without which `read` would not take it.
        let order: String = order.into_iter().map(|place| place + "\n").collect();
        self.archive.add_file("modules/order", order.into_bytes());
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The files in what `ldd` prints: `name => /path (address)`, or `/path (address)` for the loader.
fn linked(listing: &str) -> Result<Vec<PathBuf>> {
    if let Some(missing) = listing.lines().find(|line| line.contains("=> not found")) {
        bail!("a library is missing: {}", missing.trim());
    }
    Ok(listing
        .lines()
        .map(|line| line.split_once("=> ").map_or(line, |(_, path)| path).trim())
        .filter(|path| path.starts_with('/'))
        .filter_map(|path| path.split_whitespace().next())
        .map(PathBuf::from)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_names_libraries_and_the_loader_but_not_what_the_kernel_brings() {
        let listing = "\tlinux-vdso.so.1 (0x7f85)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f85)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x7f81)\n";
        let expected = ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(linked(listing).unwrap(), expected);
        assert_eq!(linked("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
        assert!(linked("\tlibx.so.1 => not found\n").is_err());
    }
}
