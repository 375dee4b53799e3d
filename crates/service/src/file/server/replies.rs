//! Answers that are kept, so that a call that comes again after its session was lost is done once.
//!
//! The slots of NFSv4.1 (RFC 8881, 2.10.6): a client gives each call that must not be done twice a slot and a sequence number, and has one call
//! at a time in a slot. The same number again is the same call again. There is no order among other numbers: a session brings no call late, and
//! calls of an earlier session have ended before the client's next one begins.

use byway_rpc::message::Inline;
use rustix::io::Errno;

use super::super::wire::{Arguments, CallError};
use crate::limits::{FILE_REPLY_BYTES_MAX, FILE_SLOTS};

/// Where the answer to a call is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotUse {
    slot: u8,
    sequence: u16,
}

impl SlotUse {
    /// What a call says. `Ok(None)`: its answer is not kept.
    pub(super) fn of(arguments: &Arguments) -> Result<Option<Self>, CallError> {
        match arguments.slot {
            0 => Ok(None),
            slot if slot <= FILE_SLOTS => Ok(Some(Self { slot, sequence: arguments.sequence.get() })),
            _ => Err(CallError::Malformed),
        }
    }
}

/// What a call is answered with that was done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply<'a> {
    /// It fits into the message's head.
    pub(super) result: &'a [u8],
    pub(super) payload: &'a [u8],
}

impl<'a> Reply<'a> {
    pub(super) const DONE: Self = Self { result: &[], payload: &[] };

    pub(super) fn of_result(result: &'a [u8]) -> Self {
        Self { result, payload: &[] }
    }

    pub(super) fn of_payload(payload: &'a [u8]) -> Self {
        Self { result: &[], payload }
    }
}

/// The same, to be given again.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeptReply {
    pub(super) result: Inline,
    pub(super) payload: Vec<u8>,
}

/// An answer: a reply, or why the call failed.
pub(super) type Kept = Result<KeptReply, CallError>;

/// What a call in a slot is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival<'a> {
    /// A new one.
    New,
    /// The slot's last call again, which was answered so.
    Again(&'a Kept),
    /// The slot's last call again, which has not ended.
    Running,
}

#[derive(Debug)]
struct Last {
    sequence: u16,
    answer: Option<Kept>,
}

/// The slots of a client.
#[derive(Debug, Default)]
pub(super) struct Replies {
    /// As many as the client has used.
    slots: Vec<Option<Last>>,
    /// Bytes of kept payloads.
    bytes: usize,
}

impl Last {
    fn bytes(&self) -> usize {
        self.answer.as_ref().and_then(|answer| answer.as_ref().ok()).map_or(0, |reply| reply.payload.len())
    }
}

impl Replies {
    /// A call has come.
    pub(super) fn arrive(&mut self, SlotUse { slot, sequence }: SlotUse) -> Arrival<'_> {
        let index = usize::from(slot) - 1;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        let last = &mut self.slots[index];
        if last.as_ref().is_none_or(|last| last.sequence != sequence) {
            let old = last.replace(Last { sequence, answer: None });
            self.bytes -= old.map_or(0, |old| old.bytes());
            return Arrival::New;
        }
        last.as_ref().and_then(|last| last.answer.as_ref()).map_or(Arrival::Running, Arrival::Again)
    }

    /// The call is answered. One that was not begun for want of room is new when it comes again.
    pub(super) fn keep(&mut self, SlotUse { slot, sequence }: SlotUse, answer: Result<Reply<'_>, CallError>) {
        let Some(last) = self.slots.get_mut(usize::from(slot) - 1) else { return };
        // The client may have given the call up, and used the slot for another.
        let Some(kept) = last.as_mut().filter(|last| last.sequence == sequence) else { return };
        if matches!(answer, Err(CallError::Busy | CallError::Grace)) {
            *last = None;
            return;
        }
        let inline = |result| Inline::new(result).unwrap_or(Inline::EMPTY);
        kept.answer = Some(match answer {
            // The client hears that nobody knows any more, should it ask again.
            Ok(reply) if self.bytes + reply.payload.len() > FILE_REPLY_BYTES_MAX => Err(Errno::IO.into()),
            answer => answer.map(|reply| KeptReply { result: inline(reply.result), payload: reply.payload.to_vec() }),
        });
        self.bytes += kept.bytes();
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: SlotUse = SlotUse { slot: 1, sequence: 7 };
    const SECOND: SlotUse = SlotUse { slot: 1, sequence: 8 };

    #[test]
    fn a_call_that_comes_again_is_answered_as_it_was() {
        let mut replies = Replies::default();
        assert_eq!(replies.arrive(FIRST), Arrival::New);
        assert_eq!(replies.arrive(FIRST), Arrival::Running);
        replies.keep(FIRST, Ok(Reply { result: b"result", payload: b"payload" }));
        let kept = Ok(KeptReply { result: Inline::new(b"result").unwrap(), payload: b"payload".to_vec() });
        assert_eq!(replies.arrive(FIRST), Arrival::Again(&kept));
        assert_eq!(replies.arrive(SECOND), Arrival::New);
        replies.keep(SECOND, Err(CallError::Stale));
        assert_eq!(replies.arrive(SECOND), Arrival::Again(&Err(CallError::Stale)), "errors are answers");
        let other = SlotUse { slot: FILE_SLOTS, sequence: 8 };
        assert_eq!(replies.arrive(other), Arrival::New);
    }

    #[test]
    fn a_call_that_was_given_up_leaves_the_slot_to_the_next() {
        let mut replies = Replies::default();
        assert_eq!(replies.arrive(FIRST), Arrival::New);
        assert_eq!(replies.arrive(SECOND), Arrival::New);
        replies.keep(FIRST, Ok(Reply::DONE));
        assert_eq!(replies.arrive(SECOND), Arrival::Running);
    }

    #[test]
    fn a_call_that_found_no_room_is_new_again() {
        let mut replies = Replies::default();
        assert_eq!(replies.arrive(FIRST), Arrival::New);
        replies.keep(FIRST, Err(CallError::Busy));
        assert_eq!(replies.arrive(FIRST), Arrival::New);
    }

    #[test]
    fn kept_payloads_have_a_bound() {
        let mut replies = Replies::default();
        let payload = vec![7; 16 << 10];
        for sequence in [1, 2] {
            for slot in 1..=FILE_SLOTS {
                let call = SlotUse { slot, sequence };
                assert_eq!(replies.arrive(call), Arrival::New);
                replies.keep(call, Ok(Reply::of_payload(&payload)));
                assert!(replies.bytes <= FILE_REPLY_BYTES_MAX);
            }
        }
        let kept = Ok(KeptReply { result: Inline::EMPTY, payload });
        assert_eq!(replies.arrive(SlotUse { slot: 1, sequence: 2 }), Arrival::Again(&kept));
        let last = SlotUse { slot: FILE_SLOTS, sequence: 2 };
        assert_eq!(replies.arrive(last), Arrival::Again(&Err(Errno::IO.into())));
    }
}
