//! Where pages go: slabs of lenders, and a file beside them.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use byway_fabric::node::{Deadline, Group, Memory, Node};
use byway_rpc::node::Rpc;
use byway_service::memory::pager::{PAGE_BYTES, Place, PutEnd};
use byway_service::memory::{BorrowError, Borrower, LeasedSlab};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Puts and gets under way at most: each has a frame.
const OPERATIONS_MAX: usize = 1 << 14;

/// Names a put in the group's contexts.
const PUT: u64 = 1 << 32;

/// Something that a store was asked for has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A put of that frame.
    Put(u32, PutEnd),
    /// A get into that frame.
    Got(u32, bool),
}

/// See the module.
pub(super) struct Store {
    group: Group,
    lenders: Vec<Lender>,
    slabs: Vec<Slab>,
    frames: Memory,
    file: OwnedFd,
    /// All pages too, where a lost lender is to lose nothing.
    spill: Option<File>,
    /// The last write to the file failed.
    is_refused: bool,
    /// Where each frame's page goes to or comes from.
    places: Vec<Option<Place>>,
    /// What has ended without an operation.
    ended: Vec<Ended>,
    next: usize,
}

struct Lender {
    name: String,
    borrower: Borrower,
    is_lost: bool,
}

struct Slab {
    lender: usize,
    leased: LeasedSlab,
}

impl Store {
    /// A store over these lenders, all of one node, with so many frames.
    pub(super) fn new(
        rpc: &Rpc,
        lenders: Vec<(String, Borrower)>,
        spill: Option<File>,
        frames: u32,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let bytes = frames as usize * PAGE_BYTES;
        let file = memfd_create("byway-far", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let lender = |(name, borrower)| Lender { name, borrower, is_lost: false };
        Ok(Self {
            group: rpc.node().group(OPERATIONS_MAX)?,
            lenders: lenders.into_iter().map(lender).collect(),
            slabs: Vec::new(),
            frames: rpc.node().register_file(file.as_fd(), 0..bytes as u64)?,
            file,
            spill,
            is_refused: false,
            places: vec![None; frames as usize],
            ended: Vec::new(),
            next: 0,
        })
    }

    /// The file of the frames, for helpers.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn frames_bytes(&self) -> usize {
        self.frames.len()
    }

    /// The page in a frame.
    pub(super) fn read(&self, frame: u32, into: &mut [u8; PAGE_BYTES]) {
        let read = self.frames.read(frame as usize * PAGE_BYTES, into);
        debug_assert!(read.is_ok(), "the frame is there");
    }

    /// Leases a slab of the next lender that has one. Where there is a file, it can stand alone.
    pub(super) fn lease(&mut self) -> Result<(), BorrowError> {
        let mut last = None;
        for _ in 0..self.lenders.len() {
            let index = self.next % self.lenders.len();
            self.next += 1;
            let lender = &self.lenders[index];
            if lender.is_lost {
                continue;
            }
            match lender.borrower.lease() {
                Ok(leased) => {
                    self.slabs.push(Slab { lender: index, leased });
                    return Ok(());
                }
                Err(error) => {
                    tracing::debug!(lender = lender.name, %error, "no slab");
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or(BorrowError::Lender(byway_service::memory::wire::LendError::AllLent)))
    }

    fn slab_of(&self, place: Place) -> Option<(&Lender, &Slab)> {
        let slab = self.slabs.get(place.slab() as usize)?;
        let lender = &self.lenders[slab.lender];
        (!lender.is_lost).then_some((lender, slab))
    }

    pub(super) fn put(&mut self, frame: u32, place: Place) {
        self.places[frame as usize] = Some(place);
        let at = frame as usize * PAGE_BYTES;
        if let Some(file) = &self.spill {
            let mut page = [0; PAGE_BYTES];
            self.read(frame, &mut page);
            let written = file.write_all_at(&page, place.file_offset());
            let is_refused = written.is_err();
            if std::mem::replace(&mut self.is_refused, is_refused) != is_refused {
                match &written {
                    Ok(()) => tracing::info!("the spill file can be written again"),
                    Err(error) => tracing::error!(
                        %error,
                        "the spill file cannot be written: pages stay here, above the limit, until it can; make room, or name another folder with --spill"
                    ),
                }
            }
            if is_refused {
                return self.ended.push(Ended::Put(frame, PutEnd::Refused));
            }
        }
        let begun = self.slab_of(place).and_then(|(lender, slab)| {
            let segments = [self.frames.segment(at..at + PAGE_BYTES)];
            let node = lender.borrower.node();
            let op = node.put(lender.borrower.session(), &segments, &slab.leased.window, place.offset()).ok()?;
            self.group.add(op, PUT | u64::from(frame)).ok()
        });
        if begun.is_none() {
            self.ended.push(Ended::Put(frame, self.without_lender()));
        }
    }

    /// What becomes of a put that the lender did not take: the file has the page, or nobody.
    fn without_lender(&self) -> PutEnd {
        if self.spill.is_some() { PutEnd::Kept } else { PutEnd::Elsewhere }
    }

    pub(super) fn get(&mut self, frame: u32, place: Place) {
        self.places[frame as usize] = Some(place);
        let at = frame as usize * PAGE_BYTES;
        let begun = self.slab_of(place).and_then(|(lender, slab)| {
            let segments = [self.frames.segment(at..at + PAGE_BYTES)];
            let node = lender.borrower.node();
            let op = node.get(lender.borrower.session(), &slab.leased.window, place.offset(), &segments).ok()?;
            self.group.add(op, frame.into()).ok()
        });
        if begun.is_none() {
            self.get_from_file(frame);
        }
    }

    /// The lender has it no more: the file may.
    fn get_from_file(&mut self, frame: u32) {
        let place = self.places[frame as usize];
        let got = self.spill.as_ref().zip(place).is_some_and(|(file, place)| {
            let mut page = [0; PAGE_BYTES];
            let read = file.read_exact_at(&mut page, place.file_offset());
            read.is_ok() && self.frames.write(frame as usize * PAGE_BYTES, &page).is_ok()
        });
        self.ended.push(Ended::Got(frame, got));
    }

    /// What has ended. The slabs that are lost by it are given too: those that the file does not have.
    pub(super) fn take_ended(&mut self, node: &Node) -> (Vec<Ended>, Vec<u32>) {
        let mut lost = Vec::new();
        let _ = node.progress();
        while let Ok(completion) = self.group.test() {
            let frame = completion.context as u32;
            let is_put = completion.context & PUT != 0;
            if let Err(error) = &completion.result {
                lost.extend(self.note_lost(frame, error));
            }
            match (is_put, completion.result.is_ok()) {
                (true, true) => self.ended.push(Ended::Put(frame, PutEnd::Kept)),
                (true, false) => self.ended.push(Ended::Put(frame, self.without_lender())),
                (false, true) => self.ended.push(Ended::Got(frame, true)),
                (false, false) => self.get_from_file(frame),
            }
        }
        (std::mem::take(&mut self.ended), lost)
    }

    /// The lender of a frame's place does not do as it should: it is given up.
    fn note_lost(&mut self, frame: u32, error: &byway_fabric::node::OpError) -> Vec<u32> {
        let slab = self.places[frame as usize].and_then(|place| self.slabs.get(place.slab() as usize));
        let Some(index) = slab.map(|slab| slab.lender) else { return Vec::new() };
        let lender = &mut self.lenders[index];
        if std::mem::replace(&mut lender.is_lost, true) {
            return Vec::new();
        }
        let lost: Vec<u32> = (0..).zip(&self.slabs).filter(|(_, slab)| slab.lender == index).map(|(n, _)| n).collect();
        let what = if self.spill.is_some() { "its pages come from the spill file" } else { "its pages are lost" };
        tracing::error!(lender = lender.name, %error, slabs = lost.len(), "a lender is lost; {what}");
        if self.spill.is_some() { Vec::new() } else { lost }
    }

    /// Gives all slabs back.
    pub(super) fn close(self) {
        for lender in self.lenders.iter().filter(|lender| !lender.is_lost) {
            let _ = lender.borrower.node().close(lender.borrower.session());
        }
        let _ = self.group.wait(Deadline::now());
    }
}
