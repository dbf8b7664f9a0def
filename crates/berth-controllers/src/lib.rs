//! The controllers of Kubernetes that storage needs, and those that one machine without a cluster needs besides.
//!
//! | module | replaces, in Kubernetes |
//! |---|---|
//! | [`persistent_volumes`] | the PV controller: binds claims and volumes, hands claims to provisioners, reclaims volumes |
//! | [`protection`] | the finalizers that keep claims, volumes and attribute classes while they are used |
//! | [`ephemeral`] | the claims of generic ephemeral volumes |
//! | [`expand`] | an event on each claim that waits for its driver's resizer; larger FlexVolumes, for the node to grow |
//! | [`attach_detach`] | VolumeAttachments for the pods of each node; `attach` and `detach` of FlexVolume drivers |
//! | [`nodes`] | the taints of nodes that fail, the eviction of their pods, and pods that nobody else removes |
//! | [`services`] | the Endpoints and EndpointSlices of Services |
//! | [`scheduler`] | a node for every pod, with its volumes' topology and capacity |
//! | [`workloads`] | Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs and CronJobs |
//!
//! ```text
//! change of an object ─▶ key in a queue ─▶ observe: caches, no requests
//!                                             │
//!                                          plan: a pure function, tested row by row
//!                                             │
//!                                          apply: one write, or one event, per step
//! ```
//!
//! None of them calls a CSI driver: they meet the sidecars only in Kubernetes objects. A crash between two writes leaves
//! a state that the next run goes on from. When the two are bound, the volume is written before the claim, so that a crash
//! in between leaves a volume that is reserved for one claim, never a volume that two claims could take.
//!
//! Start reading at `persistent_volumes.rs` (`reconcile_claim`) and `persistent_volumes/plan.rs`, which decides among other
//! things what becomes of a claim without a class (`plan_free_claim`).

pub mod attach_detach;
pub mod ephemeral;
pub mod expand;
pub mod nodes;
pub mod persistent_volumes;
pub mod protection;
pub mod scheduler;
pub mod services;
pub mod workloads;

use std::time::Duration;

use berth_flex::Drivers;
use berth_kube::Cluster;

/// How the loops judge nodes that fail.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a node may be silent before it is unhealthy.
    pub node_monitor_grace_period: Duration,
    /// How long a volume that nobody wants stays attached to a node that is not ready and does not unmount it.
    pub force_detach_after: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node_monitor_grace_period: nodes::GRACE_PERIOD,
            force_detach_after: attach_detach::FORCE_DETACH_AFTER,
        }
    }
}

/// Runs every loop until the cluster's shutdown; `flex` are the FlexVolume drivers that attach volumes from here.
pub async fn run(cluster: Cluster, flex: Drivers, options: Options) {
    tokio::join!(
        persistent_volumes::run(cluster.clone()),
        protection::run(cluster.clone()),
        ephemeral::run(cluster.clone()),
        expand::run(cluster.clone()),
        scheduler::run(cluster.clone()),
        attach_detach::run(cluster.clone(), Some(flex), options.force_detach_after),
        nodes::run(cluster.clone(), options.node_monitor_grace_period),
        services::run(cluster.clone()),
        workloads::run(cluster),
    );
}
