use clap::Subcommand;
#[derive(Subcommand)]
pub enum Task {
    Block,
}
pub fn run(_: &Task) -> anyhow::Result<()> {
    Ok(())
}
