//! How a reload changes the shares.

use std::path::Path;
use std::sync::Arc;

use byway_service::file::{Share, ShareSpec, Users};

use super::{ReloadError, Summary};

/// Opens the shares that are new or have changed, also by their map of users, which `read` opens; the others stay.
///
/// # Errors
/// [`ReloadError::Share`].
pub fn plan_shares(
    old: &[Arc<Share>],
    specs: &[ShareSpec],
    read: &dyn Fn(&Path) -> std::io::Result<std::fs::File>,
) -> Result<Vec<Arc<Share>>, ReloadError> {
    let open = |spec: &ShareSpec| {
        let before = old.iter().find(|share| share.spec() == spec).map(Arc::clone);
        if let Some(share) = before.as_ref().filter(|_| !matches!(spec.users, Users::Map(_))) {
            return Ok(Arc::clone(share));
        }
        let opened = Share::open_by(spec.clone(), read)
            .map_err(|source| ReloadError::Share { name: spec.name.to_string(), source })?;
        let same = before.filter(|share| share.is_configured_as(&opened));
        Ok(same.unwrap_or_else(|| Arc::new(opened)))
    };
    specs.iter().map(open).collect()
}

/// Adds to a summary how the shares differ.
pub fn note_shares(summary: &mut Summary, old: &[Arc<Share>], new: &[Arc<Share>]) {
    let named = |shares: &[Arc<Share>], name: &str| shares.iter().any(|share| share.name() == name);
    for share in new {
        let name = share.name();
        if !named(old, name) {
            summary.added.push(name.to_owned());
        } else if !old.iter().any(|before| Arc::ptr_eq(before, share)) {
            summary.changed.push(name.to_owned());
        }
    }
    let dropped = old.iter().filter(|share| !named(new, share.name()));
    summary.dropped.extend(dropped.map(|share| share.name().to_owned()));
}
