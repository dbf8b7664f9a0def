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
use tonic::Status;

use self::capability::capability;

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

/// The places of which a volume or snapshot has to be in one; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places(Vec<Topology>);

impl Places {
    /// Whether a thing at `place` is where the caller wants it; a thing without a place is everywhere.
    pub(crate) fn accept(&self, place: Option<&Topology>) -> bool {
        place.is_none_or(|place| self.0.iter().any(|wanted| place.satisfies(wanted)))
    }

    /// Whether this place is named and no other.
    pub(crate) fn are_only(&self, place: &Topology) -> bool {
        self.0.iter().all(|wanted| wanted == place)
    }
}

impl std::fmt::Display for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let places: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&places.join(" or "))
    }
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

/// The places asked for; none where the requirement is left out or empty.
fn places(requirement: Option<v1::TopologyRequirement>) -> Parsed<Option<Places>> {
    let requirement = requirement.unwrap_or_default();
    let named = |field, topologies: Vec<v1::Topology>| {
        topologies.into_iter().map(move |place| topology(field, place))
    };
    // The preferred places are among the requisite ones wherever both are given.
    let places: Vec<Topology> = named("accessibility_requirements.requisite", requirement.requisite)
        .chain(named("accessibility_requirements.preferred", requirement.preferred))
        .collect::<Parsed<_>>()?;
    Ok(Some(Places(places)).filter(|places| !places.0.is_empty()))
}
