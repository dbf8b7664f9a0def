//! Which calls a driver will never get, and why: what it announces decides.

use berth_csi::{
    ControllerCapability as Controller, GroupCapability as Group, Identity, NodeCapability as Node,
    PluginService,
};

/// The calls of the Controller service, each with what has to be announced for it.
const CONTROLLER: &[(Controller, &str)] = &[
    (Controller::CreateDeleteVolume, "CreateVolume and DeleteVolume are"),
    (Controller::PublishUnpublishVolume, "ControllerPublishVolume and ControllerUnpublishVolume are"),
    (Controller::ListVolumes, "ListVolumes is"),
    (Controller::GetCapacity, "GetCapacity is"),
    (Controller::CreateDeleteSnapshot, "CreateSnapshot and DeleteSnapshot are"),
    (Controller::ListSnapshots, "ListSnapshots is"),
    (Controller::ExpandVolume, "ControllerExpandVolume is"),
    (Controller::ModifyVolume, "ControllerModifyVolume is"),
];

/// The calls of the Node service, each with what has to be announced for it.
const NODE: &[(Node, &str)] = &[
    (Node::StageUnstageVolume, "NodeStageVolume and NodeUnstageVolume are"),
    (Node::GetVolumeStats, "NodeGetVolumeStats is"),
    (Node::ExpandVolume, "NodeExpandVolume is"),
];

/// A sentence for each call, or pair of calls, that never comes.
pub fn never_called(identity: &Identity) -> Vec<String> {
    let mut lines = Vec::new();
    if identity.services.contains(&PluginService::ControllerService) {
        for (capability, calls) in CONTROLLER.iter().filter(|(capability, _)| !identity.can(*capability)) {
            lines.push(format!("{calls} never called: {} is not announced", capability.as_str_name()));
        }
    } else {
        lines.push(
            "No call of the Controller service comes, CreateVolume included: GetPluginCapabilities does not announce CONTROLLER_SERVICE"
                .to_owned(),
        );
    }
    for (capability, calls) in NODE.iter().filter(|(capability, _)| !identity.node.contains(capability)) {
        lines.push(format!("{calls} never called: {} is not announced", capability.as_str_name()));
    }
    let groups = identity.services.contains(&PluginService::GroupControllerService)
        && identity.group.contains(&Group::CreateDeleteGetVolumeGroupSnapshot);
    if !groups {
        lines.push(
            "CreateVolumeGroupSnapshot is never called: GROUP_CONTROLLER_SERVICE is not announced".to_owned(),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_announced_never_comes() {
        let nothing = never_called(&Identity::default());
        assert!(nothing[0].contains("CONTROLLER_SERVICE"), "{nothing:?}");
        assert!(
            nothing.contains(
                &"NodeStageVolume and NodeUnstageVolume are never called: STAGE_UNSTAGE_VOLUME is not announced".to_owned()
            ),
            "{nothing:?}"
        );
        let identity = Identity {
            services: [PluginService::ControllerService].into(),
            controller: [Controller::CreateDeleteVolume].into(),
            node: [Node::StageUnstageVolume].into(),
            ..Identity::default()
        };
        let some = never_called(&identity);
        assert!(
            !some.iter().any(|line| line.contains("NodeStage") || line.contains("CreateVolume and")),
            "{some:?}"
        );
        assert!(some.iter().any(|line| line.starts_with("ControllerPublishVolume")), "{some:?}");
    }
}
