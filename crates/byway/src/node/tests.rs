use byway_reactor::socket_file::SocketAccess;
use byway_service::block::{Store, VolumeOptions};

use super::*;

fn memory(name: &str) -> Arc<Volume> {
    Arc::new(Volume::new(name, Store::memory(name, 1 << 20).unwrap(), VolumeOptions::default()))
}

fn patience(seconds: u64) -> Patience {
    Patience { deadline: Instant::now() + Duration::from_secs(seconds), ending: Arc::default() }
}

fn endpoint(address: &Address) -> Endpoint {
    crate::listening::open(address, SocketAccess::default(), &mut Vec::new()).unwrap()
}

fn options(volumes: &[&Arc<Volume>], nbd: Address) -> NodeOptions {
    NodeOptions {
        io: IoChoice::Auto,
        threads: 3,
        frame_bytes: 12 << 20,
        lending: None,
        volumes: volumes.iter().map(|volume| Arc::clone(volume)).collect(),
        shares: Vec::new(),
        native: Vec::new(),
        nbd: vec![endpoint(&nbd)],
        tls: ServerTls::Off,
        nbd_options: NbdOptions::default(),
        allow: Vec::new(),
        slow_us: u64::MAX,
        boot: None,
        measuring: Measuring::default(),
        on_failure: Arc::new(|| panic!("a loop ended")),
    }
}

#[test]
fn a_replacement_is_answered_when_every_loop_has_made_it() {
    let folder = tempfile::tempdir().unwrap();
    let (keep, mut last) = (memory("keep"), memory("first"));
    let node = Node::start(options(&[&keep, &last], Address::Unix(folder.path().join("nbd")))).unwrap();
    for _ in 0..100 {
        let next = memory("next");
        assert_eq!(node.replace(&[Arc::clone(&keep), Arc::clone(&next)], &[], &patience(60)), Replaced::default());
        assert_eq!(Arc::strong_count(&last), 1, "no loop has it any more");
        last = next;
    }
    assert!(node.stop(Duration::from_secs(60)));
}

#[test]
fn a_loop_that_does_not_confirm_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let volume = memory("m");
    let mut node = Node::start(options(&[&volume], Address::Unix(folder.path().join("nbd")))).unwrap();
    // One whose messages nobody takes.
    let (messages, untaken) = channel();
    let (_end, ended) = channel();
    let real: Vec<_> = node.loops.iter().map(|one| one.sender.clone()).collect();
    let sender = LoopSender { messages, waker: node.loops[0].sender.waker.clone() };
    node.loops.push(Loop { sender, thread: std::thread::spawn(|| ()), ended });
    // Once the others have confirmed, the node is told to end: that one is waited for no longer.
    let hour = patience(3600);
    let ending = Arc::clone(&hour.ending);
    let ends = std::thread::spawn(move || {
        // It is the last to be told.
        let messages: Vec<_> = untaken.iter().take(2).collect();
        let (confirm, confirmed) = channel();
        for one in &real {
            assert!(one.send(Message::Allow(Vec::new(), confirm.clone())));
        }
        for _ in &real {
            confirmed.recv().unwrap();
        }
        ending.store(true, std::sync::atomic::Ordering::Relaxed);
        (messages, untaken)
    });
    assert_eq!(node.replace(&[volume], &[], &hour).silent, 1);
    drop(ends.join().unwrap());
    node.loops.pop();
    assert!(node.stop(Duration::from_secs(60)));
}

#[test]
fn the_end_of_a_loop_that_was_not_told_to_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let volume = memory("m");
    for which in 0..3 {
        let (failed, failure) = channel();
        let options = options(&[&volume], Address::Unix(folder.path().join("nbd")));
        let on_failure = Arc::new(move || failed.send(()).unwrap());
        let node = Node::start(NodeOptions { on_failure, ..options }).unwrap();
        assert_eq!(failure.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        assert!(node.loops[which].sender.send(Message::Panic));
        failure.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(node.stop(Duration::from_secs(60)), "the others end as they are told");
        assert!(failure.recv().is_err(), "that was no failure");
    }
}

#[test]
fn nothing_is_left_of_a_node_that_could_not_listen() {
    let folder = tempfile::tempdir().unwrap();
    let volume = memory("m");
    let nowhere = Endpoint { address: Address::Rdma("192.0.2.1:4711".parse().unwrap()), socket: None };
    let options = options(&[&volume], Address::Unix(folder.path().join("nbd")));
    let outcome = Node::start(NodeOptions { native: vec![nowhere], ..options });
    assert!(matches!(outcome, Err(StartError::Listen { .. } | StartError::ListenRdma { .. })));
    assert_eq!(Arc::strong_count(&volume), 1, "no loop runs on with it");
}

#[test]
fn a_session_that_has_lost_its_access_by_a_reload_ends_and_others_go_on() {
    use byway_service::block::client::{BlockingVolume, VolumeError, VolumeOptions as ClientOptions};
    use byway_service::block::wire::CallError;
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("native"));
    let store = |name: &str| Store::memory(name, 1 << 20).unwrap();
    let listed = |access: &str| VolumeOptions { access: access.parse().unwrap(), ..VolumeOptions::default() };
    let [kept, lost, narrowed] = ["kept", "lost", "narrowed"].map(|name| (store(name), name));
    let first = |(store, name): &(Store, &str)| Arc::new(Volume::new(*name, store.clone(), listed("unix")));
    let volumes = [first(&kept), first(&lost), first(&narrowed)];
    let node = NodeOptions { native: vec![endpoint(&at)], ..options(&[], Address::Unix(folder.path().join("nbd"))) };
    let node = Node::start(NodeOptions { volumes: volumes.to_vec(), ..node }).unwrap();
    let open = |name: &str, class| {
        let reactor = byway_reactor::Reactor::open(IoChoice::Auto, 4 << 20).unwrap();
        let mut options = ClientOptions::new(class);
        options.bounds.lost_after = Duration::from_millis(500);
        BlockingVolume::connect(reactor, at.clone(), name, options)
    };
    let mut clients = [open("kept", 0x30).unwrap(), open("lost", 0x31).unwrap(), open("narrowed", 0x32).unwrap()];
    for client in &mut clients {
        client.write(0, &[7; 4096], true).unwrap();
    }
    let next = [
        volumes[0].succeeded_by(kept.0, listed("unix,10.0.0.0/8")),
        volumes[1].succeeded_by(lost.0, listed("10.0.0.0/8")),
        volumes[2].succeeded_by(narrowed.0, listed("unix:ro")),
    ];
    assert_eq!(node.replace(&next.map(Arc::new), &[], &patience(60)), Replaced { silent: 0, ended: 2 });
    let [kept, lost, narrowed] = &mut clients;
    let mut back = vec![0; 4096];
    kept.write(0, &[8; 4096], true).unwrap();
    assert_eq!(lost.read(0, &mut back), Err(VolumeError::Refused(CallError::NotFound)));
    narrowed.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    let read_only = VolumeError::Call(CallError::Block(byway_service::block::BlockError::ReadOnly));
    assert_eq!(narrowed.write(0, &[9; 4096], true), Err(read_only));
    assert!(open("lost", 0x33).is_err() && open("kept", 0x34).is_ok());
    drop(clients);
    assert!(node.stop(Duration::from_secs(60)));
}

#[test]
fn an_address_that_cannot_be_listened_on_is_told_with_what_to_do() {
    use rustix::io::Errno;
    let unix = || Address::Unix("/run/byway/nbd".into());
    let tcp = || Address::Tcp("127.0.0.1:80".parse().unwrap());
    for (address, error, remedy) in [
        (unix(), Errno::ACCESS, "may make no socket in that folder"),
        (unix(), Errno::PERM, "name a group that the user is in"),
        (unix(), Errno::ADDRINUSE, "choose another path"),
        (Address::Shared("/run/byway/shm".into()), Errno::ADDRINUSE, "choose another path"),
        (tcp(), Errno::ACCESS, "CAP_NET_BIND_SERVICE"),
        (tcp(), Errno::ADDRINUSE, "choose another port"),
    ] {
        let said = StartError::Listen { address, source: error.into() }.to_string();
        assert!(said.contains(remedy), "should say {remedy}: {said}");
    }
}
