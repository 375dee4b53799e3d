//! Messages of one rank to another, gathered: the changes of a release, the asks of a fetch, and the answers to both.
//!
//! Each message of a session costs a system call and a wake-up, whatever it says. So what one input of the machine brings about goes to each rank in as
//! few messages as its bytes need, in order.

use std::collections::VecDeque;

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Rank;
use super::wire::{MESSAGE_BYTES, Message};
use crate::limits::DSM_PAYLOAD_BYTES_MAX;

/// What is before each message of a batch.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    message: [u8; MESSAGE_BYTES],
    payload_bytes: U32,
}

const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(ENTRY_BYTES == 36);

/// Header and payload, as a session sends them.
pub type Sendable = (Rank, [u8; MESSAGE_BYTES], Vec<u8>);

#[derive(Debug)]
struct Gathering {
    to: Rank,
    messages: Vec<(Message, Vec<u8>)>,
    /// Of the batch that they make.
    bytes: usize,
}

/// What is to be sent.
#[derive(Debug, Default)]
pub struct Batches {
    gathering: Vec<Gathering>,
    full: VecDeque<Sendable>,
}

impl Batches {
    /// Adds a message with its payload, of at most [`DSM_PAYLOAD_BYTES_MAX`] bytes.
    pub fn add(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        let bytes = ENTRY_BYTES + payload.len();
        let place = self.gathering.iter().position(|gathering| gathering.to == to).unwrap_or_else(|| {
            self.gathering.push(Gathering { to, messages: Vec::new(), bytes: 0 });
            self.gathering.len() - 1
        });
        if self.gathering[place].bytes + bytes > DSM_PAYLOAD_BYTES_MAX {
            self.full.extend(self.gathering[place].end());
        }
        let gathering = &mut self.gathering[place];
        gathering.messages.push((message, payload));
        gathering.bytes += bytes;
    }

    /// What to send next of the messages to which nothing can be added any more.
    pub fn take_full(&mut self) -> Option<Sendable> {
        self.full.pop_front()
    }

    /// What to send next; what goes to one rank is in order.
    pub fn take(&mut self) -> Option<Sendable> {
        if self.full.is_empty() {
            let ended = self.gathering.iter_mut().filter_map(Gathering::end);
            self.full.extend(ended);
            self.gathering.clear();
        }
        self.full.pop_front()
    }
}

impl Gathering {
    /// What was gathered, if anything was. A message alone goes as it is.
    fn end(&mut self) -> Option<Sendable> {
        self.bytes = 0;
        let mut messages = std::mem::take(&mut self.messages);
        if messages.len() <= 1 {
            return messages.pop().map(|(message, payload)| (self.to, message.to_bytes(), payload));
        }
        let mut bytes = Vec::new();
        for (message, payload) in &messages {
            let payload_bytes = U32::new(payload.len() as u32);
            bytes.extend(Entry { message: message.to_bytes(), payload_bytes }.as_bytes());
            bytes.extend(payload);
        }
        Some((self.to, Message::Batch.to_bytes(), bytes))
    }
}

/// The messages in what has come; none if it is malformed.
pub fn messages(header: &[u8], payload: Vec<u8>) -> Option<Vec<(Message, Vec<u8>)>> {
    let message = Message::from_bytes(header)?;
    if message != Message::Batch {
        return Some(vec![(message, payload)]);
    }
    let (mut rest, mut messages) = (payload.as_slice(), Vec::new());
    while !rest.is_empty() {
        let (entry, behind) = Entry::read_from_prefix(rest).ok()?;
        let (payload, behind) = behind.split_at_checked(entry.payload_bytes.get() as usize)?;
        let message = Message::from_bytes(&entry.message).filter(|message| *message != Message::Batch)?;
        messages.push((message, payload.to_vec()));
        rest = behind;
    }
    Some(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = 4096;

    fn own(page: u32) -> Message {
        Message::Own { page }
    }

    fn taken(batches: &mut Batches) -> Vec<Sendable> {
        std::iter::from_fn(|| batches.take()).collect()
    }

    #[test]
    fn messages_to_each_rank_go_together_and_in_order() {
        let mut batches = Batches::default();
        for page in 0..20 {
            batches.add(page as Rank % 2, own(page), vec![page as u8; PAGE_BYTES]);
        }
        batches.add(3, Message::Leave, Vec::new());
        let sent = taken(&mut batches);
        // Three pages fit one message, and ten go to each of two ranks.
        assert_eq!(sent.len(), 4 + 4 + 1);
        for rank in 0..2 {
            let to_it = sent.iter().filter(|(to, ..)| *to == rank);
            let came: Vec<_> =
                to_it.flat_map(|(_, header, payload)| messages(header, payload.clone()).unwrap()).collect();
            let pages = (0..20).filter(|page| page % 2 == u32::from(rank));
            assert!(came.into_iter().eq(pages.map(|page| (own(page), vec![page as u8; PAGE_BYTES]))));
        }
        assert!(sent.iter().all(|(.., payload)| payload.len() <= DSM_PAYLOAD_BYTES_MAX));
        assert_eq!(sent.last(), Some(&(3, Message::Leave.to_bytes(), Vec::new())), "a message alone is no batch");
        assert!(taken(&mut batches).is_empty());
    }

    #[test]
    fn the_bytes_are_those_of_the_map() {
        let mut batches = Batches::default();
        batches.add(1, own(2), vec![7, 8]);
        batches.add(1, Message::Alive, Vec::new());
        let [(1, header, payload)] = &taken(&mut batches)[..] else { panic!("one message") };
        assert_eq!((header[0], &header[1..]), (26, &[0; 31][..]));
        let mut golden = [0; 36 + 2 + 36];
        (golden[0], golden[8], golden[32], golden[36], golden[37], golden[38]) = (3, 2, 2, 7, 8, 20);
        assert_eq!(payload[..], golden);
    }

    #[test]
    fn what_is_no_batch_is_refused() {
        let mut batches = Batches::default();
        batches.add(1, own(2), vec![7, 8]);
        batches.add(1, own(3), Vec::new());
        let (_, header, good) = batches.take().unwrap();
        assert_eq!(messages(&header, good.clone()).map(|messages| messages.len()), Some(2));
        let whole = [0, 36 + 2, good.len()];
        for end in (0..good.len()).filter(|end| !whole.contains(end)) {
            assert_eq!(messages(&header, good[..end].to_vec()), None, "{end} bytes");
        }
        let nested = [&header[..], &[0; 4]].concat();
        assert_eq!(messages(&header, nested), None, "a batch in a batch");
    }
}
