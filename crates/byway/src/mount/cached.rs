//! The kernel's cache of a mount: it drops what the client says, and stale pages before it is told attributes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use byway_frontend::fuse::reply::Entry;
use byway_frontend::fuse::{Notifier, NotifyError, Reply};
use byway_frontend::limits::FUSE_REQUESTS_MAX;
use byway_reactor::Errno;
use byway_service::file::client::{Caller, Client, Found, KernelCache};
use rustix::fs::FileType;

use super::attributes::attr;
use super::mapped::CallWrite;
use crate::limits::{MOUNT_DROP_THREADS, MOUNT_SURE_SIZE_TIME_MAX};

/// How long an answer waits that was refused a lease, before it asks again.
const LEASE_PAUSE: Duration = Duration::from_millis(1);

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

/// What pages are dropped for.
#[derive(Debug)]
enum Due {
    /// An answer with a file's size.
    Size(SizeAnswer),
    /// Programs that may have mapped a node.
    Mapped(u64),
    /// A write by a call, which is answered then.
    Written(Written),
}

/// An answer with a file's attributes, which the kernel is told when it has no stale pages of the file.
#[derive(Debug)]
pub(super) struct SizeAnswer {
    pub(super) found: Found,
    /// An answer to LOOKUP, which names the file for so long; else to GETATTR.
    pub(super) names_for: Option<Duration>,
    pub(super) reply: Reply,
    /// Until when it waits for a lease.
    pub(super) until: Instant,
}

/// A write by a call that the server has answered.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) node: u64,
    /// Offset and length of what is written, in bytes.
    pub(super) range: (i64, i64),
    /// Pages that come get the write's bytes until this goes. An append has its place at the server alone.
    pub(super) by_call: Option<CallWrite>,
    pub(super) result: Result<usize, Errno>,
    pub(super) reply: Reply,
}

/// Has the kernel drop stale pages, before it is told a file's size, before a write to a file that it has pages of is answered, or
/// soon. Threads of their own wait for that: the kernel waits for reads of these pages, and the mount's threads answer them.
#[derive(Clone, Debug)]
pub(super) struct StalePages(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    due: SyncSender<Due>,
    /// Nodes that wait without a reply: at most [`FUSE_REQUESTS_MAX`], as many as replies.
    without_reply: AtomicUsize,
    /// The mount's, once it works. Writes to files that the kernel has pages of are answered from then on.
    notifier: OnceLock<Notifier>,
}

impl StalePages {
    /// # Errors
    /// No threads.
    pub(super) fn start(client: &Arc<Client>) -> std::io::Result<Self> {
        let (sender, due) = sync_channel(2 * FUSE_REQUESTS_MAX);
        let due = Arc::new(Mutex::new(due));
        let shared = Shared { due: sender, without_reply: AtomicUsize::new(0), notifier: OnceLock::new() };
        let this = Self(Arc::new(shared));
        for _ in 0..MOUNT_DROP_THREADS {
            let (client, shared, due) = (Arc::downgrade(client), Arc::downgrade(&this.0), Arc::clone(&due));
            let serve = move || serve(&client, &shared, &due);
            std::thread::Builder::new().name("byway-pages".to_owned()).spawn(serve)?;
        }
        Ok(this)
    }

    /// The mount works. Gives its notifier back.
    pub(super) fn begin(&self, notifier: Notifier) -> Notifier {
        self.0.notifier.get_or_init(|| notifier).clone()
    }

    /// Gives the kernel a file's attributes: those of a node, or with its name.
    pub(super) fn attributes(&self, client: &Client, found: Found, names_for: Option<Duration>, reply: Reply) {
        let answer = SizeAnswer { found, names_for, reply, until: Instant::now() + MOUNT_SURE_SIZE_TIME_MAX };
        if !client.has_stale_pages(answer.found.node) && !answer.wants_lease(client) {
            return answer.give(client);
        }
        self.send(Due::Size(answer));
    }

    /// Answers a write by a call, when the pages of its range are gone.
    pub(super) fn written(&self, written: Written) {
        self.send(Due::Written(written));
    }

    /// There is room for all replies, so this fails only without threads.
    fn send(&self, due: Due) {
        match self.0.due.try_send(due) {
            Ok(()) => {}
            Err(TrySendError::Full(due) | TrySendError::Disconnected(due)) => match due {
                Due::Size(SizeAnswer { reply, .. }) | Due::Written(Written { reply, .. }) => reply.error(Errno::IO),
                Due::Mapped(_) => {}
            },
        }
    }

    /// Has the pages of a node dropped soon. If too many wait, they go with its next attributes, or when the client next looks at
    /// mapped pages.
    pub(super) fn drop_pages(&self, node: u64) {
        if self.0.without_reply.fetch_add(1, Ordering::Relaxed) >= FUSE_REQUESTS_MAX
            || self.0.due.try_send(Due::Mapped(node)).is_err()
        {
            self.0.without_reply.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl SizeAnswer {
    /// Whether it waits for a lease: see [`Client::wants_sure_size`]. The size of a directory says nothing of its listing.
    fn wants_lease(&self, client: &Client) -> bool {
        FileType::from_raw_mode(self.found.attributes.mode.get()).is_file() && client.wants_sure_size(self.found.node)
    }

    fn give(self, client: &Client) {
        let _giving = client.giving(Some(self.found.node));
        if let Some(time) = self.names_for {
            return self.reply.entry(&leased_entry(client, &self.found, time));
        }
        let (attributes, valid) = client.believed(&self.found);
        self.reply.attributes(attr(&attributes), valid);
    }

    /// Asks for a lease once. Whether the kernel may be told the size now.
    fn prepare(&mut self, client: &Client) -> bool {
        let node = self.found.node;
        if self.wants_lease(client) {
            match client.attributes(Caller::default(), node, None) {
                Ok(attributes) => self.found.attributes = attributes,
                // What the caller asked is answered; the next call about the file fails likewise.
                Err(_) => client.give_up_sure_size(node),
            }
        }
        if client.has_stale_pages(node) {
            client.drop_stale_pages(node);
        }
        if self.wants_lease(client) && Instant::now() >= self.until {
            tracing::debug!(node, "other mounts change a file for long: its size is told without a lease");
            client.give_up_sure_size(node);
        }
        !self.wants_lease(client)
    }
}

/// An entry whose attributes the kernel may use for a while, and its name for so long.
pub(super) fn leased_entry(client: &Client, found: &Found, entry_valid: Duration) -> Entry {
    let (attributes, attr_valid) = client.believed(found);
    Entry { node: found.node, attr: attr(&attributes), attr_valid, entry_valid, ..Entry::default() }
}

impl Written {
    fn give(self, notifier: &Notifier) {
        let (offset, len) = self.range;
        known(notifier.invalidate_inode(self.node, offset, len));
        // Pages that come from now on have the write's bytes, or newer ones.
        drop(self.by_call);
        match self.result {
            Ok(count) => self.reply.written(count as u32),
            Err(error) => self.reply.error(error),
        }
    }
}

fn serve(client: &Weak<Client>, shared: &Weak<Shared>, due: &Mutex<Receiver<Due>>) {
    loop {
        let next = due.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(next) = next else { return };
        let (Some(client), Some(stale)) = (client.upgrade(), shared.upgrade().map(StalePages)) else { return };
        match next {
            Due::Size(mut answer) => {
                if answer.prepare(&client) {
                    answer.give(&client);
                } else {
                    // Other answers take their turn meanwhile.
                    std::thread::park_timeout(LEASE_PAUSE);
                    stale.send(Due::Size(answer));
                }
            }
            Due::Mapped(node) => {
                client.drop_mapped_pages(node);
                stale.0.without_reply.fetch_sub(1, Ordering::Relaxed);
            }
            Due::Written(written) => written.give(stale.0.notifier.wait()),
        }
    }
}
