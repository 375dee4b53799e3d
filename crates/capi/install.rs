//! What a C program needs of byway, put where its build finds it: the header, the library as an archive and as a shared object
//! under its name with the version, and a file for pkg-config. `cargo xtask install` and the tests have it from here.

use std::fs;
use std::io::{Error, Result};
use std::os::unix::fs::symlink;
use std::path::Path;

/// The shared object as programs are linked to it (`build.rs`). The interface may change with each minor version before 1.0.
const SONAME: &str = concat!("libbyway.so.", env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Installs the libraries in `built`, and what lies in `source`, this folder, below `prefix`, an absolute path.
///
/// # Errors
/// The system's, with the path.
pub fn install(built: &Path, source: &Path, prefix: &Path) -> Result<()> {
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let pkgconfig = lib.join("pkgconfig");
    for folder in [&include, &pkgconfig] {
        fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
    }
    for header in ["byway.h", "byway_anl.h", "c.m4.byway"] {
        copy(&source.join("include").join(header), &include.join(header))?;
    }
    copy(&built.join("libbyway.a"), &lib.join("libbyway.a"))?;
    copy(&built.join("libbyway.so"), &lib.join(format!("libbyway.so.{VERSION}")))?;
    link(&format!("libbyway.so.{VERSION}"), &lib.join(SONAME))?;
    link(SONAME, &lib.join("libbyway.so"))?;
    let template = source.join("byway.pc.in");
    let text = fs::read_to_string(&template).map_err(|error| at(&template, &error))?;
    let text = text.replace("@PREFIX@", &prefix.display().to_string()).replace("@VERSION@", VERSION);
    let file = pkgconfig.join("byway.pc");
    fs::write(&file, text).map_err(|error| at(&file, &error))
}

fn at(path: &Path, error: &Error) -> Error {
    Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Beside the old one and then in its place: a program that runs keeps the one that it has.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let new = to.with_added_extension("new");
    fs::copy(from, &new).map_err(|error| at(from, &error))?;
    fs::rename(&new, to).map_err(|error| at(to, &error))
}

fn link(target: &str, path: &Path) -> Result<()> {
    let new = path.with_added_extension("new");
    symlink(target, &new).and_then(|()| fs::rename(&new, path)).map_err(|error| at(path, &error))
}
