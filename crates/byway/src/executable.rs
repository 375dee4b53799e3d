//! Programs into which a library is loaded, by `byway far` and `byway run`: whether the dynamic linker does so, and where the library is.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::secure_execution::{Privilege, privilege};

/// Why a program is not run.
#[derive(Debug, thiserror::Error)]
pub enum ExecutableError {
    /// None was named.
    #[error("no program was named")]
    NoName,
    /// There is none.
    #[error("{0}: no such program; give its path, or look at PATH")]
    NotFound(String),
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// Not of this kind of machine, or no program.
    #[error("{}: neither a 64-bit ELF program of this machine nor a script; no library can be loaded into it", .0.display())]
    Kind(PathBuf),
    /// No dynamic linker.
    #[error("{}: a static program loads no libraries, so neither byway far nor byway run works with it; link it dynamically, or instead of far attach a mem: volume as swap, instead of run mount the share", .0.display())]
    Static(PathBuf),
    /// The dynamic linker ignores `LD_PRELOAD` there.
    #[error("{}: runs with the rights of another user or group (set-user-ID or set-group-ID), so no library is loaded into it; run it as that user and group, or run a copy without these bits (cp makes one)", .0.display())]
    Privileged(PathBuf),
    /// The same.
    #[error("{}: its file has capabilities, so no library is loaded into it for other users than root; run it as root, or run a copy without them (cp makes one)", .0.display())]
    Capabilities(PathBuf),
    /// Scripts of scripts.
    #[error("{}: its interpreter is a script, and so on; no library can be loaded into it", .0.display())]
    Interpreter(PathBuf),
}

/// Interpreters of interpreters that are followed; the kernel's own bound.
const INTERPRETERS_MAX: usize = 4;

/// The program of a name, as the shell finds it.
///
/// # Errors
/// [`ExecutableError::NotFound`].
pub fn find(name: &OsStr) -> Result<PathBuf, ExecutableError> {
    let is_program = |path: &Path| path.metadata().is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0);
    if name.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| is_program(path));
    found.ok_or_else(|| ExecutableError::NotFound(name.to_string_lossy().into_owned()))
}

/// Whether a library is loaded into it.
///
/// # Errors
/// Why not.
pub fn check(path: &Path) -> Result<(), ExecutableError> {
    let mut path = path.to_owned();
    for _ in 0..INTERPRETERS_MAX {
        let failed = |source| ExecutableError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        let mut head = [0; 4096];
        let len = file.read_at(&mut head, 0).map_err(failed)?;
        let head = &head[..len];
        if let Some(interpreter) = interpreter(head) {
            path = interpreter;
            continue;
        }
        if !is_dynamic(head).ok_or_else(|| ExecutableError::Kind(path.clone()))? {
            return Err(ExecutableError::Static(path));
        }
        return match privilege(&file, &file.metadata().map_err(failed)?).map_err(failed)? {
            Some(Privilege::Identity) => Err(ExecutableError::Privileged(path)),
            Some(Privilege::Capabilities) => Err(ExecutableError::Capabilities(path)),
            None => Ok(()),
        };
    }
    Err(ExecutableError::Interpreter(path))
}

/// A library of byway: beside this program, or where the installation has it.
pub fn library(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    [folder.join(name), folder.join("../lib/byway").join(name)].into_iter().find(|place| place.is_file())
}

/// `LD_PRELOAD` with a library, and with what is to be loaded anyway.
pub fn preload(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// Of a script.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let word = line.trim_ascii().split(u8::is_ascii_whitespace).next()?;
    Some(PathBuf::from(OsString::from_vec(word.to_vec())))
}

/// Whether an ELF program asks for a dynamic linker (`PT_INTERP`); `None`: it is none of this machine.
fn is_dynamic(head: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    // Magic, 64 bits, little-endian (System V ABI, "ELF header").
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let number = |at: usize| Some(u64::from_le_bytes(*head.get(at..)?.first_chunk()?));
    let half = |at: usize| Some(u16::from_le_bytes(*head.get(at..)?.first_chunk()?));
    let (offset, entry, count) = (usize::try_from(number(32)?).ok()?, half(54)?, half(56)?);
    let mut kinds = (0..count).map(|index| {
        let at = offset.checked_add(usize::from(index) * usize::from(entry))?;
        Some(u32::from_le_bytes(*head.get(at..)?.first_chunk()?))
    });
    Some(kinds.any(|kind| kind == Some(PT_INTERP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_apart() {
        let shell = find(OsStr::new("sh")).unwrap();
        check(&shell).unwrap();
        assert!(matches!(find(OsStr::new("no-such-program")), Err(ExecutableError::NotFound(_))));
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        check(&file("script", b"#! /bin/sh -e\nexit")).unwrap();
        assert!(matches!(check(&file("text", b"hello")), Err(ExecutableError::Kind(_))));
        let mut head = b"\x7fELF\x02\x01".to_vec();
        head.resize(64, 0);
        assert!(matches!(check(&file("static", &head)), Err(ExecutableError::Static(_))));
        let around = file("around", b"");
        std::fs::write(&around, format!("#!{}\n", around.display())).unwrap();
        assert!(matches!(check(&around), Err(ExecutableError::Interpreter(_))));
        let script = file("set-user-id", b"#!/bin/sh\n");
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o6755)).unwrap();
        check(&script).expect("the kernel gives scripts no rights of their owners");
    }
}
