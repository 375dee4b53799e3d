//! Programs written with the ANL macros: as a job of processes they print what they print as threads.

mod c_programs;

use std::path::Path;
use std::process::Command;

use byway_dsm::Consistency;
use byway_dsm::launch::{JobEnd, JobReport, Launch, Stream};

use c_programs::{can_run_jobs, compile, folder, library};

/// The programs, with sizes that end soon. The first argument of each is the number of processes.
const PROGRAMS: [(&str, &[&str]); 7] = [
    ("sor", &["100", "4"]),
    ("lu", &["128"]),
    ("fft", &["32"]),
    ("radix", &["20000"]),
    ("is", &["20000"]),
    ("tsp", &["10"]),
    ("matrix", &["60"]),
];

fn source(name: &str) -> std::path::PathBuf {
    folder().join("examples/parmacs").join(name).with_extension("c")
}

/// What turns a program's macros into a job's calls, and what its build needs besides.
fn over_byway() -> Vec<String> {
    let include = folder().join("include");
    let header = include.join("byway_anl.h");
    vec![
        "-include".to_owned(),
        header.display().to_string(),
        format!("-I{}", include.display()),
        library().display().to_string(),
    ]
}

/// Runs a program as a job: how it ended, and what it printed.
fn run(
    program: &Path,
    ranks: usize,
    consistency: Consistency,
    arguments: &[&str],
) -> (JobEnd, Vec<String>, Vec<String>) {
    let arguments = arguments.iter().map(Into::into).collect();
    let job = Launch { consistency, arguments, ..Launch::new(ranks, program) };
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let end = job.start().unwrap().wait(|_, stream, line| {
        let line = String::from_utf8_lossy(line).into_owned();
        if stream == Stream::Output { output.push(line) } else { errors.push(line) }
    });
    (end, output, errors)
}

#[test]
fn a_report_names_the_lines_at_which_memory_was_allocated() {
    if !can_run_jobs() {
        return;
    }
    let Some((_folder, program)) = compile(&source("sor"), &over_byway()) else { return };
    let arguments = ["2", "100", "4"].iter().map(Into::into).collect();
    let job = Launch { arguments, reports: true, ..Launch::new(2, &program) };
    let mut report = JobReport::new(2);
    let end = job.start().unwrap().wait(|rank, stream, line| {
        if stream == Stream::Error {
            report.take(rank, line);
        }
    });
    assert_eq!(end, JobEnd::Well);
    // Both processes add to a counter there.
    let text = std::fs::read_to_string(source("sor")).unwrap();
    let line = 1 + text.lines().position(|line| line.contains("global = (struct global *)G_MALLOC")).unwrap();
    let (report, place) = (report.to_string(), format!("sor.c:{line}\n"));
    assert!(report.contains(&place), "{place}: {report}");
}

#[test]
fn programs_compute_as_processes_what_they_compute_as_threads() {
    if !can_run_jobs() {
        return;
    }
    let threads = folder().join("examples/parmacs/threads.h").display().to_string();
    for (name, arguments) in PROGRAMS {
        let Some((_threads, alone)) = compile(&source(name), &["-include".to_owned(), threads.clone()]) else { return };
        let alone = Command::new(&alone).arg("4").args(arguments).output().unwrap();
        assert!(alone.status.success(), "{name}: {alone:?}");
        let printed = String::from_utf8(alone.stdout).unwrap();
        let result = printed.lines().next().unwrap();
        let Some((_job, program)) = compile(&source(name), &over_byway()) else { return };
        for consistency in [Consistency::Sequential, Consistency::Release] {
            for ranks in [1, 2, 4] {
                let number = ranks.to_string();
                let all: Vec<&str> = [number.as_str()].into_iter().chain(arguments.iter().copied()).collect();
                let (end, output, errors) = run(&program, ranks, consistency, &all);
                assert_eq!(end, JobEnd::Well, "{name}, {ranks} processes, {consistency:?}: {errors:?}");
                // What the processes print before CREATE and behind it, rank 0 alone prints.
                assert_eq!(output.len(), 2, "{name}: {output:?}");
                assert_eq!(output[0], result, "{name}, {ranks} processes, {consistency:?}");
            }
        }
    }
}

/// Compiles a program that is written here over byway.
fn compile_text(text: &str) -> Option<(tempfile::TempDir, tempfile::TempDir, std::path::PathBuf)> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("program.c");
    std::fs::write(&source, text).unwrap();
    let (out, program) = compile(&source, &over_byway())?;
    Some((folder, out, program))
}

/// In the style of SPLASH-2: a CREATE for each process, private variables that each inherits as they were, allocations by all processes,
/// arrays of locks, a flag and a condition.
#[test]
fn a_process_begins_with_the_variables_that_its_create_found() {
    if !can_run_jobs() {
        return;
    }
    let text = r#"
MAIN_ENV
struct global { ALOCKDEC(locks, 2) BARDEC(meeting) PAUSEDEC(ready) CONDVARDEC(all) long inherited, counter; long *allocated[3]; };
static struct global *global;
static int number;
static void work(void) {
    int me = number;
    WAITPAUSE(global->ready)
    ALOCK(global->locks, 1)
    global->inherited |= 1 << me;
    if (++global->counter == 43)
        CONDVARBCAST(global->all)
    while (global->counter < 43)
        CONDVARWAIT(global->all, AGETL(global->locks, 1))
    AULOCK(global->locks, 1)
    global->allocated[me] = (long *)G_MALLOC(sizeof(long));
    *global->allocated[me] = 100 + me;
    BARRIER(global->meeting, 3)
    if (*global->allocated[(me + 1) % 3] != 100 + (me + 1) % 3)
        exit(4);
}
int main(void) {
    printf("starts\n");
    MAIN_INITENV(, 80000000)
    printf("begins\n");
    global = (struct global *)G_MALLOC(sizeof(struct global));
    if (global->counter != 0)
        return 3;
    global->counter = 40;
    ALOCKINIT(global->locks, 2)
    BARINIT(global->meeting);
    CONDVARINIT(global->all)
    PAUSEINIT(global->ready)
    for (number = 1; number < 3; number++)
        CREATE(work)
    number = 0;
    SETPAUSE(global->ready)
    work();
    WAIT_FOR_END(2)
    printf("%ld %ld\n", global->counter, global->inherited);
    MAIN_END
}
"#;
    let Some((_text, _out, program)) = compile_text(text) else { return };
    for consistency in [Consistency::Sequential, Consistency::Release] {
        let (end, output, errors) = run(&program, 3, consistency, &[]);
        let all = ["starts", "begins", "43 7"].map(str::to_owned).to_vec();
        assert_eq!((end, output), (JobEnd::Well, all), "{errors:?}");
    }
}

/// As Barnes of SPLASH does.
#[test]
fn a_program_may_allocate_memory_before_it_says_that_it_begins() {
    if !can_run_jobs() {
        return;
    }
    let text = r#"
MAIN_ENV
static long *word;
static void work(void) { *word *= 2; }
int main(void) {
    word = (long *)G_MALLOC(sizeof(long));
    *word = 21;
    MAIN_INITENV(, 80000000)
    CREATE(work, 1)
    printf("%ld\n", *word);
    WAIT_FOR_END(1)
    MAIN_END
}
"#;
    let Some((_text, _out, program)) = compile_text(text) else { return };
    let (end, output, errors) = run(&program, 1, Consistency::Sequential, &[]);
    assert_eq!((end, output), (JobEnd::Well, vec!["42".to_owned()]), "{errors:?}");
}

/// As Barnes and FMM of SPLASH do.
#[test]
fn a_program_may_define_bool_itself() {
    if !can_run_jobs() {
        return;
    }
    let text = r#"
typedef enum { false, true } bool;
MAIN_ENV
static bool is_done;
int main(void) {
    MAIN_INITENV(, 80000000)
    is_done = true;
    printf("%d\n", is_done == true);
    MAIN_END
}
"#;
    let Some((_text, _out, program)) = compile_text(text) else { return };
    let (end, output, errors) = run(&program, 1, Consistency::Sequential, &[]);
    assert_eq!((end, output), (JobEnd::Well, vec!["1".to_owned()]), "{errors:?}");
}

#[test]
fn a_program_with_another_number_of_processes_is_told() {
    if !can_run_jobs() {
        return;
    }
    let Some((_folder, program)) = compile(&source("sor"), &over_byway()) else { return };
    for (ranks, processes) in [(2, "3"), (3, "2"), (2, "1")] {
        let (end, _, errors) = run(&program, ranks, Consistency::Sequential, &[processes, "20", "1"]);
        assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {errors:?}");
        assert!(errors.iter().any(|line| line.contains(&format!("the job {ranks}"))), "{errors:?}");
    }
}

#[test]
fn memory_that_does_not_suffice_is_named() {
    if !can_run_jobs() {
        return;
    }
    let Some((_folder, program)) = compile(&source("sor"), &over_byway()) else { return };
    let arguments = ["1", "1000", "1"].map(Into::into).to_vec();
    let job = Launch { bytes: 1 << 20, arguments, ..Launch::new(1, &program) };
    let mut lines = Vec::new();
    let end = job.start().unwrap().wait(|_, _, line| lines.push(String::from_utf8_lossy(line).into_owned()));
    assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {lines:?}");
    assert!(lines.iter().any(|line| line.contains("raise --memory")), "{lines:?}");
}

/// The way of SPLASH's builds: m4 expands the sources.
#[test]
fn a_source_that_m4_has_processed_compiles() {
    if !can_run_jobs() {
        return;
    }
    if Command::new("m4").arg("--version").output().is_err() {
        return byway_skip::skip_this(byway_skip::SkipReason::MissingTool("m4"));
    }
    let macros = folder().join("include/c.m4.byway");
    let made = Command::new("m4").args(["-s", "-Ulen", "-Uindex"]).arg(macros).arg(source("tsp")).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let out = tempfile::tempdir().unwrap();
    let expanded = out.path().join("tsp.c");
    std::fs::write(&expanded, made.stdout).unwrap();
    let arguments = over_byway().split_off(2);
    let Some((_folder, program)) = compile(&expanded, &arguments) else { return };
    let (end, output, errors) = run(&program, 2, Consistency::Sequential, &["2", "9"]);
    assert_eq!(end, JobEnd::Well, "{errors:?}");
    assert!(output[0].starts_with("tsp 9: "), "{output:?}");
}
