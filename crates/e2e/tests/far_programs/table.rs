//! A program of Rust's standard library alone: threads fill maps, which are joined, changed and counted. Prints sums.

use std::collections::{BTreeMap, HashMap};

const THREADS: u64 = 3;
const KEYS: u64 = 70_000;

fn value(key: u64) -> Vec<u8> {
    (0..64 + key % 128).map(|at| (key.wrapping_mul(0x9e37_79b9) >> (at % 24)) as u8).collect()
}

fn main() {
    let parts: Vec<HashMap<u64, Vec<u8>>> = std::thread::scope(|scope| {
        let fill = |part| (0..KEYS).filter(move |key| key % THREADS == part).map(|key| (key, value(key))).collect();
        let threads: Vec<_> = (0..THREADS).map(|part| scope.spawn(move || fill(part))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it fills its part")).collect()
    });
    let mut table: HashMap<u64, Vec<u8>> = parts.into_iter().flatten().collect();
    let mut sorted: BTreeMap<String, u64> =
        table.iter().map(|(key, value)| (format!("{key:0>96}"), value.iter().map(|byte| u64::from(*byte)).sum())).collect();
    table.retain(|key, bytes| {
        assert_eq!(*bytes, value(*key), "{key}");
        key % 7 != 3
    });
    for (number, sum) in sorted.values_mut().enumerate() {
        *sum += number as u64;
    }
    let mut words: Vec<String> = sorted.keys().rev().map(|key| key.chars().rev().collect()).collect();
    words.sort_unstable();
    let digest = words.iter().zip(sorted.values()).fold(0u64, |digest, (word, sum)| {
        word.bytes().fold(digest.rotate_left(5) ^ sum, |digest, byte| digest.wrapping_mul(31).wrapping_add(u64::from(byte)))
    });
    println!("{} {} {digest:016x}", table.len(), table.values().map(Vec::len).sum::<usize>());
}
