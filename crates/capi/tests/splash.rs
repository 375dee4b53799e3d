//! Programs of SPLASH-3, unchanged, as threads and as jobs of processes: both compute the same. Their sources are not part of byway: SPLASH3_DIR names the
//! folder `codes` of <https://github.com/SakalisC/Splash-3>, and without it these tests are skipped.

mod c_programs;

use std::path::{Path, PathBuf};
use std::process::Command;

use byway_dsm::Consistency;
use byway_dsm::launch::{JobEnd, Launch};
use byway_skip::{SkipReason, skip_this};

use c_programs::{can_run_jobs, folder, library};

/// The macros with which SPLASH-3 makes threads.
const THREADS: &str = "pthread_macros/pthread.m4.stougie";

/// A program, and how it is run.
#[derive(Clone, Copy)]
struct Program {
    /// The folder of its sources. It runs in a copy.
    folder: &'static str,
    arguments: fn(processes: usize) -> String,
    /// What it reads from standard input.
    input: fn(processes: usize) -> String,
    /// Whether a line that it prints is of its result.
    is_result: fn(&str) -> bool,
    /// Where processes add numbers in any order, results differ by this much of themselves.
    tolerance: f64,
    /// A file of C that prints a result at the end, by `splash_report`, for a program that prints none.
    report: Option<&'static str>,
}

const PROGRAM: Program = Program {
    folder: "",
    arguments: |_| String::new(),
    input: |_| String::new(),
    is_result: |line| line.contains("PASSED"),
    tolerance: 0.0,
    report: None,
};

fn is_numbers(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.clone().count() >= 3 && words.all(|word| word.parse::<f64>().is_ok())
}

/// Its sources, and what was built from them; nothing if they or a tool are missing, which is said aloud.
fn sources() -> Option<(PathBuf, tempfile::TempDir)> {
    let Some(codes) = std::env::var_os("SPLASH3_DIR").map(PathBuf::from) else {
        skip_this(SkipReason::Machine("SPLASH3_DIR does not name the folder `codes` of SPLASH-3's sources"));
        return None;
    };
    assert!(codes.join(THREADS).is_file(), "{} is not the folder `codes` of SPLASH-3", codes.display());
    for tool in ["m4", "cc"] {
        if Command::new(tool).arg("--version").output().is_err() {
            skip_this(SkipReason::MissingTool(tool));
            return None;
        }
    }
    can_run_jobs().then(|| (codes, tempfile::tempdir().unwrap()))
}

/// Expands and compiles the program's sources as its makefile does, with these macros.
fn build(program: &Program, codes: &Path, macros: &Path, out: &Path, flags: &[String]) -> PathBuf {
    std::fs::create_dir(out).unwrap();
    let report = out.join("report.m4");
    let call = "{ extern void splash_report(void); splash_report(); }";
    let ends = program.report.map(|_| format!("define(`SPLASH3_ROI_END', `{call}')dnl\n")).unwrap_or_default();
    std::fs::write(&report, ends).unwrap();
    let own = program.report.map(|report| {
        let source = out.join("report.c.in");
        std::fs::write(&source, report).unwrap();
        source
    });
    let sources = std::fs::read_dir(codes.join(program.folder)).unwrap().map(|entry| entry.unwrap().path());
    for source in sources.chain(own) {
        if source.extension().is_none_or(|extension| extension != "in") {
            continue;
        }
        let mut m4 = Command::new("m4");
        m4.args(["-Ulen", "-Uindex"]).arg(macros).arg(&report).arg(&source);
        let expanded = m4.output().unwrap();
        assert!(expanded.status.success(), "{expanded:?}");
        std::fs::write(out.join(source.file_stem().unwrap()), expanded.stdout).unwrap();
    }
    let files = std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "c"));
    let built = out.join("program");
    let mut cc = Command::new("cc");
    // Those of Makefile.config. Raytrace has pointers to functions in shared memory: without -no-pie they lie elsewhere in each process.
    cc.args(
        "-O2 -pthread -D_XOPEN_SOURCE=500 -D_POSIX_C_SOURCE=200112 -std=c11 -fno-strict-aliasing -w -no-pie".split(' '),
    );
    cc.arg(format!("-I{}", out.display())).args(files).args(flags).args(["-lm", "-ldl", "-o"]).arg(&built);
    let compiled = cc.output().unwrap();
    assert!(compiled.status.success(), "{}: {}", program.folder, String::from_utf8_lossy(&compiled.stderr));
    built
}

/// The lines of a program's result. Processes print them in any order.
fn results(program: &Program, lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = lines.filter(|line| (program.is_result)(line)).collect();
    lines.sort();
    lines
}

fn is_alike(program: &Program, lines: &[String], others: &[String]) -> bool {
    let words = |lines: &[String]| -> Vec<String> {
        lines.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned).collect()
    };
    let is_near = |(word, other): (&String, &String)| match (word.parse::<f64>(), other.parse::<f64>()) {
        (Ok(number), Ok(other)) => (number - other).abs() <= program.tolerance * number.abs(),
        _ => word == other,
    };
    let (lines, others) = (words(lines), words(others));
    lines.len() == others.len() && lines.iter().zip(&others).all(is_near)
}

/// Runs a program as threads, and as jobs of 1 to 8 processes.
fn check(program: &Program) {
    let Some((codes, out)) = sources() else { return };
    let include = folder().join("include");
    let threads = build(program, &codes, &codes.join(THREADS), &out.path().join("threads"), &[]);
    let flags = [format!("-I{}", include.display()), library().display().to_string()];
    let job = build(program, &codes, &include.join("c.m4.byway"), &out.path().join("job"), &flags);
    let run = out.path().join("run");
    let copied = Command::new("cp").arg("-r").args([&codes.join(program.folder), &run]).status().unwrap();
    assert!(copied.success());
    let cases = [1, 2, 4, 8].map(|processes| (processes, Consistency::Sequential));
    for (processes, consistency) in cases.into_iter().chain([(4, Consistency::Release)]) {
        let input = out.path().join("input");
        std::fs::write(&input, (program.input)(processes)).unwrap();
        // All processes read the input, and the program's own files.
        let script = |built: &Path| {
            let (arguments, run, input) = ((program.arguments)(processes), run.display(), input.display());
            format!("cd '{run}' && exec '{}' {arguments} < '{input}'", built.display())
        };
        let alone = Command::new("sh").args(["-c", &script(&threads)]).output().unwrap();
        assert!(alone.status.success(), "{}: {alone:?}", program.folder);
        let printed = String::from_utf8_lossy(&alone.stdout).into_owned();
        let wanted = results(program, printed.lines().map(str::to_owned));
        assert!(!wanted.is_empty(), "{} prints no result: {printed}", program.folder);
        let arguments = ["-c".into(), script(&job).into()].to_vec();
        let launch = Launch { consistency, arguments, ..Launch::new(processes, "sh") };
        let mut lines = Vec::new();
        let end = launch.start().unwrap().wait(|_, _, line| lines.push(String::from_utf8_lossy(line).into_owned()));
        let what = format!("{}, {processes} processes, {consistency:?}", program.folder);
        assert_eq!(end, JobEnd::Well, "{what}: {lines:?}");
        let found = results(program, lines.into_iter());
        assert!(is_alike(program, &wanted, &found), "{what}: {wanted:?} as threads, {found:?} as a job");
    }
}

#[test]
fn fft() {
    check(&Program {
        folder: "kernels/fft",
        arguments: |processes| format!("-p{processes} -m10 -t"),
        is_result: |line| line.contains("PASSED") || line.contains("Checksum difference"),
        ..PROGRAM
    });
}

#[test]
fn lu() {
    for folder in ["kernels/lu/contiguous_blocks", "kernels/lu/non_contiguous_blocks"] {
        check(&Program { folder, arguments: |processes| format!("-p{processes} -n64 -b8 -t"), ..PROGRAM });
    }
}

#[test]
fn radix() {
    check(&Program {
        folder: "kernels/radix",
        arguments: |processes| format!("-p{processes} -n20000 -m20000 -t"),
        ..PROGRAM
    });
}

#[test]
fn ocean() {
    check(&Program {
        folder: "apps/ocean/contiguous_partitions",
        arguments: |processes| format!("-p{processes} -n34 -o"),
        is_result: |line| line.contains("residual norm"),
        ..PROGRAM
    });
}

#[test]
fn water() {
    let water = Program { is_result: is_numbers, tolerance: 1e-5, ..PROGRAM };
    check(&Program {
        folder: "apps/water-nsquared",
        input: |processes| format!("1.5e-16 64 3 6 -1 3000 3 0 {processes} 6.212752"),
        ..water
    });
    check(&Program {
        folder: "apps/water-spatial",
        input: |processes| format!("1.5e-16 64 3 6 -1 3000 3 0 {processes} 4.5"),
        ..water
    });
}

/// It prints times alone. Its tree depends on which process inserts a body first: runs as threads differ by 1e-4 of the velocities.
#[test]
fn barnes() {
    let report = r#"
EXTERN_ENV
#define global extern
#include "stdinc.h"
void splash_report(void) {
    double positions = 0.0, velocities = 0.0;
    for (bodyptr body = bodytab; body < bodytab + nbody; body++)
        for (int k = 0; k < NDIM; k++) {
            positions += Pos(body)[k] * Pos(body)[k];
            velocities += Vel(body)[k] * Vel(body)[k];
        }
    printf("bodies %.9f %.9f\n", positions, velocities);
}
"#;
    check(&Program {
        folder: "apps/barnes",
        input: |processes| format!("\n256\n123\n\n0.025\n0.05\n1.0\n2.0\n5.0\n0.075\n0.25\n{processes}\n"),
        is_result: |line| line.starts_with("bodies "),
        tolerance: 1e-3,
        report: Some(report),
        ..PROGRAM
    });
}

/// It writes an image to a file.
#[test]
fn raytrace() {
    let report = r#"
EXTERN_ENV
#include <stdio.h>
#include "rt.h"
void splash_report(void) {
    double sum = 0.0;
    for (long pixel = 0; pixel < Display.numpixels; pixel++) {
        PIXEL *color = &Display.framebuffer[pixel];
        sum += (1 + pixel % 97) * (color->r + 3.0 * color->g + 5.0 * color->b);
    }
    printf("image %.6f\n", sum);
}
"#;
    check(&Program {
        folder: "apps/raytrace",
        arguments: |processes| format!("-p{processes} -m16 inputs/teapot.env"),
        is_result: |line| line.starts_with("image "),
        report: Some(report),
        ..PROGRAM
    });
}
