//! Volumes as block devices: staged and published below `volumeDevices`, linked into the pod's directory.
//!
//! ```text
//! plugins/kubernetes.io/csi/volumeDevices/NAME/data/vol_data.json
//! plugins/kubernetes.io/csi/volumeDevices/NAME/dev/POD              the device, bound: which pods have it
//! plugins/kubernetes.io/csi/volumeDevices/staging/NAME              the driver's
//! plugins/kubernetes.io/csi/volumeDevices/publish/NAME/POD          the driver's: the device
//! pods/POD/volumeDevices/kubernetes.io~csi/NAME                     a link to that, for the containers
//! ```

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Instant;

use berth_csi::v1::{
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use berth_host::mount;
use berth_host::path::Dir;
use k8s_openapi::api::core::v1::Pod;

use super::super::{blocking, blocking_or};
use super::calls::{call, failed, not_undone};
use super::inputs::attachment_name;
use super::mounted::{ignore_missing, not_tidied, text};
use super::source::CsiVolume;
use super::vol_data::{self, VolData};
use super::{Csi, Kept, NAME, entries};
use crate::layout::Layout;
use crate::plugin::{Failed, Placed};

/// Where the parts of one pod's block volume lie.
struct Places {
    publish: PathBuf,
    global: PathBuf,
    link: PathBuf,
}

impl Csi {
    fn places(&self, uid: &str, name: &str) -> Places {
        Places {
            publish: self.layout.csi_device_publish(name, uid),
            global: self.layout.csi_device(name).join("dev").join(uid),
            link: self.layout.pod_device(uid, NAME, name),
        }
    }

    pub(super) async fn stage_block(&self, volume: &CsiVolume) -> Result<(), Failed> {
        let (driver, capabilities) = self.able_driver(&volume.driver).await?;
        if !capabilities.stage {
            return Ok(());
        }
        let rules = self.rules(&volume.driver).await;
        let publish_context = self.publish_context(&rules, &volume.driver, &volume.handle).await?;
        let secrets = self.secret("NodeStageSecretRef", volume.stage_secret.as_ref()).await?;
        let capability = volume.capability(capabilities, None)?;
        let staging = self.layout.csi_device_staging(&volume.spec_name);
        let was_there = self.write_block_data(volume).await?;
        let key = Kept::Device(volume.unique_name());
        self.kept().entry(key.clone()).or_insert(was_there);
        blocking({
            let staging = staging.clone();
            move || Dir::ensure(&staging, 0o750).map(|_| ())
        })
        .await?;
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
            if !self.is_nothing(&key, &failed) {
                return Err(Failed::uncertain(failed.message));
            }
            let removed = self.remove_block(&volume.spec_name).await;
            return Err(removed.map_or_else(|error| not_tidied(&failed, &error), |()| failed.clone()));
        }
        self.kept().insert(key, true);
        Ok(())
    }

    pub(super) async fn publish_block(&self, pod: &Pod, volume: &CsiVolume) -> Result<PathBuf, Failed> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let places = self.places(uid, &volume.spec_name);
        let (driver, capabilities) = self.able_driver(&volume.driver).await?;
        let rules = self.rules(&volume.driver).await;
        if let Some(refusal) = rules.refuse(&volume.driver, volume.mode) {
            return Err(Failed::unchanged(refusal));
        }
        let publish_context = self.publish_context(&rules, &volume.driver, &volume.handle).await?;
        let secrets = self.secret("NodePublishSecretRef", volume.publish_secret.as_ref()).await?;
        let mut volume_context = volume.attributes.clone();
        volume_context.extend(rules.pod_info(pod, volume.mode));
        let capability = volume.capability(capabilities, None)?;
        self.write_block_data(volume).await?;
        self.make_parents(&places).await?;
        let request = NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context,
            staging_target_path: text(&self.layout.csi_device_staging(&volume.spec_name)),
            target_path: text(&places.publish),
            volume_capability: Some(capability),
            readonly: volume.read_only,
            secrets,
            volume_context,
        };
        call(&driver, request, |mut node, request| async move { node.node_publish_volume(request).await })
            .await
            .map_err(|status| failed(&status))?;
        let link = places.link.clone();
        blocking_or(Failed::uncertain, move || map(&places)).await?;
        Ok(link)
    }

    pub(super) async fn unpublish_block(&self, placed: &Placed) -> Result<(), Failed> {
        let parts = self.places(&placed.pod_uid, &placed.spec_name);
        let directory = self.layout.csi_device(&placed.spec_name).join("data");
        let data = blocking_or(Failed::uncertain, move || {
            VolData::read(&directory).map_err(|error| error.to_string())
        })
        .await?;
        let driver = data.as_ref().map(|data| self.driver(&data.driver)).transpose()?;
        let parts = blocking_or(Failed::uncertain, move || unmap(&parts).map(|()| parts)).await?;
        if let (Some(data), Some(driver)) = (data, driver) {
            let request =
                NodeUnpublishVolumeRequest { volume_id: data.handle, target_path: text(&parts.publish) };
            call(
                &driver,
                request,
                |mut node, request| async move { node.node_unpublish_volume(request).await },
            )
            .await
            .map_err(|status| not_undone(&status))?;
        }
        blocking_or(Failed::uncertain, move || remove_device(&parts.publish)).await
    }

    /// Unstages all block volumes of a device: they lie under the names of their PersistentVolumes.
    pub(super) async fn unstage_blocks(&self, device: &str) -> Result<(), Failed> {
        let (layout, device) = (self.layout.clone(), device.to_owned());
        let volumes = blocking_or(Failed::uncertain, move || {
            let all = directories(&layout).into_iter().filter_map(|directory| {
                // A file that is damaged belongs to a volume that nobody can name; it must not stop this one.
                let data = VolData::read(&directory.join("data")).ok()??;
                (data.unique_name() == device).then(|| (name(&directory), data))
            });
            Ok(all.collect::<Vec<_>>())
        })
        .await?;
        for (name, data) in volumes {
            self.unstage_block(&name, data).await?;
        }
        Ok(())
    }

    async fn unstage_block(&self, name: &str, data: VolData) -> Result<(), Failed> {
        let staging = self.layout.csi_device_staging(name);
        if staging.exists() {
            let (driver, capabilities) = self.able_driver(&data.driver).await?;
            if capabilities.stage {
                let request =
                    NodeUnstageVolumeRequest { volume_id: data.handle, staging_target_path: text(&staging) };
                let begun = Instant::now();
                let done = call(&driver, request, |mut node, request| async move {
                    node.node_unstage_volume(request).await
                })
                .await
                .map_err(|status| not_undone(&status));
                self.tell_undone("NodeUnstageVolume", name, begun, done.as_ref().err());
                done?;
            }
        }
        self.remove_block(name).await
    }

    /// Removes what belongs to no pod of a block volume.
    async fn remove_block(&self, name: &str) -> Result<(), Failed> {
        let volume = self.layout.csi_device(name);
        let staging = self.layout.csi_device_staging(name);
        let publish = self.layout.csi_device_publish(name, "");
        blocking_or(Failed::uncertain, move || {
            remove_device(&staging)?;
            ignore_missing(fs::remove_dir(&publish), &publish)?;
            remove_volume(&volume)
        })
        .await
    }

    /// Writes what taking the volume away will need; whether there was anything before.
    async fn write_block_data(&self, volume: &CsiVolume) -> Result<bool, Failed> {
        let directory = self.layout.csi_device(&volume.spec_name).join("data");
        let data = VolData {
            spec_name: volume.spec_name.clone(),
            handle: volume.handle.clone(),
            driver: volume.driver.clone(),
            node_name: self.node.clone(),
            attachment: attachment_name(&volume.handle, &volume.driver, &self.node),
            mode: String::new(),
        };
        blocking(move || {
            let was_there = directory.join(vol_data::NAME).exists();
            data.write(&directory).map(|()| was_there)
        })
        .await
    }

    async fn make_parents(&self, places: &Places) -> Result<(), Failed> {
        let parents: Vec<PathBuf> = [&places.publish, &places.global, &places.link]
            .into_iter()
            .filter_map(|path| path.parent().map(Path::to_owned))
            .collect();
        blocking(move || parents.iter().try_for_each(|parent| Dir::ensure(parent, 0o750).map(|_| ()))).await
    }
}

/// The directories of all block volumes, by their names.
pub(super) fn directories(layout: &Layout) -> Vec<PathBuf> {
    let mut all = entries(&layout.csi_device(""));
    // These two lie among them.
    all.retain(|directory| !directory.ends_with("staging") && !directory.ends_with("publish"));
    all
}

/// The block volumes that pods have or may have. The link in a pod's directory does not tell: it is made last.
pub(super) fn placed(layout: &Layout) -> Vec<Placed> {
    let published = entries(&layout.csi_device("publish"));
    let published = published.into_iter().map(|volume| (name(&volume), entries(&volume)));
    let bound = directories(layout).into_iter().map(|volume| (name(&volume), entries(&volume.join("dev"))));
    let all = published.chain(bound).flat_map(|(spec_name, pods)| {
        pods.into_iter().map(move |pod| Placed {
            plugin: NAME.to_owned(),
            pod_uid: name(&pod),
            spec_name: spec_name.clone(),
            block: true,
        })
    });
    all.collect()
}

/// Removes what a crash left of a directory in which no volume is named; what is not empty is not ours to judge.
pub(super) fn remove_unused(directory: &Path) {
    if let Err(error) = remove_volume(directory) {
        tracing::warn!(error, "a directory of no known volume is left alone");
    }
}

fn remove_volume(directory: &Path) -> Result<(), String> {
    let (dev, data) = (directory.join("dev"), directory.join("data"));
    ignore_missing(fs::remove_dir(&dev), &dev)?;
    VolData::remove(&data)?;
    ignore_missing(fs::remove_dir(&data), &data)?;
    ignore_missing(fs::remove_dir(directory), directory)
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Binds the published device among those of the volume, and links it into the pod's directory.
fn map(places: &Places) -> Result<(), String> {
    let doing = |what: &str, path: &Path, error: io::Error| format!("{what} {}: {error}", path.display());
    if !mount::is_mount_point(&places.global).map_err(|error| error.sentence())? {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o660)
            .open(&places.global)
            .map_err(|error| doing("make", &places.global, error))?;
        let device =
            fs::canonicalize(&places.publish).map_err(|error| doing("look at", &places.publish, error))?;
        mount::bind(&device, &places.global, mount::Attributes::default())
            .map_err(|error| error.sentence())?;
    }
    if fs::read_link(&places.link).is_ok_and(|known| known == places.publish) {
        return Ok(());
    }
    ignore_missing(fs::remove_file(&places.link), &places.link)?;
    symlink(&places.publish, &places.link).map_err(|error| doing("make the link", &places.link, error))
}

/// Undoes `map`.
fn unmap(places: &Places) -> Result<(), String> {
    ignore_missing(fs::remove_file(&places.link), &places.link)?;
    mount::unmount(&places.global).map_err(|error| error.sentence())?;
    ignore_missing(fs::remove_file(&places.global), &places.global)
}

/// Removes what a driver should have removed, if nothing is mounted there: an empty directory, or a file.
fn remove_device(path: &Path) -> Result<(), String> {
    if mount::is_mount_point(path).map_err(|error| error.sentence())? {
        return Err(format!("{} is still mounted although the driver was done with it", path.display()));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => ignore_missing(fs::remove_dir(path), path),
        Ok(_) => ignore_missing(fs::remove_file(path), path),
        Err(_) => Ok(()),
    }
}
