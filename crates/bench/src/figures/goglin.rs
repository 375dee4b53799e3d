//! Goglin: the cost of registration, and of ways to reach remote storage.

use std::time::Duration;

use byway_fabric::registration::Mode;
use byway_fabric::registration::measured::{CostMeter, MeasureError};

use super::cpu::{self, CpuPoints};
use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::load::{Load, Requests};
use super::process::Server;
use super::session::{RunError, Session};

const KIB: u64 = 1 << 10;

/// Registration against copy, by size.
pub(super) const REGISTRATION: Experiment = Experiment {
    description: Description {
        name: "goglin-registration",
        title: "Goglin: registration against copy",
        source: "Goglin, Adapting distributed storage to high-speed networks, section 3.2.1, fig. 6",
        what: "Private anonymous memory of 4 KiB to 16 MiB, all pages present: to register and deregister it as a fixed buffer of \
               an io_uring (which pins the pages, as a network card's driver does), to copy it into memory that is registered, \
               and to have it from a registration cache that has it.",
        rule: "Holds if (1) at 4 KiB registration takes at least twice as long as the copy, (2) at 16 MiB the copy takes longer \
               than registration, (3) registration has a price to begin with: at 64 KiB it takes at most 8 times what it takes at \
               4 KiB, for 16 times the pages, and (4) at 256 KiB a hit of the cache takes at most half of the copy.",
        absent: &[
            "A network card: its driver also writes the pages' addresses into the card's table, which is most of the cost that \
             the paper shows for Myrinet.",
        ],
    },
    run: run_registration,
    judge: judge_registration,
    beside: beside_registration,
};

/// User, cached and direct access; block, vectored and by the page.
pub(super) const ACCESS: Experiment = Experiment {
    description: Description {
        name: "goglin-access",
        title: "Goglin: kinds of access to remote storage",
        source: "Goglin, Adapting distributed storage to high-speed networks, sections 4.2 to 4.4, figs. 12 to 15",
        what: "Reads from block volumes over TCP. By size: from memory, from the page cache, and from the disk past it, one at a time. \
               By segments: 256 KiB moved as pages of 4 KiB one after the other (a cache that asks by the page), as pages with 16 \
               outstanding (a block layer), as one request whose bytes lie in 64 segments of 4 KiB, and as one request of one \
               segment.",
        rule: "Holds if (1) pages with 16 outstanding move at least twice what pages one after the other move (fig. 15: block \
               against cached file access), (2) vectored requests move at least 1.2 times what pages with 16 outstanding move \
               (section 4.4), and (3) past the cache costs: at 4 KiB a read from the disk moves at most 0.9 of one from the page \
               cache (figs. 12 to 14 have direct and cached access apart).",
        absent: &[
            "Access to files: goglin-files has it. What the paper calls cached file access is here pages of 4 KiB, one after the other.",
            "GM against MX: two interfaces of one network card.",
        ],
    },
    run: run_access,
    judge: judge_access,
    beside: beside_access,
};

const COST: &str = "cost by size";
const REGISTER: &str = "register and deregister";
const COPY: &str = "copy";
const HIT: &str = "hit of the cache";
const MISS: &str = "miss of the cache";
const SIZES: [u64; 7] = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16_384 * KIB];
const SIZES_QUICK: [u64; 4] = [4 * KIB, 64 * KIB, 256 * KIB, 16_384 * KIB];

fn run_registration(session: &mut Session) -> Result<Measured, RunError> {
    let failed = |error: MeasureError| RunError::Fabric(error.to_string());
    let meter = CostMeter::new().map_err(failed)?;
    let mut gathered = Gathered::default();
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(51) };
    session.say(&format!("goglin-registration, {rounds} rounds"));
    for _ in 0..rounds {
        for &bytes in session.scale.points(&SIZES, &SIZES_QUICK) {
            let cost = meter.round(bytes as usize).map_err(failed)?;
            let us = |time: Duration| time.as_secs_f64() * 1e6;
            let parts = [(REGISTER, cost.register), (COPY, cost.copy), (HIT, cost.hit), (MISS, cost.miss)];
            for (name, time) in parts {
                gathered.add(name, bytes as f64, us(time));
            }
        }
    }
    let plot = Plot {
        name: COST,
        title: "Time by size".to_owned(),
        x: Axis { label: "memory", unit: "bytes", scale: Scale::Bytes },
        y: Axis { label: "time", unit: "us", scale: Scale::Decades },
        series: gathered.series(),
    };
    let cache = match meter.mode() {
        Mode::Cached => "The cache keeps ranges, told of changes by userfaultfd.".to_owned(),
        Mode::EachTime(reason) => format!("The cache keeps nothing here, so that a hit is a registration: {reason}."),
    };
    let setup =
        vec![format!("{rounds} rounds; the copy is from cold memory that was just written into cold memory."), cache];
    Ok(Measured { setup, plots: vec![plot] })
}

fn judge_registration(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let ratio = |over: (&str, u64), under: (&str, u64)| {
        let at = |(series, kib): (&str, u64)| data.at(COST, series, (kib * KIB) as f64);
        Ok(at(over)? / at(under)?.max(1e-9))
    };
    Ok(vec![
        Check::at_least("4 KiB: registration over copy", ratio((REGISTER, 4), (COPY, 4))?, 2.0),
        Check::at_least("16 MiB: copy over registration", ratio((COPY, 16_384), (REGISTER, 16_384))?, 1.0),
        Check::at_most("registration of 64 KiB over that of 4 KiB", ratio((REGISTER, 64), (REGISTER, 4))?, 8.0),
        Check::at_most("256 KiB: hit of the cache over copy", ratio((HIT, 256), (COPY, 256))?, 0.5),
    ])
}

fn beside_registration(data: &Data<'_>) -> Vec<Beside> {
    let at = |series, kib: u64| data.at(COST, series, (kib * KIB) as f64);
    let meeting = data.points(COST, REGISTER).and_then(|register| {
        let copy = data.points(COST, COPY)?;
        let first = register.iter().zip(&copy).find(|((_, register), (_, copy))| copy > register);
        Ok(first.map_or_else(|| "at no size".to_owned(), |((x, _), _)| byway_remote::units::show_size(*x as u64)))
    });
    vec![
        Beside {
            what: "registration is dearer than the copy up to about",
            place: "fig. 6, dual Xeon 2.6 GHz, Myrinet GM; its curves are not in the text at hand, which says that copying may \
                    replace registering",
            paper: "not given as a number",
            here: meeting.unwrap_or_else(|_| "not measured".to_owned()),
        },
        Beside {
            what: "to register the least",
            place: "Dalessandro and Wyckoff, HotI 2007, slide Memory Registration (4 bytes; deregistering 30 to 50 us more)",
            paper: "30 us",
            here: said(at(REGISTER, 4), "us, both, 4 KiB"),
        },
        Beside {
            what: "to register 1 MB",
            place: "the same slide",
            paper: "100 us",
            here: said(at(REGISTER, 1024), "us, both, 1 MiB"),
        },
    ]
}

const KINDS: &str = "kinds of access";
const SEGMENTS: &str = "segments";
const KINDS_CPU: &str = "CPU by kind of access";
const SEGMENTS_CPU: &str = "CPU by segments";
const TOGETHER: u64 = 256 * KIB;
const PAGES: [&str; 4] = ["pages, one by one", "pages, 16 outstanding", "64 segments", "one segment"];

/// Two files of which each 4 KiB come from the other: a read of 256 KiB has 64 segments.
fn start_access(session: &Session) -> Result<Server, RunError> {
    let bytes = if session.scale.quick { 16 << 20 } else { 128 << 20 };
    let paths = ["left", "right"].map(|name| session.image(name, bytes).map(|path| path.display().to_string()));
    let [left, right] = paths;
    let (left, right) = (left?, right?);
    let volumes = [
        "memory=mem:64M".to_owned(),
        format!("cached=\"{left}\",ro"),
        format!("direct=\"{left}\",ro,direct"),
        format!("vectored=stripe:chunk=4K:\"{left}\":\"{right}\",ro"),
    ];
    let mut arguments: Vec<String> = volumes.into_iter().flat_map(|volume| ["--volume".to_owned(), volume]).collect();
    arguments.extend(["--listen".to_owned(), "tcp://127.0.0.1:0".to_owned()]);
    Server::start(&arguments, 1, None)
}

fn run_access(session: &mut Session) -> Result<Measured, RunError> {
    let server = start_access(session)?;
    let sizes = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];
    let sizes = session.scale.points(&sizes, &sizes[..1]);
    let time = session.scale.time;
    // A memory volume that was never written has no pages.
    let fill = Requests { bytes: 1 << 20, outstanding: 4, writes: true };
    Load::open(&server, "byway", "memory")?.run(fill, time)?;
    let (mut kinds, mut segments) = (Gathered::default(), Gathered::default());
    let (mut kinds_cpu, mut segments_cpu) = (CpuPoints::default(), CpuPoints::default());
    for round in 1..=session.scale.rounds {
        session.say(&format!("goglin-access, round {round}"));
        for (name, volume) in [("memory", "memory"), ("page cache", "cached"), ("disk", "direct")] {
            let mut load = Load::open(&server, "byway", volume)?;
            for &bytes in sizes {
                let rate = load.run(Requests { bytes, outstanding: 1, writes: false }, time)?;
                kinds.add(name, bytes as f64, rate.megabytes_per_second);
                kinds_cpu.add(name, bytes as f64, &rate);
            }
        }
        for (at, (volume, bytes, outstanding)) in
            [("cached", 4 * KIB, 1), ("cached", 4 * KIB, 16), ("vectored", TOGETHER, 1), ("cached", TOGETHER, 1)]
                .into_iter()
                .enumerate()
        {
            let mut load = Load::open(&server, "byway", volume)?;
            let rate = load.run(Requests { bytes, outstanding, writes: false }, time)?;
            segments.add("page cache", at as f64, rate.megabytes_per_second);
            if outstanding == 1 {
                segments_cpu.add("page cache", at as f64, &rate);
            }
        }
    }
    let bandwidth = |scale| Axis { label: "bandwidth", unit: "MB/s", scale };
    let by_size = || Axis { label: "request", unit: "bytes", scale: Scale::Bytes };
    let by_how = || Axis { label: "requests", unit: "", scale: Scale::Names(PAGES.to_vec()) };
    let kinds = Plot {
        name: KINDS,
        title: "One read at a time, by where its bytes are".to_owned(),
        x: by_size(),
        y: bandwidth(Scale::Decades),
        series: kinds.series(),
    };
    let segments = Plot {
        name: SEGMENTS,
        title: "How the bytes are asked for".to_owned(),
        x: by_how(),
        y: bandwidth(Scale::Linear),
        series: segments.series(),
    };
    let cpu = [
        kinds_cpu.plot(KINDS_CPU, "CPU of a read, one at a time, by where its bytes are", by_size()),
        segments_cpu.plot(SEGMENTS_CPU, "CPU of a request, one at a time, by how the bytes are asked for", by_how()),
    ];
    let setup = vec![
        "One event loop, byway's own protocol, TCP over loopback.".to_owned(),
        cpu::HOW.to_owned(),
        "64 segments: a stripe of two files with a chunk of 4 KiB, whose pieces are gathered into one send.".to_owned(),
    ];
    Ok(Measured { setup, plots: [kinds, segments].into_iter().chain(cpu).collect() })
}

fn judge_access(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let how = |at: usize| data.at(SEGMENTS, "page cache", at as f64);
    let small = |kind| data.at(KINDS, kind, (4 * KIB) as f64);
    let ratio = |over: f64, under: f64| over / under.max(1e-9);
    Ok(vec![
        Check::at_least("pages: 16 outstanding over one by one", ratio(how(1)?, how(0)?), 2.0),
        Check::at_least("64 segments over pages, 16 outstanding", ratio(how(2)?, how(1)?), 1.2),
        Check::at_most("4 KiB: disk over page cache", ratio(small("disk")?, small("page cache")?), 0.9),
    ])
}

fn beside_access(data: &Data<'_>) -> Vec<Beside> {
    let how = |at: usize| data.at(SEGMENTS, "page cache", at as f64);
    let page = how(0).map(|rate| 4096.0 / rate.max(1e-9));
    let twice = how(1).and_then(|many| how(0).map(|one| many / one.max(1e-9)));
    let whole = how(2).and_then(|many| how(3).map(|one| many / one.max(1e-9)));
    vec![
        Beside {
            what: "a page through the cache, one by one",
            place: "section 4.3: MX (GM: 76 us)",
            paper: "54 us",
            here: said(page, "us"),
        },
        Beside {
            what: "block access over cached file access",
            place: "section 4.4, fig. 15",
            paper: "twice",
            here: said(twice, "times"),
        },
        Beside {
            what: "many segments over one",
            place: "section 4.4: vectored, the whole link may be used (2 Gb/s, 250 MB/s)",
            paper: "about 1",
            here: said(whole, "times"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    #[test]
    fn the_rule_of_registration_says_yes_and_no() {
        let verdict = |register: [f64; 3], copy: [f64; 3], hit: f64| {
            let at = |us: [f64; 3]| [(4096.0, us[0]), (65_536.0, us[1]), (16_777_216.0, us[2])];
            let copies = [at(copy).as_slice(), &[(262_144.0, 6.0)]].concat();
            let series = [(REGISTER, &at(register)[..]), (COPY, &copies), (HIT, &[(262_144.0, hit)])];
            Verdict::of(judge_registration(&Data(&[made::plot(COST, &series)]))).word()
        };
        let (register, copy) = ([1.3, 2.7, 680.0], [0.06, 0.9, 1100.0]);
        assert_eq!(verdict(register, copy, 0.3), "holds");
        assert_eq!(verdict([0.06, 2.7, 680.0], copy, 0.3), "does not hold", "registration is cheap");
        assert_eq!(verdict(register, [0.06, 0.9, 600.0], 0.3), "does not hold", "the copy is never dearer");
        assert_eq!(verdict([1.3, 20.8, 680.0], copy, 0.3), "does not hold", "all of it is by the page");
        assert_eq!(verdict(register, copy, 5.0), "does not hold", "a hit saves nothing");
    }

    #[test]
    fn the_rule_of_access_says_yes_and_no() {
        let verdict = |many: f64, vectored: f64, disk: f64| {
            let segments = [("page cache", &[(0.0, 100.0), (1.0, many), (2.0, vectored), (3.0, 2000.0)][..])];
            let kinds = [("disk", &[(4096.0, disk)][..]), ("page cache", &[(4096.0, 100.0)])];
            let plots = [made::plot(SEGMENTS, &segments), made::plot(KINDS, &kinds)];
            Verdict::of(judge_access(&Data(&plots))).word()
        };
        assert_eq!(verdict(500.0, 1500.0, 30.0), "holds");
        assert_eq!(verdict(150.0, 1500.0, 30.0), "does not hold");
        assert_eq!(verdict(1400.0, 1500.0, 30.0), "does not hold");
        assert_eq!(verdict(500.0, 1500.0, 99.0), "does not hold");
    }
}
