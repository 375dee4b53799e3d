//! The bytes that a loop has moved, by the kind of copy: the copy count is the first thing that a benchmark prints.

/// Bytes and calls since the loop started. Every field only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that the kernel copied from user memory or a mapping into a socket.
    pub sent_copied_bytes: u64,
    /// Of these, bytes that came from a mapped file, so that no copy was made in user space.
    pub sent_mapped_bytes: u64,
    /// Bytes that went from the page cache to a socket without a copy on this side (`splice`).
    pub sent_spliced_bytes: u64,
    /// Bytes sent without any copy by a CPU (zero-copy, reported so by the kernel).
    pub sent_zero_copy_bytes: u64,
    /// Bytes that the kernel copied from a socket into user memory.
    pub received_bytes: u64,
    /// Bytes copied between the page cache and user memory by reads.
    pub read_copied_bytes: u64,
    /// Bytes read by direct I/O: the device moved them.
    pub read_direct_bytes: u64,
    /// Bytes copied between user memory and the page cache by writes.
    pub written_copied_bytes: u64,
    /// Bytes written by direct I/O.
    pub written_direct_bytes: u64,
    /// Bytes copied into memory that peers have lent.
    pub put_bytes: u64,
    /// Bytes copied out of it.
    pub got_bytes: u64,
    /// Pieces of memory that peers have lent that were mapped for it.
    pub mapped_loans: u64,
    /// Of the copied bytes that were sent, those that a CPU read from a device's memory, which no cache holds.
    pub sent_device_bytes: u64,
    /// Of the received bytes, those that a CPU wrote to a device's memory.
    pub received_device_bytes: u64,
    /// Of the bytes read by direct I/O, those that went to a device's memory, not to main memory.
    pub read_device_bytes: u64,
    /// Of the bytes written by direct I/O, those that came from a device's memory.
    pub written_device_bytes: u64,
    /// Sends.
    pub send_calls: u64,
    /// Receives that brought something.
    pub receive_calls: u64,
    /// Times that the loop slept in the kernel.
    pub sleeps: u64,
}

impl Counters {
    /// All bytes that a CPU copied.
    pub fn copied_bytes(&self) -> u64 {
        let streams = self.sent_copied_bytes + self.received_bytes;
        streams + self.put_bytes + self.got_bytes + self.read_copied_bytes + self.written_copied_bytes
    }

    /// The sum of two loops' counts.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            sent_copied_bytes: self.sent_copied_bytes + other.sent_copied_bytes,
            sent_mapped_bytes: self.sent_mapped_bytes + other.sent_mapped_bytes,
            sent_spliced_bytes: self.sent_spliced_bytes + other.sent_spliced_bytes,
            sent_zero_copy_bytes: self.sent_zero_copy_bytes + other.sent_zero_copy_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
            read_copied_bytes: self.read_copied_bytes + other.read_copied_bytes,
            read_direct_bytes: self.read_direct_bytes + other.read_direct_bytes,
            written_copied_bytes: self.written_copied_bytes + other.written_copied_bytes,
            written_direct_bytes: self.written_direct_bytes + other.written_direct_bytes,
            put_bytes: self.put_bytes + other.put_bytes,
            got_bytes: self.got_bytes + other.got_bytes,
            mapped_loans: self.mapped_loans + other.mapped_loans,
            sent_device_bytes: self.sent_device_bytes + other.sent_device_bytes,
            received_device_bytes: self.received_device_bytes + other.received_device_bytes,
            read_device_bytes: self.read_device_bytes + other.read_device_bytes,
            written_device_bytes: self.written_device_bytes + other.written_device_bytes,
            send_calls: self.send_calls + other.send_calls,
            receive_calls: self.receive_calls + other.receive_calls,
            sleeps: self.sleeps + other.sleeps,
        }
    }
}
