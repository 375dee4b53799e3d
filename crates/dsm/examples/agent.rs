//! Starts a process of a job over several hosts, as `byway dsm rank` does, for tests of this crate.

fn main() -> std::process::ExitCode {
    byway_dsm::launch::run_agent()
}
