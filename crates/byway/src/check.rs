//! `byway serve --check`: whether a node could be started with this configuration, as far as that can be told without starting it.

use std::io::Write;

use byway_reactor::privilege::{find_group, find_user};
use byway_service::block::OpenHere;

use crate::cli::ServeArguments;
use crate::config::Configuration;
use crate::reload::{ReloadError, open_volume, plan_shares};
use crate::serve::{ServeError, judged_listeners};
use crate::tls::server_tls;

/// Checks the configuration, and prints one line if it is valid.
///
/// # Errors
/// See [`check`].
pub fn run(arguments: &ServeArguments) -> Result<(), ServeError> {
    let good = check(arguments)?;
    // The exit status says it too.
    let _ = writeln!(std::io::stdout(), "{good}");
    Ok(())
}

/// Reads the configuration, and looks at all that it names: files of volumes (opened read-only, so that a running node may serve them
/// meanwhile), certificates, users, groups and addresses. Returns the line for the operator that lists what was checked.
///
/// # Errors
/// The first thing that is wrong, as `byway serve` would say it.
pub fn check(arguments: &ServeArguments) -> Result<String, ServeError> {
    let configuration = Configuration::load(arguments)?;
    if let Some(name) = &configuration.user {
        find_user(name).map_err(|source| ServeError::User { name: name.clone(), source })?;
    }
    let listeners = judged_listeners(&configuration, Vec::new())?;
    for place in configuration.listen.iter().chain(&configuration.nbd).filter_map(|listener| listener.socket()) {
        if let Some(group) = &place.group {
            find_group(group).map_err(|source| ServeError::Group { name: group.clone(), source })?;
        }
    }
    configuration.admitted_http()?;
    server_tls(configuration.tls.as_ref(), &|path| std::fs::File::open(path))?;
    for spec in &configuration.volumes {
        let mut spec = spec.clone();
        spec.read_only = true;
        let failed = |source| ReloadError::Volume { name: spec.name.to_string(), source, hint: String::new() };
        open_volume(&spec, &OpenHere).map_err(failed)?;
    }
    plan_shares(&[], &configuration.shares, &|path| std::fs::File::open(path))?;
    let (volumes, shares) = (configuration.volumes.len(), configuration.shares.len());
    // Most nodes have none.
    let shares = if shares == 0 { String::new() } else { format!("{shares} shares, ") };
    Ok(format!("good: {volumes} volumes, {shares}{listeners} listeners"))
}
