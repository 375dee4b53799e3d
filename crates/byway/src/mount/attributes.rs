//! Attributes of a share's files, as the kernel has them.

use byway_frontend::fuse::abi::Attr;
use byway_service::file::wire::Attributes;

pub(super) fn attr(attributes: &Attributes) -> Attr {
    let device = attributes.device.get();
    Attr {
        ino: attributes.ino.get(),
        size: attributes.size.get(),
        blocks: attributes.blocks.get(),
        // Times before 1970 travel as the same bits.
        atime: attributes.accessed_s.get() as u64,
        mtime: attributes.modified_s.get() as u64,
        ctime: attributes.changed_s.get() as u64,
        atime_ns: attributes.accessed_ns.get(),
        mtime_ns: attributes.modified_ns.get(),
        ctime_ns: attributes.changed_ns.get(),
        mode: attributes.mode.get(),
        nlink: attributes.links.get(),
        uid: attributes.uid.get(),
        gid: attributes.gid.get(),
        rdev: device_number(device >> 16, device & 0xffff),
        block_bytes: attributes.block_bytes.get(),
        flags: 0,
    }
}

/// The kernel's 32-bit form (`new_encode_dev`).
fn device_number(major: u32, minor: u32) -> u32 {
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_node_keeps_its_numbers() {
        assert_eq!(device_number(1, 3), 0x103);
        assert_eq!(device_number(259, 0x1234), 0x0121_0334);
        let attributes = Attributes { device: (8 << 16 | 1).into(), size: 9.into(), ..Attributes::default() };
        assert_eq!((attr(&attributes).rdev, attr(&attributes).size), (0x801, 9));
    }
}
