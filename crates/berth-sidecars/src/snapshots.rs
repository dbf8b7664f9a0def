//! The snapshot kinds: their types (of berth-kube), their CustomResourceDefinitions, to be created in clusters that lack them, and the
//! names of the annotations, labels and finalizers by which the components that serve them work together.

pub(crate) mod served;

use berth_kube::storage;

pub(crate) use berth_core::names::snapshots as names;

pub use berth_kube::snapshots::*;

/// The definitions of the snapshot and group snapshot kinds, as objects.
pub fn definitions() -> Vec<serde_json::Value> {
    [
        include_str!("snapshots/volumesnapshotclasses.yaml"),
        include_str!("snapshots/volumesnapshotcontents.yaml"),
        include_str!("snapshots/volumesnapshots.yaml"),
        include_str!("snapshots/volumegroupsnapshotclasses.yaml"),
        include_str!("snapshots/volumegroupsnapshotcontents.yaml"),
        include_str!("snapshots/volumegroupsnapshots.yaml"),
    ]
    .into_iter()
    .map(|text| serde_saphyr::from_str(text).expect("the definitions are well-formed, which a test checks"))
    .collect()
}

/// The VolumeSnapshot of a group's member, and its content.
pub(crate) fn member_names(group_uid: &str, volume_handle: &str) -> (String, String) {
    let name = |prefix| storage::hashed_name(prefix, &[group_uid, volume_handle]);
    (name("snapshot"), name("snapcontent"))
}

#[cfg(test)]
pub(crate) mod tests;
