use clap::Subcommand;
#[derive(Subcommand)]
pub enum Task {
    Setup,
}
pub fn run(_: &Task) -> anyhow::Result<()> {
    Ok(())
}
pub fn run_all() -> anyhow::Result<()> {
    Ok(())
}
