//! Volumes with a filesystem: staged at `globalmount`, published at the pod's `mount`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use berth_csi::v1::{
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use berth_host::mount;
use berth_host::ownership::{GroupPolicy, apply_group};
use berth_host::path::Dir;
use k8s_openapi::api::core::v1::Pod;

use super::super::{blocking, blocking_or, fs_group};
use super::calls::{call, failed, not_undone};
use super::inputs::attachment_name;
use super::source::{CsiVolume, Mode};
use super::vol_data::{self, VolData};
use super::{Csi, Kept, NAME};
use crate::plugin::{Failed, Placed};

impl Csi {
    /// Where a volume is staged.
    pub(super) fn staging_path(&self, driver: &str, handle: &str) -> PathBuf {
        self.layout.csi_staging(driver, handle).join("globalmount")
    }

    /// Where a volume is published for a pod.
    pub(super) fn publish_path(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.pod_dir(uid, spec_name).join("mount")
    }

    pub(super) async fn stage_mounted(&self, pod: &Pod, volume: &CsiVolume) -> Result<(), Failed> {
        let (driver, capabilities) = self.able_driver(&volume.driver).await?;
        if !capabilities.stage {
            return Ok(());
        }
        let rules = self.rules(&volume.driver).await;
        let publish_context = self.publish_context(&rules, &volume.driver, &volume.handle).await?;
        let secrets = self.secret("NodeStageSecretRef", volume.stage_secret.as_ref()).await?;
        let group = fs_group(pod).filter(|_| capabilities.mount_group);
        let capability = volume.capability(capabilities, group)?;
        let staging = self.staging_path(&volume.driver, &volume.handle);
        let directory = self.layout.csi_staging(&volume.driver, &volume.handle);
        let data = VolData {
            spec_name: volume.spec_name.clone(),
            handle: volume.handle.clone(),
            driver: volume.driver.clone(),
            ..VolData::default()
        };
        let was_there = blocking({
            let staging = staging.clone();
            move || {
                let was_there = directory.join(vol_data::NAME).exists();
                data.write(&directory)?;
                Dir::ensure(&staging, 0o750).map(|_| was_there)
            }
        })
        .await?;
        let key = Kept::Device(volume.unique_name());
        self.kept().entry(key.clone()).or_insert(was_there);
        let request = NodeStageVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context,
            staging_target_path: text(&staging),
            volume_capability: Some(capability),
            secrets,
            volume_context: volume.attributes.clone(),
        };
        let answer =
            call(&driver, request, |mut node, request| async move { node.node_stage_volume(request).await })
                .await;
        if let Err(status) = answer {
            let failed = failed(&status);
            return Err(self.settled(&key, failed, staging).await);
        }
        self.kept().insert(key, true);
        Ok(())
    }

    /// Unstages the volume of a device if it is one with a filesystem; whether it was.
    pub(super) async fn unstage_mounted(&self, device: &str) -> Result<bool, Failed> {
        let Some((driver, handle)) = parse(device) else {
            return Err(Failed::finally(format!("{device:?} is not the name of a CSI volume")));
        };
        let directory = self.layout.csi_staging(driver, handle);
        let data = blocking_or(Failed::uncertain, {
            let directory = directory.clone();
            move || VolData::read(&directory).map_err(|error| error.to_string())
        })
        .await?;
        let staging = directory.join("globalmount");
        let Some(data) = data else {
            // Nothing was staged before the file was written.
            return blocking_or(Failed::uncertain, move || remove(&staging)).await.map(|()| false);
        };
        let (driver, capabilities) = self.able_driver(&data.driver).await?;
        if capabilities.stage {
            let request =
                NodeUnstageVolumeRequest { volume_id: data.handle, staging_target_path: text(&staging) };
            let begun = Instant::now();
            let done =
                call(
                    &driver,
                    request,
                    |mut node, request| async move { node.node_unstage_volume(request).await },
                )
                .await
                .map_err(|status| not_undone(&status));
            self.tell_undone("NodeUnstageVolume", &data.spec_name, begun, done.as_ref().err());
            done?;
        }
        blocking_or(Failed::uncertain, move || remove(&staging)).await.map(|()| true)
    }

    pub(super) async fn publish_mounted(&self, pod: &Pod, volume: &CsiVolume) -> Result<PathBuf, Failed> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let target = self.publish_path(uid, &volume.spec_name);
        let (driver, capabilities) = self.able_driver(&volume.driver).await?;
        let rules = self.rules(&volume.driver).await;
        if let Some(refusal) = rules.refuse(&volume.driver, volume.mode) {
            return Err(Failed::unchanged(refusal));
        }
        let request = self.publish_request(pod, volume, &rules, capabilities, &target).await?;
        let key = Kept::Volume(uid.to_owned(), volume.spec_name.clone());
        self.write_pod_data(uid, key.clone(), volume).await?;
        let answer =
            call(
                &driver,
                request,
                |mut node, request| async move { node.node_publish_volume(request).await },
            )
            .await;
        if let Err(status) = answer {
            let failed = failed(&status);
            return Err(self.settled(&key, failed, target).await);
        }
        self.kept().insert(key, true);
        if let Some(group) =
            fs_group(pod).filter(|_| !capabilities.mount_group && rules.gives_to_group(volume))
        {
            self.give_to_group(pod, volume, &target, group).await?;
        }
        Ok(target)
    }

    async fn publish_request(
        &self,
        pod: &Pod,
        volume: &CsiVolume,
        rules: &super::rules::Rules,
        capabilities: crate::registration::Capabilities,
        target: &Path,
    ) -> Result<NodePublishVolumeRequest, Failed> {
        let persistent = volume.mode == Mode::Persistent;
        let publish_context = if persistent {
            self.publish_context(rules, &volume.driver, &volume.handle).await?
        } else {
            std::collections::BTreeMap::new()
        };
        let mut secrets = self.secret("NodePublishSecretRef", volume.publish_secret.as_ref()).await?;
        let mut volume_context = volume.attributes.clone();
        volume_context.extend(rules.pod_info(pod, volume.mode));
        let tokens = self.token_entry(rules, pod).await?;
        if rules.tokens_are_secrets {
            secrets.extend(tokens);
        } else {
            volume_context.extend(tokens);
        }
        let staging_target_path = if persistent && capabilities.stage {
            text(&self.staging_path(&volume.driver, &volume.handle))
        } else {
            String::new()
        };
        let group = fs_group(pod).filter(|_| capabilities.mount_group);
        Ok(NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context,
            staging_target_path,
            target_path: text(target),
            volume_capability: Some(volume.capability(capabilities, group)?),
            readonly: volume.read_only,
            secrets,
            volume_context,
        })
    }

    /// What a failure to bring something to `path` means, after what was made for it is removed where nothing is there.
    async fn settled(&self, key: &Kept, failed: Failed, path: PathBuf) -> Failed {
        if !self.is_nothing(key, &failed) {
            return Failed::uncertain(failed.message);
        }
        match blocking_or(Failed::uncertain, move || remove(&path)).await {
            Ok(()) => failed,
            Err(error) => not_tidied(&failed, &error),
        }
    }

    /// Writes what taking the volume away will need, and notes whether there was anything before.
    async fn write_pod_data(&self, uid: &str, key: Kept, volume: &CsiVolume) -> Result<(), Failed> {
        let directory = self.pod_dir(uid, &volume.spec_name);
        let data = VolData {
            spec_name: volume.spec_name.clone(),
            handle: volume.handle.clone(),
            driver: volume.driver.clone(),
            node_name: self.node.clone(),
            attachment: attachment_name(&volume.handle, &volume.driver, &self.node),
            mode: volume.mode.as_str().to_owned(),
        };
        let was_there = blocking(move || {
            let was_there = directory.join(vol_data::NAME).exists();
            data.write(&directory)?;
            Ok(was_there)
        })
        .await?;
        self.kept().entry(key).or_insert(was_there);
        Ok(())
    }

    async fn give_to_group(
        &self,
        pod: &Pod,
        volume: &CsiVolume,
        target: &Path,
        group: u32,
    ) -> Result<(), Failed> {
        let policy = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.security_context.as_ref()?.fs_group_change_policy.as_deref());
        let policy =
            if policy == Some("OnRootMismatch") { GroupPolicy::OnRootMismatch } else { GroupPolicy::Always };
        let (target, handle) = (target.to_owned(), volume.handle.clone());
        blocking_or(Failed::uncertain, move || {
            let top = Dir::open(&target).and_then(|top| apply_group(&top, group, policy, false));
            top.map(|_| ())
                .map_err(|error| format!("applyFSGroup failed for vol {handle}: {}", error.sentence()))
        })
        .await
    }

    pub(super) async fn unpublish_mounted(&self, placed: &Placed) -> Result<(), Failed> {
        let directory = self.pod_dir(&placed.pod_uid, &placed.spec_name);
        let target = directory.join("mount");
        let data = blocking_or(Failed::uncertain, move || {
            VolData::read(&directory).map_err(|error| error.to_string())
        })
        .await?;
        if let Some(data) = data {
            let driver = self.driver(&data.driver)?;
            let request = NodeUnpublishVolumeRequest { volume_id: data.handle, target_path: text(&target) };
            call(
                &driver,
                request,
                |mut node, request| async move { node.node_unpublish_volume(request).await },
            )
            .await
            .map_err(|status| not_undone(&status))?;
        }
        blocking_or(Failed::uncertain, move || remove(&target)).await?;
        self.kept().remove(&Kept::Volume(placed.pod_uid.clone(), placed.spec_name.clone()));
        Ok(())
    }
}

/// The driver and the handle of a unique name.
pub(super) fn parse(device: &str) -> Option<(&str, &str)> {
    device.strip_prefix(NAME)?.strip_prefix('/')?.split_once('^')
}

pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A failure that left something, which must be undone whatever the driver says.
pub(super) fn not_tidied(failed: &Failed, left: &Failed) -> Failed {
    Failed::uncertain(format!(
        "{}; besides, what was made for the call is left: {}",
        failed.message, left.message
    ))
}

/// Removes what a crash left of a directory in which no volume is named; what is not empty is not ours to judge.
pub(super) fn remove_unused(directory: &Path) {
    if let Err(error) = remove(&directory.join("globalmount")) {
        tracing::warn!(error, "a directory of no known volume is left alone");
    }
}

/// Removes a mount directory, the file beside it and the directory of both, if nothing is mounted there.
///
/// The directory of the mount is the driver's to remove, but some forget it. Never recursive: data is not ours.
fn remove(path: &Path) -> Result<(), String> {
    if mount::is_mount_point(path).map_err(|error| error.sentence())? {
        return Err(format!("{} is still mounted although the driver was done with it", path.display()));
    }
    let parent = path.parent().unwrap_or(path);
    ignore_missing(fs::remove_dir(path), path)?;
    VolData::remove(parent)?;
    ignore_missing(fs::remove_dir(parent), parent)
}

pub(super) fn ignore_missing(result: io::Result<()>, path: &Path) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}
