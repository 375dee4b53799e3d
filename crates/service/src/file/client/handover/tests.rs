//! A client's state as it travels.

use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

use super::super::super::wire::Attributes;
use super::super::files::NamedIn;
use super::super::held_locks::HeldLock;
use super::super::locking::LockRange;
use super::super::opener::Opener;
use super::super::table::{Opened, ROOT};
use super::*;

const EPOCH: u64 = 3;

fn file(ino: u64) -> Attributes {
    Attributes { ino: U64::new(ino), born_s: 5.into(), born_ns: 6.into(), ..Attributes::new_zeroed() }
}

fn remote(name: u64) -> Remote {
    Remote { epoch: EPOCH, name }
}

fn opener() -> Opener {
    Opener { uid: 1000, gid: 100, groups: vec![7, 8] }
}

/// A root with an open file, which has a lock and an unsynced change.
fn table() -> (Table, u64, u64) {
    let mut table = Table::default();
    assert!(table.attach(remote(70), &file(2)));
    let node = table.hold(NamedIn::new(ROOT, b"name"), remote(71), &file(10));
    let handle = table.open(Opened { node, flags: 2, directory: false }, remote(72));
    table.locks.recovered(EPOCH);
    let range = LockRange { whole: false, owner: 9, pid: 11, start: 20, last: 29 };
    assert!(table.locks.note(EPOCH, node, range, Some(true)));
    table.changed(node, 500, true);
    (table, node, handle)
}

fn written(table: &Table) -> Vec<u8> {
    let (mut head, mut bytes) = (Head::new_zeroed(), vec![0; size_of::<Head>()]);
    table.write(&mut head, &mut bytes, |_| (3, opener()));
    bytes[..size_of::<Head>()].copy_from_slice(head.as_bytes());
    bytes
}

fn read(bytes: &[u8]) -> Result<Table, StateError> {
    let mut records = Records(bytes);
    let head: &Head = records.take()?;
    Table::read(head, &mut records, |handle, of| {
        assert_eq!((handle.used, of.uid, of.gid, &of.groups[..]), (3, 1000, 100, &[7, 8][..]));
    })
}

#[test]
fn a_table_goes_on_in_another_process() {
    let (before, node, handle) = table();
    let mut table = read(&written(&before)).unwrap();
    assert_eq!((table.place(node), table.remote(node)), (Some((ROOT, b"name".to_vec())), Some(remote(71))));
    assert_eq!(table.hold(NamedIn::new(ROOT, b"name"), remote(71), &file(10)), node, "known by its identity");
    assert_eq!(table.hold_named(NamedIn::new(ROOT, b"name")), Some(node), "and by its name");
    assert_eq!(table.handle(handle), Some((remote(72), Opened { node, flags: 2, directory: false })));
    let range = LockRange { whole: false, owner: 9, pid: 11, start: 20, last: 29 };
    assert_eq!(table.locks.all(), [(node, HeldLock { range, exclusive: true })]);
    assert_eq!(table.locks.begin_recovery(EPOCH), None, "the server has them");
    assert!(table.begin_sync(handle, 501).is_err(), "the process that took the change is gone");
    let next = table.open(Opened { node, flags: 0, directory: false }, remote(73));
    assert!(next > handle, "numbers are given once");
    assert_eq!(table.forget(node, 2), None, "the kernel has found it once, and this test twice since then");
    assert_eq!(table.forget(node, 1), Some((remote(71), 2)), "the server has named it twice");
}

#[test]
fn a_cut_state_is_refused() {
    let bytes = written(&table().0);
    for len in 0..bytes.len() {
        assert!(read(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    let mut many = bytes;
    // The number of nodes.
    many[112..116].fill(0xff);
    assert_eq!(read(&many).err(), Some(StateError("it has too many files")));
}

/// docs/wire.md draws these bytes.
#[test]
fn records_have_these_bytes() {
    let (mut table, node, handle) = table();
    // One node, so that the order of the records is known.
    table.nodes.remove(&ROOT);
    let bytes = written(&table);
    let number = |value: u64| value.to_le_bytes().to_vec();
    let counts: Vec<u8> = [1_u32, 1, 1, 1, 0, 0, 0, 0].iter().flat_map(|count| count.to_le_bytes()).collect();
    assert_eq!(bytes[112..144], counts);
    assert_eq!(bytes[64..88], [number(handle), number(EPOCH), number(EPOCH)].concat(), "last, held and locks' epoch");
    let file = [number(10), number(0), number(5), vec![6, 0, 0, 0]].concat();
    let golden = [
        [number(node), number(ROOT), file.clone(), number(EPOCH), number(71), number(1), number(1)].concat(),
        vec![12, 0, 4, 0],
        b"name".to_vec(),
        [number(handle), number(node), number(EPOCH), number(72), number(0)].concat(),
        vec![2, 0, 0, 0, 0xe8, 3, 0, 0, 100, 0, 0, 0, 0, 0, 3, 2, 7, 0, 0, 0, 8, 0, 0, 0],
        [number(node), number(9), number(20), number(29), vec![11, 0, 0, 0, 2, 0, 0, 0]].concat(),
        [file, vec![3, 0, 0, 0], number(500), number(1), number(0)].concat(),
    ];
    assert_eq!(bytes[size_of::<Head>()..], golden.concat());
}
