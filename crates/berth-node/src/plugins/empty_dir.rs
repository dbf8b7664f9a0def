//! `emptyDir`: a directory that a pod's containers share and that goes with the pod.
//!
//! Marked as ready once it is complete. From then on the pod may do with it what it likes, its mode included, and a
//! repeated `set_up` leaves it alone. In memory it is a tmpfs as large as the least of `sizeLimit`, the pod's memory
//! limit and what the node has; in huge pages it is a hugetlbfs. `sizeLimit` of one on disk is watched (`pods/eviction.rs`).

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use berth_core::names::EMPTY_DIR_PLUGIN;
use berth_host::ownership::{GroupPolicy, apply_group};
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::objects::NodeFacts;
use super::scratch::{Medium, Scratch};
use super::{Host, fs_group};
use crate::plugin::{Failed, Placed, Plugin, PodVolume, Ready, Source};

/// The plugin for `emptyDir`.
pub(super) struct EmptyDir {
    pub(super) host: Host,
}

#[async_trait]
impl Plugin for EmptyDir {
    fn name(&self) -> &'static str {
        EMPTY_DIR_PLUGIN
    }

    fn serves(&self, source: &Source) -> bool {
        spec(source).is_some()
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let spec = spec(&volume.source).ok_or_else(|| Failed::unchanged("the volume is no emptyDir"))?;
        let medium = match spec.medium.as_deref().unwrap_or_default() {
            "" => Medium::Disk,
            "Memory" => {
                let node = self.host.facts().await.unwrap_or_default();
                Medium::Memory { size: memory_size(spec, &volume.pod, &node) }
            }
            medium if medium.starts_with("HugePages") && berth_host::namespace::is_restricted() => {
                return Err(Failed::unchanged(format!(
                    "medium {medium} needs root, as whom this node does not run; medium Memory does not"
                )));
            }
            medium if medium.starts_with("HugePages") => {
                Medium::HugePages { page_size: page_size(medium, &volume.pod).map_err(Failed::unchanged)? }
            }
            medium => return Err(Failed::unchanged(format!("unknown storage medium {medium:?}"))),
        };
        let (host, uid, name, group) =
            (self.host.clone(), volume.pod_uid().to_owned(), volume.name.clone(), fs_group(&volume.pod));
        let make = move || {
            let scratch = Scratch::new(&host.layout, EMPTY_DIR_PLUGIN, &uid, &name)?;
            if scratch.open_ready(medium)?.is_none() {
                let directory = scratch.make(medium)?;
                if let Some(gid) = group {
                    apply_group(&directory, gid, GroupPolicy::Always, false)?;
                }
                scratch.mark_ready()?;
            }
            Ok::<_, berth_host::Error>(Ready { path: scratch.path() })
        };
        Ok(blocking(make).await?)
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let (host, placed) = (self.host.clone(), placed.clone());
        let remove = move || {
            Scratch::new(&host.layout, EMPTY_DIR_PLUGIN, &placed.pod_uid, &placed.spec_name)?.remove()
        };
        Ok(blocking(remove).await?)
    }
}

fn spec(source: &Source) -> Option<&EmptyDirVolumeSource> {
    match source {
        Source::Inline(volume) => volume.empty_dir.as_ref(),
        Source::Persistent { .. } => None,
    }
}

/// The size of the huge pages that a medium means: the one it names, or the only one that the pod has any of.
fn page_size(medium: &str, pod: &Pod) -> Result<u64, String> {
    let of_pod: BTreeSet<&str> = pod
        .spec
        .iter()
        .flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()))
        .filter_map(|container| container.resources.as_ref())
        .flat_map(|resources| resources.requests.iter().chain(&resources.limits).flatten())
        .filter_map(|(name, _)| name.strip_prefix("hugepages-"))
        .collect();
    let size = match (medium.strip_prefix("HugePages-"), of_pod.len()) {
        (Some(size), _) if of_pod.contains(size) => size,
        (Some(size), _) => {
            return Err(format!(
                "medium {medium}: no container of the pod has a request or limit for hugepages-{size}"
            ));
        }
        (None, 1) => of_pod.first().copied().unwrap_or_default(),
        (None, 0) => {
            return Err(format!(
                "medium {medium}: no container of the pod has a request or limit for huge pages"
            ));
        }
        (None, _) => {
            return Err(format!("medium {medium} is ambiguous: the pod has huge pages of several sizes"));
        }
    };
    bytes(&Quantity(size.to_owned())).ok_or_else(|| format!("{size:?} is not the size of a huge page"))
}

/// How large a tmpfs of the pod may become; none leaves it to the kernel (half of the memory).
fn memory_size(spec: &EmptyDirVolumeSource, pod: &Pod, node: &NodeFacts) -> Option<u64> {
    let wanted = spec.size_limit.as_ref().and_then(bytes);
    let allocatable = node.allocatable.get("memory").and_then(bytes);
    [wanted, memory_limit(pod), allocatable].into_iter().flatten().min()
}

/// What all containers of the pod together may use, where each has a limit or the pod has one itself.
fn memory_limit(pod: &Pod) -> Option<u64> {
    let spec = pod.spec.as_ref()?;
    if let Some(limit) = spec.resources.as_ref().and_then(of) {
        return Some(limit);
    }
    let together = |containers: &[&Container]| {
        containers.iter().try_fold(0_u64, |sum, container| Some(sum.saturating_add(limit(container)?)))
    };
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let (beside, before): (Vec<&Container>, Vec<&Container>) =
        init.iter().partition(|container| container.restart_policy.as_deref() == Some("Always"));
    let beside = together(&beside)?;
    let running = together(&spec.containers.iter().collect::<Vec<_>>())?.saturating_add(beside);
    let before = before.into_iter().map(|container| Some(limit(container)?.saturating_add(beside)));
    before.chain([Some(running)]).collect::<Option<Vec<_>>>()?.into_iter().max()
}

fn limit(container: &Container) -> Option<u64> {
    of(container.resources.as_ref()?)
}

fn of(resources: &ResourceRequirements) -> Option<u64> {
    resources
        .limits
        .as_ref()
        .and_then(|limits: &BTreeMap<String, Quantity>| limits.get("memory"))
        .and_then(bytes)
}

/// A size that limits something: zero limits nothing.
fn bytes(quantity: &Quantity) -> Option<u64> {
    let amount: berth_core::Quantity = quantity.0.parse().ok()?;
    u64::try_from(amount.value()).ok().filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests;
