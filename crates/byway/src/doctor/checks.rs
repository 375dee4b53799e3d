//! The single checks.

use std::fs;
use std::io;
use std::path::Path;

use byway_frontend::{fault, ublk};
use byway_reactor::device_memory::{DeviceMemory, offers};
use byway_reactor::probe;

use super::Finding;
use super::rdma::rdma;
use crate::executable;
use crate::far::LIBRARY;
use crate::units::show_size;

/// All checks, in the order of the report.
pub(super) const ALL: [fn() -> Finding; 17] = [
    io_uring,
    zero_copy,
    ublk,
    nbd,
    fuse,
    userfaultfd,
    far_memory,
    rdma,
    device_memory,
    memlock,
    nofile,
    huge_pages,
    congestion_control,
    socket_buffers,
    landlock,
    perf,
    loop_devices,
];

fn io_uring() -> Finding {
    let name = "io_uring";
    let abilities = match probe::uring() {
        Ok(abilities) => abilities,
        Err(error) => {
            let remedy = "set sysctl kernel.io_uring_disabled=0, or allow it in the container's seccomp profile; \
                          byway uses epoll meanwhile";
            return Finding::missing(name, format!("no ring: {error}"), remedy);
        }
    };
    let parts = [
        (abilities.deferred, "deferred completions"),
        (abilities.send_zc && abilities.sendmsg_zc, "zero-copy send"),
        (abilities.multishot_accept, "multishot accept"),
        (abilities.registered_buffers, "registered buffers"),
    ];
    let with: Vec<_> = parts.iter().filter(|(has, _)| *has).map(|(_, part)| *part).collect();
    let without: Vec<_> = parts.iter().filter(|(has, _)| !has).map(|(_, part)| *part).collect();
    if without.is_empty() {
        return Finding::ok(name, with.join(", "));
    }
    Finding::limited(name, format!("without {}", without.join(", ")), "use Linux 6.1 or later, and raise memlock")
}

fn zero_copy() -> Finding {
    let name = "zero-copy send";
    match probe::zero_copy_send() {
        Ok(probe::ZeroCopy::Sent) => Finding::ok(name, "the kernel sent the pages themselves, even over loopback"),
        Ok(probe::ZeroCopy::Copied) => {
            Finding::ok(name, "works; over loopback the kernel copies all the same, as it always does")
        }
        Err(error) => {
            Finding::missing(name, error.to_string(), "use Linux 4.14 or later and raise the memlock limit (ulimit -l)")
        }
    }
}

/// A device node that must open for reading and writing, and the module that makes it.
fn device(name: &'static str, path: &str, good: &str, load: &'static str) -> Finding {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => Finding::ok(name, good),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Finding::limited(name, format!("{path}: {error}"), "run as root or as a member of the device's group")
        }
        Err(error) => Finding::missing(name, format!("{path}: {error}"), load),
    }
}

fn ublk() -> Finding {
    let name = "ublk";
    match ublk::check() {
        Ok(()) => Finding::ok(name, "byway attach makes volumes block devices by it"),
        Err(error) => Finding::missing(
            name,
            error.to_string(),
            "not needed: byway attach uses the NBD client, or FUSE and loop devices, meanwhile",
        ),
    }
}

fn nbd() -> Finding {
    let good = "nbd-client works, and byway attach where ublk is missing";
    device("nbd module", "/dev/nbd0", good, "modprobe nbd, or use ublk, or nbdfuse")
}

fn fuse() -> Finding {
    let name = "FUSE";
    let users = ["/usr/bin/fusermount3", "/bin/fusermount3"].iter().any(|path| Path::new(path).exists());
    let good =
        if users { "root mounts, and other users by fusermount3" } else { "root mounts; other users need fusermount3" };
    // Linux before 6.13 has no such file, and a limit of 256.
    let limit = fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit").ok().and_then(|text| text.trim().parse().ok());
    if let Some(pages @ 0u32..256) = limit {
        let has = format!("{good}; requests have {} KiB at most", pages * 4);
        return Finding::limited(name, has, "set sysctl fs.fuse.max_pages_limit=256");
    }
    device(name, "/dev/fuse", &format!("{good}; {}", fuse_kernel()), "modprobe fuse, or give the container /dev/fuse")
}

/// Whether the kernel has FUSE over io_uring. The protocol's version is told to mounts alone.
fn fuse_kernel() -> String {
    let uring = match fs::read_to_string("/sys/module/fuse/parameters/enable_uring").as_deref().map(str::trim) {
        Ok("Y") => "on",
        Ok(_) => "off",
        Err(_) => "missing (Linux 6.14)",
    };
    format!("FUSE over io_uring {uring}, byway uses system calls")
}

fn loop_devices() -> Finding {
    let load = "modprobe loop, or give the container /dev/loop-control and loop devices; byway attach needs them where ublk and nbd are missing";
    device(
        "loop devices",
        "/dev/loop-control",
        "byway attach makes volumes block devices, with FUSE, where ublk and nbd are missing",
        load,
    )
}

fn userfaultfd() -> Finding {
    let name = "userfaultfd";
    match probe::userfaultfd_features() {
        Ok(features) => {
            // Bits of linux/userfaultfd.h: MISSING_SHMEM 5, PAGEFAULT_FLAG_WP 0, WP_ASYNC 15, MOVE 16.
            let wanted = [
                (5, "shared memory"),
                (0, "write protection"),
                (15, "asynchronous write protection"),
                (16, "moves of pages"),
            ];
            let lacking: Vec<_> = wanted.iter().filter(|(bit, _)| features >> bit & 1 == 0).map(|(_, n)| *n).collect();
            if !lacking.is_empty() {
                return Finding::limited(name, format!("without {}", lacking.join(", ")), "use Linux 6.8 or later");
            }
            let features = format!("features {features:#x}");
            match byway_fabric::registration::availability() {
                Ok(()) => Finding::ok(name, format!("{features}; memory moved by RDMA stays registered")),
                Err(reason) => {
                    let remedy = "memory moved by RDMA is registered for each transfer meanwhile, which is slower";
                    Finding::limited(name, format!("{features}; {reason}"), remedy)
                }
            }
        }
        Err(error) => {
            Finding::missing(name, error.to_string(), "set sysctl vm.unprivileged_userfaultfd=1, or run as root")
        }
    }
}

/// What `byway far` asks of the kernel, by bits of linux/userfaultfd.h.
const FAR_FEATURES: [(u32, &str); 7] = [
    (0, "write protection"),
    (1, "messages of forks"),
    (2, "messages of moved mappings"),
    (3, "messages of dropped pages"),
    (6, "messages of ended mappings"),
    (14, "poisoned pages"),
    (16, "moves of pages"),
];

fn far_memory() -> Finding {
    let name = "far memory";
    if let Err(error) = fault::availability() {
        // Without the right to ask for faults of the kernel, the kernel tells its features all the same.
        let features = probe::userfaultfd_features().unwrap_or(u64::MAX);
        let lacks = FAR_FEATURES.iter().filter(|(bit, _)| features >> bit & 1 == 0);
        let lacking = lacks.fold(String::new(), |text, (_, feature)| format!("{text}; without {feature}"));
        let remedy = "use Linux 6.8 or later, as root; attach a mem: volume as swap meanwhile";
        return Finding::missing(name, format!("byway far pages no programs: {error}{lacking}"), remedy);
    }
    match executable::library(LIBRARY) {
        Some(library) => Finding::ok(name, format!("byway far pages programs by {}", library.display())),
        None => Finding::missing(
            name,
            format!("the kernel lets byway far page programs; {LIBRARY} is not beside byway, nor in ../lib/byway"),
            "install the library, or build it: cargo build -p byway-preload",
        ),
    }
}

fn device_memory() -> Finding {
    let name = "device memory";
    let offers = offers();
    if offers.is_empty() {
        let what = "no PCI function offers memory (p2pmem); direct volumes are staged in main memory";
        let remedy = "not needed to serve; stage=device takes an NVMe controller with a memory buffer and a kernel with \
                      CONFIG_PCI_P2PDMA";
        return Finding::missing(name, what, remedy);
    }
    let tried = offers.iter().map(|offer| {
        let outcome = DeviceMemory::of_function(&offer.function).and_then(|memory| memory.try_page());
        (offer, outcome)
    });
    let (works, fails): (Vec<_>, Vec<_>) = tried.partition(|(_, outcome)| outcome.is_ok());
    let shown = works.iter().map(|(offer, _)| {
        let (free, all) = (show_size(offer.available_bytes), show_size(offer.bytes));
        format!("{}: {free} free of {all}, handed out to this process", offer.function)
    });
    let refused = fails.iter().filter_map(|(_, outcome)| outcome.as_ref().err().map(ToString::to_string));
    let reason = shown.chain(refused).collect::<Vec<_>>().join("; ");
    if fails.is_empty() {
        return Finding::ok(name, reason);
    }
    Finding::limited(name, reason, "start the node as root (it opens p2pmem/allocate first), on Linux 6.2 or later")
}

/// A limit's soft and hard value from `/proc/self/limits`; `None` is unlimited.
fn limit(row: &str) -> Option<(Option<u64>, Option<u64>)> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let mut words = text.lines().find_map(|line| line.strip_prefix(row))?.split_whitespace();
    let mut number = || words.next().map(|word| word.parse().ok());
    Some((number()?, number()?))
}

fn memlock() -> Finding {
    let name = "memlock limit";
    let enough = 64 << 20;
    match limit("Max locked memory") {
        Some((None, _)) => Finding::ok(name, "unlimited"),
        Some((Some(soft), _)) if soft >= enough => Finding::ok(name, show_size(soft)),
        Some((Some(soft), _)) => Finding::limited(
            name,
            format!("{}: frames beyond it are not registered", show_size(soft)),
            "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
        ),
        None => Finding::missing(name, "cannot be read from /proc/self/limits", "mount /proc"),
    }
}

fn nofile() -> Finding {
    let name = "open files limit";
    match limit("Max open files") {
        Some((_, None)) => Finding::ok(name, "unlimited"),
        Some((_, Some(hard))) if hard >= 65536 => Finding::ok(name, format!("{hard} (raised when serving)")),
        Some((_, Some(hard))) => {
            Finding::limited(name, format!("{hard} at most: as many connections"), "LimitNOFILE=65536 in the unit")
        }
        None => Finding::missing(name, "cannot be read from /proc/self/limits", "mount /proc"),
    }
}

fn huge_pages() -> Finding {
    let name = "huge pages";
    match probe::huge_page_works() {
        Ok(()) => Finding::ok(name, "2 MiB pages are reserved"),
        Err(error) => {
            let thp = read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_else(|| "not there".to_owned());
            let reason = format!("none reserved ({error}); transparent: {thp}");
            Finding::limited(name, reason, "sysctl vm.nr_hugepages=64, if frames are to be huge; not needed to serve")
        }
    }
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn congestion_control() -> Finding {
    let name = "congestion control";
    match read("/proc/sys/net/ipv4/tcp_congestion_control") {
        Some(now) if now == "bbr" => Finding::limited(
            name,
            "bbr: paces by a timer, which costs throughput between neighbours",
            "sysctl net.ipv4.tcp_congestion_control=cubic (or dctcp where switches mark) inside a cluster",
        ),
        Some(now) => Finding::ok(name, now),
        None => Finding::missing(name, "cannot be read", "mount /proc"),
    }
}

fn socket_buffers() -> Finding {
    let name = "socket buffers";
    let max = |path| read(path).and_then(|text| text.split_whitespace().last()?.parse::<u64>().ok());
    let seen = [
        ("net.core.wmem_max", max("/proc/sys/net/core/wmem_max"), 1 << 20),
        ("net.ipv4.tcp_wmem", max("/proc/sys/net/ipv4/tcp_wmem"), 4 << 20),
        ("net.ipv4.tcp_rmem", max("/proc/sys/net/ipv4/tcp_rmem"), 4 << 20),
    ];
    let show = |(key, bytes, _): &(&str, Option<u64>, u64)| {
        format!("{key} {}", bytes.map_or_else(|| "unknown".to_owned(), show_size))
    };
    let reason = seen.iter().map(show).collect::<Vec<_>>().join(", ");
    if seen.iter().all(|(_, bytes, enough)| bytes.is_some_and(|bytes| bytes >= *enough)) {
        return Finding::ok(name, reason);
    }
    let remedy = "sysctl net.core.wmem_max=1048576, and 4194304 as the last of net.ipv4.tcp_wmem and tcp_rmem";
    Finding::limited(name, reason, remedy)
}

fn landlock() -> Finding {
    let name = "landlock";
    match probe::landlock_abi() {
        Ok(abi) if abi >= 5 => Finding::ok(name, format!("ABI {abi}")),
        Ok(abi) => Finding::limited(name, format!("ABI {abi}: no rules for ioctl"), "use Linux 6.10 or later"),
        Err(error) => {
            Finding::missing(name, error.to_string(), "boot with lsm=landlock,... ; byway serves unconfined without")
        }
    }
}

fn perf() -> Finding {
    let name = "perf";
    match probe::perf_works() {
        Ok(()) => Finding::ok(name, "this process can be counted"),
        Err(error) => {
            Finding::missing(name, error.to_string(), "sysctl kernel.perf_event_paranoid=1; only benchmarks need it")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CheckStatus, examine};

    #[test]
    fn every_finding_has_a_reason_and_each_lack_a_remedy() {
        let findings = examine();
        assert_eq!(findings.len(), super::ALL.len());
        for finding in findings {
            assert!(!finding.reason.is_empty(), "{}", finding.name);
            assert_eq!(finding.remedy.is_none(), finding.health == CheckStatus::Ok, "{}", finding.name);
        }
    }

    #[test]
    fn far_memory_is_missing_where_the_kernel_or_the_library_is() {
        let found = examine().into_iter().find(|finding| finding.name == "far memory").unwrap();
        let kernel = byway_frontend::fault::availability();
        let is_there = kernel.is_ok() && crate::executable::library(crate::far::LIBRARY).is_some();
        assert_eq!(found.health == CheckStatus::Ok, is_there, "{found:?}");
        let reason = kernel.map_or_else(|error| error.to_string(), |()| crate::far::LIBRARY.to_owned());
        assert!(found.reason.contains(&reason), "{found:?}");
    }

    #[test]
    fn limits_are_read() {
        let (soft, hard) = super::limit("Max open files").unwrap();
        assert!(soft.is_some_and(|soft| soft > 0));
        assert!(hard.is_none_or(|hard| hard >= soft.unwrap()));
    }
}
