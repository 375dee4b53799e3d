//! The streams over shared memory of a loop, by the index of their sockets: each operation looks up its stream.

use super::shm_stream::ShmStream;
use crate::op::Socket;

/// The sockets' own table hands out small indices, and none twice at a time.
#[derive(Default)]
pub(super) struct ShmStreams {
    places: Vec<Option<Box<Entry>>>,
}

struct Entry {
    generation: u32,
    stream: ShmStream,
}

impl ShmStreams {
    /// Gives a socket its stream. Drops the stream of a closed socket with the same index.
    pub(super) fn insert(&mut self, socket: Socket, stream: ShmStream) {
        let place = socket.index as usize;
        if self.places.len() <= place {
            self.places.resize_with(place + 1, || None);
        }
        let entry = Entry { generation: socket.generation, stream };
        self.places[place] = Some(Box::new(entry));
    }

    pub(super) fn contains(&self, socket: Socket) -> bool {
        self.get(socket).is_some()
    }

    pub(super) fn get(&self, socket: Socket) -> Option<&ShmStream> {
        let entry = self.places.get(socket.index as usize)?.as_deref()?;
        (entry.generation == socket.generation).then_some(&entry.stream)
    }

    pub(super) fn get_mut(&mut self, socket: Socket) -> Option<&mut ShmStream> {
        let entry = self.places.get_mut(socket.index as usize)?.as_deref_mut()?;
        (entry.generation == socket.generation).then_some(&mut entry.stream)
    }

    pub(super) fn remove(&mut self, socket: Socket) -> Option<ShmStream> {
        let place = self.places.get_mut(socket.index as usize)?;
        let entry = place.take_if(|entry| entry.generation == socket.generation)?;
        Some(entry.stream)
    }

    /// The socket of that index that has a stream.
    pub(super) fn socket_at(&self, index: u32) -> Option<Socket> {
        let entry = self.places.get(index as usize)?.as_ref()?;
        Some(Socket { index, generation: entry.generation })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ShmStream> {
        self.places.iter().flatten().map(|entry| &entry.stream)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ShmStream> {
        self.places.iter_mut().flatten().map(|entry| &mut entry.stream)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::super::lending;
    use super::super::memory::SharedMemory;
    use super::super::shm_stream::{StreamSide, StreamState};
    use super::*;

    fn stream() -> ShmStream {
        let memory = Arc::new(SharedMemory::create(4096).unwrap().0);
        let ((ours, _), (bell, _)) = (lending::sockets().unwrap(), UnixStream::pair().unwrap());
        ShmStream::new(StreamState::new((memory, ours), StreamSide::Client, bell.into()))
    }

    #[test]
    fn a_stale_socket_has_no_link() {
        let mut streams = ShmStreams::default();
        let [old, new, other] = [(5, 1), (5, 2), (9, 1)].map(|(index, generation)| Socket { index, generation });
        assert!(!streams.contains(old) && streams.remove(old).is_none());
        streams.insert(old, stream());
        assert!(streams.contains(old) && !streams.contains(new) && !streams.contains(other));
        assert!(streams.remove(new).is_none() && streams.get_mut(new).is_none());
        assert!(streams.remove(old).is_some() && streams.remove(old).is_none() && streams.iter().count() == 0);
        streams.insert(new, stream());
        streams.insert(other, stream());
        assert!(streams.get(old).is_none() && streams.get(new).is_some());
        assert_eq!((streams.iter().count(), streams.iter_mut().count()), (2, 2));
        assert_eq!((streams.socket_at(5), streams.socket_at(6), streams.socket_at(99)), (Some(new), None, None));
        streams.insert(new, stream());
        assert!(streams.remove(new).is_some() && streams.iter().count() == 1);
        assert!(streams.remove(other).is_some() && streams.iter().count() == 0);
    }
}
