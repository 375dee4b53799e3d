//! A process that goes on with the device of one that has died: by ublk, or by a loop device.
//!
//! It neither loses nor reorders writes ([decision 53](../../../../docs/decisions/0053-a-device-of-ublk-waits-for-a-successor.md)).

use byway_service::block::client::VolumeInfo;

use super::command::AttachError;
use super::registry::{Attachment, ClientRecord};
use super::volume_server::Requests;

/// What a successor of this process needs to be the same client.
pub(super) fn client_record(requests: &Requests) -> ClientRecord {
    let VolumeInfo { read_only, instance, store, .. } = requests.info;
    let (id, first_session) = (requests.client.id, requests.client.first_session);
    ClientRecord { id, first_session, read_only, shared: requests.access.shared, instance, store }
}

/// Checks that this process can go on with a device, and has the server make durable what only the process that has died could repeat. The
/// device must not go on before.
///
/// # Errors
/// It cannot go on: a write may be lost.
pub(super) fn prepare(requests: &mut Requests, left: &Attachment, record: &ClientRecord) -> Result<(), AttachError> {
    check(left, record, &requests.info)?;
    requests.access.shared |= record.shared;
    if !requests.info.read_only && !requests.flush_before_start()? {
        return Err(server_changed(left));
    }
    Ok(())
}

/// Whether a process that has opened the volume as `info` says can go on with a device without the loss of a write.
fn check(left: &Attachment, record: &ClientRecord, info: &VolumeInfo) -> Result<(), AttachError> {
    // Only the process that has died could have repeated what a server acknowledged and had not flushed.
    if (record.instance, record.store) != (info.instance, info.store) {
        return Err(server_changed(left));
    }
    // It may not flush the volume, so it could answer no flush of the device.
    if info.read_only && !record.read_only {
        return Err(AttachError::Writable { name: left.name.clone(), device: left.device.clone() });
    }
    Ok(())
}

fn server_changed(left: &Attachment) -> AttachError {
    let device = left.device.clone();
    // The keeper of a loop device fails what waits.
    if left.file.is_some() {
        return AttachError::Lost { device };
    }
    AttachError::ServerChanged { name: left.name.clone(), device }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_has_the_same_server_and_may_flush() {
        let record =
            ClientRecord { id: [2; 16], first_session: 3, read_only: false, shared: false, instance: 4, store: 5 };
        let left = Attachment {
            name: "disk".to_owned(),
            uri: String::new(),
            device: "/dev/ublkb0".into(),
            pid: 1,
            bytes: 4096,
            ublk: None,
            file: None,
            failed: None,
        };
        let info = VolumeInfo {
            len: 4096,
            block_bytes: 512,
            request_max: 1 << 20,
            read_only: false,
            volatile: false,
            instance: 4,
            store: 5,
            backing_id: 6,
        };
        let check = |record: ClientRecord, info: VolumeInfo| check(&left, &record, &info);
        check(record, info).unwrap();
        for changed in [VolumeInfo { instance: 6, ..info }, VolumeInfo { store: 6, ..info }] {
            assert!(matches!(check(record, changed), Err(AttachError::ServerChanged { .. })));
        }
        // It would answer flushes of the device without one of the volume.
        let read_only = VolumeInfo { read_only: true, ..info };
        assert!(matches!(check(record, read_only), Err(AttachError::Writable { .. })));
        check(ClientRecord { read_only: true, ..record }, read_only).unwrap();
    }
}
