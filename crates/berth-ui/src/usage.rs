//! How full volumes are, asked of the nodes once: the kubelets' `/stats/summary`, by way of the API server.

use std::collections::BTreeMap;
use std::time::Duration;

use berth_kube::{Cluster, Key};
use futures_util::StreamExt as _;
use serde::Deserialize;

use crate::state::{Unreadable, Usage};

/// How long a node may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How many nodes are asked at the same time.
const AT_ONCE: usize = 8;

/// The part of a summary that is read.
#[derive(Deserialize)]
struct Summary {
    #[serde(default)]
    pods: Vec<PodStats>,
}

#[derive(Deserialize)]
struct PodStats {
    #[serde(default)]
    volume: Vec<VolumeStats>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeStats {
    pvc_ref: Option<ClaimReference>,
    used_bytes: Option<u64>,
    capacity_bytes: Option<u64>,
    inodes_used: Option<u64>,
    inodes: Option<u64>,
}

#[derive(Deserialize)]
struct ClaimReference {
    name: String,
    namespace: String,
}

/// The usage of every volume that these nodes measure, and what kept a node from saying so.
pub async fn read(
    cluster: &Cluster,
    nodes: impl IntoIterator<Item = String>,
) -> (BTreeMap<Key, Usage>, Option<Unreadable>) {
    let asked = nodes.into_iter().map(|node| summary(cluster, node));
    let answers: Vec<_> = futures_util::stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    let mut usage = BTreeMap::new();
    let mut unreadable = None;
    for answer in answers {
        match answer {
            Ok(summary) => usage.extend(usages(summary)),
            Err(why) => unreadable = Some(Unreadable { kind: "nodes/proxy".to_owned(), why }),
        }
    }
    (usage, unreadable)
}

async fn summary(cluster: &Cluster, node: String) -> Result<Summary, String> {
    let request = http::Request::get(format!("/api/v1/nodes/{node}/proxy/stats/summary"));
    let request = request.body(Vec::new()).map_err(|error| error.to_string())?;
    match tokio::time::timeout(TIMEOUT, cluster.client().request::<Summary>(request)).await {
        Ok(Ok(summary)) => Ok(summary),
        Ok(Err(error)) => Err(format!("how full the volumes of the node {node} are: {error}")),
        Err(_) => Err(format!("how full the volumes of the node {node} are: no answer within {TIMEOUT:?}")),
    }
}

fn usages(summary: Summary) -> impl Iterator<Item = (Key, Usage)> {
    summary.pods.into_iter().flat_map(|pod| pod.volume).filter_map(|volume| {
        let claim = volume.pvc_ref?;
        let usage = Usage {
            used: volume.used_bytes?,
            capacity: volume.capacity_bytes?,
            inodes_used: volume.inodes_used.unwrap_or(0),
            inodes: volume.inodes.unwrap_or(0),
        };
        Some((Key::new(claim.namespace, claim.name), usage))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_that_are_claims_are_read_from_a_summary() {
        let text = r#"{"node": {}, "pods": [{"podRef": {}, "volume": [
            {"name": "data", "pvcRef": {"name": "a", "namespace": "n"}, "usedBytes": 1, "capacityBytes": 4, "inodes": 8, "inodesUsed": 2},
            {"name": "tmp", "usedBytes": 1, "capacityBytes": 4}]}, {"podRef": {}}]}"#;
        let all: Vec<_> = usages(serde_json::from_str(text).unwrap()).collect();
        let expected = Usage { used: 1, capacity: 4, inodes_used: 2, inodes: 8 };
        assert_eq!(all, [(Key::new("n", "a"), expected)]);
    }
}
