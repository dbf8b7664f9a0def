//! What the driver has to remember, on the share itself: `.berth/` in its root.
//!
//! ```text
//! .berth/volumes/<key>.json     size, class and source of a volume
//! .berth/snapshots/<key>.json   of what a snapshot was taken, and when; its archive is at <name>/<source>.tar.gz
//! .berth/archived/<key>.json    since when an archived directory is one
//! .berth/directories/<first>/<key>.json   that a volume uses a directory; by the directory's first component
//! .berth/projects/<id>.json     which volume a project of the server's filesystem belongs to
//! .berth/incoming/              being built; renamed into place when whole
//! .berth/trash/                 being removed, in the background
//! ```
//! A key is a digest of the id. Records add to what ids say; what csi-driver-nfs made has none, and works without. They
//! are on the share so that every replica sees them, now and after it was moved to another node.

use berth_core::hex;
use berth_nfs::{Change, Cookie, Create, Entry, Handle, Kind, Share};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use super::{
    id::PRIVATE,
    parameters::VolumeKind,
    shares::{failed, find_dir, found},
};
use crate::{ContentSource, Error, Parameters, Result};

/// How often a record is read again that is replaced all the time.
const TRIES: u32 = 10;
/// Longer than any record.
const MAX_RECORD: u32 = 64 << 10;
const ENDING: &str = ".json";

/// What is kept in one directory of `.berth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordDir {
    /// The records of volumes, by the digest of their ids.
    Volumes,
    /// The records of snapshots, by the digest of their names.
    Snapshots,
    /// Records of archived directories.
    Archived,
    /// Which volumes use which directories.
    Directories,
    /// The records of projects, by their numbers.
    Projects,
    /// What is being built.
    Incoming,
    /// What is being removed.
    Trash,
}

/// What is recorded of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VolumeRecord {
    pub(super) id: String,
    pub(super) capacity: u64,
    #[serde(default)]
    pub(super) parameters: Parameters,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) source: Option<SourceRecord>,
    /// The number of its project, where its size is a quota of the server's filesystem (`quota.rs`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) project: Option<u32>,
}

/// Where a volume's first content came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SourceRecord {
    /// The id of the snapshot.
    Snapshot(String),
    /// The id of the volume.
    Volume(String),
}

/// What is recorded of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SnapshotRecord {
    pub(super) id: String,
    /// The id of the volume it was taken of.
    pub(super) source: String,
    /// In seconds since 1970.
    pub(super) created: u64,
    /// Whether the archive is compressed.
    pub(super) compressed: bool,
    /// What it was taken of.
    #[serde(default)]
    pub(super) kind: VolumeKind,
    /// The size of the volume, if that is an image, whose file may be longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) capacity: Option<u64>,
    /// What is known of the archive since it is whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) archive: Option<ArchiveRecord>,
}

/// An archive that is whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveRecord {
    /// The length of what is packed.
    pub(super) unpacked: u64,
    /// The digest of the archive's bytes, in hexadecimal.
    pub(super) sha256: String,
}

/// An archived directory's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchivedRecord {
    /// The path of the directory below the share.
    pub(super) dir: String,
    /// In seconds since 1970.
    pub(super) since: u64,
}

impl From<&ContentSource> for SourceRecord {
    fn from(source: &ContentSource) -> Self {
        match source {
            ContentSource::Snapshot(id) => Self::Snapshot(id.to_string()),
            ContentSource::Volume(id) => Self::Volume(id.to_string()),
        }
    }
}

impl SourceRecord {
    /// As the services know it; nothing where the record makes no sense.
    pub(super) fn to_source(&self) -> Option<ContentSource> {
        match self {
            Self::Snapshot(id) => id.parse().ok().map(ContentSource::Snapshot),
            Self::Volume(id) => id.parse().ok().map(ContentSource::Volume),
        }
    }
}

impl RecordDir {
    pub(super) fn path(self) -> String {
        let name = match self {
            Self::Volumes => "volumes",
            Self::Snapshots => "snapshots",
            Self::Archived => "archived",
            Self::Directories => "directories",
            Self::Projects => "projects",
            Self::Incoming => "incoming",
            Self::Trash => "trash",
        };
        format!("{PRIVATE}/{name}")
    }

    /// The directory, if it is there.
    pub(super) async fn find(self, share: &Share) -> Result<Option<Entry>> {
        find_dir(share, &self.path()).await
    }

    /// The directory, made if it is not there.
    pub(super) async fn ensure(self, share: &Share) -> Result<Handle> {
        if let Some(drawer) = self.find(share).await? {
            return Ok(drawer.handle);
        }
        // Nobody but the driver has any business here.
        share.make_dirs(PRIVATE, &Change::mode(0o700)).await.map_err(failed)?;
        let (drawer, _) = share.make_dirs(&self.path(), &Change::mode(0o700)).await.map_err(failed)?;
        Ok(drawer.handle)
    }

    /// The names in it, sorted.
    pub(super) async fn names(self, share: &Share) -> Result<Vec<String>> {
        let Some(drawer) = self.find(share).await? else { return Ok(Vec::new()) };
        names_in(share, &drawer.handle).await
    }

    /// The keys of the records in it, sorted.
    pub(super) async fn keys(self, share: &Share) -> Result<Vec<String>> {
        let names = self.names(share).await?;
        Ok(keys_among(names).into_iter().filter(|key| !key.starts_with('.')).collect())
    }
}

/// The names in a directory, sorted.
pub(super) async fn names_in(share: &Share, dir: &Handle) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut next = Some(Cookie::default());
    while let Some(cookie) = next {
        let page = share.read_dir(dir, cookie).await.map_err(failed)?;
        names.extend(page.entries.iter().filter_map(|entry| entry.name.to_str().map(str::to_owned)));
        next = page.next;
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// The keys of those names that are records.
pub(super) fn keys_among(mut names: Vec<String>) -> Vec<String> {
    names.retain_mut(|name| match name.strip_suffix(ENDING) {
        Some(key) => {
            name.truncate(key.len());
            true
        }
        None => false,
    });
    names
}

/// The key of an id.
pub(super) fn key_of(id: &str) -> String {
    hex(&Sha256::digest(id)[..16])
}

/// A name that nobody else takes.
pub(super) fn nonce() -> String {
    use std::{
        hash::{BuildHasher as _, RandomState},
        sync::atomic::{AtomicU64, Ordering},
    };
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}", RandomState::new().hash_one((std::process::id(), count)))
}

/// Reads a record; one that is not there, or was not written to its end, is `None`.
pub(super) async fn read<T: DeserializeOwned>(
    share: &Share,
    drawer: RecordDir,
    key: &str,
) -> Result<Option<T>> {
    let Some(dir) = drawer.find(share).await? else { return Ok(None) };
    read_in(share, &dir.handle, key).await
}

/// As [`read`], in a directory that is open.
pub(super) async fn read_in<T: DeserializeOwned>(
    share: &Share,
    dir: &Handle,
    key: &str,
) -> Result<Option<T>> {
    let name = format!("{key}{ENDING}");
    let mut tries = 1;
    loop {
        let Some(file) = found(share.lookup(dir, &name).await)? else { return Ok(None) };
        match content(share, &file.handle).await {
            // Another was put in its place after it was found.
            Err(error) if error.kind() == Kind::Stale && tries < TRIES => tries += 1,
            text => return Ok(found(text)?.and_then(|text| serde_json::from_slice(&text).ok())),
        }
    }
}

/// When a record was written, in seconds since 1970 by the server's clock, if it is there.
pub(super) async fn written(share: &Share, drawer: RecordDir, key: &str) -> Result<Option<i64>> {
    let Some(drawer) = drawer.find(share).await? else { return Ok(None) };
    written_in(share, &drawer.handle, key).await
}

/// As [`written`], in a directory that is open.
pub(super) async fn written_in(share: &Share, dir: &Handle, key: &str) -> Result<Option<i64>> {
    let file = found(share.lookup(dir, format!("{key}{ENDING}")).await)?;
    Ok(file.map(|file| file.attributes.modified.seconds))
}

async fn content(share: &Share, file: &Handle) -> berth_nfs::Result<Vec<u8>> {
    let mut text = Vec::new();
    loop {
        let offset = u64::try_from(text.len()).unwrap_or(u64::MAX);
        let (bytes, is_end) = share.read(file, offset, MAX_RECORD).await?;
        text.extend_from_slice(&bytes);
        if is_end || bytes.is_empty() || text.len() > usize::try_from(MAX_RECORD).unwrap_or(usize::MAX) {
            return Ok(text);
        }
    }
}

/// Writes a record, on disk when it returns; who reads meanwhile sees the old one, the new one or none.
pub(super) async fn write<T: Serialize>(
    share: &Share,
    drawer: RecordDir,
    key: &str,
    record: &T,
) -> Result<()> {
    write_in(share, &drawer.ensure(share).await?, key, record).await
}

/// As [`write`], in a directory that is open.
pub(super) async fn write_in<T: Serialize>(share: &Share, dir: &Handle, key: &str, record: &T) -> Result<()> {
    if write_new(share, dir, key, record).await? {
        return Ok(());
    }
    replace(share, dir, &format!("{key}{ENDING}"), &to_json(record)?).await
}

/// Writes a record unless there is one, and returns whether it did; of several who try at once, one does.
pub(super) async fn write_new<T: Serialize>(
    share: &Share,
    dir: &Handle,
    key: &str,
    record: &T,
) -> Result<bool> {
    let name = format!("{key}{ENDING}");
    match share.create(dir, &name, Create::New, &Change::mode(0o600)).await {
        // A reader takes what is not whole for nothing, which it is until this returns.
        Ok(file) => match write_all(share, &file.handle, &to_json(record)?).await {
            Ok(()) => Ok(true),
            // Another put its own in this one's place, or removed it.
            Err(error) if error.kind() == Kind::Stale => Ok(false),
            Err(error) => {
                // A server that went away cannot be asked now; the call that is repeated replaces it.
                if !matches!(error.kind(), Kind::Unreachable | Kind::Interrupted) {
                    let _ = share.remove(dir, &name).await;
                }
                Err(failed(error))
            }
        },
        Err(error) if error.kind() == Kind::Exists => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn to_json<T: Serialize>(record: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(record).map_err(|error| Error::State(format!("write a record: {error}")))
}

async fn replace(share: &Share, dir: &Handle, name: &str, text: &[u8]) -> Result<()> {
    let aside = format!(".{name}.{}", nonce());
    let file = share.create(dir, &aside, Create::New, &Change::mode(0o600)).await.map_err(failed)?;
    let replaced = match write_all(share, &file.handle, text).await {
        Ok(()) => share.rename(dir, &aside, dir, name).await,
        Err(error) => Err(error),
    };
    if replaced.is_err() {
        let _ = share.remove(dir, &aside).await;
    }
    replaced.map_err(failed)
}

async fn write_all(share: &Share, file: &Handle, text: &[u8]) -> berth_nfs::Result<()> {
    let mut rest = Bytes::copy_from_slice(text);
    let mut offset = 0;
    while !rest.is_empty() {
        let written = share.write(file, offset, rest.clone(), true).await?;
        offset += u64::from(written);
        rest = rest.slice(usize::try_from(written).unwrap_or(usize::MAX).min(rest.len())..);
    }
    Ok(())
}

/// Removes a record; one that is not there is removed already.
pub(super) async fn remove(share: &Share, drawer: RecordDir, key: &str) -> Result<()> {
    let Some(dir) = drawer.find(share).await? else { return Ok(()) };
    remove_in(share, &dir.handle, key).await
}

/// As [`remove`], in a directory that is open.
pub(super) async fn remove_in(share: &Share, dir: &Handle, key: &str) -> Result<()> {
    found(share.remove(dir, format!("{key}{ENDING}")).await).map(drop)
}

/// The time, in seconds since 1970.
pub(super) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
