//! The links of a loop's streams, by the place of their sockets: every operation of every stream asks for one.

use super::link::Link;
use crate::op::Socket;

/// The sockets' own table hands out small indices, and none twice at a time.
#[derive(Default)]
pub(super) struct Links {
    places: Vec<Option<Box<Entry>>>,
}

struct Entry {
    generation: u32,
    link: Link,
}

impl Links {
    /// Gives a socket its link; one that was there before, of a socket that is gone, is dropped.
    pub(super) fn insert(&mut self, socket: Socket, link: Link) {
        let place = socket.index as usize;
        if self.places.len() <= place {
            self.places.resize_with(place + 1, || None);
        }
        let entry = Entry { generation: socket.generation, link };
        self.places[place] = Some(Box::new(entry));
    }

    pub(super) fn contains(&self, socket: Socket) -> bool {
        self.get(socket).is_some()
    }

    pub(super) fn get(&self, socket: Socket) -> Option<&Link> {
        let entry = self.places.get(socket.index as usize)?.as_deref()?;
        (entry.generation == socket.generation).then_some(&entry.link)
    }

    pub(super) fn get_mut(&mut self, socket: Socket) -> Option<&mut Link> {
        let entry = self.places.get_mut(socket.index as usize)?.as_deref_mut()?;
        (entry.generation == socket.generation).then_some(&mut entry.link)
    }

    pub(super) fn remove(&mut self, socket: Socket) -> Option<Link> {
        let place = self.places.get_mut(socket.index as usize)?;
        let entry = place.take_if(|entry| entry.generation == socket.generation)?;
        Some(entry.link)
    }

    /// The socket of that index that has a link.
    pub(super) fn socket_at(&self, index: u32) -> Option<Socket> {
        let entry = self.places.get(index as usize)?.as_ref()?;
        Some(Socket { index, generation: entry.generation })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.places.iter().flatten().map(|entry| &entry.link)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.places.iter_mut().flatten().map(|entry| &mut entry.link)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::super::lending;
    use super::super::link::{End, Ends};
    use super::super::memory::SharedMemory;
    use super::*;

    fn link() -> Link {
        let memory = Arc::new(SharedMemory::create(4096).unwrap().0);
        let ((ours, _), (bell, _)) = (lending::sockets().unwrap(), UnixStream::pair().unwrap());
        Link::new(Ends::new((memory, ours), End::Client, bell.into()))
    }

    #[test]
    fn a_stale_socket_has_no_link() {
        let mut links = Links::default();
        let [old, new, other] = [(5, 1), (5, 2), (9, 1)].map(|(index, generation)| Socket { index, generation });
        assert!(!links.contains(old) && links.remove(old).is_none());
        links.insert(old, link());
        assert!(links.contains(old) && !links.contains(new) && !links.contains(other));
        assert!(links.remove(new).is_none() && links.get_mut(new).is_none());
        assert!(links.remove(old).is_some() && links.remove(old).is_none() && links.iter().count() == 0);
        links.insert(new, link());
        links.insert(other, link());
        assert!(links.get(old).is_none() && links.get(new).is_some());
        assert_eq!((links.iter().count(), links.iter_mut().count()), (2, 2));
        assert_eq!((links.socket_at(5), links.socket_at(6), links.socket_at(99)), (Some(new), None, None));
        links.insert(new, link());
        assert!(links.remove(new).is_some() && links.iter().count() == 1);
        assert!(links.remove(other).is_some() && links.iter().count() == 0);
    }
}
