//! Who the driver is, and whether what it announces is true.

use std::collections::BTreeSet;

use berth_csi::{
    ControllerCapability as Controller, GroupCapability, NodeCapability as Node, PluginService, v1,
};
use tonic::{Code, Status};

use super::checks;
use crate::session::{Expected as _, Outcome, Session, broken, ensure, is_local};

checks! {
    "identity.name" Must "GetPluginInfo": "The name is a domain name of at most 63 characters: letters, digits, dashes and dots, a letter or digit at both ends.";
        "Use a name such as csi.example.org."; [] name;
    "identity.version" Must "GetPluginInfo": "GetPluginInfo answers with a version.";
        "Set vendor_version."; [] version;
    "identity.probe" Must "Probe": "A driver that is up answers Probe with OK, and not with ready=false.";
        "Answer OK; FAILED_PRECONDITION is for a driver that cannot work."; [] probe;
    "identity.stable" Should "GetPluginCapabilities": "A driver answers the same name and capabilities each time.";
        "Decide capabilities at the start; orchestrators ask once."; [] stable;
    "identity.known" Should "ControllerGetCapabilities": "Capabilities are those of the specification, each once.";
        "Remove UNKNOWN and repeated entries."; [] known;
    "identity.controller" Must "GetPluginCapabilities": "A driver that answers ControllerGetCapabilities with capabilities announces CONTROLLER_SERVICE.";
        "Add CONTROLLER_SERVICE to GetPluginCapabilities; orchestrators ask the Controller service nothing without it."; [] controller;
    "identity.expansion" Should "GetPluginCapabilities": "A driver that announces VolumeExpansion can expand volumes, by the controller or on the node.";
        "Announce EXPAND_VOLUME, or leave VolumeExpansion out."; [] expansion;
    "identity.announced" Must "ControllerGetCapabilities, NodeGetCapabilities": "A call that is announced is implemented.";
        "Implement the call, or do not announce its capability."; [] announced;
    "identity.unannounced" Should "Error Scheme": "A call that is not announced is answered with UNIMPLEMENTED.";
        "Announce what works; answer UNIMPLEMENTED to everything else."; [] unannounced;
    "identity.unknown-method" Must "Error Scheme": "A method that does not exist is answered with UNIMPLEMENTED.";
        "Leave unknown methods to the gRPC library."; [] unknown_method;
    "identity.node-info" Must "NodeGetInfo": "NodeGetInfo answers with the node's id, the same each time.";
        "Take the id from the environment or the machine, not from chance."; [] node_info;
}

async fn name(session: &Session) -> Outcome {
    let answer = session.call(v1::GetPluginInfoRequest {}).await.or_broken("GetPluginInfo")?;
    let name = answer.name;
    let inner = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let ends = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric());
    ensure(name.len() <= 63 && ends && name.chars().all(inner), || format!("the name is {name:?}"))
}

async fn version(session: &Session) -> Outcome {
    let answer = session.call(v1::GetPluginInfoRequest {}).await.or_broken("GetPluginInfo")?;
    ensure(!answer.vendor_version.is_empty(), || "vendor_version is empty".to_owned())
}

async fn probe(session: &Session) -> Outcome {
    let answer = session.call(v1::ProbeRequest {}).await.or_broken("Probe")?;
    ensure(answer.ready != Some(false), || "Probe answered ready=false".to_owned())
}

async fn stable(session: &Session) -> Outcome {
    let first =
        session.call(v1::GetPluginCapabilitiesRequest {}).await.or_not_run("GetPluginCapabilities")?;
    let second =
        session.call(v1::GetPluginCapabilitiesRequest {}).await.or_not_run("GetPluginCapabilities")?;
    ensure(first == second, || format!("first {first:?}, then {second:?}"))
}

async fn known(session: &Session) -> Outcome {
    let mut numbers = Vec::new();
    if session.identity.services.contains(&PluginService::ControllerService) {
        let answer = session.call(v1::ControllerGetCapabilitiesRequest {}).await;
        let answer = answer.or_not_run("ControllerGetCapabilities")?;
        numbers.extend(answer.capabilities.iter().filter_map(|capability| {
            let v1::controller_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
            Some(("controller", rpc.r#type))
        }));
    }
    if let Ok(answer) = session.call(v1::NodeGetCapabilitiesRequest {}).await {
        numbers.extend(answer.capabilities.iter().filter_map(|capability| {
            let v1::node_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
            Some(("node", rpc.r#type))
        }));
    }
    let unique: BTreeSet<_> = numbers.iter().collect();
    ensure(!numbers.iter().any(|(_, number)| *number == 0), || "UNKNOWN is announced".to_owned())?;
    ensure(unique.len() == numbers.len(), || format!("a capability comes twice: {numbers:?}"))
}

async fn controller(session: &Session) -> Outcome {
    if session.identity.services.contains(&PluginService::ControllerService) {
        return Ok(());
    }
    match session.call(v1::ControllerGetCapabilitiesRequest {}).await {
        Ok(answer) if !answer.capabilities.is_empty() => {
            broken("ControllerGetCapabilities answers, and CONTROLLER_SERVICE is not announced")
        }
        _ => Ok(()),
    }
}

async fn expansion(session: &Session) -> Outcome {
    let answer =
        session.call(v1::GetPluginCapabilitiesRequest {}).await.or_not_run("GetPluginCapabilities")?;
    let announces = answer
        .capabilities
        .iter()
        .any(|capability| matches!(capability.r#type, Some(v1::plugin_capability::Type::VolumeExpansion(_))));
    let can =
        session.identity.can(Controller::ExpandVolume) || session.identity.node.contains(&Node::ExpandVolume);
    ensure(!announces || can, || "VolumeExpansion is announced, EXPAND_VOLUME is not".to_owned())
}

/// Each optional call with whether it is announced, and how it answers an empty request.
async fn optional_calls(session: &Session) -> Vec<(&'static str, bool, Result<(), Status>)> {
    let identity = &session.identity;
    let mut calls = Vec::new();
    macro_rules! ask {
        ($($method:literal $announced:expr, $request:expr;)*) => {
            $(calls.push(($method, $announced, session.call($request).await.map(drop)));)*
        };
    }
    let can = |capability| identity.can(capability);
    let node = |capability| identity.node.contains(&capability);
    let group = identity.group.contains(&GroupCapability::CreateDeleteGetVolumeGroupSnapshot);
    ask! {
        "CreateVolume" can(Controller::CreateDeleteVolume), v1::CreateVolumeRequest::default();
        "DeleteVolume" can(Controller::CreateDeleteVolume), v1::DeleteVolumeRequest::default();
        "ControllerPublishVolume" can(Controller::PublishUnpublishVolume), v1::ControllerPublishVolumeRequest::default();
        "ControllerUnpublishVolume" can(Controller::PublishUnpublishVolume), v1::ControllerUnpublishVolumeRequest::default();
        "ListVolumes" can(Controller::ListVolumes), v1::ListVolumesRequest { max_entries: 1, ..Default::default() };
        "GetCapacity" can(Controller::GetCapacity), v1::GetCapacityRequest::default();
        "CreateSnapshot" can(Controller::CreateDeleteSnapshot), v1::CreateSnapshotRequest::default();
        "DeleteSnapshot" can(Controller::CreateDeleteSnapshot), v1::DeleteSnapshotRequest::default();
        "ListSnapshots" can(Controller::ListSnapshots), v1::ListSnapshotsRequest { max_entries: 1, ..Default::default() };
        "GetSnapshot" can(Controller::GetSnapshot), v1::GetSnapshotRequest::default();
        "ControllerExpandVolume" can(Controller::ExpandVolume), v1::ControllerExpandVolumeRequest::default();
        "ControllerGetVolume" can(Controller::GetVolume), v1::ControllerGetVolumeRequest::default();
        "ControllerModifyVolume" can(Controller::ModifyVolume), v1::ControllerModifyVolumeRequest::default();
        "ControllerGetVolumeHealth" can(Controller::GetVolumeHealth), v1::ControllerGetVolumeHealthRequest::default();
        "ControllerListVolumeHealth" can(Controller::ListVolumeHealth), v1::ControllerListVolumeHealthRequest { max_entries: 1, ..Default::default() };
        "NodeStageVolume" node(Node::StageUnstageVolume), v1::NodeStageVolumeRequest::default();
        "NodeUnstageVolume" node(Node::StageUnstageVolume), v1::NodeUnstageVolumeRequest::default();
        "NodeGetVolumeStats" node(Node::GetVolumeStats), v1::NodeGetVolumeStatsRequest::default();
        "NodeExpandVolume" node(Node::ExpandVolume), v1::NodeExpandVolumeRequest::default();
        "NodeGetVolumeHealth" node(Node::GetVolumeHealth), v1::NodeGetVolumeHealthRequest::default();
        "NodeGetStorageHealth" node(Node::GetStorageHealth), v1::NodeGetStorageHealthRequest::default();
        "CreateVolumeGroupSnapshot" group, v1::CreateVolumeGroupSnapshotRequest::default();
        "DeleteVolumeGroupSnapshot" group, v1::DeleteVolumeGroupSnapshotRequest::default();
        "GetVolumeGroupSnapshot" group, v1::GetVolumeGroupSnapshotRequest::default();
    }
    calls
}

async fn announced(session: &Session) -> Outcome {
    for (method, is_announced, answer) in optional_calls(session).await {
        if let Err(status) = answer
            && is_announced
            && status.code() == Code::Unimplemented
        {
            return broken(format!("{method} is announced, and answers UNIMPLEMENTED"));
        }
    }
    Ok(())
}

async fn unannounced(session: &Session) -> Outcome {
    for (method, is_announced, answer) in optional_calls(session).await {
        let answered = match &answer {
            Ok(()) => "OK",
            Err(status) if status.code() == Code::Unimplemented || is_local(status) => continue,
            Err(status) => berth_csi::code::grpc_name(status.code()),
        };
        ensure(is_announced, || format!("{method} is not announced, and answers {answered}"))?;
    }
    Ok(())
}

async fn unknown_method(session: &Session) -> Outcome {
    /// A request of a method that no version of CSI has.
    #[derive(Clone, PartialEq, prost::Message)]
    struct NoSuchRequest {}
    impl berth_csi::Call for NoSuchRequest {
        const METHOD: &'static str = "/csi.v1.Identity/NoSuchMethod";
        type Answer = v1::ProbeResponse;
    }
    impl crate::session::Request for NoSuchRequest {}
    match session.call(NoSuchRequest {}).await {
        Ok(_) => broken("/csi.v1.Identity/NoSuchMethod answered OK"),
        Err(status) if status.code() == Code::Unimplemented => Ok(()),
        Err(status) => Err(status).or_broken("/csi.v1.Identity/NoSuchMethod"),
    }
}

async fn node_info(session: &Session) -> Outcome {
    let first = session.call(v1::NodeGetInfoRequest {}).await.or_broken("NodeGetInfo")?;
    let second = session.call(v1::NodeGetInfoRequest {}).await.or_broken("NodeGetInfo")?;
    ensure(first.node_id == second.node_id, || {
        format!("the node's id is {:?} and then {:?}", first.node_id, second.node_id)
    })
}
