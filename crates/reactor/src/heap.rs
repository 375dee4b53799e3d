//! Memory of the heap that is free and that the allocator keeps.
//!
//! glibc gives memory back by itself only from the end of an arena. One small block there, of a table say, keeps all that is free below
//! it: a node whose clients had many answers waiting would stay as large as it ever was.

/// Gives the whole pages of the heap's free memory back to the system if more than `free_bytes_max` are free. Other
/// threads that allocate meanwhile may wait for some milliseconds. Does nothing where the C library is not glibc.
pub fn give_back_free_heap(free_bytes_max: usize) {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes nothing, and counts under the allocator's own locks.
        let free_bytes = unsafe { libc::mallinfo2() }.fordblks;
        if free_bytes > free_bytes_max {
            // SAFETY: it touches free memory alone, under the allocator's own locks.
            unsafe { libc::malloc_trim(0) };
        }
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = free_bytes_max;
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::give_back_free_heap;

    fn resident_bytes() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
    }

    #[test]
    fn free_memory_below_a_block_that_is_in_use_is_given_back() {
        const BLOCK_BYTES: usize = 4096;
        const BYTES: usize = 128 << 20;
        let mut blocks: Vec<Vec<u8>> = (0..BYTES / BLOCK_BYTES).map(|_| vec![1; BLOCK_BYTES]).collect();
        let last = blocks.pop();
        drop(blocks);
        let kept = resident_bytes();
        assert!(kept > BYTES, "the allocator keeps it: {kept} bytes are resident");
        give_back_free_heap(4 * BYTES);
        assert!(resident_bytes() > BYTES, "less is free than may be");
        give_back_free_heap(BYTES / 4);
        let left = resident_bytes();
        assert!(left < kept - BYTES / 2, "{left} of {kept} bytes are resident");
        drop(last);
    }
}
