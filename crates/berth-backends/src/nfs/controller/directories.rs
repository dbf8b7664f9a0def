//! Which volumes use which directories of a share, so that the deletion of one never removes the data of another.
//!
//! A class may give two volumes one directory, or directories that lie in each other: `subDir:
//! ${pvc.metadata.namespace}`. So every volume of a class with a `subDir` has an entry in an index on the share, below the
//! first component of its directory: directories that overlap have it in common, and an operation reads the entries of
//! one component, however many volumes there are. A volume without `subDir` has a directory of its own name, and gets an
//! entry only if it overlaps with another's.
//!
//! Shares may lie in each other (`/export` and `/export/team`), and each has its own records: those of shares around this one and on
//! the way to a directory are read, too, and those of shares in the directory that the controller knows.
//!
//! Guarantees, among the volumes that have a record on such a share:
//! - A volume whose directory overlaps with another's is made only if its class says `shared: "true"`.
//! - A directory is removed or renamed only when no other volume uses it, a part of it, or a directory around it.
//! - A directory that was there before its volume was made is not removed: volumes without a record, such as those that
//!   csi-driver-nfs made, may use it.
//!
//! An entry is written before anything is made, and removed after everything else, so that a crash leaves at most an
//! entry of a volume that its caller makes or deletes again. An entry whose directory is gone, because csi-driver-nfs deleted
//! the volume, is removed when another volume asks for the directory.

use std::{collections::BTreeSet, fmt};

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use berth_nfs::{Change, Share};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::{Deserialize, Serialize};

use super::{
    NfsController,
    id::{ShareName, SubPath, VolumeRef},
    record::{self, RecordDir, VolumeRecord, key_of, keys_among, names_in, now},
    shares::{failed, find_dir},
    volumes::key,
};
use crate::{Error, Parameters, Result};

/// The record that says that every volume that needs an entry has one.
const COMPLETE: &str = "complete";
/// How many records are read at once.
const AT_ONCE: usize = 16;
/// A record without a directory is of a volume that is being made, or else, after this many seconds, of one whose directory
/// somebody removed who writes no records.
const MAKING: i64 = 3600;

/// An entry of the index: a volume uses a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DirectoryUse {
    /// The id of the volume, which names the directory.
    id: String,
    /// The claim that it was made for, as `namespace/name`, where the call said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<String>,
    /// Whether the directory was there before the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    existing: bool,
}

#[derive(Serialize, Deserialize)]
struct CompleteRecord {
    /// In seconds since 1970.
    since: u64,
}

/// Who uses a volume's directory.
#[derive(Debug, Default)]
pub(super) struct DirectoryUsers {
    own: Option<DirectoryUse>,
    others: Vec<DirectoryUse>,
    /// Whether there are shares around this one, or in it near the directory.
    nested: bool,
}

impl DirectoryUse {
    fn new(id: &str, parameters: &Parameters) -> Self {
        let get = |name: &str| parameters.get(&format!("{KUBERNETES_PARAMETER_PREFIX}{name}"));
        let claim = get("pvc/namespace").zip(get("pvc/name"));
        let claim = claim.map(|(namespace, name)| format!("{namespace}/{name}"));
        Self { id: id.to_owned(), claim, existing: false }
    }

    fn dir(&self) -> Option<SubPath> {
        VolumeRef::parse(&self.id).ok().map(|volume| volume.dir)
    }

    fn is_on(&self, share: &ShareName) -> bool {
        VolumeRef::parse(&self.id).is_ok_and(|volume| volume.share == *share)
    }
}

impl fmt::Display for DirectoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.claim {
            Some(claim) => write!(f, "claim {claim} (volume {})", self.id),
            None => write!(f, "volume {}", self.id),
        }
    }
}

impl DirectoryUsers {
    /// The others, as a sentence names them.
    fn others(&self) -> String {
        const NAMED: usize = 3;
        let mut named: Vec<String> = self.others.iter().take(NAMED).map(ToString::to_string).collect();
        if self.others.len() > NAMED {
            named.push(format!("{} more", self.others.len() - NAMED));
        }
        named.join(", ")
    }

    /// Why the directory has to stay when the volume is deleted, if it has to.
    pub(super) fn reason_to_keep(&self) -> Option<String> {
        if !self.others.is_empty() {
            return Some(format!("it is also used by {}", self.others()));
        }
        let existing = self.own.as_ref().is_some_and(|own| own.existing);
        existing.then(|| "it was there before the volume was created, and others may use it".to_owned())
    }
}

impl NfsController {
    /// Enters a volume that is to be made as a user of its directory. One that overlaps with another's is refused unless
    /// `shared`. True if shares lie in each other here: their volumes have no turn in common, so [`Self::confirm_directory`]
    /// has to look again once the volume has a record, which the others see.
    pub(super) async fn enter_directory(
        &self,
        share: &Share,
        volume: &VolumeRef,
        parameters: &Parameters,
        shared: bool,
    ) -> Result<bool> {
        if !has_template(volume) {
            let mut users = self.directory_users(share, volume).await?;
            if !users.others.is_empty() {
                self.refuse_unless(shared, share, volume, &mut users).await?;
                enter(share, &volume.dir, &key(volume), &DirectoryUse::new(&volume.to_string(), parameters))
                    .await?;
            }
            return Ok(users.nested);
        }
        let _turn = self.0.shares.take_turn(&volume.share).await;
        let mut users = self.directory_users(share, volume).await?;
        self.refuse_unless(shared, share, volume, &mut users).await?;
        if users.own.is_some() {
            return Ok(users.nested);
        }
        let mut entry = DirectoryUse::new(&volume.to_string(), parameters);
        let made_by = |other: &DirectoryUse| {
            !other.existing
                && other.is_on(&volume.share)
                && other.dir().is_some_and(|dir| dir.contains(&volume.dir))
        };
        entry.existing =
            find_dir(share, volume.dir.as_str()).await?.is_some() && !users.others.iter().any(made_by);
        // Also those without a `subDir`, which had no entry as long as nobody shared their directories. Volumes of other shares
        // have their entries there.
        for other in users.others.iter().filter(|other| other.is_on(&volume.share)) {
            enter(share, &volume.dir, &key_of(&other.id), other).await?;
        }
        enter(share, &volume.dir, &key(volume), &entry).await?;
        Ok(users.nested)
    }

    /// Refuses a directory that a volume of another share has got meanwhile. Of two that are made at once each has written
    /// its record before it looks here, so at least one finds the other.
    pub(super) async fn confirm_directory(
        &self,
        share: &Share,
        volume: &VolumeRef,
        shared: bool,
    ) -> Result<()> {
        let mut users = self.directory_users(share, volume).await?;
        users.others.retain(|other| !other.is_on(&volume.share));
        self.refuse_unless(shared, share, volume, &mut users).await
    }

    /// Refuses a directory that others use, unless it is to be shared. Users whose own directory is gone are forgotten.
    async fn refuse_unless(
        &self,
        shared: bool,
        share: &Share,
        volume: &VolumeRef,
        users: &mut DirectoryUsers,
    ) -> Result<()> {
        if shared || users.others.is_empty() {
            return Ok(());
        }
        let mut others = Vec::new();
        for other in std::mem::take(&mut users.others) {
            if !self.forget_removed(share, &volume.share, &other).await? {
                others.push(other);
            }
        }
        users.others = others;
        if users.others.is_empty() {
            return Ok(());
        }
        Err(Error::Precondition(format!(
            "directory {:?} on {} overlaps with that of {}: give each volume a directory of its own, such as subDir: \
             ${{pvc.metadata.namespace}}/${{pvc.metadata.name}}, or say shared: \"true\" in the class",
            volume.dir.as_str(),
            volume.share,
            users.others()
        )))
    }

    /// Removes the record and the entry of a volume whose directory is gone, if it is not just being made; false if it stays.
    async fn forget_removed(&self, share: &Share, name: &ShareName, other: &DirectoryUse) -> Result<bool> {
        let Ok(gone) = VolumeRef::parse(&other.id) else { return Ok(false) };
        if gone.share != *name || find_dir(share, gone.dir.as_str()).await?.is_some() {
            return Ok(false);
        }
        let latest = i64::try_from(now()).unwrap_or(i64::MAX).saturating_sub(MAKING);
        let written = record::written(share, RecordDir::Volumes, &key(&gone)).await?;
        if written.is_none_or(|written| written > latest) {
            return Ok(false);
        }
        tracing::info!(volume.id = other.id, "a volume whose directory somebody removed is forgotten");
        self.free_project(share, &gone).await?;
        record::remove(share, RecordDir::Volumes, &key(&gone)).await?;
        let entry = DirectoryUsers { own: Some(other.clone()), ..DirectoryUsers::default() };
        self.leave_directory(share, &gone, &entry).await?;
        Ok(true)
    }

    /// Removes a volume's entry.
    pub(super) async fn leave_directory(
        &self,
        share: &Share,
        volume: &VolumeRef,
        users: &DirectoryUsers,
    ) -> Result<()> {
        if users.own.is_none() {
            return Ok(());
        }
        let Some(group) = find_dir(share, &group_path(&volume.dir)).await? else { return Ok(()) };
        record::remove_in(share, &group.handle, &key(volume)).await?;
        let Some(index) = RecordDir::Directories.find(share).await? else { return Ok(()) };
        // Only if it is empty.
        let _ = share.remove_dir(&index.handle, key_of(volume.dir.first())).await;
        Ok(())
    }

    /// Who uses a volume's directory, a part of it, or a directory around it.
    pub(super) async fn directory_users(&self, share: &Share, volume: &VolumeRef) -> Result<DirectoryUsers> {
        self.users_among(share, &volume.share, &volume.dir, Some(volume)).await
    }

    /// The volumes that use a directory which is not a volume's own, a part of it, or a directory around it.
    pub(super) async fn volumes_in(
        &self,
        share: &Share,
        name: &ShareName,
        dir: &SubPath,
    ) -> Result<Option<String>> {
        let users = self.users_among(share, name, dir, None).await?;
        Ok((!users.others.is_empty()).then(|| users.others()))
    }

    async fn users_among(
        &self,
        share: &Share,
        name: &ShareName,
        dir: &SubPath,
        own: Option<&VolumeRef>,
    ) -> Result<DirectoryUsers> {
        self.complete_index(share, name).await?;
        let own_key = own.map(key);
        let is_own = |key: &str| own_key.as_deref() == Some(key);
        let mut users = DirectoryUsers::default();
        let group = entries(share, dir).await?;
        let is_known = !group.is_empty();
        for (key, entry) in group {
            if is_own(&key) {
                users.own = Some(entry);
            } else if entry.dir().is_some_and(|other| other.overlaps(dir)) {
                users.others.push(entry);
            }
        }
        let (nested, in_nested) = self.users_in_nested_shares(share, name, dir).await?;
        users.nested = nested;
        users.others.extend(in_nested);
        // A directory without entries may be that of a volume without `subDir`, which needs none by itself.
        let is_another = own.is_none_or(has_template);
        if is_another && !is_known && find_dir(share, dir.first()).await?.is_some() {
            for (key, other, parameters) in records(share, None).await? {
                if !is_own(&key) && other.dir.overlaps(dir) {
                    users.others.push(DirectoryUse::new(&other.to_string(), &parameters));
                }
            }
        }
        Ok(users)
    }

    /// The volumes of shares that lie in each other with this one, whose directories overlap with `dir`. Each share has its records in
    /// its root: those of a share below are reached through this one, those of a share around it through that one. Also whether
    /// there are such shares.
    async fn users_in_nested_shares(
        &self,
        share: &Share,
        name: &ShareName,
        dir: &SubPath,
    ) -> Result<(bool, Vec<DirectoryUse>)> {
        let mut users = Vec::new();
        let below = self.0.shares.below(name);
        let mut nested = below.iter().any(|root| root.overlaps(dir));
        let known = below.into_iter().filter(|root| root != dir && dir.contains(root));
        for root in dir.with_parents().into_iter().chain(known) {
            let found = records(share, Some(&root)).await?;
            nested |= !found.is_empty();
            for (_, other, parameters) in found {
                if root.join(&other.dir).overlaps(dir) {
                    users.push(DirectoryUse::new(&other.to_string(), &parameters));
                }
            }
        }
        for (outer, below) in self.0.shares.around(name).await {
            let Some(around) = self.0.shares.open_around(&outer, name).await? else { continue };
            nested = true;
            let dir = below.join(dir);
            for (_, other, parameters) in records(&around, None).await? {
                if other.dir.overlaps(&dir) {
                    users.push(DirectoryUse::new(&other.to_string(), &parameters));
                }
            }
        }
        Ok((nested, users))
    }

    /// Makes the entries of volumes that were made before there was an index.
    async fn complete_index(&self, share: &Share, name: &ShareName) -> Result<()> {
        if self.0.shares.is_indexed(name) {
            return Ok(());
        }
        if record::read::<CompleteRecord>(share, RecordDir::Directories, COMPLETE).await?.is_none() {
            let records = records(share, None).await?;
            if !records.is_empty() {
                let shareable = records.iter().filter(|(_, volume, _)| has_template(volume));
                let firsts: BTreeSet<&str> = shareable.map(|(_, volume, _)| volume.dir.first()).collect();
                for (key, volume, parameters) in &records {
                    if firsts.contains(volume.dir.first()) {
                        let entry = DirectoryUse::new(&volume.to_string(), parameters);
                        enter(share, &volume.dir, key, &entry).await?;
                    }
                }
                record::write(share, RecordDir::Directories, COMPLETE, &CompleteRecord { since: now() })
                    .await?;
            }
        }
        self.0.shares.note_indexed(name);
        Ok(())
    }
}

/// Whether the class gave the volume's directory a name, so that others may have the same.
fn has_template(volume: &VolumeRef) -> bool {
    !volume.uuid.is_empty()
}

/// Where the entries of directories are that begin as this one does.
fn group_path(dir: &SubPath) -> String {
    format!("{}/{}", RecordDir::Directories.path(), key_of(dir.first()))
}

async fn entries(share: &Share, dir: &SubPath) -> Result<Vec<(String, DirectoryUse)>> {
    let Some(group) = find_dir(share, &group_path(dir)).await? else { return Ok(Vec::new()) };
    let keys = keys_among(names_in(share, &group.handle).await?);
    let keys = keys.into_iter().filter(|key| !key.starts_with('.'));
    let entries = stream::iter(keys).map(async |key| {
        let entry = record::read_in::<DirectoryUse>(share, &group.handle, &key).await?;
        Ok::<_, Error>(entry.map(|entry| (key, entry)))
    });
    let entries: Vec<Option<(String, DirectoryUse)>> = entries.buffered(AT_ONCE).try_collect().await?;
    Ok(entries.into_iter().flatten().collect())
}

/// Writes an entry unless there is one.
async fn enter(share: &Share, dir: &SubPath, key: &str, entry: &DirectoryUse) -> Result<()> {
    RecordDir::Directories.ensure(share).await?;
    let (group, _) = share.make_dirs(&group_path(dir), &Change::mode(0o700)).await.map_err(failed)?;
    if record::write_new(share, &group.handle, key, entry).await?
        || record::read_in::<DirectoryUse>(share, &group.handle, key).await?.is_some()
    {
        return Ok(());
    }
    // Whoever wrote it did not get to its end.
    record::write_in(share, &group.handle, key, entry).await
}

/// Every volume that has a record on the share, or on the share whose root is a directory of this one.
async fn records(share: &Share, root: Option<&SubPath>) -> Result<Vec<(String, VolumeRef, Parameters)>> {
    let path = RecordDir::Volumes.path();
    let path = root.map_or_else(|| path.clone(), |root| format!("{}/{path}", root.as_str()));
    let Some(drawer) = find_dir(share, &path).await? else { return Ok(Vec::new()) };
    let keys = keys_among(names_in(share, &drawer.handle).await?);
    let keys = keys.into_iter().filter(|key| !key.starts_with('.'));
    let records = stream::iter(keys).map(async |key| {
        let record = record::read_in::<VolumeRecord>(share, &drawer.handle, &key).await?;
        Ok::<_, Error>(record.and_then(|record| {
            VolumeRef::parse(&record.id).ok().map(|volume| (key, volume, record.parameters))
        }))
    });
    let records: Vec<Option<_>> = records.buffered(AT_ONCE).try_collect().await?;
    Ok(records.into_iter().flatten().collect())
}
