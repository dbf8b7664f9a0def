//! The one table of what a backend can do.
//!
//! A [`Feature`] is a promise; the table says which CSI capabilities announce it. Services advertise from the table
//! and refuse from it, so that nothing is announced that does not work, and nothing works unannounced.

use berth_csi::v1::{
    controller_service_capability::rpc::Type as Controller,
    group_controller_service_capability::rpc::Type as Group,
    node_service_capability::rpc::Type as Node,
    plugin_capability::{service::Type as Plugin, volume_expansion::Type as Expansion},
};

/// Something a backend may be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Create and delete volumes.
    Volumes,
    /// Attach volumes to nodes and detach them.
    Attach,
    /// List volumes.
    ListVolumes,
    /// Get one volume by id.
    GetVolume,
    /// Tell how much can still be created.
    Capacity,
    /// Take, delete, list and get snapshots.
    Snapshots,
    /// Create a volume from another.
    Clone,
    /// Grow volumes from the controller.
    ControllerExpand,
    /// Grow what is on the volume from the node.
    NodeExpand,
    /// Change a volume's mutable parameters.
    Modify,
    /// Take snapshots of several volumes at one instant.
    GroupSnapshots,
    /// Tell which blocks a snapshot holds, and which changed.
    SnapshotMetadata,
    /// Volumes and snapshots are bound to a place.
    Topology,
    /// Prepare a volume once per node before it is published to workloads.
    Stage,
    /// Tell a volume's usage.
    Stats,
    /// Tell what is wrong with volumes and with the storage below them.
    Health,
    /// Tell apart one writer and many writers on one node.
    SingleNodeMultiWriter,
    /// Give the files to a group at mount time.
    MountGroup,
    /// Inline volumes name storage that is there: nothing is made for them, and nothing removed.
    InlineByReference,
}

/// What a backend can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(u32);

/// How a feature is announced.
enum Announce {
    Plugin(Plugin),
    Expansion(Expansion),
    Controller(Controller),
    Group(Group),
    Node(Node),
}

const TABLE: &[(Feature, Announce)] = &[
    (Feature::Volumes, Announce::Plugin(Plugin::ControllerService)),
    (Feature::Volumes, Announce::Controller(Controller::CreateDeleteVolume)),
    (Feature::Attach, Announce::Controller(Controller::PublishUnpublishVolume)),
    (Feature::Attach, Announce::Controller(Controller::PublishReadonly)),
    (Feature::Attach, Announce::Controller(Controller::ListVolumesPublishedNodes)),
    (Feature::ListVolumes, Announce::Controller(Controller::ListVolumes)),
    (Feature::GetVolume, Announce::Controller(Controller::GetVolume)),
    (Feature::Capacity, Announce::Controller(Controller::GetCapacity)),
    (Feature::Snapshots, Announce::Controller(Controller::CreateDeleteSnapshot)),
    (Feature::Snapshots, Announce::Controller(Controller::ListSnapshots)),
    (Feature::Snapshots, Announce::Controller(Controller::GetSnapshot)),
    (Feature::Clone, Announce::Controller(Controller::CloneVolume)),
    (Feature::ControllerExpand, Announce::Controller(Controller::ExpandVolume)),
    (Feature::ControllerExpand, Announce::Expansion(Expansion::Online)),
    (Feature::NodeExpand, Announce::Node(Node::ExpandVolume)),
    (Feature::Modify, Announce::Controller(Controller::ModifyVolume)),
    (Feature::GroupSnapshots, Announce::Plugin(Plugin::GroupControllerService)),
    (Feature::GroupSnapshots, Announce::Group(Group::CreateDeleteGetVolumeGroupSnapshot)),
    (Feature::SnapshotMetadata, Announce::Plugin(Plugin::SnapshotMetadataService)),
    (Feature::Topology, Announce::Plugin(Plugin::VolumeAccessibilityConstraints)),
    (Feature::Topology, Announce::Plugin(Plugin::SnapshotAccessibilityConstraints)),
    (Feature::Stage, Announce::Node(Node::StageUnstageVolume)),
    (Feature::Stats, Announce::Node(Node::GetVolumeStats)),
    (Feature::Health, Announce::Controller(Controller::GetVolumeHealth)),
    (Feature::Health, Announce::Controller(Controller::ListVolumeHealth)),
    (Feature::Health, Announce::Node(Node::GetVolumeHealth)),
    (Feature::Health, Announce::Node(Node::GetStorageHealth)),
    (Feature::SingleNodeMultiWriter, Announce::Controller(Controller::SingleNodeMultiWriter)),
    (Feature::SingleNodeMultiWriter, Announce::Node(Node::SingleNodeMultiWriter)),
    (Feature::MountGroup, Announce::Node(Node::VolumeMountGroup)),
];

impl Features {
    /// Exactly these.
    pub const fn new(features: &[Feature]) -> Self {
        let mut set = Self(0);
        let mut index = 0;
        while index < features.len() {
            set = set.with(features[index], true);
            index += 1;
        }
        set
    }

    /// The same with one feature switched.
    #[must_use]
    pub const fn with(self, feature: Feature, on: bool) -> Self {
        let bit = 1 << feature as u32;
        if on { Self(self.0 | bit) } else { Self(self.0 & !bit) }
    }

    /// Whether the feature is there.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u32) != 0
    }

    fn announced(self) -> impl Iterator<Item = &'static Announce> {
        TABLE.iter().filter(move |(feature, _)| self.has(*feature)).map(|(_, announce)| announce)
    }

    /// What GetPluginCapabilities lists.
    pub fn plugin(self) -> (Vec<Plugin>, Vec<Expansion>) {
        let mut services = Vec::new();
        let mut expansions = Vec::new();
        for announce in self.announced() {
            match announce {
                Announce::Plugin(service) => services.push(*service),
                Announce::Expansion(expansion) => expansions.push(*expansion),
                Announce::Controller(_) | Announce::Group(_) | Announce::Node(_) => {}
            }
        }
        (services, expansions)
    }

    /// What ControllerGetCapabilities lists.
    pub fn controller(self) -> Vec<Controller> {
        self.announced()
            .filter_map(|a| if let Announce::Controller(c) = a { Some(*c) } else { None })
            .collect()
    }

    /// What GroupControllerGetCapabilities lists.
    pub fn group(self) -> Vec<Group> {
        self.announced().filter_map(|a| if let Announce::Group(g) = a { Some(*g) } else { None }).collect()
    }

    /// What NodeGetCapabilities lists.
    pub fn node(self) -> Vec<Node> {
        self.announced().filter_map(|a| if let Announce::Node(n) = a { Some(*n) } else { None }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_there_is_announced() {
        let features = Features::new(&[Feature::Volumes, Feature::Stage]);
        assert_eq!(features.controller(), [Controller::CreateDeleteVolume]);
        assert_eq!(features.node(), [Node::StageUnstageVolume]);
        assert_eq!(features.plugin(), (vec![Plugin::ControllerService], vec![]));
        assert!(features.group().is_empty());
        assert!(!features.with(Feature::Stage, false).has(Feature::Stage));
    }
}
