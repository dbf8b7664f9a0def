//! How full a volume is, as its driver says.

use berth_csi::v1::volume_usage::Unit;
use berth_csi::v1::{NodeGetVolumeStatsRequest, VolumeUsage};

use super::Csi;
use super::calls::{call, unanswered};
use super::mounted::text;
use super::source::{CsiVolume, Mode};
use crate::plugin::{Failed, PodVolume};

/// How full a volume is; `None` is what the driver does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// All bytes.
    pub capacity_bytes: Option<u64>,
    /// Bytes that can still be written.
    pub available_bytes: Option<u64>,
    /// Bytes that are taken.
    pub used_bytes: Option<u64>,
    /// All inodes.
    pub inodes: Option<u64>,
    /// Inodes that can still be made.
    pub inodes_free: Option<u64>,
    /// Inodes that are taken.
    pub inodes_used: Option<u64>,
}

impl Csi {
    /// How full a volume that a pod has is; `None` if its driver does not count.
    pub async fn stats(&self, volume: &PodVolume) -> Result<Option<Stats>, Failed> {
        let csi = CsiVolume::read(volume)?;
        let (driver, capabilities) = self.able_driver(&csi.driver).await?;
        if !capabilities.stats {
            return Ok(None);
        }
        let (uid, name) = (volume.pod_uid(), csi.spec_name.as_str());
        let (path, staging) = if csi.block {
            (self.layout.csi_device_publish(name, uid), self.layout.csi_device_staging(name))
        } else {
            (self.publish_path(uid, name), self.staging_path(&csi.driver, &csi.handle))
        };
        let staged = capabilities.stage && csi.mode == Mode::Persistent;
        let request = NodeGetVolumeStatsRequest {
            volume_id: csi.handle.clone(),
            volume_path: text(&path),
            staging_target_path: if staged { text(&staging) } else { String::new() },
        };
        let answer =
            call(
                &driver,
                request,
                |mut node, request| async move { node.node_get_volume_stats(request).await },
            )
            .await
            .map_err(|status| {
                unanswered(&format!("asking driver {} how full {name} is", csi.driver), &status)
            })?;
        Ok(Some(answer.usage.iter().fold(Stats::default(), with)))
    }
}

fn with(mut stats: Stats, usage: &VolumeUsage) -> Stats {
    let known = |value: i64| u64::try_from(value).ok();
    match usage.unit() {
        Unit::Bytes => {
            stats.capacity_bytes = known(usage.total);
            stats.available_bytes = known(usage.available);
            stats.used_bytes = known(usage.used);
        }
        Unit::Inodes => {
            stats.inodes = known(usage.total);
            stats.inodes_free = known(usage.available);
            stats.inodes_used = known(usage.used);
        }
        Unit::Unknown => {}
    }
    stats
}
