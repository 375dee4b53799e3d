//! Faults that the tests put into the machine, each of which the simulation must find.

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// The caller does not get the credit of a call that ended back.
    CallCreditLost,
    /// The callee forgets that it has answered.
    CallAnsweredTwice,
    /// A node that has delegated a call answers it too.
    DelegatedAndKept,
    /// A cancelled call's number and credit are free before the callee has answered.
    CancelEndsCall,
    /// Whoever knows a call's number may answer it.
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
}

#[cfg(test)]
impl Bug {
    pub(super) const ALL: [Self; 11] = [
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
}

#[cfg(test)]
thread_local! {
    static SEEDED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Puts a fault into the machines of this thread, or takes it out.
#[cfg(test)]
pub(super) fn seed(bug: Option<Bug>) {
    SEEDED.set(bug);
}

/// Whether the machines of this thread have that fault. Never, outside of tests.
#[cfg(test)]
pub(super) fn is(bug: Bug) -> bool {
    SEEDED.get() == Some(bug)
}

/// Whether the machines of this thread have that fault. Never, outside of tests.
#[cfg(not(test))]
pub(super) const fn is(_: Bug) -> bool {
    false
}
