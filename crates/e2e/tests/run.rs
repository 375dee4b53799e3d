//! `byway run`: programs that use a share below a path, without a mount.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use byway_e2e::far::{PagedProgram, compiled, python};
use byway_e2e::{LIMIT, Server, SkipReason, binary, find_tool, noise, run_well};

/// Where programs find the share; there is no such folder on any machine.
const PREFIX: &str = "/byway-share-without-mount";

/// A share over three transports, and a local folder beside it to compare with.
struct Rig {
    folder: tempfile::TempDir,
    server: Server,
}

impl Rig {
    fn new() -> Self {
        let library = binary().with_file_name("libbyway_run.so");
        assert!(library.is_file(), "no {}: run `cargo build -p byway-run`", library.display());
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        for name in ["below", "local"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        let users = if rustix::process::geteuid().is_root() { ",users=squash:0" } else { "" };
        let share = format!("share={}{users}", at("below"));
        let (unix, shm) = (format!("unix://{}", at("unix")), format!("shm://{}", at("shm")));
        let listen = ["--listen", "tcp://127.0.0.1:0", "--listen", &unix, "--listen", &shm, "--threads", "2"];
        let server = Server::start(folder.path(), 3, &[&["--share", &share][..], &listen].concat());
        Self { folder, server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The share by each transport.
    fn uris(&self) -> [String; 3] {
        let socket = |kind: &str| format!("byway+{kind}:///share?socket={}", self.path(kind).display());
        [format!("byway://127.0.0.1:{}/share", self.server.port("byway")), socket("unix"), socket("shm")]
    }

    fn command(&self, uri: &str, flags: &[&str], program: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(["run", "--map", &format!("{PREFIX}={uri}")]).args(flags).arg("--").args(program);
        command.current_dir(self.folder.path()).env("TZ", "UTC").env("LC_ALL", "C");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        command
    }

    fn run(&self, flags: &[&str], program: &[&str]) -> Output {
        self.run_by(&self.uris()[1], flags, program)
    }

    /// Runs a program to its end; what runs too long ends with the test's process group.
    fn run_by(&self, uri: &str, flags: &[&str], program: &[&str]) -> Output {
        let seconds = LIMIT.as_secs().to_string();
        let limited = [&["timeout", "-k", "1", &seconds][..], program].concat();
        PagedProgram::start(&mut self.command(uri, flags, &limited)).finish()
    }

    /// Runs a program that must succeed; gives what it printed.
    fn run_well(&self, program: &[&str]) -> String {
        well(self.run(&[], program), program)
    }

    /// Runs a script on a local folder and on the share: both must print the same, and leave the same files. `D` is the folder.
    fn compare(&self, shell: &str, script: &str) {
        let local = self.path("local").display().to_string();
        let script = format!("set -e\n{script}");
        let expected = well(
            Command::new(shell)
                .args(["-c", &script])
                .env("D", &local)
                .env("TZ", "UTC")
                .env("LC_ALL", "C")
                .current_dir(self.folder.path())
                .output()
                .unwrap(),
            &[&script],
        );
        for uri in self.uris() {
            self.clear("below");
            let output = self.run_by(&uri, &[], &["env", &format!("D={PREFIX}"), shell, "-c", &script]);
            let got = well(output, &[&uri, &script]);
            assert_eq!(got.replace(PREFIX, "D"), expected.replace(&local, "D"), "{uri}: {script}");
            let diff =
                ["-r", "--no-dereference", &local, &self.path("below").display().to_string(), "-x", ".byway-state"];
            run_well(Path::new("/usr/bin/diff"), &diff);
        }
        self.clear("local");
        self.clear("below");
    }

    fn clear(&self, name: &str) {
        let folder = self.path(name);
        for entry in folder.read_dir().unwrap().map(Result::unwrap).filter(|entry| entry.file_name() != ".byway-state")
        {
            let path = entry.path();
            let is_folder = entry.file_type().unwrap().is_dir();
            if is_folder { std::fs::remove_dir_all(path).unwrap() } else { std::fs::remove_file(path).unwrap() }
        }
    }
}

fn well(output: Output, what: &[&str]) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{what:?}: {}\n{said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn files_are_copied_read_and_searched_as_local_ones() {
    let rig = Rig::new();
    std::fs::write(rig.path("noise"), noise(3_000_000, 1)).unwrap();
    std::fs::write(rig.path("words"), "alpha\nbeta needle\ngamma\n".repeat(2000)).unwrap();
    rig.compare(
        "/bin/sh",
        "cp noise $D/a; cat $D/a | cksum; cp $D/a $D/b; cmp $D/a $D/b; cp $D/b back; cmp noise back",
    );
    rig.compare(
        "/bin/sh",
        "dd if=noise of=$D/a bs=64k status=none; dd if=$D/a of=$D/b bs=1000 skip=3 count=7 status=none; \
         dd if=words of=$D/a bs=10 seek=5 conv=notrunc status=none; cksum < $D/a; wc -c < $D/b",
    );
    rig.compare(
        "/bin/sh",
        "mkdir $D/d $D/d/e; cp words $D/d/e/one; cp words $D/d/two; echo no > $D/d/three; \
         grep -rc needle $D/d | sort; grep -rl needle $D/d | sort; wc -l $D/d/two; head -n 2 $D/d/two; tail -n 1 $D/d/e/one",
    );
}

#[test]
fn names_attributes_and_links_are_as_local_ones() {
    let rig = Rig::new();
    rig.compare(
        "/bin/sh",
        "mkdir $D/d; chmod 750 $D/d; umask 027; echo 1 > $D/d/one; ln $D/d/one $D/d/hard; ln -s one $D/d/link; \
         ln -s $D/d $D/back; cat $D/back/link; readlink $D/d/link; mv $D/d/one $D/d/uno; touch -d '2001-02-03 04:05:06' $D/d/uno; \
         chmod 600 $D/d/uno; stat -c '%a %h %s %F %Y' $D/d/uno; stat -c '%a %h %F' $D/d; truncate -s 12345 $D/d/hard; stat -c %s $D/d/uno; \
         test ! -e $D/none; test -L $D/d/link; test -d $D/back; test -r $D/d/uno; rm $D/d/link $D/back; ls $D/d; \
         find $D -name '*' -printf '%P %y %m %s\\n' | grep -v ' d ' | grep -v '^.byway-state' | sort; realpath $D/d/../d/uno; \
         rmdir $D/d 2>/dev/null || echo not empty; rm -r $D/d; ls $D",
    );
    let said = rig.run(&[], &["cat", &format!("{PREFIX}/none")]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("No such file or directory"));
}

#[test]
fn archives_go_in_and_out() {
    let rig = Rig::new();
    let tree = "mkdir $D/t $D/t/a $D/t/a/b; for n in 1 2 3 4 5 6 7 8 9 10; do echo $n > $D/t/a/b/f$n; done; ln -s a/b $D/t/l; \
                chmod 700 $D/t/a; head -c 700000 /dev/zero | tr '\\0' x > $D/t/a/big";
    rig.compare(
        "/bin/sh",
        &format!(
            "{tree}; tar cf out.tar -C $D t; mkdir $D/out; tar xf out.tar -C $D/out; tar tf out.tar | sort; \
             tar cf - -C $D/out t | tar xf - -C $D/out --transform s/t/u/; ls $D/out; cp -a $D/t $D/copy; find $D/copy | wc -l"
        ),
    );
}

#[test]
fn redirections_reach_the_programs_that_inherit_them() {
    let rig = Rig::new();
    for shell in ["/bin/sh", "/bin/bash"] {
        if !Path::new(shell).is_file() {
            byway_e2e::skip_this(SkipReason::MissingTool("bash"));
            continue;
        }
        rig.compare(
            shell,
            "(echo a; printf 'b\\n'; ls /dev/null; env echo c) > $D/f; cat $D/f; echo d >> $D/f; cat < $D/f; \
             exec 3> $D/g; echo 1 >&3; (echo 2; env echo 3) >&3; exec 3>&-; exec 4< $D/g; read one <&4; echo $one; cat <&4; exec 4<&-; \
             while read line; do echo got $line; done < $D/f; sort -r < $D/f | tee $D/sorted; wc -l < $D/sorted; \
             sh -c 'echo error >&2' 2> $D/errors; cat $D/errors",
        );
    }
}

#[test]
fn processes_that_share_a_position_write_over_none_of_each_others_bytes() {
    let rig = Rig::new();
    let script = format!(
        "for i in 1 2 3 4 5 6; do (for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo line $n; done) & done > {PREFIX}/f; wait"
    );
    rig.run_well(&["sh", "-c", &script]);
    let written = std::fs::read_to_string(rig.path("below/f")).unwrap();
    assert_eq!(written.lines().filter(|line| line.starts_with("line ")).count(), 120, "{written}");
}

/// Python's own files, folders, copies and children.
const PYTHON: &str = r#"
import os, shutil, subprocess, sys, tempfile
d = os.environ["D"]
with open(d + "/text", "w") as f:
    for n in range(1000): f.write("line %d\n" % n)
with open(d + "/text", "r+b") as f:
    f.seek(10); f.write(b"HELLO"); f.seek(0, 2); f.write(b"end"); f.seek(5); print(f.read(20), f.tell(), os.fstat(f.fileno()).st_size)
os.makedirs(d + "/x/y/z"); os.symlink("y", d + "/x/l")
shutil.copytree(d + "/x", d + "/copy", symlinks=True); shutil.copy2(d + "/text", d + "/copy/text")
for root, folders, files in sorted(os.walk(d)):
    folders[:] = [name for name in folders if name != ".byway-state"]
    print(root, sorted(folders), sorted(files))
print(sorted((e.name, e.is_dir(), e.is_symlink()) for e in os.scandir(d + "/x")))
out = open(d + "/child", "w")
subprocess.check_call(["echo", "from a child"], stdout=out); subprocess.check_call(["sh", "-c", "ls -d /"], stdout=out); out.close()
print(open(d + "/child").read())
pid = os.fork()
if pid == 0:
    print(len(open(d + "/text").read())); open(d + "/forked", "w").write("child"); sys.stdout.flush(); os._exit(0)
os.waitpid(pid, 0)
fd = os.open(d + "/text", os.O_RDONLY); print(os.pread(fd, 7, 3), os.read(fd, 4))
if os.fork() == 0:
    os.read(fd, 4); os._exit(0)
os.wait(); print(os.read(fd, 4)); copy = os.dup(fd); os.close(fd); print(os.lseek(copy, 0, os.SEEK_CUR)); os.close(copy)
with tempfile.TemporaryDirectory(dir=d) as t: open(t + "/a", "w").write("x"); print(os.listdir(t))
os.rename(d + "/copy/text", d + "/moved"); print(os.path.getsize(d + "/moved"), os.path.realpath(d + "/x/l") == d + "/x/y")
print([os.preadv(os.open(d + "/moved", os.O_RDONLY), [bytearray(3), bytearray(4)], 2)])
"#;

#[test]
fn python_reads_writes_forks_and_starts_programs() {
    let Some(python) = python() else { return };
    let rig = Rig::new();
    std::fs::write(rig.path("test.py"), PYTHON).unwrap();
    rig.compare("/bin/sh", &format!("{python} test.py"));
}

#[test]
fn sqlite_reads_a_database_and_excludes_writers() {
    if find_tool("sqlite3").is_none() {
        byway_e2e::skip_this(SkipReason::MissingTool("sqlite3"));
        return;
    }
    let rig = Rig::new();
    let fill = "sqlite3 $D/data.db 'create table t(n); insert into t select value from generate_series(1, 20000)'; \
                sqlite3 -readonly $D/data.db 'select count(*), sum(n) from t; pragma integrity_check; select n from t where n % 5000 = 0'";
    rig.compare("/bin/sh", &format!("{fill} | tee $D/answer"));
}

#[test]
fn fio_verifies_what_it_wrote() {
    if find_tool("fio").is_none() {
        byway_e2e::skip_this(SkipReason::MissingTool("fio"));
        return;
    }
    let rig = Rig::new();
    for more in ["--thread", "--numjobs=2"] {
        let file = format!("--directory={PREFIX}");
        let job = ["fio", "--name=job", &file, "--rw=randrw", "--ioengine=psync", "--size=4M", "--bs=4k,16k"];
        let said = rig.run_well(&[&job[..], &["--verify=crc32c", "--fallocate=none", more]].concat());
        assert!(said.contains("err= 0") && !said.contains("verify: bad"), "{said}");
    }
}

#[test]
fn locks_hold_between_programs() {
    let rig = Rig::new();
    rig.run_well(&["sh", "-c", &format!(": > {PREFIX}/lock")]);
    let hold = format!("flock {PREFIX}/lock sh -c 'echo filled; read line; true'");
    let uris = rig.uris();
    let mut command = rig.command(&uris[0], &[], &["sh", "-c", &hold]);
    let holder = PagedProgram::start_filled(command.stdin(Stdio::piped()));
    let tried = rig.run(&[], &["flock", "-n", "-E", "7", &format!("{PREFIX}/lock"), "true"]);
    assert_eq!(tried.status.code(), Some(7));
    assert!(holder.finish().status.success());
    rig.run_well(&["flock", &format!("{PREFIX}/lock"), "true"]);
}

#[test]
fn calls_that_pass_the_library_by_fail_and_lose_nothing() {
    let rig = Rig::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/direct.c");
    let Some(program) = compiled(&source, rig.folder.path()) else { return };
    let path = format!("{PREFIX}/file");
    let said = rig.run_well(&[&program.display().to_string(), &path]);
    assert_eq!(
        said,
        "read EBADF\nwrite EPERM\nshared mmap ENODEV\nprivate mmap hello\nanonymous mmap 0\nclosed EBADF\n"
    );
    assert_eq!(std::fs::read(rig.path("below/file")).unwrap(), b"hello");
}

#[test]
fn a_report_names_what_was_answered_and_refused() {
    let rig = Rig::new();
    std::fs::write(rig.path("below/file"), "hello").unwrap();
    let script = format!("cat {PREFIX}/file; cd {PREFIX} || echo no; {PREFIX}/file || echo no");
    let output = rig.run(&["--report"], &["sh", "-c", &script]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hellono\nno\n");
    let said = String::from_utf8_lossy(&output.stderr);
    let report = said.lines().find(|line| line.contains("answered by a share")).unwrap_or_else(|| panic!("{said}"));
    for part in ["read 2", "refused: chdir 1, execve "] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let output = rig.run(&["--report"], &["sh", "-c", "exit 3"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("answered by a share: none; refused: none"));
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let rig = Rig::new();
    let program = rig.path("static");
    let mut head = b"\x7fELF\x02\x01".to_vec();
    head.resize(64, 0);
    std::fs::write(&program, head).unwrap();
    let privileged = rig.path("privileged");
    std::fs::write(&privileged, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&privileged, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    let uri = &rig.uris()[1];
    let refused = |map: &str, program: &str, told: &str| {
        let output = Command::new(binary()).args(["run", "--map", map, "--", program]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(told), "{said}");
    };
    let good = format!("{PREFIX}={uri}");
    refused(&good, &program.display().to_string(), "a static program loads no libraries");
    refused(&good, &privileged.display().to_string(), "set-user-ID");
    refused(&good, "no-such-program", "no such program");
    refused(&format!("/tmp={uri}"), "true", "exists on this machine");
    refused(&format!("{PREFIX}={}", uri.replace("/share", "/other")), "true", "byway ls` lists");
    refused(&format!("{PREFIX}=byway+unix:///share?socket=/no/such/socket"), "true", "cannot connect");
}
