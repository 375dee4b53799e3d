//! Image formats of virtual machines, told by their magic. byway serves the bytes of a file as they are: an image of another
//! format than raw, served by mistake, shows its clients a header and tables in place of a disk.

use std::io;
use std::os::fd::BorrowedFd;

/// Where it is, and what is there. All of it is within the first [`HEAD_BYTES`].
const MAGIC: [(usize, &[u8], &str); 11] = [
    // QEMU, docs/interop/qcow2.rst; version 1 has the same four bytes.
    (0, b"QFI\xfb", "qcow2"),
    // QEMU, docs/interop/qed_spec.rst.
    (0, b"QED\0", "qed"),
    // VMware, Virtual Disk Format 5.0: sparse extents (hosted, ESX) and a descriptor of its own.
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    // VirtualBox, VDICore.h: VDI_IMAGE_SIGNATURE.
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "vdi"),
    // Microsoft, MS-VHDX 2.2.1; Virtual Hard Disk Image Format Specification (dynamic disks begin with a copy of the footer).
    (0, b"vhdxfile", "vhdx"),
    (0, VHD, "vhd"),
    // Parallels, QEMU docs/interop/parallels.rst.
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    // Bochs, bximage's redolog.
    (0, b"Bochs Virtual HD Image", "bochs"),
];

/// The cookie of a VHD's footer.
const VHD: &[u8] = b"conectix";

/// Bytes of a VHD's footer, at the very end of the file: of a fixed disk all that tells it from a raw one.
const FOOTER_BYTES: usize = 512;

/// What is read at the front, and at least at the end: a whole block of any device.
const HEAD_BYTES: usize = 4096;

/// The format of an open file or block device, unless it is raw as far as its first and last bytes tell. With direct I/O
/// `len` is a multiple of a block of at most 4 KiB.
///
/// # Errors
/// The kernel's.
pub fn image_format(file: BorrowedFd<'_>, len: u64) -> io::Result<Option<&'static str>> {
    // Direct I/O wants whole blocks in aligned memory.
    let mut memory = vec![0; HEAD_BYTES * 2];
    let aligned = memory.as_ptr().align_offset(HEAD_BYTES).min(HEAD_BYTES);
    let block = &mut memory[aligned..aligned + HEAD_BYTES];
    let count = rustix::io::pread(file, &mut *block, 0)?;
    let begin = &block[..count];
    if let Some((_, _, format)) =
        MAGIC.iter().find(|(at, magic, _)| begin.get(*at..).is_some_and(|b| b.starts_with(magic)))
    {
        return Ok(Some(format));
    }
    let from = len.saturating_sub(1) / HEAD_BYTES as u64 * HEAD_BYTES as u64;
    let Some(footer) = len.checked_sub(FOOTER_BYTES as u64).filter(|footer| *footer >= from) else { return Ok(None) };
    let count = rustix::io::pread(file, &mut *block, from)?;
    let end = block[..count].get((footer - from) as usize..);
    Ok(end.filter(|end| end.starts_with(VHD)).map(|_| "vhd"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn format_of(len: u64, parts: &[(u64, &[u8])]) -> Option<&'static str> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for (at, bytes) in parts {
            file.write_all_at(bytes, *at).unwrap();
        }
        image_format(file.as_fd(), len).unwrap()
    }

    #[test]
    fn each_format_is_told_by_its_magic_and_raw_images_by_none() {
        for (at, magic, format) in MAGIC {
            assert_eq!(format_of(1 << 20, &[(at as u64, magic)]), Some(format));
            assert_eq!(format_of(1 << 20, &[(at as u64 + 1, magic)]), None, "{format}, but one byte on");
            assert_eq!(format_of((at + magic.len()) as u64, &[(at as u64, magic)]), Some(format), "and nothing else");
            assert_eq!(format_of((at + magic.len() - 1) as u64, &[(at as u64, &magic[..magic.len() - 1])]), None);
        }
        // A partition table, a file system, nothing.
        assert_eq!(format_of(1 << 20, &[(510, &[0x55, 0xaa]), (0x438, &[0x53, 0xef])]), None);
        assert_eq!(format_of(1, &[]), None);
    }

    #[test]
    fn a_fixed_vhd_is_told_by_its_footer() {
        for len in [512, 1 << 20, (1 << 20) + 512, 4096 + 3584] {
            assert_eq!(format_of(len, &[(len - 512, VHD)]), Some("vhd"), "{len}");
        }
        assert_eq!(format_of(1 << 20, &[((1 << 20) - 511, VHD)]), None);
    }
}
