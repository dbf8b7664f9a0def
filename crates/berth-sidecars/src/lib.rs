//! The external components beside a CSI driver.
//!
//! [`provisioner`], [`attacher`], [`resizer`] and [`snapshotter`] turn Kubernetes objects into calls of the driver's
//! Controller service, and [`health_monitor`] asks it how the volumes are; [`registrar`] makes its Node service known to
//! the kubelet. All share one [`driver::Driver`]: one connection, one answer to what the driver can do, and one operation
//! at a time per volume. [`snapshot_controller`] makes the objects that the snapshotter acts on; it calls no driver.
//!
//! Each component is one `run` function with an `Options`; the table in the `berth` crate's `sidecars` module says which
//! of them a driver needs, and starts them.

pub mod attacher;
pub mod driver;
mod failure;
pub mod health_monitor;
pub mod liveness;
mod place;
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
