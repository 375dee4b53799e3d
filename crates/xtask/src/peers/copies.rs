//! The last case of `peers native`: copies of a file of 1 GiB from a node, by byway over both wires and by other clients over
//! NBD. Only byway flushes, which costs nothing in memory.

use super::contest::{Contest, Contestant, Figures, Outcome};
use super::native;
use crate::process;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Where the node listens for NBD, besides its own protocol.
pub const NBD_PORT: u16 = 10_830;

/// Out of the node's volume `v`, which is `file`, into a file of the same folder, which is in memory.
pub fn copies(byway: &Path, file: &Path, folder: &Path, rounds: usize) -> Result<Outcome> {
    let tool = |name: &str, package: &str| {
        process::find_program(name).with_context(|| format!("{name} is not installed (package {package})"))
    };
    let (nbdcopy, qemu_img) = (tool("nbdcopy", "libnbd-bin")?, tool("qemu-img", "qemu-utils")?);
    let bytes = std::fs::metadata(file)?.len();
    let out = folder.join("copy.img");
    let uri = format!("nbd://127.0.0.1:{NBD_PORT}/v");
    let own = format!("byway://127.0.0.1:{}/v", native::PORT);
    let contestant = |name, program: &Path, before: &'static [&'static str], from: &str| {
        let (program, from, out) = (program.to_owned(), from.to_owned(), out.clone());
        let run = move || {
            // A new file each time, as for a person.
            if out.exists() {
                std::fs::remove_file(&out)?;
            }
            let began = Instant::now();
            process::output(Command::new(&program).args(before).arg(&from).arg(&out))?;
            let seconds = began.elapsed().as_secs_f64();
            Ok(Figures { megabytes_per_second: bytes as f64 / seconds / 1e6, ..Figures::default() })
        };
        Contestant { name, run: Box::new(run) }
    };
    let contest = Contest {
        case: "copy-1g",
        contestants: vec![
            contestant("byway copy, own protocol", byway, &["copy", "--no-resume"], &own),
            contestant("byway copy, NBD", byway, &["copy", "--no-resume"], &uri),
            contestant("nbdcopy", &nbdcopy, &[], &uri),
            contestant("qemu-img convert", &qemu_img, &["convert", "-f", "raw", "-O", "raw"], &uri),
        ],
        target: ("qemu-img convert", 1.0),
    };
    let outcome = contest.run(rounds);
    let _ = std::fs::remove_file(&out);
    outcome
}
