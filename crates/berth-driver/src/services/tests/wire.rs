//! What is seen from outside: which services there are, what they announce, and that both agree.

use berth_csi::v1::{
    self, CreateVolumeGroupSnapshotRequest, DeleteVolumeRequest, GetMetadataAllocatedRequest,
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, NodeGetInfoRequest, ProbeRequest,
    controller_client::ControllerClient,
    group_controller_client::GroupControllerClient,
    identity_client::IdentityClient,
    identity_server::Identity as _,
    node_client::NodeClient,
    plugin_capability::{Type, service::Type as Service},
    snapshot_metadata_client::SnapshotMetadataClient,
};
use tonic::Code;

use super::*;
use crate::Error;

async fn announced(bench: &Bench) -> Vec<Service> {
    let response = ok(bench.driver.get_plugin_capabilities(of(GetPluginCapabilitiesRequest {})).await);
    let services =
        response.capabilities.into_iter().filter_map(|capability| match capability.r#type.unwrap() {
            Type::Service(service) => Some(service.r#type()),
            Type::VolumeExpansion(_) => None,
        });
    services.collect()
}

/// Whether controller, group, metadata and node services answer at all.
async fn answering(bench: &Bench) -> [bool; 4] {
    let routes = || bench.driver.routes();
    let there = |code: Option<Code>| code != Some(Code::Unimplemented);
    let volume = ControllerClient::new(routes()).delete_volume(DeleteVolumeRequest::default()).await;
    let group = GroupControllerClient::new(routes())
        .create_volume_group_snapshot(CreateVolumeGroupSnapshotRequest::default())
        .await;
    let metadata = SnapshotMetadataClient::new(routes())
        .get_metadata_allocated(GetMetadataAllocatedRequest::default())
        .await;
    let node = NodeClient::new(routes()).node_get_info(NodeGetInfoRequest {}).await;
    [
        there(volume.err().map(|status| status.code())),
        there(group.err().map(|status| status.code())),
        there(metadata.err().map(|status| status.code())),
        there(node.err().map(|status| status.code())),
    ]
}

#[tokio::test]
async fn each_mode_offers_what_it_announces() {
    for (mode, controller, node) in
        [(Mode::All, true, true), (Mode::Controller, true, false), (Mode::Node, false, true)]
    {
        let mut bench = Bench::new();
        bench.driver = driver(&bench.fake, mode).open(bench.driver.config.clone()).unwrap();
        assert_eq!(answering(&bench).await, [controller, controller, controller, node], "{mode:?}");
        let services = announced(&bench).await;
        for service in
            [Service::ControllerService, Service::GroupControllerService, Service::SnapshotMetadataService]
        {
            assert_eq!(services.contains(&service), controller, "{mode:?} {service:?}");
        }
        assert!(services.contains(&Service::VolumeAccessibilityConstraints));
    }
}

#[tokio::test]
async fn a_feature_that_is_not_there_is_neither_announced_nor_served() {
    let bench = Bench::composed(|fake| {
        Driver::new(NAME, "1").controller(Controller::new(fake)).node(bare_node(fake))
    });
    assert_eq!(announced(&bench).await, [Service::ControllerService]);
    assert_eq!(answering(&bench).await, [true, false, false, true]);
    let mut controller = ControllerClient::new(bench.driver.routes());
    let mut node = NodeClient::new(bench.driver.routes());
    macro_rules! unimplemented {
        ($($client:ident . $method:ident ( $request:ident )),* $(,)?) => {$(
            let code = $client.$method(v1::$request::default()).await.unwrap_err().code();
            assert_eq!(code, Code::Unimplemented, stringify!($method));
        )*};
    }
    unimplemented!(
        controller.controller_publish_volume(ControllerPublishVolumeRequest),
        controller.controller_unpublish_volume(ControllerUnpublishVolumeRequest),
        controller.list_volumes(ListVolumesRequest),
        controller.controller_list_volume_health(ControllerListVolumeHealthRequest),
        controller.controller_get_volume_health(ControllerGetVolumeHealthRequest),
        controller.get_capacity(GetCapacityRequest),
        controller.create_snapshot(CreateSnapshotRequest),
        controller.delete_snapshot(DeleteSnapshotRequest),
        controller.list_snapshots(ListSnapshotsRequest),
        controller.get_snapshot(GetSnapshotRequest),
        controller.controller_expand_volume(ControllerExpandVolumeRequest),
        controller.controller_modify_volume(ControllerModifyVolumeRequest),
        node.node_stage_volume(NodeStageVolumeRequest),
        node.node_unstage_volume(NodeUnstageVolumeRequest),
        node.node_get_volume_stats(NodeGetVolumeStatsRequest),
        node.node_get_volume_health(NodeGetVolumeHealthRequest),
        node.node_get_storage_health(NodeGetStorageHealthRequest),
        node.node_expand_volume(NodeExpandVolumeRequest),
    );
    // Volumes can be got where they can be made, and the record of what is published tells writers apart.
    assert_eq!(
        controller
            .controller_get_capabilities(v1::ControllerGetCapabilitiesRequest {})
            .await
            .unwrap()
            .into_inner()
            .capabilities
            .len(),
        3
    );
    let reply = node.node_get_capabilities(v1::NodeGetCapabilitiesRequest {}).await.unwrap();
    assert_eq!(reply.into_inner().capabilities.len(), 1);
}

#[tokio::test]
async fn a_driver_with_everything_serves_everything() {
    let bench = Bench::new();
    let mut controller = ControllerClient::new(bench.driver.routes());
    let mut node = NodeClient::new(bench.driver.routes());
    macro_rules! implemented {
        ($($client:ident . $method:ident ( $request:ident )),* $(,)?) => {$(
            let code = $client.$method(v1::$request::default()).await.map_or_else(|status| status.code(), |_| Code::Ok);
            assert_ne!(code, Code::Unimplemented, stringify!($method));
        )*};
    }
    implemented!(
        controller.create_volume(CreateVolumeRequest),
        controller.delete_volume(DeleteVolumeRequest),
        controller.controller_publish_volume(ControllerPublishVolumeRequest),
        controller.controller_unpublish_volume(ControllerUnpublishVolumeRequest),
        controller.validate_volume_capabilities(ValidateVolumeCapabilitiesRequest),
        controller.list_volumes(ListVolumesRequest),
        controller.controller_list_volume_health(ControllerListVolumeHealthRequest),
        controller.controller_get_volume_health(ControllerGetVolumeHealthRequest),
        controller.get_capacity(GetCapacityRequest),
        controller.create_snapshot(CreateSnapshotRequest),
        controller.delete_snapshot(DeleteSnapshotRequest),
        controller.list_snapshots(ListSnapshotsRequest),
        controller.get_snapshot(GetSnapshotRequest),
        controller.controller_expand_volume(ControllerExpandVolumeRequest),
        controller.controller_get_volume(ControllerGetVolumeRequest),
        controller.controller_modify_volume(ControllerModifyVolumeRequest),
        node.node_stage_volume(NodeStageVolumeRequest),
        node.node_unstage_volume(NodeUnstageVolumeRequest),
        node.node_publish_volume(NodePublishVolumeRequest),
        node.node_unpublish_volume(NodeUnpublishVolumeRequest),
        node.node_get_volume_stats(NodeGetVolumeStatsRequest),
        node.node_get_volume_health(NodeGetVolumeHealthRequest),
        node.node_get_storage_health(NodeGetStorageHealthRequest),
        node.node_expand_volume(NodeExpandVolumeRequest),
        node.node_get_info(NodeGetInfoRequest),
    );
    assert_eq!(bench.driver.announces().controller.len(), 16, "every number of the spec");
    assert_eq!(bench.driver.announces().node.len(), 7, "every number of the spec");
}

#[tokio::test]
async fn an_id_of_ten_megabytes_is_answered() {
    let bench = Bench::new();
    let request = DeleteVolumeRequest { volume_id: "x".repeat(10 << 20), ..Default::default() };
    let status = ControllerClient::new(bench.driver.routes()).delete_volume(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().len() < 200, "the answer does not repeat it");
}

#[tokio::test]
async fn the_driver_says_who_it_is_and_whether_it_works() {
    let bench = Bench::new();
    let mut identity = IdentityClient::new(bench.driver.routes());
    let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.name.as_str(), info.vendor_version.as_str()), ("test.berth.dev", "1"));
    assert_eq!(identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready, Some(true));
    bench.fake.fail("ready", || Error::State("the disk is gone".into()));
    let status = identity.probe(ProbeRequest {}).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "the disk is gone"));
}

#[test]
fn a_driver_needs_a_name_that_kubernetes_takes() {
    let directory = tempfile::tempdir().unwrap();
    let long = "x".repeat(64);
    for (name, fits) in [
        ("local.berth.dev", true),
        ("a", true),
        ("", false),
        ("-a", false),
        ("a.", false),
        ("a_b", false),
        ("a/b", false),
        ("ä", false),
        (long.as_str(), false),
        (&long[1..], true),
    ] {
        assert_eq!(Driver::new(name, "1").open(settings(directory.path())).is_ok(), fits, "{name:?}");
    }
}
