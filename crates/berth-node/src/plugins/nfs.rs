//! `nfs` volumes of pods and PersistentVolumes: a directory of an NFS server, mounted for each pod by itself.
//!
//! What mounts is given by the program ([`NfsMounts`]): this crate knows neither the kernel's client nor another. Reads and
//! writes nothing in Kubernetes. On disk: the kubelet's layout, `pods/UID/volumes/kubernetes.io~nfs/NAME`. No path at which a
//! share is mounted is resolved here, so that a server that does not answer holds up nobody but its own volumes.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use berth_core::names::NFS_PLUGIN as NAME;
use berth_host::path::Dir;
use berth_runtime::blocking;

use super::mount_points::{is_there, remove_directory, settled, undo_mount};
use super::{record_step, record_undone_step};
use crate::layout::Layout;
use crate::plugin::{Failed, Placed, Plugin, PodVolume, Ready, Source};

/// A directory of an NFS server, and how it is to be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NfsShare {
    /// The name of the volume, for messages.
    pub name: String,
    /// The server's host name or address.
    pub server: String,
    /// The absolute path of the directory on the server.
    pub path: String,
    /// Nobody is to write to it.
    pub read_only: bool,
    /// Mount options of the PersistentVolume.
    pub options: Vec<String>,
}

/// Mounts directories of NFS servers, each by itself.
#[async_trait]
pub trait NfsMounts: Send + Sync {
    /// Mounts a share at an empty directory; the same share there already is success.
    async fn mount(&self, share: &NfsShare, target: &Path) -> Result<(), Failed>;

    /// Unmounts whatever is mounted at a directory, also of a server that does not answer; nothing there is success.
    async fn unmount(&self, target: &Path) -> Result<(), Failed>;
}

/// The plugin for `nfs`.
pub(super) struct Nfs {
    pub(super) layout: Layout,
    pub(super) node: String,
    pub(super) mounts: Arc<dyn NfsMounts>,
}

impl Nfs {
    async fn mount(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let share = share(volume)?;
        if volume.block {
            return Err(Failed::unchanged("an NFS server serves no block devices (volumeMode Block)"));
        }
        let target = self.layout.pod_volume(volume.pod_uid(), NAME, volume.spec_name());
        if !is_there(&target).await? {
            let directory = target.clone();
            blocking(move || Dir::ensure(&directory, 0o750).map(drop)).await?;
        }
        let mounted = self.mounts.mount(&share, &target).await;
        settled(mounted, target.clone()).await?;
        Ok(Ready { path: target })
    }

    async fn unmount(&self, placed: &Placed) -> Result<(), Failed> {
        let target = self.layout.pod_volume(&placed.pod_uid, NAME, &placed.spec_name);
        if !is_there(&target).await? {
            return Ok(());
        }
        let undo = async || {
            self.mounts.unmount(&target).await?;
            remove_directory(&target).await
        };
        undo_mount(&target, undo).await
    }
}

#[async_trait]
impl Plugin for Nfs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn serves(&self, source: &Source) -> bool {
        match source {
            Source::Inline(volume) => volume.nfs.is_some(),
            Source::Persistent { volume, .. } => volume.spec.as_ref().is_some_and(|spec| spec.nfs.is_some()),
        }
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let begun = Instant::now();
        let mounted = self.mount(volume).await;
        record_step(&self.node, "mount", "PUBLISHED", volume, begun, mounted.as_ref().err());
        mounted
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let begun = Instant::now();
        let undone = self.unmount(placed).await;
        record_undone_step(&self.node, "unmount", &placed.spec_name, begun, undone.as_ref().err());
        undone
    }
}

fn share(volume: &PodVolume) -> Result<NfsShare, Failed> {
    let (source, options) = match &volume.source {
        Source::Inline(inline) => (inline.nfs.as_ref(), None),
        Source::Persistent { volume, .. } => {
            let spec = volume.spec.as_ref();
            (spec.and_then(|spec| spec.nfs.as_ref()), spec.and_then(|spec| spec.mount_options.clone()))
        }
    };
    let source =
        source.ok_or_else(|| Failed::unchanged(format!("volume {} is not an nfs volume", volume.name)))?;
    Ok(NfsShare {
        name: volume.spec_name().to_owned(),
        server: source.server.clone(),
        path: source.path.clone(),
        read_only: volume.read_only || source.read_only == Some(true),
        options: options.unwrap_or_default(),
    })
}
