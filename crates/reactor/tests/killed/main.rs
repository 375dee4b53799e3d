//! Peers that are killed at random moments, many times: of a stream over shared memory and of an arena that was lent. Who
//! survives goes on serving others, has let go of all that the dead one brought, and finds right whatever was said to be
//! done.
//!
//! 80 kills; `BYWAY_LONG=1` for 4,000. Moments are not repeatable; `BYWAY_KILL_SEED` repeats what is asked and when the kill
//! is meant to be.

mod client;
mod process;
mod server;
mod wire;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use byway_reactor::{Instant, IoChoice, Reactor};

use client::{Client, Session};
use process::{Process, Role};
use server::Server;
use wire::Random;

/// Kills between two counts of what is held.
const BATCH: u64 = 10;
/// How long nothing takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often something that may be due is looked at.
const TICK: Duration = Duration::from_millis(2);

/// Kills in each test.
fn kills() -> u64 {
    if std::env::var_os("BYWAY_LONG").is_some() { 1000 } else { 20 }
}

/// Descriptors of this process are counted: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn random() -> Random {
    let given = std::env::var("BYWAY_KILL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("BYWAY_KILL_SEED={seed}");
    Random(seed)
}

/// What this process has of its peers' and its own.
#[derive(Debug, PartialEq, Eq)]
struct HeldResources {
    descriptors: usize,
    mappings: usize,
    frame_bytes: usize,
}

impl HeldResources {
    fn by(reactor: &Reactor) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: maps.lines().filter(|line| line.contains("/memfd:byway-")).count(),
            frame_bytes: reactor.frames().bytes() - reactor.frames().free_bytes(),
        }
    }
}

/// When a victim dies: so long after it was started, which may be before it has done anything, or after it has begun.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Started(Duration),
    Busy(Duration),
}

impl Moment {
    fn any(random: &mut Random) -> Self {
        let after = Duration::from_micros(random.below(12_000));
        if random.below(3) == 0 { Self::Started(after) } else { Self::Busy(after / 3) }
    }
}

/// Whether there is such a backend; said aloud if not.
fn usable(io: IoChoice) -> bool {
    let is_usable = io == IoChoice::Epoll || Reactor::open(io, 1).is_ok();
    if !is_usable {
        byway_skip::skip_this(byway_skip::NO_IO_URING);
    }
    is_usable
}

/// Turns a server until something is so.
fn until(server: &mut Server, mut so: impl FnMut(&Server) -> bool) {
    let deadline = server.reactor.now() + PATIENCE;
    while !so(server) {
        let now = server.reactor.now();
        assert!(now < deadline, "it never comes: {} clients", server.client_count());
        server.turn(now + TICK);
    }
}

/// Has the one client that stays wait, and counts what is held; waits for it to be what it was `at_first`.
fn held_at_rest(server: &mut Server, at_first: Option<&HeldResources>) -> HeldResources {
    server.hold(true);
    until(server, |server| server.client_count() == 1 && server.is_held());
    let deadline = server.reactor.now() + PATIENCE;
    let held = loop {
        let (held, now) = (HeldResources::by(&server.reactor), server.reactor.now());
        if at_first.is_none_or(|at_first| *at_first == held) || now >= deadline {
            break held;
        }
        server.turn(now + TICK);
    };
    server.hold(false);
    held
}

fn a_server_survives(io: IoChoice) {
    let _alone = alone();
    if !usable(io) {
        return;
    }
    let mut random = random();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut server = Server::new(io, &path);
    let mut steady = Process::start(Role::Client, io, &path, random.below(u64::MAX));
    // Its ring and its arena are mapped then: an arena is when it is first used.
    until(&mut server, |server| server.answered() > 3 && HeldResources::by(&server.reactor).mappings == 2);
    let at_first = held_at_rest(&mut server, None);
    let mut busy_kills = 0;
    for batch in 0..kills().div_ceil(BATCH) {
        let answered = server.answered();
        for _ in 0..BATCH / 2 {
            let mut victims = [(); 2].map(|()| {
                let victim = Process::start(Role::Client, io, &path, random.below(u64::MAX));
                Some((victim, Moment::any(&mut random), None))
            });
            let (begun, accepted) = (server.reactor.now(), server.accepted);
            until(&mut server, |server| {
                let (now, busy) = (server.reactor.now(), server.accepted > accepted);
                for place in &mut victims {
                    let Some((_, moment, at)) = place else { continue };
                    let due = match *moment {
                        Moment::Started(after) => Some(begun + after),
                        Moment::Busy(after) if busy => Some(*at.get_or_insert(now + after)),
                        Moment::Busy(_) => None,
                    };
                    if due.is_some_and(|due| now >= due)
                        && let Some((mut victim, ..)) = place.take()
                    {
                        victim.kill();
                        busy_kills += u64::from(busy);
                    }
                }
                victims.iter().all(Option::is_none)
            });
        }
        until(&mut server, |server| server.client_count() == 1);
        assert_eq!(held_at_rest(&mut server, Some(&at_first)), at_first, "after batch {batch}");
        until(&mut server, |server| server.answered() > answered);
        steady.assert_is_well();
    }
    assert!(busy_kills > kills() / 4, "{busy_kills} of the killed had come to connect: the test kills too early");
    drop(server);
    steady.ends_well();
}

#[test]
fn a_server_survives_its_clients_over_uring() {
    a_server_survives(IoChoice::Uring);
}

#[test]
fn a_server_survives_its_clients_over_epoll() {
    a_server_survives(IoChoice::Epoll);
}

/// Opens a session with a server that may not listen yet. `None` when it is dead.
fn open(
    client: &mut Client,
    path: &std::path::Path,
    meanwhile: client::Meanwhile<'_>,
    dead: &std::cell::Cell<bool>,
) -> Option<Session> {
    loop {
        if let Ok(session) = client.open(path, meanwhile) {
            return Some(session);
        }
        if dead.get() {
            return None;
        }
        client.pause(meanwhile);
    }
}

fn a_client_survives(io: IoChoice) {
    let _alone = alone();
    if !usable(io) {
        return;
    }
    let mut random = random();
    let folder = tempfile::tempdir().unwrap();
    let mut client = Client::new(io, random.below(u64::MAX));
    let (never, mut tick) = (std::cell::Cell::new(false), |now: Instant| now + TICK);
    let steady_path = folder.path().join("steady");
    let mut steady = Process::start(Role::Server, io, &steady_path, 0);
    let steady_session = open(&mut client, &steady_path, &mut tick, &never).expect("it lives");
    client.step(&steady_session, &mut tick).unwrap();
    let at_first = HeldResources::by(&client.reactor);
    let mut steps = 0u64;
    for kill in 0..kills() {
        let path = folder.path().join(format!("victim-{kill}"));
        let mut victim = Process::start(Role::Server, io, &path, 0);
        let (begun, moment) = (client.reactor.now(), Moment::any(&mut random));
        let (dead, due) = (std::cell::Cell::new(false), std::cell::Cell::new(None));
        if let Moment::Started(after) = moment {
            due.set(Some(begun + after));
        }
        let mut meanwhile = |now: Instant| {
            assert!(now.since(begun) < PATIENCE, "the death of a server is not noticed");
            if due.get().is_some_and(|due| now >= due) && !dead.replace(true) {
                victim.kill();
            }
            due.get().filter(|_| !dead.get()).unwrap_or(now + TICK).min(now + TICK)
        };
        if let Some(session) = open(&mut client, &path, &mut meanwhile, &dead) {
            if let Moment::Busy(after) = moment {
                due.set(Some(client.reactor.now() + after));
            }
            while client.step(&session, &mut meanwhile).is_ok() {
                steps += 1;
                meanwhile(client.reactor.now());
            }
            assert!(dead.get(), "a step fails when the server is dead, and not before");
            client.close(session);
        }
        client.step(&steady_session, &mut tick).unwrap();
        let deadline = client.reactor.now() + PATIENCE;
        while HeldResources::by(&client.reactor) != at_first && client.reactor.now() < deadline {
            client.pause(&mut tick);
        }
        assert_eq!(HeldResources::by(&client.reactor), at_first, "after kill {kill}");
        steady.assert_is_well();
    }
    assert!(steps > kills(), "{steps} requests were answered before the kills: the test kills too early");
    client.close(steady_session);
    steady.kill();
}

#[test]
fn a_client_survives_its_servers_over_uring() {
    a_client_survives(IoChoice::Uring);
}

#[test]
fn a_client_survives_its_servers_over_epoll() {
    a_client_survives(IoChoice::Epoll);
}

/// What a process does that another of these tests has started; nothing otherwise.
#[test]
fn started_process() {
    let Some((role, io, path, seed)) = process::asked_for() else { return };
    process::die_with_parent();
    match role {
        Role::Server => {
            let mut server = Server::new(io, &path);
            loop {
                server.turn(server.reactor.now() + PATIENCE);
            }
        }
        Role::Client => {
            let mut client = Client::new(io, seed);
            let mut tick = |now: Instant| now + PATIENCE;
            let Ok(session) = client.open(&path, &mut tick) else { return };
            while client.step(&session, &mut tick).is_ok() {}
            client.close(session);
        }
    }
}
