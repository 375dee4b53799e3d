use byway_service::block::{Store, VolumeOptions};

use super::*;

fn memory(name: &str) -> Arc<Volume> {
    Arc::new(Volume::new(name, Store::memory(name, 1 << 20).unwrap(), VolumeOptions::default()))
}

fn options(volumes: &[&Arc<Volume>], nbd: Address) -> NodeOptions {
    NodeOptions {
        io: IoChoice::Auto,
        threads: 3,
        frame_bytes: 12 << 20,
        volumes: volumes.iter().map(|volume| Arc::clone(volume)).collect(),
        native: Vec::new(),
        nbd: vec![nbd],
        nbd_inherited: Vec::new(),
        tls: ServerTls::Off,
        nbd_options: NbdOptions::default(),
        allow: Vec::new(),
        slow_us: u64::MAX,
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
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(node.replace(&[Arc::clone(&keep), Arc::clone(&next)], &[], deadline), 0);
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
    let (sender, untaken) = channel();
    let (_end, ended) = channel();
    let waker = node.loops[0].waker.clone();
    node.loops.push(Loop { sender, waker, thread: std::thread::spawn(|| ()), ended });
    assert_eq!(node.replace(&[volume], &[], Instant::now() + Duration::from_millis(300)), 1);
    drop(untaken);
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
        node.loops[which].sender.send(Message::Panic).unwrap();
        node.loops[which].waker.wake();
        failure.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(node.stop(Duration::from_secs(60)), "the others end as they are told");
        assert!(failure.recv().is_err(), "that was no failure");
    }
}

#[test]
fn nothing_is_left_of_a_node_that_could_not_listen() {
    let folder = tempfile::tempdir().unwrap();
    let volume = memory("m");
    let nowhere = Address::Unix(folder.path().join("missing").join("nbd"));
    assert!(matches!(Node::start(options(&[&volume], nowhere)), Err(StartError::Listen { .. })));
    assert_eq!(Arc::strong_count(&volume), 1, "no loop runs on with it");
}

#[test]
fn the_files_of_its_sockets_go_with_a_node() {
    let folder = tempfile::tempdir().unwrap();
    let volume = memory("m");
    let at = |name: &str| Address::Unix(folder.path().join(name));
    let left = || std::fs::read_dir(folder.path()).unwrap().count();
    let both = |native, nbd| NodeOptions { native: vec![native], ..options(&[&volume], nbd) };
    let node = Node::start(both(at("native"), at("nbd"))).unwrap();
    assert_eq!(left(), 2);
    assert!(node.stop(Duration::from_secs(60)));
    assert_eq!(left(), 0);
    // Nor does one stay that could not listen everywhere.
    let mut more = both(at("native"), at("nbd"));
    more.nbd.push(at("missing/nbd"));
    assert!(matches!(Node::start(more), Err(StartError::Listen { .. })));
    let mut more = both(at("native"), at("nbd"));
    more.native.push(at("missing/native"));
    assert!(matches!(Node::start(more), Err(StartError::Listen { .. })));
    assert_eq!(left(), 0);
}
