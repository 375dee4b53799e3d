//! What is known of changes until a sync follows them.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros};

use super::super::super::wire::Attributes;
use super::*;

/// A process of another boot than 70, 80 and 90.
const BEFORE: u64 = (1 << 32) + 70;

fn file(ino: u64) -> Identity {
    Identity::of(&Attributes { ino: U64::new(ino), ..Attributes::new_zeroed() })
}

fn changed(unsynced: &mut Unsynced, number: u64, instance: u64) {
    unsynced.changed(file(number), instance, false, |_| true);
}

fn restarted(files: usize) -> NotSynced {
    NotSynced { restarted: files, failed: 0 }
}

#[test]
fn each_open_file_hears_once_of_a_process_that_went() {
    let mut unsynced = Unsynced::new(100);
    let (mut one, mut two) = (unsynced.losses(), unsynced.losses());
    changed(&mut unsynced, 1, 70);
    // A sync that brings no answer clears nothing.
    assert!(unsynced.begin(file(1), 70, &mut one).is_ok());
    changed(&mut unsynced, 1, 80);
    assert_eq!(unsynced.begin(file(1), 80, &mut one), Err(Lost), "the first process is gone");
    assert_eq!(unsynced.begin(file(1), 80, &mut two), Err(Lost), "the other open file hears of it too");
    let mut later = unsynced.losses();
    for seen in [&mut one, &mut two, &mut later] {
        let change = unsynced.begin(file(1), 80, seen).unwrap();
        unsynced.synced(file(1), change, false);
    }
    assert!(unsynced.begin(file(1), 90, &mut one).is_ok(), "all was durable");
    assert!(unsynced.begin(file(2), 90, &mut two).is_ok(), "another file");
}

#[test]
fn losses_are_told_in_the_next_process_though_no_file_had_changes() {
    let mut before = Unsynced::new(0);
    let mut seen = before.losses();
    changed(&mut before, 1, 70);
    assert_eq!(before.begin(file(1), 80, &mut seen), Err(Lost));
    // Its entry goes with its node, for others.
    before.synced(file(1), before.changes, false);
    for number in [2, 3] {
        before.changed(file(number), 80, false, |_| false);
    }
    assert!(before.files.is_empty());
    let (mut head, mut bytes) = (Head::new_zeroed(), Vec::new());
    before.write(&mut head, &mut bytes);
    let mut unsynced = Unsynced::new(100);
    unsynced.take_over_counts(&head);
    changed(&mut unsynced, 4, 80);
    assert_eq!(unsynced.begin(file(4), 90, &mut seen), Err(Lost));
}

#[test]
fn a_sync_speaks_for_the_changes_before_it_alone() {
    let mut unsynced = Unsynced::new(100);
    let mut seen = 0;
    changed(&mut unsynced, 1, 70);
    let change = unsynced.begin(file(1), 70, &mut seen).unwrap();
    changed(&mut unsynced, 1, 70);
    unsynced.synced(file(1), change, false);
    assert_eq!(unsynced.begin(file(1), 80, &mut seen), Err(Lost), "one came while the sync was under way");

    unsynced.changed(file(2), 80, true, |_| true);
    let change = unsynced.begin(file(2), 80, &mut seen).unwrap();
    unsynced.synced(file(2), change, true);
    assert_eq!(unsynced.begin(file(2), 90, &mut seen), Err(Lost), "attributes are no data");
}

#[test]
fn a_sync_of_all_files_speaks_for_those_of_its_boot() {
    let mut unsynced = Unsynced::new(100);
    assert_eq!(unsynced.begin_all(), None, "nothing to sync");
    for (number, instance) in [(1, BEFORE), (2, BEFORE), (3, 70), (4, 80)] {
        changed(&mut unsynced, number, instance);
    }
    let change = unsynced.begin_all().unwrap();
    changed(&mut unsynced, 4, 80);
    assert_eq!(unsynced.all_synced(change, 80), restarted(2), "files 1 and 2 changed in another boot");
    assert!(unsynced.begin(file(3), 90, &mut 0).is_ok(), "it is durable");
    let change = unsynced.begin_all().unwrap();
    assert_eq!(unsynced.all_synced(change, BEFORE), restarted(1), "file 4 changed while the sync was under way");
}

#[test]
fn changes_of_dropped_files_are_synced_too_also_in_the_next_process() {
    let mut before = Unsynced::new(0);
    for (number, instance) in [(1, 80), (2, BEFORE), (3, 80)] {
        before.changed(file(number), instance, false, |_| false);
    }
    assert!(before.files.is_empty());
    let (mut head, mut bytes) = (Head::new_zeroed(), Vec::new());
    before.write(&mut head, &mut bytes);
    assert_eq!(head.unsynced.get(), 1);
    let mut unsynced = Unsynced::new(100);
    unsynced.take_over_counts(&head);
    unsynced.take_over(&record::Unsynced::read_from_bytes(&bytes).unwrap());
    let change = unsynced.begin_all().unwrap();
    for instance in [80, BEFORE] {
        assert_eq!(unsynced.all_synced(change, instance), restarted(1), "some changed in another boot");
    }
    let mut unsynced = Unsynced::new(0);
    unsynced.changed(file(1), 70, false, |_| false);
    let change = unsynced.begin_all().unwrap();
    assert_eq!(unsynced.all_synced(change, 80), restarted(0));
    assert_eq!(unsynced.begin_all(), None);
}

#[test]
fn a_sync_that_failed_while_the_server_had_nothing_of_the_client_is_told() {
    let mut unsynced = Unsynced::new(100);
    unsynced.attached(70, 3);
    let mut seen = unsynced.losses();
    for number in [1, 2] {
        changed(&mut unsynced, number, 70);
    }
    changed(&mut unsynced, 3, BEFORE);
    unsynced.attached(70, 3);
    assert!(unsynced.begin(file(1), 70, &mut seen).is_ok(), "none has failed");
    unsynced.attached(70, 4);
    assert_eq!(unsynced.begin(file(1), 70, &mut seen), Err(Lost));
    let change = unsynced.begin(file(1), 70, &mut seen).unwrap();
    unsynced.synced(file(1), change, false);
    changed(&mut unsynced, 4, 70);
    let change = unsynced.begin_all().unwrap();
    let lost = NotSynced { restarted: 1, failed: 1 };
    assert_eq!(unsynced.all_synced(change, 70), lost, "files 3 and 2; file 1 was told, file 4 changed since then");
    assert_eq!(unsynced.all_synced(change, 70), lost, "it stays so");
    changed(&mut unsynced, 1, 70);
    unsynced.attached(80, 9);
    assert_eq!(unsynced.all_synced(u64::MAX, 80), lost, "another process counts anew");
}

#[test]
fn a_sync_that_failed_is_told_of_dropped_files() {
    let mut unsynced = Unsynced::new(0);
    unsynced.attached(70, 0);
    for number in [1, 2] {
        unsynced.changed(file(number), 70, false, |_| false);
    }
    unsynced.attached(70, 1);
    unsynced.changed(file(3), 70, false, |_| false);
    unsynced.changed(file(4), 70, false, |_| false);
    let change = unsynced.begin_all().unwrap();
    assert_eq!(unsynced.all_synced(change, 70), NotSynced { restarted: 0, failed: 1 });
}

#[test]
fn files_without_a_node_are_kept_up_to_a_bound() {
    let mut unsynced = Unsynced::new(100);
    for number in 0..1000 {
        unsynced.changed(file(number), 70, false, |known| *known == file(3));
        assert!(unsynced.files.len() <= 100);
    }
    assert_eq!(unsynced.begin(file(3), 80, &mut 0), Err(Lost), "this one has a node");
}
