//! Shares, as `--share` and the configuration file write them: `NAME=DIR[,OPTION]...`

use std::path::PathBuf;

use byway_fabric::access::AccessError;
use byway_reactor::privilege::User;
use byway_service::block::spec::VolumeName;
use byway_service::file::{ShareSpec, Users, Writers};

use super::options::{flag, once};
use super::text::Text;
use super::{SpecError, SpecFault};
use crate::limits::{DESCRIPTION_BYTES_MAX, SPEC_BYTES_MAX};

/// Reads one specification of a share.
///
/// # Errors
/// Says what is wrong, at which character, and what to write instead.
pub fn parse_share(spec: &str) -> Result<ShareSpec, SpecError> {
    if spec.len() > SPEC_BYTES_MAX {
        return Err(SpecError { column: 1, fault: SpecFault::TooLong });
    }
    let text = Text::read(spec)?;
    let mut parts = text.split(',').into_iter();
    let first = parts.next().unwrap_or_else(|| text.clone());
    let (name, directory) = first.split_once('=').ok_or_else(|| first.error(SpecFault::NoName))?;
    if name.is_empty() {
        return Err(name.error(SpecFault::NoName));
    }
    if directory.is_empty() {
        return Err(directory.error(SpecFault::NoPath("NAME=DIR")));
    }
    let share_name = VolumeName::new(&name.value()).map_err(|fault| name.error(fault.into()))?;
    let mut share = ShareSpec::new(share_name, PathBuf::from(directory.value()));
    apply(&mut share, parts)?;
    Ok(share)
}

fn apply(share: &mut ShareSpec, parts: impl Iterator<Item = Text>) -> Result<(), SpecError> {
    let (mut users, mut writers) = (None, None);
    for part in parts {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key.value(), Some(value)),
            None => (part.value(), None),
        };
        match key.as_str() {
            "ro" => flag(&mut share.read_only, "ro", &part, value.as_ref())?,
            "users" => {
                let text = value.map(|value| value.value()).unwrap_or_default();
                once(&mut users, parse_users(&text).map_err(|fault| part.error(fault))?, "users", &part)?;
            }
            "writers" => {
                let text = value.map(|value| value.value()).unwrap_or_default();
                once(&mut writers, parse_writers(&text).map_err(|fault| part.error(fault))?, "writers", &part)?;
            }
            "access" => {
                let value =
                    value.ok_or_else(|| part.error(SpecFault::Value("write access=CLIENT or access=CLIENT:ro")))?;
                let more = value.value().parse().map_err(|fault: AccessError| value.error(fault.into()))?;
                share.access.add(more).map_err(|fault| value.error(fault.into()))?;
            }
            "description" => {
                let text = value.ok_or_else(|| part.error(SpecFault::Value("write description=TEXT")))?.value();
                if text.len() > DESCRIPTION_BYTES_MAX {
                    return Err(part.error(SpecFault::Description));
                }
                once(&mut share.description, text, "description", &part)?;
            }
            _ => return Err(part.error(SpecFault::ShareOption(key))),
        }
    }
    share.users = users.unwrap_or_default();
    share.writers = writers.unwrap_or_default();
    Ok(())
}

/// Reads what follows `users=`.
///
/// # Errors
/// [`SpecFault::Users`].
pub(crate) fn parse_users(text: &str) -> Result<Users, SpecFault> {
    let wrong = || SpecFault::Users(text.to_owned());
    match text {
        "trust" => return Ok(Users::Trust),
        "trust-root" => return Ok(Users::TrustRoot),
        _ => {}
    }
    if let Some(file) = text.strip_prefix("map:").filter(|file| !file.is_empty()) {
        return Ok(Users::Map(file.into()));
    }
    let numbers = text.strip_prefix("squash:").ok_or_else(wrong)?;
    let (uid, gid) = numbers.split_once(':').unwrap_or((numbers, numbers));
    // The last number stands for none in the kernel's calls.
    let number = |text: &str| text.parse().ok().filter(|number| *number != u32::MAX).ok_or_else(wrong);
    let (uid, gid) = (number(uid)?, number(gid)?);
    Ok(Users::Squash(User { uid, gid, groups: vec![gid] }))
}

/// Reads what follows `writers=`.
///
/// # Errors
/// [`SpecFault::Writers`].
pub(crate) fn parse_writers(text: &str) -> Result<Writers, SpecFault> {
    match text {
        "local" => Ok(Writers::Local),
        "exclusive" => Ok(Writers::Exclusive),
        _ => Err(SpecFault::Writers(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use byway_fabric::access::Identity;

    use super::*;

    #[test]
    fn a_share_is_read_with_its_options() {
        let share = parse_share(r#"home=/srv/"a,b",ro,users=squash:1000:100,description=two"#).unwrap();
        assert_eq!((share.name.as_str(), share.directory.as_path()), ("home", "/srv/a,b".as_ref()));
        assert_eq!((share.read_only, share.description.as_deref()), (true, Some("two")));
        assert_eq!(share.users, Users::Squash(User { uid: 1000, gid: 100, groups: vec![100] }));
        let share = parse_share("home=/srv,access=unix:ro").unwrap();
        assert_eq!((share.users, share.read_only), (Users::Owner, false));
        assert_eq!(share.access.right(&Identity::default()), None);
        assert_eq!(share.writers, Writers::Local);
        assert_eq!(parse_share("h=/srv,writers=exclusive").unwrap().writers, Writers::Exclusive);
        let map = Users::Map("/etc/byway/users,lab".into());
        assert_eq!(parse_share(r"h=/srv,users=map:/etc/byway/users\,lab").unwrap().users, map);
        assert_eq!(parse_share("h=/srv,users=trust").unwrap().users, Users::Trust);
        assert_eq!(parse_share("h=/srv,users=trust-root").unwrap().users, Users::TrustRoot);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (text, column, said) in [
            ("/srv", 1, "the name is missing"),
            ("home=", 6, "write NAME=DIR"),
            ("a/b=/srv", 1, "use only"),
            ("home=/srv,rw", 11, "unknown option `rw` of a share"),
            ("home=/srv,users=alice", 11, "write users=squash:UID"),
            ("home=/srv,users=map:", 11, "users=map:FILE"),
            ("home=/srv,users=squash:4294967295", 11, "invalid users"),
            ("home=/srv,writers=me", 11, "write writers=local"),
            ("home=/srv,ro,ro", 14, "given twice"),
            ("home=/srv,ro=1", 11, "no value"),
        ] {
            let error = parse_share(text).unwrap_err();
            assert_eq!(error.column, column, "{text}: {error}");
            assert!(error.to_string().contains(said), "{text}: {error}");
        }
    }
}
