//! Programs that have the same output with parts of their memory as without a limit.

use std::process::{Command, Output};

use super::{Lender, PagedProgram, command};

/// How much of a program's memory may be here, in percent.
pub fn percents() -> &'static [u64] {
    if std::env::var_os("BYWAY_LONG").is_some() { &[75, 50, 25] } else { &[50] }
}

/// The limit for a program that needs so much, of which its code takes a part: code is not paged.
pub fn limit(needs: u64, code: u64, percent: u64) -> String {
    (code + needs.saturating_sub(code) * percent / 100).max(16 << 20).to_string()
}

/// The words of a report behind "at most": what was here at once.
fn resident(said: &str) -> u64 {
    let after = said.split("; at most ").nth(1).unwrap_or_else(|| panic!("no report: {said}"));
    let (number, unit) = after.split_once(' ').unwrap();
    let unit = match unit.chars().next() {
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        _ => 0,
    };
    (number.parse::<f64>().unwrap() * f64::from(1u32 << unit)) as u64
}

/// Runs a program with these variables plain, then with all of its memory here, then with parts of what is not code, which takes so many
/// bytes. Gives what it prints.
///
/// # Panics
/// If it fails, or prints something else.
pub fn compare(variables: &[(&str, &str)], program: &[&str], code: u64) -> String {
    let variables = || variables.iter().copied();
    let plain = Command::new(program[0]).args(&program[1..]).envs(variables()).output().unwrap();
    assert!(plain.status.success(), "{program:?}: {}", String::from_utf8_lossy(&plain.stderr));
    let lender = Lender::start();
    let far = |limit: &str| -> Output {
        let mut command = command(&lender.uris()[0], limit, &["--class", "none"], program);
        PagedProgram::start(command.envs(variables())).finish()
    };
    let all = far("64G");
    let said = String::from_utf8_lossy(&all.stderr);
    assert!(all.status.success() && all.stdout == plain.stdout, "{program:?} with all of its memory: {said}");
    let needs = resident(&said);
    for percent in percents() {
        let output = far(&limit(needs, code, *percent));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program:?} at {percent} % of {needs}: {} {said}", output.status);
        assert!(output.stdout == plain.stdout, "{program:?} at {percent} % of {needs}: another result; {said}");
        assert!(!said.contains(" 0 put,") && !said.contains("is not paged"), "nothing was far: {said}");
    }
    String::from_utf8_lossy(&plain.stdout).into_owned()
}
