//! The kernel inside a bzImage.
//!
//! qemu starts an ELF vmlinux by its PVH entry, which skips the kernel's own decompressor: one to
//! two and a half seconds of each boot under emulation.

use super::setup::System;
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

/// Unpacks a bzImage to the system's vmlinux.
pub fn unpack(system: &System, image: &Path) -> Result<()> {
    let bytes = std::fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let payload = payload(&bytes).with_context(|| format!("{} is no bzImage", image.display()))?;
    let program = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        _ => bail!("{} is compressed neither by xz nor by zstd", image.display()),
    };
    let kernel = decompress(system, program, payload)?;
    if !kernel.starts_with(b"\x7fELF") {
        bail!("{} holds no ELF kernel", image.display());
    }
    std::fs::write(system.vmlinux(), kernel).context("cannot write the kernel")
}

/// What the xz or zstd of the userland makes of `bytes`.
pub fn decompress(system: &System, program: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut child =
        system.command(program)?.args(["-d", "-c", "-q"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().context("no standard input")?;
    let done = std::thread::scope(|scope| {
        let writer = scope.spawn(move || input.write_all(bytes));
        let done = child.wait_with_output();
        // A program that stops reading has failed, and its status says so.
        let _ = writer.join();
        done
    })?;
    if !done.status.success() {
        bail!("{program} failed: {}", done.status);
    }
    Ok(done.stdout)
}

/// The compressed kernel of a bzImage, by the offsets of Documentation/arch/x86/boot.rst:
/// `setup_sects`, `payload_offset` and `payload_length`. The last four bytes of the payload are the
/// length of what it unpacks to, added by the kernel's build, and no part of the compressed stream.
fn payload(image: &[u8]) -> Option<&[u8]> {
    const SECTOR_BYTES: usize = 512;
    let long = |offset: usize| Some(u32::from_le_bytes(image.get(offset..offset + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206).is_none() || &image[0x202..0x206] != b"HdrS" {
        return None;
    }
    let setup_sectors = usize::from(*image.get(0x1f1)?);
    let start = (setup_sectors + 1) * SECTOR_BYTES + long(0x248)?;
    image.get(start..start + long(0x24c)?.checked_sub(4)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_by_the_header_and_without_its_length() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248] = 16;
        image[0x24c] = 9;
        image[1024 + 16..1024 + 21].copy_from_slice(b"bytes");
        assert_eq!(payload(&image), Some(&b"bytes"[..]));
        assert_eq!(payload(&image[..1040]), None);
        image[0x202] = 0;
        assert_eq!(payload(&image), None);
    }
}
