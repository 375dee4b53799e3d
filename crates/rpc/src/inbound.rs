//! The server's account of a session's calls: no more than granted, none twice at once.

use byway_fabric::Slot;

/// A breach of protocol by the caller: its session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InboundError {
    /// More calls than it was granted.
    #[error("more calls in flight than granted")]
    Credit,
    /// A call that is in flight already.
    #[error("the call is in flight already")]
    Duplicate,
}

/// Calls of one session that have not been answered.
#[derive(Debug)]
pub struct Inbound {
    in_flight: Vec<bool>,
    count: usize,
}

impl Inbound {
    /// A session that was granted so many credits.
    pub fn new(credits: u16) -> Self {
        Self { in_flight: vec![false; usize::from(credits)], count: 0 }
    }

    /// A call came. The low half of its id is a slot of the caller's, so it is under the credits.
    ///
    /// # Errors
    /// See [`InboundError`].
    pub fn begin(&mut self, call: u64) -> Result<(), InboundError> {
        let slot = self.in_flight.get_mut(Slot::from_u64(call).index as usize).ok_or(InboundError::Credit)?;
        if std::mem::replace(slot, true) {
            return Err(InboundError::Duplicate);
        }
        self.count += 1;
        Ok(())
    }

    /// A call was answered.
    pub fn end(&mut self, call: u64) {
        if let Some(slot) = self.in_flight.get_mut(Slot::from_u64(call).index as usize)
            && std::mem::replace(slot, false)
        {
            self.count -= 1;
        }
    }

    /// Calls that have not been answered.
    pub fn count(&self) -> usize {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_bound_the_calls_in_flight() {
        let id = |index, generation| Slot { index, generation }.to_u64();
        let mut inbound = Inbound::new(2);
        assert_eq!(inbound.begin(id(0, 1)), Ok(()));
        assert_eq!(inbound.begin(id(0, 2)), Err(InboundError::Duplicate));
        assert_eq!(inbound.begin(id(1, 1)), Ok(()));
        assert_eq!(inbound.begin(id(2, 1)), Err(InboundError::Credit));
        inbound.end(id(0, 1));
        inbound.end(id(0, 1));
        assert_eq!(inbound.count(), 1);
        assert_eq!(inbound.begin(id(0, 2)), Ok(()));
    }
}
