//! The memory of a mount and of its server, while programs write and read more than both may have.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use byway_e2e::{Mount, MountRig, lacks_mounts, noise};

/// Programs that write and read large files at once, each of them so many bytes in one go.
const PROGRAMS: usize = 24;
const WRITE: usize = 16 << 20;

/// Small files of each program.
const FILES: usize = 300;

/// A mount's buffers: one for each request of the kernel and each large read or write, and the rest of the process.
const MOUNT_BYTES_MAX: u64 = 128 << 20;

/// The buffers of a server with two loops, and the rest of its heap.
const SERVER_BYTES_MAX: u64 = 112 << 20;

/// Writes and reads large and small files.
fn work(mount: &Mount, program: usize, rounds: usize) {
    let bytes = noise(WRITE, program as u64);
    let path = mount.path(&format!("large{program}"));
    let mut back = Vec::with_capacity(WRITE);
    for _ in 0..rounds {
        File::create(&path).unwrap().write_all(&bytes).unwrap();
        back.clear();
        File::open(&path).unwrap().read_to_end(&mut back).unwrap();
        assert!(back == bytes, "program {program}");
    }
    let folder = mount.path(&format!("small{program}"));
    std::fs::create_dir(&folder).unwrap();
    (0..FILES).for_each(|file| std::fs::write(folder.join(file.to_string()), &bytes[..file]).unwrap());
    let len = |file: usize| std::fs::metadata(folder.join(file.to_string())).unwrap().len();
    assert!((0..FILES).all(|file| len(file) == file as u64));
}

#[test]
fn a_mount_and_its_server_have_bounded_memory_under_load() {
    if lacks_mounts() {
        return;
    }
    let rounds = if std::env::var_os("BYWAY_LONG").is_some() { 20 } else { 1 };
    for options in [",users=squash:0", ",users=squash:0,writers=exclusive"] {
        let rig = MountRig::new(options);
        let server = rig.serve();
        let mount = rig.mount("mount", &rig.tcp(&server), &[]);
        let is_over = AtomicBool::new(false);
        let peaks = std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut peaks = [0; 2];
                while !is_over.load(Ordering::Acquire) {
                    let now = [mount.memory_bytes(), server.memory_bytes()];
                    peaks.iter_mut().zip(now).for_each(|(peak, now)| *peak = now.max(*peak));
                    std::thread::park_timeout(Duration::from_millis(2));
                }
                peaks
            });
            let mount = &mount;
            let programs: Vec<_> =
                (0..PROGRAMS).map(|program| scope.spawn(move || work(mount, program, rounds))).collect();
            let results: Vec<_> = programs.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            is_over.store(true, Ordering::Release);
            results.into_iter().for_each(Result::unwrap);
            watch.join().unwrap()
        });
        println!("{options}: mount and server had {} and {} MiB at most", peaks[0] >> 20, peaks[1] >> 20);
        assert!(peaks[0] < MOUNT_BYTES_MAX && peaks[1] < SERVER_BYTES_MAX, "{options}: {peaks:?}");
        mount.unmount();
    }
}
