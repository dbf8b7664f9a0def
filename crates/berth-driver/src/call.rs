//! Requests as this driver understands them.
//!
//! Each message becomes a struct by `TryFrom`, in the types of `berth-core`; what is missing, malformed or too large
//! is refused here, in words that name the field, and nowhere else. Secrets are taken over only where a backend may
//! need them, and in a type that does not show them.

mod capability;
pub(crate) mod node;
pub(crate) mod snapshots;
#[cfg(test)]
mod tests;
pub(crate) mod volumes;

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use berth_core::{CapacityRange, InvalidId, Topology};
use berth_csi::v1;
use tonic::{Request, Status};

use self::capability::capability;
use crate::{Context, Secrets, TopologyRequirement};

/// The spec's limit for the keys and values of one map, and for all mount flags.
const MAX_MAP: usize = 4 << 10;
/// The kernel's limit for a path, without the NUL at its end.
const MAX_PATH: usize = 4095;
/// Longer than any token a backend gives.
const MAX_TOKEN: usize = 2 << 10;
/// The spec's limit for a string field that has no other.
const MAX_STRING: usize = 128;

/// Why a request can never work; travels as INVALID_ARGUMENT.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Invalid(String);

impl From<Invalid> for Status {
    fn from(invalid: Invalid) -> Self {
        Self::invalid_argument(invalid.0)
    }
}

impl Invalid {
    fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

type Parsed<T> = std::result::Result<T, Invalid>;

/// Which part of a listing is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The token of the page before.
    pub(crate) after: Option<String>,
    /// The most entries; no limit if `None`.
    pub(crate) most: Option<usize>,
}

/// The call that a request makes, and what comes with it.
pub(crate) fn read<R: Message, C: TryFrom<R, Error = Invalid>>(request: Request<R>) -> Parsed<(Context, C)> {
    let deadline = request.extensions().get::<berth_csi::Deadline>().map(|deadline| deadline.0.into_std());
    let mut message = request.into_inner();
    let secrets = Secrets::from(message.take_secrets());
    let context = match message.about() {
        Some(about) => Context::new(deadline, secrets, about),
        None => Context::new(deadline, secrets, &BTreeMap::new()),
    };
    Ok((context, C::try_from(message)?))
}

/// What messages have in common.
pub(crate) trait Message {
    fn take_secrets(&mut self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// The map in which Kubernetes says for whom it asks.
    fn about(&self) -> Option<&BTreeMap<String, String>> {
        None
    }
}

macro_rules! messages {
    ($($request:ident $(with $secrets:ident $(and $about:ident)?)?,)*) => {$(
        impl Message for v1::$request {
            $(
                fn take_secrets(&mut self) -> BTreeMap<String, String> {
                    std::mem::take(&mut self.$secrets)
                }

                $(fn about(&self) -> Option<&BTreeMap<String, String>> {
                    Some(&self.$about)
                })?
            )?
        }
    )*};
}
messages! {
    CreateVolumeRequest with secrets and parameters,
    DeleteVolumeRequest with secrets,
    ControllerPublishVolumeRequest with secrets and volume_context,
    ControllerUnpublishVolumeRequest with secrets,
    ValidateVolumeCapabilitiesRequest with secrets and volume_context,
    ListVolumesRequest,
    ControllerListVolumeHealthRequest,
    ControllerGetVolumeHealthRequest,
    GetCapacityRequest,
    CreateSnapshotRequest with secrets and parameters,
    DeleteSnapshotRequest with secrets,
    ListSnapshotsRequest with secrets,
    GetSnapshotRequest with secrets,
    ControllerExpandVolumeRequest with secrets,
    ControllerGetVolumeRequest,
    ControllerModifyVolumeRequest with secrets,
    CreateVolumeGroupSnapshotRequest with secrets and parameters,
    DeleteVolumeGroupSnapshotRequest with secrets,
    GetVolumeGroupSnapshotRequest with secrets,
    GetMetadataAllocatedRequest with secrets,
    GetMetadataDeltaRequest with secrets,
    NodeStageVolumeRequest with secrets and volume_context,
    NodeUnstageVolumeRequest,
    NodePublishVolumeRequest with secrets and volume_context,
    NodeUnpublishVolumeRequest,
    NodeGetVolumeStatsRequest,
    NodeGetVolumeHealthRequest,
    NodeExpandVolumeRequest with secrets,
}

fn missing(field: &str) -> Invalid {
    Invalid(format!("{field} is missing"))
}

/// An id or a name.
fn id<T: FromStr<Err = InvalidId>>(field: &str, text: &str) -> Parsed<T> {
    text.parse().map_err(|error: InvalidId| match error {
        InvalidId::Empty(_) => missing(field),
        InvalidId::TooLong { length, limit, .. } => {
            Invalid(format!("{field} is {length} bytes long, the limit is {limit}"))
        }
        InvalidId::ControlCharacter(_) => Invalid(format!("{field} holds a control character")),
    })
}

/// An id or a name that may be left out.
fn optional_id<T: FromStr<Err = InvalidId>>(field: &str, text: &str) -> Parsed<Option<T>> {
    if text.is_empty() { Ok(None) } else { id(field, text).map(Some) }
}

/// A map of the spec's size.
fn map(field: &str, map: BTreeMap<String, String>) -> Parsed<BTreeMap<String, String>> {
    let size: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if size > MAX_MAP {
        return Err(Invalid(format!(
            "{field} holds {size} bytes of keys and values, the limit is {MAX_MAP}"
        )));
    }
    Ok(map)
}

fn capacity_range(range: Option<v1::CapacityRange>) -> Parsed<CapacityRange> {
    let range = range.unwrap_or_default();
    CapacityRange::new(range.required_bytes, range.limit_bytes)
        .map_err(|error| Invalid(format!("capacity_range: {error}")))
}

/// An absolute path without `.`, `..` and empty components, below the root.
fn absolute_path(field: &str, text: &str) -> Parsed<PathBuf> {
    let path = any_path(field, text)?;
    if !path.is_absolute() {
        return Err(Invalid(format!("{field} {text:?} is not an absolute path")));
    }
    if path.components().any(|component| component == Component::ParentDir) {
        return Err(Invalid(format!("{field} {text:?} leads through \"..\"; give the path without it")));
    }
    if path == Path::new("/") {
        return Err(Invalid(format!("{field} is the root directory")));
    }
    Ok(path)
}

/// An absolute path that may be left out.
fn optional_path(field: &str, text: &str) -> Parsed<Option<PathBuf>> {
    if text.is_empty() { Ok(None) } else { absolute_path(field, text).map(Some) }
}

/// A path to be looked up among those known, where a path that leads nowhere is simply not known.
fn any_path(field: &str, text: &str) -> Parsed<PathBuf> {
    if text.is_empty() {
        return Err(missing(field));
    }
    if text.len() > MAX_PATH {
        return Err(Invalid(format!("{field} is {} bytes long, the limit is {MAX_PATH}", text.len())));
    }
    if text.contains('\0') {
        return Err(Invalid(format!("{field} holds a NUL character")));
    }
    Ok(Path::new(text).components().collect())
}

fn listing(max_entries: i32, starting_token: String) -> Parsed<Listing> {
    if starting_token.len() > MAX_TOKEN {
        let length = starting_token.len();
        return Err(Invalid(format!("starting_token is {length} bytes long, the limit is {MAX_TOKEN}")));
    }
    let after = Some(starting_token).filter(|token| !token.is_empty());
    Ok(Listing { after, most: at_most("max_entries", max_entries)? })
}

/// A limit, where zero means none.
fn at_most(field: &str, limit: i32) -> Parsed<Option<usize>> {
    let limit = usize::try_from(limit).map_err(|_| Invalid(format!("{field} is negative ({limit})")))?;
    Ok(Some(limit).filter(|limit| *limit > 0))
}

fn topology(field: &str, topology: v1::Topology) -> Parsed<Topology> {
    map(field, topology.segments).map(Topology)
}

/// The topologies asked for; none where the requirement is left out or empty.
fn topology_requirement(message: Option<v1::TopologyRequirement>) -> Parsed<Option<TopologyRequirement>> {
    let message = message.unwrap_or_default();
    let all = |field, topologies: Vec<v1::Topology>| {
        topologies.into_iter().map(|segments| topology(field, segments)).collect::<Parsed<Vec<_>>>()
    };
    let requisite = all("accessibility_requirements.requisite", message.requisite)?;
    let preferred = all("accessibility_requirements.preferred", message.preferred)?;
    let is_empty = requisite.is_empty() && preferred.is_empty();
    Ok(Some(TopologyRequirement { requisite, preferred }).filter(|_| !is_empty))
}
