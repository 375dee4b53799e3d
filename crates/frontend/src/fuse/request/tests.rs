use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;

fn request(opcode: u32, body: &[&[u8]]) -> Vec<u8> {
    let len = size_of::<InHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
    let header =
        InHeader { len: len as u32, opcode, unique: 8, node: 3, uid: 1, gid: 2, pid: 4, ..InHeader::default() };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(body.concat());
    bytes
}

fn operation(bytes: &[u8]) -> Operation<'_> {
    let parsed = parse(bytes).unwrap();
    assert_eq!((parsed.unique, parsed.node), (8, 3));
    assert_eq!(parsed.caller, Caller { uid: 1, gid: 2, pid: 4 });
    parsed.operation
}

#[test]
fn names_follow_their_structures() {
    let rename = abi::Rename2In { new_directory: 9, flags: 1, padding: 0 };
    assert_eq!(
        operation(&request(opcode::RENAME2, &[rename.as_bytes(), b"old\0new\0"])),
        Operation::Rename { name: b"old", new_directory: 9, new_name: b"new", flags: 1 }
    );
    let link = request(opcode::SYMLINK, &[b"name\0../target\0"]);
    assert_eq!(operation(&link), Operation::SymLink { name: b"name", target: b"../target" });
    let set = abi::SetXattrIn { size: 3, flags: 2 };
    let set = request(opcode::SETXATTR, &[set.as_bytes(), b"user.a\0", b"v\0w"]);
    assert_eq!(operation(&set), Operation::SetXattr { name: b"user.a", value: b"v\0w", flags: 2 });
}

#[test]
fn a_write_has_its_bytes_and_says_whose() {
    let write = abi::WriteIn {
        handle: 5,
        offset: 4096,
        size: 3,
        write_flags: abi::WRITE_KILL_SUIDGID | abi::READ_LOCK_OWNER,
        lock_owner: 77,
        flags: 1,
        padding: 0,
    };
    let bytes = request(opcode::WRITE, &[write.as_bytes(), b"abc"]);
    let Operation::Write(write) = operation(&bytes) else { panic!("a write") };
    assert_eq!((write.handle, write.offset, write.data, write.lock_owner), (5, 4096, &b"abc"[..], Some(77)));
    assert!(write.kill_suid_gid && !write.from_cache);
    assert_eq!(bytes.len() - write.data.len(), WRITE_HEAD_BYTES, "so a payload is page-aligned behind its head");
}

#[test]
fn only_what_a_setattr_names_is_set() {
    let set = SetAttrIn {
        valid: abi::setattr::MODE | abi::setattr::ATIME | abi::setattr::MTIME | abi::setattr::MTIME_NOW,
        mode: 0o640,
        uid: 9,
        atime: (-5i64) as u64,
        atime_ns: 7,
        mtime: 1,
        ..SetAttrIn::default()
    };
    let bytes = request(opcode::SETATTR, &[set.as_bytes()]);
    let Operation::SetAttr(set) = operation(&bytes) else { panic!("a setattr") };
    let atime = Some(SetTime::To { seconds: -5, nanoseconds: 7 });
    assert_eq!(set, SetAttr { mode: Some(0o640), atime, mtime: Some(SetTime::Now), ..SetAttr::default() });
}

#[test]
fn forgotten_nodes_are_counted_by_the_kernel_and_by_us() {
    let each = [abi::ForgetOne { node: 4, lookups: 2 }, abi::ForgetOne { node: 6, lookups: 1 }];
    let batch = |count| abi::BatchForgetIn { count, padding: 0 };
    let bytes = request(opcode::BATCH_FORGET, &[batch(2).as_bytes(), each.as_bytes()]);
    let Operation::BatchForget { nodes } = operation(&bytes) else { panic!("a batch") };
    assert_eq!(nodes.iter().collect::<Vec<_>>(), [(4, 2), (6, 1)]);
    for count in [3, u32::MAX] {
        let bytes = request(opcode::BATCH_FORGET, &[batch(count).as_bytes(), each.as_bytes()]);
        assert_eq!(parse(&bytes), Err(RequestError::Short { opcode: opcode::BATCH_FORGET, unique: 8 }));
    }
}

#[test]
fn what_is_cut_short_or_unknown_is_named() {
    let short = |opcode| Err(RequestError::Short { opcode, unique: 8 });
    assert_eq!(parse(&request(opcode::LOOKUP, &[b"no end"])), short(opcode::LOOKUP));
    assert_eq!(parse(&request(opcode::OPEN, &[&[0; 7]])), short(opcode::OPEN));
    let write = abi::WriteIn { size: 4, ..abi::WriteIn::default() };
    assert_eq!(parse(&request(opcode::WRITE, &[write.as_bytes(), b"abc"])), short(opcode::WRITE));
    assert_eq!(parse(&request(9999, &[])), Err(RequestError::Unknown { opcode: 9999, unique: 8 }));
    let mut bytes = request(opcode::STATFS, &[]);
    bytes.push(0);
    assert_eq!(parse(&bytes), Err(RequestError::Length { got: 41, said: 40 }));
    assert_eq!(parse(&bytes[..39]), Err(RequestError::Length { got: 39, said: 40 }));
    let mut bytes = request(opcode::READLINK, &[]);
    bytes[36] = 1;
    assert_eq!(parse(&bytes), short(opcode::READLINK), "an extension of 8 bytes that is not there");
}

proptest! {
    #[test]
    fn a_request_in_two_parts_is_the_same_request(
        opcode in prop_oneof![Just(opcode::WRITE), 0u32..60],
        body in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..300),
        size in 0u32..300,
    ) {
        let mut bytes = request(opcode, &[&body]);
        if opcode == opcode::WRITE && body.len() >= 40 {
            bytes[56..60].copy_from_slice(&size.to_ne_bytes());
        }
        let (head, rest) = bytes.split_at(bytes.len().min(WRITE_HEAD_BYTES));
        let mut joined = Vec::new();
        prop_assert_eq!(parse_parts(head, rest, &mut joined), parse(&bytes));
    }

    #[test]
    fn no_bytes_of_a_kernel_make_it_panic(
        opcode in prop_oneof![0u32..60, any::<u32>()],
        extension_words in prop_oneof![Just(0u16), any::<u16>()],
        body in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..300),
        honest in any::<bool>(),
    ) {
        let mut bytes = request(opcode, &[&body]);
        bytes[36..38].copy_from_slice(&extension_words.to_ne_bytes());
        if !honest {
            bytes[0..4].copy_from_slice(&[body.len() as u8, 0, 0, 0]);
        }
        if let Ok(Parsed { operation: Operation::BatchForget { nodes }, .. }) = parse(&bytes) {
            prop_assert!(nodes.iter().count() * 16 <= body.len());
        }
    }

    #[test]
    fn a_request_that_is_cut_anywhere_is_refused(cut in 0usize..100) {
        let write = abi::WriteIn { size: 20, ..abi::WriteIn::default() };
        let whole = request(opcode::WRITE, &[write.as_bytes(), &[7; 20]]);
        let mut bytes = whole[..cut.min(whole.len() - 1)].to_vec();
        if bytes.len() >= 4 {
            let len = bytes.len() as u32;
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
        }
        prop_assert!(parse(&bytes).is_err());
    }
}
