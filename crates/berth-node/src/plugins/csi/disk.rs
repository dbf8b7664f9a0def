//! Where a volume lies on disk, with a filesystem or as a block device, and `vol_data.json`, which says what it is.
//!
//! ```text
//! plugins/kubernetes.io/csi/DRIVER/HASH/vol_data.json               a filesystem
//! plugins/kubernetes.io/csi/DRIVER/HASH/globalmount                 the driver's: staged
//! pods/POD/volumes/kubernetes.io~csi/NAME/vol_data.json
//! pods/POD/volumes/kubernetes.io~csi/NAME/mount                     the driver's: published
//!
//! plugins/kubernetes.io/csi/volumeDevices/NAME/data/vol_data.json   a block device
//! plugins/kubernetes.io/csi/volumeDevices/NAME/dev/POD              the device, bound: which pods have it
//! plugins/kubernetes.io/csi/volumeDevices/staging/NAME              the driver's
//! plugins/kubernetes.io/csi/volumeDevices/publish/NAME/POD          the driver's: the device
//! pods/POD/volumeDevices/kubernetes.io~csi/NAME                     a link to that, for the containers
//! ```
//!
//! `vol_data.json` is written before the driver is called, so that whatever a crash leaves can be undone. Its names are
//! the kubelet's.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use berth_host::mount;
use berth_host::path::Dir;
use berth_kube::storage::attachment_name;
use serde::{Deserialize, Serialize};

use super::NAME;
use super::source::CsiVolume;
use crate::layout::Layout;
use crate::plugin::{Placed, PodVolume};

/// Where the part of a volume lies that belongs to the node.
#[derive(Debug, Clone)]
pub(super) struct NodePaths {
    /// The directory of `vol_data.json`.
    pub(super) data: PathBuf,
    /// Where the driver stages the volume.
    pub(super) staging: PathBuf,
    /// Of a block device: the directory of the volume, and that of what is published for pods.
    device: Option<(PathBuf, PathBuf)>,
}

/// Where the part of a volume lies that belongs to one pod.
#[derive(Debug, Clone)]
pub(super) struct PodPaths {
    /// The directory of `vol_data.json`; of a block device it is the node's.
    pub(super) data: PathBuf,
    /// Where the driver publishes the volume.
    pub(super) target: PathBuf,
    device: Option<DevicePaths>,
}

/// What a pod has of a block device besides what the driver publishes.
#[derive(Debug, Clone)]
struct DevicePaths {
    bound: PathBuf,
    link: PathBuf,
}

impl NodePaths {
    pub(super) fn new(layout: &Layout, volume: &PodVolume, csi: &CsiVolume) -> Self {
        if volume.block {
            Self::block(layout, volume.spec_name())
        } else {
            Self::mounted(layout, &csi.driver, &csi.handle)
        }
    }

    /// Of a volume with a filesystem.
    pub(super) fn mounted(layout: &Layout, driver: &str, handle: &str) -> Self {
        let data = layout.csi_staging(driver, handle);
        Self { staging: data.join("globalmount"), data, device: None }
    }

    /// Of a block device, by the name of its PersistentVolume.
    pub(super) fn block(layout: &Layout, name: &str) -> Self {
        let volume = layout.csi_device(name);
        Self {
            data: volume.join("data"),
            staging: layout.csi_device_staging(name),
            device: Some((volume, layout.csi_device_publish(name, ""))),
        }
    }

    /// Whether there may be something for the driver to unstage. A block device's directory shows that; that of a
    /// filesystem may be missing although the volume is staged, as drivers may remove it.
    pub(super) fn may_be_staged(&self) -> bool {
        self.device.is_none() || self.staging.exists()
    }

    /// Writes what taking the volume away will need; whether there was anything before.
    pub(super) fn prepare(&self, data: &VolData) -> berth_host::Result<bool> {
        let was_there = self.data.join(DATA_FILE).exists();
        data.write(&self.data).map(|()| was_there)
    }

    /// Removes all of it, unless something is still mounted there. Never recursive: data is not ours.
    pub(super) fn remove(&self) -> Result<(), String> {
        remove_driver_path(&self.staging, self.device.is_some())?;
        match &self.device {
            Some((volume, published)) => {
                ignore_missing(fs::remove_dir(published), published)?;
                remove_device(volume)
            }
            None => remove_with_data(&self.data),
        }
    }
}

impl PodPaths {
    pub(super) fn new(layout: &Layout, uid: &str, spec_name: &str, block: bool) -> Self {
        if block {
            let volume = layout.csi_device(spec_name);
            let device = DevicePaths {
                bound: volume.join("dev").join(uid),
                link: layout.pod_device(uid, NAME, spec_name),
            };
            let target = layout.csi_device_publish(spec_name, uid);
            Self { data: volume.join("data"), target, device: Some(device) }
        } else {
            let data = layout.pod_volume(uid, NAME, spec_name);
            Self { target: data.join("mount"), data, device: None }
        }
    }

    pub(super) fn is_block(&self) -> bool {
        self.device.is_some()
    }

    /// Writes what taking the volume away will need, and makes the directories around what the driver publishes;
    /// whether there was anything before.
    pub(super) fn prepare(&self, data: &VolData) -> berth_host::Result<bool> {
        let was_there = match &self.device {
            Some(_) => self.target.symlink_metadata().is_ok(),
            None => self.data.join(DATA_FILE).exists(),
        };
        data.write(&self.data)?;
        if let Some(device) = &self.device {
            for parent in
                [&self.target, &device.bound, &device.link].into_iter().filter_map(|path| path.parent())
            {
                Dir::ensure(parent, 0o750)?;
            }
        }
        Ok(was_there)
    }

    /// Where the containers find the volume once the driver has published it: a filesystem there, a block device by a
    /// link, after it was bound among the devices of the volume.
    pub(super) fn map(&self) -> Result<PathBuf, String> {
        let Some(DevicePaths { bound, link }) = &self.device else { return Ok(self.target.clone()) };
        let doing = |what: &str, path: &Path, error: io::Error| format!("{what} {}: {error}", path.display());
        if !mount::is_mount_point(bound).map_err(|error| error.sentence())? {
            let make = OpenOptions::new().write(true).create(true).truncate(false).mode(0o660).open(bound);
            make.map_err(|error| doing("make", bound, error))?;
            let device =
                fs::canonicalize(&self.target).map_err(|error| doing("resolve", &self.target, error))?;
            mount::bind(&device, bound, mount::Attributes::default()).map_err(|error| error.sentence())?;
        }
        if fs::read_link(link).is_ok_and(|known| known == self.target) {
            return Ok(link.clone());
        }
        ignore_missing(fs::remove_file(link), link)?;
        symlink(&self.target, link).map_err(|error| doing("make the link", link, error))?;
        Ok(link.clone())
    }

    /// Removes the links and the device nodes that `map` made; missing ones are fine.
    pub(super) fn unmap(&self) -> Result<(), String> {
        let Some(DevicePaths { bound, link }) = &self.device else { return Ok(()) };
        ignore_missing(fs::remove_file(link), link)?;
        mount::unmount(bound).map_err(|error| error.sentence())?;
        ignore_missing(fs::remove_file(bound), bound)
    }

    /// Removes what is the pod's alone, unless something is still mounted there.
    pub(super) fn remove(&self) -> Result<(), String> {
        remove_driver_path(&self.target, self.is_block())?;
        if self.is_block() { Ok(()) } else { remove_with_data(&self.data) }
    }
}

/// The paths of every volume that is, or may be, staged on this node, with what its file says. Directories that a crash
/// left without a file are removed, and damaged files complained about.
pub(super) fn staged(layout: &Layout) -> Vec<VolData> {
    let mounted = mounted_directories(layout).into_iter().filter_map(|directory| {
        data_or(&directory, || {
            remove_driver_path(&directory.join("globalmount"), false)
                .and_then(|()| remove_with_data(&directory))
        })
    });
    let blocks = block_directories(layout)
        .into_iter()
        .filter_map(|directory| data_or(&directory.join("data"), || remove_device(&directory)));
    mounted.chain(blocks).collect()
}

/// What is staged of one device: a volume with a filesystem, or the block devices that lie under the names of their
/// PersistentVolumes.
pub(super) fn staged_of(
    layout: &Layout,
    driver: &str,
    handle: &str,
) -> Result<Vec<(NodePaths, VolData)>, String> {
    let mounted = NodePaths::mounted(layout, driver, handle);
    if let Some(data) = VolData::read(&mounted.data).map_err(|error| error.to_string())? {
        // A volume is one or the other, and to search the other kind means to read all of them.
        return Ok(vec![(mounted, data)]);
    }
    // Nothing was staged before the file was written.
    mounted.remove()?;
    let blocks = block_directories(layout).into_iter().filter_map(|directory| {
        // A file that is damaged belongs to a volume that nobody can name; it must not stop this one.
        let data = VolData::read(&directory.join("data")).ok()??;
        (data.driver == driver && data.handle == handle)
            .then(|| (NodePaths::block(layout, &name(&directory)), data))
    });
    Ok(blocks.collect())
}

/// The block volumes that pods have or may have. The link in a pod's directory does not show that: it is made last.
pub(super) fn placed_blocks(layout: &Layout) -> Vec<Placed> {
    let published = entries(&layout.csi_device("publish"));
    let published = published.into_iter().map(|volume| (name(&volume), entries(&volume)));
    let bound =
        block_directories(layout).into_iter().map(|volume| (name(&volume), entries(&volume.join("dev"))));
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

/// The directories of all volumes with a filesystem that are or may be staged.
fn mounted_directories(layout: &Layout) -> Vec<PathBuf> {
    entries(&layout.plugins().join(NAME))
        .into_iter()
        // Drivers have a dot or at least another name; these two are the kubelet's own.
        .filter(|driver| !driver.ends_with("volumeDevices") && !driver.ends_with("pv"))
        .flat_map(|driver| entries(&driver))
        .collect()
}

/// The directories of all block volumes, by their names.
fn block_directories(layout: &Layout) -> Vec<PathBuf> {
    let mut all = entries(&layout.csi_device(""));
    // These two lie among them.
    all.retain(|directory| !directory.ends_with("staging") && !directory.ends_with("publish"));
    all
}

/// The entries of a directory; none if it is not there.
pub(super) fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What the file in a directory says; without a file `remove` is called, and a damaged one is complained about.
pub(super) fn data_or(directory: &Path, remove: impl FnOnce() -> Result<(), String>) -> Option<VolData> {
    match VolData::read(directory) {
        Ok(None) => {
            // What is not empty is not ours to judge.
            if let Err(error) = remove() {
                tracing::warn!(error, "a directory of no known volume is left alone");
            }
            None
        }
        Ok(data) => data,
        Err(error) => {
            tracing::error!(%error, "a volume cannot be taken away until this is repaired");
            None
        }
    }
}

/// Removes what a driver should have removed, if nothing is mounted there: an empty directory, or of a block device a
/// file.
fn remove_driver_path(path: &Path, block: bool) -> Result<(), String> {
    if mount::is_mount_point(path).map_err(|error| error.sentence())? {
        return Err(format!("{} is still mounted although the driver was done with it", path.display()));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() || !block => ignore_missing(fs::remove_dir(path), path),
        Ok(_) => ignore_missing(fs::remove_file(path), path),
        Err(_) => Ok(()),
    }
}

/// Removes a directory that holds nothing but the file.
fn remove_with_data(directory: &Path) -> Result<(), String> {
    VolData::remove(directory)?;
    ignore_missing(fs::remove_dir(directory), directory)
}

/// Removes the directory of a block device that no pod has.
fn remove_device(directory: &Path) -> Result<(), String> {
    let bound = directory.join("dev");
    ignore_missing(fs::remove_dir(&bound), &bound)?;
    remove_with_data(&directory.join("data"))?;
    ignore_missing(fs::remove_dir(directory), directory)
}

fn ignore_missing(result: io::Result<()>, path: &Path) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The name of the file that says what a volume is.
const DATA_FILE: &str = "vol_data.json";

/// What is known of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct VolData {
    /// The name that the volume's directory has.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub(super) spec_name: String,
    /// The driver's name for the volume.
    #[serde(rename = "volumeHandle")]
    pub(super) handle: String,
    /// The name of the CSI driver.
    #[serde(rename = "driverName")]
    pub(super) driver: String,
    /// The name of the node, as upstream writes it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) node_name: String,
    /// The name of its VolumeAttachment, if there is one.
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub(super) attachment: String,
    /// The lifecycle mode, `Persistent` or `Ephemeral`.
    #[serde(rename = "volumeLifecycleMode", skip_serializing_if = "String::is_empty")]
    pub(super) mode: String,
}

/// Why the file does not say what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum Damaged {
    /// It cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// It is not what was written.
    #[error(
        "{} is damaged ({why}); write volumeHandle and driverName into it as JSON, or unmount what is below its \
         directory and remove that",
        path.display()
    )]
    Content { path: PathBuf, why: String },
}

impl VolData {
    /// What is written for a volume of a pod.
    pub(super) fn of_pod(volume: &PodVolume, csi: &CsiVolume, node: &str) -> Self {
        Self {
            spec_name: volume.spec_name().to_owned(),
            handle: csi.handle.clone(),
            driver: csi.driver.clone(),
            node_name: node.to_owned(),
            attachment: attachment_name(&csi.driver, &csi.handle, node),
            mode: csi.mode.as_str().to_owned(),
        }
    }

    /// What is written for the part of a volume that belongs to the node: more of a block device, as its pods have no
    /// file of their own.
    pub(super) fn of_node(volume: &PodVolume, csi: &CsiVolume, node: &str) -> Self {
        let data = Self { mode: String::new(), ..Self::of_pod(volume, csi, node) };
        if volume.block { data } else { Self { node_name: String::new(), attachment: String::new(), ..data } }
    }

    /// The unique name of the volume's device.
    pub(super) fn unique_name(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    /// Reads the file in a directory; `None` if there is none.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, Damaged> {
        let path = directory.join(DATA_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(source) => return Err(Damaged::Unreadable { path, source }),
        };
        let content = |why: String| Damaged::Content { path: path.clone(), why };
        let data: Self = serde_json::from_slice(&text).map_err(|error| content(error.to_string()))?;
        if data.handle.is_empty() || data.driver.is_empty() {
            return Err(content("the volume's handle or its driver is missing".to_owned()));
        }
        Ok(Some(data))
    }

    /// Writes the file, unless it already says so; the directory is made if need be.
    pub(super) fn write(&self, directory: &Path) -> berth_host::Result<()> {
        if Self::read(directory).is_ok_and(|known| known.as_ref() == Some(self)) {
            return Ok(());
        }
        let text = serde_json::to_vec(self).expect("a struct of strings is JSON");
        Dir::ensure(directory, 0o750)?.write_atomically(DATA_FILE, &text)
    }

    /// Removes the file, also one that was only half written.
    pub(super) fn remove(directory: &Path) -> Result<(), String> {
        match Dir::open(directory).and_then(|directory| directory.remove_written(DATA_FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.sentence()),
            _ => Ok(()),
        }
    }
}

/// The unique name of a device: what Node objects call it.
pub(super) fn unique_name(driver: &str, handle: &str) -> String {
    format!("{NAME}/{driver}^{handle}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kubelet_writes_is_read_and_written_back_under_its_names() {
        let directory = tempfile::tempdir().unwrap();
        let text = r#"{"attachmentID":"csi-1","driverName":"d","nodeName":"n","seLinuxMountContext":"x","specVolID":"pv","volumeHandle":"h","volumeLifecycleMode":"Persistent"}"#;
        fs::write(directory.path().join(DATA_FILE), text).unwrap();
        let data = VolData::read(directory.path()).unwrap().unwrap();
        assert_eq!(
            (data.spec_name.as_str(), data.attachment.as_str(), data.mode.as_str()),
            ("pv", "csi-1", "Persistent")
        );
        assert_eq!(data.unique_name(), "kubernetes.io/csi/d^h");
        let other = directory.path().join("a/b");
        data.write(&other).unwrap();
        data.write(&other).unwrap();
        assert_eq!(VolData::read(&other).unwrap(), Some(data));
        fs::write(other.join(format!(".{DATA_FILE}.7-0.new")), "{").unwrap();
        VolData::remove(&other).unwrap();
        VolData::remove(&other).unwrap();
        fs::remove_dir(&other).expect("nothing of the file is left");
        VolData::remove(&other).unwrap();
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(VolData::read(directory.path()).unwrap(), None);
        for text in ["", "{", "[]", r#"{"volumeHandle":"h"}"#, r#"{"volumeHandle":1,"driverName":"d"}"#] {
            fs::write(directory.path().join(DATA_FILE), text).unwrap();
            let error = VolData::read(directory.path()).unwrap_err().to_string();
            assert!(error.contains(&directory.path().join(DATA_FILE).display().to_string()), "{error}");
            assert_eq!(fs::read_to_string(directory.path().join(DATA_FILE)).unwrap(), text);
        }
    }
}
