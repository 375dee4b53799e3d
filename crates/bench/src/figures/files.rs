//! Goglin: remote files by a program itself, by a mount, and beside block access; and answers that a dispatcher hands over.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use byway_service::file::client::{Caller, Client, ClientOptions, LockKind, LockRange, ROOT};
use rustix::fs::{Advice, OFlags, fadvise};

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::load::{Load, Requests};
use super::process::{Mount, Server};
use super::session::{RunError, Session};
use byway_remote::RemoteUri;

const KIB: u64 = 1 << 10;

/// Access to files: direct from a program, through a mount, and beside a block volume.
pub(super) const FILES: Experiment = Experiment {
    description: Description {
        name: "goglin-files",
        title: "Goglin: access to remote files",
        source: "Goglin, Adapting distributed storage to high-speed networks, sections 3.4 and 4.2 to 4.4, figs. 11 to 15",
        what: "Reads of one file of a share over TCP, one at a time, by size: by a program itself (the client that `byway run` loads), \
               by a mount past the cache (O_DIRECT) and through the cache, whose pages are not there, without read-ahead; and of the \
               same file as a block volume, also with 16 outstanding. Then reads of 4 KiB by a program whose thread takes its own \
               answers, and by one in which another thread takes all answers and wakes the one that asked.",
        rule: "Holds if (1) a mount past the cache moves at most 0.95 of what the program itself moves at 4 KiB (fig. 12: slightly \
               lower, for the layers of the kernel), and (2) at least 0.4 of it at 1 MiB (fig. 13: direct access is good), (3) through \
               the cache, by pages of 4 KiB, it moves at most what it moves past the cache at 1 MiB (fig. 14: requests are split), \
               (4) block access of 4 KiB with 16 outstanding moves at least twice what file access through the cache moves by the page \
               (fig. 15), and (5) a dispatcher adds at least 1 us to a read of 4 KiB (fig. 11: several microseconds).",
        absent: &[
            "A client in the kernel: the mount's client is a process, which the kernel reaches by FUSE.",
            "GM against MX: two interfaces of one network card.",
        ],
    },
    run,
    judge,
    beside,
};

const SIZES: &str = "files by size";
const DISPATCH: &str = "dispatching";
const PROGRAM: &str = "program";
const DIRECT: &str = "mount, past the cache";
const CACHED: &str = "mount, through the cache";
const BLOCK: &str = "block volume";
const BLOCK_MANY: &str = "block volume, 16 outstanding";
const READ: &str = "read of 4 KiB";
const WAYS: [&str; 2] = ["the thread itself", "a dispatcher"];

/// The share's name.
const SHARE: &str = "files";

/// The file's name in it.
const NAME: &str = "data";

/// A folder that is shared, and a file in it.
struct Shared {
    /// Before the server, which it needs to end well.
    _mounted: Mount,
    server: Server,
    /// Where it is mounted.
    folder: PathBuf,
    bytes: u64,
}

fn start(session: &Session) -> Result<Shared, RunError> {
    let (shared, at) = (session.folder().join("shared"), session.folder().join("mounted"));
    for path in [&shared, &at] {
        std::fs::create_dir_all(path).map_err(|source| RunError::File { path: path.clone(), source })?;
    }
    let bytes = if session.scale.quick { 16 << 20 } else { 128 << 20 };
    let image = session.image(NAME, bytes)?;
    let file = shared.join(NAME);
    std::fs::rename(&image, &file).map_err(|source| RunError::File { path: file.clone(), source })?;
    let users = if rustix::process::geteuid().is_root() { ",users=squash:0" } else { "" };
    // With leases there is a cache.
    let share = format!("{SHARE}={},writers=exclusive{users}", shared.display());
    let volume = format!("volume=\"{}\",ro", file.display());
    let arguments = ["--share", &share, "--volume", &volume, "--listen", "tcp://127.0.0.1:0"].map(str::to_owned);
    let server = Server::start(&arguments, 1, None)?;
    let mounted = Mount::start(&server.uri("byway", SHARE), &at)?;
    Ok(Shared { _mounted: mounted, server, folder: at, bytes })
}

fn connect(server: &Server) -> Result<Client, RunError> {
    let failed = |error: &dyn std::fmt::Display| RunError::Fabric(format!("the share: {error}"));
    let uri: RemoteUri = server.uri("byway", SHARE).parse().map_err(byway_remote::RemoteError::from)?;
    let address = uri.resolve().map_err(|error| failed(&error))?;
    Client::connect(ClientOptions::new(address, SHARE)).map_err(|error| failed(&error))
}

/// The caller: this process's user is squashed or the server's own.
const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// Opens the file; gives the handle.
fn open(client: &Client) -> Result<u64, RunError> {
    let failed = |error: rustix::io::Errno| RunError::Fabric(format!("the shared file: {error}"));
    let found = client.look_up(ME, ROOT, NAME.as_bytes()).map_err(failed)?;
    client.open(ME, found.node, OFlags::RDONLY.bits()).map_err(failed)
}

/// What reads one after another gave.
struct Reads {
    megabytes_per_second: f64,
    /// Of the time of one.
    median_us: f64,
}

/// Reads `bytes` of a file of `file_bytes`, one after another for a time.
fn measure(
    bytes: u64,
    file_bytes: u64,
    time: Duration,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), RunError>,
) -> Result<Reads, RunError> {
    let mut buffer = vec![0; bytes as usize];
    let (mut times, began) = (Vec::new(), Instant::now());
    let mut offset = 0;
    while began.elapsed() < time || times.len() < 3 {
        let asked = Instant::now();
        read(offset, &mut buffer)?;
        times.push(asked.elapsed().as_secs_f64());
        offset = (offset + bytes) % file_bytes;
    }
    let megabytes_per_second = times.len() as f64 * bytes as f64 / began.elapsed().as_secs_f64().max(1e-9) / 1e6;
    Ok(Reads { megabytes_per_second, median_us: crate::statistics::median(&times) * 1e6 })
}

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let shared = start(session)?;
    let sizes = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];
    let sizes = session.scale.points(&sizes, &[4 * KIB, 1024 * KIB]).to_vec();
    let time = session.scale.time;
    let (mut by_size, mut dispatch) = (Gathered::default(), Gathered::default());
    for round in 1..=session.scale.rounds {
        session.say(&format!("goglin-files, round {round}"));
        read_by_size(&shared, &sizes, time, &mut by_size)?;
        let client = connect(&shared.server)?;
        for (at, is_dispatched) in [false, true].into_iter().enumerate() {
            dispatch.add(READ, at as f64, dispatched(&shared, &client, is_dispatched, time)?);
        }
        client.close();
    }
    let by_size = Plot {
        name: SIZES,
        title: "One read at a time, by who reads".to_owned(),
        x: Axis { label: "request", unit: "bytes", scale: Scale::Bytes },
        y: Axis { label: "bandwidth", unit: "MB/s", scale: Scale::Decades },
        series: by_size.series(),
    };
    let dispatch = Plot {
        name: DISPATCH,
        title: "A read of 4 KiB, by the thread that takes the answer".to_owned(),
        x: Axis { label: "taken by", unit: "", scale: Scale::Names(WAYS.to_vec()) },
        y: Axis { label: "median time", unit: "us", scale: Scale::Linear },
        series: dispatch.series(),
    };
    let setup = vec![
        "One event loop, byway's own protocol, TCP over loopback; the file is in the server's page cache.".to_owned(),
        "Dispatcher: another thread of the program waits for a lock that is held, and so drives the client's loop for all.".to_owned(),
    ];
    Ok(Measured { setup, plots: vec![by_size, dispatch] })
}

fn read_by_size(shared: &Shared, sizes: &[u64], time: Duration, gathered: &mut Gathered) -> Result<(), RunError> {
    let path = shared.folder.join(NAME);
    let failed = |source: std::io::Error| RunError::File { path: path.clone(), source };
    let direct = open_direct(&path).map_err(failed)?;
    let cached = File::open(&path).map_err(failed)?;
    let client = connect(&shared.server)?;
    let handle = open(&client)?;
    let mut volume = Load::open(&shared.server, "byway", "volume")?;
    for &bytes in sizes {
        let add = |gathered: &mut Gathered, name, reads: Reads| {
            gathered.add(name, bytes as f64, reads.megabytes_per_second);
        };
        let by_program = measure(bytes, shared.bytes, time, |offset, into| {
            let read = client.read(ME, handle, offset, into);
            read.map(|_| ()).map_err(|error| RunError::Fabric(format!("the shared file: {error}")))
        })?;
        add(gathered, PROGRAM, by_program);
        let by_mount =
            measure(bytes, shared.bytes, time, |offset, into| direct.read_exact_at(into, offset).map_err(failed))?;
        add(gathered, DIRECT, by_mount);
        fadvise(&cached, 0, None, Advice::Random).map_err(|error| failed(error.into()))?;
        let by_cache = measure(bytes, shared.bytes, time, |offset, into| {
            if offset == 0 {
                fadvise(&cached, 0, None, Advice::DontNeed).map_err(|error| failed(error.into()))?;
            }
            cached.read_exact_at(into, offset).map_err(failed)
        })?;
        add(gathered, CACHED, by_cache);
        for (name, outstanding) in [(BLOCK, 1), (BLOCK_MANY, 16)] {
            let rate = volume.run(Requests { bytes, outstanding, writes: false }, time)?;
            gathered.add(name, bytes as f64, rate.megabytes_per_second);
        }
    }
    client.close();
    Ok(())
}

/// Past the page cache: the mount takes memory of any alignment.
fn open_direct(path: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)
}

/// The median time of a read of 4 KiB in microseconds, perhaps while another thread takes the answers.
fn dispatched(shared: &Shared, client: &Client, is_dispatched: bool, time: Duration) -> Result<f64, RunError> {
    let failed = |error: rustix::io::Errno| RunError::Fabric(format!("the shared file: {error}"));
    let handle = open(client)?;
    let read = || {
        measure(4 * KIB, shared.bytes, time, |offset, into| {
            client.read(ME, handle, offset, into).map(|_| ()).map_err(failed)
        })
    };
    if !is_dispatched {
        return read().map(|reads| reads.median_us);
    }
    let other = connect(&shared.server)?;
    let held = open(&other)?;
    let range = |owner| LockRange { whole: true, owner, pid: std::process::id(), start: 0, last: u64::MAX };
    other.lock(ME, held, range(1), LockKind::Exclusive, false).map_err(failed)?;
    let median_us = std::thread::scope(|scope| {
        let dispatcher = scope.spawn(|| client.lock(ME, handle, range(2), LockKind::Shared, true));
        let median_us = read().map(|reads| reads.median_us);
        // The dispatcher gets its lock, and ends.
        other.close();
        let _ = dispatcher.join();
        median_us
    });
    client.lock(ME, handle, range(2), LockKind::Unlock, false).map_err(failed)?;
    median_us
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let at = |series, kib: u64| data.at(SIZES, series, (kib * KIB) as f64);
    let ratio = |over: f64, under: f64| over / under.max(1e-9);
    let time = |way: usize| data.at(DISPATCH, READ, way as f64);
    Ok(vec![
        Check::at_most("4 KiB: mount past the cache over program", ratio(at(DIRECT, 4)?, at(PROGRAM, 4)?), 0.95),
        Check::at_least("1 MiB: mount past the cache over program", ratio(at(DIRECT, 1024)?, at(PROGRAM, 1024)?), 0.4),
        Check::at_most("cache by 4 KiB over past it by 1 MiB", ratio(at(CACHED, 4)?, at(DIRECT, 1024)?), 1.0),
        Check::at_least("4 KiB: block, 16 outstanding, over cache", ratio(at(BLOCK_MANY, 4)?, at(CACHED, 4)?), 2.0),
        Check::at_least("us that a dispatcher adds", time(1)? - time(0)?, 1.0),
    ])
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let at = |series, kib: u64| data.at(SIZES, series, (kib * KIB) as f64);
    let over = |over, under, kib| at(over, kib).and_then(|over| at(under, kib).map(|under| over / under.max(1e-9)));
    let added = data.at(DISPATCH, READ, 1.0).and_then(|with| data.at(DISPATCH, READ, 0.0).map(|own| with - own));
    vec![
        Beside {
            what: "direct access by a mount over that of the program itself, 4 KiB",
            place: "section 4.2, fig. 12: ORFS in the kernel, ORFA in the program",
            paper: "slightly lower",
            here: said(over(DIRECT, PROGRAM, 4), "times"),
        },
        Beside {
            what: "the same, 1 MiB",
            place: "section 4.2, figs. 12 and 13",
            paper: "slightly lower",
            here: said(over(DIRECT, PROGRAM, 1024), "times"),
        },
        Beside {
            what: "a page through the cache",
            place: "section 4.3, fig. 14: MX (GM: 76 us)",
            paper: "54 us",
            here: said(at(CACHED, 4).map(|rate| 4096.0 / rate.max(1e-9)), "us"),
        },
        Beside {
            what: "block access over file access through the cache",
            place: "section 4.4, fig. 15",
            paper: "twice",
            here: said(over(BLOCK_MANY, CACHED, 4), "times, 4 KiB, 16 outstanding"),
        },
        Beside {
            what: "what a dispatcher adds",
            place: "section 3.4, fig. 11",
            paper: "several us",
            here: said(added, "us"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    #[test]
    fn the_rule_says_yes_and_no() {
        let verdict = |direct: [f64; 2], cached: f64, many: f64, dispatched: f64| {
            let sizes = |[small, large]: [f64; 2]| [(4096.0, small), (1_048_576.0, large)];
            let (program, direct) = (sizes([200.0, 3000.0]), sizes(direct));
            let series = [
                (PROGRAM, &program[..]),
                (DIRECT, &direct),
                (CACHED, &[(4096.0, cached)]),
                (BLOCK_MANY, &[(4096.0, many)]),
            ];
            let plots =
                [made::plot(SIZES, &series), made::plot(DISPATCH, &[(READ, &[(0.0, 20.0), (1.0, dispatched)])])];
            Verdict::of(judge(&Data(&plots))).word()
        };
        assert_eq!(verdict([100.0, 2000.0], 90.0, 700.0, 35.0), "holds");
        assert_eq!(verdict([210.0, 2000.0], 90.0, 700.0, 35.0), "does not hold", "the kernel costs nothing");
        assert_eq!(verdict([100.0, 1000.0], 90.0, 700.0, 35.0), "does not hold", "direct access is slow");
        assert_eq!(
            verdict([100.0, 2000.0], 2100.0, 7000.0, 35.0),
            "does not hold",
            "pages are as fast as long requests"
        );
        assert_eq!(verdict([100.0, 2000.0], 90.0, 150.0, 35.0), "does not hold", "nothing is pipelined");
        assert_eq!(verdict([100.0, 2000.0], 90.0, 700.0, 20.5), "does not hold", "a dispatcher is free");
    }
}
