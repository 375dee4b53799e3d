//! Headers and handshakes of the fabric: whatever bytes come, nothing panics, and what is accepted means what it says.
#![no_main]

use byway_fabric::session::{PayloadChecksum, Terms, negotiate, read_hello, read_welcome};
use byway_fabric::wire::{HEADER_BYTES, Header};
use byway_fabric::{ClientId, Identity};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: [u8; HEADER_BYTES]| {
    let sequence = u64::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19], bytes[20], bytes[21], bytes[22], bytes[23]]);
    let _ = Header::open(&bytes, sequence);
    // The checksum would keep nearly all inputs out: it is made right.
    let mut sealed = Header::new(byway_fabric::wire::Kind::Hello);
    sealed.kind = bytes[4] % 14;
    sealed.body.copy_from_slice(&bytes[48..]);
    sealed.seal(sequence);
    let again: [u8; HEADER_BYTES] = zerocopy::transmute!(sealed);
    let Ok((header, kind)) = Header::open(&again, sequence) else { return };
    for checksum in [PayloadChecksum::Off, PayloadChecksum::Wanted, PayloadChecksum::Required] {
        let terms = Terms { checksum, bulk_lanes: 2 };
        if let Ok((hello, identity)) = read_hello(&header, kind) {
            let _ = negotiate(&hello, &terms);
            let _ = read_welcome(&header, kind, &identity, &terms);
        }
        let identity = Identity { client: ClientId([0; 16]), number: 0, nonce: [0; 16] };
        let _ = read_welcome(&header, kind, &identity, &terms);
    }
});
