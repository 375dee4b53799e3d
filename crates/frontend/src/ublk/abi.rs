//! The structures and numbers of `linux/ublk_cmd.h` that byway uses, with the names of that file in the comments.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE`: requests wait when the process dies, and a successor gets all that were not
/// completed.
pub(super) const FEATURE_RECOVERY: u64 = 1 << 3 | 1 << 4;
/// `UBLK_F_CMD_IOCTL_ENCODE`: commands are numbered as ioctls are.
pub(super) const FEATURE_ENCODED: u64 = 1 << 6;
/// `UBLK_F_USER_COPY`: payloads are read from and written to the character device (Linux 6.5).
pub(super) const FEATURE_USER_COPY: u64 = 1 << 7;
/// `UBLK_F_UPDATE_SIZE`: the size of a running device may change (Linux 6.16).
pub(super) const FEATURE_UPDATE_SIZE: u64 = 1 << 10;

/// `UBLK_IO_RES_ABORT`, `-ENODEV`: the device is being removed, and the tag is not used again.
pub(super) const ABORTED: i32 = -19;

/// `UBLKSRV_IO_BUF_OFFSET`, and how tags are placed above it: where a request's payload lies in the character device.
const PAYLOADS_OFFSET: u64 = 0x8000_0000;
const PAYLOAD_BITS: u32 = 25;

/// Where the payload of a tag of queue 0 lies.
pub(super) fn payload_offset(tag: u16) -> u64 {
    PAYLOADS_OFFSET + (u64::from(tag) << PAYLOAD_BITS)
}

const fn encoded(direction: u32, bytes: usize, number: u32) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn reads(number: u32) -> u32 {
    encoded(2, size_of::<ControlCommand>(), number)
}

const fn changes(number: u32) -> u32 {
    encoded(3, size_of::<ControlCommand>(), number)
}

/// `UBLK_U_CMD_*`.
pub(super) const GET_DEVICE: u32 = reads(0x02);
pub(super) const ADD: u32 = changes(0x04);
pub(super) const DELETE: u32 = changes(0x05);
pub(super) const START: u32 = changes(0x06);
pub(super) const STOP: u32 = changes(0x07);
pub(super) const SET_PARAMETERS: u32 = changes(0x08);
pub(super) const START_RECOVERY: u32 = changes(0x10);
pub(super) const END_RECOVERY: u32 = changes(0x11);
pub(super) const GET_FEATURES: u32 = reads(0x13);
/// Linux 6.9.
pub(super) const DELETE_LATER: u32 = reads(0x14);
pub(super) const UPDATE_SIZE: u32 = changes(0x15);

/// `UBLK_U_IO_*`.
pub(super) const FETCH: u32 = encoded(3, size_of::<IoCommand>(), 0x20);
pub(super) const COMMIT_AND_FETCH: u32 = encoded(3, size_of::<IoCommand>(), 0x21);

/// `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub device: u32,
    /// `u16::MAX` for commands on a whole device.
    pub queue: u16,
    pub buffer_bytes: u16,
    pub buffer: u64,
    pub data: u64,
    pub path_bytes: u16,
    pub padding: u16,
    pub reserved: u32,
}

/// `UBLK_S_DEV_DEAD`: the device has no disk, or none any more.
pub(super) const DEAD: u16 = 0;

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub queues: u16,
    pub queue_depth: u16,
    pub state: u16,
    pub padding: u16,
    pub request_bytes_max: u32,
    /// `u32::MAX` has the kernel choose.
    pub device: u32,
    pub pid: i32,
    pub padding_2: u32,
    pub features: u64,
    /// `ublksrv_flags`: the kernel keeps it for the server and does not look at it.
    pub cookie: u64,
    pub owner_user: u32,
    pub owner_group: u32,
    pub reserved: [u64; 2],
}

/// `struct ublk_params` up to its discard part.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Parameters {
    pub bytes: u32,
    pub types: u32,
    pub attributes: u32,
    pub logical_block_shift: u8,
    pub physical_block_shift: u8,
    pub io_optimal_shift: u8,
    pub io_minimum_shift: u8,
    pub sectors_max: u32,
    pub chunk_sectors: u32,
    pub device_sectors: u64,
    pub virtual_boundary: u64,
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub discard_sectors_max: u32,
    pub zero_sectors_max: u32,
    pub discard_segments_max: u16,
    pub reserved: u16,
    /// The start of the part with device numbers, which is the kernel's.
    pub rest: u32,
}

/// `UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD`.
pub(super) const TYPES: u32 = 1 | 2;
/// `UBLK_ATTR_*`.
pub(super) const READ_ONLY: u32 = 1;
pub(super) const VOLATILE_CACHE: u32 = 4;
pub(super) const FUA: u32 = 8;

/// `struct ublksrv_io_desc`: a request, in memory that the kernel writes and the server reads.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoDescriptor {
    /// The operation in the low 8 bits, above them flags.
    pub operation_and_flags: u32,
    pub sectors: u32,
    pub first_sector: u64,
    pub address: u64,
}

/// `UBLK_IO_OP_*`.
pub(super) const OP_READ: u32 = 0;
pub(super) const OP_WRITE: u32 = 1;
pub(super) const OP_FLUSH: u32 = 2;
pub(super) const OP_DISCARD: u32 = 3;
pub(super) const OP_WRITE_ZEROES: u32 = 5;
/// `UBLK_IO_F_*`.
pub(super) const FLAG_FUA: u32 = 1 << 13;
pub(super) const FLAG_NO_UNMAP: u32 = 1 << 15;

/// `struct ublksrv_io_cmd`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoCommand {
    pub queue: u16,
    pub tag: u16,
    pub result: i32,
    /// 0 with `UBLK_F_USER_COPY`.
    pub address: u64,
}

const _: () = assert!(size_of::<ControlCommand>() == 32 && size_of::<DeviceInfo>() == 64);
const _: () = assert!(size_of::<Parameters>() == 64 && size_of::<IoDescriptor>() == 24 && size_of::<IoCommand>() == 16);

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    /// Values of the macros in Linux 6.12's header.
    #[test]
    fn commands_have_the_kernels_numbers() {
        assert_eq!([GET_DEVICE, GET_FEATURES, DELETE_LATER], [0x8020_7502, 0x8020_7513, 0x8020_7514]);
        assert_eq!([ADD, DELETE, START, STOP], [0xc020_7504, 0xc020_7505, 0xc020_7506, 0xc020_7507]);
        assert_eq!([SET_PARAMETERS, UPDATE_SIZE], [0xc020_7508, 0xc020_7515]);
        assert_eq!([START_RECOVERY, END_RECOVERY], [0xc020_7510, 0xc020_7511]);
        assert_eq!([FETCH, COMMIT_AND_FETCH], [0xc010_7520, 0xc010_7521]);
        assert_eq!([payload_offset(0), payload_offset(3)], [0x8000_0000, 0x8600_0000]);
    }

    #[test]
    fn fields_lie_where_the_kernel_reads_them() {
        let parameters = Parameters { device_sectors: 0x1122, discard_segments_max: 0x33, ..Parameters::new_zeroed() };
        let bytes = parameters.as_bytes();
        assert_eq!((bytes[24], bytes[25], bytes[56]), (0x22, 0x11, 0x33));
        let info = DeviceInfo { device: 1, features: 2, cookie: 3, ..DeviceInfo::new_zeroed() };
        let bytes = info.as_bytes();
        assert_eq!((bytes[12], bytes[24], bytes[32]), (1, 2, 3));
    }
}
