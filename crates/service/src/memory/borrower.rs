//! The borrower's end: leases of one lender, over a node's session.

use std::num::NonZeroU64;
use std::time::Duration;

use byway_fabric::node::{
    Address, Deadline, Descriptor, NodeError, NodeOptions, OpError, Session, SubmitError, WaitError,
};
use byway_fabric::{DESCRIPTOR_BYTES, node::Node};
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::session::Spoken;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::LendingStatus;
use super::pool::Class;
use super::wire::{Arguments, LeaseResult, LendError, Method, PROTOCOL, StatusResult, VERSIONS};

/// Why a lender could not be asked, or says no.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BorrowError {
    /// The lender's.
    #[error(transparent)]
    Lender(#[from] LendError),
    /// The session with it cannot be had, or has ended.
    #[error("the lender cannot be reached: {0}")]
    Node(#[from] NodeError),
    /// It does not answer.
    #[error("the lender does not answer: {0}")]
    Wait(#[from] WaitError),
    /// The session has ended.
    #[error("the session with the lender has ended: {0}")]
    Op(OpError),
    /// It cannot be asked.
    #[error("the lender cannot be asked: {0}")]
    Submit(SubmitError),
    /// The answer has a wrong form.
    #[error("the lender's answer is malformed; it speaks another version of the protocol")]
    Answer,
    /// Another address is the same process's, and the class keeps pages at several.
    #[error(
        "it is the same process as {0}, and pages that are to outlive a lender would be lost with it: name each lender once"
    )]
    SameLender(String),
    /// Its slabs are smaller than the borrower's.
    #[error(
        "the lender's slabs have {has} bytes, and this program needs {needs}: the lender runs another version of byway"
    )]
    SmallSlab {
        /// Bytes of the slab that it leased.
        has: u64,
        /// Bytes that a slab is to have.
        needs: u64,
    },
}

/// A lender that cannot be used.
#[derive(Debug)]
pub struct UnusableLender {
    /// Which, by its place among those that were named.
    pub lender: usize,
    /// Why not.
    pub source: BorrowError,
}

/// A slab that was leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedSlab {
    /// Its name at the lender.
    pub number: u64,
    /// Bytes.
    pub bytes: u64,
    /// Where to put and get.
    pub window: Descriptor,
    /// The lending process, as [`LendingStatus::lender`].
    pub lender: Option<NonZeroU64>,
}

impl LeasedSlab {
    /// The slab that a reply to `Lease` names; `None` if the reply is malformed.
    pub(super) fn of(reply: &Reply) -> Option<Self> {
        let result = LeaseResult::read_from_prefix(&padded(&reply.result)).ok()?.0;
        let window = Descriptor::from_bytes(reply.payload.first_chunk::<DESCRIPTOR_BYTES>()?);
        let rights = window.rights();
        let is_sound = window.len() == result.bytes.get() && !window.is_empty() && rights.put && rights.get;
        let (number, lender) = (result.slab.get(), NonZeroU64::new(result.lender.get()));
        is_sound.then_some(Self { number, bytes: window.len(), window, lender })
    }
}

/// A lender's session. Several may stand on one node ([`Borrower::connect_on`]).
pub struct Borrower {
    rpc: Rpc,
    session: Session,
    address: Address,
    /// How long an answer may take.
    patience: Duration,
}

impl Borrower {
    /// A node for borrowers.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_node(options: &NodeOptions) -> std::io::Result<Rpc> {
        Rpc::open_for(options, vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: None }])
    }

    /// Connects to a lender.
    ///
    /// # Errors
    /// See [`BorrowError`].
    pub fn connect_on(rpc: &Rpc, address: &Address, patience: Duration) -> Result<Self, BorrowError> {
        let session = rpc.node().connect(address, Deadline::after(patience))?;
        Ok(Self { rpc: rpc.clone(), session, address: address.clone(), patience })
    }

    /// Connects to all lenders of a class. Those that lend nothing say so now; so do two addresses of one process, if the class keeps pages at
    /// several lenders.
    ///
    /// # Errors
    /// See [`BorrowError`], of the first lender that cannot be used.
    pub fn connect_all(
        rpc: &Rpc,
        lenders: &[(String, Address)],
        class: Class,
        patience: Duration,
    ) -> Result<Vec<Self>, UnusableLender> {
        let (mut borrowers, mut processes): (_, Vec<Option<NonZeroU64>>) = (Vec::new(), Vec::new());
        for (lender, (_, address)) in lenders.iter().enumerate() {
            let unusable = |source| UnusableLender { lender, source };
            let borrower = Self::connect_on(rpc, address, patience).map_err(unusable)?;
            let process = borrower.status().map_err(unusable)?.lender;
            let is_twin = |other: &Option<NonZeroU64>| process.is_some() && *other == process;
            if let Some(twin) = processes.iter().position(is_twin).filter(|_| class.lenders() > 1) {
                return Err(unusable(BorrowError::SameLender(lenders[twin].0.clone())));
            }
            processes.push(process);
            borrowers.push(borrower);
        }
        Ok(borrowers)
    }

    /// The node, for puts and gets.
    pub fn node(&self) -> &Node {
        self.rpc.node()
    }

    /// Where the lender is.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The session, for puts and gets.
    pub fn session(&self) -> Session {
        self.session
    }

    /// Leases a slab, and waits for it.
    ///
    /// # Errors
    /// See [`BorrowError`].
    pub fn lease(&self) -> Result<LeasedSlab, BorrowError> {
        let reply = self.ask(Method::Lease, 0)?;
        LeasedSlab::of(&reply).ok_or(BorrowError::Answer)
    }

    /// Gives a slab back: nothing of the borrower's may be under way there.
    ///
    /// # Errors
    /// See [`BorrowError`].
    pub fn give_back(&self, slab: &LeasedSlab) -> Result<(), BorrowError> {
        self.ask(Method::Return, slab.number).map(drop)
    }

    /// What the lender lends to all.
    ///
    /// # Errors
    /// See [`BorrowError`].
    pub fn status(&self) -> Result<LendingStatus, BorrowError> {
        let reply = self.ask(Method::Status, 0)?;
        let status = StatusResult::read_from_prefix(&padded(&reply.result)).map_err(|_| BorrowError::Answer)?.0;
        Ok(LendingStatus {
            lender: NonZeroU64::new(status.lender.get()),
            limit_bytes: status.limit_bytes.get(),
            lent_bytes: status.lent_bytes.get(),
            filled_bytes: 0,
            borrowers: status.borrowers.get().into(),
            refused: 0,
            taken_back_bytes: 0,
            expired_bytes: 0,
            largest: Vec::new(),
        })
    }

    fn ask(&self, method: Method, slab: u64) -> Result<Reply, BorrowError> {
        let mut arguments = Arguments::new_zeroed();
        arguments.slab.set(slab);
        let soon = Deadline::after(self.patience);
        let call =
            Call { protocol: PROTOCOL, method: method as u16, arguments: arguments.as_bytes(), ..Call::default() };
        let ended = self.rpc.call(self.session, &call, soon).map_err(BorrowError::Submit)?.wait(soon)?;
        let failed = |error| match error {
            OpError::Status(status) => BorrowError::Lender(LendError::from_status(status)),
            other => BorrowError::Op(other),
        };
        Reply::of(ended.map_err(failed)?).map_err(|_| BorrowError::Answer)
    }
}

/// A result that is shorter than its structure has zeroes at its end.
fn padded(result: &[u8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    let len = result.len().min(64);
    bytes[..len].copy_from_slice(&result[..len]);
    bytes
}
