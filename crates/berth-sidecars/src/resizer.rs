//! Grows volumes whose claims ask for more, and changes their attributes when claims name another class of them.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume, VolumeAttributesClass; Secret one at a time; the pods of one
//! namespace, only after a driver has refused to grow a volume in use. Writes: claims' status (conditions,
//! `allocatedResources`, `allocatedResourceStatuses`, `capacity`, `modifyVolumeStatus`,
//! `currentVolumeAttributesClassName`), volumes' capacity and attributes class. Events on claims: `Resizing`,
//! `FileSystemResizeRequired`, `VolumeResizeSuccessful`, `VolumeResizeFailed`, `VolumeModify`, `VolumeModifySuccessful`,
//! `VolumeModifyFailed`, `VolumeModifyCanceled`.
//!
//! The size that is being worked towards is written to `allocatedResources` before the driver is asked for it, so a
//! claim that is made smaller again, or a restart, never loses track of what the driver may have done.

mod apply;
mod expand;
mod modify;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Queue, Recorder};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::ResourceExt as _;
use parking_lot::Mutex;

use crate::driver::{ControllerCapability, Driver, Identity, NodeCapability};
use crate::node_topology::NodeTopology;

/// How a resizer works; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many claims are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// A volume that the driver will not grow in use is not tried again while a pod uses it.
    pub handle_volume_in_use_error: bool,
    /// Claim and volume names are given to the driver as mutable parameters.
    pub extra_modify_metadata: bool,
    /// Every node has a resizer of its own, which leaves volumes alone that cannot be used there.
    pub per_node: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            workers: 10,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            handle_volume_in_use_error: true,
            extra_modify_metadata: false,
            per_node: false,
        }
    }
}

/// Grows and modifies until the cluster's shutdown, then finishes what is under way.
pub async fn run(cluster: Cluster, driver: Driver, options: Options) {
    let shutdown = cluster.shutdown().clone();
    let identity = tokio::select! {
        () = shutdown.cancelled() => return,
        identity = driver.ready() => identity,
    };
    let topology = if options.per_node {
        tokio::select! {
            () = shutdown.cancelled() => return,
            topology = NodeTopology::find(&driver, options.timeout) => Some(topology),
        }
    } else {
        None
    };
    let resizer = Arc::new(Resizer { topology, ..Resizer::new(&cluster, driver, options, &identity) });
    let work = |key: Key| {
        let resizer = resizer.clone();
        async move { resizer.sync(&key).await }
    };
    let (workers, keys) = (resizer.options.workers, || resizer.claims.keys());
    resizer.driver.run_loop(resizer.control_loop(), workers, keys, work).await;
}

/// What a driver can do about sizes and attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Abilities {
    /// The controller announces ControllerExpandVolume.
    controller_expand: bool,
    /// The nodes announce NodeExpandVolume.
    node_expand: bool,
    /// The controller announces ControllerModifyVolume.
    modify: bool,
}

impl Abilities {
    fn of(identity: &Identity) -> Self {
        Self {
            controller_expand: identity.can(ControllerCapability::ExpandVolume),
            node_expand: identity.node.contains(&NodeCapability::ExpandVolume),
            modify: identity.can(ControllerCapability::ModifyVolume),
        }
    }
}

/// What is known of a claim beyond its status; lost by a restart, which then is as careful as it can.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    /// The last ControllerExpandVolume was finally refused.
    expand_refused: bool,
    /// The driver refused because the volume is in use.
    in_use: bool,
    /// The last ControllerModifyVolume was finally refused.
    modify_refused: bool,
}

struct Resizer {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this resizer was started for.
    name: String,
    /// Where it is the only resizer, if there are several.
    topology: Option<NodeTopology>,
    options: Options,
    recorder: Recorder,
    claims: Cache<PersistentVolumeClaim>,
    claims_by_volume: Index<PersistentVolumeClaim, String>,
    claims_by_attributes: Index<PersistentVolumeClaim, String>,
    volumes: Cache<PersistentVolume>,
    attributes: Option<Cache<VolumeAttributesClass>>,
    memory: Mutex<HashMap<String, Memory>>,
    queue: Queue<Key>,
}

impl Resizer {
    fn new(cluster: &Cluster, driver: Driver, options: Options, identity: &Identity) -> Self {
        let claims = cluster.cache::<PersistentVolumeClaim>();
        let name = identity.name.clone();
        Self {
            recorder: Recorder::new(cluster, &format!("external-resizer {name}"), ""),
            claims_by_volume: claims.index(|claim: &PersistentVolumeClaim| {
                claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).into_iter().collect()
            }),
            claims_by_attributes: claims.index(|claim: &PersistentVolumeClaim| modify::classes_of(claim)),
            claims,
            volumes: cluster.cache(),
            attributes: Abilities::of(identity).modify.then(|| cluster.cache()),
            topology: None,
            memory: Mutex::default(),
            queue: cluster.queue(format!("{name}-pvc"), options.retry),
            cluster: cluster.named("external-resizer"),
            driver,
            name,
            options,
        }
    }

    /// Claims, when they, their volumes or their attribute classes change.
    fn control_loop(self: &Arc<Self>) -> Loop<Key> {
        let this = Arc::downgrade(self);
        let (by_volume, by_attributes) = (self.claims_by_volume.clone(), self.claims_by_attributes.clone());
        let keys = |claims: Vec<Arc<PersistentVolumeClaim>>| {
            claims.iter().map(|claim| Key::of(claim.as_ref())).collect::<Vec<_>>()
        };
        let claims = Loop::new(&self.cluster, &self.queue)
            .subscribe(&self.claims, move |before, after| {
                if let (Some(gone), None, Some(this)) = (before, after, this.upgrade()) {
                    this.memory.lock().remove(&gone.uid().unwrap_or_default());
                }
                let changed = |after: &&Arc<PersistentVolumeClaim>| {
                    before
                        .is_none_or(|before| expand::matters(before, after) || modify::matters(before, after))
                };
                after.filter(changed).map(|after| Key::of(after.as_ref())).into_iter().collect()
            })
            .subscribe(&self.volumes, move |before, after| {
                let changed = after.filter(|after| before.is_none_or(|before| before.spec != after.spec));
                changed.map_or_else(Vec::new, |volume| keys(by_volume.get(&volume.name_any())))
            });
        match &self.attributes {
            None => claims,
            Some(attributes) => claims.subscribe(attributes, move |_, after| {
                after.map_or_else(Vec::new, |class| keys(by_attributes.get(&class.name_any())))
            }),
        }
    }

    fn remember(&self, claim: &PersistentVolumeClaim, change: impl FnOnce(&mut Memory)) {
        change(self.memory.lock().entry(claim.uid().unwrap_or_default()).or_default());
    }

    fn remembered(&self, claim: &PersistentVolumeClaim) -> Memory {
        self.memory.lock().get(&claim.uid().unwrap_or_default()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
