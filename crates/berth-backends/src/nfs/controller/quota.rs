//! Project quotas, where the driver runs on the server's host: a directory volume is a project of the exported
//! filesystem, and its size is the project's limit.
//!
//! A project's number is written down on the share, in a file of its own that only one can make, before anything gets
//! it; so no two volumes have the same, whoever makes them. What a crash left unset is set when the call is repeated.

use std::{collections::BTreeMap, path::PathBuf};

use berth_host::{
    path::Dir,
    quota::{self, ProjectUsage},
};
use berth_nfs::{Change, Create, Kind, Share};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;

use super::{
    NfsController, blocking,
    id::{PRIVATE, ShareName, VolumeRef},
    parse_share,
    record::{self, RecordDir, VolumeRecord, nonce, now},
    shares::failed,
    volumes::key,
};
use crate::{Amounts, Error, Result, Usage};

/// Projects that people number by hand are below.
const FIRST: u32 = 1 << 30;
/// How many numbers are tried that others have.
const ATTEMPTS: u32 = 100;
/// A number of no volume is free again after this time: one that is being made has none yet.
const ABANDONED: u64 = 60 * 60;

/// Shares whose directories are on this machine.
#[derive(Debug, Default)]
pub(super) struct Exports(BTreeMap<ShareName, Export>);

/// What a server exports, seen from inside.
#[derive(Debug)]
pub(super) struct Export {
    root: PathBuf,
    /// It is what the server gives by that name.
    confirmed: OnceCell<()>,
}

/// What is recorded of a project.
#[derive(Debug, Serialize, Deserialize)]
struct ProjectRecord {
    /// The id of the volume whose directory is the project.
    volume: String,
    /// In seconds since 1970.
    since: u64,
}

impl Exports {
    /// Reads `server:/share=/directory`; a directory whose filesystem has no project quotas is refused.
    pub(super) fn new(texts: &[String]) -> Result<Self> {
        let mut exports = BTreeMap::new();
        for text in texts {
            let invalid = |why: &str| {
                Error::Invalid(format!(
                    "--export-root {text:?}: {why}; it says which directory of this machine a share is, such as \
                     nfs.example.com:/export=/srv/nfs"
                ))
            };
            let (share, root) = text.rsplit_once("=/").ok_or_else(|| invalid("there is no \"=/\""))?;
            let root = PathBuf::from(format!("/{root}"));
            let dir = Dir::open(&root).map_err(|error| invalid(&error.sentence()))?;
            quota::check(&dir).map_err(|error| invalid(&error.to_string()))?;
            if quota::project(&dir)?.inherited {
                // A directory cannot be renamed into one that hands on another project.
                return Err(invalid("the directory hands on a project of its own, and has to hand on none"));
            }
            exports.insert(parse_share(share)?, Export { root, confirmed: OnceCell::new() });
        }
        Ok(Self(exports))
    }
}

impl Export {
    /// Runs what touches the disk, with the directory `below` the share.
    async fn on<T: Send + 'static>(
        &self,
        below: &str,
        work: impl FnOnce(&Dir) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (root, below) = (self.root.clone(), below.to_owned());
        blocking(move || {
            let root = Dir::open(&root)?;
            if below.is_empty() { work(&root) } else { work(&root.dir(&below)?) }
        })
        .await
    }

    /// Makes what is made below a directory from now on count, up to so many bytes; 0 is any number.
    async fn limit(&self, below: &str, project: u32, bytes: u64) -> Result<()> {
        self.on(below, move |dir| {
            quota::set_limit(dir, project, Some(bytes).filter(|bytes| *bytes > 0))?;
            quota::set_project(dir, project)?;
            Ok(())
        })
        .await
    }
}

impl NfsController {
    /// The local side of a share, if it has one; the first time it is proved to be that.
    async fn export(&self, share: &Share, name: &ShareName) -> Result<Option<&Export>> {
        let Some(export) = self.0.exports.0.get(name) else { return Ok(None) };
        export.confirmed.get_or_try_init(|| confirm(export, share, name)).await?;
        Ok(Some(export))
    }

    /// Gives a volume that is to be made a project, on record before anything has it.
    pub(super) async fn allot(
        &self,
        share: &Share,
        volume: &VolumeRef,
        record: &mut VolumeRecord,
    ) -> Result<()> {
        let Some(export) = self.export(share, &volume.share).await? else { return Ok(()) };
        let drawer = RecordDir::Projects.ensure(share).await?;
        let digest = Sha256::digest(&record.id);
        let first = u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]) % FIRST;
        for attempt in 0..ATTEMPTS {
            let id = FIRST + (first + attempt) % FIRST;
            let wanted = ProjectRecord { volume: record.id.clone(), since: now() };
            if !record::write_new(share, &drawer, &id.to_string(), &wanted).await? {
                let known = record::read_in::<ProjectRecord>(share, &drawer, &id.to_string()).await?;
                if known.is_none_or(|known| known.volume != record.id) {
                    continue;
                }
            } else if export.on("", move |dir| Ok(quota::usage(dir, id)?)).await? != ProjectUsage::default() {
                // Somebody has it who writes down nothing here.
                record::remove_in(share, &drawer, &id.to_string()).await?;
                continue;
            }
            record.project = Some(id);
            return Ok(());
        }
        Err(Error::Exhausted(format!("{ATTEMPTS} projects in a row are somebody else's on {}", volume.share)))
    }

    /// Makes sure that what is in a directory of the share counts for a volume, up to its size.
    pub(super) async fn limit(
        &self,
        share: &Share,
        volume: &VolumeRef,
        below: &str,
        record: &VolumeRecord,
    ) -> Result<()> {
        let Some(project) = record.project else { return Ok(()) };
        match self.export(share, &volume.share).await? {
            Some(export) => export.limit(below, project, record.capacity).await,
            None => Err(Error::Precondition(format!(
                "the volume has a project quota, which only a driver on the server's host can change, with \
                 --export-root {}=DIRECTORY",
                volume.share
            ))),
        }
    }

    /// Takes a volume's limit away and its project's number back.
    pub(super) async fn free_project(&self, share: &Share, volume: &VolumeRef) -> Result<()> {
        let known = record::read::<VolumeRecord>(share, RecordDir::Volumes, &key(volume)).await?;
        let Some(project) = known.and_then(|record| record.project) else { return Ok(()) };
        if let Some(export) = self.export(share, &volume.share).await? {
            return self.forget_project(share, export, project).await;
        }
        tracing::warn!(volume.id = %volume, "a deleted volume's project quota stays: there is no --export-root");
        Ok(())
    }

    async fn forget_project(&self, share: &Share, export: &Export, project: u32) -> Result<()> {
        export.on("", move |dir| Ok(quota::set_limit(dir, project, None).map(drop)?)).await?;
        record::remove(share, RecordDir::Projects, &project.to_string()).await
    }

    /// Takes back numbers of volumes that never came to be.
    pub(super) async fn sweep_projects(&self, share: &Share, name: &ShareName) -> Result<()> {
        let Some(export) = self.export(share, name).await? else { return Ok(()) };
        for id in RecordDir::Projects.keys(share).await? {
            let Some(record) = record::read::<ProjectRecord>(share, RecordDir::Projects, &id).await? else {
                continue;
            };
            let (Ok(project), Ok(volume)) = (id.parse(), VolumeRef::parse(&record.volume)) else { continue };
            let known = record::read::<VolumeRecord>(share, RecordDir::Volumes, &key(&volume)).await?;
            let is_used = known.is_some_and(|known| known.project == Some(project));
            if !is_used && record.since.saturating_add(ABANDONED) < now() {
                self.forget_project(share, export, project).await?;
            }
        }
        Ok(())
    }

    /// What a volume takes by its project's count, if it is a project here.
    pub(in crate::nfs) async fn quota_usage(&self, id: &str) -> Result<Option<Usage>> {
        let Ok(volume) = VolumeRef::parse(id) else { return Ok(None) };
        let Some(export) = self.0.exports.0.get(&volume.share) else { return Ok(None) };
        export
            .on(volume.dir.as_str(), |dir| {
                let project = quota::project(dir)?;
                if project.id < FIRST || !project.inherited {
                    return Ok(None);
                }
                let (used, space) = (quota::usage(dir, project.id)?, dir.free_space()?);
                let total = used.limit.unwrap_or(space.total);
                let available = total.saturating_sub(used.bytes).min(space.available);
                let inodes = Amounts {
                    total: used.inodes + space.inodes_free,
                    used: used.inodes,
                    available: space.inodes_free,
                };
                Ok(Some(Usage {
                    bytes: Amounts { total, used: used.bytes, available },
                    inodes: Some(inodes),
                }))
            })
            .await
    }
}

/// Proves that a directory is what the server gives as a share: a new file of the one is in the other.
async fn confirm(export: &Export, share: &Share, name: &ShareName) -> Result<()> {
    let (private, _) = share.make_dirs(PRIVATE, &Change::mode(0o700)).await.map_err(failed)?;
    let file = format!("here-{}", nonce());
    share.create(&private.handle, &file, Create::New, &Change::mode(0o600)).await.map_err(failed)?;
    let path = format!("{PRIVATE}/{file}");
    let seen = export.on("", move |dir| Ok(dir.exists(&path).unwrap_or(false))).await;
    match share.remove(&private.handle, &file).await {
        Err(error) if error.kind() != Kind::NotFound => return Err(failed(error)),
        _ => {}
    }
    if seen? {
        return Ok(());
    }
    Err(Error::Precondition(format!(
        "--export-root says that {name} is {} on this machine, and it is not: what is made on the share does not appear \
         there",
        export.root.display()
    )))
}
