//! A wait for a descriptor outlives the thread that began it: whoever reaps next gets its end.

use std::io::Write;
use std::time::Duration;

use byway_reactor::{Descriptor, IoChoice, Op, Outcome, Reactor, Token, Wait};

/// A reactor on its way to another thread.
struct Passed(Reactor);

// SAFETY: opened for threads, and all that it counts without atomics is in it: no frame, pool or gather was taken out.
unsafe impl Send for Passed {}

impl Passed {
    /// Begins a wait, in the thread that calls this.
    fn begin(mut self, descriptor: Descriptor, token: Token) -> Self {
        self.0.submit(Op::Readable { descriptor }, token);
        let mut completions = Vec::new();
        self.0.reap(&mut completions, Wait::Poll).unwrap();
        assert!(completions.is_empty());
        self
    }
}

fn a_wait_outlives_its_thread(io: IoChoice) {
    let Ok(mut reactor) = Reactor::open_for_threads(io, 1 << 20) else {
        assert_eq!(io, IoChoice::Uring, "every kernel has epoll");
        return byway_skip::skip_this(byway_skip::NO_IO_URING);
    };
    let (reader, mut writer) = std::io::pipe().unwrap();
    let token = Token::new(7, 1, 2, 3);
    let descriptor = reactor.add_descriptor(reader.into()).unwrap();
    let passed = Passed(reactor);
    let Passed(mut reactor) = std::thread::spawn(move || passed.begin(descriptor, token)).join().unwrap();
    let until = reactor.now() + Duration::from_millis(50);
    let mut completions = Vec::new();
    reactor.reap(&mut completions, Wait::Until(until)).unwrap();
    assert!(completions.is_empty(), "nothing is there to be read: {completions:?}");
    writer.write_all(b"x").unwrap();
    let limit = reactor.now() + Duration::from_secs(20);
    while completions.is_empty() {
        assert!(reactor.now() < limit, "nobody tells of it");
        reactor.reap(&mut completions, Wait::Until(limit)).unwrap();
    }
    assert_eq!(completions[0].token, token);
    assert!(matches!(completions[0].outcome, Outcome::Readable(Ok(()))), "{completions:?}");
}

#[test]
fn a_wait_outlives_its_thread_on_uring() {
    a_wait_outlives_its_thread(IoChoice::Uring);
}

#[test]
fn a_wait_outlives_its_thread_on_epoll() {
    a_wait_outlives_its_thread(IoChoice::Epoll);
}
