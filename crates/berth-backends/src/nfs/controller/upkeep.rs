//! What goes on behind the answers: removing what was deleted, and archives that are old.

use std::time::Duration;

use berth_nfs::{Change, Cookie, Handle, Kind, Share};

use super::{
    NfsController,
    id::{ShareName, SubPath, VolumeRef},
    record::{self, ArchivedRecord, RecordDir, key_of, nonce, now},
    shares::{Reach, failed},
    volumes::prune,
};
use crate::{Error, Result};

/// What was built aside and never finished is nobody's after this time.
const ABANDONED: Duration = Duration::from_hours(24 * 7);
/// How many archived directories of one name there may be.
const MAX_ARCHIVES: u32 = 1000;

impl NfsController {
    /// Reaches a share; the first time, what earlier processes left there is removed in the background, and so is
    /// later what a server left undone by going away.
    pub(super) async fn visit(&self, name: &ShareName, reach: &Reach) -> Result<Share> {
        let share = self.0.shares.open(name, reach).await?;
        if self.0.shares.is_to_be_swept(name) {
            let (this, name, share) = (self.clone(), name.clone(), share.clone());
            self.0.tasks.spawn(async move {
                if let Err(error) = this.sweep(&share, &name).await {
                    tracing::warn!(share = %name, %error, "what was deleted before is not all removed yet");
                    this.0.shares.note_leftovers(&name);
                }
            });
        }
        Ok(share)
    }

    async fn sweep(&self, share: &Share, name: &ShareName) -> Result<()> {
        if let Some(trash) = RecordDir::Trash.find(share).await? {
            for name in RecordDir::Trash.names(share).await? {
                share.remove_tree(&trash.handle, &name).await.map_err(failed)?;
            }
        }
        self.remove_abandoned(share).await?;
        self.sweep_projects(share, name).await?;
        self.remove_expired(share, name).await
    }

    async fn remove_abandoned(&self, share: &Share) -> Result<()> {
        let Some(incoming) = RecordDir::Incoming.find(share).await? else { return Ok(()) };
        let oldest = i64::try_from(now().saturating_sub(ABANDONED.as_secs())).unwrap_or(0);
        let mut next = Some(Cookie::default());
        while let Some(cookie) = next {
            let page = share.read_dir(&incoming.handle, cookie).await.map_err(failed)?;
            for entry in page.entries.iter().filter(|entry| entry.attributes.changed.seconds < oldest) {
                share.remove_tree(&incoming.handle, &entry.name).await.map_err(failed)?;
            }
            next = page.next;
        }
        Ok(())
    }

    /// Takes a directory out of sight at once, and removes it in the background.
    pub(super) async fn discard(
        &self,
        share: &Share,
        volume: &VolumeRef,
        parent: &Handle,
        name: &str,
    ) -> Result<()> {
        let in_place = async || share.remove_tree(parent, name).await.map_err(failed);
        let trash = match RecordDir::Trash.ensure(share).await {
            Ok(trash) => trash,
            // A full disk is one on which things are deleted.
            Err(Error::Exhausted(_)) => return in_place().await,
            Err(error) => return Err(error),
        };
        let aside = nonce();
        match share.rename(parent, name, &trash, &aside).await {
            Ok(()) => {}
            Err(error) if error.kind() == Kind::NotFound => return Ok(()),
            // Another filesystem below the share, no room for a name, or a server that moves no directories.
            Err(error)
                if matches!(
                    error.kind(),
                    Kind::Invalid | Kind::Unsupported | Kind::Io | Kind::NoSpace | Kind::Quota
                ) =>
            {
                return in_place().await;
            }
            Err(error) => {
                // Perhaps it was done.
                self.0.shares.note_leftovers(&volume.share);
                return Err(failed(error));
            }
        }
        let (this, share, name) = (self.clone(), share.clone(), volume.share.clone());
        self.0.tasks.spawn(async move {
            if let Err(error) = share.remove_tree(&trash, &aside).await.map_err(failed) {
                tracing::warn!(share = %name, %error, "a deleted directory is not all removed yet");
                this.0.shares.note_leftovers(&name);
            }
        });
        Ok(())
    }

    /// Gives a volume's directory the name of an archive; returns why it has to keep its own, if it has to.
    pub(super) async fn archive(
        &self,
        share: &Share,
        volume: &VolumeRef,
        parent: &Handle,
    ) -> Result<Option<String>> {
        self.remove_expired(share, &volume.share).await?;
        for attempt in 0..MAX_ARCHIVES {
            let archived = volume.dir.archived(attempt);
            if let Some(users) = self.volumes_in(share, &volume.share, &archived).await? {
                return Ok(Some(format!(
                    "{:?}, where it would be archived, is used by {users}",
                    archived.as_str()
                )));
            }
            let above = match archived.parent() {
                None => share.root(),
                Some(above) => {
                    share.make_dirs(above.as_str(), &Change::mode(0o755)).await.map_err(failed)?.0.handle
                }
            };
            // A rename would replace a directory that happens to be empty.
            match share.lookup(&above, archived.name()).await {
                Ok(_)
                    if attempt == 0
                        && self.0.config.replace_archived
                        && !holds_others(&archives(share).await?, &archived) =>
                {
                    self.discard(share, volume, &above, archived.name()).await?;
                }
                Ok(_) => continue,
                Err(error) if error.kind() == Kind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
            let record = ArchivedRecord { dir: archived.to_string(), since: now() };
            record::write(share, RecordDir::Archived, &key_of(archived.as_str()), &record).await?;
            share.rename(parent, volume.dir.name(), &above, archived.name()).await.map_err(failed)?;
            return Ok(None);
        }
        let name = volume.dir.archived(0);
        Err(Error::Exhausted(format!(
            "there are {MAX_ARCHIVES} archives called {:?}: remove some",
            name.as_str()
        )))
    }

    /// Removes archives that were kept long enough, the inner ones first. One that holds another, or that a volume uses,
    /// stays until it does not any more.
    async fn remove_expired(&self, share: &Share, name: &ShareName) -> Result<()> {
        let Some(keep) = self.0.config.keep_archived else { return Ok(()) };
        let mut archives = archives(share).await?;
        archives.sort_by(|(_, one, _), (_, other, _)| other.as_str().cmp(one.as_str()));
        let expired = archives.iter().filter(|(_, _, since)| since.saturating_add(keep.as_secs()) <= now());
        let expired: Vec<(String, SubPath)> =
            expired.map(|(key, dir, _)| (key.clone(), dir.clone())).collect();
        for (key, dir) in expired {
            if holds_others(&archives, &dir) || self.volumes_in(share, name, &dir).await?.is_some() {
                continue;
            }
            let above = match dir.parent() {
                None => Ok(share.root()),
                Some(parent) => share.open_dir(parent.as_str()).await.map(|entry| entry.handle),
            };
            if let Ok(above) = above {
                share.remove_tree(&above, dir.name()).await.map_err(failed)?;
                prune(share, &dir).await;
            }
            record::remove(share, RecordDir::Archived, &key).await?;
            archives.retain(|(known, _, _)| *known != key);
        }
        Ok(())
    }
}

/// Whether another archived directory lies in this one: `team/app` is archived in `archived-team`.
fn holds_others(archives: &[(String, SubPath, u64)], dir: &SubPath) -> bool {
    archives.iter().any(|(_, other, _)| other != dir && dir.contains(other))
}

/// The archived directories that have a record: its key, where it is, and since when.
async fn archives(share: &Share) -> Result<Vec<(String, SubPath, u64)>> {
    let mut archives = Vec::new();
    for key in RecordDir::Archived.keys(share).await? {
        let Some(record) = record::read::<ArchivedRecord>(share, RecordDir::Archived, &key).await? else {
            continue;
        };
        // A record lies on the share, where others may write too: only what archiving makes is ever removed.
        match SubPath::new("dir", &record.dir) {
            Ok(dir) if dir.as_str().starts_with("archived-") => archives.push((key, dir, record.since)),
            _ => record::remove(share, RecordDir::Archived, &key).await?,
        }
    }
    Ok(archives)
}
