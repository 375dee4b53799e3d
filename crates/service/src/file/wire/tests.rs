use zerocopy::FromZeros;

use super::*;

#[test]
fn arguments_have_these_bytes() {
    let arguments = Arguments {
        node: U64::new(0x0807_0605_0403_0201),
        second: U64::new(0x100f_0e0d_0c0b_0a09),
        offset: U64::new(0x1817_1615_1413_1211),
        len: U64::new(0x201f_1e1d_1c1b_1a19),
        extra: U64::new(0x2827_2625_2423_2221),
        flags: U32::new(0x2c2b_2a29),
        mode: U32::new(0x302f_2e2d),
        uid: U32::new(0x3433_3231),
        gid: U32::new(0x3837_3635),
        name_len: U16::new(0x3a39),
        second_name_len: U16::new(0x3c3b),
        group_count: 0x3d,
        slot: 0x3e,
        sequence: U16::new(0x403f),
    };
    assert_eq!(arguments.as_bytes(), (1..=64).collect::<Vec<u8>>());
    let attach = AttachResult {
        flags: U32::new(0x0403_0201),
        transfer_max: U32::new(0x0807_0605),
        instance: U64::new(0x100f_0e0d_0c0b_0a09),
        state: U64::new(0x1817_1615_1413_1211),
        uptime_ms: U64::new(0x201f_1e1d_1c1b_1a19),
        failed_syncs: U64::new(0x2827_2625_2423_2221),
    };
    assert_eq!(attach.as_bytes(), (1..=40).collect::<Vec<u8>>());
    let new = NewAttributes {
        which: U32::new(0x0403_0201),
        mode: U32::new(0x0807_0605),
        uid: U32::new(0x0c0b_0a09),
        gid: U32::new(0x100f_0e0d),
        size: U64::new(0x1817_1615_1413_1211),
        accessed_s: I64::new(0x201f_1e1d_1c1b_1a19),
        modified_s: I64::new(0x2827_2625_2423_2221),
        accessed_ns: U32::new(0x2c2b_2a29),
        modified_ns: U32::new(0x302f_2e2d),
    };
    assert_eq!(new.as_bytes(), (1..=48).collect::<Vec<u8>>());
}

#[test]
fn attributes_and_entries_have_these_bytes() {
    let bytes: Vec<u8> = (1..=104).collect();
    let attributes = Attributes::read_from_bytes(&bytes).unwrap();
    assert_eq!(attributes.ino.get(), 0x0807_0605_0403_0201);
    assert_eq!(attributes.blocks.get(), 0x1817_1615_1413_1211);
    assert_eq!(attributes.born_s.get(), 0x3837_3635_3433_3231);
    assert_eq!(attributes.accessed_ns.get(), 0x3c3b_3a39);
    assert_eq!(attributes.mode.get(), 0x4c4b_4a49);
    assert_eq!(attributes.block_bytes.get(), 0x605f_5e5d);
    assert_eq!(attributes.subvolume.get(), 0x6867_6665_6463_6261);
    let mut entry = DirectoryEntry::new_zeroed();
    (entry.cookie, entry.entry.node, entry.lease) = (U64::new(9), U64::new(8), U64::new(7));
    (entry.name_len, entry.flags) = (U16::new(3), U16::new(ENTRY_WITHOUT_XATTRS));
    let mut listing = entry.as_bytes().to_vec();
    assert_eq!((listing[0], listing[8], listing[120], listing[128], listing[130]), (9, 8, 7, 3, 1));
    listing.extend(b"abc");
    listing.extend_from_within(..);
    let listed = Some(Listed { head: entry, name: b"abc" });
    assert_eq!(read_directory(&listing).collect::<Vec<_>>(), [listed, listed]);
    assert_eq!(read_directory(&listing[..listing.len() - 1]).collect::<Vec<_>>(), [listed, None], "cut");
    assert_eq!(read_directory(&[]).count(), 0);
}

/// A client uses the names on its own machine, relative to a directory.
#[test]
fn a_name_that_leads_elsewhere_is_no_single_one() {
    let head = DirectoryEntry::new_zeroed();
    for name in [&b"../outside"[..], b"/etc/passwd", b"a/b", b"", b"a\0b"] {
        assert!(!Listed { head, name }.has_single_name(), "{}", name.escape_ascii());
    }
    for name in [&b"."[..], b"..", b"...", b"a\\b"] {
        assert!(Listed { head, name }.has_single_name(), "{}", name.escape_ascii());
    }
}

#[test]
fn answers_have_these_bytes() {
    let bytes: Vec<u8> = (1..=56).collect();
    let sizes = FileSystem::read_from_bytes(&bytes).unwrap();
    assert_eq!((sizes.block_bytes.get(), sizes.name_max.get()), (0x0807_0605_0403_0201, 0x3837_3635_3433_3231));
    let lock = LockResult::read_from_bytes(&bytes[..24]).unwrap();
    assert_eq!((lock.last.get(), lock.kind.get(), lock.pid.get()), (0x100f_0e0d_0c0b_0a09, 0x1413_1211, 0x1817_1615));
    let share = ShareEntry::read_from_bytes(&bytes[..8]).unwrap();
    assert_eq!((share.flags.get(), share.name_len.get(), share.description_len.get()), (0x0403_0201, 0x0605, 0x0807));
    let written = WriteResult::read_from_bytes(&bytes[..16]).unwrap();
    assert_eq!((written.bytes.get(), written.lease.get()), (0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09));
    let forgotten = Forgotten::read_from_bytes(&bytes[..16]).unwrap();
    assert_eq!(forgotten.count.get(), 0x100f_0e0d_0c0b_0a09);
}

#[test]
fn every_error_survives_the_wire() {
    let own = [
        CallError::Errno(Errno::NOENT),
        CallError::Errno(Errno::DQUOT),
        CallError::NoShare,
        CallError::Stale,
        CallError::Malformed,
        CallError::TooManyNodes,
        CallError::TooManyOpen,
        CallError::TooManyLocks,
        CallError::Busy,
        CallError::Grace,
        CallError::GraceOver,
        CallError::UnknownMethod,
        CallError::NotServed(Status::Version),
    ];
    for error in own {
        assert_eq!(CallError::from_status(error.status()), error);
    }
    assert_eq!(CallError::from_status(5000), CallError::Malformed);
    for number in 0..100 {
        assert!(Method::from_number(number).is_none_or(|method| method as u16 == number));
    }
    assert_eq!(Method::from_number(39), None);
    let lease = Lease { node: 0x0807_0605_0403_0201.into(), version: 9.into() };
    assert_eq!(lease.as_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]);
    let granted = GrantedLeases { on_node: 5.into(), on_found: 6.into() };
    assert_eq!(granted.as_bytes(), [5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]);
    let bytes: Vec<u8> = (1..=128).collect();
    let changed = ChangedDirectory::read_from_bytes(&bytes).unwrap();
    assert_eq!((changed.lease.get(), changed.made_lease.get()), (0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09));
    assert_eq!(changed.made_flags.get(), 0x1817_1615_1413_1211);
    assert_eq!(changed.attributes.ino.get(), 0x201f_1e1d_1c1b_1a19);
}
