//! `berth controller local` and `berth node local`: the driver and what belongs beside it in one process.

use std::fs;

use berth_csi::registration::InfoRequest;
use berth_csi::registration::registration_client::RegistrationClient;
use kube::ResourceExt as _;

use crate::sidecars::cluster::{Cluster, get, pause};
use crate::sidecars::combined::release;

#[tokio::test]
async fn a_controller_makes_and_deletes_volumes_in_one_process_and_serves_its_socket() {
    let cluster = Cluster::start().await;
    let (own, kubeconfig) = (cluster.driver_args(), cluster.kubeconfig());
    let others = [
        kubeconfig.as_str(),
        "--http-endpoint=127.0.0.1:0",
        "--leader-election",
        "--leader-election-namespace=default",
        "--extra-create-metadata",
    ];
    let args: Vec<&str> =
        ["controller", "local"].into_iter().chain(own.iter().map(String::as_str)).chain(others).collect();
    let mut controller = cluster.berth("controller", &args, &[("POD_NAME", "controller-0")]);
    let volume = cluster.volume_of(&cluster.claim("data").await).await;
    assert_eq!(cluster.on_disk(), 1);
    cluster.held("berth-sidecars-local-berth-dev", |holder| holder == "controller-0").await;

    let http = controller.http().await.unwrap();
    assert_eq!(get(&http, "/healthz").0, 200);
    let (_, metrics) = get(&http, "/metrics");
    for metric in [
        "csi_plugin_operations_seconds_count",
        "csi_sidecar_operations_seconds_count",
        "leader_election_master_status{name=\"berth-sidecars-local-berth-dev\"} 1",
    ] {
        assert!(metrics.contains(metric), "{metric} is not in\n{metrics}");
    }
    // Others still find the driver by its socket.
    let mut probe = cluster.berth(
        "probe",
        &["livenessprobe", &cluster.csi_address(), "--http-endpoint=127.0.0.1:0"],
        &[],
    );
    assert_eq!(get(&probe.http().await.unwrap(), "/healthz").0, 200);

    release(&cluster.client, &volume.name_any()).await;
    assert_eq!(cluster.on_disk(), 0);
    controller.stop().await.unwrap();
    cluster.held("berth-sidecars-local-berth-dev", str::is_empty).await;
    assert!(!cluster.path("csi.sock").exists());
}

#[tokio::test]
async fn a_node_introduces_its_driver_by_its_own_socket() {
    let cluster = Cluster::start().await;
    let directory = cluster.path("registry");
    fs::create_dir(&directory).unwrap();
    let own = cluster.driver_args();
    let registry = format!("--plugin-registration-path={}", directory.display());
    let args: Vec<&str> = ["node", "local"]
        .into_iter()
        .chain(own.iter().map(String::as_str))
        .chain([registry.as_str()])
        .collect();
    let mut node = cluster.berth("node", &args, &[]);
    let socket = directory.join("local.berth.dev-reg.sock");
    node.says("waiting for the node to register the driver").await.unwrap();
    let endpoint = berth_csi::Endpoint::Unix(socket.clone());
    let info = loop {
        let mut client = RegistrationClient::new(berth_csi::connect(&endpoint));
        match client.get_info(InfoRequest {}).await {
            Ok(info) => break info.into_inner(),
            Err(_not_yet) => pause().await,
        }
    };
    assert_eq!(info.endpoint, cluster.path("csi.sock").display().to_string());
    node.stop().await.unwrap();
    assert!(!socket.exists());
}
