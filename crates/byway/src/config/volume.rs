//! A volume of the configuration's file, as a table.

use byway_fabric::access::AccessError;
use byway_service::block::spec::{VolumeName, VolumeSpec};
use serde::Deserialize;

use super::{ConfigError, parse_stage, value};
use crate::{limits, spec, units};

/// A volume as a table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeForm {
    pub(super) store: String,
    #[serde(default)]
    pub(super) read_only: bool,
    #[serde(default)]
    pub(super) direct: bool,
    pub(super) stage: Option<String>,
    #[serde(default)]
    pub(super) tls_required: bool,
    pub(super) rate: Option<String>,
    pub(super) access: Option<Vec<String>>,
    #[serde(default)]
    pub(super) shared: bool,
    pub(super) format: Option<String>,
    pub(super) description: Option<String>,
}

impl VolumeForm {
    pub(super) fn volume(&self, name: &str, place: &str) -> Result<VolumeSpec, ConfigError> {
        let at = |key: &str| format!("{place}volume.{name}{key}");
        let volume_name = VolumeName::new(name).map_err(|error| value(at(""), error))?;
        let store = spec::parse_store(&self.store).map_err(|error| value(at(".store"), error))?;
        if self.direct {
            spec::check_direct(&store).map_err(|error| value(at(".direct"), error))?;
        }
        let mut volume = VolumeSpec::new(volume_name, store);
        (volume.read_only, volume.direct, volume.shared) = (self.read_only, self.direct, self.shared);
        if let Some(stage) = &self.stage {
            volume.stage = Some(parse_stage(stage).map_err(|error| value(at(".stage"), error))?);
            spec::check_stage(&volume).map_err(|error| value(at(".stage"), error))?;
        }
        volume.raw = match self.format.as_deref() {
            None => false,
            Some("raw") => true,
            Some(_) => return Err(value(at(".format"), spec::FORMAT_USAGE)),
        };
        spec::check_shared(&volume).map_err(|error| value(at(".shared"), error))?;
        if let Some(clients) = &self.access {
            // An empty list would join to nothing, which is refused: it must not let everybody in.
            volume.access = clients.join(",").parse().map_err(|error: AccessError| value(at(".access"), error))?;
        }
        volume.tls_required = self.tls_required;
        if let Some(rate) = &self.rate {
            let bytes =
                units::parse_size(rate.strip_suffix("/s").unwrap_or(rate)).map_err(|e| value(at(".rate"), e))?;
            volume.rate_bytes_per_second = Some(spec::check_rate(bytes).map_err(|error| value(at(".rate"), error))?);
        }
        if self.description.as_ref().is_some_and(|text| text.len() > limits::DESCRIPTION_BYTES_MAX) {
            return Err(value(at(".description"), spec::SpecFault::Description));
        }
        volume.description.clone_from(&self.description);
        Ok(volume)
    }
}

// By value so that it can stand in `map_err`.
