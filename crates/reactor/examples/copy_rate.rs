//! How fast copies of bytes that others may change are beside `memcpy`: docs/decisions/0031.
//!
//! Medians of the ratios of 21 interleaved rounds, and the best rate of each.

use std::hint::black_box;
use std::time::Instant;

use byway_reactor::bytewise;

const ROUNDS: usize = 21;

/// Copies `len` bytes.
type Copy = fn(*const u8, *mut u8, usize);

fn plain(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's two vectors have so many bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

fn bytewise(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as above, and one thread has them.
    unsafe { bytewise::copy(from, to, len) };
}

fn byte_by_byte(from: *const u8, to: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: as above.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}

/// Seconds for one copy.
fn time(copy: Copy, from: &[u8], to: &mut [u8], count: usize) -> f64 {
    let begun = Instant::now();
    for _ in 0..count {
        black_box(copy)(black_box(from.as_ptr()), black_box(to.as_mut_ptr()), black_box(from.len()));
    }
    begun.elapsed().as_secs_f64() / count as f64
}

fn main() {
    println!("| bytes | memcpy, GB/s | bytewise, GB/s | of memcpy | byte by byte, of memcpy |");
    println!("|---|---|---|---|---|");
    for len in [16_usize, 64, 128, 256, 512, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20] {
        let (from, mut to) = (vec![1; len], vec![2; len]);
        let count = ((64 << 20) / len).clamp(4, 400_000);
        let mut times = [(); 3].map(|()| Vec::new());
        for _ in 0..ROUNDS {
            let copies: [(Copy, usize); 3] = [(plain, count), (bytewise, count), (byte_by_byte, count.div_ceil(16))];
            for (all, (copy, count)) in times.iter_mut().zip(copies) {
                all.push(time(copy, &from, &mut to, count));
            }
        }
        let rate = |times: &[f64]| len as f64 / times.iter().copied().fold(f64::MAX, f64::min) / 1e9;
        let ratio = |times: &[f64], plain: &[f64]| {
            let mut ratios: Vec<f64> = plain.iter().zip(times).map(|(plain, time)| plain / time).collect();
            ratios.sort_by(f64::total_cmp);
            ratios[ROUNDS / 2]
        };
        let [plain, ours, bytes] = times;
        println!(
            "| {len} | {:.1} | {:.1} | {:.2} | {:.2} |",
            rate(&plain),
            rate(&ours),
            ratio(&ours, &plain),
            ratio(&bytes, &plain)
        );
    }
}
