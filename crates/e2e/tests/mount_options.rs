//! How shares are mounted for an administrator: `mount -t byway`, fstab, and the options of a mount.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use byway_e2e::{MountRig, SkipReason, binary, find_tool, lacks_mounts, run, run_well};
use rustix::io::Errno;

/// `/sbin/mount.byway`, where mount(8) looks for it; removed with this.
struct Helper(PathBuf);

impl Helper {
    /// `None`, and aloud: the machine has its own, or its folder cannot be written.
    fn link() -> Option<Self> {
        let at = PathBuf::from("/sbin/mount.byway");
        let linked = find_tool("mount").is_some() && symlink(binary(), &at).is_ok();
        if !linked {
            byway_skip::skip_this(SkipReason::Machine("needs mount, and no /sbin/mount.byway of its own"));
        }
        linked.then_some(Self(at))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A mount in the background; unmounted with this.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = run(&binary(), &["umount", "--lazy", &self.0.display().to_string()]);
        let log = self.0.display().to_string().trim_start_matches('/').replace('.', "%2e").replace('/', "-");
        let _ = std::fs::remove_file(format!("/run/byway/mounts/{log}.log"));
    }
}

fn options_of(at: &Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(1) == at.to_str());
    line.map(|line| line.split(' ').nth(3).unwrap().to_owned()).unwrap_or_default()
}

#[test]
fn mount_calls_its_helper_also_for_fstab() {
    if lacks_mounts() {
        return;
    }
    let Some(_helper) = Helper::link() else { return };
    let rig = MountRig::new(",users=squash:0");
    let _server = rig.serve();
    std::fs::write(rig.below().join("file"), "bytes").unwrap();
    let (mount, at) = (find_tool("mount").unwrap(), rig.path("mount"));
    std::fs::create_dir(&at).unwrap();
    let text = at.to_str().unwrap();
    {
        let _mounted = Mounted(&at);
        run_well(&mount, &["-t", "byway", &rig.unix(), text, "-o", "_netdev,nofail,allow_other,wait=5"]);
        assert_eq!(std::fs::read(at.join("file")).unwrap(), b"bytes");
        let options = options_of(&at);
        assert!(options.contains("rw,nosuid,nodev") && options.contains("allow_other"), "{options}");
        run_well(&find_tool("umount").unwrap(), &[text]);
        assert!(!at.join("file").exists());
    }
    let fstab = rig.path("fstab");
    let line = format!("{} {text} byway ro,_netdev,nofail,x-systemd.automount,default_permissions 0 0\n", rig.unix());
    std::fs::write(&fstab, line).unwrap();
    {
        let _mounted = Mounted(&at);
        run_well(&mount, &["--fstab", fstab.to_str().unwrap(), text]);
        let options = options_of(&at);
        assert!(options.starts_with("ro,") && options.contains("default_permissions"), "{options}");
        assert!(!options.contains("allow_other"), "{options}");
    }
    // `user` implies noexec, nosuid and nodev, unless they are followed by their opposites.
    for (options, is_allowed) in [("user", false), ("users,exec", true)] {
        std::fs::write(&fstab, format!("{} {text} byway noauto,{options} 0 0\n", rig.unix())).unwrap();
        std::fs::write(rig.below().join("program"), "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(rig.below().join("program"), PermissionsExt::from_mode(0o755)).unwrap();
        let _mounted = Mounted(&at);
        run_well(&mount, &["--fstab", fstab.to_str().unwrap(), text]);
        let ran = std::process::Command::new(at.join("program")).status();
        assert_eq!(ran.is_ok(), is_allowed, "{options}: {ran:?}; {}", options_of(&at));
        run_well(&find_tool("umount").unwrap(), &[text]);
    }
    let refused = run(&mount, &["-t", "byway", &rig.unix(), text, "-o", "data=journal"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("unknown mount option `data=journal`"), "{said}");
    // As mount(8) ends where the kernel refuses a mount.
    let failed = run(&mount, &["-t", "byway", &rig.unix().replace("share?", "other?"), text]);
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(failed.status.code() == Some(32) && said.contains("no share has that name"), "{:?}: {said}", failed.status);
    let wrong = run(&mount, &["-t", "byway", "tcp://host/share", text]);
    assert_eq!(wrong.status.code(), Some(1), "{}", String::from_utf8_lossy(&wrong.stderr));
}

#[test]
fn a_read_only_mount_changes_nothing_of_a_writable_share() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let _server = rig.serve();
    std::fs::write(rig.below().join("file"), "bytes").unwrap();
    let mount = rig.mount("mount", &rig.unix(), &["-o", "ro"]);
    assert_eq!(std::fs::read(mount.path("file")).unwrap(), b"bytes");
    let file = mount.path("file");
    let refused = [
        std::fs::write(&file, "other"),
        std::fs::remove_file(&file),
        std::fs::rename(&file, mount.path("new")),
        std::fs::create_dir(mount.path("folder")),
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)),
    ];
    for refused in refused {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    }
    assert_eq!(std::fs::read(rig.below().join("file")).unwrap(), b"bytes");
    mount.unmount();
}

#[test]
fn with_default_permissions_the_kernel_checks_rights_too() {
    if lacks_mounts() {
        return;
    }
    let Some(setpriv) = find_tool("setpriv") else { return byway_skip::skip_this(SkipReason::MissingTool("setpriv")) };
    // The server takes each call for root's.
    let rig = MountRig::new(",users=squash:0");
    std::fs::set_permissions(rig.path("."), PermissionsExt::from_mode(0o755)).unwrap();
    let _server = rig.serve();
    std::fs::write(rig.below().join("secret"), "bytes").unwrap();
    std::fs::set_permissions(rig.below().join("secret"), PermissionsExt::from_mode(0o600)).unwrap();
    for (name, options, allowed) in
        [("plain", "allow_other", true), ("checked", "allow_other,default_permissions", false)]
    {
        let mount = rig.mount(name, &rig.unix(), &["-o", options]);
        let secret = mount.path("secret").display().to_string();
        let read = run(&setpriv, &["--reuid=4711", "--regid=4711", "--clear-groups", "cat", &secret]);
        assert_eq!(read.status.success(), allowed, "{options}: {}", String::from_utf8_lossy(&read.stderr));
        mount.unmount();
    }
}

#[test]
fn a_kernel_that_may_use_names_without_asking_sees_its_own_changes_at_once() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let _server = rig.serve();
    std::fs::create_dir(rig.below().join("folder")).unwrap();
    for name in ["first", "second", "third"] {
        std::fs::write(rig.below().join("folder").join(name), name).unwrap();
    }
    let keeps = rig.mount("keeps", &rig.unix(), &["--entry-timeout", "60"]);
    let asks = rig.mount("asks", &rig.unix(), &[]);
    let names = |at: &Path| {
        let names = ["first", "second", "third"].map(|name| at.join("folder").join(name).symlink_metadata().is_ok());
        (names, at.join("folder/new").exists())
    };
    assert_eq!([names(&keeps.path("")), names(&asks.path(""))], [([true; 3], false); 2]);
    // By another machine: the name is used until its time is over.
    std::fs::remove_file(asks.path("folder/first")).unwrap();
    assert_eq!(names(&keeps.path("")), ([true; 3], false));
    assert_eq!(names(&asks.path("")), ([false, true, true], false));
    // The mount's own changes are seen at once; the kernel asks for absent names each time.
    std::fs::remove_file(keeps.path("folder/second")).unwrap();
    std::fs::rename(keeps.path("folder/third"), keeps.path("folder/new")).unwrap();
    assert_eq!(names(&keeps.path("")), ([true, false, false], true));
    std::fs::write(asks.path("folder/second"), "again").unwrap();
    assert_eq!(std::fs::read(keeps.path("folder/second")).unwrap(), b"again");
    // A new file of that name is made, and none that is gone is written to.
    let again = std::fs::File::options().write(true).create_new(true).open(keeps.path("folder/first")).unwrap();
    std::fs::write(keeps.path("folder/first"), "new").unwrap();
    drop(again);
    assert_eq!(std::fs::read(rig.below().join("folder/first")).unwrap(), b"new");

    let at = rig.path("refused");
    std::fs::create_dir(&at).unwrap();
    let try_mount = |options: &[&str]| {
        let refused = run(&binary(), &[&["mount", &rig.unix(), at.to_str().unwrap()], options].concat());
        assert!(!refused.status.success());
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let said = try_mount(&["--entry-timeout", "1", "-o", "allow_other"]);
    assert!(said.contains("give default_permissions, too"), "{said}");
    for time in ["61", "-1", "soon"] {
        let said = try_mount(&[&format!("--entry-timeout={time}")]);
        assert!(said.contains("a number of seconds from 0 to 60"), "{said}");
    }
}
