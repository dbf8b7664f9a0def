//! The node's lease: a small object that says every 10 seconds that the node is alive.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Cluster, Key, Result};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};

/// Where the leases of nodes are.
const NAMESPACE: &str = "kube-node-lease";
/// How often it is renewed.
const PERIOD: Duration = Duration::from_secs(10);
/// How long it holds.
const SECONDS: i32 = 40;
/// How soon a renewal that failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Renews the lease until the cluster's shutdown.
pub(super) async fn keep(cluster: Cluster, node: Arc<Node>) {
    let mut known = None;
    loop {
        let wait = match renew(&cluster, &node, known.take()).await {
            Ok(lease) => {
                known = Some(lease);
                PERIOD
            }
            Err(error) => {
                tracing::warn!(
                    error = error.chain(),
                    "the node's lease was not renewed; trying again in {AGAIN:?}"
                );
                AGAIN
            }
        };
        tokio::select! {
            () = cluster.shutdown().cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

async fn renew(cluster: &Cluster, node: &Node, known: Option<Arc<Lease>>) -> Result<Arc<Lease>> {
    let name = node.metadata.name.clone().unwrap_or_default();
    let known = match known {
        Some(known) => Some(known),
        None => cluster.fetch::<Lease>(&Key::new(NAMESPACE, &name)).await?,
    };
    if let Some(known) = known {
        return cluster.update(&*known, |lease| lease.spec = Some(spec(&name))).await;
    }
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(NAMESPACE.to_owned()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: name.clone(),
                uid: node.metadata.uid.clone().unwrap_or_default(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(spec(&name)),
    };
    match cluster.create(&lease).await {
        Err(error) if error.is_not_found() => {
            let mut namespace = Namespace::default();
            namespace.metadata.name = Some(NAMESPACE.to_owned());
            cluster.create(&namespace).await?;
            cluster.create(&lease).await
        }
        created => created,
    }
}

fn spec(name: &str) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(name.to_owned()),
        lease_duration_seconds: Some(SECONDS),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..LeaseSpec::default()
    }
}
