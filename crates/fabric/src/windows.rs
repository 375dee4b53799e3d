//! Windows: memory that is open to one peer, under a key that cannot be guessed, within bounds, for one direction.
//!
//! A window's memory is a range of one frame. A payload is received straight into it: the table lends the frame to the
//! receive and gets it back ([`Windows::lend`], [`Windows::give_back`]). Closing a window while its frame is lent waits for
//! that ([`Closed::WhenReceived`]), so nothing ever writes into memory that its owner has again.
//!
//! A key is 64 bits: 20 name the slot, 44 are random and new at each use of the slot. A guess over a session that allows
//! one million wrong tries a second takes 100 days on average, and every wrong try is counted.

use std::ops::Range;
use std::rc::Rc;

use byway_reactor::{ByteRange, Frame, FrameRange};

use crate::limits::{GRANTS_MAX, WINDOWS_MAX};
use crate::random::Random;
use crate::rdma::{Exposed, RdmaError, Registrable, Window as ExposedWindow, WindowAddress};
use crate::slots::SessionId;

const SLOT_BITS: u32 = 20;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

/// The key of a window. 0 is no window's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WindowKey(pub u64);

/// Which of the table's slots a key names.
pub(crate) const fn slot_of(key: WindowKey) -> usize {
    (key.0 & SLOT_MASK) as usize
}

/// Why a window cannot be used so. The peer's fault; the memory was not touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
#[non_exhaustive]
pub enum WindowError {
    /// No window of this session has that key.
    #[error("no window has that key")]
    Key = 1,
    /// The range does not lie in the window.
    #[error("the range does not lie in the window")]
    Bounds = 2,
    /// The window is for the other direction.
    #[error("the window does not allow this access")]
    Rights = 3,
    /// Another payload is being received into it.
    #[error("the window is being filled already")]
    Busy = 4,
}

impl WindowError {
    /// What a peer says by that number. What it does not name rightly is a wrong key.
    pub const fn from_number(number: u64) -> Self {
        match number {
            2 => Self::Bounds,
            3 => Self::Rights,
            4 => Self::Busy,
            _ => Self::Key,
        }
    }
}

/// Why a window was not opened. Nothing has come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// All windows are open ([`WINDOWS_MAX`], over RDMA [`GRANTS_MAX`]); close some.
    #[error("too many windows are open; close some")]
    Full,
    /// The device cannot have the memory: mostly [`RdmaError::MemoryLimit`], which says what the operator is to raise.
    #[error("{0}")]
    Rdma(RdmaError),
}

/// The state of a closed window.
#[derive(Debug)]
pub enum Closed {
    /// It was not open.
    Unknown,
    /// The memory that the peer was to fill.
    Target(Frame),
    /// The memory that the peer was to read.
    Source(Rc<Frame>),
    /// A payload is being received into it: [`Windows::give_back`] will give up the frame.
    WhenReceived,
}

/// The effect of [`Windows::give_back`] on the frame.
#[derive(Debug)]
pub enum GivenBack {
    /// It lies in its window again.
    Open,
    /// The window was closed meanwhile; `owner` is whose it was.
    Closed {
        /// The memory.
        frame: Frame,
        /// As it was given to [`Windows::open_target`].
        context: u64,
    },
}

#[derive(Debug)]
enum WindowBacking {
    Free,
    Target(Frame),
    Lent {
        closing: bool,
    },
    Source(Rc<Frame>),
    /// Opened to the peer's device, which checks by itself what is asked of it.
    Exposed(Box<ExposedWindow>),
}

/// Whether a slot is one of those whose places are told.
const fn can_be_told(index: u32) -> bool {
    (index as usize) < GRANTS_MAX
}

/// Whose peers may use a window.
#[derive(Debug)]
enum Users {
    One(SessionId),
    Several(Vec<SessionId>),
}

impl Users {
    fn has(&self, session: SessionId) -> bool {
        match self {
            Self::One(one) => *one == session,
            Self::Several(several) => several.contains(&session),
        }
    }
}

#[derive(Debug)]
struct Window {
    secret: u64,
    users: Users,
    start: usize,
    len: usize,
    context: u64,
    /// It is for what we get, and not for puts that the peer decides on.
    get: bool,
    /// It is closed when it was read once.
    once: bool,
    backing: WindowBacking,
}

/// The windows of one loop.
#[derive(Debug, Default)]
pub struct Windows {
    slots: Vec<Window>,
    free: Vec<u32>,
    refused: u64,
}

impl Windows {
    /// Opens `memory` for the peer of `session` to fill. `None` (and the frame is gone) at
    /// [`WINDOWS_MAX`]: see [`Windows::is_full`].
    pub fn open_target(
        &mut self,
        random: &mut Random,
        session: SessionId,
        memory: FrameRange,
        context: u64,
    ) -> Option<WindowKey> {
        assert!(memory.end() <= memory.frame.len(), "range within the frame");
        self.open(random, session, memory.start..memory.end(), context, WindowBacking::Target(memory.frame))
    }

    /// Opens all of `frame` for what is got from the peer of `session`.
    ///
    /// # Errors
    /// The frame, at [`WINDOWS_MAX`].
    pub fn open_get(
        &mut self,
        random: &mut Random,
        session: SessionId,
        frame: Frame,
        context: u64,
    ) -> Result<WindowKey, Frame> {
        if self.is_full() {
            return Err(frame);
        }
        let len = frame.len();
        let key = self.open(random, session, 0..len, context, WindowBacking::Target(frame));
        let key = key.unwrap_or(WindowKey(0));
        if let Some(window) = self.find(key) {
            window.get = true;
        }
        Ok(key)
    }

    /// Opens `memory` for the peer of `session` to read.
    pub fn open_source(
        &mut self,
        random: &mut Random,
        session: SessionId,
        memory: FrameRange<Rc<Frame>>,
        context: u64,
    ) -> Option<WindowKey> {
        assert!(memory.end() <= memory.frame.len(), "range within the frame");
        self.open(random, session, memory.start..memory.end(), context, WindowBacking::Source(memory.frame))
    }

    /// Whether a slot is free whose place can be told to a peer that reaches windows by its device: see [`GRANTS_MAX`].
    pub fn has_room_exposed(&self) -> bool {
        !self.is_full() && (self.slots.len() < GRANTS_MAX || self.free.iter().any(|index| can_be_told(*index)))
    }

    /// Opens a window that the peer of `session` reaches by its device. `None` unless [`Windows::has_room_exposed`].
    pub fn open_exposed(
        &mut self,
        random: &mut Random,
        session: SessionId,
        window: ExposedWindow,
        context: u64,
    ) -> Option<WindowKey> {
        let place = self.free.iter().rposition(|index| can_be_told(*index));
        if place.is_none() && self.slots.len() >= GRANTS_MAX {
            return None;
        }
        if let Some(place) = place {
            // The one that is taken next.
            let last = self.free.len() - 1;
            self.free.swap(place, last);
        }
        let len = window.len();
        self.open(random, session, 0..len, context, WindowBacking::Exposed(Box::new(window)))
    }

    fn open(
        &mut self,
        random: &mut Random,
        session: SessionId,
        range: Range<usize>,
        context: u64,
        backing: WindowBacking,
    ) -> Option<WindowKey> {
        if self.is_full() {
            return None;
        }
        let secret = (random.next_u64() & !SLOT_MASK).max(1 << SLOT_BITS);
        let (start, len) = (range.start, range.len());
        let window =
            Window { secret, users: Users::One(session), start, len, context, get: false, once: false, backing };
        let index = if let Some(index) = self.free.pop() {
            self.slots[index as usize] = window;
            index
        } else {
            self.slots.push(window);
            self.slots.len() as u32 - 1
        };
        Some(WindowKey(secret | u64::from(index)))
    }

    /// Whether no more can be opened.
    pub fn is_full(&self) -> bool {
        self.slots.len() - self.free.len() >= WINDOWS_MAX
    }

    /// Windows that are open.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How often a peer named a window wrongly.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn find(&mut self, key: WindowKey) -> Option<&mut Window> {
        let window = self.slots.get_mut((key.0 & SLOT_MASK) as usize)?;
        (window.secret == key.0 & !SLOT_MASK && !matches!(window.backing, WindowBacking::Free)).then_some(window)
    }

    /// The window, if the peer of `session` may use that range of it; gives where the range starts in the frame.
    fn check(
        &mut self,
        session: SessionId,
        key: WindowKey,
        offset: u64,
        len: usize,
    ) -> Result<(&mut Window, usize), WindowError> {
        let Some(window) = self.find(key).filter(|window| window.users.has(session)) else {
            return Err(WindowError::Key);
        };
        if !ByteRange::new(offset, len as u64).ends_by(window.len as u64) {
            return Err(WindowError::Bounds);
        }
        let start = window.start + offset as usize;
        Ok((window, start))
    }

    /// Lends the frame to a receive of `len` bytes at `offset` of the window; gives where in the frame that starts.
    ///
    /// # Errors
    /// See [`WindowError`]; counted.
    pub fn lend(
        &mut self,
        session: SessionId,
        key: WindowKey,
        offset: u64,
        len: usize,
    ) -> Result<(Frame, usize), WindowError> {
        let lent = self.check(session, key, offset, len).and_then(|(window, start)| {
            match std::mem::replace(&mut window.backing, WindowBacking::Lent { closing: false }) {
                WindowBacking::Target(frame) => Ok((frame, start)),
                other => {
                    let is_busy = matches!(other, WindowBacking::Lent { .. });
                    let error = if is_busy { WindowError::Busy } else { WindowError::Rights };
                    window.backing = other;
                    Err(error)
                }
            }
        });
        self.refused += u64::from(lent.is_err());
        lent
    }

    /// Takes back what was lent for the window `key`.
    pub fn give_back(&mut self, key: WindowKey, frame: Frame) -> GivenBack {
        let Some(window) = self.find(key) else { return GivenBack::Closed { frame, context: 0 } };
        let context = window.context;
        if matches!(window.backing, WindowBacking::Lent { closing: true }) {
            self.release(key);
            return GivenBack::Closed { frame, context };
        }
        window.backing = WindowBacking::Target(frame);
        GivenBack::Open
    }

    /// A piece of a window that the peer asks for: the memory, and where it starts.
    ///
    /// # Errors
    /// See [`WindowError`]; counted.
    pub fn read(
        &mut self,
        session: SessionId,
        key: WindowKey,
        offset: u64,
        len: usize,
    ) -> Result<(Rc<Frame>, usize), WindowError> {
        let read = self.check(session, key, offset, len).and_then(|(window, start)| match &window.backing {
            WindowBacking::Source(frame) => Ok((Rc::clone(frame), start)),
            _ => Err(WindowError::Rights),
        });
        self.refused += u64::from(read.is_err());
        if read.is_ok() && self.find(key).is_some_and(|window| window.once) {
            self.close(key);
        }
        read
    }

    /// A window is for one use. One to be read is closed once it was; of one to be filled the owner closes it, and a peer that
    /// reaches it by its device is told, so that it does not begin a second use, at which the device would end the session.
    pub fn use_once(&mut self, key: WindowKey) {
        if let Some(window) = self.find(key) {
            window.once = true;
        }
    }

    /// Has the peers of all these sessions use a window, in place of the one that it was opened for.
    pub fn share(&mut self, key: WindowKey, sessions: Vec<SessionId>) {
        if let Some(window) = self.find(key) {
            window.users = Users::Several(sessions);
        }
    }

    /// The peer of `session` uses a window no longer; with the last of its users it is closed.
    pub fn leave(&mut self, key: WindowKey, session: SessionId) {
        let Some(window) = self.find(key).filter(|window| window.users.has(session)) else { return };
        if let Users::Several(several) = &mut window.users {
            several.retain(|other| *other != session);
            if !several.is_empty() {
                return;
            }
        }
        self.close(key);
    }

    /// Whether a window is for a get from the peer of `session`.
    pub fn is_get(&mut self, session: SessionId, key: WindowKey) -> bool {
        self.find(key).is_some_and(|window| window.get && window.users.has(session))
    }

    /// The windows of a session that are for gets.
    pub fn gets_of(&self, session: SessionId) -> Vec<WindowKey> {
        let open =
            |window: &Window| window.get && window.users.has(session) && !matches!(window.backing, WindowBacking::Free);
        let of_session = self.slots.iter().enumerate().filter(|(_, window)| open(window));
        of_session.map(|(index, window)| WindowKey(window.secret | index as u64)).collect()
    }

    /// The memory of a window that is not being filled: the frame, and the range in it.
    pub fn range(&mut self, key: WindowKey) -> Option<(&Frame, usize, usize)> {
        let window = self.find(key)?;
        let (start, len) = (window.start, window.len);
        match &window.backing {
            WindowBacking::Target(frame) => Some((frame, start, len)),
            WindowBacking::Source(frame) => Some((frame, start, len)),
            WindowBacking::Free | WindowBacking::Lent { .. } | WindowBacking::Exposed(_) => None,
        }
    }

    /// Where a window lies that the peer's device reaches, and its bytes.
    pub fn exposed(&mut self, key: WindowKey) -> Option<(WindowAddress, usize)> {
        match &self.find(key)?.backing {
            WindowBacking::Exposed(window) => Some((window.address(), window.len())),
            _ => None,
        }
    }

    /// What the peer of its session may do with a window that its device reaches, as [`WindowAdvert`](crate::wire::WindowAdvert)
    /// has it.
    pub fn exposed_rights(&mut self, key: WindowKey) -> Option<u8> {
        use crate::wire::WindowAdvert;
        let window = self.find(key)?;
        let WindowBacking::Exposed(exposed) = &window.backing else { return None };
        let right = if exposed.is_written() { WindowAdvert::PUT } else { WindowAdvert::GET };
        Some(if window.once { right | WindowAdvert::ONCE } else { right })
    }

    /// The peer of `session` says that it has used a window: closes it, if it is one for one use.
    pub fn used(&mut self, session: SessionId, key: WindowKey) -> Closed {
        let is_once = self.find(key).is_some_and(|window| window.users.has(session) && window.once);
        if is_once { self.close(key) } else { Closed::Unknown }
    }

    /// Whether the peer of `session` can have placed `len` bytes at `offset` of a window by its device.
    ///
    /// # Errors
    /// See [`WindowError`]; counted.
    pub fn check_placed(
        &mut self,
        session: SessionId,
        key: WindowKey,
        offset: u64,
        len: usize,
    ) -> Result<(), WindowError> {
        let placed = self.check(session, key, offset, len).and_then(|(window, _)| match &window.backing {
            WindowBacking::Exposed(exposed) if exposed.is_written() => Ok(()),
            _ => Err(WindowError::Rights),
        });
        self.refused += u64::from(placed.is_err());
        placed
    }

    /// The frames that the peer of a session may fill, and that are not being filled.
    pub fn targets_of(&mut self, session: SessionId) -> impl Iterator<Item = &mut Frame> {
        self.slots.iter_mut().filter(move |window| window.users.has(session)).filter_map(|window| {
            match &mut window.backing {
                WindowBacking::Target(frame) => Some(frame),
                _ => None,
            }
        })
    }

    /// Bytes of a window.
    pub fn bytes(&mut self, key: WindowKey) -> usize {
        self.find(key).map_or(0, |window| window.len)
    }

    /// Whether a payload is being received into a window.
    pub fn is_lent(&mut self, key: WindowKey) -> bool {
        self.find(key).is_some_and(|window| matches!(window.backing, WindowBacking::Lent { .. }))
    }

    /// Where in its frame a window starts.
    pub fn start(&mut self, key: WindowKey) -> Option<usize> {
        self.find(key).map(|window| window.start)
    }

    /// As it was given when the window was opened.
    pub fn context(&mut self, key: WindowKey) -> Option<u64> {
        self.find(key).map(|window| window.context)
    }

    /// Closes a window.
    pub fn close(&mut self, key: WindowKey) -> Closed {
        let Some(window) = self.find(key) else { return Closed::Unknown };
        if let WindowBacking::Lent { closing } = &mut window.backing {
            *closing = true;
            return Closed::WhenReceived;
        }
        let memory = std::mem::replace(&mut window.backing, WindowBacking::Free);
        self.release(key);
        match memory {
            WindowBacking::Target(frame) => Closed::Target(frame),
            WindowBacking::Source(frame) => Closed::Source(frame),
            WindowBacking::Exposed(window) => match window.close() {
                Some(Exposed::Own(Registrable::Frame(frame))) => Closed::Target(frame),
                Some(Exposed::Shared(frame)) => Closed::Source(frame),
                // The device does not release it: it is never used again.
                Some(Exposed::Own(Registrable::Buffer(_))) | None => Closed::Unknown,
            },
            WindowBacking::Free | WindowBacking::Lent { .. } => Closed::Unknown,
        }
    }

    fn release(&mut self, key: WindowKey) {
        let index = (key.0 & SLOT_MASK) as u32;
        let window = &mut self.slots[index as usize];
        window.backing = WindowBacking::Free;
        window.secret = 0;
        self.free.push(index);
    }
}

const _: () = assert!(WINDOWS_MAX <= 1 << SLOT_BITS);

#[cfg(test)]
mod tests {
    use byway_reactor::FramePool;

    use super::*;

    const SESSION: SessionId = SessionId::new(1, 1);
    const OTHER: SessionId = SessionId::new(2, 1);

    fn table() -> (Windows, Random, FramePool) {
        (Windows::default(), Random::from_kernel(), FramePool::new(1).unwrap())
    }

    #[test]
    fn a_wrong_key_session_bound_or_right_touches_nothing_and_is_counted() {
        let (mut windows, mut random, pool) = table();
        let target = windows
            .open_target(&mut random, SESSION, FrameRange::new(pool.alloc(8192).unwrap(), 4096, 4096), 7)
            .unwrap();
        let source = windows
            .open_source(&mut random, SESSION, FrameRange::new(Rc::new(pool.alloc(4096).unwrap()), 0, 4096), 8)
            .unwrap();
        let guesses = [
            (SESSION, WindowKey(target.0 ^ 1 << 40), 0, 1, WindowError::Key),
            (SESSION, WindowKey(0), 0, 0, WindowError::Key),
            (OTHER, target, 0, 1, WindowError::Key),
            (SESSION, target, 1, 4096, WindowError::Bounds),
            (SESSION, target, u64::MAX, 1, WindowError::Bounds),
            (SESSION, source, 0, 1, WindowError::Rights),
        ];
        for (session, key, offset, len, error) in guesses {
            assert_eq!(windows.lend(session, key, offset, len).unwrap_err(), error);
        }
        assert_eq!(windows.read(SESSION, target, 0, 1).unwrap_err(), WindowError::Rights);
        assert_eq!(windows.refused(), 7);
        let (frame, start) = windows.lend(SESSION, target, 10, 4086).unwrap();
        assert_eq!(start, 4106);
        assert_eq!(windows.lend(SESSION, target, 0, 1).unwrap_err(), WindowError::Busy);
        assert!(matches!(windows.give_back(target, frame), GivenBack::Open));
        assert!(matches!(windows.close(target), Closed::Target(_)));
        assert!(matches!(windows.close(target), Closed::Unknown));
        assert!(matches!(windows.close(source), Closed::Source(_)));
        assert!(windows.is_empty());
    }

    #[test]
    fn a_shared_window_is_of_all_its_sessions_and_closes_with_the_last() {
        let (mut windows, mut random, pool) = table();
        let third = SessionId::new(3, 1);
        let key =
            windows.open_target(&mut random, SESSION, FrameRange::new(pool.alloc(4096).unwrap(), 0, 4096), 7).unwrap();
        windows.share(key, vec![SESSION, OTHER]);
        for session in [SESSION, OTHER] {
            let (frame, _) = windows.lend(session, key, 0, 4096).unwrap();
            assert_eq!(windows.lend(SESSION, key, 0, 1).unwrap_err(), WindowError::Busy, "one at a time");
            assert!(matches!(windows.give_back(key, frame), GivenBack::Open));
        }
        assert_eq!(windows.lend(third, key, 0, 1).unwrap_err(), WindowError::Key);
        windows.leave(key, third);
        windows.leave(key, SESSION);
        assert_eq!(windows.lend(SESSION, key, 0, 1).unwrap_err(), WindowError::Key);
        let (frame, _) = windows.lend(OTHER, key, 0, 1).unwrap();
        windows.leave(key, OTHER);
        assert!(matches!(windows.give_back(key, frame), GivenBack::Closed { context: 7, .. }));
        assert!(windows.is_empty());
    }

    #[test]
    fn a_window_that_is_being_filled_closes_when_it_is_filled() {
        let (mut windows, mut random, pool) = table();
        let key =
            windows.open_target(&mut random, SESSION, FrameRange::new(pool.alloc(4096).unwrap(), 0, 4096), 7).unwrap();
        let (frame, _) = windows.lend(SESSION, key, 0, 4096).unwrap();
        assert!(matches!(windows.close(key), Closed::WhenReceived));
        assert_eq!(windows.lend(SESSION, key, 0, 1).unwrap_err(), WindowError::Busy);
        assert!(matches!(windows.give_back(key, frame), GivenBack::Closed { context: 7, .. }));
        assert!(windows.is_empty());
        let again =
            windows.open_target(&mut random, SESSION, FrameRange::new(pool.alloc(4096).unwrap(), 0, 4096), 9).unwrap();
        assert_ne!(again, key, "a slot's next key is another");
        assert_eq!(windows.lend(SESSION, key, 0, 1).unwrap_err(), WindowError::Key);
    }
}
