//! A client that changes its process: one suspends it and writes its state down, another one goes on with it.
//!
//! To the server it is the same client in its next session. Nodes, open files, locks and the answers of slots go on, as after a lost
//! session. Leases do not: the kernel forgets attributes before the session ends, and the other process drops the kernel's pages before
//! they are read again.

pub(super) mod record;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use zerocopy::{FromZeros, IntoBytes};

use self::record::{GRANTED, Head, Records, StateError};
use super::super::wire::Forgotten;
use super::caches::Caches;
use super::closing::Closing;
use super::connection::{Attached, Continuation, Server, ServerConnection};
use super::freed::LastRemoval;
use super::opener::Openers;
use super::released::Releases;
use super::slots::SlotPool;
use super::table::{Remote, Table};
use super::{Client, ClientError, ClientOptions};
use crate::limits::FILE_STATE_RECORDS_MAX;

/// Why another process cannot go on with a client.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// The server.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The state.
    #[error(transparent)]
    State(#[from] StateError),
    /// Files and locks would be lost.
    #[error(
        "the server does not take this process for the same client; it has to connect with the same certificate, from the same address"
    )]
    OtherClient,
}

/// Why a client is not handed to another process.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    /// The server.
    #[error("the server has not answered in time, and the next process would need it; try again when it answers")]
    Late,
    /// The state is too large.
    #[error(transparent)]
    State(#[from] StateError),
}

impl Client {
    /// Ends the session and makes no other, and gives the client's state for another process. No call of a user may be under way. Calls may
    /// fail with `EIO` until [`Client::resume`], also after an error. Calls to the server take no longer than `limit` together.
    ///
    /// # Errors
    /// See [`SuspendError`].
    pub fn suspend(&self, limit: Duration) -> Result<Vec<u8>, SuspendError> {
        self.connection.set_end(limit);
        // Their names may lead to other files when the lease is gone. Until all are open, they are noted as unopened: the mount may stay,
        // and a change meanwhile needs them opened before.
        let unopened = self.caches.state().opens.all_unopened();
        if !self.open_at_server_in_time(&unopened) {
            return Err(SuspendError::Late);
        }
        self.caches.state().opens.all_opened();
        let live = self.connection.suspend().map_err(|_| SuspendError::Late)?;
        let given = {
            let mut state = self.caches.state();
            state.session = 0;
            state.names.clear();
            let given = state.leases.given();
            // Pages of mapped files stay: reads of them may wait in the kernel until the other process answers them.
            state.leases.end_session();
            given
        };
        self.caches.drop_attributes_of(given);
        if let Some(live) = live {
            self.connection.end(live);
        }
        self.unclosed().extend(self.closing.take());
        Ok(self.state()?)
    }

    /// Goes on after [`Client::suspend`], with a new session.
    pub fn resume(&self) {
        self.connection.resume();
        let stale = self.caches.state().leases.stale_mapped(super::caches::now());
        self.caches.drop_mapped_soon(&stale);
    }

    fn state(&self) -> Result<Vec<u8>, StateError> {
        let mut head = Head::new_zeroed();
        let mut bytes = vec![0; size_of::<Head>()];
        let Continuation { name, heard, instance, number, attached } = self.connection.continuation();
        head.name = name;
        (head.heard, head.instance, head.session) = (heard.into(), instance.into(), number.into());
        if let Some(Attached { instance, state, epoch }) = attached {
            (head.attached_instance, head.attached_state) = (instance.into(), state.into());
            head.attached_epoch = epoch.into();
        }
        head.removed = self.last_removal.0.load(Ordering::Relaxed).into();
        head.slots = self.slots.last_calls().map(Into::into);
        let caches = self.caches.state();
        let about = |handle| (caches.opens.code_of(handle), self.openers.of(handle).unwrap_or_default());
        self.table().write(&mut head, &mut bytes, about);
        let forgotten = self.forgotten.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        head.forgotten = (forgotten.len() as u32).into();
        for (epoch, Forgotten { node, count }) in forgotten.iter() {
            let remote = Remote { epoch: *epoch, name: node.get() }.into();
            bytes.extend_from_slice(record::ToForget { remote, answers: *count }.as_bytes());
        }
        let unclosed = self.unclosed();
        head.unclosed = (unclosed.len() as u32).into();
        bytes.extend(unclosed.iter().flat_map(|remote| record::Remote::from(*remote).as_bytes().to_vec()));
        let pages = caches.leases.filled();
        head.pages = (pages.len() as u32).into();
        bytes.extend(pages.iter().flat_map(|node| node.to_le_bytes()));
        head.flags = if caches.leases.has_granted() { GRANTED } else { 0 }.into();
        let counts = [head.nodes, head.handles, head.locks, head.unsynced, head.forgotten, head.unclosed, head.pages];
        if counts.iter().any(|count| count.get() as usize > FILE_STATE_RECORDS_MAX) {
            return Err(StateError("it has more files than can be handed over"));
        }
        bytes[..size_of::<Head>()].copy_from_slice(head.as_bytes());
        Ok(bytes)
    }

    /// Goes on with the client of another process, which has suspended it: connects to the server.
    ///
    /// # Errors
    /// See [`TakeOverError`].
    pub fn take_over(options: ClientOptions, state: &[u8]) -> Result<Self, TakeOverError> {
        let client = Self::of_state(options, state)?;
        let before = client.connection.continuation();
        let live = client.connection.open(&mut |live, root| client.attached(live, root))?;
        let epoch = before.attached.map(|attached| attached.epoch);
        if live.instance == before.instance && epoch != Some(live.epoch) {
            return Err(TakeOverError::OtherClient);
        }
        Ok(client)
    }

    fn of_state(options: ClientOptions, state: &[u8]) -> Result<Self, TakeOverError> {
        let mut records = Records(state);
        let head: &Head = records.take()?;
        let attached = Attached {
            instance: head.attached_instance.get(),
            state: head.attached_state.get(),
            epoch: head.attached_epoch.get(),
        };
        let continuation = Continuation {
            name: head.name,
            heard: head.heard.get(),
            instance: head.instance.get(),
            number: head.session.get(),
            attached: (head.attached_epoch.get() != 0).then_some(attached),
        };
        let (openers, caches) = (Openers::default(), Caches::default());
        let table = Table::read(head, &mut records, |handle, opener| {
            openers.take_over(handle.number.get(), opener);
            let super::caches::State { opens, leases, .. } = &mut *caches.state();
            opens.take_over(handle.number.get(), handle.node.get(), handle.used, leases);
        })?;
        let forgotten = records.take_all(head.forgotten)?.map(|one| {
            one.map(|record::ToForget { remote, answers }| {
                (remote.epoch.get(), Forgotten { node: remote.name, count: *answers })
            })
        });
        let forgotten = forgotten.collect::<Result<Vec<_>, StateError>>()?;
        let unclosed = records.take_all(head.unclosed)?.map(|one| one.map(|remote: &record::Remote| (*remote).into()));
        let unclosed = unclosed.collect::<Result<Vec<_>, StateError>>()?;
        for node in records.take_all::<zerocopy::little_endian::U64>(head.pages)? {
            caches.state().leases.take_over_pages(node?.get());
        }
        if head.flags.get() & GRANTED != 0 {
            caches.state().leases.take_over_granted();
        }
        let ClientOptions { address, tls, share, lost_after, renews_locks } = options;
        let server = Server { address, tls, share, renews_locks };
        Ok(Self {
            connection: ServerConnection::of(continuation, server, lost_after).map_err(ClientError::Node)?,
            table: Mutex::new(table),
            forgotten: Mutex::new(forgotten),
            unclosed: Mutex::new(unclosed),
            closing: Closing::default(),
            openers,
            releases: Releases::default(),
            last_removal: LastRemoval(head.removed.get().into()),
            slots: SlotPool::of_last_calls(|index| head.slots.get(index).map_or(0, |last| last.get())),
            caches: caches.into(),
        })
    }
}
