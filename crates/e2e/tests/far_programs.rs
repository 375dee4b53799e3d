//! Programs that others wrote print the same with half of their memory as without a limit; with `BYWAY_LONG=1` also with a quarter and
//! with three quarters.

use std::fmt::Write;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::far::comparison::{compare, limit, percents};
use byway_e2e::far::{Lender, PagedProgram, can_page, command};
use byway_e2e::{LIMIT, find_tool, until};
use byway_skip::{SkipReason, skip_this};

/// Whether the program is there, and programs can be paged; says so if not.
fn can_run(tool: &'static str) -> bool {
    if find_tool(tool).is_none() {
        skip_this(SkipReason::MissingTool(tool));
        return false;
    }
    can_page()
}

#[test]
fn sqlite_has_the_same_tables_in_memory() {
    if !can_run("sqlite3") {
        return;
    }
    compare(
        &[],
        &[
            "sqlite3",
            ":memory:",
            "create table t (a integer primary key, b text, c integer);
         with recursive n (i) as (select 1 union all select i + 1 from n where i < 200000)
             insert into t select i, printf('%064d', (i * 7919) % 200003), (i * 104729) % 1009 from n;
         create index u on t (b); create index v on t (c);
         delete from t where a % 7 = 3; update t set b = b || c where a % 5 = 1;
         pragma integrity_check;
         select c, count(*), sum(a), min(b), max(b) from t group by c order by c limit 50;
         select sum(length(b)), total(a * c) from t;",
        ],
        4 << 20,
    );
}

#[test]
fn gcc_makes_the_same_code() {
    if !can_run("gcc") {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let (path, mut source) = (folder.path().join("large.c"), String::new());
    for number in 0..800 {
        writeln!(
            source,
            "int f{number}(int *a, int n) {{ int s = {number}; for (int i = 0; i < n; i++) {{ \
             if (a[i] % {0} == 3) s += a[i] * {number}; else s ^= a[(i * {0}) % n] >> 3; }} return s; }}",
            number % 17 + 2
        )
        .unwrap();
    }
    std::fs::write(&path, source).unwrap();
    compare(&[], &["gcc", "-O2", "-S", "-o", "-", &path.display().to_string()], 26 << 20);
}

#[test]
fn a_java_program_has_the_same_sum() {
    if !can_run("java") {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path().join("Sums.java");
    let source = "import java.util.*;
public class Sums {
    public static void main(String[] a) {
        Map<Integer, String> map = new HashMap<>();
        for (int i = 0; i < 60000; i++) map.put(i * 31, \"value \" + i * 7L);
        long sum = 0;
        for (int turn = 0; turn < 2; turn++)
            for (Map.Entry<Integer, String> e : map.entrySet()) sum = sum * 31 + e.getKey() + e.getValue().hashCode();
        System.out.println(sum);
    }
}";
    std::fs::write(&path, source).unwrap();
    let path = path.display().to_string();
    let flags = ["-Xmx96m", "-Xint", "-XX:+UseSerialGC", "-XX:-UsePerfData"];
    let works = Command::new("java").args(flags).arg(&path).output().unwrap();
    if !works.status.success() {
        return skip_this(SkipReason::MissingTool("java with its compiler"));
    }
    compare(&[], &[&["java"], &flags[..], &[&path]].concat(), 28 << 20);
}

/// A redis that a test asks, in a folder.
struct Redis {
    folder: PathBuf,
}

impl Redis {
    fn new(folder: PathBuf) -> Self {
        std::fs::create_dir(&folder).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn program(&self) -> Vec<String> {
        let words = ["redis-server", "--port", "0", "--save", "", "--enable-debug-command", "yes"];
        let places = ["--unixsocket".to_owned(), self.path("socket"), "--dir".to_owned(), self.path("")];
        words.into_iter().map(str::to_owned).chain(places).collect()
    }

    fn ask(&self, words: &[&str]) -> String {
        let output = Command::new("redis-cli").arg("-s").arg(self.path("socket")).args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Waits until it has loaded what is in its folder; gives the digest of that.
    fn starts(&self, child: &mut Child) -> String {
        until(Instant::now() + LIMIT, "redis", || {
            assert!(child.try_wait().unwrap().is_none(), "redis has ended");
            (self.ask(&["ping"]) == "PONG").then_some(())
        });
        self.ask(&["debug", "digest"])
    }

    /// Fills it, saves it from a forked child, loads it again; gives its digest each time.
    fn work(&self, child: &mut Child) -> [String; 3] {
        self.starts(child);
        assert_eq!(self.ask(&["debug", "populate", "20000", "key", "1500"]), "OK");
        let before = self.ask(&["debug", "digest"]);
        assert!(self.ask(&["bgsave"]).contains("saving started"));
        // The parent changes what its child saves.
        let change = "for i = 0, 4000 do redis.call('set', 'key:' .. i, i) end return 'OK'";
        assert_eq!(self.ask(&["eval", change, "0"]), "OK");
        until(Instant::now() + LIMIT, "the save", || {
            assert!(child.try_wait().unwrap().is_none(), "redis has ended");
            let state = self.ask(&["info", "persistence"]);
            state
                .contains("rdb_bgsave_in_progress:0")
                .then(|| assert!(state.contains("rdb_last_bgsave_status:ok"), "{state}"))
        });
        std::fs::copy(self.path("dump.rdb"), self.path("saved.rdb")).unwrap();
        let changed = self.ask(&["debug", "digest"]);
        assert_eq!(self.ask(&["debug", "reload"]), "OK");
        let loaded = self.ask(&["debug", "digest"]);
        self.ask(&["shutdown", "nosave"]);
        [before, changed, loaded]
    }

    /// The digest of what its forked child has saved, as a plain redis loads it.
    fn digest_of_saved(&self) -> String {
        let other = Self::new(self.folder.join("other"));
        std::fs::rename(self.path("saved.rdb"), other.path("dump.rdb")).unwrap();
        let mut plain = other.start_plain();
        let digest = other.starts(&mut plain.0);
        other.ask(&["shutdown", "nosave"]);
        plain.0.wait().unwrap();
        digest
    }

    fn start_plain(&self) -> PagedProgram {
        let program = self.program();
        PagedProgram::start(Command::new(&program[0]).args(&program[1..]).stdout(Stdio::null()).process_group(0))
    }
}

#[test]
fn redis_saves_from_a_forked_child_and_loads_what_it_had() {
    if !can_run("redis-server") {
        return;
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    let redis = Redis::new(folder.path().join("plain"));
    let mut plain = redis.start_plain();
    let expected = redis.work(&mut plain.0);
    plain.0.wait().unwrap();
    assert!(expected[0] != expected[1] && expected[1] == expected[2], "{expected:?}");
    assert_eq!(redis.digest_of_saved(), expected[0]);
    // It has 44 MiB.
    for percent in percents() {
        let (redis, limit) = (Redis::new(folder.path().join(percent.to_string())), limit(44 << 20, 8 << 20, *percent));
        let program = redis.program();
        let program: Vec<&str> = program.iter().map(String::as_str).collect();
        let mut command = command(&lender.uris()[0], &limit, &["--class", "disk"], &program);
        let mut paged = PagedProgram::start(command.stdout(Stdio::null()));
        let found = redis.work(&mut paged.0);
        let mut said = String::new();
        paged.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(
            paged.0.wait().unwrap().success() && found == expected,
            "at {limit}: {found:?}, not {expected:?}; {said}"
        );
        assert_eq!(redis.digest_of_saved(), expected[0], "at {limit}: the child saved something else; {said}");
        assert!(!said.contains(" 0 put,"), "nothing was far: {said}");
    }
}
