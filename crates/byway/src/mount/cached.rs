//! The kernel's cache of a mount: it drops what the client says, and stale pages before it is told attributes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use byway_frontend::fuse::{Notifier, NotifyError, Reply};
use byway_frontend::limits::FUSE_REQUESTS_MAX;
use byway_reactor::Errno;
use byway_service::file::client::{Client, Found, KernelCache};

use super::attributes::attr;
use crate::limits::MOUNT_DROP_THREADS;

/// The kernel, as the client tells it what to drop.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) notifier: Notifier,
    pub(super) stale: StalePages,
}

/// A kernel that has no mount any more uses nothing of it.
fn known(dropped: Result<bool, NotifyError>) -> bool {
    dropped.unwrap_or_else(|error| {
        tracing::debug!(%error, "the kernel was not told to drop what it has cached");
        true
    })
}

impl KernelCache for Kernel {
    fn drop_attributes(&self, node: u64) -> bool {
        known(self.notifier.invalidate_attributes(node))
    }

    fn drop_pages(&self, node: u64) -> bool {
        known(self.notifier.invalidate_inode(node, 0, 0))
    }

    fn drop_pages_soon(&self, node: u64) {
        self.stale.drop_pages(node);
    }
}

/// A node's stale pages, and attributes that are answered without them.
type Stale = (u64, Option<(Found, Reply)>);

/// Has the kernel drop stale pages, before it is told a file's attributes or soon. Threads of their own wait for that: the kernel
/// waits for reads of these pages, and the mount's threads answer them.
#[derive(Clone, Debug)]
pub(super) struct StalePages {
    stale: SyncSender<Stale>,
    /// Nodes that wait without a reply: at most [`FUSE_REQUESTS_MAX`], as many as replies.
    without_reply: Arc<AtomicUsize>,
}

impl StalePages {
    /// # Errors
    /// No threads.
    pub(super) fn start(client: &Arc<Client>) -> std::io::Result<Self> {
        let (stale, due) = sync_channel(2 * FUSE_REQUESTS_MAX);
        let (due, without_reply) = (Arc::new(Mutex::new(due)), Arc::new(AtomicUsize::new(0)));
        for _ in 0..MOUNT_DROP_THREADS {
            let (client, due, waiting) = (Arc::downgrade(client), Arc::clone(&due), Arc::clone(&without_reply));
            let serve = move || serve(&client, &due, &waiting);
            std::thread::Builder::new().name("byway-pages".to_owned()).spawn(serve)?;
        }
        Ok(Self { stale, without_reply })
    }

    /// Answers attributes.
    pub(super) fn attributes(&self, client: &Client, found: Found, reply: Reply) {
        if !client.has_stale_pages(found.node) {
            return answer(client, &found, reply);
        }
        match self.stale.try_send((found.node, Some((found, reply)))) {
            Ok(()) => {}
            Err(TrySendError::Full((_, due)) | TrySendError::Disconnected((_, due))) => {
                if let Some((_, reply)) = due {
                    reply.error(Errno::IO);
                }
            }
        }
    }

    /// Has the pages of a node dropped soon. If too many wait, they go with its next attributes, or when the client next looks at
    /// mapped pages.
    pub(super) fn drop_pages(&self, node: u64) {
        if self.without_reply.fetch_add(1, Ordering::Relaxed) >= FUSE_REQUESTS_MAX
            || self.stale.try_send((node, None)).is_err()
        {
            self.without_reply.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn answer(client: &Client, found: &Found, reply: Reply) {
    let _giving = client.giving(Some(found.node));
    let (attributes, valid) = client.believed(found);
    reply.attributes(attr(&attributes), valid);
}

fn serve(client: &Weak<Client>, due: &Mutex<Receiver<Stale>>, without_reply: &AtomicUsize) {
    loop {
        let next = due.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((node, due)) = next else { return };
        let Some(client) = client.upgrade() else { return };
        if let Some((found, reply)) = due {
            client.drop_stale_pages(node);
            answer(&client, &found, reply);
        } else {
            client.drop_mapped_pages(node);
            without_reply.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
