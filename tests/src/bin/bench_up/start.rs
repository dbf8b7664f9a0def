//! `berth up` from its exec until it answers and takes pods.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use berth_e2e::up::{Machine, NODE, PATIENCE};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

/// How often it is looked whether the next thing is ready: what the figures may be off by.
const PACE: Duration = Duration::from_millis(1);

/// A machine that runs, and how long that took.
pub(crate) struct Started {
    pub(crate) client: Client,
    /// From exec to the first answer that the API is ready.
    pub(crate) api: Duration,
    /// From exec to a node that takes pods.
    pub(crate) node: Duration,
}

/// Starts `berth up` in its data directory.
pub(crate) async fn start(machine: &mut Machine) -> Result<Started> {
    let begun = Instant::now();
    machine.begin()?;
    let client = loop {
        if let Some(client) = ready_client(machine.data()).await {
            break client;
        }
        ensure!(begun.elapsed() < PATIENCE, "berth up does not answer: {}", machine.log());
        tokio::time::sleep(PACE).await;
    };
    let api = begun.elapsed();
    let nodes: Api<Node> = Api::all(client.clone());
    while !nodes.get_opt(NODE).await?.is_some_and(|node| is_ready(&node)) {
        ensure!(begun.elapsed() < PATIENCE, "the node does not become ready: {}", machine.log());
        tokio::time::sleep(PACE).await;
    }
    Ok(Started { client, api, node: begun.elapsed() })
}

/// A client, as soon as the API says that it is ready.
async fn ready_client(data: &Path) -> Option<Client> {
    // Until this is there, the kubeconfig may be that of the last run.
    data.join("running.json").exists().then_some(())?;
    let kubeconfig = Kubeconfig::read_from(data.join("apiserver/kubeconfig")).ok()?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.ok()?;
    let client = Client::try_from(config).ok()?;
    client.apiserver_version().await.is_ok().then_some(client)
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
