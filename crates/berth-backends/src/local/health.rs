//! What is wrong with volumes and with the disk below them.

use std::path::{Path, PathBuf};

use berth_core::VolumeId;
use berth_host::{mount, usage};

use super::{
    Inner, Local,
    content::DATA,
    kind::Kind,
    record::{Key, VOLUME, VolumeRecord},
    volumes::page_start,
};
use crate::{
    Condition, Context, Error, Health, NodeHealth, Page, PageRequest, Result, Severity,
    image::{IMAGE, UNIT},
};

impl Health for Local {
    async fn health(&self, _: &Context, id: &VolumeId) -> Result<Vec<Condition>> {
        let id = id.clone();
        self.blocking(move |inner| inner.volume_health(&id)).await
    }

    async fn list_unhealthy(
        &self,
        _: &Context,
        page: &PageRequest,
    ) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let page = page.clone();
        self.blocking(move |inner| inner.list_unhealthy(&page)).await
    }
}

impl NodeHealth for Local {
    async fn volume_health(
        &self,
        _: &Context,
        id: &VolumeId,
        staging: Option<&Path>,
        _: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        let (id, staging) = (id.clone(), staging.map(Path::to_owned));
        self.blocking(move |inner| inner.node_health(&id, staging.as_deref())).await
    }

    async fn storage_health(&self, _: &Context) -> Result<Vec<Condition>> {
        self.blocking(|inner| Ok(inner.storage_health())).await
    }
}

impl Inner {
    fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>> {
        let key = Key::parse(VOLUME, id.as_str()).ok_or_else(|| Error::no_volume(id))?;
        let Some(record) = self.state().volume(key) else {
            return self.lost(key).map(|condition| vec![condition]).ok_or_else(|| Error::no_volume(id));
        };
        Ok(self.conditions(key, &record))
    }

    fn node_health(&self, id: &VolumeId, staging: Option<&Path>) -> Result<Vec<Condition>> {
        let mut conditions = self.volume_health(id)?;
        let Some((_, record)) = self.volume(id) else { return Ok(conditions) };
        if let Some(staging) =
            staging.filter(|_| record.kind == Kind::Image && record.access == berth_core::AccessKind::Mount)
            && !mount::is_mount_point(staging)?
        {
            conditions.push(Condition {
                severity: Severity::Inaccessible,
                reason: "NotMounted",
                message: format!("nothing is mounted at {} any more", staging.display()),
            });
        }
        Ok(conditions)
    }

    /// Volumes that have a condition, in the order of their ids: those with a record, and those whose record is lost.
    fn list_unhealthy(&self, page: &PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        let mut after = page_start(VOLUME, page)?;
        let mut lost: Vec<Key> =
            self.lost.entries()?.iter().filter_map(|entry| Key::from_hex(entry.name.to_str()?)).collect();
        lost.sort_unstable();
        let mut found = Vec::new();
        loop {
            // A few at a time, so that the records are not locked while the disk is asked.
            let batch: Vec<_> = self
                .state()
                .volumes_after(after)
                .take(1000)
                .map(|(key, record)| (key, record.clone()))
                .collect();
            let done = batch.len() < 1000;
            let (start, end) = (after, batch.last().map(|(key, _)| *key));
            let in_span = |key: &&Key| {
                start.is_none_or(|start| **key > start) && (done || end.is_none_or(|end| **key <= end))
            };
            let mut span: Vec<(Key, Vec<Condition>)> =
                lost.iter().filter(in_span).filter_map(|key| Some((*key, vec![self.lost(*key)?]))).collect();
            for (key, record) in &batch {
                let conditions = self.conditions(*key, record);
                if !conditions.is_empty() {
                    span.push((*key, conditions));
                }
            }
            span.sort_by_key(|(key, _)| *key);
            found.append(&mut span);
            if done || found.len() > page.limit {
                break;
            }
            after = end;
        }
        Ok(super::volumes::into_page(VOLUME, page, found, |key, conditions| (key.id(VOLUME), conditions)))
    }

    fn storage_health(&self) -> Vec<Condition> {
        let path = self.root.path();
        let degraded = |reason, message| Condition { severity: Severity::Degraded, reason, message };
        let space = match self.root.free_space() {
            Ok(space) => space,
            Err(error) => {
                let message = error.sentence();
                return vec![Condition {
                    severity: Severity::Inaccessible,
                    reason: "DataDirectoryUnreachable",
                    message,
                }];
            }
        };
        let mut conditions = Vec::new();
        if mount::is_read_only(path).unwrap_or(false) {
            conditions
                .push(degraded("DataDirectoryReadOnly", format!("{} is mounted read-only", path.display())));
        }
        if space.available < space.total / 100 {
            conditions.push(degraded(
                "DiskAlmostFull",
                format!("the disk behind {} is full to 99 %", path.display()),
            ));
        }
        conditions
    }

    fn lost(&self, key: Key) -> Option<Condition> {
        self.lost.exists(&key.to_string()).ok()?.then(|| Condition {
            severity: Severity::Inaccessible,
            reason: "CorruptMetadata",
            message: format!(
                "the volume's record was damaged; its data is kept in {}",
                self.lost.child_path(&key.to_string()).display()
            ),
        })
    }

    fn conditions(&self, key: Key, record: &VolumeRecord) -> Vec<Condition> {
        let mut conditions = Vec::new();
        let part = if record.kind == Kind::Image { IMAGE } else { DATA };
        let path = self.volumes.path().join(key.to_string()).join(part);
        match self.volumes.exists(&format!("{key}/{part}")) {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("{} is gone", path.display());
                return vec![Condition { severity: Severity::DataLoss, reason: "DataMissing", message }];
            }
            Err(error) => {
                let message = error.sentence();
                return vec![Condition {
                    severity: Severity::Inaccessible,
                    reason: "DataUnreachable",
                    message,
                }];
            }
        }
        if record.kind == Kind::Image
            && std::fs::metadata(&path).is_ok_and(|image| image.len() < record.length())
        {
            let message = format!("{} is shorter than the volume", path.display());
            conditions.push(Condition { severity: Severity::DataLoss, reason: "DataTruncated", message });
        }
        if let Some(mounted_at) = self.devices.of(key).mounted_at {
            if !self.devices.of(key).staged_read_only && mount::is_read_only(&mounted_at).unwrap_or(false) {
                let message = "the filesystem went read-only, most likely after an I/O error".to_owned();
                conditions.push(Condition { severity: Severity::Degraded, reason: "ReadOnly", message });
            }
            if usage::space(&mounted_at).is_ok_and(|space| space.available == 0) {
                let message = "no space is left on the volume".to_owned();
                conditions.push(Condition { severity: Severity::Degraded, reason: "Full", message });
            }
        }
        if record.kind == Kind::Btrfs {
            conditions.extend(self.over_quota(key));
        }
        conditions
    }

    fn over_quota(&self, key: Key) -> Option<Condition> {
        let data = self.volume_dir(key).and_then(|dir| Ok(dir.dir(DATA)?)).ok()?;
        let quota = berth_host::btrfs::quota_usage(&data).ok()?;
        let left = quota.limit?.saturating_sub(quota.referenced);
        (left < UNIT).then(|| Condition {
            severity: Severity::Degraded,
            reason: "Full",
            message: "no space is left on the volume".to_owned(),
        })
    }
}
