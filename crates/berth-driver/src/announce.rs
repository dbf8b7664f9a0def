//! What a driver announces: a function of what it was composed of.

use berth_csi::v1::{
    controller_service_capability::rpc::Type as ControllerRpc,
    group_controller_service_capability::rpc::Type as GroupRpc,
    node_service_capability::rpc::Type as NodeRpc,
    plugin_capability::{service::Type as Service, volume_expansion::Type as VolumeExpansion},
};

use crate::compose::{Controller, Driver, Node};

/// The answers of the calls that announce.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Announced {
    /// The services of GetPluginCapabilities.
    pub services: Vec<Service>,
    /// The kinds of expansion of GetPluginCapabilities.
    pub expansion: Vec<VolumeExpansion>,
    /// The capabilities that ControllerGetCapabilities answers; empty for a driver without a controller service.
    pub controller: Vec<ControllerRpc>,
    /// The capabilities that GroupControllerGetCapabilities answers; empty for a driver without group snapshots.
    pub group: Vec<GroupRpc>,
    /// The capabilities that NodeGetCapabilities answers; empty for a driver without a node service.
    pub node: Vec<NodeRpc>,
}

impl Driver {
    /// What the driver announces.
    pub fn announces(&self) -> Announced {
        let mut announced = Announced::default();
        if let Some(controller) = &self.controller {
            controller.announce(&mut announced);
        }
        if let Some(node) = &self.node {
            node.announce(&mut announced);
        }
        announced
    }
}

impl Controller {
    fn announce(&self, announced: &mut Announced) {
        use ControllerRpc::{
            CloneVolume, CreateDeleteSnapshot, CreateDeleteVolume, ExpandVolume, GetCapacity, GetSnapshot,
            GetVolume, GetVolumeHealth, ListSnapshots, ListVolumeHealth, ListVolumes,
            ListVolumesPublishedNodes, ModifyVolume, PublishReadonly, PublishUnpublishVolume,
            SingleNodeMultiWriter,
        };
        let parts = &self.parts;
        let (lists, attaches) = (parts.listing.is_some(), parts.attachment.is_some());
        let (snapshots, has_topology) = (parts.snapshots.is_some(), self.provisioner.has_topology());
        for (composed, rpcs) in [
            (true, &[CreateDeleteVolume, GetVolume, SingleNodeMultiWriter][..]),
            (lists, &[ListVolumes]),
            (attaches, &[PublishUnpublishVolume]),
            (parts.read_only_attachment.is_some(), &[PublishReadonly]),
            (lists && attaches, &[ListVolumesPublishedNodes]),
            (parts.capacity.is_some(), &[GetCapacity]),
            (self.provisioner.clones(), &[CloneVolume]),
            (parts.expansion.is_some(), &[ExpandVolume]),
            (parts.modification.is_some(), &[ModifyVolume]),
            (snapshots, &[CreateDeleteSnapshot, ListSnapshots, GetSnapshot]),
            (parts.health.is_some(), &[GetVolumeHealth, ListVolumeHealth]),
        ] {
            announced.controller.extend(rpcs.iter().filter(|_| composed));
        }
        for (composed, service) in [
            (true, Service::ControllerService),
            (parts.group_snapshots.is_some(), Service::GroupControllerService),
            (parts.changed_blocks.is_some(), Service::SnapshotMetadataService),
            (has_topology, Service::VolumeAccessibilityConstraints),
            (has_topology && snapshots, Service::SnapshotAccessibilityConstraints),
        ] {
            announced.services.extend(composed.then_some(service));
        }
        if parts.group_snapshots.is_some() {
            announced.group.push(GroupRpc::CreateDeleteGetVolumeGroupSnapshot);
        }
        if let Some(expansion) = &parts.expansion {
            let online = expansion.online();
            announced.expansion.push(if online { VolumeExpansion::Online } else { VolumeExpansion::Offline });
        }
    }
}

impl Node {
    fn announce(&self, announced: &mut Announced) {
        use NodeRpc::{
            ExpandVolume, GetStorageHealth, GetVolumeHealth, GetVolumeStats, SingleNodeMultiWriter,
            StageUnstageVolume, VolumeMountGroup,
        };
        let parts = &self.parts;
        for (composed, rpcs) in [
            // Kept by the record of what is published, whatever the backend.
            (true, &[SingleNodeMultiWriter][..]),
            (parts.staging.is_some(), &[StageUnstageVolume]),
            (parts.stats.is_some(), &[GetVolumeStats]),
            (parts.expansion.is_some(), &[ExpandVolume]),
            (parts.health.is_some(), &[GetVolumeHealth, GetStorageHealth]),
            (self.mount_group, &[VolumeMountGroup]),
        ] {
            announced.node.extend(rpcs.iter().filter(|_| composed));
        }
        let constraint = Service::VolumeAccessibilityConstraints;
        if self.topology.is_some() && !announced.services.contains(&constraint) {
            announced.services.push(constraint);
        }
    }
}
