//! Copies one file or symbolic link. A file gets its name when its bytes and attributes are complete and durable; until then it has a
//! temporary one. So a file with the size and time of its source is complete, and a repeated copy passes it over.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::failure::{Failure, special};
use super::moving::{Buffers, Moving, Purpose};
use super::run::{Entry, Run, TEMPORARY, add};
use super::side::{Directory, Facts, OpenFile};

/// The result for an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Done {
    Copied { bytes: u64 },
    PassedOver,
}

/// A file with a temporary name, which is removed with this if it was not renamed.
struct Temporary<'a> {
    directory: &'a dyn Directory,
    name: Option<Vec<u8>>,
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // If the server is away, the file stays; the next copy removes it.
        let _ = self.name.take().map(|name| self.directory.remove(&name));
    }
}

/// Whether an entry is a file or link that is not complete: no directory, and with a name of [`Run::temporary`]'s form.
pub(super) fn is_temporary(name: &[u8], facts: &Facts) -> bool {
    let Some((token, [b'-', number @ ..])) = name.strip_prefix(TEMPORARY).and_then(|rest| rest.split_at_checked(16))
    else {
        return false;
    };
    let is_token = token.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_number = !number.is_empty() && number.iter().all(u8::is_ascii_digit);
    is_token && is_number && facts.kind != FileType::Directory
}

impl Entry {
    /// Copies it, counts it, and releases its directory.
    pub(super) fn copy(self, run: &Run, buffers: &mut Buffers) {
        let done = run.retrying(|is_again| self.attempt(run, is_again, buffers));
        let counts = &run.counts;
        let mut counted = 0;
        match done {
            Ok(Done::PassedOver) => add(&counts.passed_over, 1),
            Ok(Done::Copied { bytes }) if self.facts.kind == FileType::RegularFile => {
                add(&counts.files, 1);
                add(&counts.copied_bytes, bytes);
                counted = bytes;
            }
            Ok(Done::Copied { .. }) => add(&counts.links, 1),
            Err(failure) => run.failed(&failure, &self.folder),
        }
        add(&counts.done_bytes, self.facts.size.saturating_sub(counted));
        run.release(self.folder);
    }

    /// `is_again`: an earlier attempt may have been done.
    fn attempt(&self, run: &Run, is_again: bool, buffers: &mut Buffers) -> Result<Done, Failure> {
        if run.is_ending() {
            return Err(Failure::Stopped);
        }
        if let Some(kind) = special(self.facts.kind) {
            return Err(Failure::Special { place: run.source(&self.path()), kind });
        }
        let there = if self.folder.was_there || is_again { self.there(run)? } else { None };
        if self.facts.kind == FileType::Symlink {
            return self.copy_link(run, there);
        }
        self.copy_file(run, there, buffers)
    }

    fn path(&self) -> Vec<u8> {
        self.folder.below(&self.name)
    }

    fn new_path(&self) -> Vec<u8> {
        self.folder.below(&self.new_name)
    }

    fn of_source(&self, run: &Run, doing: &'static str) -> impl Fn(Errno) -> Failure {
        let place = run.source(&self.path());
        move |source| Failure::Call { place: place.clone(), doing, source }
    }

    fn of_destination(&self, run: &Run, doing: &'static str) -> impl Fn(Errno) -> Failure {
        let place = run.destination(&self.new_path());
        move |source| Failure::Call { place: place.clone(), doing, source }
    }

    /// The entry with that name at the destination.
    fn there(&self, run: &Run) -> Result<Option<Facts>, Failure> {
        match self.folder.to.find(&self.new_name) {
            Err(Errno::NOENT) => Ok(None),
            there => there.map(Some).map_err(self.of_destination(run, "look up")),
        }
    }

    /// Checks that the entry at the destination may be replaced.
    fn check_replaced(&self, run: &Run, there: Option<&Facts>) -> Result<(), Failure> {
        match there {
            Some(there) if there.kind != self.facts.kind => Err(Failure::OtherKind(run.destination(&self.new_path()))),
            Some(_) if !run.options.overwrite => Err(Failure::Exists(run.destination(&self.new_path()))),
            _ => Ok(()),
        }
    }

    fn copy_link(&self, run: &Run, there: Option<Facts>) -> Result<Done, Failure> {
        let Entry { folder, name, new_name, .. } = self;
        let target = folder.from.read_link(name).map_err(self.of_source(run, "read"))?;
        if there.is_some_and(|there| there.kind == FileType::Symlink) {
            let same = folder.to.read_link(new_name).map_err(self.of_destination(run, "read"))? == target;
            if same {
                return Ok(Done::PassedOver);
            }
        }
        self.check_replaced(run, there.as_ref())?;
        let temporary = run.temporary();
        // Before it is made: the answer may be lost.
        let mut guard = Temporary { directory: &*folder.to, name: Some(temporary.clone()) };
        folder.to.make_link(&temporary, &target, &self.facts).map_err(self.of_destination(run, "make"))?;
        self.rename(run, &temporary)?;
        guard.name = None;
        Ok(Done::Copied { bytes: 0 })
    }

    fn copy_file(&self, run: &Run, there: Option<Facts>, buffers: &mut Buffers) -> Result<Done, Failure> {
        let (from, path) = (self.open_source(run)?, self.path());
        let before = from.facts().map_err(self.of_source(run, "look at"))?;
        if there.is_some_and(|there| before.seems_equal(&there)) && self.is_complete(run, &from, &before, buffers)? {
            if let Some(there) = there.filter(|there| there.mode != before.mode_of_copy()) {
                self.correct_mode(run, &from, &before, &there)?;
            }
            return Ok(Done::PassedOver);
        }
        self.check_replaced(run, there.as_ref())?;
        let temporary = run.temporary();
        let mut guard = Temporary { directory: &*self.folder.to, name: Some(temporary.clone()) };
        let created = self.folder.to.create_file(&temporary);
        let to: Arc<dyn OpenFile> = created.map_err(self.of_destination(run, "make"))?.into();
        let moving = Moving::new(run, &from, &to, &path, &before, Purpose::Copy);
        let moved = moving.run(run, buffers).and_then(|()| self.complete(run, &from, &before, &to, buffers));
        if let Err(failure) = moved {
            run.counts.done_bytes.fetch_sub(moving.moved(), Ordering::Relaxed);
            // Before it is closed: the client has the server let go at once of a file that was removed, which frees its room.
            drop(guard);
            return Err(failure);
        }
        self.rename(run, &temporary)?;
        guard.name = None;
        Ok(Done::Copied { bytes: moving.moved() })
    }

    /// A complete copy has another mode than its source. One that has the source's is not looked at: no copy gives it the ACL's mask.
    fn correct_mode(&self, run: &Run, from: &Arc<dyn OpenFile>, before: &Facts, there: &Facts) -> Result<(), Failure> {
        let to = self.folder.to.open_file(&self.new_name).map_err(self.of_destination(run, "open"))?;
        let mode = run.mode_of_complete(&**from, before, &*to, [&self.path(), &self.new_path()])?;
        if there.mode == mode {
            return Ok(());
        }
        self.folder.to.set_mode(&self.new_name, mode).map_err(self.of_destination(run, "set its rights"))
    }

    fn open_source(&self, run: &Run) -> Result<Arc<dyn OpenFile>, Failure> {
        match self.folder.from.open_file(&self.name) {
            Ok(file) => Ok(file.into()),
            // It was a regular file when it was listed.
            Err(Errno::LOOP | Errno::OPNOTSUPP | Errno::NOENT) => Err(Failure::Changed(run.source(&self.path()))),
            Err(error) => Err(self.of_source(run, "open")(error)),
        }
    }

    /// Whether the file that is there has the source's bytes; with `verify` they are read.
    fn is_complete(
        &self,
        run: &Run,
        from: &Arc<dyn OpenFile>,
        before: &Facts,
        buffers: &mut Buffers,
    ) -> Result<bool, Failure> {
        if !run.options.verify {
            return Ok(true);
        }
        let there: Arc<dyn OpenFile> =
            self.folder.to.open_file(&self.new_name).map_err(self.of_destination(run, "open"))?.into();
        there.drop_cached();
        let compared = Moving::new(run, from, &there, &self.path(), before, Purpose::Compare);
        match compared.run(run, buffers) {
            Err(Failure::Differs { .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// The bytes are copied: sets size and attributes, and syncs.
    fn complete(
        &self,
        run: &Run,
        from: &Arc<dyn OpenFile>,
        before: &Facts,
        to: &Arc<dyn OpenFile>,
        buffers: &mut Buffers,
    ) -> Result<(), Failure> {
        if before.has_holes() {
            to.set_len(before.size).map_err(self.of_destination(run, "set its size"))?;
        }
        let after = from.facts().map_err(self.of_source(run, "look at"))?;
        if !after.seems_equal(before) {
            return Err(Failure::Changed(run.source(&self.path())));
        }
        let unset = self.of_destination(run, "set rights and times");
        run.copy_attributes(&**from, before, &**to, &self.path(), unset)?;
        to.sync().map_err(self.of_destination(run, "sync"))?;
        if run.options.verify {
            to.drop_cached();
            Moving::new(run, from, to, &self.path(), before, Purpose::Compare).run(run, buffers)?;
        }
        Ok(())
    }

    fn rename(&self, run: &Run, temporary: &[u8]) -> Result<(), Failure> {
        let to = &self.folder.to;
        let renamed = match to.rename(temporary, &self.new_name, run.options.overwrite) {
            // Not every file system can refuse to replace; what is there was looked at before.
            Err(Errno::INVAL) if !run.options.overwrite => to.rename(temporary, &self.new_name, true),
            renamed => renamed,
        };
        match renamed {
            Err(Errno::EXIST) => Err(Failure::Exists(run.destination(&self.new_path()))),
            Err(Errno::ISDIR | Errno::NOTDIR) => Err(Failure::OtherKind(run.destination(&self.new_path()))),
            renamed => renamed.map_err(self.of_destination(run, "rename")),
        }
    }
}
