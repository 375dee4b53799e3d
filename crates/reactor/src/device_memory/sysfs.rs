//! Reads disks, their PCI functions, and the functions' memory from sysfs.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{DeviceMemoryError, Offer};

/// A block device's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// The block device that a path names, or that its file lies on.
pub(super) fn device_of(path: &Path) -> Result<Device, DeviceMemoryError> {
    let failed = |source| DeviceMemoryError::Path { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    let number = if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
    let device = Device { major: rustix::fs::major(number), minor: rustix::fs::minor(number) };
    // Major 0 is for what is no device: tmpfs, overlays, network file systems, btrfs.
    if device.major == 0 {
        return Err(DeviceMemoryError::NoDisk { path: path.to_owned() });
    }
    Ok(device)
}

/// The PCI function to which a block device belongs: the last folder on the way to the device that is named like one.
/// A partition lies beneath its disk, a namespace beneath its controller; what is made of other devices lies beneath
/// `virtual`.
pub(super) fn function_of(sysfs: &Path, device: Device, path: &Path) -> Result<String, DeviceMemoryError> {
    let disk = format!("{}:{}", device.major, device.minor);
    let link = sysfs.join("dev/block").join(&disk);
    let Ok(folder) = std::fs::canonicalize(&link) else {
        let has_sysfs = link.parent().is_some_and(Path::is_dir);
        let nowhere = DeviceMemoryError::NoDisk { path: path.to_owned() };
        return Err(if has_sysfs { DeviceMemoryError::NoFunction { disk } } else { nowhere });
    };
    let mut names = folder.components().rev().filter_map(|part| part.as_os_str().to_str());
    names.find(|name| is_function(name)).map(str::to_owned).ok_or(DeviceMemoryError::NoFunction { disk })
}

/// `DDDD:BB:DD.F`, all hexadecimal but for the domain's length.
fn is_function(name: &str) -> bool {
    let hexadecimal = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(rest), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let Some((device, function)) = rest.split_once('.') else { return false };
    domain.len() >= 4
        && (bus.len(), device.len(), function.len()) == (2, 2, 1)
        && [domain, bus, device, function].into_iter().all(hexadecimal)
}

/// The folder of a function.
pub(super) fn folder(sysfs: &Path, function: &str) -> PathBuf {
    sysfs.join("bus/pci/devices").join(function)
}

/// The functions that offer memory.
pub(super) fn offers(sysfs: &Path) -> Vec<Offer> {
    let Ok(functions) = std::fs::read_dir(sysfs.join("bus/pci/devices")) else { return Vec::new() };
    let mut offers: Vec<Offer> = functions
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = |name: &str| {
                let text = std::fs::read_to_string(entry.path().join("p2pmem").join(name)).ok()?;
                text.trim().parse::<u64>().ok()
            };
            let function = entry.file_name().into_string().ok()?;
            Some(Offer { function, bytes: number("size")?, available_bytes: number("available")? })
        })
        .collect();
    offers.sort_by(|one, other| one.function.cmp(&other.function));
    offers
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const NAMESPACE: &str = "devices/pci0000:00/0000:00:1d.0/0000:03:00.0/nvme/nvme0/nvme0n1";

    /// A tree with an NVMe disk of two partitions behind a bridge, a mapped disk, and two functions that offer memory.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for folder in [
            &format!("{NAMESPACE}/nvme0n1p2"),
            "devices/virtual/block/dm-0",
            "devices/pci0000:00/0000:00:02.0",
            "dev/block",
            "bus/pci/devices",
        ] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        symlink(at(NAMESPACE), at("dev/block/259:0")).unwrap();
        symlink(at(NAMESPACE).join("nvme0n1p2"), at("dev/block/259:2")).unwrap();
        symlink(at("devices/virtual/block/dm-0"), at("dev/block/253:0")).unwrap();
        for (function, place, size, available) in [
            ("0000:03:00.0", "devices/pci0000:00/0000:00:1d.0/0000:03:00.0", "67108864\n", "65011712\n"),
            ("0000:00:1d.0", "devices/pci0000:00/0000:00:1d.0", "", ""),
            ("0000:00:02.0", "devices/pci0000:00/0000:00:02.0", "1048576\n", "0\n"),
        ] {
            symlink(at(place), at("bus/pci/devices").join(function)).unwrap();
            if !size.is_empty() {
                std::fs::create_dir(at(place).join("p2pmem")).unwrap();
                std::fs::write(at(place).join("p2pmem/size"), size).unwrap();
                std::fs::write(at(place).join("p2pmem/available"), available).unwrap();
            }
        }
        root
    }

    fn function(root: &Path, major: u32, minor: u32) -> Result<String, DeviceMemoryError> {
        function_of(root, Device { major, minor }, Path::new("/the/file"))
    }

    #[test]
    fn a_disk_and_its_partitions_belong_to_the_function_nearest_to_them() {
        let root = tree();
        assert_eq!(function(root.path(), 259, 0).unwrap(), "0000:03:00.0");
        assert_eq!(function(root.path(), 259, 2).unwrap(), "0000:03:00.0");
    }

    #[test]
    fn what_is_no_functions_own_is_refused_by_name() {
        let root = tree();
        for (major, minor) in [(253, 0), (8, 16)] {
            let error = function(root.path(), major, minor).unwrap_err();
            assert!(matches!(&error, DeviceMemoryError::NoFunction { disk } if *disk == format!("{major}:{minor}")));
        }
        // The disk is removed while it is looked for.
        std::fs::remove_dir_all(root.path().join(NAMESPACE)).unwrap();
        assert!(matches!(function(root.path(), 259, 0), Err(DeviceMemoryError::NoFunction { .. })));
        std::fs::remove_dir_all(root.path().join("dev")).unwrap();
        let error = function(root.path(), 259, 0).unwrap_err();
        assert!(matches!(&error, DeviceMemoryError::NoDisk { .. }) && error.to_string().contains("/the/file"));
    }

    #[test]
    fn offers_are_listed_with_their_bytes() {
        let root = tree();
        let offer =
            |function: &str, bytes, available_bytes| Offer { function: function.into(), bytes, available_bytes };
        let expected = [offer("0000:00:02.0", 1 << 20, 0), offer("0000:03:00.0", 64 << 20, 62 << 20)];
        assert_eq!(offers(root.path()), expected);
        assert_eq!(offers(&root.path().join("nothing")), []);
        std::fs::write(root.path().join("bus/pci/devices/0000:00:02.0/p2pmem/size"), "much").unwrap();
        assert_eq!(offers(root.path()), expected[1..]);
    }

    #[test]
    fn a_file_of_no_disk_is_told_from_a_path_that_is_not_there() {
        assert!(matches!(device_of(Path::new("/proc/self/stat")), Err(DeviceMemoryError::NoDisk { .. })));
        assert!(matches!(device_of(Path::new("/nothing/here")), Err(DeviceMemoryError::Path { .. })));
    }

    #[test]
    fn names_of_functions_are_told_from_others() {
        assert!(["0000:03:00.0", "10000:e1:1f.7"].iter().all(|name| is_function(name)));
        let others =
            ["pci0000:00", "nvme0n1", "0000:03:00", "0000:03:00.", "0:03:00.0", "0000:03:00.0:1", "0000:03:0g.0"];
        assert!(!others.iter().any(|name| is_function(name)));
    }
}
