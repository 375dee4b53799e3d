//! The native client and server over loopback, shared memory and RDMA, on both of the kernel's backends.

mod harness;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsServer};
use byway_fabric::{Options, PayloadChecksum};
use byway_reactor::{Address, Reactor, Wait};
use byway_service::block::client::{
    BlockingVolume, ConnectError, Done, Request, Volume as Client, VolumeError, VolumeOptions, list,
};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::wire::CallError;
use byway_service::block::{BlockError, OpenHere, Store, StoreOptions, Volume, VolumeOptions as Served};
use harness::{FRAMES, Path, Running, SERVER, Wire, client, disk_folder, each_stream, each_wire, memory, pattern};

#[test]
fn what_is_written_is_read_at_every_size() {
    each_wire(|wire| {
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![memory(64 << 20)]);
        let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
        assert_eq!(volume.info().unwrap().len, 64 << 20);
        let mut offset = 512;
        for len in [512, 4096, 16 << 10, (16 << 10) + 512, 64 << 10, 300_032, 1 << 20, 8 << 20] {
            let data = pattern(len, len as u64);
            volume.write(offset, &data, false).unwrap();
            let mut back = vec![0; len];
            volume.read(offset, &mut back).unwrap();
            assert!(data == back, "{len} bytes came back changed");
            offset += len as u64;
        }
        volume.flush().unwrap();
        assert_eq!(volume.volume().unflushed_bytes(), 0);
    });
}

#[test]
fn a_list_longer_than_one_answer_is_whole() {
    each_wire(|wire| {
        let made = |index: usize| {
            let options = Served {
                read_only: index == 1,
                tls_required: index == 2,
                description: "d".repeat(if index == 3 { 0 } else { 1000 }),
                ..Served::default()
            };
            Arc::new(Volume::new(format!("v{index}"), Store::null(512 * (index as u64 + 1)), options))
        };
        let server = Running::start(wire, None, 1, Options::new(SERVER), (0..40).map(made).collect());
        let reactor = Reactor::open(wire.io, FRAMES).unwrap();
        let listed = list(reactor, server.address.clone(), Options::new(0x30), None).unwrap();
        let sizes: Vec<_> = listed.iter().map(|volume| (volume.name.clone(), volume.len)).collect();
        // On a plain wire the third, which needs TLS, is hidden, and the index of those behind it moves.
        let shown = (0..40).filter(|index| *index != 2);
        assert_eq!(sizes, shown.map(|index| (format!("v{index}"), 512 * (index + 1))).collect::<Vec<_>>());
        let flags: Vec<_> = listed.iter().take(3).map(|volume| (volume.read_only, volume.tls_required)).collect();
        assert_eq!(flags, [(false, false), (true, false), (false, false)]);
        assert_eq!((listed[2].description.as_str(), listed[3].description.len()), ("", 1000));
    });
}

#[test]
fn a_list_of_nobody_is_an_error() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rdma = byway_skip::rdma_device().map(|device| Address::Rdma(std::net::SocketAddr::new(device, 9)));
    if rdma.is_none() {
        byway_skip::skip_part_of_this(byway_skip::NO_RDMA);
    }
    for nobody in [Address::Tcp(port), Address::Shared(folder.path().join("nobody"))].into_iter().chain(rdma) {
        let reactor = Reactor::open(byway_reactor::IoChoice::Auto, FRAMES).unwrap();
        let refused = list(reactor, nobody, Options::new(0x30), None).unwrap_err();
        assert!(matches!(refused, ConnectError::Session(_)), "{refused}");
    }
}

/// Drives a client until `until` says so, or a deadline fails the test.
fn drive(
    reactor: &mut Reactor,
    client: &mut Client,
    done: &mut Vec<Done<byway_reactor::Frame>>,
    mut until: impl FnMut(&Client, &[Done<byway_reactor::Frame>]) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut completions = Vec::new();
    loop {
        client.flush(reactor);
        client.reap(done);
        if until(client, done) {
            return;
        }
        assert!(Instant::now() < deadline, "the client hangs: {} pending", client.pending());
        let wait = Wait::Until(reactor.now() + Duration::from_millis(20));
        reactor.reap(&mut completions, wait).unwrap();
        for completion in completions.drain(..) {
            client.handle(reactor, completion);
        }
    }
}

#[test]
fn many_requests_of_all_sizes_are_in_flight_together() {
    const SLOT: u64 = 1 << 20;
    each_wire(|wire| {
        // Over RDMA the device has checksums of its own.
        let checksums = if wire.path == Path::Rdma { 1 } else { 2 };
        for checksum in [PayloadChecksum::Off, PayloadChecksum::Required].into_iter().take(checksums) {
            let server = Running::start(wire, None, 1, Options::new(SERVER), vec![memory(64 << 20)]);
            let mut reactor = Reactor::open(wire.io, 64 << 20).unwrap();
            let mut options = VolumeOptions::new(0x30);
            options.fabric.terms.checksum = checksum;
            let mut client = Client::connect(&reactor, server.address.clone(), "disk", options);
            let len = |slot: u64| [512, 4096, 16_384, 17_000 / 512 * 512, 65_536, 1 << 20][slot as usize % 6];
            let mut done = Vec::new();
            let mut written = 0;
            drive(&mut reactor, &mut client, &mut done, |client, _| client.info().is_some());
            // Over shared memory, some are of memory that the server reaches, and some are not.
            let alloc = |client: &Client, reactor: &Reactor, slot: u64, len| {
                if slot.is_multiple_of(3) { reactor.frames().alloc(len) } else { client.alloc(reactor, len) }
            };
            for slot in 0..48 {
                let len = len(slot);
                let mut frame = alloc(&client, &reactor, slot, len).unwrap();
                frame.write(0, &pattern(len, slot));
                client
                    .submit(
                        Request::Write { offset: slot * SLOT, len, from: Rc::new(frame), durable: slot % 5 == 0 },
                        slot,
                    )
                    .unwrap();
            }
            drive(&mut reactor, &mut client, &mut done, |_, done| done.len() == 48);
            for done in done.drain(..) {
                assert_eq!(done.result.map(|_| ()), Ok(()));
                written += 1;
            }
            for slot in 0..48 {
                let len = len(slot);
                let Some(into) = alloc(&client, &reactor, slot, len) else { break };
                client.submit(Request::Read { offset: slot * SLOT, len, into }, slot).unwrap();
            }
            let asked = client.pending();
            drive(&mut reactor, &mut client, &mut done, |_, done| done.len() == asked);
            for done in done.drain(..) {
                assert_eq!(done.result.map(|_| ()), Ok(()));
                assert!(done.buffer.unwrap().to_vec()[..] == pattern(len(done.tag), done.tag)[..], "slot {}", done.tag);
            }
            assert!(written == 48 && asked >= 24);
            assert_eq!(client.sessions(), 1);
            let counters = server.state.lock().unwrap().counters;
            let reached = wire.path == Path::SharedMemory;
            assert_eq!(
                (counters.put_bytes > 4 << 20, counters.got_bytes > 4 << 20),
                (reached, reached),
                "{counters:?}"
            );
        }
    });
}

#[test]
fn writes_that_a_dead_server_had_acknowledged_are_written_to_the_next_one() {
    let folder = disk_folder();
    let path = folder.path().join("disk");
    let empty = || {
        let file = std::fs::File::options().write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(16 << 20).unwrap();
        let store = Store::path(&path, StoreOptions::default(), &OpenHere).unwrap();
        Arc::new(Volume::new("disk", store, Served::default()))
    };
    each_wire(|wire| {
        let mut first = Running::start(wire, None, 1, Options::new(SERVER), vec![empty()]);
        let address = first.address.clone();
        let mut volume = client(wire, &address, VolumeOptions::new(0x30)).unwrap();
        let flushed = pattern(8192, 1);
        volume.write(0, &flushed, false).unwrap();
        volume.flush().unwrap();
        let old = pattern(4096, 2);
        let new = pattern(300_032, 3);
        volume.write(1 << 20, &old, false).unwrap();
        volume.write(1 << 20, &new, false).unwrap();
        volume.zero((1 << 20) + 4096, 4096, byway_service::block::ZeroFlags::default()).unwrap();
        first.stop();
        // The next process finds the file empty: what was flushed is gone with this trick, what was not must come again.
        let _second = Running::start(wire, Some(address), 2, Options::new(SERVER), vec![empty()]);
        let mut expected = new.clone();
        expected[4096..8192].fill(0);
        let mut back = vec![0; new.len()];
        volume.read(1 << 20, &mut back).unwrap();
        assert!(back == expected, "unflushed writes were not written again, or in another order");
        let mut back = vec![1; flushed.len()];
        volume.read(0, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 0), "a flushed write was written again");
        assert!(volume.volume().replayed() >= 4);
        volume.flush().unwrap();
        assert_eq!(volume.volume().unflushed_bytes(), 0);
    });
}

#[test]
fn a_volume_in_memory_that_came_back_empty_fails() {
    each_wire(|wire| {
        let volatile = || {
            let options = Served { volatile: true, ..Served::default() };
            Arc::new(Volume::new("disk", Store::memory("disk", 1 << 20).unwrap(), options))
        };
        let mut first = Running::start(wire, None, 1, Options::new(SERVER), vec![volatile()]);
        let mut volume = client(wire, &first.address, VolumeOptions::new(0x30)).unwrap();
        volume.write(0, &[7; 4096], false).unwrap();
        first.stop();
        let _second = Running::start(wire, Some(first.address.clone()), 2, Options::new(SERVER), vec![volatile()]);
        assert_eq!(volume.read(0, &mut [0; 4096]), Err(VolumeError::VolatileLost));
        assert_eq!(volume.write(0, &[7; 4096], false), Err(VolumeError::VolatileLost));
    });
}

#[test]
fn a_volume_over_another_file_under_the_old_name_is_not_written_to() {
    let folder = disk_folder();
    let over = |name: &str| {
        let path = folder.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let store = Store::path(&path, StoreOptions::default(), &OpenHere).unwrap();
        Arc::new(Volume::new("disk", store, Served::default()))
    };
    each_wire(|wire| {
        // In the same process, and in another one.
        for restarts in [false, true] {
            let mut server = Running::start(wire, None, 1, Options::new(SERVER), vec![over("first")]);
            let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
            volume.write(0, &[7; 4096], false).unwrap();
            let _second = if restarts {
                server.stop();
                Some(Running::start(wire, Some(server.address.clone()), 2, Options::new(SERVER), vec![over("second")]))
            } else {
                server.replace(over("second"));
                None
            };
            assert_eq!(volume.write(8192, &[8; 4096], false), Err(VolumeError::Replaced));
            assert_eq!(volume.flush(), Err(VolumeError::Replaced));
            let written = std::fs::read(folder.path().join("second")).unwrap();
            assert!(written.iter().all(|byte| *byte == 0), "what was kept for one file was written into another");
        }
    });
}

#[test]
fn a_volume_that_is_served_over_tls_alone_from_now_on_says_so_to_its_old_clients() {
    each_wire(|wire| {
        let first = memory(1 << 20);
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![Arc::clone(&first)]);
        let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
        volume.write(0, &[7; 4096], false).unwrap();
        let options = Served { tls_required: true, ..Served::default() };
        server.replace(Arc::new(first.replaced_by(first.store().clone(), options)));
        assert_eq!(volume.flush(), Err(VolumeError::Refused(CallError::TlsRequired)));
    });
}

#[test]
fn a_volume_in_memory_that_was_replaced_fails() {
    each_wire(|wire| {
        let volatile = || {
            let options = Served { volatile: true, ..Served::default() };
            Volume::new("disk", Store::memory("disk", 1 << 20).unwrap(), options)
        };
        let first = Arc::new(volatile());
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![Arc::clone(&first)]);
        let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
        volume.write(0, &[7; 4096], false).unwrap();
        // Over the same memory nothing is lost.
        let same = first.replaced_by(first.store().clone(), first.options().clone());
        assert!(!same.is_same(&first));
        server.replace(Arc::new(same));
        let mut back = [0; 4096];
        volume.read(0, &mut back).unwrap();
        assert_eq!((back, volume.volume().sessions()), ([7; 4096], 2));
        server.replace(Arc::new(volatile()));
        assert_eq!(volume.read(0, &mut back), Err(VolumeError::VolatileLost));
        assert_eq!(volume.flush(), Err(VolumeError::VolatileLost));
    });
}

/// A volume over a file whose first flushes fail, as many as that.
fn disk_with_failing_flushes(path: &std::path::Path, flushes: u64) -> Arc<Volume> {
    let fails = FaultRule {
        operation: FaultOperation::Flush,
        effect: FaultEffect::Error(byway_reactor::Errno::IO),
        range: None,
        count_max: Some(flushes),
    };
    let options = StoreOptions { shared: true, ..StoreOptions::default() };
    let store = Store::path(path, options, &OpenHere).unwrap();
    Arc::new(Volume::new("disk", store, Served { faults: FaultRules(vec![fails]), ..Served::default() }))
}

#[test]
fn a_file_that_is_opened_anew_gets_what_a_failed_flush_may_have_lost() {
    let folder = disk_folder();
    let path = folder.path().join("disk");
    each_wire(|wire| {
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let opened = |flushes| disk_with_failing_flushes(&path, flushes);
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![opened(1)]);
        let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
        let data = pattern(70_000 / 512 * 512, 1);
        volume.write(4096, &data, false).unwrap();
        assert!(volume.flush().is_err());
        assert_eq!(volume.flush(), Err(CallError::from(BlockError::FlushFailed).into()), "it is remembered");
        // What a kernel may do after a failed sync.
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        server.replace(opened(0));
        volume.flush().unwrap();
        let file = std::fs::read(&path).unwrap();
        assert!(file[4096..4096 + data.len()] == data, "a flush succeeded over writes that are gone");
        assert!(volume.volume().replayed() > 0);
    });
}

#[test]
fn a_client_that_writes_on_after_a_failed_flush_goes_on_when_the_file_is_opened_anew() {
    const BOUND: usize = 256 << 10;
    let folder = disk_folder();
    let path = folder.path().join("disk");
    let data = pattern(4 * BOUND, 1);
    each_wire(|wire| {
        std::fs::write(&path, vec![0; data.len()]).unwrap();
        let broken = disk_with_failing_flushes(&path, u64::MAX);
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![Arc::clone(&broken)]);
        let mut options = VolumeOptions::new(0x30);
        options.bounds.unflushed_bytes_max = BOUND;
        let mut volume = client(wire, &server.address, options).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(30);
                while !broken.flush_failed() {
                    assert!(Instant::now() < deadline, "the client does not flush by itself");
                    std::thread::yield_now();
                }
                server.replace(disk_with_failing_flushes(&path, 0));
            });
            for (at, piece) in data.chunks(BOUND / 16).enumerate() {
                volume.write((at * BOUND / 16) as u64, piece, false).unwrap();
            }
        });
        volume.flush().unwrap();
        assert!(std::fs::read(&path).unwrap() == data && volume.volume().replayed() > 0);
    });
}

#[test]
fn writes_fail_when_a_server_that_cannot_flush_is_not_mended_and_reads_go_on() {
    const BOUND: usize = 64 << 10;
    let folder = disk_folder();
    let path = folder.path().join("disk");
    each_wire(|wire| {
        std::fs::write(&path, vec![0; 2 * BOUND]).unwrap();
        let broken = disk_with_failing_flushes(&path, u64::MAX);
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![broken]);
        let mut options = VolumeOptions::new(0x30);
        options.bounds.unflushed_bytes_max = BOUND;
        // Also how long the client has for a new session in the end.
        options.bounds.lost_after = Duration::from_millis(if wire.path == Path::Rdma { 5000 } else { 1000 });
        let mut volume = client(wire, &server.address, options).unwrap();
        let mut write = |at: usize| volume.write(at as u64, &[7; 4096], false);
        (0..BOUND).step_by(4096).for_each(|at| write(at).unwrap());
        for at in [BOUND, 0] {
            assert!(matches!(write(at), Err(VolumeError::FlushFailed(_))), "once after a wait, then at once");
        }
        let mut back = vec![0; BOUND];
        volume.read(0, &mut back).unwrap();
        assert!(back == [7; BOUND]);
        server.replace(disk_with_failing_flushes(&path, 0));
        let deadline = Instant::now() + Duration::from_secs(30);
        while volume.write(0, &[8; 4096], false).is_err() {
            assert!(Instant::now() < deadline, "a client that only writes learns that it may again");
        }
        volume.flush().unwrap();
        assert!(std::fs::read(&path).unwrap()[..2 * 4096] == [[8; 4096], [7; 4096]].concat());
    });
}

#[test]
fn without_a_server_everything_fails_after_the_limit() {
    each_wire(|wire| {
        let mut server = Running::start(wire, None, 1, Options::new(SERVER), vec![memory(1 << 20)]);
        let mut options = VolumeOptions::new(0x30);
        // In the guest it takes longer than that to connect over RDMA.
        let lost_after = if wire.path == Path::Rdma { 5000 } else { 300 };
        options.bounds.lost_after = Duration::from_millis(lost_after);
        let mut volume = client(wire, &server.address, options).unwrap();
        volume.write(0, &[7; 4096], false).unwrap();
        server.stop();
        let lost = VolumeError::Lost(options.bounds.lost_after);
        assert_eq!(volume.write(0, &[8; 4096], false), Err(lost));
        assert_eq!(volume.flush(), Err(lost));
        assert_eq!(volume.read(0, &mut vec![0; 100_000]), Err(lost));
    });
}

#[test]
fn errors_reach_the_client_by_name() {
    each_wire(|wire| {
        let read_only = Served { read_only: true, ..Served::default() };
        let tls = Served { tls_required: true, ..Served::default() };
        let volumes = vec![
            memory(1 << 20),
            Arc::new(Volume::new("fixed", Store::memory("fixed", 1 << 20).unwrap(), read_only)),
            Arc::new(Volume::new("secret", Store::memory("secret", 1 << 20).unwrap(), tls)),
        ];
        let server = Running::start(wire, None, 1, Options::new(SERVER), volumes);
        let open = |name: &str| {
            let reactor = Reactor::open(wire.io, FRAMES).unwrap();
            BlockingVolume::connect(reactor, server.address.clone(), name, VolumeOptions::new(0x30))
        };
        assert_eq!(open("nothing").err(), Some(ConnectError::Open(CallError::NotFound)));
        assert_eq!(open("secret").err(), Some(ConnectError::Open(CallError::TlsRequired)));
        let mut fixed = open("fixed").unwrap();
        assert!(fixed.info().unwrap().read_only);
        for len in [4096, 100_000] {
            assert_eq!(fixed.write(0, &vec![1; len], false), Err(CallError::from(BlockError::ReadOnly).into()));
        }
        let mut disk = open("disk").unwrap();
        assert_eq!(disk.read(1 << 20, &mut [0; 512]), Err(CallError::from(BlockError::OutOfRange).into()));
        assert_eq!(disk.read(1 << 20, &mut vec![0; 50_000]), Err(CallError::from(BlockError::OutOfRange).into()));
        assert_eq!(
            disk.write((1 << 20) - 512, &vec![0; 50_000], false),
            Err(CallError::from(BlockError::NoSpace).into())
        );
        disk.write(8192, &[3; 4096], false).unwrap();
        let extents = disk.extents(0, 1 << 20).unwrap();
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), 1 << 20);
        assert!(extents[0].hole && !extents[1].hole, "{extents:?}");
        disk.trim(8192, 4096).unwrap();
        disk.read(8192, &mut [0; 512]).unwrap();
        let mut options = VolumeOptions::new(0x30);
        options.fabric.terms.checksum = PayloadChecksum::Wanted;
        client(wire, &server.address, options).unwrap().read(0, &mut vec![1; 70_000]).unwrap();
    });
}

#[test]
fn a_long_read_that_fails_in_the_middle_ends_no_session() {
    let folder = disk_folder();
    let path = folder.path().join("short");
    each_wire(|wire| {
        let bytes = pattern(1 << 20, 9);
        std::fs::write(&path, &bytes).unwrap();
        let direct = StoreOptions { direct: true, ..StoreOptions::default() };
        let store = Store::path(&path, direct, &OpenHere).unwrap();
        let volumes = vec![Arc::new(Volume::new("disk", store, Served::default()))];
        let server = Running::start(wire, None, 1, Options::new(SERVER), volumes);
        let mut volume = client(wire, &server.address, VolumeOptions::new(0x30)).unwrap();
        let mut back = vec![0; 1 << 20];
        volume.read(0, &mut back).unwrap();
        assert!(back == bytes);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(600 << 10).unwrap();
        for _ in 0..20 {
            let failed = volume.read(0, &mut back);
            assert!(matches!(failed, Err(VolumeError::Call(CallError::Block(BlockError::Io(_))))), "{failed:?}");
        }
        volume.read(0, &mut back[..512 << 10]).unwrap();
        assert!(back[..512 << 10] == bytes[..512 << 10]);
        assert_eq!(volume.volume().sessions(), 1, "the slices before the error and the error itself are one answer");
    });
}

/// A shut-down while a server has all 16 writes of its client, each of which takes so long. False if the first were answered
/// before it had the last, as happens on a busy machine.
fn shuts_down_under_writes(wire: Wire, delay: Duration) -> bool {
    let delay =
        FaultRule { operation: FaultOperation::Any, effect: FaultEffect::Delay(delay), range: None, count_max: None };
    let slow = Served { faults: FaultRules(vec![delay]), ..Served::default() };
    let volume = Volume::new("disk", Store::memory("disk", 64 << 20).unwrap(), slow);
    let server = Running::start(wire, None, 1, Options::new(SERVER), vec![Arc::new(volume)]);
    let mut reactor = Reactor::open(wire.io, 64 << 20).unwrap();
    let mut options = VolumeOptions::new(0x30);
    options.bounds.lost_after = Duration::from_secs(10);
    let mut client = Client::connect(&reactor, server.address.clone(), "disk", options);
    let mut done = Vec::new();
    drive(&mut reactor, &mut client, &mut done, |client, _| client.info().is_some());
    for slot in 0..16 {
        let len = if slot % 2 == 0 { 4096 } else { 300_032 };
        let from = Rc::new(reactor.frames().alloc(len).unwrap());
        client.submit(Request::Write { offset: slot << 20, len, from, durable: true }, slot).unwrap();
    }
    drive(&mut reactor, &mut client, &mut done, |_, done| !done.is_empty() || server.state.lock().unwrap().calls == 16);
    if !done.is_empty() {
        return false;
    }
    server.drain();
    drive(&mut reactor, &mut client, &mut done, |_, done| done.len() == 16);
    for done in &done {
        assert_eq!(done.result.as_ref().map(|_| ()), Ok(()));
    }
    assert_eq!(client.sessions(), 1, "all was answered in the session that asked");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !server.has_ended() {
        assert!(Instant::now() < deadline, "the server does not end: {:?}", server.state.lock().unwrap());
        drive(&mut reactor, &mut client, &mut Vec::new(), |_, _| true);
        std::thread::yield_now();
    }
    assert_eq!(server.state.lock().unwrap().calls, 0);
    true
}

#[test]
fn a_server_that_shuts_down_answers_what_it_has_begun() {
    each_wire(|wire| {
        let mut delays = [100, 1000, 9000].into_iter().map(Duration::from_millis);
        assert!(delays.any(|delay| shuts_down_under_writes(wire, delay)), "{wire:?}: no delay is long enough");
    });
}

#[test]
fn the_same_over_tls_and_a_volume_that_requires_it_opens() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = rcgen::Issuer::new(params, key);
    for name in ["server", "client"] {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate =
            rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        std::fs::write(path(&format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
    let ca = path("ca.pem");
    let tls_server =
        TlsServer::new(&path("server.pem"), &path("server.key"), ClientCertificates::Required, Some(&ca)).unwrap();
    let (certificate, key) = (path("client.pem"), path("client.key"));
    let tls_client = TlsClient::new(&ca, Some((&certificate, &key)), "server").unwrap();
    let stranger = TlsClient::new(&ca, None, "server").unwrap();
    each_stream(|wire| {
        let required = Served { tls_required: true, ..Served::default() };
        let volume = Arc::new(Volume::new("disk", Store::memory("disk", 32 << 20).unwrap(), required));
        let tls = ServerTls::Required(tls_server.clone());
        let server = Running::start_with(wire, None, 1, (Options::new(SERVER), tls), vec![volume]);
        let open = |tls: Option<TlsClient>| {
            let reactor = Reactor::open(wire.io, FRAMES).unwrap();
            let mut volume = Client::connect(&reactor, server.address.clone(), "disk", VolumeOptions::new(0x30));
            if let Some(tls) = tls {
                volume.set_tls(tls);
            }
            BlockingVolume::open(reactor, volume)
        };
        let mut volume = open(Some(tls_client.clone())).unwrap();
        let mut offset = 0;
        for len in [512, 16 << 10, 70_000, 1 << 20, 5 << 20] {
            let data = pattern(len, len as u64);
            volume.write(offset, &data, false).unwrap();
            let mut back = vec![0; len];
            volume.read(offset, &mut back).unwrap();
            assert!(data == back, "{len} bytes came back changed");
            offset += len as u64;
        }
        volume.flush().unwrap();
        let reactor = Reactor::open(wire.io, FRAMES).unwrap();
        let listed = list(reactor, server.address.clone(), Options::new(0x30), Some(tls_client.clone())).unwrap();
        assert_eq!(
            listed.iter().map(|one| (one.name.as_str(), one.tls_required)).collect::<Vec<_>>(),
            [("disk", true)]
        );
        for refused in [None, Some(stranger.clone())] {
            assert!(matches!(open(refused).err(), Some(ConnectError::Session(_))), "let in without a certificate");
        }
    });
}
