//! A mount in no directory, for the demonstration: it is reached by a descriptor, and goes with it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use byway_frontend::fuse::Driver;
use byway_frontend::fuse::mount::{MountOptions, mount_detached};
use byway_reactor::Address;
use byway_service::file::client::{Client, ClientOptions};

use super::filesystem::Mounted;
use super::{BEGIN_LIMIT, CommandError, keep_caches, wishes};
use crate::limits::MOUNT_THREADS;
use crate::share_uri::ShareUriError;

/// See the module. Only this process reaches it.
pub(crate) struct DetachedMount {
    // Before the driver, which ends with the mount.
    root: OwnedFd,
    client: Arc<Client>,
    _driver: Driver,
}

impl DetachedMount {
    /// Mounts a share. Needs root.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub(crate) fn new(address: Address, share: &str) -> Result<Self, CommandError> {
        let failed = |source| ShareUriError::Client { uri: share.to_owned(), source };
        let client = Arc::new(Client::connect(ClientOptions::new(address, share)).map_err(failed)?);
        let (channel, root) = mount_detached(&MountOptions { source: share.to_owned(), ..MountOptions::default() })?;
        let mounted = Mounted::new(Arc::clone(&client), Duration::ZERO).map_err(CommandError::Thread)?;
        let driver = Driver::start(channel, Arc::new(mounted.clone()), wishes(), MOUNT_THREADS)?;
        if driver.wait_until_ready(BEGIN_LIMIT).is_none() {
            return Err(CommandError::NotBegun);
        }
        keep_caches(&driver, &mounted)?;
        Ok(Self { root, client, _driver: driver })
    }

    /// Where this process finds the root.
    pub(crate) fn root(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.root.as_raw_fd()).into()
    }

    /// Messages that it has sent to the server.
    pub(crate) fn messages(&self) -> u64 {
        self.client.messages()
    }
}
