//! Memory is leased, filled, got back and given back over each wire, and a borrower that goes leaves nothing behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, NodeOptions, OpError, parse_address};
use byway_fabric::{Options, Registry, Rights, WindowError};
use byway_reactor::{Address, IoChoice, Reactor, Wait};
use byway_rpc::node::Rpc;
use byway_rpc::session::{Grant, Spoken};
use byway_service::host::Host;
use byway_service::limits::SLAB_BYTES;
use byway_service::memory::pager::{PAGE_BYTES, PLACES_PER_SLAB};
use byway_service::memory::pool::{Class, Told};
use byway_service::memory::wire::{LeaseResult, LendError, Method, PROTOCOL, StatusResult, VERSIONS};
use byway_service::memory::{BorrowError, Borrower, Keeping, Lender, LenderAt, Lending, PoolClient};
use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

const SOON: Duration = Duration::from_secs(20);

/// A loop that lends, until it is dropped.
struct Server {
    at: String,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(io: IoChoice, at: Address, lending: &Arc<Lending>) -> Self {
        let (send, receive) = std::sync::mpsc::channel();
        let (stop, lending) = (Arc::new(AtomicBool::new(false)), Arc::clone(lending));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut reactor = Reactor::open(io, 4 << 20).unwrap();
            let mut host = Host::new(&reactor, Arc::new(Registry::new(1)), Options::new(0x20), vec![Lender::spoken()]);
            let (mut lender, mut completions) = (Lender::new(lending), Vec::new());
            let listener = host.listen(&mut reactor, &at).unwrap();
            let at = reactor.local_address(listener).map_or(at, Address::Tcp);
            send.send(at.to_string()).unwrap();
            while !stopped.load(Ordering::Acquire) {
                host.flush(&mut reactor, &mut [&mut lender]);
                reactor.reap(&mut completions, Wait::Until(reactor.now() + Duration::from_millis(20))).unwrap();
                for completion in completions.drain(..) {
                    host.handle(&mut reactor, &mut [&mut lender], completion);
                }
            }
        });
        Self { at: receive.recv().unwrap(), stop, thread: Some(thread) }
    }

    fn borrower(&self) -> Borrower {
        let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
        Borrower::connect_on(&rpc, &parse_address(&self.at).unwrap(), SOON).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn on_each_wire(test: impl Fn(&Server, &Lending)) {
    let folder = tempfile::tempdir().unwrap();
    for io in [IoChoice::Auto, IoChoice::Epoll] {
        let at = |name: &str| folder.path().join(format!("{name}{io:?}"));
        let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
        for at in [tcp, Address::Unix(at("unix")), Address::Shared(at("shm"))] {
            let lending = Arc::new(Lending::new(2 * SLAB_BYTES as u64, None, None));
            test(&Server::start(io, at, &lending), &lending);
        }
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

#[test]
fn what_was_put_into_a_slab_is_got_back_and_a_new_lease_has_zeroes() {
    on_each_wire(|server, lending| {
        let borrower = server.borrower();
        let (node, session) = (borrower.node(), borrower.session());
        let slab = borrower.lease().unwrap();
        assert_eq!((slab.bytes, lending.status().lent_bytes), (SLAB_BYTES as u64, SLAB_BYTES as u64));
        let memory = node.register(8 << 20).unwrap();
        let bytes: Vec<u8> = (0..8usize << 20).map(|at| (at % 251) as u8).collect();
        memory.write(0, &bytes).unwrap();
        let end = slab.bytes - bytes.len() as u64;
        node.put(session, &[memory.segment(0..bytes.len())], &slab.window, end).unwrap().wait(SOON).unwrap().unwrap();
        until("the count of what is filled", || lending.status().filled_bytes == bytes.len() as u64);
        let ranges = [end + 4096..end + 8192, 0..4096];
        let into = node.register(8192).unwrap();
        let got = node.get_ranges(session, &slab.window, &ranges, &[into.segment(0..8192)]).unwrap();
        got.wait(SOON).unwrap().unwrap();
        let mut back = vec![1; 8192];
        into.read(0, &mut back).unwrap();
        assert!(back[..4096] == bytes[4096..8192] && back[4096..] == [0; 4096]);

        borrower.give_back(&slab).unwrap();
        assert_eq!((lending.status().lent_bytes, lending.status().filled_bytes), (0, 0));
        assert!(matches!(borrower.give_back(&slab), Err(BorrowError::Lender(LendError::UnknownSlab))));
        let put = node.put(session, &[memory.segment(0..4096)], &slab.window, 0).unwrap().wait(SOON).unwrap();
        assert_eq!(put, Err(OpError::Refused(WindowError::Key)), "it is the lender's again");
        let again = borrower.lease().unwrap();
        node.get(session, &again.window, end, &[into.segment(0..8192)]).unwrap().wait(SOON).unwrap().unwrap();
        into.read(0, &mut back).unwrap();
        assert_eq!(back, [0; 8192]);
    });
}

#[test]
fn a_borrower_has_no_more_than_is_lent_and_leaves_all_when_it_goes() {
    on_each_wire(|server, lending| {
        let (first, second) = (server.borrower(), server.borrower());
        let mine = first.lease().unwrap();
        second.lease().unwrap();
        assert!(matches!(second.lease(), Err(BorrowError::Lender(LendError::AllLent))));
        let status = second.status().unwrap();
        assert_eq!((status.lent_bytes, status.borrowers), (2 * SLAB_BYTES as u64, 2));
        // Another's window is nobody's but his.
        let memory = second.node().register(4096).unwrap();
        let stolen = second.node().get(second.session(), &mine.window, 0, &[memory.segment(0..4096)]).unwrap();
        assert_eq!(stolen.wait(Deadline::after(SOON)).unwrap(), Err(OpError::Refused(WindowError::Key)));
        drop(stolen);
        drop(second);
        until("the second borrower's slab", || lending.status().lent_bytes == SLAB_BYTES as u64);
        first.lease().unwrap();
        drop(first);
        until("all slabs", || lending.status().lent_bytes == 0 && lending.status().borrowers == 0);
    });
}

/// A node that lends by hand: each slab is the same MiB.
struct LenderByHand {
    rpc: Rpc,
    at: Address,
    /// The number of its process that it names.
    process: u64,
}

impl LenderByHand {
    fn new(process: u64) -> Self {
        let spoken = Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(Grant { calls: 16, notices: 0 }) };
        let rpc = Rpc::open_for(&NodeOptions::default(), vec![spoken]).unwrap();
        let at = rpc.node().listen(&parse_address("tcp://127.0.0.1:0").unwrap()).unwrap().unwrap();
        Self { rpc, at: Address::Tcp(at), process }
    }

    /// Answers calls until one of them is the last, or none has come for a moment and `is_over`.
    fn lend_until(&self, is_last: impl Fn(Method) -> bool, is_over: impl Fn() -> bool) {
        let (memory, mut windows) = (self.rpc.node().register(1 << 20).unwrap(), Vec::new());
        let began = Instant::now();
        loop {
            let Ok(asked) = self.rpc.next_call(Deadline::after(Duration::from_millis(20))) else {
                assert!(began.elapsed() < 2 * SOON, "it is not asked for what the test waits for");
                if is_over() {
                    return;
                }
                continue;
            };
            let method = Method::from_number(asked.method).unwrap();
            match method {
                Method::Lease => {
                    let rights = Rights { get: true, put: true };
                    let window = self.rpc.node().open_window(asked.session, &memory, 0..1 << 20, rights).unwrap();
                    let (slab, bytes, lender) = (U64::new(7), U64::new(1 << 20), U64::new(self.process));
                    let result = LeaseResult { slab, bytes, lender, reserved: [0; 40] };
                    asked.token.reply(0, result.as_bytes(), &window.descriptor().to_bytes()).unwrap();
                    windows.push(window);
                }
                Method::Return => {
                    assert_eq!(asked.arguments[..8], 7u64.to_le_bytes());
                    // Of this and what follows, the asker may have gone.
                    let _ = asked.token.reply(0, &[], &[]);
                }
                Method::Status => {
                    let status = StatusResult { lender: U64::new(self.process), ..StatusResult::new_zeroed() };
                    let _ = asked.token.reply(0, status.as_bytes(), &[]);
                }
                Method::Renew => drop(asked.token.reply(0, &[0; 64], &[])),
            }
            if is_last(method) {
                return;
            }
        }
    }
}

/// Asks a new pool over these lenders for a slab: what it says, and why if it has none.
fn ask_for_slab(rpc: &Rpc, lenders: Vec<LenderAt>, class: Class, places: u32) -> (Option<Told>, String) {
    let frames = rpc.node().register((class.frames() + 1) * PAGE_BYTES).unwrap();
    let mut pool = PoolClient::new(rpc, lenders, Keeping::plain(class), (frames, places)).unwrap();
    pool.want_slab();
    let mut told = None;
    until("the answer", || {
        rpc.node().progress().unwrap();
        pool.turn();
        told = pool.next_told();
        told.is_some()
    });
    (told, pool.why_no_slab().to_owned())
}

/// A session that was opened again may lead to a process that is another lender of the pool, so a pool looks at each lease.
#[test]
fn two_sessions_with_one_process_are_not_two_lenders_of_a_page() {
    let lending = Arc::new(Lending::new(4 * SLAB_BYTES as u64, None, None));
    let server = Server::start(IoChoice::Auto, Address::Tcp("127.0.0.1:0".parse().unwrap()), &lending);
    let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
    let at = parse_address(&server.at).unwrap();
    let sessions = ["one", "other"].map(|name| (name, Borrower::connect_on(&rpc, &at, SOON).unwrap()));
    let lenders = || sessions.iter().map(|(name, borrower)| LenderAt::of((*name).to_owned(), borrower)).collect();
    let answer = |class: Class| ask_for_slab(&rpc, lenders(), class, PLACES_PER_SLAB);
    assert_eq!(answer(Class::None).0, Some(Told::Slab(PLACES_PER_SLAB)), "one lender is enough");
    let (told, why) = answer(Class::Mirror);
    assert_eq!(told, Some(Told::NoSlab));
    assert!(why.contains("the same process as one"), "{why}");
}

#[test]
fn lenders_that_name_no_process_are_not_taken_for_one() {
    let places = (1 << 20) / PAGE_BYTES as u32;
    for (processes, class, is_refused) in [
        (vec![0; 2], Class::Mirror, false),
        (vec![0; 5], Class::Parity, false),
        (vec![0, 3], Class::Mirror, false),
        (vec![3, 3], Class::Mirror, true),
    ] {
        let lenders: Vec<_> = processes.iter().map(|process| LenderByHand::new(*process)).collect();
        let named: Vec<_> = (0..).zip(&lenders).map(|(n, lender)| (format!("{n}"), lender.at.clone())).collect();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for lender in &lenders {
                scope.spawn(|| lender.lend_until(|_| false, || is_over.load(Ordering::Acquire)));
            }
            let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
            let connected = Borrower::connect_all(&rpc, &named, class, SOON).map(|_| ());
            let sessions: Vec<_> = named.iter().map(|(_, at)| Borrower::connect_on(&rpc, at, SOON).unwrap()).collect();
            let at = named.iter().zip(&sessions).map(|((name, _), borrower)| LenderAt::of(name.clone(), borrower));
            let (told, why) = ask_for_slab(&rpc, at.collect(), class, places);
            // Before the checks: lenders that go on would keep a failed test waiting.
            is_over.store(true, Ordering::Release);
            let same = |error: &BorrowError| matches!(error, BorrowError::SameLender(_));
            let refused = connected.as_ref().err().map(|unusable| &unusable.source);
            assert!(refused.is_some() == is_refused && refused.is_none_or(same), "{processes:?}: {connected:?}");
            assert_eq!(told == Some(Told::NoSlab), is_refused, "{processes:?}: {told:?} {why}");
            assert_eq!(why.contains("the same process as"), is_refused, "{processes:?}: {why}");
        });
    }
}

#[test]
fn a_slab_that_is_too_small_for_the_pool_is_given_back_and_refused_by_name() {
    let lender = LenderByHand::new(1);
    let at = lender.at.clone();
    let thread = std::thread::spawn(move || lender.lend_until(|method| method == Method::Return, || false));
    let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
    let borrower = Borrower::connect_on(&rpc, &at, SOON).unwrap();
    let frames = rpc.node().register((Class::None.frames() + 1) * PAGE_BYTES).unwrap();
    let lenders = vec![LenderAt::of("small".to_owned(), &borrower)];
    let mut pool = PoolClient::new(&rpc, lenders, Keeping::plain(Class::None), (frames, PLACES_PER_SLAB)).unwrap();
    pool.want_slab();
    let turn = |pool: &mut PoolClient| {
        rpc.node().progress().unwrap();
        pool.turn();
        pool.next_told()
    };
    until("the refusal", || turn(&mut pool) == Some(Told::NoSlab));
    assert!(
        pool.why_no_slab().contains("have 1048576 bytes, and this program needs 67108864"),
        "{}",
        pool.why_no_slab()
    );
    until("the slab's return", || {
        turn(&mut pool);
        thread.is_finished()
    });
    thread.join().unwrap();
}
