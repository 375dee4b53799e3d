//! The programs over other people's shared memory, all started by mpirun: written with OpenMPI's one-sided operations, and over ArgoDSM.

use super::Bench;
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that are written with OpenMPI's one-sided operations: `sor` with gets between fences, `is` with puts.
const MPI: [(&str, &str); 2] = [("sor", include_str!("sor_mpi.c")), ("is", include_str!("is_mpi.c"))];

/// The macros of the programs over ArgoDSM.
const ARGODSM: &str = include_str!("argodsm.h");
/// ArgoDSM has no package: this variable names its source, in whose folder `build` it was built with cmake, without its tests.
const ARGODSM_DIR: &str = "ARGODSM_DIR";

/// After so many seconds mpirun ends a program that hangs.
const MPI_SECONDS: &str = "300";

/// A program over something else than byway.
pub(super) struct Other {
    /// Over what.
    pub(super) name: &'static str,
    program: PathBuf,
}

impl Other {
    /// Runs it with so many processes; `arguments` has their number too.
    pub(super) fn command(&self, processes: usize, arguments: &[String]) -> Command {
        let mut command = Command::new("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "--timeout", MPI_SECONDS]);
        command.args(["-n", &processes.to_string()]).arg(&self.program).args(arguments);
        // Statistics of ArgoDSM.
        command.env("ARGO_PRINT_STATISTICS", "0");
        command
    }
}

impl Bench<'_> {
    /// The program over each that is here and can run it.
    pub(super) fn others(&self, name: &'static str, source: &Path) -> Result<Vec<Other>> {
        if process::find_program("mpicxx").is_none() || process::find_program("mpirun").is_none() {
            println!("SKIP OpenMPI, ArgoDSM: there is no mpicxx or mpirun (Debian: libopenmpi-dev, openmpi-bin)");
            return Ok(Vec::new());
        }
        let mut others = Vec::new();
        if let Some((_, text)) = MPI.iter().find(|(program, _)| *program == name) {
            let source = self.folder.join(format!("{name}_mpi.c"));
            std::fs::write(&source, text)?;
            let program = self.compile("mpicc", &source, &format!("{name}_mpi"), |_| {})?;
            others.push(Other { name: "OpenMPI, one-sided", program });
        }
        match std::env::var_os(ARGODSM_DIR) {
            Some(folder) => {
                others.push(Other { name: "ArgoDSM", program: self.over_argodsm(name, source, Path::new(&folder))? });
            }
            None => println!("SKIP ArgoDSM: {ARGODSM_DIR} does not name its source"),
        }
        Ok(others)
    }

    /// Compiles a program as C++, since ArgoDSM is a library for C++.
    fn over_argodsm(&self, name: &str, source: &Path, argodsm: &Path) -> Result<PathBuf> {
        let libraries = argodsm.join("build/lib");
        if !libraries.join("libargo.so").is_file() {
            bail!("{ARGODSM_DIR}: no build/lib/libargo.so in {}", argodsm.display());
        }
        let (header, program) = (self.folder.join("argodsm.h"), self.folder.join(format!("{name}_argodsm")));
        std::fs::write(&header, ARGODSM)?;
        let mut command = Command::new("mpicxx");
        // C permits conversions that C++ only warns of with -fpermissive.
        command.args(["-O2", "-std=c++17", "-fpermissive", "-w", "-DOMPI_SKIP_MPICXX=1"]);
        for folder in ["src", "build/config", "submodules/qd"] {
            command.arg("-I").arg(argodsm.join(folder));
        }
        command.arg("-include").arg(header).args(["-x", "c++"]).arg(source).args(["-x", "none"]);
        command.arg("-L").arg(&libraries).arg(format!("-Wl,-rpath,{}", libraries.display()));
        process::output(command.args(["-largo", "-largobackend-mpi", "-lm", "-o"]).arg(&program))
            .context("a program over ArgoDSM")?;
        Ok(program)
    }
}
