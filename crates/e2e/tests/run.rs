//! `byway run`: programs that use a share below a path, without a mount.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use byway_e2e::far::{PagedProgram, compiled, python};
use byway_e2e::{Certificates, LIMIT, Server, SkipReason, SmallDisk, binary, find_tool, lacks_mounts, noise, run_well};

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

#[test]
fn a_working_directory_may_be_in_the_share() {
    let rig = Rig::new();
    std::fs::write(rig.path("words"), "alpha\nbeta needle\n").unwrap();
    for shell in ["/bin/sh", "/bin/bash"] {
        if !Path::new(shell).is_file() {
            byway_e2e::skip_this(SkipReason::MissingTool("bash"));
            continue;
        }
        rig.compare(
            shell,
            "here=$(pwd); mkdir -p $D/a/b/c $D/a/b/d; mkdir -p $D/a/b/c; cd $D/a; pwd; pwd -P; env pwd; cp $here/words b/c/words; cd b/c; \
             cat words; grep -c needle ../c/words; cd ..; ls; (cd d; touch x; ls ..; pwd); pwd; echo 1 > ./one; \
             sh -c 'cat one; cd d; pwd; ls'; find . -type f | sort; tar cf ../t.tar c; cd $here; ls words; cd $D/a; rm -r b/d; \
             mkdir -p x/y/z; ls x/y; cd /; ls -d /; cd $D; cd a/../a/b; pwd; cd $here; tar xf $D/a/t.tar -C $D/a; \
             tar cf - -C $D/a c | tar tf - | sort; rm $D/a/t.tar",
        );
    }
    let kept = rig.run_well(&["sh", "-c", &format!("cd {PREFIX}; exec sh -c 'echo kept > by_another_program; pwd'")]);
    assert_eq!(kept, format!("{PREFIX}\n"));
    assert_eq!(std::fs::read_to_string(rig.path("below/by_another_program")).unwrap(), "kept\n");
    let missing = rig.run(&[], &["sh", "-c", &format!("cd {PREFIX}/none")]);
    assert!(!missing.status.success());
}

/// Two new file systems number their files alike: a path and an inode number do not tell their shares apart.
#[test]
fn a_run_within_another_finds_inherited_files_in_their_own_share() {
    if lacks_mounts() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let disk = |at: &PathBuf| {
        std::fs::create_dir(at).unwrap();
        let disk = SmallDisk::mount(at);
        std::fs::write(at.join("log"), "before").unwrap();
        disk
    };
    let _disks = [disk(&a), disk(&b)];
    let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
    assert_eq!((inode(&a), inode(&a.join("log"))), (inode(&b), inode(&b.join("log"))));
    let share = |name: &str, at: &Path| format!("{name}={},users=squash:0", at.display());
    let (socket, shares) = (folder.path().join("unix"), [share("a", &a), share("b", &b)]);
    let listen = format!("unix://{}", socket.display());
    let flags = ["--share", &shares[0], "--share", &shares[1], "--listen", &listen, "--threads", "1"];
    let _server = Server::start(folder.path(), 1, &flags);
    let map = |prefix: &str, share: &str| format!("{PREFIX}{prefix}=byway+unix:///{share}?socket={}", socket.display());
    // Runs a script on share a. The script has maps of both shares for a run of its own.
    let script = |script: &str| {
        let limit = LIMIT.as_secs().to_string();
        let mut command = Command::new("timeout");
        command.args(["-k", "1", &limit]).arg(binary()).args([
            "run",
            "--map",
            &map("-a", "a"),
            "--",
            "sh",
            "-c",
            script,
        ]);
        command.env("BYWAY", binary()).env("A", format!("{PREFIX}-a")).env("LC_ALL", "C");
        command.env("MAP_B", map("-b", "b")).env("MAP_A", map("-again", "a")).output().unwrap()
    };
    let refused = script("$BYWAY run --map $MAP_B -- echo hello > $A/log");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("Stale file handle"), "{said}");
    assert_eq!(std::fs::read_to_string(b.join("log")).unwrap(), "before");
    let refused = script("cd $A; exec $BYWAY run --map $MAP_B -- sh -c 'echo x > two'");
    assert!(!refused.status.success() && !a.join("two").exists() && !b.join("two").exists());
    let inner = "pwd; echo relative > two; echo hello >&3";
    let found = script(&format!("cd $A; $BYWAY run --map $MAP_B --map $MAP_A -- sh -c '{inner}' 3> log"));
    assert_eq!(well(found, &[inner]), format!("{PREFIX}-again\n"));
    let files = ["log", "two"].map(|name| std::fs::read_to_string(a.join(name)).unwrap());
    assert_eq!(files, ["hello\n", "relative\n"]);
    assert!(!b.join("two").exists());
}

#[test]
fn make_builds_in_the_share() {
    if find_tool("make").is_none() {
        byway_e2e::skip_this(SkipReason::MissingTool("make"));
        return;
    }
    let rig = Rig::new();
    let makefile = "all: two\n\tpwd\n\tcat two\ntwo: one $(wildcard part*)\n\tcat $^ > two\none:\n\techo 1 > one\n";
    std::fs::write(rig.path("makefile"), makefile).unwrap();
    rig.compare(
        "/bin/sh",
        "mkdir $D/src; cp makefile $D/src/Makefile; echo a > $D/src/part1; echo b > $D/src/part2; make -C $D/src; make -C $D/src",
    );
}

/// `scandir` and `glob` of libc, and directories of processes.
const PYTHON_LISTS: &str = r#"
import ctypes, os, subprocess, threading
d = os.environ["D"]
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs(d + "/l/sub"); [open(d + "/l/" + name, "w").close() for name in ("b.c", "a.c", "c.h")]

class Matches(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("paths", ctypes.POINTER(ctypes.c_char_p)), ("rest", ctypes.c_char * 256)]

def glob(pattern):
    found = Matches(); code = libc.glob(pattern.encode(), 0, None, ctypes.byref(found))
    paths = [found.paths[n].decode() for n in range(found.count)] if code == 0 else code
    libc.globfree(ctypes.byref(found)); return paths

class Entry(ctypes.Structure):
    _fields_ = [("ino", ctypes.c_uint64), ("off", ctypes.c_int64), ("len", ctypes.c_uint16), ("kind", ctypes.c_uint8), ("name", ctypes.c_char * 256)]

def scandir(path):
    found = ctypes.POINTER(ctypes.POINTER(Entry))()
    wanted = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Entry))(lambda entry: entry.contents.name != b"c.h")
    count = libc.scandir(path.encode(), ctypes.byref(found), wanted, libc.alphasort)
    return [(found[n].contents.name, found[n].contents.kind) for n in range(count)] if count >= 0 else ctypes.get_errno()

print(glob(d + "/l/*.c"), glob(d + "/*/s*"), glob(d + "/l/none*"), scandir(d + "/l"), scandir(d + "/none"))
here = os.getcwd(); os.chdir(d + "/l"); print(os.getcwd(), sorted(os.listdir()), os.path.realpath("a.c"), glob("*.h"), scandir(".") == scandir(d + "/l"))
print(subprocess.check_output(["ls"]), subprocess.check_output(["pwd"], cwd=d), os.getcwd(), subprocess.check_output(["ls", "-d", "/"], cwd="/"))
fd = os.open("sub", os.O_RDONLY); os.chdir("/"); os.fchdir(fd); os.close(fd); print(os.getcwd()); os.closerange(3, 4096); print(os.getcwd())
open("made", "w").write("x"); os.chdir(".."); print(os.path.exists("sub/made")); os.rename("sub/made", "moved"); os.chdir(here); print(os.path.exists("sub"), os.getcwd() == here)
"#;

#[test]
fn libc_lists_and_matches_in_the_share() {
    let Some(python) = python() else { return };
    let rig = Rig::new();
    std::fs::write(rig.path("lists.py"), PYTHON_LISTS).unwrap();
    rig.compare("/bin/sh", &format!("{python} lists.py"));
}

#[test]
fn a_share_is_used_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(folder.path());
    let below = folder.path().join("below");
    std::fs::create_dir(&below).unwrap();
    std::fs::write(below.join("file"), noise(2_000_000, 1)).unwrap();
    let share = format!("share={},users=squash:0", below.display());
    let path = |name: &str| certificates.path(name);
    let (certificate, key, ca) = (path("server-cert.pem"), path("server-key.pem"), path("ca-cert.pem"));
    let arguments =
        ["--share", &share, "--listen", "tcp://127.0.0.1:0", "--tls-certificate", &certificate, "--tls-key", &key];
    let server = Server::start(folder.path(), 1, &[&arguments[..], &["--tls-client-ca", &ca]].concat());
    let map = format!("{PREFIX}=byways://localhost:{}/share", server.port("byway"));
    let run = |client: &str| {
        let script = format!("cksum < {PREFIX}/file; cd {PREFIX}; cp file copy; sh -c 'cksum < copy'");
        let mut command = Command::new(binary());
        command.args(["run", "--map", &map]).args(certificates.flags(client)).args(["--", "sh", "-c", &script]);
        command.current_dir(folder.path()).output().unwrap()
    };
    let said = well(run("client"), &["client"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 2 && lines[0] == lines[1], "{said}");
    assert!(std::fs::read(below.join("copy")).unwrap() == noise(2_000_000, 1));
    for refused in ["nobody", "misled"] {
        let output = run(refused);
        assert!(!output.status.success() && output.stdout.is_empty(), "{refused}: {output:?}");
    }
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
fn processes_keep_their_descriptors_locks_and_umasks_apart() {
    let rig = Rig::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/processes.c");
    let Some(program) = compiled(&source, rig.folder.path()) else { return };
    std::fs::write(rig.path("below/data"), noise(10_000, 1)).unwrap();
    let said =
        |scene: &str, file: &str| rig.run_well(&[&program.display().to_string(), scene, &format!("{PREFIX}/{file}")]);
    assert_eq!(said("masks", "masked"), "mode 644\n", "the child's umask is not the parent's");
    assert_eq!(said("locks", "locked"), "another process gets the lock: yes\n");
    assert_eq!(said("numbers", "data"), "read after close_range, 3600 descriptors\n");
    assert_eq!(said("threads", "data"), "0 children failed\n");
}

#[test]
fn a_report_names_what_was_answered_and_refused() {
    let rig = Rig::new();
    std::fs::write(rig.path("below/file"), "hello").unwrap();
    let script = format!("cat {PREFIX}/file; chroot {PREFIX} true || echo no; {PREFIX}/file || echo no");
    let output = rig.run(&["--report"], &["sh", "-c", &script]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hellono\nno\n");
    let said = String::from_utf8_lossy(&output.stderr);
    let report = said.lines().find(|line| line.contains("answered by a share")).unwrap_or_else(|| panic!("{said}"));
    for part in ["read 2", "chroot 1", "execve "] {
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
    std::fs::copy("/bin/true", &privileged).unwrap();
    // Only root can give a file away; `far_refusals.rs` has all cases.
    let is_anothers = std::os::unix::fs::chown(&privileged, Some(65534), None).is_ok();
    std::fs::set_permissions(&privileged, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    let uri = &rig.uris()[1];
    let refused = |map: &str, program: &str, told: &str| {
        let output = Command::new(binary()).args(["run", "--map", map, "--", program]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(told), "{said}");
    };
    let good = format!("{PREFIX}={uri}");
    refused(&good, &program.display().to_string(), "a static program loads no libraries");
    if is_anothers {
        refused(&good, &privileged.display().to_string(), "set-user-ID");
    }
    refused(&good, "no-such-program", "no such program");
    refused(&format!("/tmp={uri}"), "true", "exists on this machine");
    refused(&format!("{PREFIX}={}", uri.replace("/share", "/other")), "true", "byway ls` lists");
    refused(&format!("{PREFIX}=byway+unix:///share?socket=/no/such/socket"), "true", "cannot connect");
}
