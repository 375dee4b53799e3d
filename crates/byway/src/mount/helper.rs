//! `mount.byway`: what mount(8) calls for `mount -t byway`, and for fstab. `umount.fuse.byway`: what umount(8) calls with `-c`, as
//! systemd calls it; without, it asks for the helper of all of FUSE. Both are links to this program.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::cli::WRONG_COMMAND_LINE;

/// The name by which mount(8) looks for a helper.
const MOUNT: &str = "mount.byway";

/// That of umount(8), which has the kernel's type of the mount.
const UMOUNT: &str = "umount.fuse.byway";

/// How mount(8) ends, which passes on the status of its helper: for a wrong command line, if no process can be started, and if the mount
/// fails.
const USAGE: u8 = 1;
const SYSTEM: u8 = 2;
const MOUNT_FAILED: u8 = 32;

/// Options of mount(8) itself, and those that hold for each mount of a share.
const IGNORED: [&str; 22] = [
    "_netdev",
    "async",
    "auto",
    "defaults",
    "diratime",
    "group",
    "lazytime",
    "noatime",
    "noauto",
    "nodiratime",
    "nofail",
    "nogroup",
    "noowner",
    "norelatime",
    "nouser",
    "nousers",
    "owner",
    "relatime",
    "strictatime",
    "symfollow",
    "user",
    "users",
];

/// Options of `byway mount -o`.
const PASSED: [&str; 8] = ["ro", "rw", "exec", "noexec", "nosuid", "nodev", "allow_other", "default_permissions"];

/// Options that stand for other flags of `byway mount`.
const FLAGS: [(&str, &str); 6] = [
    ("entry_timeout", "--entry-timeout"),
    ("tls_ca", "--tls-ca"),
    ("tls_certificate", "--tls-certificate"),
    ("tls_key", "--tls-key"),
    ("tls_hostname", "--tls-hostname"),
    ("wait", "--wait"),
];

/// Why a share is not mounted for mount(8).
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// Not as mount(8) calls a helper.
    #[error("mount.byway is for mount(8): mount -t byway byway://HOST/SHARE DIRECTORY [-o OPTIONS]")]
    Usage,
    /// Not as umount(8) calls a helper.
    #[error("umount.fuse.byway is for umount(8): umount DIRECTORY")]
    UmountUsage,
    /// An option that has no meaning here.
    #[error(
        "unknown mount option `{0}`; byway has ro, noexec, allow_other, default_permissions, wait=SECONDS, entry_timeout=SECONDS, tls_ca=FILE, \
         tls_certificate=FILE, tls_key=FILE and tls_hostname=NAME"
    )]
    Option(String),
    /// `suid`, `dev`.
    #[error("mount option `{0}`: set-user-ID bits and device nodes of a share never count; leave it out")]
    Privilege(String),
    /// The program.
    #[error("cannot start the program: {0}")]
    Start(io::Error),
}

impl HelperError {
    /// The status with which the helper ends.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Usage | Self::UmountUsage | Self::Option(_) | Self::Privilege(_) => USAGE,
            Self::Start(_) => SYSTEM,
        }
    }
}

/// A helper as which the program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Helper {
    /// Of mount(8).
    Mount,
    /// Of umount(8).
    Umount,
}

/// Whether the program was called by a helper's name.
pub(crate) fn called(name: Option<&OsStr>) -> Option<Helper> {
    let name = Path::new(name?).file_name()?;
    [(MOUNT, Helper::Mount), (UMOUNT, Helper::Umount)]
        .into_iter()
        .find(|(helper, _)| name == *helper)
        .map(|(_, helper)| helper)
}

/// Does what these arguments of mount(8) or umount(8), without the program's name, stand for. For umount(8) this process becomes another
/// program.
///
/// # Errors
/// See [`HelperError`].
pub(crate) fn run(helper: Helper, arguments: impl Iterator<Item = OsString>) -> Result<ExitCode, HelperError> {
    let mut command = match helper {
        Helper::Mount => {
            let Some(arguments) = translate(arguments)? else { return Ok(ExitCode::SUCCESS) };
            let ended = this_program(arguments)?.status().map_err(HelperError::Start)?;
            return Ok(ExitCode::from(status_of_mount(ended.code())));
        }
        Helper::Umount => match translate_umount(arguments)? {
            Umount::Byway(arguments) => this_program(arguments)?,
            Umount::Kernel(arguments) => {
                let mut umount = Command::new("umount");
                umount.args(arguments);
                umount
            }
        },
    };
    Err(HelperError::Start(command.exec()))
}

/// The status of mount(8) for that of `byway mount`, which has none if a signal has ended it.
fn status_of_mount(code: Option<i32>) -> u8 {
    match code {
        Some(0) => 0,
        Some(code) if code == i32::from(WRONG_COMMAND_LINE) => USAGE,
        _ => MOUNT_FAILED,
    }
}

fn this_program(arguments: Vec<OsString>) -> Result<Command, HelperError> {
    let mut program = Command::new(std::env::current_exe().map_err(HelperError::Start)?);
    program.arg0("byway").args(arguments);
    Ok(program)
}

/// What umount(8) stands for.
#[derive(Debug, PartialEq, Eq)]
enum Umount {
    /// `byway` with these arguments.
    Byway(Vec<OsString>),
    /// umount(8) itself, without its helper: it has what byway lacks.
    Kernel(Vec<OsString>),
}

fn translate_umount(mut arguments: impl Iterator<Item = OsString>) -> Result<Umount, HelperError> {
    let (mut places, mut flags) = (Vec::new(), String::new());
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("-t") => drop(arguments.next().ok_or(HelperError::UmountUsage)?),
            Some(more) if more.len() > 1 && more.starts_with('-') => flags.push_str(&more[1..]),
            _ => places.push(argument),
        }
    }
    let [directory] = <[OsString; 1]>::try_from(places).map_err(|_| HelperError::UmountUsage)?;
    if flags.contains(|flag| !"flnrv".contains(flag)) {
        return Err(HelperError::UmountUsage);
    }
    // The kernel ends calls that wait for the server (-f), or makes the mount read-only (-r).
    if flags.contains(['f', 'r']) {
        return Ok(Umount::Kernel(vec!["-i".into(), format!("-{flags}").into(), "--".into(), directory]));
    }
    let lazy = flags.contains('l').then(|| "--lazy".into());
    Ok(Umount::Byway(["umount".into()].into_iter().chain(lazy).chain(["--".into(), directory]).collect()))
}

/// The arguments of `byway`; `None` if nothing is to be done (`mount -f`).
fn translate(mut arguments: impl Iterator<Item = OsString>) -> Result<Option<Vec<OsString>>, HelperError> {
    let (mut places, mut options) = (Vec::new(), Vec::new());
    let (mut is_fake, mut is_sloppy) = (false, false);
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("-o") => options.push(arguments.next().ok_or(HelperError::Usage)?),
            Some("-t" | "-N") => drop(arguments.next().ok_or(HelperError::Usage)?),
            Some(flags) if flags.len() > 1 && flags.starts_with('-') => {
                if flags[1..].contains(|flag| !"sfnv".contains(flag)) {
                    return Err(HelperError::Usage);
                }
                is_fake |= flags.contains('f');
                is_sloppy |= flags.contains('s');
            }
            _ => places.push(argument),
        }
    }
    let [source, directory] = <[OsString; 2]>::try_from(places).map_err(|_| HelperError::Usage)?;
    let mut words: Vec<OsString> = ["mount", "--background"].map(Into::into).into();
    let mut passed = Vec::new();
    for option in options.iter().flat_map(|options| options.as_encoded_bytes().split(|byte| *byte == b',')) {
        let option = String::from_utf8_lossy(option).into_owned();
        let (name, value) = option.split_once('=').unwrap_or((&option, ""));
        if let Some((_, flag)) = FLAGS.iter().find(|(known, _)| *known == name) {
            words.push(format!("{flag}={value}").into());
        } else if PASSED.contains(&option.as_str()) {
            passed.push(option);
        } else if ["suid", "dev"].contains(&option.as_str()) {
            return Err(HelperError::Privilege(option));
        } else if !is_ignored(name) && !is_sloppy {
            return Err(HelperError::Option(option));
        }
    }
    if !passed.is_empty() {
        words.extend(["-o".into(), passed.join(",").into()]);
    }
    words.extend(["--".into(), source, directory]);
    Ok((!is_fake).then_some(words))
}

/// Whether an option is for mount(8), systemd or people.
fn is_ignored(name: &str) -> bool {
    name.is_empty() || IGNORED.contains(&name) || name == "comment" || name.starts_with("x-") || name.starts_with("X-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(words: &str) -> Result<Option<String>, String> {
        let words = translate(words.split(' ').map(Into::into)).map_err(|error| error.to_string())?;
        Ok(words.map(|words| words.join(OsStr::new(" ")).into_string().unwrap()))
    }

    #[test]
    fn what_mount_passes_becomes_a_mount_in_the_background() {
        assert_eq!(
            translated(
                "byway://h/s /mnt -o rw,_netdev,nofail,x-systemd.automount,allow_other,wait=5,entry_timeout=1 -v"
            )
            .unwrap(),
            Some("mount --background --wait=5 --entry-timeout=1 -o rw,allow_other -- byway://h/s /mnt".to_owned())
        );
        assert_eq!(
            translated("byways://h/s /mnt -n -t byway -o tls_ca=/etc/ca.pem").unwrap(),
            Some("mount --background --tls-ca=/etc/ca.pem -- byways://h/s /mnt".to_owned())
        );
        assert_eq!(translated("byway://h/s /mnt -f -o ro").unwrap(), None, "a mount that is only tried out");
        // What `user` in fstab implies.
        assert_eq!(
            translated("byway://h/s /mnt -o rw,noexec,nosuid,nodev,user=me").unwrap(),
            Some("mount --background -o rw,noexec,nosuid,nodev -- byway://h/s /mnt".to_owned())
        );
        assert!(translated("byway://h/s /mnt -s -o unknown").unwrap().is_some(), "sloppy");
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        for (words, said) in [
            ("byway://h/s", "mount -t byway"),
            ("byway://h/s /mnt more", "mount -t byway"),
            ("byway://h/s /mnt -x", "mount -t byway"),
            ("byway://h/s /mnt -o", "mount -t byway"),
            ("byway://h/s /mnt -o sync", "unknown mount option `sync`"),
            ("byway://h/s /mnt -o user,suid", "`suid`: set-user-ID"),
        ] {
            let refused = translated(words).unwrap_err();
            assert!(refused.contains(said), "{words}: {refused}");
        }
    }

    #[test]
    fn what_umount_passes_becomes_an_umount() {
        let words = |words: &str| words.split(' ').map(OsString::from).collect::<Vec<_>>();
        let translated = |text: &str| translate_umount(words(text).into_iter());
        for (passed, becomes) in [("/mnt", "umount -- /mnt"), ("/mnt -n -l -v -t fuse.byway", "umount --lazy -- /mnt")]
        {
            assert_eq!(translated(passed).unwrap(), Umount::Byway(words(becomes)));
        }
        assert_eq!(translated("/mnt -f -l -t fuse.byway").unwrap(), Umount::Kernel(words("-i -fl -- /mnt")));
        for refused in ["/mnt /more", "-l", "/mnt -N"] {
            assert!(matches!(translated(refused), Err(HelperError::UmountUsage)), "{refused}");
        }
    }

    #[test]
    fn a_helper_ends_as_mount_does() {
        assert_eq!([Some(0), Some(1), Some(2), None].map(status_of_mount), [0, 32, 1, 32]);
        assert_eq!(HelperError::Option("sync".to_owned()).status(), 1);
        assert_eq!(HelperError::Start(io::ErrorKind::OutOfMemory.into()).status(), 2);
    }

    #[test]
    fn the_program_is_a_helper_by_its_name_alone() {
        let called = |name: &str| called(Some(name.as_ref()));
        assert_eq!([called("/sbin/mount.byway"), called("mount.byway")], [Some(Helper::Mount); 2]);
        assert_eq!(called("/sbin/umount.fuse.byway"), Some(Helper::Umount));
        assert_eq!([called("/usr/bin/byway"), super::called(None)], [None; 2]);
    }
}
