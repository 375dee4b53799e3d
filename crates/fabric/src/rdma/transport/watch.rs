//! Whether a silent peer is alive.
//!
//! A check of a silent connection sends a probe to the peer's device, and the device's retries end the connection if nothing
//! answers. But a probe that is queued behind a message for which the peer has no receive is not sent, because a device
//! retries that message for ever. So a probe without an answer after two more checks counts as silence too; one check would
//! not leave enough time for the retries with a short keep-alive.

/// How many looks a probe is waited for.
const LOOKS_MAX: u8 = 2;

/// What is known of a peer's silence.
#[derive(Debug)]
pub(super) struct Watch {
    /// Something has come, or ended, since the last look.
    was_heard: bool,
    /// A probe is posted.
    is_probed: bool,
    /// Looks since it was, at which nothing had been heard.
    silent_looks: u8,
}

/// What a look finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Nothing to be done: something was heard, or a probe is under way.
    Fine,
    /// Nothing was heard: a probe is to be posted.
    Ask,
    /// The probe was not answered.
    Silent,
}

impl Watch {
    /// Of a connection that has just begun.
    pub(super) const fn new() -> Self {
        Self { was_heard: true, is_probed: false, silent_looks: 0 }
    }

    pub(super) fn hear(&mut self) {
        self.was_heard = true;
    }

    pub(super) const fn is_probed(&self) -> bool {
        self.is_probed
    }

    /// A probe was posted, or has ended.
    pub(super) fn set_probed(&mut self, is_probed: bool) {
        self.is_probed = is_probed;
    }

    pub(super) fn look(&mut self) -> Look {
        if std::mem::take(&mut self.was_heard) {
            self.silent_looks = 0;
            return Look::Fine;
        }
        // What is posted may be what is not reported by itself, of which nobody would hear: it is no reason not to ask.
        if !self.is_probed {
            self.silent_looks = 0;
            return Look::Ask;
        }
        self.silent_looks += 1;
        if self.silent_looks < LOOKS_MAX { Look::Fine } else { Look::Silent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed() -> Watch {
        let mut watch = Watch::new();
        assert_eq!([watch.look(), watch.look()], [Look::Fine, Look::Ask]);
        watch.set_probed(true);
        watch
    }

    #[test]
    fn a_probe_that_never_ends_is_silence_at_the_second_look() {
        let mut watch = probed();
        assert_eq!([watch.look(), watch.look()], [Look::Fine, Look::Silent]);
    }

    #[test]
    fn whoever_is_heard_meanwhile_is_not_silent() {
        let mut watch = probed();
        for _ in 0..3 {
            assert_eq!(watch.look(), Look::Fine);
            watch.hear();
            assert_eq!(watch.look(), Look::Fine);
        }
        // The answer.
        watch.hear();
        watch.set_probed(false);
        assert_eq!([watch.look(), watch.look()], [Look::Fine, Look::Ask]);
    }
}
