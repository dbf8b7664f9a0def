//! The volume plugins, one module for each type of volume (`csi.rs`, `empty_dir.rs`, `host_path.rs`, `local.rs`, `nfs.rs`,
//! `projected.rs`).
//!
//! [`plugins`] makes those that need no driver; `all_plugins` in `node.rs` adds the one for CSI drivers. To add a type,
//! write a module that implements `Plugin` (`plugin.rs`) and add it in [`plugins`]. A volume that no plugin serves gets the
//! message of [`unsupported`]. [`environment()`] makes a container's environment of the same objects as `projected.rs`.

pub(crate) mod csi;
mod empty_dir;
mod environment;
mod fields;
mod flex;
mod host_path;
mod image;
mod local;
mod mount_points;
mod nfs;
mod objects;
mod projected;
mod scratch;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use berth_host::ownership::{GroupPolicy, apply_group};
use berth_host::path::Dir;
use berth_kube::timeline::Step;
use berth_kube::{Cluster, Key, Recorder};
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::{Pod, SecurityContext, VolumeMount};
use serde::Serialize;

pub(crate) use self::environment::{environment, expand};
pub(crate) use self::flex::Flex;
pub use self::nfs::{NfsMounts, NfsShare};
pub(crate) use self::objects::{NodeFacts, Objects};
use crate::layout::Layout;
use crate::plugin::{Failed, Plugin, PodVolume, Source};
use crate::tokens::Tokens;

/// Called with a pod's uid when its volumes should be set up again.
pub(crate) type Refresh = Arc<dyn Fn(&str) + Send + Sync>;

/// What the plugins need of the node.
#[derive(Clone)]
struct Host {
    layout: Layout,
    cluster: Cluster,
    node: String,
}

impl Host {
    async fn facts(&self) -> Result<NodeFacts, Failed> {
        NodeFacts::read(&self.cluster, &self.node).await
    }
}

/// The plugins for all kinds of volumes that need no driver, on the node of this name.
pub(crate) fn plugins(
    layout: &Layout,
    cluster: &Cluster,
    node: &str,
    tokens: &Tokens,
    recorder: &Recorder,
    nfs: Option<Arc<dyn NfsMounts>>,
    refresh: Refresh,
) -> Vec<Arc<dyn Plugin>> {
    let host = Host { layout: layout.clone(), cluster: cluster.clone(), node: node.to_owned() };
    let mut plugins: Vec<Arc<dyn Plugin>> = vec![
        Arc::new(empty_dir::EmptyDir { host: host.clone() }),
        Arc::new(host_path::HostPath { layout: layout.clone() }),
        Arc::new(local::Local::new(layout, node, recorder.clone())),
        Arc::new(image::Image::new(layout, recorder.clone())),
    ];
    if let Some(mounts) = nfs {
        plugins.push(Arc::new(nfs::Nfs { layout: layout.clone(), node: node.to_owned(), mounts }));
    }
    plugins.extend(projected::plugins(&host, tokens, refresh));
    plugins
}

/// What to say of a volume that no plugin serves.
pub(crate) fn unsupported(volume: &PodVolume) -> String {
    let kind = match &volume.source {
        Source::Inline(inline) => kind_of(inline.as_ref(), &["name"]),
        Source::Persistent { volume, .. } => kind_of(&volume.spec, NO_SOURCES),
    };
    let name = &volume.name;
    match kind {
        Some(kind) => format!("volume {name}: {kind} is not supported"),
        None => format!("volume {name} does not say what it is made of"),
    }
}

/// The fields of a PersistentVolume's spec that do not say what it is made of.
const NO_SOURCES: &[&str] = &[
    "accessModes",
    "capacity",
    "claimRef",
    "mountOptions",
    "nodeAffinity",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "volumeAttributesClassName",
    "volumeMode",
];

/// The one field that is set, besides the `others`.
fn kind_of(object: &impl Serialize, others: &[&str]) -> Option<String> {
    let object = serde_json::to_value(object).ok()?;
    object.as_object()?.keys().find(|field| !others.contains(&field.as_str())).cloned()
}

/// The group that the pod's volumes belong to.
fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    u32::try_from(context.fs_group?).ok()
}

/// Gives a volume that is mounted at `target` to the pod's group, by the pod's policy.
async fn give_to_group(pod: &Pod, target: &Path, group: u32) -> berth_host::Result<()> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let policy = match context.and_then(|context| context.fs_group_change_policy.as_deref()) {
        Some("OnRootMismatch") => GroupPolicy::OnRootMismatch,
        _ => GroupPolicy::Always,
    };
    let target = target.to_owned();
    blocking(move || Dir::open(&target).and_then(|top| apply_group(&top, group, policy, false))).await?;
    Ok(())
}

/// The component that the timeline names for what drivers do on this node.
const COMPONENT: &str = "volume-manager";

/// Records in the timeline what a driver did to set a volume up.
fn record_step(
    node: &str,
    call: &str,
    state: &str,
    volume: &PodVolume,
    begun: Instant,
    failed: Option<&Failed>,
) {
    let claim = match &volume.source {
        Source::Persistent { claim, .. } => Key::of(claim.as_ref()).to_string(),
        Source::Inline(_) => String::new(),
    };
    let persistent = !claim.is_empty();
    Step {
        component: COMPONENT,
        call,
        state,
        volume: if persistent { volume.spec_name() } else { "" },
        claim: &claim,
        pod: &Key::of(volume.pod.as_ref()).to_string(),
        node,
        ..Step::default()
    }
    .ended(begun, failed.map(|failed| failed.message.as_str()));
}

/// Records in the timeline what a driver did to tear a volume down.
fn record_undone_step(node: &str, call: &str, volume: &str, begun: Instant, failed: Option<&Failed>) {
    Step { component: COMPONENT, call, volume, node, ..Step::default() }
        .ended(begun, failed.map(|failed| failed.message.as_str()));
}

/// The user that all containers of the pod run as, where there is one.
fn fs_user(pod: &Pod) -> Option<u32> {
    let default = pod.spec.as_ref()?.security_context.as_ref().and_then(|context| context.run_as_user);
    let mut users = containers(pod)
        .map(|container| container.security_context.and_then(|context| context.run_as_user).or(default));
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok())?
}

/// What counts here of a container of any kind.
struct AnyContainer<'a> {
    mounts: &'a [VolumeMount],
    security_context: Option<&'a SecurityContext>,
}

/// All containers of a pod: init containers, main ones, ephemeral ones.
fn containers(pod: &Pod) -> impl Iterator<Item = AnyContainer<'_>> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let usual =
            spec.init_containers.iter().flatten().chain(&spec.containers).map(|container| AnyContainer {
                mounts: container.volume_mounts.as_deref().unwrap_or_default(),
                security_context: container.security_context.as_ref(),
            });
        let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| AnyContainer {
            mounts: container.volume_mounts.as_deref().unwrap_or_default(),
            security_context: container.security_context.as_ref(),
        });
        usual.chain(ephemeral)
    })
}

#[cfg(test)]
mod tests;
