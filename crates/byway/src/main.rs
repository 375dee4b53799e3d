//! The `byway` program.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    byway::cli::run()
}
