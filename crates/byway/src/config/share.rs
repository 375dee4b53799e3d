//! Shares in the configuration file, and their checks.

use std::collections::BTreeSet;
use std::path::PathBuf;

use byway_fabric::access::AccessError;
use byway_service::block::spec::VolumeName;
use byway_service::file::{ShareSpec, Users};
use serde::Deserialize;

use super::{ConfigError, Configuration, FileForm, Tls, value};
use crate::admission::ClientAuthentication;
use crate::{limits, spec};

/// A share as a table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShareForm {
    pub(super) directory: PathBuf,
    #[serde(default)]
    pub(super) read_only: bool,
    pub(super) users: Option<String>,
    pub(super) writers: Option<String>,
    pub(super) access: Option<Vec<String>>,
    pub(super) description: Option<String>,
}

/// The shares of a file, as specifications and as tables.
///
/// # Errors
/// Names the file and the key.
pub(super) fn shares(form: &FileForm, place: &str) -> Result<Vec<ShareSpec>, ConfigError> {
    let mut shares = Vec::new();
    for (index, text) in form.shares.iter().enumerate() {
        let share = spec::parse_share(text);
        shares.push(share.map_err(|error| value(format!("{place}shares[{index}] `{text}`"), error))?);
    }
    for (name, table) in &form.share {
        shares.push(table.share(name, place)?);
    }
    Ok(shares)
}

impl ShareForm {
    fn share(&self, name: &str, place: &str) -> Result<ShareSpec, ConfigError> {
        let at = |key: &str| format!("{place}share.{name}{key}");
        let share_name = VolumeName::new(name).map_err(|error| value(at(""), error))?;
        let mut share = ShareSpec::new(share_name, self.directory.clone());
        share.read_only = self.read_only;
        if let Some(users) = &self.users {
            share.users = spec::parse_users(users).map_err(|error| value(at(".users"), error))?;
        }
        if let Some(writers) = &self.writers {
            share.writers = spec::parse_writers(writers).map_err(|error| value(at(".writers"), error))?;
        }
        if let Some(clients) = &self.access {
            // An empty list would join to nothing, which is refused: it must not let everybody in.
            share.access = clients.join(",").parse().map_err(|error: AccessError| value(at(".access"), error))?;
        }
        if self.description.as_ref().is_some_and(|text| text.len() > limits::DESCRIPTION_BYTES_MAX) {
            return Err(value(at(".description"), spec::SpecFault::Description));
        }
        share.description.clone_from(&self.description);
        Ok(share)
    }
}

impl Configuration {
    pub(super) fn add_shares(&mut self, flags: &[String]) -> Result<(), ConfigError> {
        for text in flags {
            self.shares.push(spec::parse_share(text).map_err(|error| value(format!("--share `{text}`"), error))?);
        }
        Ok(())
    }

    /// Refuses shares whose users or clients the node cannot tell.
    pub(super) fn check_shares<'a>(&'a self, mut names: BTreeSet<&'a VolumeName>) -> Result<(), ConfigError> {
        if let Some(twice) = self.shares.iter().map(|share| &share.name).find(|name| !names.insert(name)) {
            let message = "this name is given to a volume or another share as well; rename one";
            return Err(value(format!("share `{twice}`"), message));
        }
        if let Some(share) = self.shares.iter().find(|share| share.users != Users::Owner && self.user.is_some()) {
            let message = "users needs a node that stays root, and --user has it become another; leave one of them out";
            return Err(value(format!("share `{}`", share.name), message));
        }
        let certificates = self.tls.as_ref().map_or(ClientAuthentication::Off, Tls::authentication);
        let named = self.shares.iter().find(|share| share.access.names_certificates());
        if let Some(share) = named.filter(|_| certificates == ClientAuthentication::Off) {
            let message = "access names a certificate, but clients show none here; give --tls-client-ca";
            return Err(value(format!("share `{}`", share.name), message));
        }
        Ok(())
    }
}
