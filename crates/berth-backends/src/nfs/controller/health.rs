//! What is wrong with volumes and their servers: gone, stale, read-only, full.

use std::time::Duration;

use berth_core::VolumeId;
use berth_nfs::{Change, Entry, Kind, Share};
use futures_util::future::join_all;

use super::{
    NfsController,
    id::{PRIVATE, ShareName, VolumeRef},
    parameters::VolumeKind,
    record::{self, RecordDir, VolumeRecord},
    shares::{Reach, find_dir, found},
    volumes::{key, parse_id, token},
};
use crate::{Condition, Context, Error, Health, Page, PageRequest, Result, Severity, image::IMAGE};

/// Who asks how something is wants to know it soon: a server that takes longer is not there.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl Health for NfsController {
    async fn health(&self, ctx: &Context, id: &VolumeId) -> Result<Vec<Condition>> {
        let volume = VolumeRef::parse(id.as_str()).map_err(|_| Error::no_volume(id))?;
        let reach = Reach::by_id(ctx);
        let asked = tokio::time::timeout(ANSWER_TIMEOUT, self.ask_about(id, &volume, &reach)).await;
        asked.unwrap_or_else(|_| Ok(vec![unreachable_share(&volume.share, &too_slow())]))
    }

    // Recorded volumes, share by share.
    async fn list_unhealthy(
        &self,
        _: &Context,
        page: &PageRequest,
    ) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let mut entries = Vec::new();
        for (name, share, keys) in self.listing(RecordDir::Volumes, page).await? {
            let common = self.share_conditions(&share, &name).await?;
            for key in keys {
                let Some(record) = record::read::<VolumeRecord>(&share, RecordDir::Volumes, &key).await?
                else {
                    continue;
                };
                let Ok(volume) = VolumeRef::parse(&record.id) else { continue };
                let conditions = match find_dir(&share, volume.dir.as_str()).await? {
                    Some(directory) if is_whole(&share, &directory, Some(&record)).await? => common.clone(),
                    _ => vec![missing(&volume)],
                };
                if conditions.is_empty() {
                    continue;
                }
                entries.push((parse_id(&volume), conditions));
                if entries.len() == page.limit {
                    return Ok(Page { entries, next: Some(token(&name, &key)) });
                }
            }
        }
        Ok(Page { entries, next: None })
    }
}

impl NfsController {
    async fn ask_about(&self, id: &VolumeId, volume: &VolumeRef, reach: &Reach) -> Result<Vec<Condition>> {
        let share = match self.visit(&volume.share, reach).await {
            Ok(share) => share,
            Err(error) => return Ok(vec![unreachable_share(&volume.share, &error)]),
        };
        match find_dir(&share, volume.dir.as_str()).await {
            Ok(directory) => {
                let record: Option<VolumeRecord> =
                    record::read(&share, RecordDir::Volumes, &key(volume)).await?;
                match directory {
                    Some(directory) if is_whole(&share, &directory, record.as_ref()).await? => {
                        self.share_conditions(&share, &volume.share).await
                    }
                    _ => record.map(|_| vec![missing(volume)]).ok_or_else(|| Error::no_volume(id)),
                }
            }
            Err(error) => Ok(vec![unreachable_share(&volume.share, &error)]),
        }
    }

    /// What is wrong with a share that answers.
    async fn share_conditions(&self, share: &Share, name: &ShareName) -> Result<Vec<Condition>> {
        let mut conditions = Vec::new();
        let degraded = |reason, message| Condition { severity: Severity::Degraded, reason, message };
        // Setting what is set already: the least that only a share that can be written takes.
        if let Ok(private) = share.open_dir(PRIVATE).await
            && let Err(error) =
                share.set_attributes(&private.handle, &Change::mode(private.attributes.mode)).await
            && error.kind() == Kind::ReadOnly
        {
            conditions.push(degraded("ReadOnly", format!("{name} cannot be written")));
        }
        match share.space(&share.root()).await {
            Ok(space) if space.bytes_total > 0 && space.bytes_available == 0 => {
                conditions.push(degraded("ShareFull", format!("no space is left on {name}")));
            }
            _ => {}
        }
        Ok(conditions)
    }

    /// What is wrong with the shares that are known.
    pub(in crate::nfs) async fn shares_health(&self) -> Result<Vec<Condition>> {
        let names = self.0.shares.all();
        // All at once: one that is gone costs its time, and not everybody's.
        let shares = join_all(names.iter().map(async |name| {
            let asked = async {
                let share = self.visit(name, &Reach::unsaid()).await?;
                self.share_conditions(&share, name).await
            };
            match tokio::time::timeout(ANSWER_TIMEOUT, asked).await.unwrap_or_else(|_| Err(too_slow())) {
                Ok(conditions) => conditions,
                Err(error) => vec![unreachable_share(name, &error)],
            }
        }));
        Ok(shares.await.into_iter().flatten().collect())
    }
}

fn too_slow() -> Error {
    Error::Unavailable(format!("it did not answer within {} s", ANSWER_TIMEOUT.as_secs()))
}

/// Whether what makes the volume is in its directory.
async fn is_whole(share: &Share, directory: &Entry, record: Option<&VolumeRecord>) -> Result<bool> {
    match record.map(|record| VolumeKind::of(&record.parameters)) {
        Some(VolumeKind::Image) => Ok(found(share.lookup(&directory.handle, IMAGE).await)?.is_some()),
        Some(VolumeKind::Directory) | None => Ok(true),
    }
}

fn missing(volume: &VolumeRef) -> Condition {
    Condition {
        severity: Severity::DataLoss,
        reason: "DirectoryMissing",
        message: format!("{}/{} is gone", volume.share, volume.dir),
    }
}

fn unreachable_share(share: &ShareName, error: &Error) -> Condition {
    let reason = match error {
        Error::Unavailable(_) => "ServerUnreachable",
        Error::Denied(_) => "AccessDenied",
        _ => "ShareUnusable",
    };
    Condition {
        severity: Severity::Inaccessible,
        reason,
        message: format!("{share} cannot be used: {error}"),
    }
}
