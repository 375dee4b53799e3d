//! The files of a checkpoint. docs/wire.md has their bytes.
//!
//! `pages-GENERATION-RANK` has the pages whose home a rank is. `manifest` names the generation that counts, and has the checksums of its
//! files. A rename replaces it, so that a folder has the checkpoint before or the one after, however the job ends.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use byway_service::dsm::{Consistency, Page, PlacedSegment};
use byway_service::limits::{DSM_NAME_BYTES_MAX, DSM_PAGES_MAX, DSM_RANKS_MAX, DSM_SEGMENTS_MAX};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::CheckpointError;
use crate::limits::{CHECKPOINT_BUFFER_BYTES, PAGE_BYTES};

const MAGIC: [u8; 8] = *b"bywaydsm";
const VERSION: u16 = 1;
const MANIFEST: &str = "manifest";

/// The manifest's beginning. A [`RankRecord`] of each rank and a [`SegmentRecord`] of each segment follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U16,
    ranks: u8,
    /// 1 sequential, 2 release.
    consistency: u8,
    segments: U32,
    generation: U64,
    /// Of all segments together.
    pages: U64,
    /// Of the whole manifest with zeroes here.
    crc32c: U32,
    reserved: U32,
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 40);

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RankRecord {
    pages: U64,
    crc32c: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<RankRecord>() == 16);

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SegmentRecord {
    first: U32,
    name_bytes: U32,
    pages: U64,
    name: [u8; DSM_NAME_BYTES_MAX],
}

const _: () = assert!(size_of::<SegmentRecord>() == 80);

/// Bytes of a manifest; a longer file is none.
const MANIFEST_BYTES_MAX: u64 =
    (HEADER_BYTES + DSM_RANKS_MAX * size_of::<RankRecord>() + DSM_SEGMENTS_MAX * size_of::<SegmentRecord>()) as u64;

/// Before each page of a rank's file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PageRecord {
    page: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<PageRecord>() == 8);

/// What a rank's file holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) pages: u64,
    pub(crate) crc32c: u32,
}

/// What a checkpoint says of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) generation: u64,
    pub(crate) consistency: Consistency,
    /// Of all segments together.
    pub(crate) pages: u64,
    /// By rank.
    pub(crate) ranks: Vec<Written>,
    pub(crate) segments: Vec<PlacedSegment>,
}

impl Manifest {
    fn to_bytes(&self) -> Vec<u8> {
        let header = Header {
            magic: MAGIC,
            version: U16::new(VERSION),
            ranks: self.ranks.len() as u8,
            consistency: if self.consistency == Consistency::Release { 2 } else { 1 },
            segments: U32::new(self.segments.len() as u32),
            generation: U64::new(self.generation),
            pages: U64::new(self.pages),
            crc32c: U32::ZERO,
            reserved: U32::ZERO,
        };
        let mut bytes = header.as_bytes().to_vec();
        for Written { pages, crc32c } in &self.ranks {
            let record = RankRecord { pages: U64::new(*pages), crc32c: U32::new(*crc32c), reserved: U32::ZERO };
            bytes.extend_from_slice(record.as_bytes());
        }
        for segment in &self.segments {
            let mut name = [0; DSM_NAME_BYTES_MAX];
            name[..segment.name.len()].copy_from_slice(&segment.name);
            let record = SegmentRecord {
                first: U32::new(segment.first),
                name_bytes: U32::new(segment.name.len() as u32),
                pages: U64::new(segment.pages),
                name,
            };
            bytes.extend_from_slice(record.as_bytes());
        }
        let checksum = crc32c::crc32c(&bytes);
        bytes[32..36].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, &'static str> {
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| "it is too short")?;
        if header.magic != MAGIC {
            return Err("it is no manifest of a checkpoint");
        }
        if header.version.get() != VERSION {
            return Err("another version of byway wrote it");
        }
        let unsigned = [&bytes[..32], &[0; 4], &bytes[36..]].concat();
        if crc32c::crc32c(&unsigned) != header.crc32c.get() {
            return Err("its checksum is wrong");
        }
        let consistency = match header.consistency {
            1 => Consistency::Sequential,
            2 => Consistency::Release,
            _ => return Err("its consistency is unknown"),
        };
        let (ranks, segments) = (usize::from(header.ranks), header.segments.get() as usize);
        let pages = header.pages.get();
        if !(1..=DSM_RANKS_MAX).contains(&ranks) || segments > DSM_SEGMENTS_MAX || pages > DSM_PAGES_MAX {
            return Err("its numbers are beyond the limits");
        }
        let (ranks, rest) = <[RankRecord]>::ref_from_prefix_with_elems(rest, ranks).map_err(|_| "its size is wrong")?;
        let segments = <[SegmentRecord]>::ref_from_bytes_with_elems(rest, segments).map_err(|_| "its size is wrong")?;
        let written = |record: &RankRecord| Written { pages: record.pages.get(), crc32c: record.crc32c.get() };
        let placed = |record: &SegmentRecord| {
            let name = record.name.get(..record.name_bytes.get() as usize).filter(|name| !name.is_empty());
            let (first, length) = (record.first.get(), record.pages.get());
            let fits = u64::from(first).checked_add(length).is_some_and(|end| length > 0 && end <= pages);
            let name = name.filter(|_| fits).ok_or("a segment lies outside of the memory")?;
            Ok(PlacedSegment { name: name.to_vec(), first, pages: length })
        };
        Ok(Self {
            generation: header.generation.get(),
            consistency,
            pages,
            ranks: ranks.iter().map(written).collect(),
            segments: segments.iter().map(placed).collect::<Result<_, _>>()?,
        })
    }

    /// The manifest of a folder; `None` if it has none.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = folder.join(MANIFEST);
        let failed = |error| CheckpointError::Io { path: path.clone(), error };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = Vec::new();
        file.take(MANIFEST_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        let read = Self::from_bytes(&bytes);
        read.map(Some).map_err(|what| CheckpointError::Damaged { path: path.clone(), what })
    }

    /// Makes this the manifest of a folder, durably. Its pages are durable already.
    pub(crate) fn publish(&self, folder: &Path) -> std::io::Result<()> {
        let unfinished = folder.join("manifest.new");
        let mut file = File::create(&unfinished)?;
        file.write_all(&self.to_bytes())?;
        file.sync_all()?;
        std::fs::rename(&unfinished, folder.join(MANIFEST))?;
        sync_folder(folder)
    }
}

fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

fn path_of(folder: &Path, generation: u64, rank: u8) -> PathBuf {
    folder.join(format!("pages-{generation}-{rank}"))
}

/// Writes a rank's pages, durably. `page` gives a page's bytes; pages of zeroes are left out.
pub(crate) fn write_pages(
    folder: &Path,
    (generation, rank): (u64, u8),
    pages: &[Page],
    mut page: impl FnMut(Page, &mut [u8; PAGE_BYTES]),
) -> std::io::Result<Written> {
    let file = File::create(path_of(folder, generation, rank))?;
    let mut out = BufWriter::with_capacity(CHECKPOINT_BUFFER_BYTES, file);
    let (mut written, mut bytes) = (Written::default(), [0; PAGE_BYTES]);
    for number in pages {
        page(*number, &mut bytes);
        if bytes == [0; PAGE_BYTES] {
            continue;
        }
        let record = PageRecord { page: U32::new(*number), reserved: U32::ZERO };
        for part in [record.as_bytes(), &bytes] {
            out.write_all(part)?;
            written.crc32c = crc32c::crc32c_append(written.crc32c, part);
        }
        written.pages += 1;
    }
    out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    sync_folder(folder)?;
    Ok(written)
}

/// Reads what [`write_pages`] has written. `page` gets each page; what it got counts only if this returns `Ok`.
pub(crate) fn read_pages(
    folder: &Path,
    (generation, rank): (u64, u8),
    manifest: &Manifest,
    mut page: impl FnMut(Page, &[u8; PAGE_BYTES]),
) -> Result<(), CheckpointError> {
    let path = path_of(folder, generation, rank);
    let failed = |error| CheckpointError::Io { path: path.clone(), error };
    let damaged = |what| CheckpointError::Damaged { path: path.clone(), what };
    let expected = manifest.ranks[usize::from(rank)];
    let file = File::open(&path).map_err(failed)?;
    let entry_bytes = (size_of::<PageRecord>() + PAGE_BYTES) as u64;
    if Some(file.metadata().map_err(failed)?.len()) != expected.pages.checked_mul(entry_bytes) {
        return Err(damaged("its size is not the manifest's"));
    }
    let mut from = BufReader::with_capacity(CHECKPOINT_BUFFER_BYTES, file);
    let (mut checksum, mut record, mut bytes) = (0, [0; size_of::<PageRecord>()], [0; PAGE_BYTES]);
    for _ in 0..expected.pages {
        from.read_exact(&mut record).and_then(|()| from.read_exact(&mut bytes)).map_err(failed)?;
        checksum = crc32c::crc32c_append(crc32c::crc32c_append(checksum, &record), &bytes);
        let record: PageRecord = zerocopy::transmute!(record);
        let number = record.page.get();
        let is_in = |segment: &PlacedSegment| {
            let first = u64::from(segment.first);
            (first..first + segment.pages).contains(&u64::from(number))
        };
        if !manifest.segments.iter().any(is_in) {
            return Err(damaged("a page lies in no segment"));
        }
        page(number, &bytes);
    }
    if checksum == expected.crc32c { Ok(()) } else { Err(damaged("its checksum is not the manifest's")) }
}

/// Removes a rank's pages of a generation. One that stays takes room alone.
pub(crate) fn remove_pages(folder: &Path, generation: u64, rank: u8) {
    let _ = std::fs::remove_file(path_of(folder, generation, rank));
}

/// Removes a rank's pages of all generations but one.
pub(crate) fn remove_other_pages(folder: &Path, generation: u64, rank: u8) {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for name in names.filter_map(|entry| entry.file_name().into_string().ok()) {
        let of = name.strip_prefix("pages-").and_then(|rest| rest.split_once('-'));
        let of = of.and_then(|(other, of)| Some((other.parse::<u64>().ok()?, of.parse::<u8>().ok()?)));
        if let Some((other, of)) = of
            && (other != generation && of == rank)
        {
            remove_pages(folder, other, rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            generation: 0x0807_0605_0403_0201,
            consistency: Consistency::Release,
            pages: 0x0a09,
            ranks: vec![Written { pages: 2, crc32c: 0x1413_1211 }, Written::default()],
            segments: vec![PlacedSegment { name: b"grid".to_vec(), first: 3, pages: 4 }],
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_map() {
        let bytes = manifest().to_bytes();
        let mut golden = vec![0; 40 + 2 * 16 + 80];
        golden[..16].copy_from_slice(b"bywaydsm\x01\x00\x02\x02\x01\x00\x00\x00");
        golden[16..26].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        golden[40] = 2;
        golden[48..52].copy_from_slice(&[0x11, 0x12, 0x13, 0x14]);
        (golden[72], golden[76], golden[80]) = (3, 4, 4);
        golden[88..92].copy_from_slice(b"grid");
        let checksum = crc32c::crc32c(&golden);
        golden[32..36].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(bytes, golden);
        assert_eq!(Manifest::from_bytes(&bytes), Ok(manifest()));
    }

    #[test]
    fn a_manifest_with_any_other_byte_or_size_is_refused() {
        let bytes = manifest().to_bytes();
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert!(Manifest::from_bytes(&other).is_err(), "byte {at}");
            assert!(Manifest::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
        }
        assert!(Manifest::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn pages_come_back_from_their_file_and_any_other_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let fill = |page: Page, bytes: &mut [u8; PAGE_BYTES]| bytes.fill(page as u8 - 3);
        // Page 3 holds zeroes, and is left out.
        let written = write_pages(folder.path(), (7, 0), &[3, 4, 6], fill).unwrap();
        assert_eq!(written.pages, 2);
        let all = Manifest { ranks: vec![written], ..manifest() };
        let mut seen = Vec::new();
        read_pages(folder.path(), (7, 0), &all, |page, bytes| seen.push((page, bytes[9]))).unwrap();
        assert_eq!(seen, [(4, 1), (6, 3)]);
        let path = folder.path().join("pages-7-0");
        let good = std::fs::read(&path).unwrap();
        for at in [0, 4, 8, 4103, 4104, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, bad).unwrap();
            let read = read_pages(folder.path(), (7, 0), &all, |_, _| ());
            assert!(matches!(read, Err(CheckpointError::Damaged { .. })), "byte {at}: {read:?}");
        }
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(read_pages(folder.path(), (7, 0), &all, |_, _| ()).is_err());
        remove_other_pages(folder.path(), 7, 0);
        assert!(path.exists());
        remove_other_pages(folder.path(), 8, 0);
        assert!(!path.exists());
    }
}
