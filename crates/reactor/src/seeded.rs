//! Bugs put in on purpose, to show that the simulation catches such bugs.
//!
//! Each is one condition at the place where a programmer would make that mistake. Without the feature `seeded-bugs`,
//! which no program is built with, [`is`] is a constant `false` and nothing of them is left. With it, a test selects one
//! for its thread: a simulated world runs on one.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The store's flush answers and does nothing.
    DroppedFlush,
    /// A write that was to be durable before its answer is an ordinary one.
    IgnoredFua,
    /// A flush that failed is forgotten: the next one says that all is well.
    ForgottenFlushError,
    /// A sync that finds no room is taken for a request that was refused, as a write is that finds none.
    FullDiskForgiven,
    /// A sync that the kernel told that all is well answers before one that it told otherwise was looked at.
    AnswersNotHeld,
    /// A durable request takes the end of a sync that had begun before its bytes were written for its own.
    SyncJoinedLate,
    /// A durable zeroing makes its first file durable, not the others of a stripe.
    OneFileSynced,
    /// The client takes a flush to cover what was acknowledged before its answer, not before it was sent.
    FlushCoversLater,
    /// The client does not send unflushed writes again to a server that has lost them.
    NoReplay,
    /// It sends the newest of them first.
    ReplayBackwards,
    /// It does not wait with new requests until they are written again.
    ReplayNotAwaited,
    /// It keeps an old write that a durable one has covered, and sends it again over that one.
    ReplayOverDurable,
    /// It forgets, when a flush fails, the writes that it keeps.
    LogForgottenAfterFailedFlush,
    /// It sends overlapping writes without waiting for the first.
    OverlappingWrites,
    /// It forgets the requests that were in flight when the connection broke.
    RequestNotResent,
    /// It answers a request that was in flight when the connection broke, and sends it again all the same.
    AnsweredAndResent,
    /// The server lets a client's new session start while its old one still writes.
    LateStaleWrite,
    /// The server answers a large write when the first piece is written, before the others were pulled.
    EarlyAcknowledgement,
    /// It pulls each piece of a large write from the start of the client's window.
    PullAtWrongOffset,
    /// It sends each slice of a long read to the start of the client's window.
    SliceAtWrongOffset,
    /// It answers a long read with an error as if no slice of it were on its way.
    SlicesUncounted,
    /// It finds no frame for a request that waits, and does not look at that session again.
    LostWakeUp,
    /// It forgets the pieces that were on their way from a client that is gone, with their frames.
    PiecesOfTheDead,
    /// It does not watch idle connections: a client that dies behind a partition is never missed.
    NoKeepAlive,
    /// A header that came in two reads goes on at its start.
    ShortReadAtWrongOffset,
    /// What was queued while a send was in flight is not sent at its end.
    SendNotResumed,
    /// The home of a page forgets an ask that comes while it serves another.
    DsmAskLost,
    /// The home has the page sent to a writer before all other copies are gone.
    DsmForwardedEarly,
    /// The home serves the next ask before a reader has the copy that another reader sent.
    DsmNotConfirmed,
    /// The home takes a rank whose copy is gone for one that has it still.
    DsmCopyRemembered,
    /// The home gives its own page away and goes on using it.
    DsmHomeKeepsItsCopy,
    /// The registrar does not remember which rank touched a page first.
    DsmHomeNotRecorded,
    /// A copy is acknowledged as gone while the program can still read it.
    DsmAcknowledgedBeforeUnmap,
    /// A page is read for a writer while the program can still write to it.
    DsmSentBeforeUnmap,
    /// A page is read for a reader while the program can still write to it.
    DsmSentBeforeProtect,
    /// The program goes on writing to a page that a reader has a copy of.
    DsmWriterNotProtected,
    /// A reader's copy can be written to.
    DsmCopyWritable,
    /// The manager of a lock frees it although a rank has asked for it.
    DsmLockFreedUnderWaiter,
    /// A rank that returns a lock does not hand it to the rank that asked meanwhile.
    DsmLockNotHandedOn,
    /// A barrier opens when one rank is missing.
    DsmBarrierEarly,
    /// A page that waits for a device is sent, and its copy acknowledged, all the same.
    DsmPinnedPageOvertaken,
    /// Of what waits behind a pinned page, only the first action is done.
    DsmPinnedPageForgotten,
    /// A rank that leaves is not remembered, and its end is taken for a failure.
    DsmLeaveForgotten,
    /// A home takes a copy for given up that it has not recalled.
    DsmCopyNotInvalidated,
    /// A rank that may write to its copy from now on gets a page of zeroes.
    DsmUpgradeToZeroes,
    /// A lock's manager gives the lock to a rank while another waits for it or has it.
    DsmLockGrantedTwice,
    /// A rank that hears why a job is over names the rank that said so.
    DsmMessengerNamed,
    /// A rank that does what it can to neighbouring pages at once changes the order of what it does to one page.
    DsmRunMixesPage,
    /// It sends pages before it takes them from its program.
    DsmRunSentFirst,
    /// A rank that gives a lock or barrier on tells each other rank of changed pages once, and never again.
    DsmNoticesLost,
    /// It tells of its own changes, and not of those that others told it.
    DsmNoticesNotPassedOn,
    /// It forgets what it told at a barrier when it passes, though others may not have passed.
    DsmNoticesForgottenEarly,
    /// It gives a lock back before the homes have its changes.
    DsmReleasedEarly,
    /// It keeps a page's twin when the program may store to the page already.
    DsmTwinLate,
    /// It takes a difference from a twin that it had kept before the last difference: what others have changed since is overwritten.
    DsmTwinReused,
    /// Its difference has bytes that the program has not changed.
    DsmWholePageSent,
    /// It drops a page that it has changed without sending the home the difference.
    DsmDirtyCopyDropped,
    /// It keeps a page that another rank has changed, since it has changed it too.
    DsmDirtyCopyKept,
    /// It takes its copy for current after its own difference, whatever others have changed before.
    DsmOldCopyTakenForNew,
    /// It installs a page that was on its way when a notice of a later change came.
    DsmLateCopyInstalled,
    /// It sends the contents of a page that it alone had, and lets the program go on storing to it.
    DsmRecalledNotProtected,
    /// The home leaves a page to a rank whose copy lacks changes of others.
    DsmAloneWithOldCopy,
    /// A fence drops no copies.
    DsmFenceKeepsCopies,
    /// Shared memory: the next holder of a lock does not hear that the one before has fenced.
    DsmFenceNotPassedOn,
    /// Shared memory: a fence of another rank drops a page whose home may be about to leave it to this rank alone.
    DsmLatePageDropped,
    /// The program passes a lock before a page that it must lose has left it.
    DsmFlushNotAwaited,
    /// The server of files grants a lease while a change of the file is under way.
    LeaseDuringChange,
    /// It grants a lease with an answer that was read before the last change.
    LeaseOnOldAnswer,
    /// It begins a change when leases were recalled, and does not wait until they are returned.
    ChangeBeforeReturn,
    /// It recalls no leases on a file that is renamed, replaced or removed, but those on its directory.
    LeaseNotRecalled,
    /// It takes the lease of the session that changes a file for returned, also where that session did not name the file.
    LeaseOfChangerForgotten,
    /// It takes leases for returned when their session ends, while the client may not know yet.
    LeaseEndsWithSession,
    /// It takes the leases of a session that does not answer a recall before they have run out.
    LeaseFencedEarly,
    /// It takes the return of an older lease for one of the lease that is held.
    OldLeaseReturned,
    /// A new server process changes files while clients may use leases that the process before it gave.
    ChangeInGrace,
    /// The client of files counts a lease from the answer, not from when it asked.
    LeaseFromAnswer,
    /// It answers a recall before the kernel has dropped its pages, and believes the pages still.
    RecallBeforeInvalidation,
    /// It takes a lease from an answer that was overtaken by a recall.
    LeaseAfterRecall,
    /// It goes on using what it has cached of a file while it changes it.
    LeaseDuringOwnChange,
    /// It keeps attributes of an answer to a call that it sent before it had the lease.
    AttributesBeforeLease,
    /// It keeps its leases when the session has ended.
    LeaseOfOldSession,
    /// It believes, under a new lease, pages that were read under an earlier one or none.
    PagesOfEarlierLease,
    /// It lets the kernel use attributes for as long as a whole lease, not until the lease ends.
    KernelAttributesBeyondLease,
    /// It answers a recall while the kernel may use attributes.
    KernelAttributesAfterRecall,
    /// It lets the kernel use attributes while it changes the file.
    KernelAttributesDuringOwnChange,
    /// It begins a session while the kernel may use attributes of the session before.
    KernelAttributesOfOldSession,
    /// It lets the kernel use attributes, and so pages, although pages are not to be believed.
    KernelAttributesWithStalePages,
    /// The server leaves a client its lease on a directory through its own change of a name, although others have changed the directory
    /// meanwhile.
    NamesKeptThroughOthersChange,
    /// The client does not note what its own change has done to the names that it goes on using.
    OwnChangeOfNamesNotNoted,
    /// The client takes the lease that such an answer brings, although a recall has overtaken it.
    NamesKeptAfterRecall,
    /// The client goes on using a file's attributes from before its own write.
    AttributesKeptThroughOwnChange,
    /// A page whose copy cannot be got is lost, although another copy is there.
    PoolNoOtherCopy,
    /// A put goes to the first copy of its slab alone, and the others count as holding it.
    PoolPutToOneCopy,
    /// Bytes with a wrong checksum are taken.
    PoolChecksumIgnored,
    /// The copies at a lender that was given up count as there.
    PoolCopiesOfTheDead,
    /// A copy that was just leased counts as holding every page.
    PoolCopyTakenForWhole,
    /// A page is copied to another page of the new copy.
    PoolCopyAtWrongPage,
    /// A page is put while its old version is on its way to a new copy.
    PoolPutDuringCopy,
    /// A put that waits for a copy's end is forgotten.
    PoolDeferredPutDropped,
    /// Both copies of a slab are leased from one lender.
    PoolMirrorsAtOneLender,
    /// The checksum of the version before is kept.
    PoolOldChecksum,
    /// A slab that its lender takes back is given back before its pages were copied.
    PoolReturnedBeforeMoved,
    /// A borrower does not hear that a lender takes slabs back.
    PoolTakeBackIgnored,
    /// A page is waited for at a lender that does not answer, although another copy is there.
    PoolSlowLenderAwaited,
    /// The parity of a row is computed without the pages that stay there.
    PoolParityOfPart,
    /// The parity of a row's old pages is kept when pages are put there.
    PoolOldParityKept,
    /// A row is unlocked when its pages are on their way, not when they are there.
    PoolRowUnlockedEarly,
    /// A page is computed from a row that is being written.
    PoolReadsLockedRow,
    /// Two slabs of a group are leased from one lender.
    PoolRowAtOneLender,
    /// The pager reuses a frame although its put ended short.
    PagerShortPutTaken,
    /// The pager fills a page that was lost with zeroes.
    PagerLostIsZeroes,
    /// A forked child reads zeroes where its parent's page is in a frame.
    PagerForkWithoutFrames,
    /// The pager lets a program write to a protected page, and goes on taking the page for unchanged.
    PagerWriteNotNoted,
    /// A page leaves without a put although too few copies of it are left.
    PoolKeepsTooFewCopies,
    /// A page that no lender has leaves without a put.
    PoolKeepsGonePages,
    /// The pool claims to have pages that no lender has any more.
    PoolClaimsLostPages,
    /// Pages that are got at once come into each other's frames.
    PoolGetsMixedUp,
    /// A lender keeps the slabs of a borrower that does not renew them.
    LenderWaitsForEver,
    /// A node's message behind a put that is refused uses up its credit.
    RefusedMessageKeepsCredit,
    /// A node does not tell the peer that its program has taken messages.
    GrantForgotten,
    /// A node sends messages that the peer has not granted.
    MessageWithoutCredit,
    /// A flush ends before the puts that were begun before it.
    FlushNotAwaited,
    /// A node's puts under way do not end with their session.
    PutsOfTheDead,
    /// A get into several pieces of memory gets the first bytes into each.
    GetPieceAtWrongOffset,
    /// A window that the program has closed stays open to the peer.
    ClosedWindowStaysOpen,
    /// An operation ends while its memory is in use.
    MemoryNotAwaited,
    /// A window in lent memory is closed before its peer has said that it forgets it.
    RecallNotAwaited,
    /// A peer says that it forgets a window in lent memory, and goes on using it.
    GrantKept,
    /// Memory that is lent again is announced under the number of other memory that rests.
    WrongLoanWoken,
    /// Memory that a peer could write is not taken from it when the peer is given up.
    LentMemoryNotTakenBack,
}

impl Bug {
    /// Those that the simulation of volumes must find.
    pub const VOLUMES: [Self; 25] = [
        Self::DroppedFlush,
        Self::IgnoredFua,
        Self::ForgottenFlushError,
        Self::FullDiskForgiven,
        Self::SyncJoinedLate,
        Self::OneFileSynced,
        Self::FlushCoversLater,
        Self::NoReplay,
        Self::ReplayBackwards,
        Self::ReplayNotAwaited,
        Self::ReplayOverDurable,
        Self::LogForgottenAfterFailedFlush,
        Self::OverlappingWrites,
        Self::RequestNotResent,
        Self::AnsweredAndResent,
        Self::LateStaleWrite,
        Self::EarlyAcknowledgement,
        Self::PullAtWrongOffset,
        Self::SliceAtWrongOffset,
        Self::SlicesUncounted,
        Self::LostWakeUp,
        Self::PiecesOfTheDead,
        Self::NoKeepAlive,
        Self::ShortReadAtWrongOffset,
        Self::SendNotResumed,
    ];

    /// Those of shared memory.
    pub const DSM: [Self; 23] = [
        Self::DsmAskLost,
        Self::DsmForwardedEarly,
        Self::DsmNotConfirmed,
        Self::DsmCopyRemembered,
        Self::DsmHomeKeepsItsCopy,
        Self::DsmHomeNotRecorded,
        Self::DsmAcknowledgedBeforeUnmap,
        Self::DsmSentBeforeUnmap,
        Self::DsmSentBeforeProtect,
        Self::DsmWriterNotProtected,
        Self::DsmCopyWritable,
        Self::DsmLockFreedUnderWaiter,
        Self::DsmLockNotHandedOn,
        Self::DsmBarrierEarly,
        Self::DsmPinnedPageOvertaken,
        Self::DsmPinnedPageForgotten,
        Self::DsmLeaveForgotten,
        Self::DsmCopyNotInvalidated,
        Self::DsmUpgradeToZeroes,
        Self::DsmLockGrantedTwice,
        Self::DsmMessengerNamed,
        Self::DsmRunMixesPage,
        Self::DsmRunSentFirst,
    ];

    /// Those of shared memory with release consistency.
    pub const DSM_RELEASE: [Self; 19] = [
        Self::DsmNoticesLost,
        Self::DsmNoticesNotPassedOn,
        Self::DsmNoticesForgottenEarly,
        Self::DsmReleasedEarly,
        Self::DsmTwinLate,
        Self::DsmTwinReused,
        Self::DsmWholePageSent,
        Self::DsmDirtyCopyDropped,
        Self::DsmDirtyCopyKept,
        Self::DsmOldCopyTakenForNew,
        Self::DsmLateCopyInstalled,
        Self::DsmRecalledNotProtected,
        Self::DsmAloneWithOldCopy,
        Self::DsmFenceKeepsCopies,
        Self::DsmFenceNotPassedOn,
        Self::DsmLatePageDropped,
        Self::DsmFlushNotAwaited,
        Self::DsmRunMixesPage,
        Self::DsmRunSentFirst,
    ];

    /// Those of shares' leases.
    pub const LEASES: [Self; 25] = [
        Self::LeaseDuringChange,
        Self::LeaseOnOldAnswer,
        Self::ChangeBeforeReturn,
        Self::LeaseNotRecalled,
        Self::LeaseOfChangerForgotten,
        Self::LeaseEndsWithSession,
        Self::LeaseFencedEarly,
        Self::OldLeaseReturned,
        Self::ChangeInGrace,
        Self::LeaseFromAnswer,
        Self::RecallBeforeInvalidation,
        Self::LeaseAfterRecall,
        Self::LeaseDuringOwnChange,
        Self::AttributesBeforeLease,
        Self::LeaseOfOldSession,
        Self::PagesOfEarlierLease,
        Self::KernelAttributesBeyondLease,
        Self::KernelAttributesAfterRecall,
        Self::KernelAttributesDuringOwnChange,
        Self::KernelAttributesOfOldSession,
        Self::KernelAttributesWithStalePages,
        Self::NamesKeptThroughOthersChange,
        Self::OwnChangeOfNamesNotNoted,
        Self::NamesKeptAfterRecall,
        Self::AttributesKeptThroughOwnChange,
    ];

    /// Those of far memory.
    pub const MEMORY: [Self; 27] = [
        Self::PoolNoOtherCopy,
        Self::PoolPutToOneCopy,
        Self::PoolChecksumIgnored,
        Self::PoolCopiesOfTheDead,
        Self::PoolCopyTakenForWhole,
        Self::PoolCopyAtWrongPage,
        Self::PoolPutDuringCopy,
        Self::PoolDeferredPutDropped,
        Self::PoolMirrorsAtOneLender,
        Self::PoolOldChecksum,
        Self::PoolReturnedBeforeMoved,
        Self::PoolTakeBackIgnored,
        Self::PoolSlowLenderAwaited,
        Self::PoolParityOfPart,
        Self::PoolOldParityKept,
        Self::PoolRowUnlockedEarly,
        Self::PoolReadsLockedRow,
        Self::PoolRowAtOneLender,
        Self::PagerShortPutTaken,
        Self::PagerLostIsZeroes,
        Self::PagerForkWithoutFrames,
        Self::PagerWriteNotNoted,
        Self::PoolKeepsTooFewCopies,
        Self::PoolKeepsGonePages,
        Self::PoolClaimsLostPages,
        Self::PoolGetsMixedUp,
        Self::LenderWaitsForEver,
    ];

    /// Those that the simulation of nodes must find.
    pub const NODES: [Self; 12] = [
        Self::RefusedMessageKeepsCredit,
        Self::GrantForgotten,
        Self::MessageWithoutCredit,
        Self::FlushNotAwaited,
        Self::PutsOfTheDead,
        Self::GetPieceAtWrongOffset,
        Self::ClosedWindowStaysOpen,
        Self::MemoryNotAwaited,
        Self::RecallNotAwaited,
        Self::GrantKept,
        Self::WrongLoanWoken,
        Self::LentMemoryNotTakenBack,
    ];
}

/// Whether this build, on this thread, has that bug.
#[cfg(not(feature = "seeded-bugs"))]
#[inline]
pub const fn is(_bug: Bug) -> bool {
    false
}

#[cfg(feature = "seeded-bugs")]
pub use self::selected::{is, select};

#[cfg(feature = "seeded-bugs")]
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
