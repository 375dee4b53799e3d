//! What `--help` and the man pages say of a command beyond its flags: examples, files, exit status.

use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Of `byway` itself.
pub(crate) const BYWAY: &str = "\
Environment:
  RUST_LOG   what is logged where --log is not given, for example warn or byway_fabric=debug

Exit status:
  0   done
  1   it could not be done; standard error says why
  2   the command line is wrong
  130 SIGINT or SIGTERM stopped byway copy";

/// Of `byway demo`.
pub(crate) const DEMO: &str = "\
Examples:
  byway demo                 with a file of its own, removed at the end
  byway demo image.raw       with this file, opened read-only

Exit status:
  0 if every copy was right, 1 if not, 2 for a wrong command line.";

/// Of `byway serve`.
pub(crate) const SERVE: &str = "\
Examples:
  byway serve --volume disk=/srv/disk.img --nbd tcp://127.0.0.1 --listen tcp://127.0.0.1
  byway serve --volume disk=/dev/nvme0n1,direct --nbd unix:///run/nbd.sock --user byway
  byway serve --config /etc/byway/byway.toml --check

Files:
  /etc/byway/byway.toml   the configuration that byway.service reads
  /run/byway/ctl.sock     the control socket that byway ctl asks if --socket is not given

Signals:
  SIGTERM, SIGINT   answer what is in flight, at most 30 s, and end; a second one ends the node at once
  SIGHUP            read the configuration again, as byway ctl reload

Exit status:
  0 after SIGTERM or SIGINT, or if --check finds nothing wrong. 1 if the node could not start, an event loop failed, or it was
  told to end at once. 2 for a wrong command line.";

/// Of `byway mount`.
pub(crate) const MOUNT: &str = "\
Examples:
  byway mount byway://store1/home /mnt/home --background
  byway mount 'byway+unix:///home?socket=/run/byway.sock' /mnt/home -o ro
  byway umount /mnt/home

Nothing is cached: each client sees at once what another has written. While the server is away, calls wait, and go on when it is
back; after --wait seconds they fail with EIO.

Exit status:
  0 once it is unmounted, or with --background once the mount works. 1 if it could not be mounted. 2 for a wrong command line.";

/// Of `byway dsm run`.
pub(crate) const DSM_RUN: &str = "\
Examples:
  byway dsm run -n 4 -- ./sor 512 20
  byway dsm run -n 2 --wire tcp --memory 1G -- ./matrix 256

The program is one that joins the job: by the Rust crate byway-dsm (Job::join). Each line that a process prints comes with its rank
before it. Standard input is rank 0's. When a process ends before all are done, every other one says so and ends.

Environment of the processes:
  BYWAY_DSM_RANK, BYWAY_DSM_RANKS   which process of how many

Exit status:
  0 if every process ended with 0; else that of the first process that failed, or 128 and the number of the signal that
  ended it; 130 if SIGINT, SIGTERM or SIGHUP stopped the job; 1 if it could not be started; 2 for a wrong command line.";

/// Of `byway copy`.
pub(crate) const COPY: &str = "\
Examples:
  byway copy byway://store1/disk disk.img --verify
  byway copy image.raw nbd://store1/disk --overwrite

Exit status:
  0 once the destination is whole and flushed, 1 if not, 2 for a wrong command line, 130 if SIGINT or SIGTERM stopped it.";

/// Of `byway ctl`.
pub(crate) const CTL: &str = "\
Examples:
  byway ctl status
  byway ctl reload
  byway ctl reopen disk      after a flush failed and the disk was checked

Files:
  /run/byway/ctl.sock   the socket of a node that runs as byway.service

Exit status:
  0 if the node did as it was asked, 1 if it refused or does not answer, 2 for a wrong command line.";

/// Of `byway ls` and `byway info`.
pub(crate) const INSPECT: &str = "\
Examples:
  byway ls byway://store1
  byway info nbd://store1/disk
  byway ls 'byway+unix:///?socket=/run/byway.sock'

Exit status:
  0 if the server has answered, 1 if not, 2 for a wrong command line.";

/// Of `byway attach`.
pub(crate) const ATTACH: &str = "\
Examples:
  byway attach byway://store1/disk                prints the device, as /dev/loop0
  mount /dev/byway/disk /mnt
  byway attach byway://store1/disk --as scratch --read-only
  byway attach --list

Files:
  /dev/byway/NAME                  leads to the device
  /run/byway-attach/NAME.json    which volume, device and process
  /run/byway-attach/NAME.log     what the process says, in the background

Notes:
  While the server is away, requests of the device wait, 10 minutes at most; then they fail, as a broken disk's do. A server that was
  restarted gets again what was written and not flushed.

Exit status:
  0 once the device is ready, or with --foreground once it was detached; 1 if not, 2 for a wrong command line.";

/// Of `byway detach`.
pub(crate) const DETACH: &str = "\
Examples:
  umount /mnt && byway detach disk
  byway detach /dev/loop0

Exit status:
  0 once the device is gone and all that was written is at the server, 1 if not, 2 for a wrong command line.";

/// Of `byway doctor`.
pub(crate) const FAR: &str = "\
Examples:
  On a machine with idle memory:
    byway serve --listen tcp://0.0.0.0 --lend 8G,guard=2G --allow 10.0.0.0/8 --insecure
  On a machine without:
    byway far --limit 2G --from byway://HOST -- sort -S 4G --parallel=4 large.txt
    byway far --limit 512M --from byway://A,byway://B --class none --report -- python3 model.py

Private anonymous memory is paged: heaps and mappings of the program and of all that it executes. Thread stacks, files, shared memory and memory that is
executable stay. A forked child has its parent's pages, and keeps what it touches until it executes a program. For a moment after it
was mapped (a millisecond) new memory is above the limit. Programs that are static, or run with another user's rights, are refused.

Exit status: the program's, or 128 and the signal that ended it; 126 if it cannot be paged; 1 if it was not started.";

pub(crate) const DOCTOR: &str = "\
Examples:
  byway doctor
  byway doctor --json | jq '.[] | select(.health != \"ok\")'

Exit status:
  0, whatever was found.";

/// Writes the man pages of a command and of those beneath it.
///
/// # Errors
/// The kernel's.
pub(crate) fn write_pages(command: Command, folder: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_built(&command, folder)
}

fn write_built(command: &Command, folder: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_built(inner, folder)?;
    }
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|inner| !inner.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(more) = command.get_after_long_help() {
        write_sections(&mut page, &more.to_string())?;
    }
    std::fs::write(folder.join(man.get_filename()), page)
}

/// `Title:` begins a section; the rest is shown line by line.
fn write_sections(page: &mut impl Write, text: &str) -> io::Result<()> {
    for line in text.lines() {
        match line.strip_suffix(':') {
            Some(title) if !title.starts_with(' ') => writeln!(page, ".fi\n.SH \"{}\"\n.nf", title.to_uppercase())?,
            _ => writeln!(page, "\\&{}", line.replace('\\', "\\e").replace('-', "\\-"))?,
        }
    }
    writeln!(page, ".fi")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use crate::cli::Cli;

    #[test]
    fn every_page_has_an_exit_status_and_those_of_the_program_examples() {
        let folder = tempfile::tempdir().unwrap();
        super::write_pages(Cli::command(), folder.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(format!("{name}.1"))).unwrap();
        for name in [
            "demo",
            "serve",
            "copy",
            "ctl",
            "ls",
            "info",
            "attach",
            "detach",
            "doctor",
            "bench-volume",
            "bench-fabric",
            "bench-figures",
        ] {
            let page = page(&format!("byway-{name}"));
            for section in [".SH \"EXAMPLES\"", ".SH \"EXIT STATUS\"", "\\-\\-log"] {
                assert!(page.contains(section), "{name}: {section}\n{page}");
            }
        }
        assert!(page("byway-serve").contains(".SH \"FILES\"") && page("byway-ctl").contains(".SH \"FILES\""));
        for name in ["copy", "ls", "info", "attach", "bench-volume"] {
            let page = page(&format!("byway-{name}"));
            assert!(page.contains("byway+shm:") && page.contains("byway+rdma:"), "{name}\n{page}");
        }
        assert!(page("byway").contains(".SH \"ENVIRONMENT\""));
        for name in ["byway", "byway-copy"] {
            assert!(page(name).contains("130"), "{name}");
        }
    }
}
