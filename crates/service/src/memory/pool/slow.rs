//! Lenders that do not answer for a while, and slabs whose time is nearly over.

use byway_reactor::Instant;
use byway_reactor::seeded::{self, Bug};

use super::action::{OpId, Told};
use super::slab::Source;
use super::{Op, OpKind, Pool};
use crate::limits::LENDER_SLOW;

impl Pool {
    /// Whether pages on their way to a lender may hold frames for long: it is slow, or was given up and its session is not closed yet.
    pub fn is_slow(&self) -> bool {
        self.abandoned > 0 || self.lenders.iter().any(|lender| lender.is_slow)
    }

    /// A lender has answered an operation.
    pub(super) fn heard_of(&mut self, lender: usize, now: Instant) {
        (self.lenders[lender].is_slow, self.lenders[lender].heard) = (false, now);
    }

    /// Notes when an operation is slow.
    pub(super) fn expect_end(&mut self, op: OpId, now: Instant) {
        while self.slow_at.front().is_some_and(|(_, first)| !self.ops.contains_key(first)) {
            self.slow_at.pop_front();
        }
        self.slow_at.push_back((now + LENDER_SLOW, op));
    }

    /// When an operation is slow next.
    pub(super) fn next_slow(&self) -> Option<Instant> {
        self.slow_at.front().map(|(at, _)| *at)
    }

    /// Looks at the operations that have not ended in time.
    pub(super) fn watch_slow(&mut self, now: Instant) {
        while let Some((_, op)) = self.slow_at.pop_front_if(|(at, _)| *at <= now) {
            let Some(Op { kind, lender: Some((lender, view)), .. }) = self.ops.get(&op).copied() else { continue };
            if seeded::is(Bug::PoolSlowLenderAwaited) {
                continue;
            }
            let is_given_up = self.lenders[lender].view != view;
            if !is_given_up && now - self.lenders[lender].heard < LENDER_SLOW {
                // It answers others: this one waits its turn on a slow path.
                self.slow_at.push_back((now + LENDER_SLOW, op));
                continue;
            }
            self.lenders[lender].is_slow |= !is_given_up;
            match kind {
                OpKind::Get(frame, place, _) => {
                    let other = self.source(place).is_some_and(|other| !self.is_slow_source(other));
                    if other || self.is_quick_by_row(place) {
                        self.told.push_back(Told::Slow(frame));
                    }
                    // The pager may have no frame for it now, and there may be another copy later.
                    self.slow_at.push_back((now + LENDER_SLOW, op));
                }
                OpKind::Lease => self.ask_another(op),
                _ => {}
            }
        }
    }

    pub(super) fn is_slow_source(&self, source: Source) -> bool {
        matches!(source, Source::Lease(lease) if self.lenders[lease.lender].is_slow)
    }

    /// Uses slabs no more whose lenders close them soon.
    pub(super) fn watch_leaving(&mut self, now: Instant) {
        let over: Vec<_> = self.leaving.extract_if(|_, (_, until)| *until <= now).collect();
        for (lease, (slab, _)) in over {
            self.drop_copy(slab, lease);
        }
    }
}
