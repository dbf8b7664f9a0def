//! `local` PersistentVolumes: a directory of the node, or a block device of it, mounted or as it is.
//!
//! Reads and writes nothing in Kubernetes. Events: `AlreadyMountedVolume`, where a pod wants another group than the pod that
//! came first. On disk: the kubelet's layout, `pods/UID/volumes/kubernetes.io~local-volume/PV` bound from the directory, or
//! from `plugins/kubernetes.io/local-volume/mounts/PV`, where a block device is mounted once for all pods;
//! `pods/UID/volumeDevices/kubernetes.io~local-volume/PV` is a link to a device that pods get as it is. What lies on the
//! directory or the device belongs to whoever made the PersistentVolume, and is never removed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Instant;

use async_trait::async_trait;
use berth_core::names::LOCAL_PLUGIN as NAME;
use berth_host::Doing as _;
use berth_host::mount::{self, parse_options};
use berth_host::path::Dir;
use berth_kube::Recorder;
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::LocalVolumeSource;
use parking_lot::Mutex;

use super::mount_points::{mount_device, prepare, remove_directory, settled, undo_mount, unmount};
use super::{fs_group, give_to_group, record_step, record_undone_step};
use crate::layout::Layout;
use crate::plugin::{Device, Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::volumes::names;

/// The plugin for `local` PersistentVolumes.
pub(super) struct Local {
    layout: Layout,
    node: String,
    recorder: Recorder,
    /// The pods that have each volume, by the PersistentVolume's name, as far as they were served since the start.
    users: Mutex<HashMap<String, HashSet<String>>>,
}

/// What is at the path of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Directory,
    BlockDevice,
}

impl Local {
    /// The plugin on the node of this name.
    pub(super) fn new(layout: &Layout, node: &str, recorder: Recorder) -> Self {
        Self { layout: layout.clone(), node: node.to_owned(), recorder, users: Mutex::default() }
    }

    /// Where a device is mounted once for all pods.
    fn staging(&self, name: &str) -> PathBuf {
        self.layout.local_mounts().join(name)
    }

    /// Makes the volume appear in the pod's directory, bound from a directory.
    async fn bind(&self, volume: &PodVolume, source: PathBuf) -> Result<Ready, Failed> {
        let target = self.layout.pod_volume(volume.pod_uid(), NAME, volume.spec_name());
        if !prepare(&target).await? {
            let (at, mut attributes) = (target.clone(), options(volume).attributes);
            attributes.read_only |= volume.read_only;
            let bound = blocking(move || {
                // Whoever made the volume may have named it by a link.
                let source = fs::canonicalize(&source).doing("follow the links of", &source)?;
                mount::bind(&source, &at, attributes)
            });
            let bound = bound.await.map_err(|error| Failed::finally(error.sentence()));
            settled(bound, target.clone()).await?;
        }
        self.give_to_group(volume, &target).await;
        Ok(Ready { path: target })
    }

    /// Gives the volume to the pod's group, unless another pod has it already.
    async fn give_to_group(&self, volume: &PodVolume, target: &Path) {
        let first = {
            let mut users = self.users.lock();
            let users = users.entry(volume.spec_name().to_owned()).or_default();
            users.insert(volume.pod_uid().to_owned());
            users.len() == 1
        };
        let Some(group) = fs_group(&volume.pod).filter(|_| !volume.read_only) else { return };
        let given = if first {
            give_to_group(&volume.pod, target, group).await
        } else {
            let (at, name) = (target.to_owned(), volume.spec_name().to_owned());
            let has = blocking(move || {
                fs::metadata(&at).map(|seen| seen.gid()).doing("read the attributes of", &at)
            })
            .await;
            has.map(|has| {
                if has != group {
                    let message = format!(
                        "The requested fsGroup is {group}, but the volume {name} has GID {has}. The volume may not be \
                         shareable."
                    );
                    self.recorder.warning(volume.pod.as_ref(), "AlreadyMountedVolume", message);
                }
            })
        };
        // The kubelet starts the pod also where files cannot be given to its group.
        if let Err(error) = given {
            let error = error.sentence();
            tracing::warn!(volume = volume.spec_name(), group, error, "not given to the pod's group");
        }
    }

    /// Gives a pod the device as it is.
    async fn map(&self, volume: &PodVolume, device: PathBuf) -> Result<Ready, Failed> {
        let link = self.layout.pod_device(volume.pod_uid(), NAME, volume.spec_name());
        let made = link.clone();
        blocking(move || {
            if let Some(parent) = link.parent() {
                Dir::ensure(parent, 0o750)?;
            }
            if fs::read_link(&link).is_ok_and(|known| known == device) {
                return Ok(());
            }
            remove_link(&link)?;
            symlink(&device, &link).doing("make the link", &link)
        })
        .await?;
        Ok(Ready { path: made })
    }

    async fn set_up_volume(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let path = PathBuf::from(&spec(volume)?.path);
        match (inspect(volume)?, volume.block) {
            (Found::BlockDevice, true) => self.map(volume, path).await,
            (Found::Directory, true) => Err(not_a_device(volume, &path)),
            (Found::BlockDevice, false) => self.bind(volume, self.staging(volume.spec_name())).await,
            (Found::Directory, false) => self.bind(volume, path).await,
        }
    }

    async fn stage_device(&self, volume: &PodVolume) -> Result<(), Failed> {
        let source = spec(volume)?;
        let staging = self.staging(volume.spec_name());
        if prepare(&staging).await? {
            return Ok(());
        }
        let (device, fs_type) = (PathBuf::from(&source.path), source.fs_type.clone().unwrap_or_default());
        let (target, options) = (staging.clone(), options(volume));
        let mounted = blocking(move || mount_device(&device, &target, &fs_type, &options)).await;
        settled(mounted.map_err(|error| Failed::finally(error.sentence())), staging).await
    }
}

#[async_trait]
impl Plugin for Local {
    fn name(&self) -> &'static str {
        NAME
    }

    fn serves(&self, source: &Source) -> bool {
        match source {
            Source::Inline(_) => false,
            Source::Persistent { volume, .. } => {
                volume.spec.as_ref().is_some_and(|spec| spec.local.is_some())
            }
        }
    }

    fn device(&self, volume: &PodVolume) -> Result<Option<Device>, Failed> {
        let stage = inspect(volume)? == Found::BlockDevice && !volume.block;
        Ok(Some(Device { unique_name: unique_name(volume.spec_name()), attach: false, stage }))
    }

    async fn stage(&self, volume: &PodVolume) -> Result<(), Failed> {
        let begun = Instant::now();
        let staged = self.stage_device(volume).await;
        record_step(&self.node, "mount device", "VOL_READY", volume, begun, staged.as_ref().err());
        staged
    }

    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        let Some(name) = device.strip_prefix(NAME).and_then(|rest| rest.strip_prefix('/')) else {
            return Err(Failed::finally(format!("{device:?} is not the name of a local volume")));
        };
        let begun = Instant::now();
        let staging = self.staging(name);
        let undone = match unmount(&staging).await {
            Ok(()) => remove_directory(&staging).await,
            failed => failed,
        };
        record_undone_step(&self.node, "unmount device", name, begun, undone.as_ref().err());
        undone
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let begun = Instant::now();
        let ready = self.set_up_volume(volume).await;
        let call = if volume.block { "map" } else { "bind" };
        record_step(&self.node, call, "PUBLISHED", volume, begun, ready.as_ref().err());
        ready
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        if placed.block {
            let link = self.layout.pod_device(&placed.pod_uid, NAME, &placed.spec_name);
            return Ok(blocking(move || remove_link(&link)).await?);
        }
        let target = self.layout.pod_volume(&placed.pod_uid, NAME, &placed.spec_name);
        let undo = async || {
            unmount(&target).await?;
            remove_directory(&target).await
        };
        undo_mount(&target, undo).await?;
        let mut users = self.users.lock();
        if let Some(of_volume) = users.get_mut(&placed.spec_name) {
            of_volume.remove(&placed.pod_uid);
            if of_volume.is_empty() {
                users.remove(&placed.spec_name);
            }
        }
        Ok(())
    }

    fn staged(&self) -> Vec<Device> {
        let staged = names(&self.layout.local_mounts()).into_iter();
        staged.map(|name| Device { unique_name: unique_name(&name), attach: false, stage: true }).collect()
    }

    fn device_of(&self, placed: &Placed) -> Option<Device> {
        let stage = names(&self.layout.local_mounts()).contains(&placed.spec_name);
        Some(Device { unique_name: unique_name(&placed.spec_name), attach: false, stage })
    }
}

fn unique_name(volume: &str) -> String {
    format!("{NAME}/{volume}")
}

fn spec(volume: &PodVolume) -> Result<&LocalVolumeSource, Failed> {
    let source = match &volume.source {
        Source::Inline(_) => None,
        Source::Persistent { volume, .. } => volume.spec.as_ref().and_then(|spec| spec.local.as_ref()),
    };
    source.ok_or_else(|| Failed::unchanged(format!("volume {} is not a local volume", volume.name)))
}

fn options(volume: &PodVolume) -> mount::Options {
    let given = match &volume.source {
        Source::Inline(_) => None,
        Source::Persistent { volume, .. } => {
            volume.spec.as_ref().and_then(|spec| spec.mount_options.as_ref())
        }
    };
    parse_options(given.map(Vec::as_slice).unwrap_or_default())
}

/// What is at the volume's path.
fn inspect(volume: &PodVolume) -> Result<Found, Failed> {
    let path = Path::new(&spec(volume)?.path);
    if path.components().any(|part| part == std::path::Component::ParentDir) {
        let path = path.display();
        return Err(Failed::unchanged(format!("the path {path} of the local volume must not contain ..")));
    }
    let seen = fs::metadata(path).map_err(|error| {
        let what = if error.kind() == io::ErrorKind::NotFound {
            format!("path {} does not exist", path.display())
        } else {
            format!("read the attributes of {}: {error}", path.display())
        };
        Failed::unchanged(what)
    })?;
    if seen.is_dir() {
        Ok(Found::Directory)
    } else if seen.file_type().is_block_device() {
        Ok(Found::BlockDevice)
    } else {
        Err(Failed::unchanged(format!("{} is neither a directory nor a block device", path.display())))
    }
}

fn not_a_device(volume: &PodVolume, path: &Path) -> Failed {
    Failed::unchanged(format!(
        "the PersistentVolume {} has volumeMode Block, but {} is no block device",
        volume.spec_name(),
        path.display()
    ))
}

fn remove_link(link: &Path) -> berth_host::Result<()> {
    match fs::remove_file(link) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.doing("remove", link),
    }
}
