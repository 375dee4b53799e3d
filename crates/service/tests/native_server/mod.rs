//! A host whose only service is volumes, as tests use it.
#![allow(dead_code, reason = "not each test needs all of it")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use byway_fabric::{Options, Registry};
use byway_reactor::{Completion, Reactor};
use byway_service::block::server::Volumes;
use byway_service::block::{Done, Engine, VolumeId};
use byway_service::host::Host;
use byway_service::limits::CALLS_PER_SESSION;

pub struct Server {
    host: Host,
    volumes: Volumes,
}

impl Server {
    pub fn new(reactor: &Reactor, instance: u64, options: Options) -> Self {
        Self::with_calls(reactor, instance, options, CALLS_PER_SESSION)
    }

    /// Each session may have so many calls in flight.
    pub fn with_calls(reactor: &Reactor, instance: u64, options: Options, calls: u16) -> Self {
        Self::of(reactor, Arc::new(Registry::new(instance)), options, calls)
    }

    /// One of several loops of a process.
    pub fn of(reactor: &Reactor, process: Arc<Registry>, options: Options, calls: u16) -> Self {
        let host = Host::new(reactor, process, options, vec![Volumes::spoken(calls)]);
        Self { host, volumes: Volumes::new(options.class) }
    }

    pub fn offer(&mut self, volume: VolumeId) {
        self.volumes.offer(volume);
    }

    pub fn withdraw(&mut self, volume: VolumeId) {
        self.volumes.withdraw(volume);
    }

    pub fn dismiss_users(&mut self, reactor: &mut Reactor, volume: VolumeId) {
        self.volumes.dismiss_users(&mut self.host, reactor, volume);
    }

    pub fn resized(&mut self, reactor: &mut Reactor, volume: VolumeId, len: u64) {
        self.volumes.resized(&mut self.host, reactor, volume, len);
    }

    pub fn handle(&mut self, reactor: &mut Reactor, engine: &mut Engine, completion: Completion) {
        self.host.handle(reactor, &mut [&mut self.volumes.with(engine)], completion);
    }

    pub fn woken(&mut self, reactor: &mut Reactor, engine: &mut Engine) {
        self.host.woken(reactor, &mut [&mut self.volumes.with(engine)]);
    }

    pub fn done(&mut self, reactor: &mut Reactor, engine: &mut Engine, done: Done) {
        self.volumes.done(&mut self.host, reactor, engine, done);
    }

    pub fn flush(&mut self, reactor: &mut Reactor, engine: &mut Engine) {
        self.host.flush(reactor, &mut [&mut self.volumes.with(engine)]);
    }

    pub fn is_idle(&self) -> bool {
        self.host.is_idle() && self.volumes.is_idle()
    }
}

impl Deref for Server {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.host
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}
