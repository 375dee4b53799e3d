//! Memory of the heap that is free and that the allocator keeps.
//!
//! glibc gives memory back by itself only from the end of an arena. One small block there, of a table say, keeps all that is free below
//! it: a node whose clients had many answers waiting would stay as large as it ever was.

/// What is known of the process's heap.
#[derive(Debug, Default)]
pub struct Heap {
    /// Free bytes whose pages were given back: the allocator goes on counting them.
    given_back: usize,
}

impl Heap {
    /// Gives the whole pages of the heap's free memory back to the system if more than `free_bytes_max` are free besides those
    /// that were given back before; whether it did. Other threads that allocate meanwhile may wait for some milliseconds. Does
    /// nothing where the C library is not glibc.
    pub fn give_back(&mut self, free_bytes_max: usize) -> bool {
        let free_bytes = free_bytes();
        let is_much = free_bytes > self.given_back.saturating_add(free_bytes_max);
        self.given_back = self.given_back.min(free_bytes);
        #[cfg(target_env = "gnu")]
        if is_much {
            // SAFETY: it touches free memory alone, under the allocator's own locks.
            unsafe { libc::malloc_trim(0) };
            self.given_back = self::free_bytes();
        }
        is_much
    }
}

fn free_bytes() -> usize {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes nothing, and counts under the allocator's own locks.
    return unsafe { libc::mallinfo2() }.fordblks;
    #[cfg(not(target_env = "gnu"))]
    0
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::Heap;

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
        let mut heap = Heap::default();
        assert!(!heap.give_back(4 * BYTES));
        assert!(resident_bytes() > BYTES, "less is free than may be");
        assert!(heap.give_back(BYTES / 4));
        assert!(!heap.give_back(BYTES / 4), "there is nothing more");
        let left = resident_bytes();
        assert!(left < kept - BYTES / 2, "{left} of {kept} bytes are resident");
        drop(last);
    }
}
