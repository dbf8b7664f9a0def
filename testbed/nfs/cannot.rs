//! What NFS cannot have, by the words of csi-sanity's specs that are about it.
//!
//! There is nothing to attach, to stage or to modify; an archive is a snapshot of one volume, and is
//! wherever the share is. Specs of these skip themselves, and no others may.

pub(crate) const CANNOT: [&str; 9] = [
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "volume lifecycle",
    "NodeStageVolume",
    "NodeUnstageVolume",
    "volume attribute class",
    "ModifyVolume",
    "GroupController Service",
    "accessibility requirements",
];
