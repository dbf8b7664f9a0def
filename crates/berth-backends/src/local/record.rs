//! What is written down about a volume, a snapshot and a group, and how they are named.
//!
//! An id is a hash of the name the caller gave, so the same request always means the same id and the same directory,
//! whatever happened in between, and no byte of a caller's name ever becomes part of a path.

use std::{collections::BTreeMap, fmt, sync::Arc, time::SystemTime};

use berth_core::{AccessKind, AccessMode, NodeId};
use berth_host::format::Filesystem;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use super::kind::Kind;
use crate::{Attached, Parameters, image};

/// What the id of a volume starts with.
pub(super) const VOLUME: &str = "vol";
/// What the id of a snapshot starts with.
pub(super) const SNAPSHOT: &str = "snap";
/// What the id of a group of snapshots starts with.
pub(super) const GROUP: &str = "group";

/// The part of an id after its prefix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key([u8; 16]);

impl Key {
    /// The key of what is called `name` among things of the same `prefix`.
    pub(super) fn of(prefix: &str, name: &str) -> Self {
        let digest = Sha256::new().chain_update(prefix).chain_update([0]).chain_update(name).finalize();
        Self(std::array::from_fn(|index| digest[index]))
    }

    /// Every byte the same, as a bound of ranges.
    pub(super) const fn filled(byte: u8) -> Self {
        Self([byte; 16])
    }

    /// The key of one volume's snapshot in a group.
    pub(super) fn of_member(group: Key, volume: Key) -> Self {
        Self::of(SNAPSHOT, &format!("{group}/{volume}"))
    }

    /// Reads an id; `None` for one that this driver never gave out.
    pub(super) fn parse(prefix: &str, id: &str) -> Option<Self> {
        Self::from_hex(id.strip_prefix(prefix)?.strip_prefix('-')?)
    }

    /// Reads the key alone, as it stands in directory names.
    pub(super) fn from_hex(hex: &str) -> Option<Self> {
        let lowercase = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if hex.len() != 32 || !hex.bytes().all(lowercase) {
            return None;
        }
        u128::from_str_radix(hex, 16).ok().map(|number| Self(number.to_be_bytes()))
    }

    /// The id with its prefix, parsed into one of the id types.
    pub(super) fn id<T: std::str::FromStr<Err: fmt::Debug>>(self, prefix: &str) -> T {
        format!("{prefix}-{self}").parse().expect("an id of this driver is a valid id")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let hex = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        Self::from_hex(&hex).ok_or_else(|| serde::de::Error::custom("not 32 hexadecimal digits"))
    }
}

/// Where a volume's first content came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Source {
    Snapshot(Key),
    Volume(Key),
}

/// One attachment, as bookkept with `--attach`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AttachmentRecord {
    pub(super) node: Box<str>,
    pub(super) read_only: bool,
    #[serde(with = "access_mode")]
    pub(super) mode: AccessMode,
}

impl AttachmentRecord {
    pub(super) fn new(node: &NodeId, read_only: bool, mode: AccessMode) -> Self {
        Self { node: node.as_str().into(), read_only, mode }
    }

    pub(super) fn attached(&self) -> Option<Attached> {
        let node: NodeId = self.node.parse().ok()?;
        Some(Attached { node, read_only: self.read_only, mode: Some(self.mode) })
    }
}

/// Access modes are written by name. Records of older versions hold the position in the list below.
mod access_mode {
    use berth_core::AccessMode;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    const NAMES: [(AccessMode, &str); 7] = [
        (AccessMode::SingleNodeWriter, "SingleNodeWriter"),
        (AccessMode::SingleNodeReaderOnly, "SingleNodeReaderOnly"),
        (AccessMode::MultiNodeReaderOnly, "MultiNodeReaderOnly"),
        (AccessMode::MultiNodeSingleWriter, "MultiNodeSingleWriter"),
        (AccessMode::MultiNodeMultiWriter, "MultiNodeMultiWriter"),
        (AccessMode::SingleNodeSingleWriter, "SingleNodeSingleWriter"),
        (AccessMode::SingleNodeMultiWriter, "SingleNodeMultiWriter"),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(super) fn serialize<S: Serializer>(mode: &AccessMode, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES.iter().find(|(known, _)| known == mode).map_or("", |(_, name)| name);
        serializer.serialize_str(name)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AccessMode, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Written {
            Position(usize),
            Name(String),
        }
        let found = match Written::deserialize(deserializer)? {
            Written::Position(position) => NAMES.get(position),
            Written::Name(name) => NAMES.iter().find(|(_, known)| *known == name),
        };
        found.map(|(mode, _)| *mode).ok_or_else(|| D::Error::custom("no such access mode"))
    }
}

/// What is written down about a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeRecord {
    pub(super) name: Box<str>,
    /// The size that was asked for; an image may be longer.
    pub(super) size: u64,
    pub(super) kind: Kind,
    #[serde(with = "AccessRecord")]
    pub(super) access: AccessKind,
    /// The filesystem asked for, on an image.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "filesystem")]
    pub(super) filesystem: Option<Filesystem>,
    #[serde(default, skip_serializing_if = "is_empty")]
    pub(super) parameters: Arc<Parameters>,
    #[serde(default, skip_serializing_if = "is_empty")]
    pub(super) mutable: Arc<Parameters>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) source: Option<Source>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) attachments: Vec<AttachmentRecord>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) ephemeral: bool,
}

impl VolumeRecord {
    /// The bytes that the volume may occupy: its size, or the length of its image.
    pub(super) fn length(&self) -> u64 {
        length(self.kind, self.access, self.size, self.filesystem)
    }
}

impl SnapshotRecord {
    /// The length of the snapshot's image, or its size.
    pub(super) fn length(&self) -> u64 {
        length(self.kind, self.access, self.size, self.filesystem)
    }
}

fn length(kind: Kind, access: AccessKind, size: u64, filesystem: Option<Filesystem>) -> u64 {
    match kind {
        Kind::Image => image::length(size, filesystem.filter(|_| access == AccessKind::Mount)),
        Kind::Btrfs | Kind::Dir => size,
    }
}

/// What is written down about a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotRecord {
    pub(super) name: Box<str>,
    pub(super) source: Key,
    pub(super) size: u64,
    pub(super) kind: Kind,
    #[serde(with = "AccessRecord")]
    pub(super) access: AccessKind,
    #[serde(default, skip_serializing_if = "Option::is_none", with = "filesystem")]
    pub(super) filesystem: Option<Filesystem>,
    pub(super) created: SystemTime,
    /// Files changed while they were copied, and the class accepts that (`consistency: best-effort`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) torn: bool,
    /// Not written with the snapshot itself: members are written inside their group's record.
    #[serde(skip)]
    pub(super) group: Option<Key>,
}

/// What is written down about snapshots taken together: one record, so that they come and go together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct GroupRecord {
    pub(super) name: Box<str>,
    pub(super) created: SystemTime,
    pub(super) members: BTreeMap<Key, SnapshotRecord>,
}

fn is_empty(parameters: &Arc<Parameters>) -> bool {
    parameters.is_empty()
}

/// [`AccessKind`] and [`Filesystem`] belong to crates that know nothing of records; these are their twins.
#[derive(Serialize, Deserialize)]
#[serde(remote = "AccessKind", rename_all = "lowercase")]
enum AccessRecord {
    Block,
    Mount,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Filesystem", rename_all = "lowercase")]
enum FilesystemRecord {
    Ext4,
    Xfs,
    Btrfs,
}

/// An optional [`Filesystem`], which serde's remote twins cannot do by themselves.
mod filesystem {
    use super::{Deserialize, Deserializer, Filesystem, FilesystemRecord, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Twin(#[serde(with = "FilesystemRecord")] Filesystem);

    #[expect(
        clippy::ref_option,
        clippy::trivially_copy_pass_by_ref,
        reason = "the shape that serde's `with` calls"
    )]
    pub(super) fn serialize<S: Serializer>(
        fs: &Option<Filesystem>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        fs.map(Twin).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Filesystem>, D::Error> {
        Ok(Option::<Twin>::deserialize(deserializer)?.map(|twin| twin.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_back_and_nothing_else_is() {
        let key = Key::of(VOLUME, "pvc-1");
        let id = format!("vol-{key}");
        assert_eq!(Key::parse(VOLUME, &id), Some(key));
        for wrong in ["", "vol-", "vol-../../etc", "snap-00", &id.to_uppercase(), &format!("{id}0"), &id[1..]]
        {
            assert_eq!(Key::parse(VOLUME, wrong), None, "{wrong:?}");
        }
        assert_ne!(Key::of(VOLUME, "a"), Key::of(SNAPSHOT, "a"));
    }

    #[test]
    fn a_record_is_read_back_as_written() {
        let record = VolumeRecord {
            name: "n".into(),
            size: 1,
            kind: Kind::Image,
            access: AccessKind::Block,
            filesystem: Some(Filesystem::Xfs),
            parameters: Arc::new(BTreeMap::from([("kind".into(), "image".into())])),
            mutable: Arc::default(),
            source: Some(Source::Snapshot(Key::of(SNAPSHOT, "s"))),
            attachments: vec![AttachmentRecord::new(
                &"n1".parse().unwrap(),
                true,
                AccessMode::MultiNodeReaderOnly,
            )],
            ephemeral: false,
        };
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<VolumeRecord>(&json).unwrap(), record);
        let older = json.replace(r#""MultiNodeReaderOnly""#, "2");
        assert_ne!(older, json);
        assert_eq!(serde_json::from_str::<VolumeRecord>(&older).unwrap(), record);
        let unknown = json.replace("MultiNodeReaderOnly", "Tape");
        assert!(serde_json::from_str::<VolumeRecord>(&unknown).is_err());
        let least = r#"{"name":"n","size":1,"kind":"dir","access":"mount"}"#;
        assert_eq!(serde_json::from_str::<VolumeRecord>(least).unwrap().filesystem, None);
    }
}
