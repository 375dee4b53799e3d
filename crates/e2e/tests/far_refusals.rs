//! Programs that `byway far` refuses before they start, since the dynamic linker would load no library into them, and the ones beside
//! them that it pages.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use byway_e2e::far::{Heard, Lender, PagedProgram, can_page, command, compiled, far};
use byway_e2e::{LIMIT, find_tool, until};
use byway_skip::{SkipReason, skip_part_of_this, skip_this};

const NOBODY: u32 = 65534;

/// A program, and why it is refused where the kernel starts it with `AT_SECURE`.
struct Case {
    name: &'static str,
    mode: u32,
    owner: u32,
    group: u32,
    has_capabilities: bool,
    why: &'static str,
}

const OF_ANOTHER: &str = "runs with the rights of another user or group";

const CASES: [Case; 6] = [
    Case { name: "plain", mode: 0o755, owner: 0, group: 0, has_capabilities: false, why: "" },
    Case { name: "of-root", mode: 0o4755, owner: 0, group: 0, has_capabilities: false, why: OF_ANOTHER },
    Case { name: "of-nobody", mode: 0o4755, owner: NOBODY, group: 0, has_capabilities: false, why: OF_ANOTHER },
    Case { name: "of-a-group", mode: 0o2755, owner: 0, group: NOBODY, has_capabilities: false, why: OF_ANOTHER },
    Case { name: "not-executable", mode: 0o2745, owner: 0, group: NOBODY, has_capabilities: false, why: OF_ANOTHER },
    Case { name: "capable", mode: 0o755, owner: 0, group: 0, has_capabilities: true, why: "its file has capabilities" },
];

impl Case {
    /// A copy of the program with these rights; `None`, said aloud, where the machine has no such.
    fn copy(&self, program: &Path, folder: &Path) -> Option<PathBuf> {
        let path = folder.join(self.name);
        std::fs::copy(program, &path).unwrap();
        chown(&path, Some(self.owner), Some(self.group)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(self.mode)).unwrap();
        if self.has_capabilities {
            let Some(setcap) = find_tool("setcap") else {
                skip_part_of_this(SkipReason::MissingTool("setcap"));
                return None;
            };
            let set = Command::new(setcap).arg("cap_net_raw+ep").arg(&path).output().unwrap();
            if !set.status.success() {
                skip_part_of_this(SkipReason::Machine("files have no capabilities here"));
                return None;
            }
        }
        Some(path)
    }

    fn check_refused(&self, said: &str) {
        assert!(said.contains(self.why) && !self.why.is_empty(), "{}: {said}", self.name);
        assert!(said.contains("(cp makes one)"), "{} is not told what to do: {said}", self.name);
    }
}

/// A command as a user without any rights.
fn as_nobody(command: &Command) -> Command {
    let nobody = NOBODY.to_string();
    let mut other = Command::new("setpriv");
    other.args(["--reuid", &nobody, "--regid", &nobody, "--clear-groups"]);
    other.arg(command.get_program()).args(command.get_args());
    other
}

/// Whether the kernel starts it with `AT_SECURE`; `None` if it does not start it.
fn is_secure(output: &Output) -> Option<bool> {
    match output.stdout.as_slice() {
        b"secure 0\n" => Some(false),
        b"secure 1\n" => Some(true),
        _ => None,
    }
}

/// A folder that other users may read.
fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    folder
}

fn secure_program(folder: &Path) -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        skip_this(SkipReason::Machine("needs root, to give programs to other users"));
        return None;
    }
    compiled(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_programs/secure.c"), folder)
}

#[test]
fn what_the_kernel_starts_securely_is_refused_and_the_rest_is_paged() {
    if !can_page() {
        return;
    }
    let folder = open_folder();
    let Some(program) = secure_program(folder.path()) else { return };
    let lender = Lender::start();
    let mut refused = 0;
    for case in CASES {
        let Some(path) = case.copy(&program, folder.path()) else { continue };
        let path = path.display().to_string();
        let plain = Command::new(&path).output().unwrap();
        let output = far(&lender.uris()[0], "16M", &["--class", "none"], &[&path]);
        let said = String::from_utf8_lossy(&output.stderr);
        if is_secure(&plain).expect("it runs") {
            refused += 1;
            assert!(!output.status.success() && output.stdout.is_empty(), "{} has run: {said}", case.name);
            case.check_refused(&said);
        } else {
            assert!(output.status.success() && is_secure(&output) == Some(false), "{}: {said}", case.name);
            assert!(said.contains("byway far: 1 programs") && !said.contains(" 0 put,"), "{}: {said}", case.name);
        }
    }
    assert!(refused > 0, "set-user-ID has no effect under {}", folder.path().display());
}

#[test]
fn a_user_is_refused_the_programs_that_give_them_rights() {
    if !can_page() {
        return;
    }
    let folder = open_folder();
    let Some(program) = secure_program(folder.path()) else { return };
    if find_tool("setpriv").is_none() {
        return skip_this(SkipReason::MissingTool("setpriv"));
    }
    let uri = "byway+unix:///?socket=/nowhere";
    let byway = command(uri, "16M", &["--class", "none"], &["true"]);
    let started = as_nobody(Command::new(byway.get_program()).arg("--version")).output().unwrap();
    if !started.status.success() {
        return skip_this(SkipReason::Machine("other users cannot read the folder of byway"));
    }
    let mut refused = 0;
    for case in CASES {
        let Some(path) = case.copy(&program, folder.path()) else { continue };
        let path = path.display().to_string();
        let plain = as_nobody(&Command::new(&path)).output().unwrap();
        let Some(is_secure) = is_secure(&plain) else { continue };
        let output = as_nobody(&command(uri, "16M", &["--class", "none"], &[&path])).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "there is no lender: {said}");
        if is_secure {
            refused += 1;
            case.check_refused(&said);
        } else {
            assert!(!said.contains("no library is loaded"), "{}: {said}", case.name);
        }
    }
    assert!(refused > 0, "set-user-ID has no effect under {}", folder.path().display());
}

#[test]
fn a_static_program_is_refused_by_name() {
    if !can_page() {
        return;
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_programs/secure.c");
    if find_tool("cc").is_none() {
        return skip_this(SkipReason::MissingTool("cc"));
    }
    for flag in ["-static", "-static-pie"] {
        let program = folder.path().join(flag);
        let made = Command::new("cc").args([flag, "-o"]).arg(&program).arg(&source).output().unwrap();
        if !made.status.success() {
            skip_part_of_this(SkipReason::Machine("the compiler makes no static programs"));
            continue;
        }
        let path = program.display().to_string();
        let output = far(&lender.uris()[0], "16M", &["--class", "none"], &[&path]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{flag}: it has run: {said}");
        let (why, instead) = ("a static program loads no libraries", "attach a mem: volume as swap");
        assert!(said.contains(&path) && said.contains(why) && said.contains(instead), "{flag}: {said}");
    }
}

#[test]
fn what_a_paged_program_executes_and_is_not_paged_is_named() {
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    // The shell waits for its end; `env` takes the library away.
    let script = "env --unset=LD_PRELOAD cat; true";
    let mut job = command(&lender.uris()[0], "16M", &["--class", "none"], &["sh", "-c", script]);
    let mut paged = PagedProgram::start(job.stdin(Stdio::piped()));
    let heard = Heard::of(paged.0.stderr.take().unwrap());
    until(Instant::now() + LIMIT, "the warning", || {
        heard.all().contains("started with another LD_PRELOAD than byway's").then_some(())
    });
    let said = heard.all();
    let warned: Vec<&str> = said.lines().filter(|line| line.contains("is not paged")).collect();
    assert!(warned.len() == 1 && warned[0].contains("/cat"), "{said}");
    drop(paged.0.stdin.take());
    assert!(paged.0.wait().unwrap().success(), "{}", heard.all());
}
