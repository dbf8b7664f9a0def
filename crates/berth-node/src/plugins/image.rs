//! `image`: the files of a container image, read-only and without programs that can be run.
//!
//! On disk: the kubelet's layout, `pods/UID/volumes/kubernetes.io~image/NAME`, where the unpacked image (`images.rs`) is
//! bound; beside it, in the pod's directory of this plugin, which image that is. A pod keeps its image until it is gone,
//! whatever its reference leads to meanwhile.

use std::time::Instant;

use async_trait::async_trait;
use berth_core::names::IMAGE_PLUGIN as NAME;
use berth_host::mount::{self, Attributes};
use berth_host::path::Dir;
use berth_kube::Recorder;
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::ImageVolumeSource;

use super::mount_points::{is_there, prepare, remove_directory, undo_mount, unmount};
use crate::images::{Images, PullPolicy};
use crate::layout::Layout;
use crate::plugin::{Failed, Placed, Plugin, PodVolume, Ready, Source};

/// The file that names the image of a volume.
const DIGEST: &str = "digest";

/// The plugin for `image`.
pub(super) struct Image {
    layout: Layout,
    images: Images,
    recorder: Recorder,
}

impl Image {
    pub(super) fn new(layout: &Layout, recorder: Recorder) -> Self {
        let images = Images::new(layout.unpacked_images(), layout.images());
        Self { layout: layout.clone(), images, recorder }
    }

    /// Which image the volume was given before, if it was.
    async fn recorded(&self, uid: &str, name: &str) -> Option<String> {
        let file = self.layout.pod_plugin(uid, NAME, name).join(DIGEST);
        blocking(move || std::fs::read_to_string(file).ok()).await
    }
}

#[async_trait]
impl Plugin for Image {
    fn name(&self) -> &'static str {
        NAME
    }

    fn serves(&self, source: &Source) -> bool {
        spec(source).is_some()
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let spec = spec(&volume.source).ok_or_else(|| Failed::unchanged("the volume is no image"))?;
        let reference = spec.reference.as_deref().unwrap_or_default();
        let policy = match spec.pull_policy.as_deref() {
            Some("Always") => PullPolicy::Always,
            Some("Never") => PullPolicy::Never,
            _ => PullPolicy::IfNotPresent,
        };
        let (uid, name) = (volume.pod_uid(), volume.spec_name());
        let target = self.layout.pod_volume(uid, NAME, name);
        if prepare(&target).await? {
            return Ok(Ready { path: target });
        }
        let begun = Instant::now();
        let before = self.recorded(uid, name).await;
        let kept = match &before {
            Some(digest) => self.images.acquire_again(digest, &user(uid, name)).await?,
            None => None,
        };
        let image = match kept {
            Some(image) => image,
            None => self.images.acquire(reference, policy, &user(uid, name)).await?,
        };
        let record = self.layout.pod_plugin(uid, NAME, name);
        let (source, digest, mounted) = (image.root.clone(), image.digest.clone(), target.clone());
        let bind = move || {
            Dir::ensure(&record, 0o700)?.write_atomically(DIGEST, digest.as_bytes())?;
            let attributes = Attributes {
                read_only: true,
                nosuid: true,
                nodev: true,
                noexec: true,
                ..Attributes::default()
            };
            mount::bind(&source, &mounted, attributes)
        };
        blocking(bind).await?;
        if before.is_none() {
            let message = format!(
                "Image {reference} is {} ({} ms)",
                image.digest.replace('-', ":"),
                begun.elapsed().as_millis()
            );
            self.recorder.normal(volume.pod.as_ref(), "Pulled", message);
        }
        Ok(Ready { path: target })
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let (uid, name) = (&placed.pod_uid, &placed.spec_name);
        let target = self.layout.pod_volume(uid, NAME, name);
        if is_there(&target).await? {
            let undo = async || {
                unmount(&target).await?;
                remove_directory(&target).await
            };
            undo_mount(&target, undo).await?;
        }
        if let Some(digest) = self.recorded(uid, name).await {
            self.images.release(&digest, &user(uid, name)).await?;
        }
        let record = self.layout.pod_plugin(uid, NAME, name);
        blocking(move || berth_host::path::remove_tree(&record)).await?;
        Ok(())
    }

    /// Images whose pods are gone, as after a kill, are removed here: nothing else has begun.
    fn staged(&self) -> Vec<crate::plugin::Device> {
        let is_there = |user: &str| {
            let uid = user.split_once('~').map_or(user, |(uid, _)| uid);
            self.layout.pod(uid).exists()
        };
        if let Err(error) = self.images.recover(is_there) {
            tracing::warn!(error = error.sentence(), "images that nobody uses stay");
        }
        Vec::new()
    }
}

/// The name of a volume among the users of an image.
fn user(uid: &str, name: &str) -> String {
    format!("{uid}~{name}")
}

fn spec(source: &Source) -> Option<&ImageVolumeSource> {
    match source {
        Source::Inline(volume) => volume.image.as_ref(),
        Source::Persistent { .. } => None,
    }
}
