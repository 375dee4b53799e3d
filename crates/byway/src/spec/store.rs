//! The part of a specification that names a volume's store.

use std::path::PathBuf;

use byway_service::block::spec::StoreSpec;

use super::text::Text;
use super::{SpecError, SpecFault, fault};
use crate::limits::{
    FAULT_DEPTH_MAX, SECTOR_BYTES, STRIPE_CHUNK_BYTES_MAX, STRIPE_CHUNK_BYTES_MIN, STRIPE_PATHS_MAX, VOLUME_BYTES_MAX,
};
use crate::units::parse_size;

pub(super) fn parse(text: &Text, depth: usize) -> Result<StoreSpec, SpecError> {
    if let Some((scheme, rest)) = text.split_once(':')
        && scheme.is_word()
    {
        return match scheme.value().as_str() {
            "mem" => Ok(StoreSpec::Memory { bytes: volume_bytes(&rest)? }),
            "null" => Ok(StoreSpec::Null { bytes: volume_bytes(&rest)? }),
            "stripe" => stripe(&rest),
            "fault" if depth == FAULT_DEPTH_MAX => {
                Err(text.error(SpecFault::TooManyFaults("faults are nested too deep; put the rules into one fault:")))
            }
            "fault" => fault::parse(&rest, depth),
            other => Err(scheme.error(SpecFault::Scheme(other.to_owned()))),
        };
    }
    Ok(StoreSpec::Path(path(text, "NAME=PATH")?))
}

fn path(text: &Text, usage: &'static str) -> Result<PathBuf, SpecError> {
    if text.is_empty() { Err(text.error(SpecFault::NoPath(usage))) } else { Ok(PathBuf::from(text.value())) }
}

fn volume_bytes(text: &Text) -> Result<u64, SpecError> {
    let bytes = parse_size(&text.value()).map_err(|fault| text.error(fault.into()))?;
    if bytes == 0 || bytes % SECTOR_BYTES != 0 || bytes > VOLUME_BYTES_MAX {
        let nearest = bytes.clamp(1, VOLUME_BYTES_MAX).next_multiple_of(SECTOR_BYTES);
        return Err(text.error(SpecFault::VolumeBytes { bytes, nearest }));
    }
    Ok(bytes)
}

fn stripe(text: &Text) -> Result<StoreSpec, SpecError> {
    let no_chunk = || text.error(SpecFault::NoChunk);
    let (chunk, rest) = text.split_once(':').ok_or_else(no_chunk)?;
    let (key, size) = chunk.split_once('=').ok_or_else(no_chunk)?;
    if key.value() != "chunk" {
        return Err(no_chunk());
    }
    let chunk_bytes = parse_size(&size.value()).map_err(|fault| size.error(fault.into()))?;
    if !chunk_bytes.is_power_of_two() || !(STRIPE_CHUNK_BYTES_MIN..=STRIPE_CHUNK_BYTES_MAX).contains(&chunk_bytes) {
        return Err(size.error(SpecFault::Chunk(chunk_bytes)));
    }
    let parts = rest.split(':');
    if !(2..=STRIPE_PATHS_MAX).contains(&parts.len()) {
        return Err(rest.error(SpecFault::StripePaths(parts.len())));
    }
    let paths = parts.iter().map(|part| path(part, "stripe:chunk=64K:PATH:PATH")).collect::<Result<_, _>>()?;
    Ok(StoreSpec::Stripe { chunk_bytes, paths })
}
