//! A server of a simulated file and a client of it, in a simulated world.

use std::rc::Rc;
use std::time::Duration;

use byway_fabric::Options;
use byway_reactor::{Frame, Reactor, Wait};
use byway_service::block::VolumeOptions as Served;
use byway_service::block::client::{Done, Request, Volume as Client, VolumeOptions};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};

use crate::serving::{AT, SERVER_CLASS, TestServer, client_ip};

const CLIENT_CLASS: u8 = 0x30;

pub struct Pair {
    pub serving: TestServer,
    pub client: Client,
    at_client: Reactor,
}

impl Pair {
    /// The store takes `store_time` for the first write that reaches it.
    pub fn new(seed: u64, frames: usize, store_time: Duration, lost_after: Duration) -> Self {
        let slow = FaultRule {
            operation: FaultOperation::Write,
            effect: FaultEffect::Delay(store_time),
            range: None,
            count_max: Some(1),
        };
        let mut serving = TestServer::new(seed, frames, Options::new(SERVER_CLASS));
        serving.offer_file(Served { faults: FaultRules(vec![slow]), ..Served::default() });
        let at_client = serving.world.node(client_ip(1), 1 << 20);
        let mut options = VolumeOptions::new(CLIENT_CLASS);
        options.fabric.seed = Some(seed);
        options.bounds.lost_after = lost_after;
        let client = Client::connect(&at_client, AT, "disk", options);
        Self { serving, client, at_client }
    }

    pub fn write(&mut self, offset: u64, len: usize, tag: u64) {
        let from = Rc::new(self.at_client.frames().alloc(len).unwrap());
        self.client.submit(Request::Write { offset, len, from, durable: false }, tag).unwrap();
    }

    /// Lets the time pass; gives the answers that came.
    pub fn pass(&mut self, time: Duration) -> Vec<Done<Frame>> {
        let Self { serving, client, at_client } = self;
        serving.pass(time, || {
            let mut completions = Vec::new();
            client.flush(at_client);
            at_client.reap(&mut completions, Wait::Poll).unwrap();
            let busy = !completions.is_empty();
            for completion in completions {
                client.handle(at_client, completion);
            }
            busy
        });
        let mut answers = Vec::new();
        self.client.reap(&mut answers);
        answers
    }
}
