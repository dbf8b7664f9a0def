//! What is wrong with volumes and their servers: gone, stale, read-only, full.

use std::sync::Arc;

use berth_core::VolumeId;
use berth_nfs::{Change, Kind, Share};

use super::{
    Inner,
    id::{PRIVATE, ShareName, VolumeRef},
    record::{self, Drawer, VolumeRecord},
    shares::find_dir,
    volumes::{key, parse_id, token},
};
use crate::backend::{Condition, Error, Page, PageRequest, Result, Severity};

impl Inner {
    pub(super) async fn volume_health(self: &Arc<Self>, id: &VolumeId) -> Result<Vec<Condition>> {
        let volume = VolumeRef::parse(id.as_str()).map_err(|_| Error::no_volume(id))?;
        let share = match self.visit(&volume.share).await {
            Ok(share) => share,
            Err(error) => return Ok(vec![unreachable_share(&volume.share, &error)]),
        };
        match find_dir(&share, volume.dir.as_str()).await {
            Ok(Some(_)) => self.share_conditions(&share, &volume.share).await,
            Ok(None) => {
                let record: Option<VolumeRecord> =
                    record::read(&share, Drawer::Volumes, &key(&volume)).await?;
                record.map(|_| vec![missing(&volume)]).ok_or_else(|| Error::no_volume(id))
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

    /// Recorded volumes with which something is wrong, share by share.
    pub(super) async fn list_unhealthy(
        self: &Arc<Self>,
        page: &PageRequest,
    ) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let mut entries = Vec::new();
        for (name, share, keys) in self.listing(Drawer::Volumes, page).await? {
            let common = self.share_conditions(&share, &name).await?;
            for key in keys {
                let Some(record) = record::read::<VolumeRecord>(&share, Drawer::Volumes, &key).await? else {
                    continue;
                };
                let Ok(volume) = VolumeRef::parse(&record.id) else { continue };
                let conditions = match find_dir(&share, volume.dir.as_str()).await? {
                    Some(_) => common.clone(),
                    None => vec![missing(&volume)],
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

    pub(super) async fn storage_health(self: &Arc<Self>) -> Result<Vec<Condition>> {
        let mut conditions = Vec::new();
        for name in self.shares.all() {
            match self.visit(&name).await {
                Ok(share) => conditions.extend(self.share_conditions(&share, &name).await?),
                Err(error) => conditions.push(unreachable_share(&name, &error)),
            }
        }
        Ok(conditions)
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
