//! The entries of the ledger, and how they are written.

use std::{fmt::Display, path::PathBuf, str::FromStr};

use berth_core::{Access, AccessMode, VolumeCapability, VolumeId};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// How far an effect has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// Begun, not known to be complete.
    Mounting,
    /// The mount is complete.
    Mounted,
    /// The mount is being undone.
    Unmounting,
    /// Taken down to be brought up again at once, wherever it is published: no caller got the answer that it is gone.
    Remounting,
}

/// A volume prepared on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    #[serde(with = "text")]
    pub(crate) volume: VolumeId,
    pub(crate) path: PathBuf,
    #[serde(with = "CapabilityRecord")]
    pub(crate) capability: VolumeCapability,
    pub(crate) phase: Phase,
}

/// A volume at a workload's target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    /// What the backend calls it.
    #[serde(with = "text")]
    pub(crate) volume: VolumeId,
    /// What Kubernetes calls it, where it is an inline volume.
    #[serde(with = "optional_text", default, skip_serializing_if = "Option::is_none")]
    pub(crate) handle: Option<VolumeId>,
    pub(crate) target: PathBuf,
    #[serde(with = "CapabilityRecord")]
    pub(crate) capability: VolumeCapability,
    pub(crate) read_only: bool,
    pub(crate) phase: Phase,
}

impl Published {
    /// Whether the caller who names it so means this volume.
    pub(crate) fn is(&self, id: &VolumeId) -> bool {
        self.handle.as_ref().unwrap_or(&self.volume) == id
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "VolumeCapability")]
struct CapabilityRecord {
    #[serde(with = "AccessRecord")]
    access: Access,
    #[serde(with = "ModeRecord")]
    mode: AccessMode,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Access", rename_all = "snake_case")]
enum AccessRecord {
    Block,
    Mount { fs_type: String, flags: Vec<String>, group: Option<u32> },
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "AccessMode", rename_all = "snake_case")]
pub(crate) enum ModeRecord {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    MultiNodeReaderOnly,
    MultiNodeSingleWriter,
    MultiNodeMultiWriter,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
}

/// An id as its text.
mod text {
    use super::{Deserialize, Deserializer, Display, Error, FromStr, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// An id that may be missing.
mod optional_text {
    use super::{Deserialize, Deserializer, Display, Error, FromStr, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "serde hands over a reference to the field")]
    pub(super) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().map(ToString::to_string).serialize(serializer)
    }

    pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}
