//! Common code of all drivers of the call protocol over a [`Fabric`].

use byway_fabric::wire::Header;
use byway_fabric::{Fabric, PayloadMeta, SessionId};
use byway_rpc::session::Calls;

/// Sends what the call protocol has to say. To be called after each call of [`Calls`].
pub(crate) fn send_outbox<C>(calls: &mut Calls<C>, fabric: &mut Fabric) {
    for out in calls.outbox().drain(..) {
        send(fabric, out.session, out.header, &[&out.payload]);
    }
}

/// Sends a message with a small payload, which is copied.
pub(crate) fn send(fabric: &mut Fabric, session: SessionId, header: Header, payload: &[&[u8]]) {
    let checked = fabric.agreed(session).is_some_and(byway_fabric::Agreed::payload_checksum);
    let checksum = || payload.iter().fold(0, |checksum, bytes| crc32c::crc32c_append(checksum, bytes));
    let len = payload.iter().map(|bytes| bytes.len()).sum();
    let meta = PayloadMeta { len, checksum: checked.then(checksum) };
    fabric.send_with(session, header, meta, |gather| {
        for bytes in payload {
            gather.push_head(bytes);
        }
    });
}
