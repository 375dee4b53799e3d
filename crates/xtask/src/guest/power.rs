//! x
use anyhow::Result;
pub fn run(_: &super::setup::System) -> Result<()> {
    Ok(())
}
