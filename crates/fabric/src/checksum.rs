//! Checksums: CRC32C (RFC 3720, appendix B.4) of payloads, and of headers, whose length is known.
//!
//! Every message has one of its header and that is computed twice, so it must cost little: the general routine, which is made for long data,
//! takes four times as many instructions for so few bytes as the processor's own instruction in a row.

use std::ops::Range;

use byway_reactor::Frame;

use crate::wire::HEADER_BYTES;

/// Bytes that the checksum covers: all behind itself.
const COVERED: usize = HEADER_BYTES - 4;

/// The CRC32C of a header's bytes behind its checksum.
pub(crate) fn header_checksum(header: &[u8; HEADER_BYTES]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instruction.
        return unsafe { by_instruction(header) };
    }
    crc32c::crc32c(&header[HEADER_BYTES - COVERED..])
}

/// The CRC32C of a range of a frame, as it is while this looks there.
pub fn payload_checksum(frame: &Frame, range: Range<usize>) -> u32 {
    append_payload(0, frame, range)
}

/// The CRC32C of what `crc` is of, and of a range of a frame behind it.
pub fn append_payload(mut crc: u32, frame: &Frame, range: Range<usize>) -> u32 {
    frame.visit(range, |bytes| {
        crc = crc32c::crc32c_append(crc, bytes);
        true
    });
    crc
}

/// # Safety
/// The processor has SSE 4.2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn by_instruction(header: &[u8; HEADER_BYTES]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u32, _mm_crc32_u64};

    let (words, _) = header.as_chunks::<8>();
    let first = u64::from_le_bytes(words[0]);
    let mut crc = u64::from(_mm_crc32_u32(!0, (first >> 32) as u32));
    for word in &words[1..] {
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(*word));
    }
    !(crc as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_checksum_that_the_general_routine_computes() {
        let mut header = [0; HEADER_BYTES];
        for round in 0..1000_u32 {
            for (at, byte) in header.iter_mut().enumerate() {
                *byte = (round.wrapping_mul(2_654_435_761) >> (at % 25)) as u8 ^ at as u8;
            }
            assert_eq!(header_checksum(&header), crc32c::crc32c(&header[4..]));
        }
    }
}
