//! The options after the store, separated by commas.

use byway_fabric::access::AccessError;
use byway_service::block::spec::{StoreSpec, VolumeSpec};

use super::text::Text;
use super::{SpecError, SpecFault};
use crate::config::parse_stage;
use crate::limits::{DESCRIPTION_BYTES_MAX, RATE_BYTES_MIN};
use crate::units::parse_size;

/// What to write for the one format there is.
pub(crate) const FORMAT_USAGE: &str = "volumes are served byte by byte; convert other images (qemu-img convert -O raw), and write format=raw or leave it out";

pub(super) fn apply(volume: &mut VolumeSpec, parts: impl Iterator<Item = Text>) -> Result<(), SpecError> {
    let (mut tls, mut staged, mut shared) = (None, None, None);
    for part in parts {
        let (key, value) = match part.split_once('=') {
            Some((key, value)) => (key.value(), Some(value)),
            None => (part.value(), None),
        };
        match key.as_str() {
            "ro" => flag(&mut volume.read_only, "ro", &part, value.as_ref())?,
            "direct" => flag(&mut volume.direct, "direct", &part, value.as_ref())?,
            "shared" => {
                flag(&mut volume.shared, "shared", &part, value.as_ref())?;
                shared = Some(part.clone());
            }
            "format" => {
                let raw = value.as_ref().is_some_and(|value| value.value() == "raw");
                if !raw {
                    return Err(part.error(SpecFault::Value(FORMAT_USAGE)));
                }
                if std::mem::replace(&mut volume.raw, true) {
                    return Err(part.error(SpecFault::Twice("format")));
                }
            }
            "tls" => {
                let required = value.as_ref().is_some_and(|value| value.value() == "required");
                if !required {
                    return Err(part.error(SpecFault::Value("tls has one value; write tls=required or leave it out")));
                }
                once(&mut tls, true, "tls", &part)?;
            }
            "stage" => {
                let usage = || part.error(SpecFault::Value("write stage=device or stage=memory"));
                let stage = value.as_ref().and_then(|value| parse_stage(&value.value()).ok()).ok_or_else(usage)?;
                once(&mut volume.stage, stage, "stage", &part)?;
                staged = Some(part.clone());
            }
            "rate" => {
                let rate = rate(&part, value.as_ref())?;
                once(&mut volume.rate_bytes_per_second, rate, "rate", &part)?;
            }
            "access" => {
                let value =
                    value.ok_or_else(|| part.error(SpecFault::Value("write access=CLIENT or access=CLIENT:ro")))?;
                let more = value.value().parse().map_err(|fault: AccessError| value.error(fault.into()))?;
                volume.access.add(more).map_err(|fault| value.error(fault.into()))?;
            }
            "description" => {
                let text = value.ok_or_else(|| part.error(SpecFault::Value("write description=TEXT")))?.value();
                if text.len() > DESCRIPTION_BYTES_MAX {
                    return Err(part.error(SpecFault::Description));
                }
                once(&mut volume.description, text, "description", &part)?;
            }
            _ => return Err(part.error(SpecFault::Option(key))),
        }
        if volume.direct {
            check_direct(&volume.store).map_err(|fault| part.error(fault))?;
        }
    }
    if let Some(part) = staged {
        check_stage(volume).map_err(|fault| part.error(fault))?;
    }
    if let Some(part) = shared {
        check_shared(volume).map_err(|fault| part.error(fault))?;
    }
    volume.tls_required = tls.is_some();
    Ok(())
}

/// Whether a volume that says where it is staged is one that is staged.
pub(crate) fn check_stage(volume: &VolumeSpec) -> Result<(), SpecFault> {
    if volume.stage.is_none() || volume.direct { Ok(()) } else { Err(SpecFault::Stage) }
}

/// Gives the rate back, if it is one.
pub(crate) fn check_rate(bytes: u64) -> Result<u64, SpecFault> {
    if bytes < RATE_BYTES_MIN { Err(SpecFault::Rate(bytes)) } else { Ok(bytes) }
}

/// Whether a volume that is shared keeps to what lies on the device.
pub(crate) fn check_shared(volume: &VolumeSpec) -> Result<(), SpecFault> {
    let is_cached = !volume.direct && !volume.store.paths().is_empty();
    if volume.shared && is_cached { Err(SpecFault::SharedCached) } else { Ok(()) }
}

/// Whether a store can be read past the page cache.
pub(crate) fn check_direct(store: &StoreSpec) -> Result<(), SpecFault> {
    match store {
        StoreSpec::Path(_) | StoreSpec::Stripe { .. } => Ok(()),
        StoreSpec::Memory { .. } => Err(SpecFault::DirectStore("memory")),
        StoreSpec::Null { .. } => Err(SpecFault::DirectStore("null")),
        StoreSpec::Fault { inner, .. } => check_direct(inner),
    }
}

pub(super) fn once<T>(slot: &mut Option<T>, value: T, name: &'static str, part: &Text) -> Result<(), SpecError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(part.error(SpecFault::Twice(name))),
    }
}

pub(super) fn flag(flag: &mut bool, name: &'static str, part: &Text, value: Option<&Text>) -> Result<(), SpecError> {
    if value.is_some() {
        return Err(part.error(SpecFault::Value("ro, direct and shared have no value; write the word alone")));
    }
    if std::mem::replace(flag, true) {
        return Err(part.error(SpecFault::Twice(name)));
    }
    Ok(())
}

fn rate(part: &Text, value: Option<&Text>) -> Result<u64, SpecError> {
    let usage = SpecFault::Value("write rate=SIZE, in bytes per second, for example rate=100M/s");
    let Some(value) = value else {
        return Err(part.error(usage));
    };
    let text = value.value();
    let bytes = parse_size(text.strip_suffix("/s").unwrap_or(&text)).map_err(|fault| value.error(fault.into()))?;
    check_rate(bytes).map_err(|fault| value.error(fault))
}
