//! The node's lease: a small object that says every few seconds that the node is alive.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Cluster, Key, Result};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};

/// Where the leases of nodes are.
const NAMESPACE: &str = "kube-node-lease";
/// How long it holds in Kubernetes.
pub(super) const DURATION: Duration = Duration::from_secs(40);
/// How often it is renewed while it holds.
const RENEWALS: u32 = 4;
/// How soon a renewal that failed is tried again.
const RENEWAL_RETRY: Duration = Duration::from_secs(1);

/// Renews the lease, which holds for `duration`, until the cluster's shutdown.
pub(super) async fn keep(cluster: Cluster, node: Arc<Node>, duration: Duration) {
    let mut known = None;
    loop {
        let wait = match renew(&cluster, &node, known.take(), duration).await {
            Ok(lease) => {
                known = Some(lease);
                duration / RENEWALS
            }
            Err(error) => {
                tracing::warn!(
                    error = error.chain(),
                    "the node's lease was not renewed; trying again in {RENEWAL_RETRY:?}"
                );
                RENEWAL_RETRY
            }
        };
        tokio::select! {
            () = cluster.shutdown().cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

async fn renew(
    cluster: &Cluster,
    node: &Node,
    known: Option<Arc<Lease>>,
    duration: Duration,
) -> Result<Arc<Lease>> {
    let name = node.metadata.name.clone().unwrap_or_default();
    let known = match known {
        Some(known) => Some(known),
        None => cluster.fetch::<Lease>(&Key::new(NAMESPACE, &name)).await?,
    };
    if let Some(known) = known {
        return cluster.update(&*known, |lease| lease.spec = Some(spec(&name, duration))).await;
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
        spec: Some(spec(&name, duration)),
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

fn spec(name: &str, duration: Duration) -> LeaseSpec {
    let whole = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    let seconds = i32::try_from(whole).unwrap_or(i32::MAX);
    LeaseSpec {
        holder_identity: Some(name.to_owned()),
        lease_duration_seconds: Some(seconds.max(1)),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..LeaseSpec::default()
    }
}
