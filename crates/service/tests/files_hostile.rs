//! A client that keeps to no rule, against the wire: it must reach nothing outside of the share, and harm nobody.

mod file_server;

use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, NodeOptions, OpError, Rights, Session, SubmitError};
use byway_fabric::random::Random;
use byway_reactor::Errno;
use byway_rpc::message::Status;
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::protocol::CALLS_FILES;
use byway_service::block::spec::VolumeName;
use byway_service::file::client::{Caller, Client, ClientOptions, ROOT};
use byway_service::file::wire::{
    Arguments, CallError, ClientName, Entry, FLAG_WHOLE, Forgotten, GrantedLeases, Method, NewAttributes, OpenResult,
    PROTOCOL, SET_MODE,
};
use byway_service::file::{Share, ShareSpec, Users};
use byway_service::limits::{FILE_DESCRIPTORS_LEFT, FILE_HANDLES_MAX, FILE_LOCKS_MAX, FILE_SLOTS};
use file_server::{Server, exclusive, share, tcp};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// How long a call that stays open is watched.
const SETTLED: Duration = Duration::from_millis(200);

/// The wire itself.
struct Wire {
    rpc: Rpc,
    session: Session,
    name: ClientName,
}

impl Wire {
    fn connect(server: &Server) -> Self {
        let rpc = Rpc::open_for(&NodeOptions::default(), vec![CALLS_FILES]).unwrap();
        let session = rpc.node().connect(&server.at, Deadline::after(Duration::from_secs(20))).unwrap();
        Self { rpc, session, name: Random::from_kernel().bytes16() }
    }

    fn ask(&self, method: u16, arguments: &[u8], payload: &[u8]) -> Result<Reply, CallError> {
        let call = Call { protocol: PROTOCOL, method, arguments, payload, ..Call::default() };
        let soon = Deadline::after(Duration::from_secs(20));
        match self.rpc.call(self.session, &call, soon).unwrap().wait(soon).unwrap() {
            Ok(outcome) => Ok(Reply::of(outcome).unwrap()),
            Err(OpError::Status(status)) => Err(CallError::from_status(status)),
            Err(error) => panic!("the session ended: {error}"),
        }
    }

    fn call(&self, method: Method, arguments: &Arguments, payload: &[u8]) -> Result<Reply, CallError> {
        self.ask(method as u16, arguments.as_bytes(), payload)
    }

    fn attach(&self) -> u64 {
        self.attach_to(b"share")
    }

    fn attach_to(&self, share: &[u8]) -> u64 {
        let payload = [share, &self.name].concat();
        let reply = self.call(Method::Attach, &named(0, share), &payload).unwrap();
        Entry::read_from_prefix(&reply.payload).unwrap().0.node.get()
    }

    fn look_up(&self, node: u64, name: &[u8]) -> Result<Entry, CallError> {
        let reply = self.call(Method::LookUp, &named(node, name), name)?;
        Ok(Entry::read_from_prefix(&reply.payload).unwrap().0)
    }
}

fn named(node: u64, name: &[u8]) -> Arguments {
    Arguments { node: node.into(), name_len: (name.len() as u16).into(), ..Arguments::new_zeroed() }
}

fn errno(errno: Errno) -> CallError {
    CallError::Errno(errno)
}

#[test]
fn names_lead_nowhere_but_down() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("share");
    std::fs::create_dir_all(below.join("directory")).unwrap();
    std::fs::write(folder.path().join("secret"), "secret").unwrap();
    symlink("/", below.join("absolute")).unwrap();
    symlink("../secret", below.join("relative")).unwrap();
    symlink(&below, below.join("inside")).unwrap();
    let server = Server::start(tcp(), vec![share(&below, Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let root = wire.attach();
    let bad = [&b".."[..], b".", b"", b"/", b"/etc", b"a/b", b"directory/../..", b"..//", b"a\0b", b"\0"];
    for name in bad {
        for method in [
            Method::LookUp,
            Method::Create,
            Method::MakeDirectory,
            Method::MakeNode,
            Method::MakeSymlink,
            Method::Unlink,
            Method::RemoveDirectory,
            Method::Rename,
        ] {
            let said = wire.call(method, &Arguments { second: root.into(), ..named(root, name) }, name).unwrap_err();
            assert_eq!(said, errno(Errno::INVAL), "{method:?} {name:?}");
        }
        // As the new name, too.
        let arguments =
            Arguments { second: root.into(), second_name_len: (name.len() as u16).into(), ..named(root, b"directory") };
        let payload = [b"directory", name].concat();
        assert_eq!(wire.call(Method::Rename, &arguments, &payload).unwrap_err(), errno(Errno::INVAL), "{name:?}");
        assert_eq!(wire.call(Method::Link, &named(root, name), name).unwrap_err(), CallError::Stale);
    }
    assert_eq!(wire.look_up(root, &[b'x'; 255]), Err(errno(Errno::NOENT)));
    assert_eq!(wire.look_up(root, &[b'x'; 256]), Err(errno(Errno::NAMETOOLONG)));
    for link in [&b"absolute"[..], b"relative", b"inside"] {
        let node = wire.look_up(root, link).unwrap().node.get();
        assert_eq!(wire.look_up(node, b"secret"), Err(errno(Errno::NOTDIR)), "a link is not followed");
        assert_eq!(wire.call(Method::Open, &named(node, b""), b"").unwrap_err(), errno(Errno::OPNOTSUPP));
        assert_eq!(wire.call(Method::OpenDirectory, &named(node, b""), b"").unwrap_err(), errno(Errno::NOTDIR));
        // Made through a link, it would lie outside.
        let create = Arguments { mode: 0o644.into(), flags: 1.into(), ..named(root, link) };
        assert_eq!(wire.call(Method::Create, &create, link).unwrap_err(), errno(Errno::EXIST));
        let mut new = NewAttributes::new_zeroed();
        (new.which, new.size) = (8.into(), 0.into());
        let said = wire.call(Method::SetAttributes, &named(node, b""), new.as_bytes()).unwrap_err();
        assert_eq!(said, errno(Errno::INVAL), "no truncation through a link");
    }
    assert_eq!(std::fs::read(folder.path().join("secret")).unwrap(), b"secret");
}

#[test]
fn directories_and_links_that_are_swapped_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("share");
    std::fs::create_dir_all(below.join("real")).unwrap();
    std::fs::create_dir_all(folder.path().join("outside")).unwrap();
    std::fs::write(folder.path().join("outside/file"), "secret").unwrap();
    std::fs::write(below.join("real/file"), "shared").unwrap();
    symlink("../outside", below.join("link")).unwrap();
    let server = Server::start(tcp(), vec![share(&below, Users::Owner, false)]);
    let client = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
    let me = Caller::default();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // One name is by turns the directory and the link that leads out.
            while !stop.load(Ordering::Relaxed) {
                for name in ["real", "link"] {
                    std::fs::rename(below.join(name), below.join("name")).unwrap();
                    std::fs::rename(below.join("name"), below.join(name)).unwrap();
                }
            }
        });
        let mut found = 0;
        for _ in 0..20_000 {
            let Ok(directory) = client.look_up(me, ROOT, b"name") else { continue };
            if let Ok(file) = client.look_up(me, directory.node, b"file") {
                let handle = client.open(me, file.node, 0).unwrap();
                let mut bytes = [0; 6];
                client.read(me, handle, 0, &mut bytes).unwrap();
                client.close_handle(handle);
                client.forget(file.node, 1);
                assert_eq!(&bytes, b"shared");
                found += 1;
            }
            client.forget(directory.node, 1);
            if found > 100 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(found > 0, "the race was run");
    });
}

#[test]
fn forged_and_stale_names_are_refused() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let (wire, other) = (Wire::connect(&server), Wire::connect(&server));
    let file_of = |wire: &Wire| wire.look_up(wire.attach(), b"file").unwrap().node.get();
    let (file, _) = (file_of(&wire), file_of(&other));
    let reply = other.call(Method::Open, &named(file_of(&other), b""), b"").unwrap();
    let handle = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle.get();
    // The other session's handle is none here, whatever its number.
    for number in [0, 1, u64::MAX, 1 << 32, handle, handle + 1, handle ^ 1 << 32] {
        for method in [Method::Read, Method::Write, Method::Sync, Method::ReadDirectory, Method::Lock, Method::Close] {
            assert_eq!(wire.call(method, &named(number, b""), b"").unwrap_err(), CallError::Stale, "{method:?}");
        }
    }
    for number in [0, u64::MAX, 99 << 32, (1 << 32) + 77] {
        for method in [Method::GetAttributes, Method::Open, Method::ReadLink, Method::StatFileSystem, Method::Access] {
            assert_eq!(wire.call(method, &named(number, b""), b"").unwrap_err(), CallError::Stale, "{method:?}");
        }
    }
    // What was forgotten is gone, and forgetting more than there was does no harm.
    let forget = |count: u64| Forgotten { node: file.into(), count: count.into() };
    let all = [forget(u64::MAX), forget(5), Forgotten { node: u64::MAX.into(), count: 1.into() }];
    wire.call(Method::Forget, &Arguments::new_zeroed(), all.as_bytes()).unwrap();
    assert_eq!(wire.call(Method::GetAttributes, &named(file, b""), b"").unwrap_err(), CallError::Stale);
    let again = wire.look_up(wire.attach(), b"file").unwrap().node.get();
    assert_ne!(again, file);
    // Before it has attached, a session has nothing.
    let third = Wire::connect(&server);
    assert_eq!(third.call(Method::GetAttributes, &named(1 << 32, b""), b"").unwrap_err(), CallError::Stale);
    assert_eq!(third.call(Method::Attach, &named(0, b"other"), b"other").unwrap_err(), CallError::NoShare);
}

#[test]
fn attaches_at_once_leave_one_session() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let payload = [b"share".as_slice(), &wire.name].concat();
    let arguments = named(0, b"share");
    let (method, arguments) = (Method::Attach as u16, arguments.as_bytes());
    let call = Call { protocol: PROTOCOL, method, arguments, payload: &payload, ..Call::default() };
    let soon = || Deadline::after(Duration::from_secs(20));
    let attaches: Vec<_> = (0..16).map(|_| wire.rpc.call(wire.session, &call, soon()).unwrap()).collect();
    let answers: Vec<_> = attaches.into_iter().map(|op| op.wait(soon()).unwrap().map(|_| ())).collect();
    assert_eq!(answers[0], Ok(()));
    let busy = OpError::Status(CallError::Busy.status());
    assert!(answers.iter().all(|answer| *answer == Ok(()) || *answer == Err(busy)), "{answers:?}");
    let root = wire.attach();
    assert_eq!(wire.look_up(root, b"missing"), Err(errno(Errno::NOENT)), "the session goes on");
}

#[test]
fn attributes_are_of_the_node_that_is_named() {
    let below = tempfile::tempdir().unwrap();
    for name in ["one", "other"] {
        std::fs::write(below.path().join(name), "bytes").unwrap();
    }
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let root = wire.attach();
    let [one, other] = [&b"one"[..], b"other"].map(|name| wire.look_up(root, name).unwrap().node.get());
    let reply = wire.call(Method::Open, &Arguments { flags: 2.into(), ..named(other, b"") }, b"").unwrap();
    let handle = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle;
    let by_handle = |node| Arguments { second: handle, ..named(node, b"") };
    let mut new = NewAttributes::new_zeroed();
    (new.which, new.size) = (8.into(), 0.into());
    for (method, data) in [(Method::SetAttributes, new.as_bytes()), (Method::GetAttributes, &[])] {
        assert_eq!(wire.call(method, &by_handle(one), data).unwrap_err(), CallError::Malformed, "{method:?}");
    }
    assert_eq!(std::fs::read(below.path().join("other")).unwrap(), b"bytes", "left as it was");
    wire.call(Method::GetAttributes, &by_handle(other), b"").unwrap();
    wire.call(Method::SetAttributes, &by_handle(other), new.as_bytes()).unwrap();
    assert_eq!(std::fs::read(below.path().join("other")).unwrap(), b"");
}

#[test]
fn wrong_forms_and_sizes_are_refused() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), vec![7; 100_000]).unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let root = wire.attach();
    let file = wire.look_up(root, b"file").unwrap().node.get();
    let open = Arguments { flags: 2.into(), ..named(file, b"") };
    let reply = wire.call(Method::Open, &open, b"").unwrap();
    let handle = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle;
    // Names and groups that the payload does not have.
    let long = |n: u16, s: u16, g: u8| Arguments {
        name_len: n.into(),
        second_name_len: s.into(),
        group_count: g,
        ..named(root, b"")
    };
    for arguments in [long(5, 0, 0), long(0, 5, 0), long(0, 0, 2), long(0, 0, 255), long(u16::MAX, u16::MAX, 64)] {
        assert_eq!(wire.call(Method::LookUp, &arguments, b"file").unwrap_err(), CallError::Malformed);
    }
    let on =
        |len: u64, offset: u64| Arguments { len: len.into(), offset: offset.into(), node: handle, ..named(0, b"") };
    // Long transfers without a window, or longer than any.
    for len in [16_385, 1 << 20, (1 << 20) + 1, u64::MAX] {
        assert_eq!(wire.call(Method::Read, &on(len, 0), b"").unwrap_err(), CallError::Malformed);
        assert_eq!(wire.call(Method::Write, &on(len, 0), b"").unwrap_err(), CallError::Malformed);
    }
    assert_eq!(wire.call(Method::Write, &on(5, 0), b"four").unwrap_err(), CallError::Malformed);
    assert_eq!(wire.call(Method::Read, &on(5, u64::MAX), b"").unwrap_err(), errno(Errno::INVAL));
    assert_eq!(wire.call(Method::Write, &on(4, i64::MAX as u64), b"four").unwrap_err(), errno(Errno::INVAL));
    // A window that is shorter than the write says, and one that closes before it is got.
    let memory = wire.rpc.node().register_shared(1 << 20).unwrap();
    let window = wire.rpc.node().open_window(wire.session, &memory, 0..20_000, Rights::BOTH).unwrap();
    let arguments = on(30_000, 0);
    let call = Call {
        protocol: PROTOCOL,
        method: Method::Write as u16,
        arguments: arguments.as_bytes(),
        windows: &[window.descriptor()],
        payload: &[],
    };
    let soon = || Deadline::after(Duration::from_secs(20));
    let refused = wire.rpc.call(wire.session, &call, soon()).unwrap().wait(soon()).unwrap();
    assert_eq!(refused, Err(OpError::Status(CallError::Malformed.status())));
    let descriptor = window.descriptor();
    window.close().unwrap().wait(soon()).unwrap().unwrap();
    let arguments = on(20_000, 0);
    let call = Call { arguments: arguments.as_bytes(), windows: &[descriptor], ..call };
    let refused = wire.rpc.call(wire.session, &call, soon()).unwrap().wait(soon()).unwrap();
    assert_eq!(refused, Err(OpError::Status(CallError::Malformed.status())), "the window is gone");
    assert!(std::fs::read(below.path().join("file")).unwrap() == vec![7; 100_000], "nothing was written");
    knows_no_other_forms(&wire, root, file, handle.get());
}

/// Methods, flags and types that there are not.
fn knows_no_other_forms(wire: &Wire, root: u64, file: u64, handle: u64) {
    assert_eq!(wire.ask(0, &[], &[]).unwrap_err(), CallError::UnknownMethod);
    assert_eq!(wire.ask(1000, &[], &[]).unwrap_err(), CallError::UnknownMethod);
    for name in [&b""[..], b"short", &[7; 17]] {
        let payload = [b"share", name].concat();
        assert_eq!(wire.call(Method::Attach, &named(0, b"share"), &payload).unwrap_err(), CallError::Malformed);
    }
    let other_name = [&b"share"[..], &[7; 16]].concat();
    assert_eq!(wire.call(Method::Attach, &named(0, b"share"), &other_name).unwrap_err(), CallError::Malformed);
    let slot = Arguments { slot: FILE_SLOTS + 1, ..named(file, b"") };
    assert_eq!(wire.call(Method::GetAttributes, &slot, b"").unwrap_err(), CallError::Malformed);
    let device = Arguments { mode: 0o060_644.into(), ..named(root, b"disk") };
    assert_eq!(wire.call(Method::MakeNode, &device, b"disk").unwrap_err(), errno(Errno::PERM));
    let whiteout =
        Arguments { second: root.into(), flags: 4.into(), second_name_len: 1.into(), ..named(root, b"file") };
    assert_eq!(wire.call(Method::Rename, &whiteout, b"filex").unwrap_err(), errno(Errno::INVAL));
    let seek = Arguments { mode: 2.into(), ..named(handle, b"") };
    assert_eq!(wire.call(Method::Seek, &seek, b"").unwrap_err(), errno(Errno::INVAL));
    assert_eq!(wire.call(Method::SetAttributes, &named(file, b""), b"short").unwrap_err(), CallError::Malformed);
    assert_eq!(wire.call(Method::GetXattr, &named(file, b"user.\0x"), b"user.\0x").unwrap_err(), errno(Errno::INVAL));
    let target = Arguments { second_name_len: 4096.into(), ..named(root, b"link") };
    let payload = [&b"link"[..], &[b'x'; 4096]].concat();
    assert_eq!(wire.call(Method::MakeSymlink, &target, &payload).unwrap_err(), errno(Errno::NAMETOOLONG));
    // A directory is not read as a file, nor a file listed.
    let reply = wire.call(Method::OpenDirectory, &named(root, b""), b"").unwrap();
    let directory = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle;
    let on_directory = Arguments { node: directory, len: 10.into(), ..Arguments::new_zeroed() };
    assert_eq!(wire.call(Method::Read, &on_directory, b"").unwrap_err(), errno(Errno::ISDIR));
    assert_eq!(wire.call(Method::ReadDirectory, &named(handle, b""), b"").unwrap_err(), errno(Errno::NOTDIR));
}

/// Opens that are asked for beyond the limit.
fn opens_too_many() -> usize {
    if std::env::var_os("BYWAY_LONG").is_some() { 1_000_000 } else { 20_000 }
}

/// Gives this process room for all descriptors that one client may make the server hold; says whether there is.
fn has_descriptors_for_all_handles() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = (FILE_HANDLES_MAX as u64 + 2000) * FILE_DESCRIPTORS_LEFT / (FILE_DESCRIPTORS_LEFT - 1);
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    // Root alone may exceed the hard limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    getrlimit(Resource::Nofile).current.is_none_or(|current| current >= wanted)
}

/// Opens a file as often as asked, many at a time; each must be refused by that name.
fn is_refused_each_open(wire: &Wire, open: &Arguments, attempts: usize, refusal: CallError) {
    const AT_ONCE: usize = 100;
    let call = Call { protocol: PROTOCOL, method: Method::Open as u16, arguments: open.as_bytes(), ..Call::default() };
    for _ in 0..attempts / AT_ONCE {
        let soon = Deadline::after(Duration::from_secs(20));
        let calls: Vec<_> = (0..AT_ONCE).map(|_| wire.rpc.call(wire.session, &call, soon).unwrap()).collect();
        for call in calls {
            assert_eq!(call.wait(soon).unwrap().map(drop), Err(OpError::Status(refusal.status())));
        }
    }
}

#[test]
fn one_client_cannot_take_all_handles_and_locks() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let is_whole = has_descriptors_for_all_handles();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let file = wire.look_up(wire.attach(), b"file").unwrap().node.get();
    let open = named(file, b"");
    let opened = || -> Result<u64, CallError> {
        let reply = wire.call(Method::Open, &open, b"")?;
        Ok(OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle.get())
    };
    // Where the process has too few descriptors, the limit of all clients together comes first.
    let refusal = if is_whole { CallError::TooManyOpen } else { errno(Errno::NFILE) };
    if !is_whole {
        byway_skip::skip_part_of_this(byway_skip::SkipReason::Machine("too few descriptors (ulimit -n)"));
    }
    let mut handles = Vec::new();
    let refused = loop {
        match opened() {
            Ok(handle) => handles.push(handle),
            Err(error) => break error,
        }
    };
    assert_eq!(refused, refusal);
    assert!(if is_whole { handles.len() == FILE_HANDLES_MAX } else { handles.len() > 100 }, "{}", handles.len());
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    is_refused_each_open(&wire, &open, opens_too_many(), refusal);
    assert_eq!(descriptors(), before, "refused opens leave nothing");
    for handle in handles.drain(handles.len() / 2..) {
        wire.call(Method::Close, &named(handle, b""), b"").unwrap();
    }
    let handle = opened().unwrap();
    let lock =
        |at: u64| Arguments { offset: (at * 2).into(), len: (at * 2).into(), mode: 1.into(), ..named(handle, b"") };
    // The client is put on the share's list first, and its call answered busy.
    let asked = |at| loop {
        match wire.call(Method::Lock, &lock(at), b"") {
            Err(CallError::Busy) => std::thread::yield_now(),
            answer => return answer,
        }
    };
    let refused = (0..=FILE_LOCKS_MAX as u64).find_map(|at| asked(at).err());
    assert_eq!(refused, Some(CallError::TooManyLocks));
    // Others go on.
    let other = Wire::connect(&server);
    let file = other.look_up(other.attach(), b"file").unwrap().node.get();
    other.call(Method::Open, &named(file, b""), b"").unwrap();
}

#[test]
fn who_may_only_read_has_nothing_synced() {
    let below = tempfile::tempdir().unwrap();
    for (read_only, answer) in [(true, Err(errno(Errno::ROFS))), (false, Ok(()))] {
        let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, read_only)]);
        let wire = Wire::connect(&server);
        let root = wire.attach();
        assert_eq!(wire.call(Method::SyncShare, &named(root, b""), b"").map(drop), answer);
    }
}

#[test]
fn more_calls_than_granted_wait_at_an_honest_client() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let root = wire.attach();
    let arguments = named(root, b"");
    let method = Method::GetAttributes as u16;
    let call = Call { protocol: PROTOCOL, method, arguments: arguments.as_bytes(), ..Call::default() };
    let soon = Deadline::after(Duration::from_secs(20));
    let ops: Vec<_> = std::iter::from_fn(|| match wire.rpc.call(wire.session, &call, soon) {
        Ok(op) => Some(op),
        Err(SubmitError::Busy) => None,
        Err(error) => panic!("{error}"),
    })
    .take(1000)
    .collect();
    assert!(ops.len() >= 256);
    for op in ops {
        let answered = op.wait(soon).unwrap();
        assert!(answered.is_ok() || answered == Err(OpError::Status(Status::Busy as u16)), "{answered:?}");
    }
}

#[test]
fn reads_and_writes_that_find_no_frames_wait_for_their_turn() {
    const LEN: usize = 1 << 20;
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), vec![7; LEN]).unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let wire = Wire::connect(&server);
    let file = wire.look_up(wire.attach(), b"file").unwrap().node.get();
    let reply = wire.call(Method::Open, &Arguments { flags: 2.into(), ..named(file, b"") }, b"").unwrap();
    let handle = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle;
    let memory = wire.rpc.node().register_shared(LEN).unwrap();
    let window = wire.rpc.node().open_window(wire.session, &memory, 0..LEN, Rights::BOTH).unwrap();
    let arguments = Arguments { node: handle, len: (LEN as u64).into(), ..named(0, b"") };
    // Twice as many bytes as the server has frames for.
    for methods in [[Method::Read, Method::Read], [Method::Write, Method::Read]] {
        let start = |method: Method| {
            let windows = &[window.descriptor()];
            let arguments = arguments.as_bytes();
            let call = Call { protocol: PROTOCOL, method: method as u16, arguments, windows, payload: &[] };
            wire.rpc.call(wire.session, &call, Deadline::after(Duration::from_secs(20))).unwrap()
        };
        let calls: Vec<_> = methods.into_iter().cycle().take(64).map(start).collect();
        for call in calls {
            let reply = Reply::of(call.wait(Deadline::NEVER).unwrap().unwrap()).unwrap();
            assert_eq!(reply.result[..8], (LEN as u64).to_le_bytes());
        }
    }
}

/// Leaves a call for recalls open, again and again until the server takes it, and looks the file up.
fn takes_leases(wire: &Wire, root: u64) -> bool {
    let call = Call { protocol: PROTOCOL, method: Method::Recalls as u16, ..Call::default() };
    // The first is answered busy, while the client is put on the share's list.
    while wire.rpc.call(wire.session, &call, Deadline::NEVER).unwrap().wait(Deadline::after(SETTLED)).is_ok() {}
    let reply = wire.call(Method::LookUp, &named(root, b"file"), b"file").unwrap();
    GrantedLeases::read_from_prefix(&reply.result[..]).is_ok_and(|(granted, _)| granted.on_found.get() != 0)
}

#[test]
fn a_client_is_on_the_list_of_each_share_before_it_gets_something_there() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for folder in &folders {
        std::fs::write(folder.path().join("file"), "f").unwrap();
    }
    let [one, two] = folders.each_ref().map(|folder| exclusive(folder.path()));
    let spec = ShareSpec { name: VolumeName::new("other").unwrap(), ..two.spec().clone() };
    let server = Server::start(tcp(), vec![one, Arc::new(Share::open(spec).unwrap())]);
    let listed = |entry: &str| {
        let names = std::fs::read_dir(folders[1].path().join(".byway-state")).into_iter().flatten();
        names.filter(|name| name.as_ref().unwrap().file_name().as_encoded_bytes().starts_with(entry.as_bytes())).count()
    };
    let wire = Wire::connect(&server);
    let root = wire.attach();
    let lock = |file: u64| {
        let reply = wire.call(Method::Open, &Arguments { flags: 2.into(), ..named(file, b"") }, b"").unwrap();
        let handle = OpenResult::read_from_bytes(&reply.result[..]).unwrap().handle;
        let arguments = Arguments { mode: 1.into(), flags: FLAG_WHOLE.into(), node: handle, ..named(0, b"") };
        while wire.call(Method::Lock, &arguments, b"").is_err_and(|error| error == CallError::Busy) {}
    };
    assert!(takes_leases(&wire, root));
    lock(wire.look_up(root, b"file").unwrap().node.get());
    let other = wire.attach_to(b"other");
    let reply = wire.call(Method::LookUp, &named(other, b"file"), b"file").unwrap();
    let (granted, _) = GrantedLeases::read_from_prefix(&reply.result[..]).unwrap_or_default();
    assert_eq!((granted.on_found.get(), listed("leases-")), (0, 0), "no lease before the entry");
    lock(Entry::read_from_prefix(&reply.payload).unwrap().0.node.get());
    assert_eq!(listed("locks-"), 1);
}

/// Each change waits once for a client that returns no lease, not for as often as it likes.
#[test]
fn a_client_that_returns_no_lease_gets_none_for_a_while() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let wire = Wire::connect(&server);
    let root = wire.attach();
    assert!(takes_leases(&wire, root), "as every client");
    let other = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
    let file = other.look_up(ME, ROOT, b"file").unwrap().node;
    let mut new = NewAttributes::new_zeroed();
    (new.which, new.mode) = (SET_MODE.into(), 0o600.into());
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| other.set_attributes(ME, file, None, &new).unwrap());
        let method = Method::GetAttributes as u16;
        let arguments = named(root, b"");
        let call = Call { protocol: PROTOCOL, method, arguments: arguments.as_bytes(), ..Call::default() };
        while !changing.is_finished() {
            // What it says renews its leases, until the server ends its session.
            let soon = Deadline::after(SETTLED);
            let _ = wire.rpc.call(wire.session, &call, soon).map(|op| op.wait(soon));
            std::thread::park_timeout(SETTLED);
        }
    });
    let again = Wire::connect(&server);
    assert!(!takes_leases(&again, again.attach()), "it has made a change wait");
}

#[test]
fn files_of_a_client_that_never_asks_for_them_go_with_it() {
    let below = tempfile::tempdir().unwrap();
    let state = below.path().join(".byway-state");
    std::fs::create_dir(&state).unwrap();
    // As a server process before has left it.
    let file = std::fs::File::create(state.join("new")).unwrap();
    let ino = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let name: ClientName = Random::from_kernel().bytes16();
    let link = state.join(format!("removed-{:032x}-{ino:016x}", u128::from_be_bytes(name)));
    std::fs::rename(state.join("new"), &link).unwrap();
    let other = state.join(format!("removed-{}-{ino:016x}", "0".repeat(32)));
    std::fs::hard_link(&link, &other).unwrap();
    let grace = Duration::from_secs(1);
    let server = Server::start_with(tcp(), vec![share(below.path(), Users::Owner, false)], grace, SETTLED);
    let wire = Wire { name, ..Wire::connect(&server) };
    wire.attach();
    let limit = Instant::now() + Duration::from_secs(20);
    let until_gone = |path: &std::path::Path| {
        while path.exists() {
            assert!(Instant::now() < limit, "{} stays", path.display());
            std::thread::yield_now();
        }
    };
    until_gone(&other);
    assert!(link.exists(), "the grace time is over, and its client is here");
    drop(wire);
    until_gone(&link);
}
