//! What is mounted here, for the calls that do not say it again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A volume that is staged, or what is at a target. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub(super) id: String,
    /// What a person wrote about the volume.
    pub(super) context: BTreeMap<String, String>,
    pub(super) fs_type: String,
    pub(super) read_only: bool,
    /// The device of a volume that is attached.
    pub(super) device: String,
    /// The size that the volume was grown to, where it was.
    pub(super) size: Option<u64>,
}
