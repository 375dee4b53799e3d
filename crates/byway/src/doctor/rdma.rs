//! The missing parts of RDMA: a library, a driver of the device, a right, a link. They are checked in the order in which
//! they are needed, so that the report names the next one to fix.

use std::fs;

use byway_fabric::rdma::{DeviceInfo, EventChannel, Library, PortState, RdmaError};

use super::Finding;

const NAME: &str = "RDMA";

/// What the kernel says, without a library.
#[derive(Clone, Debug, Default)]
struct Kernel {
    /// Its devices, whatever they are.
    devices: Vec<String>,
    /// Whether there are files through which programs reach them.
    has_files: bool,
}

impl Kernel {
    fn look() -> Self {
        let names = |folder: &str| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let mut devices = names("/sys/class/infiniband");
        devices.sort_unstable();
        Self { devices, has_files: names("/dev/infiniband").iter().any(|name| name.starts_with("uverbs")) }
    }
}

pub(super) fn rdma() -> Finding {
    let library = Library::load();
    judge(&Kernel::look(), library.and_then(Library::devices), || {
        Library::load().and_then(EventChannel::new).map(|_| ())
    })
}

/// `listed` are the devices that libibverbs has a driver for; `connections` tries the connection manager.
fn judge(
    kernel: &Kernel,
    listed: Result<Vec<DeviceInfo>, RdmaError>,
    connections: impl FnOnce() -> Result<(), RdmaError>,
) -> Finding {
    let has_devices = !kernel.devices.is_empty();
    let listed = match listed {
        Err(error @ RdmaError::NotBuilt) => return Finding::missing(NAME, error.to_string(), "byway uses TCP"),
        Err(error @ (RdmaError::LibraryMissing { .. } | RdmaError::SymbolMissing { .. })) => {
            if has_devices {
                let remedy = "install libibverbs1, librdmacm1 and ibverbs-providers";
                return Finding::limited(NAME, error.to_string(), remedy);
            }
            let what = format!("{error}; and no device in /sys/class/infiniband");
            return Finding::missing(
                NAME,
                what,
                "byway uses TCP; for RDMA install libibverbs1, librdmacm1, ibverbs-providers",
            );
        }
        _ if !has_devices => {
            let what = "no device in /sys/class/infiniband";
            return Finding::missing(NAME, what, "byway uses TCP; soft-RoCE: modprobe rdma_rxe, rdma link add");
        }
        Err(error) => return Finding::limited(NAME, error.to_string(), "modprobe ib_uverbs rdma_ucm"),
        Ok(listed) => listed,
    };
    if listed.is_empty() {
        let devices = kernel.devices.join(", ");
        return if kernel.has_files {
            let what = format!("libibverbs has no driver for {devices}");
            Finding::limited(NAME, what, "install ibverbs-providers")
        } else {
            let what = format!("no /dev/infiniband/uverbs* for {devices}");
            Finding::limited(NAME, what, "modprobe ib_uverbs, or give the container /dev/infiniband")
        };
    }
    let ports = || listed.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let active = ports().filter(|(_, port)| port.state == PortState::Active);
    let active: Vec<_> = active.map(|(device, port)| format!("{}/{}", device.name, port.number)).collect();
    if active.is_empty() {
        // The ports of what cannot be opened are not known.
        return if ports().next().is_none() {
            let remedy = "let this user read and write /dev/infiniband/uverbs*";
            Finding::limited(NAME, format!("{} cannot be opened", kernel.devices.join(", ")), remedy)
        } else {
            Finding::limited(NAME, "devices, but no port with a link", "see `rdma link`")
        };
    }
    if let Err(error) = connections() {
        return Finding::limited(NAME, error.to_string(), "modprobe rdma_ucm");
    }
    Finding::ok(NAME, format!("ports with a link: {}", active.join(", ")))
}

#[cfg(test)]
mod tests {
    use byway_fabric::rdma::{LinkLayer, PortInfo};

    use super::super::CheckStatus;
    use super::*;

    fn kernel(devices: &[&str]) -> Kernel {
        Kernel { devices: devices.iter().map(|name| (*name).to_owned()).collect(), has_files: !devices.is_empty() }
    }

    fn device(states: &[PortState]) -> DeviceInfo {
        let port = |(at, state): (usize, &PortState)| PortInfo {
            number: at as u8 + 1,
            state: *state,
            link: LinkLayer::Ethernet,
            mtu_bytes: 1024,
        };
        DeviceInfo { name: "rxe0".to_owned(), ports: states.iter().enumerate().map(port).collect() }
    }

    fn no_library() -> RdmaError {
        RdmaError::LibraryMissing { library: "librdmacm.so.1", reason: "not found", package: "librdmacm1" }
    }

    fn no_module() -> RdmaError {
        RdmaError::KernelMissing { what: "RDMA verbs", module: "ib_uverbs" }
    }

    /// CheckStatus, and words of the reason and of the remedy.
    #[track_caller]
    fn found(finding: &Finding, health: CheckStatus, reason: &str, remedy: &str) {
        assert_eq!(finding.health, health, "{finding:?}");
        assert!(finding.reason.contains(reason), "{finding:?}");
        assert!(finding.remedy.unwrap_or_default().contains(remedy), "{finding:?}");
    }

    #[test]
    fn a_library_that_lacks_is_named_with_or_without_a_device() {
        let with = judge(&kernel(&["rxe0"]), Err(no_library()), || Ok(()));
        found(&with, CheckStatus::Limited, "install the package librdmacm1", "install libibverbs1, librdmacm1");
        let without = judge(&kernel(&[]), Err(no_library()), || Ok(()));
        found(&without, CheckStatus::Missing, "install the package librdmacm1", "byway uses TCP");
        assert!(without.reason.contains("no device"), "{without:?}");
        let old = RdmaError::SymbolMissing { library: "libibverbs.so.1", symbol: "ibv_x" };
        found(&judge(&kernel(&["rxe0"]), Err(old), || Ok(())), CheckStatus::Limited, "has no ibv_x", "install");
    }

    #[test]
    fn without_a_device_tcp_is_what_is_left() {
        for listed in [Ok(Vec::new()), Err(no_module())] {
            found(&judge(&kernel(&[]), listed, || Ok(())), CheckStatus::Missing, "no device", "soft-RoCE");
        }
    }

    #[test]
    fn devices_that_the_library_does_not_list_lack_a_driver_or_their_files() {
        let devices = kernel(&["mlx5_0", "rxe0"]);
        let finding = judge(&devices, Ok(Vec::new()), || Ok(()));
        found(&finding, CheckStatus::Limited, "no driver for mlx5_0, rxe0", "install ibverbs-providers");
        let without_files = Kernel { has_files: false, ..devices };
        let finding = judge(&without_files, Ok(Vec::new()), || Ok(()));
        found(&finding, CheckStatus::Limited, "/dev/infiniband/uverbs* for mlx5_0", "modprobe ib_uverbs");
    }

    #[test]
    fn modules_rights_and_links_come_after_that() {
        let devices = kernel(&["rxe0"]);
        found(&judge(&devices, Err(no_module()), || Ok(())), CheckStatus::Limited, "ib_uverbs", "modprobe ib_uverbs");
        let closed = judge(&devices, Ok(vec![device(&[])]), || Ok(()));
        found(&closed, CheckStatus::Limited, "rxe0 cannot be opened", "read and write");
        let down = judge(&devices, Ok(vec![device(&[PortState::Down])]), || Ok(()));
        found(&down, CheckStatus::Limited, "no port with a link", "rdma link");
        let up = || Ok(vec![device(&[PortState::Down, PortState::Active])]);
        let no_connections = judge(&devices, up(), || Err(no_module()));
        found(&no_connections, CheckStatus::Limited, "does not offer", "modprobe rdma_ucm");
        found(&judge(&devices, up(), || Ok(())), CheckStatus::Ok, "rxe0/2", "");
    }
}
