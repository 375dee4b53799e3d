//! The parts of `--help` and the man pages beyond the flags: examples, files, exit status.

use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Of `byway` itself.
pub(crate) const BYWAY: &str = "\
Environment:
  RUST_LOG   log level without --log, for all of byway or for one module: warn, byway_fabric=debug

Exit status:
  0   success
  1   failure; standard error says why
  2   invalid command line
  130 SIGINT or SIGTERM stopped byway copy";

/// Of `byway demo`.
pub(crate) const DEMO: &str = "\
Examples:
  byway demo                 uses a temporary file
  byway demo image.raw       uses this file, opened read-only

Exit status:
  0 if every copy was correct, 1 if not, 2 for an invalid command line.";

/// Of `byway serve`.
pub(crate) const SERVE: &str = "\
Examples:
  byway serve --volume disk=/srv/disk.img --nbd tcp://127.0.0.1 --listen tcp://127.0.0.1
  byway serve --volume disk=/dev/nvme0n1,direct --nbd unix:///run/nbd.sock --user byway
  byway serve --config /etc/byway/byway.toml --check

Files:
  /etc/byway/byway.toml   the configuration that byway.service reads
  /run/byway/ctl.sock     the default control socket of byway ctl

Signals:
  SIGTERM, SIGINT   take lent memory back, for at most 28 s, while clients are served; then complete requests in flight, for at
                    most 30 s, and exit; a second one exits at once
  SIGHUP            reload the configuration, as byway ctl reload does

Exit status:
  0 after SIGTERM or SIGINT, or if --check finds no error. 1 if the node could not start, if an event loop failed, or after a
  second SIGTERM or SIGINT. 2 for an invalid command line.";

/// Of `byway mount`.
pub(crate) const MOUNT: &str = "\
Examples:
  byway mount byway://store1/home /mnt/home --background
  byway mount 'byway+unix:///home?socket=/run/byway.sock' /mnt/home -o ro
  byway mount --takeover byway://store1/home /mnt/home --background
  byway mount --list
  byway umount /mnt/home
  mount -t byway byway://store1/home /mnt/home      with a link /sbin/mount.byway to this program; also by fstab

Each client sees the writes of the others at once. A mount caches data, attributes and names only if the share has
writers=exclusive. While the server cannot be reached, calls wait; after
--wait seconds they fail with EIO.

byway umount returns when the server has made durable what was written and not synced. sync(1) and umount(8) do not; mount units
of systemd do with a link /sbin/umount.fuse.byway to this program. If the server is away, the unmount succeeds, and byway umount and the process of the mount
end with status 1.

With --takeover the process is the successor of another one that serves the mount: after an upgrade of byway, for example. Programs keep
open files, locks and working folders. If it fails, the other process goes on.

Exit status:
  0 after the unmount or a takeover, or with --background once the mount works. 1 if the mount failed, or if what was written may not be
  durable at the server. 2 for an invalid command line.";

/// Of `byway run`.
pub(crate) const RUN: &str = "\
Examples:
  byway run --map /far=byway://store1/home -- grep -r needle /far/src
  byway run --map /far=byway://store1/home --report -- tar cf /tmp/src.tar -C /far src
  byway run --map '/far=byway+unix:///home?socket=/run/byway.sock' -- sh -c 'sort /far/list > /far/sorted'

A library is loaded into the program, and into the programs that it starts. It sends calls on paths below PREFIX to the server;
nothing is cached. Programs without it (static, set-user-ID, or started with another LD_PRELOAD) find no PREFIX.
A working directory may be below PREFIX. Not possible there: shared mmap, running programs, extended attributes, inotify.

Exit status:
  The program's status, or with --report 128 plus the signal that killed it. 1 if it was not started. 2 for an invalid command line.";

/// Of `byway dsm run`.
pub(crate) const DSM_RUN: &str = "\
Examples:
  byway dsm run -n 4 -- ./sor 512 20
  byway dsm run -n 2 --wire tcp --memory 1G -- ./matrix 256
  byway dsm run -n 4 --report --consistency rc -- ./sor 500 20
  byway dsm run -n 4 --pager points -- ./lu 1024
  byway dsm run -n 8 --hosts tcp://node1:7000,tcp://node2:7000 -- /opt/sor 512 20
  byway dsm run -n 8 --hosts rdma://10.1.1.1:7000,rdma://10.1.1.2:7000 -- /opt/sor 512 20
  byway dsm run -n 4 --checkpoint /var/tmp/sor -- ./sor 512 2000 100
  byway dsm run -n 4 --checkpoint /var/tmp/sor --resume -- ./sor 512 2000 100

With --hosts, byway must be installed at the same path on every host, and the program too. The processes talk over TLS with a key that is
made for the job and goes to each process by --rsh; with --plain, and over rdma://, use a network that you trust. Rank 0 reads no input then.

With --consistency rc, several processes may store to one page at a time, and see each other's stores behind a lock, a barrier or a fence of
the job (Job::lock, Job::barrier, Job::fence). It is for programs in which these order all accesses to the same bytes.

With --report, byway prints at the end how long each process waited for pages, what they sent to each other, and the pages to which several
stored. --pager points is for programs that call Job::poll (byway_dsm_poll) where they compute: others keep each other waiting there.

With --checkpoint, the program's calls of Job::checkpoint (byway_dsm_checkpoint) write the contents of all segments to DIR, each time in place of
the last. With --resume, a job starts with what the last one holds. Without --resume, DIR must have none.

The program must join the job by the Rust crate byway-dsm (Job::join), by byway_dsm_init in C, or by the ANL macros of byway_anl.h. Each output line is prefixed with the rank of its process.
Rank 0 reads standard input. When a process ends before all are done, or is silent for 1.5 times --keep-alive, every other process
reports it and ends. Children of the processes end with the job, also daemons, unless they have cleared their environment. SIGTSTP
(Ctrl-Z) stops the processes on this machine and then byway; all continue with byway.

Environment of the processes:
  BYWAY_DSM_RANK, BYWAY_DSM_RANKS   rank of the process, and number of processes

Exit status:
  0 if every process exited with 0; otherwise the status of the first process that failed, or 128 plus the signal that
  killed it. 70 if a process exited with 0 without leaving the job. 137 if a process was stopped or hung and had to be killed.
  130 if SIGINT, SIGTERM or SIGHUP stopped the job. 1 if the job could not start. 2 for an invalid command line.";

/// Of `byway dsm top`.
pub(crate) const DSM_TOP: &str = "\
Examples:
  byway dsm top
  byway dsm top 1234         of byway dsm run, or of a process of the job

For each process of the job on this machine it shows how often loads and stores waited for pages in the last second, the share of the time in which
a page was waited for (above 100 % if threads wait for several pages at a time), pages and copies that came and went, and what was sent to each other
process. Below are the pages to which several processes have stored, those that were waited for longest first, with the names that the program has
given to what lies there. Faults of pages count from the first look on; in a job of byway dsm run --report, from its beginning.

Processes answer the user that started them, and root. For processes of other hosts, run it there.

Exit status:
  0 if the job was shown, also when it ends while a terminal shows it. 1 if there is no job, several jobs and no PID, or none of its processes answers.
  2 for an invalid command line.";

/// Of `byway copy`.
pub(crate) const COPY: &str = "\
Examples:
  byway copy byway://store1/disk disk.img --verify
  byway copy image.raw nbd://store1/disk --overwrite
  byway copy --recursive src byway://store1/home/src

Exit status:
  0 once the destination is complete and flushed. 1 on failure, also if one entry of a tree was not copied. 2 for an invalid command line. 130 if SIGINT or SIGTERM
  stopped the copy.";

/// Of `byway ctl`.
pub(crate) const CTL: &str = "\
Examples:
  byway ctl status
  byway ctl reload
  byway ctl reopen disk      after a failed flush, once the disk is repaired
  byway ctl mount /mnt/home  of a mount
  byway ctl metrics > /var/lib/node_exporter/mounts.prom     of all mounts, for a collector of files
  byway ctl far 1234         of a program that byway far runs, or of byway far

Files:
  /run/byway/ctl.sock   the socket of a node that runs as byway.service

Exit status:
  0 on success, 1 if the node refused or did not answer, 2 for an invalid command line.";

/// Of `byway ls` and `byway info`.
pub(crate) const INSPECT: &str = "\
Examples:
  byway ls byway://store1
  byway info nbd://store1/disk
  byway ls 'byway+unix:///?socket=/run/byway.sock'

Exit status:
  0 if the server answered, 1 if not, 2 for an invalid command line.";

/// Of `byway attach`.
pub(crate) const ATTACH: &str = "\
Examples:
  byway attach byway://store1/disk                prints the device, such as /dev/ublkb0
  mount /dev/byway/disk /mnt
  byway attach byway://store1/disk --as scratch --read-only
  byway attach --list

Files:
  /dev/byway/NAME                symbolic link to the device
  /run/byway-attach/NAME.json    the volume, device and process
  /run/byway-attach/NAME.log     log of the background process

Notes:
  While the server cannot be reached, requests of the device wait for at most 10 minutes; then they fail with I/O errors. After a
  restart of the server, unflushed writes are sent again. When the process of a device of ublk dies, its requests wait until the
  same volume is attached again under the same name, or until byway detach fails them. A loop device has a second process, which
  starts a successor (Linux 6.9). Requests of a device of the NBD client fail.

Exit status:
  0 once the device is ready, or with --foreground after the detach; 1 on failure; 2 for an invalid command line.";

/// Of `byway detach`.
pub(crate) const DETACH: &str = "\
Examples:
  umount /mnt && byway detach disk
  byway detach /dev/loop0

Exit status:
  0 once all written data is durable at the server and the device is gone, 1 on failure, 2 for an invalid command line.";

/// Of `byway far`.
pub(crate) const FAR: &str = "\
Examples:
  On a machine with idle memory (the lender):
    byway serve --listen tcp://0.0.0.0 --lend 8G,guard=2G --allow 10.0.0.0/8 --insecure
  On the machine that runs the program:
    byway far --limit 2G --from byway://HOST -- sort -S 4G --parallel=4 large.txt
    byway far --limit 512M --from byway://A,byway://B,byway://C --class mirror=2 --report -- python3 model.py
    byway far --limit 1G --from byway://HOST --encrypt -- ./simulation
    byway far --limit 1G --from byway://A,byway://B,byway://C,byway://D,byway://E --class parity=4+1 -- ./simulation

byway far pages private anonymous memory: heaps and mappings of the program and of every program that it executes. Thread stacks,
mapped files, shared memory and executable memory stay local. A forked child shares its parent's pages; pages that it touches stay
local until it executes a program. New mappings are found within about a millisecond; a program that fills them faster than lenders take
pages exceeds the limit meanwhile. Refused are statically linked programs, and those that get another user, group or capabilities by
their file's mode or attributes.

Exit status:
  The program's status, or 128 plus the signal that killed it. 126 if the program cannot be paged, 1 if it was not started.";

/// Of `byway doctor`.
pub(crate) const DOCTOR: &str = "\
Examples:
  byway doctor
  byway doctor --json | jq '.[] | select(.health != \"ok\")'

Exit status:
  0, whatever the result.";

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
