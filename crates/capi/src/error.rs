//! Error codes, and their texts.

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use byway_fabric::node::{NodeError, OpError, SubmitError, WaitError};

/// A required pointer is null, a text is not UTF-8 or not an address, or a number is out of range.
pub const BYWAY_E_INVALID: c_int = -1;
/// The deadline has passed; the operation continues.
pub const BYWAY_E_DEADLINE: c_int = -2;
/// Too many operations are in flight, or messages wait for credit: wait for some to end.
pub const BYWAY_E_BUSY: c_int = -3;
/// The session is unknown: the program closed it, or was told of its end.
pub const BYWAY_E_NO_SESSION: c_int = -4;
/// The session ended.
pub const BYWAY_E_ENDED: c_int = -5;
/// A range does not lie in its memory or window.
pub const BYWAY_E_RANGE: c_int = -6;
/// A header, a payload or a list is too long.
pub const BYWAY_E_TOO_LONG: c_int = -7;
/// The window does not permit the operation.
pub const BYWAY_E_RIGHTS: c_int = -8;
/// The peer refused: no such window, or the range or right exceeds it.
pub const BYWAY_E_REFUSED: c_int = -9;
/// The operation was cancelled.
pub const BYWAY_E_CANCELLED: c_int = -10;
/// The result was taken already.
pub const BYWAY_E_TAKEN: c_int = -11;
/// This process is a forked child of the one that opened the node, or joined the job: open another node here; call the job in the parent.
pub const BYWAY_E_FORKED: c_int = -12;
/// The kernel refused: no memory, no descriptors, no such address, or no listener there.
pub const BYWAY_E_SYSTEM: c_int = -13;
/// A bug of this library.
pub const BYWAY_E_BUG: c_int = -14;

/// No answer to the call arrived in time.
pub const BYWAY_E_EXPIRED: c_int = -15;
/// The server answered the call with a status other than 0, which the completion has.
pub const BYWAY_E_STATUS: c_int = -16;
/// Operations or windows of another node use the memory, or an operation is another's.
pub const BYWAY_E_OTHER_NODE: c_int = -17;
/// The peer does not serve the protocol of a call, or not in a version that this library supports; or the node does not support
/// it.
pub const BYWAY_E_UNSUPPORTED: c_int = -18;

/// What a code says, in English; never null, and never freed.
#[unsafe(no_mangle)]
pub extern "C" fn byway_error_text(code: c_int) -> *const c_char {
    let text = match code {
        0.. => c"no error",
        BYWAY_E_INVALID => c"a pointer is null, a text is not UTF-8, an address is not tcp://HOST:PORT or the like, or a number is out of range",
        BYWAY_E_DEADLINE => c"the deadline has passed; the operation goes on",
        BYWAY_E_BUSY => c"too many operations are in flight; wait for some to end",
        BYWAY_E_NO_SESSION => c"the session is unknown or has ended: connect again",
        BYWAY_E_ENDED => c"the session ended",
        BYWAY_E_RANGE => c"a range does not lie in its memory or window",
        BYWAY_E_TOO_LONG => c"a header, a payload or a list is too long",
        BYWAY_E_RIGHTS => c"the window does not allow this access",
        BYWAY_E_REFUSED => c"the peer refused: it has no such window",
        BYWAY_E_CANCELLED => c"cancelled",
        BYWAY_E_TAKEN => c"the result was taken already",
        BYWAY_E_FORKED => c"this process is a child of the one that opened the node; open another node",
        BYWAY_E_SYSTEM => c"the kernel refused: memory, descriptors or the address",
        BYWAY_E_BUG => c"a bug in byway",
        BYWAY_E_EXPIRED => c"no answer to the call came in time",
        BYWAY_E_STATUS => c"the server did not do what it was called for",
        BYWAY_E_OTHER_NODE => c"the memory or operation belongs to another node",
        BYWAY_E_UNSUPPORTED => c"the peer does not serve that protocol, or not in a version that this library speaks; or the node does not speak it",
        _ => c"no code of byway's",
    };
    text.as_ptr()
}

/// An error that the libraries below have got since, and that has no code here yet.
const UNKNOWN: c_int = BYWAY_E_BUG;

/// What went wrong, as a code.
pub(crate) struct Code(pub(crate) c_int);

/// Runs a function of the interface; no panic leaves it.
pub(crate) fn guard(call: impl FnOnce() -> Result<c_int, Code>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(Code(code))) => code,
        Err(_) => BYWAY_E_BUG,
    }
}

impl From<SubmitError> for Code {
    fn from(error: SubmitError) -> Self {
        Self(match error {
            SubmitError::Forked => BYWAY_E_FORKED,
            SubmitError::Panicked => BYWAY_E_BUG,
            SubmitError::Busy | SubmitError::Borrowed => BYWAY_E_BUSY,
            SubmitError::NoSession => BYWAY_E_NO_SESSION,
            SubmitError::Ended(_) | SubmitError::CallerGone => BYWAY_E_ENDED,
            SubmitError::OutOfRange => BYWAY_E_RANGE,
            SubmitError::TooLong => BYWAY_E_TOO_LONG,
            SubmitError::Rights => BYWAY_E_RIGHTS,
            SubmitError::OtherNode => BYWAY_E_OTHER_NODE,
            SubmitError::Unsupported | SubmitError::NotSpoken => BYWAY_E_UNSUPPORTED,
            _ => UNKNOWN,
        })
    }
}

impl From<OpError> for Code {
    fn from(error: OpError) -> Self {
        Self(match error {
            OpError::Cancelled => BYWAY_E_CANCELLED,
            OpError::Ended(_) => BYWAY_E_ENDED,
            OpError::Refused(_) | OpError::WrongAnswer => BYWAY_E_REFUSED,
            OpError::Status(_) => BYWAY_E_STATUS,
            OpError::Full => BYWAY_E_BUSY,
            OpError::Io(_) | OpError::Rdma(_) => BYWAY_E_SYSTEM,
            OpError::Deadline => BYWAY_E_EXPIRED,
            _ => UNKNOWN,
        })
    }
}

impl From<WaitError> for Code {
    fn from(error: WaitError) -> Self {
        Self(match error {
            WaitError::Deadline => BYWAY_E_DEADLINE,
            WaitError::Taken => BYWAY_E_TAKEN,
            WaitError::OtherNode => BYWAY_E_OTHER_NODE,
            WaitError::Forked => BYWAY_E_FORKED,
            WaitError::Panicked => BYWAY_E_BUG,
            WaitError::Io(_) => BYWAY_E_SYSTEM,
            _ => UNKNOWN,
        })
    }
}

impl From<NodeError> for Code {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::Submit(error) => error.into(),
            NodeError::Op(error) => error.into(),
            NodeError::Wait(error) => error.into(),
            _ => Self(UNKNOWN),
        }
    }
}

impl From<std::io::Error> for Code {
    fn from(error: std::io::Error) -> Self {
        let invalid = error.kind() == std::io::ErrorKind::InvalidInput;
        Self(if invalid { BYWAY_E_INVALID } else { BYWAY_E_SYSTEM })
    }
}

/// A handle that C has given back to us for a call.
///
/// # Safety
/// Null, or an object that this library returned and that was not freed.
pub(crate) unsafe fn borrow<'a, T>(handle: *const T) -> Result<&'a T, Code> {
    // SAFETY: by the caller's word it is null or points to a value of ours that lives for the call.
    unsafe { handle.as_ref() }.ok_or(Code(BYWAY_E_INVALID))
}

/// Where a result goes. Looked for before anything is begun or taken, so that nothing is lost for want of it.
pub(crate) struct OutPointer<T>(NonNull<T>);

impl<T> OutPointer<T> {
    /// # Errors
    /// It is null, or no place for such a value.
    ///
    /// # Safety
    /// `at` is null or can be written, for as long as this lives.
    pub(crate) unsafe fn at(at: *mut T) -> Result<Self, Code> {
        NonNull::new(at).filter(|at| at.is_aligned()).map(Self).ok_or(Code(BYWAY_E_INVALID))
    }

    /// Gives a value to C.
    pub(crate) fn give(self, value: T) {
        // SAFETY: not null, aligned, and can be written, by the word of who made this.
        unsafe { self.0.write(value) };
    }
}

/// Bytes of C's.
///
/// # Safety
/// `bytes` has `len` bytes that do not change during the call; it may be anything if `len` is 0.
pub(crate) unsafe fn slice<'a, T>(bytes: *const T, len: usize) -> Result<&'a [T], Code> {
    if len == 0 {
        return Ok(&[]);
    }
    if bytes.is_null() || !bytes.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Code(BYWAY_E_INVALID));
    }
    // SAFETY: not null, aligned, and of so many values by the caller's word.
    Ok(unsafe { std::slice::from_raw_parts(bytes, len) })
}
