//! The components beside a CSI driver that turn Kubernetes objects into CSI calls.
//!
//! | module | replaces | from | to |
//! |---|---|---|---|
//! | [`provisioner`] | external-provisioner | claims, released volumes | CreateVolume, DeleteVolume, GetCapacity |
//! | [`attacher`] | external-attacher | VolumeAttachments | ControllerPublishVolume, ControllerUnpublishVolume |
//! | [`resizer`] | external-resizer | claims | ControllerExpandVolume, ControllerModifyVolume |
//! | [`snapshotter`] | csi-snapshotter | snapshot contents | CreateSnapshot, DeleteSnapshot, groups of them |
//! | [`health_monitor`] | external-health-monitor | bound volumes | ControllerGetVolumeHealth and its predecessors |
//! | [`snapshot_controller`] | snapshot-controller | snapshots | their contents; it calls no driver |
//! | [`registrar`], [`liveness`] | node-driver-registrar, livenessprobe | the driver's socket | the kubelet |
//!
//! ```text
//! Kubernetes ─watch─▶ caches ─▶ queue ─▶ observe, plan ─▶ driver::Driver ─gRPC─▶ CSI driver
//!     ▲                                                        │
//!     └──────────── objects, status, events ◀──────────────────┘
//! ```
//!
//! Each component is one `run` function with an `Options`; the table in the `berth` crate's `sidecars` module says which
//! of them a driver needs, and starts them. All share one [`driver::Driver`]: one connection, one answer to what the
//! driver can do, and one operation at a time per volume.
//!
//! Invariants:
//!
//! - Before a call that makes something, the object says so (a finalizer, an annotation or a status), so that a crash
//!   between the call and the saved answer leaks nothing: a successor repeats the call or undoes it.
//! - A call is repeated unchanged until its answer is final (`berth_csi::code::is_final`).
//! - A driver that goes away and comes back is asked again what it can do; nothing restarts.
//! - Secrets are read one at a time when a call needs them, and are in no log, event or error.
//!
//! Start reading at `provisioner.rs`: `sync_claim` to the saved PersistentVolume is one walk down that file.

pub mod attacher;
pub mod driver;
mod failure;
pub mod health_monitor;
pub mod liveness;
mod node_topology;
pub mod provisioner;
pub mod resizer;
mod secrets;
mod size;
pub mod snapshot_controller;
pub mod snapshots;
pub mod snapshotter;

pub use berth_csi::registrar;

use berth_kube::storage;

/// The name of what a driver makes for an object: a prefix, and the object's UID or, without its dashes, as much of it as
/// `length` says. `None` if one of them is empty.
fn name_from_uid(prefix: &str, length: Option<usize>, uid: &str) -> Option<String> {
    if prefix.is_empty() || uid.is_empty() {
        return None;
    }
    let part = match length {
        None => uid.to_owned(),
        Some(length) => uid.replace('-', "").chars().take(length).collect(),
    };
    Some(storage::name_of_uid(prefix, &part))
}
