//! Bugs put in on purpose, to show that the simulations of calls catch such bugs.
//!
//! As in [`byway_reactor::seeded`]: each is one condition at the place where a programmer would make that mistake. Outside of this
//! crate's tests and of builds with the feature `seeded-bugs`, which no program is built with, [`is`] is a constant `false`.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The caller does not get the credit of a call that ended back.
    CallCreditLost,
    /// The callee forgets that it has answered.
    CallAnsweredTwice,
    /// A node that has delegated a call answers it too.
    DelegatedAndKept,
    /// A cancelled call's number and credit are free before the callee has answered.
    CancelEndsCall,
    /// Any peer that knows a call's number may answer it.
    SecretUnchecked,
    /// An answer to a call that ended is taken for the answer to the next one with its slot.
    LateAnswerTaken,
    /// The death of the node that a call was delegated to is not told to the caller.
    DelegateDeathUntold,
    /// A call ends with its reply, though parts of the answer are on their way.
    EndsBeforeParts,
    /// Notices that were taken still count against the peer's credit.
    NoticeNotTakenOff,
    /// A third node's answer that is lost with its session is waited for.
    DirectAnswerLost,
    /// An answer goes on after the session that had its first part has ended.
    PartLostUnnoticed,
    /// A node does not try calls that waited for credit again.
    WaitingCallsForgotten,
    /// A node that delegates a call does not say how long its caller waits.
    DeadlineNotPassedOn,
    /// A node ends a cancelled call and does not tell the callee.
    CancelUntold,
    /// A node looks at the deadlines of its calls once.
    AlarmNotSetAgain,
    /// A node does not end a call whose direct answer was lost with another session.
    LostAnswerUntold,
    /// A node answers a caller directly, and leaves out the token that proves its right.
    TokenLeftOut,
    /// A node drops a call that was cancelled before its program took it, and does not answer.
    CancelledCallUnanswered,
}

impl Bug {
    /// Those that the simulation of the protocol machine alone must find.
    pub const MACHINE: [Self; 11] = [
        Self::CallCreditLost,
        Self::CallAnsweredTwice,
        Self::DelegatedAndKept,
        Self::CancelEndsCall,
        Self::SecretUnchecked,
        Self::LateAnswerTaken,
        Self::DelegateDeathUntold,
        Self::EndsBeforeParts,
        Self::NoticeNotTakenOff,
        Self::DirectAnswerLost,
        Self::PartLostUnnoticed,
    ];

    /// Those that the simulation of nodes must find. Its nodes forge nothing, take no notices and answer in one message.
    pub const NODES: [Self; 14] = [
        Self::CallCreditLost,
        Self::CallAnsweredTwice,
        Self::DelegatedAndKept,
        Self::CancelEndsCall,
        Self::LateAnswerTaken,
        Self::DelegateDeathUntold,
        Self::DirectAnswerLost,
        Self::WaitingCallsForgotten,
        Self::DeadlineNotPassedOn,
        Self::CancelUntold,
        Self::AlarmNotSetAgain,
        Self::LostAnswerUntold,
        Self::TokenLeftOut,
        Self::CancelledCallUnanswered,
    ];
}

/// Whether this build, on this thread, has that bug.
#[cfg(not(any(test, feature = "seeded-bugs")))]
#[inline]
pub const fn is(_bug: Bug) -> bool {
    false
}

#[cfg(any(test, feature = "seeded-bugs"))]
pub use self::selected::{is, select};

#[cfg(any(test, feature = "seeded-bugs"))]
mod selected {
    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        static SELECTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Whether this build, on this thread, has that bug.
    pub fn is(bug: Bug) -> bool {
        SELECTED.get() == Some(bug)
    }

    /// Puts a bug into everything that this thread runs from now on, instead of the one before.
    pub fn select(bug: Option<Bug>) {
        SELECTED.set(bug);
    }
}
