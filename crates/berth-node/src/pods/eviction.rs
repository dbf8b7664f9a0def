//! Evicts pods that take more of the node's disk than they may: `sizeLimit` of emptyDir volumes, and limits of
//! `ephemeral-storage`, which count emptyDir volumes on disk and logs.
//!
//! As the kubelet does it, the disk is measured at intervals, so that a pod may exceed its limit for a moment. Volumes in
//! memory are not measured: the kernel refuses what exceeds their size.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::EMPTY_DIR_PLUGIN;
use berth_host::path::Dir;
use berth_host::usage;
use berth_kube::storage::{is_over, volumes_of_pod};
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt as _;
use tokio::time::MissedTickBehavior;

use super::status::EVICTED;
use super::{End, Pods};
use crate::layout::Layout;

/// How often the disk is measured, as by the kubelet.
const PERIOD: Duration = Duration::from_secs(10);
/// How long the containers of a pod that is evicted have to end.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// What a pod takes of the disk, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Usage {
    /// Its emptyDir volumes on disk, by name.
    volumes: BTreeMap<String, u64>,
    /// The logs of its containers, by name.
    logs: BTreeMap<String, u64>,
}

impl Pods {
    /// Looks at the disk until the cluster's shutdown.
    pub(super) async fn watch_storage(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shutdown = self.options.cluster.shutdown().clone();
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            for pod in self.cache.list() {
                if is_over(&pod) || pod.metadata.deletion_timestamp.is_some() || !is_limited(&pod) {
                    continue;
                }
                let (layout, watched) = (self.options.layout.clone(), pod.clone());
                let used = blocking(move || Usage::measure(&layout, &watched)).await;
                if let Some(message) = exceeded(&pod, &used) {
                    self.evict(&pod, message);
                }
            }
        }
    }

    /// Ends a pod, and says why.
    fn evict(&self, pod: &Pod, message: String) {
        let uid = pod.uid().unwrap_or_default();
        let Some(entry) = self.entry(&uid) else { return };
        entry.end(End { reason: EVICTED, message });
        self.options.queue.add(uid);
    }
}

impl Usage {
    /// What cannot be read counts nothing.
    fn measure(layout: &Layout, pod: &Pod) -> Self {
        let tree =
            |path: &Path| Dir::open(path).and_then(|dir| usage::tree(&dir)).map_or(0, |used| used.bytes);
        let (uid, name) = (pod.uid().unwrap_or_default(), pod.name_any());
        let on_disk = volumes_of_pod(pod).iter().filter(|volume| {
            volume.empty_dir.as_ref().is_some_and(|own| own.medium.as_deref().unwrap_or_default().is_empty())
        });
        let logs = layout.logs(&pod.namespace().unwrap_or_default(), &name, &uid);
        Self {
            volumes: on_disk
                .map(|volume| {
                    let path = layout.pod_volume(&uid, EMPTY_DIR_PLUGIN, &volume.name);
                    (volume.name.clone(), tree(&path))
                })
                .collect(),
            logs: containers(pod)
                .map(|container| (container.name.clone(), tree(&logs.join(&container.name))))
                .collect(),
        }
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Whether anything of a pod's use of the disk is limited.
fn is_limited(pod: &Pod) -> bool {
    let of_volume = volumes_of_pod(pod)
        .iter()
        .any(|volume| volume.empty_dir.as_ref().is_some_and(|own| own.size_limit.is_some()));
    of_volume || containers(pod).any(|container| storage_limit(container).is_some())
}

fn storage_limit(container: &Container) -> Option<(u64, &Quantity)> {
    let limit = container.resources.as_ref()?.limits.as_ref()?.get("ephemeral-storage")?;
    Some((bytes(limit)?, limit))
}

/// A size that limits something: zero limits nothing.
fn bytes(quantity: &Quantity) -> Option<u64> {
    let amount: berth_core::Quantity = quantity.0.parse().ok()?;
    u64::try_from(amount.value()).ok().filter(|bytes| *bytes > 0)
}

/// Why a pod is evicted, in upstream's words and order.
fn exceeded(pod: &Pod, used: &Usage) -> Option<String> {
    for volume in volumes_of_pod(pod) {
        let Some(limit) = volume.empty_dir.as_ref().and_then(|own| own.size_limit.as_ref()) else { continue };
        let taken = used.volumes.get(&volume.name).copied().unwrap_or(0);
        if bytes(limit).is_some_and(|allowed| taken > allowed) {
            return Some(format!(
                "Usage of EmptyDir volume {:?} exceeds the limit {:?}. ",
                volume.name, limit.0
            ));
        }
    }
    let limits: Option<Vec<u64>> =
        containers(pod).map(|container| storage_limit(container).map(|limit| limit.0)).collect();
    // As upstream: where a container has no limit, the pod as a whole has none.
    if let Some(allowed) = limits.map(|limits| limits.iter().sum::<u64>()) {
        let taken: u64 = used.volumes.values().chain(used.logs.values()).sum();
        if taken > allowed {
            return Some(format!(
                "Pod ephemeral local storage usage exceeds the total limit of containers {allowed}. "
            ));
        }
    }
    containers(pod).find_map(|container| {
        let (allowed, limit) = storage_limit(container)?;
        let taken = used.logs.get(&container.name).copied().unwrap_or(0);
        (taken > allowed).then(|| {
            format!("Container {} exceeded its local ephemeral storage limit {:?}. ", container.name, limit.0)
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(volumes: &Value, limits: &[Option<&str>]) -> Pod {
        let container = |(number, limit): (usize, Option<&str>)| match limit {
            None => json!({ "name": format!("c{number}") }),
            Some(limit) => {
                json!({ "name": format!("c{number}"), "resources": { "limits": { "ephemeral-storage": limit } } })
            }
        };
        let containers: Vec<Value> = limits.iter().copied().enumerate().map(container).collect();
        let pod = json!({ "spec": { "containers": containers, "volumes": volumes } });
        serde_json::from_value(pod).unwrap()
    }

    fn used(volumes: &[(&str, u64)], logs: &[(&str, u64)]) -> Usage {
        let map =
            |rows: &[(&str, u64)]| rows.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        Usage { volumes: map(volumes), logs: map(logs) }
    }

    #[test]
    fn a_pod_is_evicted_by_what_it_takes_and_may_take() {
        let limited = json!([{ "name": "v", "emptyDir": { "sizeLimit": "1Mi" } }]);
        let free = json!([{ "name": "v", "emptyDir": {} }]);
        let mib = 1 << 20;
        let rows = vec![
            (pod(&limited, &[None]), used(&[("v", mib)], &[]), None),
            (
                pod(&limited, &[None]),
                used(&[("v", mib + 1)], &[]),
                Some("Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". "),
            ),
            (pod(&free, &[None]), used(&[("v", 1 << 40)], &[]), None),
            // The volume counts against the limits of all containers, and only if each has one.
            (
                pod(&free, &[Some("1Mi"), Some("1Mi")]),
                used(&[("v", 2 * mib)], &[("c0", 1)]),
                Some("Pod ephemeral local storage usage exceeds the total limit of containers 2097152. "),
            ),
            (pod(&free, &[Some("1Mi"), None]), used(&[("v", 4 * mib)], &[("c0", 1)]), None),
            (
                pod(&free, &[Some("1Mi"), None]),
                used(&[], &[("c0", mib + 1)]),
                Some("Container c0 exceeded its local ephemeral storage limit \"1Mi\". "),
            ),
            (
                pod(&json!([{ "name": "v", "emptyDir": { "sizeLimit": "0" } }]), &[None]),
                used(&[("v", 9)], &[]),
                None,
            ),
        ];
        for (pod, used, expected) in rows {
            assert_eq!(exceeded(&pod, &used).as_deref(), expected, "{used:?}");
        }
    }
}
