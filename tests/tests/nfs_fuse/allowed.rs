//! `--allowed-servers`: volumes on other servers are refused, by the controller and by nodes.

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1;
use berth_e2e::Csi;
use tonic::{Code, Status};

use crate::{
    calls::capability,
    world::{Part, Server},
};

#[tokio::test(flavor = "multi_thread")]
async fn volumes_on_servers_that_are_not_allowed_are_refused_by_name() -> Result<()> {
    let server = Server::start("4.1")?;
    let permitted = server.drive_with(Part::Node, &["--allowed-servers", "127.0.0.0/8"]).await?;
    // It does not even start with a share on another server.
    let other =
        server.drive_with(Part::Other, &["--allowed-servers", "192.0.2.0/24,nfs.example.com"]).await?;
    let here = Csi::connect(&server.endpoint(Part::Node))?;
    let there = Csi::connect(&server.endpoint(Part::Other))?;

    let parameters = |name: &str| {
        let parameters = server.parameters().into_iter();
        let parameters = parameters.map(|(key, value)| match key {
            "server" => (key.to_owned(), name.to_owned()),
            _ => (key.to_owned(), value),
        });
        parameters.collect::<std::collections::BTreeMap<_, _>>()
    };
    let create = |server: &str| v1::CreateVolumeRequest {
        name: "data".to_owned(),
        volume_capabilities: vec![capability()],
        parameters: parameters(server).into_iter().collect(),
        ..v1::CreateVolumeRequest::default()
    };
    let made = here.controller.clone().create_volume(create("127.0.0.1")).await?.into_inner();
    let volume = made.volume.context("a volume is made")?;
    // A name is allowed by name only, wherever it leads.
    refused(here.controller.clone().create_volume(create("localhost")).await, "localhost")?;
    refused(there.controller.clone().create_volume(create("127.0.0.1")).await, "127.0.0.1")?;

    let publish = v1::NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        target_path: server.dir().join("target").display().to_string(),
        volume_capability: Some(capability()),
        volume_context: volume.volume_context,
        ..v1::NodePublishVolumeRequest::default()
    };
    refused(there.node.clone().node_publish_volume(publish.clone()).await, "127.0.0.1")?;
    let inline = v1::NodePublishVolumeRequest {
        volume_id: "inline".to_owned(),
        volume_context: parameters("127.0.0.1")
            .into_iter()
            .chain([("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned())])
            .collect(),
        ..publish
    };
    refused(there.node.clone().node_publish_volume(inline).await, "127.0.0.1")?;
    ensure!(!server.dir().join("target").exists(), "a refused volume leaves no target");

    let delete =
        v1::DeleteVolumeRequest { volume_id: volume.volume_id, ..v1::DeleteVolumeRequest::default() };
    refused(there.controller.clone().delete_volume(delete.clone()).await, "127.0.0.1")?;
    here.controller.clone().delete_volume(delete).await?;
    server.nothing_left().await?;
    other.stop().await?;
    permitted.stop().await
}

/// Checks that a call was refused because of a server.
fn refused<T>(answer: Result<tonic::Response<T>, Status>, server: &str) -> Result<()> {
    let status = answer.err().with_context(|| format!("{server} was not refused"))?;
    let names = status.message().contains(server) && status.message().contains("--allowed-servers");
    ensure!(status.code() == Code::PermissionDenied && names, "{status:?}");
    Ok(())
}
