//! The end of a mount: its process has the server make durable what programs wrote through it, and tells the commands that wait for that.
//!
//! Linux asks no file system of FUSE to sync when it is unmounted, and tells the mount's process afterwards. So that process asks the server
//! then, and `byway umount` waits for the result (`umount.rs`).

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_service::file::client::NotDurable;
use rustix::net::{RecvFlags, recv};

use super::control::HandoverError;
use super::filesystem::Mounted;
use super::registry::{MountAnswer, tell};
use crate::limits::MOUNT_ENDS_AWAITED_MAX;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct End(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Connections of commands that wait.
    awaiting: Vec<UnixStream>,
    /// The kernel has ended the mount.
    has_begun: bool,
    /// What came of it.
    durable: Option<Result<(), NotDurable>>,
    /// Another process is taking the mount over.
    is_handed_over: bool,
}

impl State {
    fn tell(&mut self, answer: &MountAnswer) {
        // Those that have gone leave the list.
        self.awaiting.retain(|stream| tell(stream, answer).is_ok());
    }
}

impl End {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command waits for the end.
    ///
    /// # Errors
    /// It cannot be told.
    pub(super) fn awaited_by(&self, stream: &UnixStream) -> io::Result<()> {
        let mut state = self.state();
        state.awaiting.retain(is_there);
        if state.is_handed_over {
            return tell(stream, &MountAnswer::Failed(HandoverError::Busy.to_string()));
        }
        if state.awaiting.len() == MOUNT_ENDS_AWAITED_MAX {
            let told = format!("{MOUNT_ENDS_AWAITED_MAX} commands wait for the end of the mount");
            return tell(stream, &MountAnswer::Failed(told));
        }
        tell(stream, &MountAnswer::Awaits)?;
        if state.has_begun {
            tell(stream, &MountAnswer::Ending)?;
        }
        state.awaiting.push(stream.try_clone()?);
        Ok(())
    }

    /// Whether the mount has ended, and it is not known yet what came of it.
    pub(super) fn waits_for_server(&self) -> bool {
        let state = self.state();
        state.has_begun && state.durable.is_none()
    }

    /// A takeover begins or has failed. Commands that come meanwhile are told to try again.
    pub(super) fn set_handed_over(&self, is_handed_over: bool) {
        self.state().is_handed_over = is_handed_over;
    }

    /// What came of it. `None`: another process has taken the mount over, which goes on.
    pub(super) fn outcome(&self) -> Option<Result<(), NotDurable>> {
        let state = self.state();
        // The thread that was to ask the server may have panicked.
        state.durable.or(state.has_begun.then_some(Err(NotDurable::NoAnswer)))
    }

    /// Tells all who wait how it ended.
    pub(super) fn tell(&self, answer: &MountAnswer) {
        let mut state = self.state();
        state.tell(answer);
        state.awaiting.clear();
    }
}

impl Mounted {
    /// Has the server make durable what programs wrote through the mount, which the kernel has ended; then ends the session.
    pub(super) fn end(&self) {
        {
            let mut state = self.end.state();
            state.has_begun = true;
            state.tell(&MountAnswer::Ending);
        }
        let durable = self.client.make_durable();
        self.end.state().durable = Some(durable);
        self.client.close();
    }
}

/// Whether the other end of a connection, which sends nothing more, is open.
fn is_there(stream: &UnixStream) -> bool {
    let mut byte = [MaybeUninit::uninit()];
    !matches!(
        recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT),
        Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET)
    )
}

#[cfg(test)]
mod tests {
    use super::super::registry::Lines;
    use super::*;

    #[test]
    fn an_end_without_an_outcome_is_no_success() {
        let end = End::default();
        assert_eq!(end.outcome(), None, "another process goes on");
        end.state().has_begun = true;
        assert!(end.waits_for_server());
        assert_eq!(end.outcome(), Some(Err(NotDurable::NoAnswer)));
        end.state().durable = Some(Ok(()));
        assert!(!end.waits_for_server());
        assert_eq!(end.outcome(), Some(Ok(())));
    }

    #[test]
    fn who_waits_keeps_its_place_and_those_that_have_gone_lose_it() {
        let end = End::default();
        let (ours, mut others): (Vec<_>, Vec<_>) =
            (0..=MOUNT_ENDS_AWAITED_MAX).map(|_| UnixStream::pair().unwrap()).unzip();
        for stream in &ours {
            end.awaited_by(stream).unwrap();
        }
        let heard = |stream: &UnixStream| Lines::of(stream.try_clone().unwrap()).hear::<MountAnswer>().unwrap();
        let newcomer = others.pop().unwrap();
        assert!(matches!(heard(&newcomer), MountAnswer::Failed(_)), "there is no place");
        assert!(matches!(heard(&others[0]), MountAnswer::Awaits));
        others.pop();
        let (ours, again) = UnixStream::pair().unwrap();
        end.awaited_by(&ours).unwrap();
        assert!(matches!(heard(&again), MountAnswer::Awaits));
        end.set_handed_over(true);
        let (ours, refused) = UnixStream::pair().unwrap();
        end.awaited_by(&ours).unwrap();
        assert!(matches!(heard(&refused), MountAnswer::Failed(_)), "another process takes the mount over");
        end.tell(&MountAnswer::Ending);
        for stream in [&others[0], &again] {
            assert!(matches!(heard(stream), MountAnswer::Ending));
        }
    }
}
