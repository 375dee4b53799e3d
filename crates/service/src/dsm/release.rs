//! Release consistency: the pages of a rank of which several ranks may write to one at a time.
//!
//! Home-based lazy release consistency (Zhou, Iftode and Li 1996), with versions of pages in place of vector clocks. A page's home has its
//! contents. A rank that stores to its copy keeps a twin first. Before it gives back a lock or arrives at a barrier, it sends the homes what
//! it has changed, byte by byte, and learns the version that each page has with its change: a write notice. The lock or the barrier carries
//! the notices that its next holder does not know, and that rank drops the copies that are older than they say, before its program goes on.
//!
//! A page that one rank alone uses costs nothing. Who touches it first is *alone* with it, and so is a rank that has changed it twice while no
//! other asked for it: it keeps no twin and sends no difference, until another rank asks and the home has it send what it has.

mod home;
mod notices;

use std::collections::{BTreeSet, HashMap, VecDeque};

use self::home::Home;
use self::notices::Notices;
use super::outgoing::{Handled, Outbox, Outgoing};
use super::wire::Message;
use super::{Action, Contents, Page, Rank};
use crate::coherence::Mode;
use crate::limits::DSM_TWINS_MAX;
use byway_reactor::seeded::{self, Bug};

/// A page as this rank has it.
#[derive(Clone, Copy, Debug)]
struct Copy {
    mode: Mode,
    /// What the program waits for.
    asked: Mode,
    /// Once it is known.
    home: Option<Rank>,
    /// It has all changes up to this one.
    version: u64,
    /// No other rank has a copy of this version or a later one.
    is_alone: bool,
    /// The program has stored to it, and there is a twin.
    is_dirty: bool,
    /// What was asked for may be too old when it comes: a notice has come meanwhile.
    asks_again: bool,
}

/// One rank's pages.
#[derive(Debug)]
pub(super) struct Release {
    copies: HashMap<Page, Copy>,
    /// Of the pages whose home this rank is.
    homes: HashMap<Page, Home>,
    /// Of the pages that this rank is the registrar of: which rank touched each first.
    first: HashMap<Page, Rank>,
    notices: Notices,
    /// Pages with twins, in the order of their first stores, and some that have none any more.
    dirty: VecDeque<Page>,
    /// Differences that no home has acknowledged, by number, and the numbers of each page's.
    differences: BTreeSet<u64>,
    by_page: HashMap<Page, VecDeque<u64>>,
    next_difference: u64,
    /// Pages whose differences are not on their way yet, as a device has them pinned: how many.
    flushing: HashMap<Page, usize>,
    /// Pages that the program has to lose when their homes have acknowledged its differences: with an answer to one, a home may make
    /// this rank alone with the page, which needs a copy. Until then the program does not store to them.
    late: BTreeSet<Page>,
    /// Of each barrier: the mark of the notices at this rank's last arrival, and at the one before.
    marks: HashMap<u32, (u64, u64)>,
}

impl Release {
    pub(super) fn new(rank: Rank, ranks: Rank) -> Self {
        Self {
            copies: HashMap::new(),
            homes: HashMap::new(),
            first: HashMap::new(),
            notices: Notices::new(rank, ranks),
            dirty: VecDeque::new(),
            differences: BTreeSet::new(),
            by_page: HashMap::new(),
            next_difference: 0,
            flushing: HashMap::new(),
            late: BTreeSet::new(),
            marks: HashMap::new(),
        }
    }

    /// The program's load or store has faulted.
    pub(super) fn fault(&mut self, page: Page, mode: Mode, out: &mut Outgoing) {
        let is_late = self.late.contains(&page);
        let copy = self.copy(page);
        if copy.mode >= mode {
            out.install(page, copy.mode, Contents::Kept);
        } else if is_late {
            copy.asked = copy.asked.max(mode);
        } else if copy.mode == Mode::Read {
            out.count_fault(mode);
            if copy.is_alone {
                copy.mode = Mode::Write;
                out.install(page, Mode::Write, Contents::Kept);
            } else {
                self.keep_twin(page, Contents::Kept, out);
            }
        } else if copy.asked > Mode::None {
            copy.asked = copy.asked.max(mode);
        } else {
            copy.asked = mode;
            out.count_fault(mode);
            self.ask(page, out);
        }
    }

    /// The pages whose home this rank is.
    pub(super) fn homes(&self) -> Vec<Page> {
        self.homes.keys().copied().collect()
    }

    /// What the program may do with a page.
    pub(super) fn mode(&self, page: Page) -> Mode {
        self.copies.get(&page).map_or(Mode::None, |copy| copy.mode)
    }

    /// A message about a page, or notices.
    pub(super) fn handle(&mut self, from: Rank, message: Message, payload: Vec<u8>, out: &mut Outgoing) -> Handled {
        match message {
            Message::Ask { page, requester, .. } => self.asked(from, page, requester, out),
            Message::Own { page } => self.owns(from, page, out),
            Message::Forward { page, requester, version, .. } => self.recalled((from, requester), page, version, out),
            Message::Contents { page, .. } => self.at_home(page, out, |home, outbox| home.came(from, payload, outbox)),
            Message::Page { page, home, version, .. } => self.page_came(from, (page, home, version), payload, out),
            Message::Difference { page, version } => {
                self.at_home(page, out, |home, outbox| home.difference(from, version, payload, outbox))
            }
            Message::Differed { page, mode, version } => self.differed(from, page, (mode, version), out),
            Message::Notices => self.notices.learn_all(from, &payload),
            _ => Err("it sent a message of another consistency"),
        }
    }

    /// Sends the homes all that the program has changed. Over when [`Release::is_released`] says so of the number that this gives.
    pub(super) fn release(&mut self, out: &mut Outgoing) -> u64 {
        while let Some(page) = self.dirty.pop_front() {
            if self.copy(page).is_dirty {
                self.flush(page, true, out);
            }
        }
        self.next_difference
    }

    /// Whether the homes have all differences before this one.
    pub(super) fn is_released(&self, before: u64) -> bool {
        self.differences.first().is_none_or(|first| *first >= before) || seeded::is(Bug::DsmReleasedEarly)
    }

    /// Whether the homes have all differences.
    pub(super) fn is_settled(&self) -> bool {
        self.differences.is_empty()
    }

    /// What a rank has to be told before a message that lets it go on: payloads of [`Message::Notices`].
    pub(super) fn news_for(&mut self, rank: Rank) -> Vec<Vec<u8>> {
        self.notices.news_for(rank)
    }

    /// Drops the copies that are older than notices say: the program goes on behind a lock or barrier of another rank. It may when
    /// [`Release::is_acquired`] says so.
    pub(super) fn acquire(&mut self, out: &mut Outgoing) {
        let Some(fresh) = self.notices.take_fresh() else { return self.invalidate_all(out) };
        for (page, version) in fresh {
            if self.copies.get(&page).is_some_and(|copy| copy.version < version) {
                self.invalidate(page, out);
            }
        }
    }

    /// The program fences. Drops the copies of all pages that other ranks may use. Looks at all pages that this rank has ever used.
    pub(super) fn acquire_all(&mut self, out: &mut Outgoing) {
        if seeded::is(Bug::DsmFenceKeepsCopies) {
            return;
        }
        self.notices.fenced();
        self.invalidate_all(out);
    }

    fn invalidate_all(&mut self, out: &mut Outgoing) {
        let mut pages: Vec<Page> = self.copies.keys().copied().collect();
        pages.sort_unstable();
        for page in pages {
            let is_answered = !self.by_page.contains_key(&page) || seeded::is(Bug::DsmLatePageDropped);
            if !is_answered && self.mode(page) > Mode::None {
                self.late.insert(page);
                if self.copy(page).is_dirty {
                    self.flush(page, true, out);
                }
            } else {
                self.invalidate(page, out);
            }
        }
    }

    /// The last difference of a late page is acknowledged: the program loses it, and what it waits for is asked for.
    fn end_late(&mut self, page: Page, out: &mut Outgoing) {
        if self.by_page.contains_key(&page) || !self.late.remove(&page) {
            return;
        }
        let asked = std::mem::replace(&mut self.copy(page).asked, Mode::None);
        self.invalidate(page, out);
        if asked > Mode::None {
            self.fault(page, asked, out);
        }
    }

    /// Whether all pages that the program had to lose have left it: none waits for a device or a home's answer, nor behind a difference that
    /// waits for a device.
    pub(super) fn is_acquired(&self) -> bool {
        self.flushing.is_empty() && self.late.is_empty()
    }

    /// A difference is on its way.
    pub(super) fn flushed(&mut self, page: Page) {
        if let Some(count) = self.flushing.get_mut(&page) {
            *count -= 1;
            if *count == 0 {
                self.flushing.remove(&page);
            }
        }
    }

    /// This rank's arrival at a barrier is about to be sent.
    pub(super) fn arrive(&mut self, barrier: u32) {
        let mark = self.notices.mark();
        let (last, before) = self.marks.entry(barrier).or_default();
        (*before, *last) = (*last, mark);
    }

    /// All ranks have arrived at a barrier: all have passed its last round, and know what this rank knew when it arrived there.
    pub(super) fn pass(&mut self, barrier: u32) {
        let (last, before) = self.marks.get(&barrier).copied().unwrap_or_default();
        self.notices.forget(if seeded::is(Bug::DsmNoticesForgottenEarly) { last } else { before });
    }

    fn copy(&mut self, page: Page) -> &mut Copy {
        self.copies.entry(page).or_insert(Copy {
            mode: Mode::None,
            asked: Mode::None,
            home: None,
            version: 0,
            is_alone: false,
            is_dirty: false,
            asks_again: false,
        })
    }

    fn ask(&mut self, page: Page, out: &mut Outgoing) {
        let to = self.copy(page).home.unwrap_or_else(|| out.registrar(page));
        out.send(to, Message::Ask { page, mode: Mode::Read, requester: out.rank }, Vec::new());
    }

    fn asked(&mut self, from: Rank, page: Page, requester: Rank, out: &mut Outgoing) -> Handled {
        let registrar = out.registrar(page);
        if requester >= out.ranks || requester != from && from != registrar {
            return Err("it asked for a page on behalf of another rank");
        }
        if self.homes.contains_key(&page) {
            return self.at_home(page, out, |home, outbox| home.ask(requester, outbox));
        }
        if registrar != out.rank {
            return Err("it asked a rank that is neither the page's home nor its registrar");
        }
        match self.first.get(&page) {
            Some(home) if *home == requester => return Err("it asked the registrar for a page whose home it is"),
            Some(home) => out.send(*home, Message::Ask { page, mode: Mode::Read, requester }, Vec::new()),
            None => {
                self.first.insert(page, requester);
                out.send(requester, Message::Own { page }, Vec::new());
            }
        }
        Ok(())
    }

    fn owns(&mut self, from: Rank, page: Page, out: &mut Outgoing) -> Handled {
        let is_asked = self.copy(page).asked > Mode::None;
        if from != out.registrar(page) || !is_asked || self.homes.contains_key(&page) {
            return Err("it gave away a page that is not its to give");
        }
        self.homes.insert(page, Home::new(page, out.rank));
        let copy = self.copy(page);
        (copy.home, copy.asked, copy.asks_again) = (Some(out.rank), Mode::None, false);
        (copy.mode, copy.is_alone) = (Mode::Write, true);
        out.install(page, Mode::Write, Contents::Zero);
        Ok(())
    }

    fn at_home(
        &mut self,
        page: Page,
        out: &mut Outgoing,
        change: impl FnOnce(&mut Home, &mut Outbox) -> Handled,
    ) -> Handled {
        let mut outbox = Outbox::new();
        let home = self.homes.get_mut(&page).ok_or("it took this rank for the home of a page")?;
        let done = change(home, &mut outbox);
        for (to, message, payload) in outbox {
            out.counters.pages_sent += u64::from(!payload.is_empty() && to != out.rank);
            out.send(to, message, payload);
        }
        done
    }

    /// The home wants the contents of a page with which this rank is alone.
    fn recalled(&mut self, (from, requester): (Rank, Rank), page: Page, version: u64, out: &mut Outgoing) -> Handled {
        let copy = self.copy(page);
        if requester != from || copy.home.is_some_and(|home| home != from) || !copy.is_alone {
            return Err("it recalled a page that this rank is not alone with");
        }
        copy.is_alone = false;
        copy.version = version;
        if copy.mode == Mode::Read || !seeded::is(Bug::DsmRecalledNotProtected) {
            copy.mode = Mode::Read;
            out.actions.push_back(Action::Protect { page });
        }
        out.send_page(from, page, Message::Contents { page, version });
        Ok(())
    }

    fn page_came(
        &mut self,
        from: Rank,
        (page, home, version): (Page, Rank, u64),
        payload: Vec<u8>,
        out: &mut Outgoing,
    ) -> Handled {
        let copy = self.copy(page);
        if copy.asked == Mode::None || from != home || copy.home.is_some_and(|known| known != home) {
            return Err("it sent a page that this rank did not ask for");
        }
        copy.home = Some(home);
        if copy.asks_again && !seeded::is(Bug::DsmLateCopyInstalled) {
            copy.asks_again = false;
            self.ask(page, out);
            return Ok(());
        }
        out.counters.pages_received += u64::from(from != out.rank);
        copy.version = version;
        copy.asks_again = false;
        let asked = std::mem::replace(&mut copy.asked, Mode::None);
        if asked == Mode::Write {
            self.keep_twin(page, Contents::Received(payload), out);
        } else {
            copy.mode = Mode::Read;
            out.install(page, Mode::Read, Contents::Received(payload));
        }
        Ok(())
    }

    /// Lets the program store to a page that other ranks may use.
    fn keep_twin(&mut self, page: Page, contents: Contents, out: &mut Outgoing) {
        let copy = self.copy(page);
        (copy.mode, copy.is_dirty) = (Mode::Write, true);
        self.dirty.push_back(page);
        out.arrives(page);
        if seeded::is(Bug::DsmTwinLate) {
            out.install(page, Mode::Write, contents);
            out.actions.push_back(Action::Twin { page, contents: Contents::Kept });
        } else {
            out.actions.push_back(Action::Twin { page, contents });
        }
        if self.dirty.len() > DSM_TWINS_MAX
            && let Some(oldest) = self.dirty.pop_front()
            && self.copy(oldest).is_dirty
        {
            self.flush(oldest, true, out);
        }
    }

    /// Sends the home what the program has changed in a page. The program keeps its copy, to load from, or loses it.
    fn flush(&mut self, page: Page, keeps: bool, out: &mut Outgoing) {
        let number = self.next_difference;
        self.next_difference += 1;
        self.differences.insert(number);
        self.by_page.entry(page).or_default().push_back(number);
        let copy = self.copy(page);
        copy.is_dirty = false;
        copy.mode = if keeps { Mode::Read } else { Mode::None };
        let version = copy.version;
        // A rank that keeps no copy cannot be alone with it; 0 is the version of no contents.
        let version = if keeps && !self.late.contains(&page) { version } else { 0 };
        // A page with a twin came from its home.
        let Some(to) = self.copy(page).home else { return };
        *self.flushing.entry(page).or_default() += 1;
        out.counters.messages += u64::from(to != out.rank);
        out.actions.push_back(Action::Flush { to, page, message: Message::Difference { page, version }, keeps });
    }

    /// A home has taken a difference.
    fn differed(&mut self, from: Rank, page: Page, (mode, version): (Mode, u64), out: &mut Outgoing) -> Handled {
        let numbers =
            self.by_page.get_mut(&page).filter(|_| self.copies.get(&page).is_some_and(|copy| copy.home == Some(from)));
        let number =
            numbers.and_then(VecDeque::pop_front).ok_or("it acknowledged a difference that it was not sent")?;
        if self.by_page.get(&page).is_some_and(VecDeque::is_empty) {
            self.by_page.remove(&page);
        }
        self.differences.remove(&number);
        if version > 0 {
            self.notices.learn(page, version, out.rank);
        }
        let copy = self.copy(page);
        // No other rank's change came between: the copy has all that the home has.
        if copy.mode > Mode::None && (copy.version + 1 == version || seeded::is(Bug::DsmOldCopyTakenForNew)) {
            copy.version = copy.version.max(version);
        }
        if mode == Mode::Write {
            if copy.mode == Mode::None || copy.version != version {
                return Err("it left a page to this rank that it has no copy of");
            }
            copy.is_alone = true;
            if std::mem::take(&mut copy.is_dirty) {
                out.actions.push_back(Action::ForgetTwin { page });
            }
        }
        self.end_late(page, out);
        Ok(())
    }

    /// The program loses its copy, unless no other rank can have changed the page.
    fn invalidate(&mut self, page: Page, out: &mut Outgoing) {
        let copy = self.copy(page);
        copy.asks_again = copy.asked > Mode::None;
        if copy.mode == Mode::None || copy.is_alone {
            return;
        }
        out.counters.invalidations += 1;
        if copy.is_dirty && !seeded::is(Bug::DsmDirtyCopyDropped) {
            if !seeded::is(Bug::DsmDirtyCopyKept) {
                self.flush(page, false, out);
            }
        } else {
            copy.mode = Mode::None;
            out.actions.push_back(Action::Unmap { page });
        }
    }
}
