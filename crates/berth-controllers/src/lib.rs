//! The control loops of Kubernetes storage, and those that a machine alone needs besides.
//!
//! | module | replaces, in Kubernetes |
//! |---|---|
//! | [`persistent_volumes`] | the PV controller: binds claims and volumes, hands claims to provisioners, reclaims volumes |
//! | [`protection`] | the finalizers that keep claims, volumes and attribute classes while they are used |
//! | [`ephemeral`] | the claims of generic ephemeral volumes |
//! | [`expand`] | an event on each claim that waits for its driver's resizer; larger FlexVolumes, for the node to grow |
//! | [`attach_detach`] | VolumeAttachments for the pods of each node; `attach` and `detach` of FlexVolume drivers |
//! | [`scheduler`] | a node for every pod, with its volumes' topology and capacity |
//! | [`workloads`] | Deployments, ReplicaSets, StatefulSets and DaemonSets |
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
//! a state that the next run goes on from; volumes are written before claims, so that a volume is promised to one claim
//! rather than free for two.
//!
//! Start reading at `persistent_volumes.rs` (`reconcile_claim`) and `persistent_volumes/plan.rs`, where a claim without a
//! class is decided.

pub mod attach_detach;
pub mod ephemeral;
pub mod expand;
pub mod persistent_volumes;
pub mod protection;
pub mod scheduler;
pub mod workloads;

use berth_flex::Drivers;
use berth_kube::Cluster;

/// Runs every loop until the cluster's shutdown; `flex` are the FlexVolume drivers that attach volumes from here.
pub async fn run(cluster: Cluster, flex: Drivers) {
    tokio::join!(
        persistent_volumes::run(cluster.clone()),
        protection::run(cluster.clone()),
        ephemeral::run(cluster.clone()),
        expand::run(cluster.clone()),
        scheduler::run(cluster.clone()),
        attach_detach::run(cluster.clone(), Some(flex)),
        workloads::run(cluster),
    );
}
