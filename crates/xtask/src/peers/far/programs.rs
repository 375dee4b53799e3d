//! Real programs at half of their memory: far, and with the kernel's swap.

use super::super::report::median;
use super::swap::{Group, Swap};
use super::{Bench, CLASSES, Killed, Row, row, timed};
use crate::process;
use anyhow::{Result, bail};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// Makes 64 MiB of blocks, changes them in two rounds, checks each, and prints their digest.
pub const BLOCKS: &str = "
import hashlib, random
blocks = [bytearray(random.Random(i).randbytes(65536)) for i in range(1000)]
digests = [hashlib.md5(block).digest() for block in blocks]
for turn in range(2):
    for i, block in enumerate(blocks):
        assert hashlib.md5(block).digest() == digests[i], (turn, i)
        block[turn * 7] ^= 255
        digests[i] = hashlib.md5(block).digest()
print(hashlib.md5(b''.join(digests)).hexdigest())
";

/// A table of 500,000 rows in memory, an index over it, and reads by the index.
const SQL: &str = "
create table t(a integer, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 500000)
insert into t select i * 7919 % 1000003, printf('%060d', i) from n;
create index ti on t(a);
select sum(length(b)), count(*) from t where a % 3 = 0;
select sum(a) from (select a from t order by a limit 400000);
";

/// A map of 200,000 strings, walked twice.
const JAVA: &str = "import java.util.*;
public class Sums {
    public static void main(String[] a) {
        Map<Integer, String> map = new HashMap<>();
        for (int i = 0; i < 200000; i++) map.put(i * 31, \"value \" + i * 7L);
        long sum = 0;
        for (int turn = 0; turn < 2; turn++)
            for (Map.Entry<Integer, String> e : map.entrySet()) sum = sum * 31 + e.getKey() + e.getValue().hashCode();
        System.out.println(sum);
    }
}";

/// A program that is run with less memory than it uses.
pub struct Program {
    case: &'static str,
    words: Vec<String>,
    /// About half of what it uses.
    limit: &'static str,
}

/// The programs that this machine has, and their input in `folder`; what it has not is said.
pub fn all(folder: &Path) -> Result<Vec<Program>> {
    let (lines, source, java) = (folder.join("lines"), folder.join("large.c"), folder.join("Sums.java"));
    std::fs::write(&lines, numbers()?)?;
    std::fs::write(&source, functions()?)?;
    std::fs::write(&java, JAVA)?;
    let mut programs = Vec::new();
    let mut add = |case, limit, needed: &str, words: &[&str]| {
        if process::find_program(needed).is_some() {
            programs.push(Program { case, words: words.iter().map(|word| (*word).to_owned()).collect(), limit });
        } else {
            println!("SKIP {case}: there is no {needed}");
        }
    };
    let [lines, source, java] = [lines, source, java].map(|path| path.display().to_string());
    add("sort", "32M", "sort", &["env", "LC_ALL=C", "sort", "-S", "64M", "--parallel=2", &lines]);
    add("python", "36M", "python3", &["/usr/bin/python3", "-c", BLOCKS]);
    add("sqlite", "32M", "sqlite3", &["sqlite3", ":memory:", SQL]);
    add("gcc", "60M", "gcc", &["gcc", "-O2", "-S", "-o", "-", &source]);
    let java_words = ["java", "-Xmx96m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", &java];
    add("java", "48M", "javac", &java_words);
    Ok(programs)
}

fn numbers() -> Result<String> {
    let (mut lines, mut number) = (String::new(), 1u64);
    for _ in 0..1_000_000 {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        writeln!(lines, "{:016x} {:07}", number, number % 1_000_000)?;
    }
    Ok(lines)
}

fn functions() -> Result<String> {
    let mut source = String::new();
    for number in 0..800 {
        writeln!(
            source,
            "int f{number}(int *a, int n) {{ int s = {number}; for (int i = 0; i < n; i++) {{ \
             if (a[i] % {0} == 3) s += a[i] * {number}; else s ^= a[(i * {0}) % n] >> 3; }} return s; }}",
            number % 17 + 2
        )?;
    }
    Ok(source)
}

/// How a program gets by with half of its memory.
enum Way<'a> {
    Swap(&'a Group, &'a Swap),
    Far { wire: &'static str, uri: &'a str, class: &'static str },
}

/// The times of one way, in seconds.
struct Times<'a> {
    way: Way<'a>,
    seconds: Vec<f64>,
    /// How often the kernel killed the program instead.
    killed: usize,
}

impl Bench<'_> {
    /// A program plain, with each swap, and far over each wire. All must print the same.
    pub(super) fn program(
        &self,
        program: &Program,
        swaps: Option<&(Group, Vec<Swap>)>,
        rounds: usize,
    ) -> Result<Vec<Row>> {
        let words: Vec<&str> = program.words.iter().map(String::as_str).collect();
        let swaps = swaps.into_iter().flat_map(|(group, swaps)| swaps.iter().map(move |swap| Way::Swap(group, swap)));
        let far = self.uris.iter().flat_map(|(wire, uri)| CLASSES.map(|class| Way::Far { wire, uri, class }));
        let mut all: Vec<_> = swaps.chain(far).map(|way| Times { way, seconds: Vec::new(), killed: 0 }).collect();
        let mut plain = Vec::new();
        for round in 1..=rounds {
            let (time, said) = timed(Command::new(words[0]).args(&words[1..]))?;
            plain.push(time);
            for times in &mut all {
                let run = match times.way {
                    Way::Swap(group, swap) => {
                        let _enabled = swap.enable()?;
                        timed(&mut group.limited(program.limit, &words))
                    }
                    Way::Far { uri, class, .. } => timed(&mut self.far(uri, class, program.limit, &words)),
                };
                // A kernel that cannot swap fast enough kills the program: that is a result of the comparison.
                if matches!(times.way, Way::Swap(..)) && run.as_ref().is_err_and(anyhow::Error::is::<Killed>) {
                    times.killed += 1;
                    continue;
                }
                let (time, other) = run?;
                if other != said {
                    bail!("{}: it prints something else with less memory", program.case);
                }
                times.seconds.push(time);
            }
            let last: Vec<_> = all.iter().map(|times| times.seconds.last()).collect();
            eprintln!("round {round}: {:<8} {time:.2} {last:?}", program.case);
        }
        Ok(rows(program.case, median(plain), all, rounds))
    }
}

/// Rows of one program: plain, with swap, far; and for each far row one against each swap.
fn rows(case: &'static str, plain: f64, all: Vec<Times<'_>>, rounds: usize) -> Vec<Row> {
    let mut rows = vec![row(case, "all of its memory", plain, "s")];
    let mut swaps = Vec::new();
    for Times { way, seconds, killed } in all {
        let time = median(seconds);
        match way {
            Way::Swap(_, swap) => {
                let runs = if killed > 0 { format!(" (killed in {killed} of {rounds} runs)") } else { String::new() };
                rows.push(row(case, &format!("half of it, {}{runs}", swap.name), time, "s"));
                swaps.push((swap.name, swap.most(), time));
            }
            Way::Far { wire, class, .. } => {
                let slower = format!("half of it, {wire} ({:.2} of plain)", time / plain);
                rows.push(Row { class, ..row(case, &slower, time, "s") });
                // Without a time the kernel killed each run: there is nothing to divide by.
                for (name, most, swap) in swaps.iter().filter(|(_, _, time)| *time > 0.0) {
                    let target = Some((format!("<= {most}"), time <= most * swap));
                    rows.push(Row { class, target, ..row(case, &format!("{wire}, of {name}"), time / swap, "x") });
                }
            }
        }
    }
    rows
}
