//! Copies of bytes that another thread, the peer of a shared mapping, or the kernel may change at the same time.
//!
//! No reference is made to such bytes, and `ptr::copy` is not used: both promise the compiler that the bytes do not change.
//! To the compiler these copies are relaxed atomic accesses of each byte (C++'s `atomic_load_per_byte_memcpy`, P1478): each
//! byte is an old or a new one, and a race has no other consequence. On x86-64 they are instructions that the compiler does
//! not inspect; elsewhere they are atomic words and bytes.
//!
//! `cargo run --release -p byway-reactor --example copy_rate` compares them with `memcpy`: docs/decisions/0031 has the
//! figures.

#[cfg(any(not(target_arch = "x86_64"), miri))]
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};

/// Copies `len` bytes, each for itself.
///
/// # Safety
/// `from` is valid for reads of `len` bytes and `to` for writes; they do not overlap. All other accesses meanwhile
/// are made by these functions, by atomic accesses, by another process or by the kernel; no reference to bytes that change lives.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: by the caller's word.
    unsafe { imp::copy(from, to, len) }
}

/// Writes `len` times the same byte, each for itself.
///
/// # Safety
/// As for [`copy`], of `to` alone.
pub unsafe fn fill(to: *mut u8, byte: u8, len: usize) {
    // SAFETY: by the caller's word.
    unsafe { imp::fill(to, byte, len) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use std::arch::asm;

    /// From so many bytes on the processor's own copy of strings is the faster one (docs/decisions/0031).
    const STRING_BYTES_MIN: usize = 2048;

    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        if len >= STRING_BYTES_MIN {
            // SAFETY: `len` bytes at both, by the caller's word; the direction flag is clear, as everywhere in Rust.
            unsafe {
                asm!("rep movsb", inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
                    options(nostack, preserves_flags));
            }
        } else if len >= 16 {
            // SAFETY: the loops stay before the last 16 bytes, which are copied at the end, some of them for a second time.
            unsafe {
                asm!(
                    // By 64 bytes, as long as more than that are left.
                    "cmp {last}, 64",
                    "jb 3f",
                    "2:",
                    "movdqu {a}, [{from} + {at}]",
                    "movdqu {b}, [{from} + {at} + 16]",
                    "movdqu {c}, [{from} + {at} + 32]",
                    "movdqu {d}, [{from} + {at} + 48]",
                    "movdqu [{to} + {at}], {a}",
                    "movdqu [{to} + {at} + 16], {b}",
                    "movdqu [{to} + {at} + 32], {c}",
                    "movdqu [{to} + {at} + 48], {d}",
                    "add {at}, 64",
                    "lea {next}, [{at} + 64]",
                    "cmp {next}, {last}",
                    "jbe 2b",
                    "jmp 3f",
                    // By 16 bytes.
                    "4:",
                    "movdqu {a}, [{from} + {at}]",
                    "movdqu [{to} + {at}], {a}",
                    "add {at}, 16",
                    "3:",
                    "cmp {at}, {last}",
                    "jb 4b",
                    "movdqu {a}, [{from} + {last}]",
                    "movdqu [{to} + {last}], {a}",
                    a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                    at = inout(reg) 0usize => _, next = out(reg) _,
                    from = in(reg) from, to = in(reg) to, last = in(reg) len - 16,
                    options(nostack),
                );
            }
        } else if len >= 8 {
            // SAFETY: the first and the last 8 bytes, which overlap.
            unsafe {
                asm!("mov {bytes}, [{from}]", "mov [{to}], {bytes}",
                    "mov {bytes}, [{from} + {last}]", "mov [{to} + {last}], {bytes}",
                    bytes = out(reg) _, from = in(reg) from, to = in(reg) to, last = in(reg) len - 8,
                    options(nostack, preserves_flags));
            }
        } else {
            for at in 0..len {
                // SAFETY: a byte of each, by the caller's word.
                unsafe {
                    asm!("mov {byte}, [{from}]", "mov [{to}], {byte}", byte = out(reg_byte) _,
                        from = in(reg) from.add(at), to = in(reg) to.add(at), options(nostack, preserves_flags));
                }
            }
        }
    }

    pub(super) unsafe fn fill(to: *mut u8, byte: u8, len: usize) {
        // SAFETY: `len` bytes, by the caller's word; the direction flag is clear.
        unsafe {
            asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") byte,
                options(nostack, preserves_flags));
        }
    }
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
mod imp {
    use super::{AtomicU8, AtomicUsize, Relaxed};

    const WORD: usize = size_of::<usize>();

    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: in the range, by the caller's word; words are aligned, and atomics may be made of what is read alone.
            unsafe {
                let (from, to) = (from.add(at).cast_mut(), to.add(at));
                if len - at >= WORD && (from as usize | to as usize).is_multiple_of(WORD) {
                    let word = AtomicUsize::from_ptr(from.cast()).load(Relaxed);
                    AtomicUsize::from_ptr(to.cast()).store(word, Relaxed);
                    at += WORD;
                } else {
                    AtomicU8::from_ptr(to).store(AtomicU8::from_ptr(from).load(Relaxed), Relaxed);
                    at += 1;
                }
            }
        }
    }

    pub(super) unsafe fn fill(to: *mut u8, byte: u8, len: usize) {
        for at in 0..len {
            // SAFETY: in the range, by the caller's word.
            unsafe { AtomicU8::from_ptr(to.add(at)).store(byte, Relaxed) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn every_length_and_place_is_copied_whole_and_nothing_beside_it() {
        let from: Vec<u8> = (0..3000u32).map(|at| (at % 251) as u8 + 1).collect();
        for len in (0..200).chain([255, 256, 511, 512, 513, 1000, 2047, 2048, 2090]) {
            for (skip, at) in [(0, 0), (1, 0), (0, 3), (5, 7), (8, 16)] {
                let mut to = vec![0u8; 2200];
                // SAFETY: both vectors have so many bytes from there on, and no other user.
                unsafe { copy(from.as_ptr().add(skip), to.as_mut_ptr().add(at), len) };
                assert_eq!(to[at..at + len], from[skip..skip + len], "{len} from {skip} to {at}");
                assert!(to[..at].iter().chain(&to[at + len..]).all(|byte| *byte == 0), "{len} from {skip} to {at}");
                // SAFETY: as above.
                unsafe { fill(to.as_mut_ptr().add(at), 9, len) };
                assert!(to[at..at + len].iter().all(|byte| *byte == 9));
                assert!(to[..at].iter().chain(&to[at + len..]).all(|byte| *byte == 0), "{len} at {at}");
            }
        }
    }

    #[test]
    fn a_copy_beside_a_writer_has_old_or_new_bytes() {
        let (shared, over) = (crate::Mapping::new(1000).unwrap(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..2000 {
                    let bytes = [if round % 2 == 0 { 0xff } else { 0 }; 1000];
                    // SAFETY: so many bytes; all others are in this test.
                    unsafe { copy(bytes.as_ptr(), shared.as_ptr(), 1000) };
                }
                over.store(true, Ordering::Release);
            });
            while !over.load(Ordering::Acquire) {
                let mut seen = [7u8; 1000];
                // SAFETY: as above.
                unsafe { copy(shared.as_ptr(), seen.as_mut_ptr(), 1000) };
                assert!(seen.iter().all(|byte| [0, 0xff].contains(byte)));
            }
        });
    }
}
