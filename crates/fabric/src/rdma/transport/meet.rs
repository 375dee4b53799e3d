//! How connections begin: the events of the connection manager, and the answers to them.

use std::net::SocketAddr;

use byway_reactor::{Op, Reactor, Token};

use super::super::connection::{Event as News, EventKind};
use super::super::device::Device;
use super::super::endpoint::{AskedEndpoint, Endpoint};
use super::super::error::RdmaError;
use super::connection::{Connection, Down, Phase};
use super::credit::Credits;
use super::greeting::{self, GreetingError};
use super::{Adapter, Event, Transport};
use super::{AdapterId, ConnectionId};
use crate::limits::{RDMA_DEVICES_MAX, RDMA_REMOVAL_PAUSE};
use crate::slots::Slot;
use crate::wire::RefuseCode;

/// What tells the tokens of listeners from those of connections.
pub(super) const LISTENER: u64 = 1 << 63;
/// What tells the tokens of devices from those of connections.
const ADAPTER: u64 = 1 << 62;

/// A connection that was asked for, on its way to the loop that answers it. Dropping it refuses.
#[derive(Debug)]
pub struct Asked {
    endpoint: AskedEndpoint,
    credits: Credits,
}

impl Transport {
    /// Takes the connection manager's news.
    pub(super) fn meet(&mut self, reactor: &mut Reactor) {
        loop {
            let Some(manager) = &self.manager else { return };
            match manager.channel.next_event() {
                Ok(Some(news)) => self.heard(reactor, news),
                Ok(None) => return,
                Err(error) => return tracing::error!(%error, "cannot read events of the RDMA connection manager"),
            }
        }
    }

    fn heard(&mut self, reactor: &mut Reactor, news: News) {
        let connection = Slot::from_u64(news.token);
        let step = match news.kind {
            EventKind::ConnectRequest { endpoint, private_data } => {
                return self.asked(endpoint, &private_data);
            }
            EventKind::AddressResolved => self.found_address(reactor, connection),
            EventKind::RouteResolved => self.found_route(connection),
            EventKind::Established { private_data } => self.established(connection, &private_data),
            EventKind::Disconnected => Err(Down::PeerClosed),
            EventKind::Rejected { private_data } => Err(match greeting::read(&private_data) {
                Err(GreetingError::Refused(code)) => Down::Refused(code),
                _ => Down::NotByway,
            }),
            EventKind::NobodyListens => Err(Down::NobodyListens),
            EventKind::Failed(errno) => Err(Down::Unreachable(errno)),
            EventKind::DeviceRemoved if news.token & LISTENER != 0 => {
                return self.listener_lost(reactor, (news.token & !LISTENER) as usize);
            }
            EventKind::DeviceRemoved if news.token & ADAPTER != 0 => {
                return self.removed(reactor, Slot::from_u64(news.token & !ADAPTER));
            }
            EventKind::DeviceRemoved => {
                if let Some(number) = self.connections.get(connection).and_then(|state| state.adapter) {
                    self.removed(reactor, number);
                }
                Err(Down::Removed)
            }
            EventKind::Other(number) => return tracing::debug!(number, "an event of the RDMA connection manager"),
        };
        if let Err(down) = step {
            // What came before it is told before it.
            self.collect(self.connections.get(connection).and_then(|state| state.adapter));
            self.look();
            self.end(connection, Some(down));
            self.look();
        }
    }

    /// A connect request at a listener.
    fn asked(&mut self, endpoint: Endpoint, private_data: &[u8]) {
        let granted = match greeting::read(private_data) {
            Ok(granted) => granted,
            Err(error) => {
                // A peer with another protocol gets no answer.
                if let GreetingError::Refused(code) = error {
                    let _ = endpoint.reject(greeting::refusal(code).as_ref());
                }
                return tracing::debug!(?error, "an RDMA connection was refused");
            }
        };
        let peer: Option<SocketAddr> = endpoint.peer_address();
        let connection = self.connections.insert(Connection::new(Phase::Asked, Some(endpoint), granted));
        if let Some(endpoint) = self.connections.get(connection).and_then(|state| state.endpoint.as_ref()) {
            endpoint.set_token(connection.to_u64());
        }
        self.events.push_back(Event::Asked { connection, peer });
    }

    /// Takes out a connection that was asked for and not answered, for the transport of another loop. None if it has gone.
    pub fn take_out(&mut self, connection: ConnectionId) -> Option<Asked> {
        self.connections.get(connection).filter(|state| state.phase == Phase::Asked)?;
        let state = self.connections.remove(connection)?;
        Some(Asked { endpoint: state.endpoint?.into_asked().ok()?, credits: state.credits })
    }

    /// Takes over what another loop's transport has taken out: to be answered as what was asked for here. If it cannot be, the peer is
    /// refused.
    ///
    /// # Errors
    /// [`RdmaError`]: the system's.
    pub fn adopt(&mut self, reactor: &mut Reactor, asked: Asked) -> Result<ConnectionId, RdmaError> {
        let endpoint = self.manager(reactor)?.channel.adopt(asked.endpoint)?;
        let mut state = Connection::new(Phase::Asked, Some(endpoint), 0);
        state.credits = asked.credits;
        let connection = self.connections.insert(state);
        if let Some(endpoint) = self.connections.get(connection).and_then(|state| state.endpoint.as_ref()) {
            endpoint.set_token(connection.to_u64());
        }
        Ok(connection)
    }

    pub(super) fn try_accept(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<(), Down> {
        self.give_adapter(reactor, connection)?;
        self.give_queue_pair(connection)?;
        let Some(state) = self.connections.get_mut(connection) else { return Ok(()) };
        state.phase = Phase::Accepting;
        let Some(endpoint) = &state.endpoint else { return Ok(()) };
        endpoint.accept(greeting::greeting().as_ref()).map_err(Down::Setup)
    }

    pub(super) fn refuse_for(&mut self, connection: ConnectionId, code: RefuseCode, down: Down) {
        match down {
            // For this end's operator, who does not see the peer's error.
            Down::Setup(error) => tracing::warn!(%error, "an RDMA connection is refused"),
            down => tracing::debug!(%down, "an RDMA connection is refused"),
        }
        if let Some(endpoint) = self.connections.get(connection).and_then(|state| state.endpoint.as_ref()) {
            // It fails where the peer has gone, which then need not be told.
            let _ = endpoint.reject(greeting::refusal(code).as_ref());
        }
        self.end(connection, Some(down));
        self.look();
    }

    fn found_address(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<(), Down> {
        self.give_adapter(reactor, connection)?;
        let endpoint = self.connections.get(connection).and_then(|state| state.endpoint.as_ref());
        endpoint.map_or(Ok(()), Endpoint::resolve_route).map_err(Down::Setup)
    }

    fn found_route(&mut self, connection: ConnectionId) -> Result<(), Down> {
        self.give_queue_pair(connection)?;
        let Some(state) = self.connections.get_mut(connection) else { return Ok(()) };
        state.phase = Phase::Asking;
        let Some(endpoint) = &state.endpoint else { return Ok(()) };
        endpoint.connect(greeting::greeting().as_ref()).map_err(Down::Setup)
    }

    /// Finds the device of a connection's local address.
    fn give_adapter(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<(), Down> {
        let Some(state) = self.connections.get(connection) else { return Ok(()) };
        let local = state.endpoint.as_ref().and_then(Endpoint::local_address);
        let local = local.ok_or(Down::Setup(RdmaError::State("the local address")))?;
        let manager = self.manager.as_ref().ok_or(Down::Setup(RdmaError::State("the connection manager")))?;
        let device = manager.channel.open_device(local.ip(), u64::MAX).map_err(Down::Setup)?;
        let found = self.adapters.iter().find(|(_, adapter)| adapter.device.is_same(&device)).map(|(number, _)| number);
        let number = match found {
            Some(number) => number,
            None => self.add_adapter(reactor, device)?,
        };
        if let Some(state) = self.connections.get_mut(connection) {
            state.adapter = Some(number);
        }
        Ok(())
    }

    fn add_adapter(&mut self, reactor: &mut Reactor, device: Device) -> Result<AdapterId, Down> {
        if self.adapters.len() >= RDMA_DEVICES_MAX {
            return Err(Down::TooMany);
        }
        let adapter = Adapter::open(device, reactor, self.limits).map_err(Down::Setup)?;
        let number = self.adapters.insert(adapter);
        if let Some(adapter) = self.adapters.get(number) {
            adapter.device.set_token(ADAPTER | number.to_u64());
        }
        let token = self.tokens[1];
        let token = Token::new(token.class(), token.tag(), number.index, number.generation);
        if let Some(adapter) = self.adapters.get(number) {
            adapter.wait(reactor, token);
        }
        Ok(number)
    }

    /// Reserves a connection's receives, and makes its queue pair.
    fn give_queue_pair(&mut self, connection: ConnectionId) -> Result<(), Down> {
        let Some(state) = self.connections.get_mut(connection) else { return Ok(()) };
        let adapter = state.adapter.and_then(|number| self.adapters.get_mut(number));
        let (Some(adapter), Some(endpoint)) = (adapter, &mut state.endpoint) else {
            return Err(Down::Removed);
        };
        adapter.reserve()?;
        state.has_receives = true;
        adapter.create_queue_pair(endpoint, connection).map_err(Down::Setup)
    }

    pub(super) fn established(&mut self, connection: ConnectionId, private_data: &[u8]) -> Result<(), Down> {
        let Some(state) = self.connections.get_mut(connection) else { return Ok(()) };
        if state.phase == Phase::Asking {
            let granted = greeting::read(private_data).map_err(|error| match error {
                GreetingError::NotByway => Down::NotByway,
                GreetingError::Refused(code) => Down::WeRefused(code),
            })?;
            state.credits.grant(granted);
        }
        state.phase = Phase::Up;
        self.events.push_back(Event::Connected(connection));
        for received in std::mem::take(&mut state.early) {
            self.events.push_back(Event::Message(connection, received));
        }
        self.mark(connection);
        Ok(())
    }

    /// A device is being removed, which waits until we have let go of it: what comes next opens what is there then.
    fn removed(&mut self, reactor: &mut Reactor, number: AdapterId) {
        self.collect(Some(number));
        let of_device = |(_, state): &(ConnectionId, &Connection)| state.adapter == Some(number);
        let all: Vec<ConnectionId> = self.connections.iter().filter(of_device).map(|(slot, _)| slot).collect();
        for slot in all {
            self.end(slot, Some(Down::Removed));
        }
        self.look();
        if let Some(adapter) = self.adapters.remove(number) {
            adapter.forget(reactor);
            tracing::warn!(device = ?adapter.device, "an RDMA device was removed");
            self.wait_after_removal(reactor);
        }
    }

    /// A listener's device is being removed: it listens again when there is one at its address.
    fn listener_lost(&mut self, reactor: &mut Reactor, number: usize) {
        if let Some(listening) = self.listeners.get_mut(number) {
            listening.listener = None;
            tracing::warn!(address = %listening.at, "the RDMA device of a listener was removed");
            self.wait_after_removal(reactor);
        }
    }

    pub(super) fn wait_after_removal(&mut self, reactor: &mut Reactor) {
        if !std::mem::replace(&mut self.waits_after_removal, true) {
            reactor.submit(Op::Timer { at: reactor.now() + RDMA_REMOVAL_PAUSE }, self.tokens[0]);
        }
    }

    /// A device was removed a while ago, and the memory that was open to it is closed: releases the device, and listens again where
    /// there is one now.
    pub(super) fn after_removal(&mut self, reactor: &mut Reactor) {
        let waited = std::mem::take(&mut self.waits_after_removal);
        let Some(manager) = self.manager.as_ref().filter(|_| waited) else { return };
        manager.channel.hand_back();
        manager.channel.forget_removed_devices();
        for (number, listening) in self.listeners.iter_mut().enumerate().filter(|(_, at)| at.listener.is_none()) {
            listening.listener = manager.channel.listen(listening.at, LISTENER | number as u64).ok();
            if listening.listener.is_some() {
                tracing::info!(address = %listening.at, "listening again: there is an RDMA device");
            }
        }
        if self.has_aside() || self.listeners.iter().any(|listening| listening.listener.is_none()) {
            self.wait_after_removal(reactor);
        }
    }
}
