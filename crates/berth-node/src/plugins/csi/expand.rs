//! Grows what is on a volume after the volume itself was grown.

use berth_csi::v1::{CapacityRange, NodeExpandVolumeRequest};
use tonic::{Code, Status};

use super::super::quantity;
use super::Csi;
use super::calls::{call, failed};
use super::mounted::text;
use super::source::CsiVolume;
use crate::plugin::{Certainty, Failed, PodVolume, Source};

impl Csi {
    /// Grows a volume that a pod has to the capacity of its PersistentVolume; gives the size it has now, or `None` if
    /// the driver has nothing to do on nodes.
    ///
    /// `Unchanged` is the driver's own answer and nothing else, such as that it is not registered.
    pub(super) async fn expand_volume(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let Source::Persistent { volume: persistent, .. } = &volume.source else { return Ok(None) };
        let again = |error: Failed| Failed::uncertain(error.message);
        let csi = CsiVolume::read(volume).map_err(again)?;
        let capacity = persistent.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage"));
        let Some(wanted) = capacity.and_then(|capacity| quantity::units(&capacity.0)) else {
            return Ok(None);
        };
        let wanted = i64::try_from(wanted).unwrap_or(i64::MAX);
        let (driver, capabilities) = self.able_driver(&csi.driver).await.map_err(again)?;
        if !capabilities.expand {
            return Ok(None);
        }
        let secrets = self.secret("NodeExpandSecretRef", csi.expand_secret.as_ref()).await.map_err(again)?;
        let (uid, name) = (volume.pod_uid(), csi.spec_name.as_str());
        let (path, staging) = if csi.block {
            (self.layout.csi_device_publish(name, uid), self.layout.csi_device_staging(name))
        } else {
            (self.publish_path(uid, name), self.staging_path(&csi.driver, &csi.handle))
        };
        let request = NodeExpandVolumeRequest {
            volume_id: csi.handle.clone(),
            volume_path: text(&path),
            capacity_range: Some(CapacityRange { required_bytes: wanted, limit_bytes: 0 }),
            staging_target_path: if capabilities.stage { text(&staging) } else { String::new() },
            volume_capability: Some(csi.capability(capabilities, None).map_err(again)?),
            secrets,
        };
        let answer =
            call(&driver, request, |mut node, request| async move { node.node_expand_volume(request).await })
                .await
                .map_err(|status| not_grown(&status))?;
        let size = if answer.capacity_bytes > 0 { answer.capacity_bytes } else { wanted };
        Ok(u64::try_from(size).ok())
    }
}

fn not_grown(status: &Status) -> Failed {
    let certainty = match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::NotFound => Certainty::Final,
        Code::FailedPrecondition => Certainty::Unchanged,
        _ => Certainty::Uncertain,
    };
    Failed { certainty, ..failed(status) }
}
