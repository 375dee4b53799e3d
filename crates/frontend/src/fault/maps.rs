//! The kernel's view of a program's memory: /proc/PID/maps, pagemap and statm.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use byway_reactor::userfault::pagemap::{self, PageKind};
use byway_service::memory::pager::PAGE_BYTES;

/// The largest guard in front of a thread's stack.
const GUARD_BYTES_MAX: usize = 64 << 10;

/// The largest mapping behind a guard that is taken for a thread's stack.
const STACK_BYTES_MAX: usize = 64 << 20;

/// A mapping, as a line of /proc/PID/maps has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MapsEntry<'a> {
    range: Range<usize>,
    rights: &'a str,
    is_file: bool,
    name: &'a str,
}

fn entry(line: &str) -> Option<MapsEntry<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let rights = words.next()?;
    let inode = words.nth(2)?;
    let name = words.next().unwrap_or_default().trim_start();
    Some(MapsEntry { range, rights, is_file: inode != "0", name })
}

/// Whether a file's zeroed data, which lies behind it, is used by the helper: by the functions of the C library that copy and fill.
fn is_helpers(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    ["libc.so", "libc-", "ld-linux", "ld-", "libbyway_preload.so"].iter().any(|library| name.starts_with(library))
}

/// A mapping that can be paged, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) range: Range<usize>,
    /// Where the next mapping begins: the program may let this one grow so far before it is watched. A heap grows by itself, and new mappings
    /// come into the gap behind it.
    pub(super) grows_to: usize,
}

/// The mappings that can be paged: private, anonymous, to be read and written. Not the stacks, of the first thread and of others: the
/// kernel writes to a thread's stack when the thread ends, when no thread handles its faults any more. A mapping right behind a small
/// guard is taken for one.
fn candidates(maps: &str) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut before: Option<MapsEntry<'_>> = None;
    for mapping in maps.lines().filter_map(entry) {
        if let Some(last) = candidates.last_mut()
            && before.as_ref().is_some_and(|before| before.range == last.range && before.name != "[heap]")
        {
            last.grows_to = mapping.range.start;
        }
        let is_anonymous = !mapping.is_file
            && (mapping.name.is_empty() || mapping.name == "[heap]" || mapping.name.starts_with("[anon:"));
        let has_guard = before.as_ref().is_some_and(|guard| {
            guard.rights == "---p" && guard.range.end == mapping.range.start && guard.range.len() <= GUARD_BYTES_MAX
        });
        let is_stack = has_guard && mapping.range.len() <= STACK_BYTES_MAX;
        let is_needed =
            before.as_ref().is_some_and(|file| file.range.end == mapping.range.start && is_helpers(file.name));
        if mapping.rights == "rw-p" && is_anonymous && !is_stack && !is_needed {
            candidates.push(Candidate { range: mapping.range.clone(), grows_to: mapping.range.end });
        }
        before = Some(mapping);
    }
    candidates
}

impl Candidate {
    /// Its parts, as a function of its range gives them; the last one alone can grow.
    fn parts(self, parts: impl FnOnce(Range<usize>) -> Vec<Range<usize>>) -> Vec<Self> {
        let (end, grows_to) = (self.range.end, self.grows_to);
        let part = |range: Range<usize>| Self { grows_to: if range.end == end { grows_to } else { range.end }, range };
        parts(self.range).into_iter().map(part).collect()
    }
}

/// A program's files in /proc. They are of the process that had the number when they were opened.
#[derive(Debug)]
pub(super) struct Proc {
    maps: String,
    pagemap: File,
    statm: File,
}

impl Proc {
    pub(super) fn open(process: u32) -> std::io::Result<Self> {
        let at = |name: &str| format!("/proc/{process}/{name}");
        Ok(Self { maps: at("maps"), pagemap: File::open(at("pagemap"))?, statm: File::open(at("statm"))? })
    }

    /// The mappings that can be paged, but for those that `own` overlaps.
    pub(super) fn candidates(&self, own: &[Range<usize>]) -> std::io::Result<Vec<Candidate>> {
        let maps = std::fs::read_to_string(&self.maps)?;
        let mut found = candidates(&maps);
        for own in own {
            // The kernel shows neighbours that are alike as one.
            found = found.into_iter().flat_map(|candidate| candidate.parts(|range| without(range, own))).collect();
        }
        Ok(found)
    }

    /// The pages of a range that are there, and its guard pages.
    pub(super) fn pages(&self, range: Range<usize>) -> std::io::Result<Pages> {
        let mut pages = Pages::default();
        pagemap::scan(&self.pagemap, range, |range, kind| match kind {
            PageKind::Present => pages.present.push(range),
            PageKind::Guard => pages.guards.push(range),
        })?;
        Ok(pages)
    }

    /// Mapped and resident bytes.
    pub(super) fn sizes(&self) -> Option<(usize, usize)> {
        let mut text = [0; 128];
        let len = self.statm.read_at(&mut text, 0).ok()?;
        let mut words = std::str::from_utf8(&text[..len]).ok()?.split_ascii_whitespace();
        let mut bytes = || Some(words.next()?.parse::<usize>().ok()? * PAGE_BYTES);
        Some((bytes()?, bytes()?))
    }
}

/// The mappings of a process that its forked children get without their contents (`MADV_WIPEONFORK`).
pub(super) fn wiped_on_fork(process: u32) -> std::io::Result<Vec<Range<usize>>> {
    std::fs::read_to_string(format!("/proc/{process}/smaps")).map(|smaps| wiped(&smaps))
}

/// Of /proc/PID/smaps: the flag `wf` in the line `VmFlags` that follows a mapping's own.
fn wiped(smaps: &str) -> Vec<Range<usize>> {
    let (mut wiped, mut current) = (Vec::new(), None);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let is_wiped = flags.split_ascii_whitespace().any(|flag| flag == "wf");
            wiped.extend(current.take().filter(|_| is_wiped));
        } else if line.starts_with(|first: char| first.is_ascii_digit() || matches!(first, 'a'..='f')) {
            current = entry(line).map(|mapping| mapping.range);
        }
    }
    wiped
}

/// What lies in a range: addresses, in order.
#[derive(Debug, Default)]
pub(super) struct Pages {
    pub(super) present: Vec<Range<usize>>,
    guards: Vec<Range<usize>>,
}

impl Pages {
    /// The parts of a mapping that are no stacks. Threads' stacks may have a guard that is no mapping of its own (`MADV_GUARD_INSTALL`, by glibc
    /// since 2.42), and be one mapping with what lies behind: so much behind a small guard is taken for a stack, up to the next guard.
    pub(super) fn without_stacks(&self, candidate: Candidate) -> Vec<Candidate> {
        candidate.parts(|range| self.parts_without_stacks(range))
    }

    fn parts_without_stacks(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts = vec![range.clone()];
        for (index, guard) in self.guards.iter().enumerate().filter(|(_, guard)| guard.len() <= GUARD_BYTES_MAX) {
            let next = self.guards.get(index + 1).map_or(range.end, |next| next.start);
            let stack = guard.start..next.min(guard.end + STACK_BYTES_MAX);
            parts = parts.into_iter().flat_map(|part| without(part, &stack)).collect();
        }
        parts
    }
}

fn without(range: Range<usize>, hole: &Range<usize>) -> Vec<Range<usize>> {
    let before = range.start..range.end.min(hole.start);
    let after = range.start.max(hole.end)..range.end;
    [before, after].into_iter().filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heaps_and_mappings_are_paged_and_files_and_stacks_are_not() {
        let maps = "\
55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000010000 rw-p 00001000 fe:00 1234                       /usr/lib/libc.so.6
7f0000010000-7f0000018000 rw-p 00000000 00:00 0 
7f0000018000-7f0000019000 r--p 00000000 fe:00 1235                       /usr/bin/program
7f0000019000-7f0000020000 rw-p 00000000 00:00 0 
7f0000020000-7f0000030000 rwxp 00000000 00:00 0 
7f0000030000-7f0000031000 ---p 00000000 00:00 0 
7f0000031000-7f0000831000 rw-p 00000000 00:00 0 
7f0000900000-7f0000a00000 rw-s 00000000 00:01 77                         /memfd:byway (deleted)
7f0001000000-7f0001100000 ---p 00000000 00:00 0 
7f0001100000-7f0001200000 rw-p 00000000 00:00 0                          [anon:malloc]
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
";
        let expected = [
            (0x55d0_0000_0000..0x55d0_0002_1000, 0x55d0_0002_1000),
            (0x7f00_0001_9000..0x7f00_0002_0000, 0x7f00_0002_0000),
            (0x7f00_0110_0000..0x7f00_0120_0000, 0x7ffd_0000_0000),
        ];
        assert_eq!(candidates(maps), expected.map(|(range, grows_to)| Candidate { range, grows_to }));
    }

    #[test]
    fn what_is_the_helpers_is_left_out() {
        assert_eq!(without(0..10, &(3..5)), [0..3, 5..10]);
        assert_eq!(without(0..10, &(0..10)), Vec::<Range<usize>>::new());
        assert_eq!(without(0..10, &(20..30)), std::slice::from_ref(&(0..10)));
    }

    #[test]
    fn the_flag_of_a_mapping_says_that_children_get_it_wiped() {
        let smaps = "\
55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
VmFlags: rd wr mr mw me ac 
7f0000000000-7f0000010000 rw-p 00000000 00:00 0 
Anonymous:            64 kB
VmFlags: rd wr mr mw me wf ac 
";
        assert_eq!(wiped(smaps), std::slice::from_ref(&(0x7f00_0000_0000..0x7f00_0001_0000)));
    }

    #[test]
    fn behind_a_guard_without_a_mapping_lies_a_stack() {
        let pages = Pages { present: Vec::new(), guards: vec![0x10_0000..0x10_1000, 0x20_0000..0x20_1000] };
        let range = 0..0x1000_0000;
        assert_eq!(pages.parts_without_stacks(range), [0..0x10_0000, 0x420_1000..0x1000_0000]);
    }

    #[test]
    fn this_process_tells_what_is_there() {
        let proc = Proc::open(std::process::id()).unwrap();
        let own = vec![1u8; 64 * PAGE_BYTES];
        let first = (own.as_ptr().addr() / PAGE_BYTES + 1) * PAGE_BYTES;
        let range = first..first + 62 * PAGE_BYTES;
        assert_eq!(proc.pages(range.clone()).unwrap().present, [range]);
        let (mapped, resident) = proc.sizes().unwrap();
        assert!(mapped >= resident && resident >= own.len());
        assert!(!proc.candidates(&[]).unwrap().is_empty());
    }
}
