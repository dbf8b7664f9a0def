//! DaemonSets: nodes that come, go and are tainted, and rollouts.

use anyhow::Result;
use serde_json::{Value, json};

use super::side::Side;
use super::{compare, image, is_ready, template};
use crate::kinds::{DAEMON_SET, NODE, POD, text};
use crate::objects::merged;

fn set(more: Value) -> Value {
    let spec = json!({
        "selector": {"matchLabels": {"app": "agent"}}, "template": template("agent", "one", "ready"),
    });
    json!({"metadata": {"name": "agent"}, "spec": merged(spec, more)})
}

async fn rolled_out(side: &Side, wanted: i64) -> Result<()> {
    let done = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"] == set["metadata"]["generation"]
            && status["desiredNumberScheduled"] == wanted
            && status["currentNumberScheduled"] == wanted
            && status["numberMisscheduled"] == 0
            && status["numberAvailable"].as_i64().unwrap_or(0) == wanted
            && status["updatedNumberScheduled"].as_i64().unwrap_or(0) == wanted
    };
    side.until(DAEMON_SET, "agent", &format!("has {wanted} pods"), done).await?;
    let there = |pods: &[Value]| i64::try_from(pods.len()).is_ok_and(|count| count == wanted);
    side.until_all(&format!("there are {wanted} pods"), POD, there).await.map(drop)
}

async fn change(side: &Side, spec: Value) -> Result<()> {
    side.patch(DAEMON_SET, "agent", json!({"spec": spec})).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_has_its_pod_while_nodes_come_and_go() -> Result<()> {
    compare("daemon-nodes", async |side| {
        side.nodes(&["node-a", "node-b"]).await?;
        side.create(DAEMON_SET, set(json!({}))).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("created").await?;
        side.nodes(&["node-c"]).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("a third node").await?;
        let selector = json!({"template": {"spec": {"nodeSelector": {"disk": "fast"}}}});
        side.patch(NODE, "node-a", json!({"metadata": {"labels": {"disk": "fast"}}})).await?;
        change(side, selector).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("on one node by a selector").await?;
        side.patch(NODE, "node-b", json!({"metadata": {"labels": {"disk": "fast"}}})).await?;
        rolled_out(side, 2).await?;
        side.patch(NODE, "node-a", json!({"metadata": {"labels": {"disk": "slow"}}})).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("labels changed").await?;
        side.delete(DAEMON_SET, "agent").await?;
        side.until_all("the pods are gone", POD, <[Value]>::is_empty).await?;
        side.checkpoint("deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taints_keep_pods_away_unless_they_are_tolerated() -> Result<()> {
    compare("daemon-taints", async |side| {
        side.nodes(&["node-a", "node-b"]).await?;
        let taint = |effect: &str| json!({"spec": {"taints": [{"key": "own", "effect": effect}]}});
        side.create(DAEMON_SET, set(json!({}))).await?;
        rolled_out(side, 2).await?;
        side.patch(NODE, "node-a", taint("NoSchedule")).await?;
        // Upstream counts anew only when something else happens to the set.
        side.patch(DAEMON_SET, "agent", json!({"metadata": {"labels": {"seen": "again"}}})).await?;
        side.until(DAEMON_SET, "agent", "wants one", |set| set["status"]["desiredNumberScheduled"] == 1)
            .await?;
        side.checkpoint("one may stay").await?;
        side.patch(NODE, "node-a", taint("NoExecute")).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("it may not stay").await?;
        let tolerations = json!([{"key": "own", "operator": "Exists", "effect": "NoExecute"}]);
        change(side, json!({"template": {"spec": {"tolerations": tolerations}}})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("tolerated").await?;
        side.patch(NODE, "node-b", json!({"spec": {"unschedulable": true}})).await?;
        side.until(NODE, "node-b", "is tainted", |node| !node["spec"]["taints"].is_null()).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("cordoned").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_replaced_one_node_after_the_other() -> Result<()> {
    compare("daemon-rolling", async |side| {
        side.nodes_are_alike();
        side.nodes(&["node-a", "node-b", "node-c"]).await?;
        side.create(DAEMON_SET, set(json!({"revisionHistoryLimit": 1}))).await?;
        rolled_out(side, 3).await?;
        for image in ["two", "three"] {
            change(side, json!({"template": template("agent", image, "ready")})).await?;
            rolled_out(side, 3).await?;
        }
        side.checkpoint("rolled twice").await?;
        change(side, json!({"template": template("agent", "broken", "unready")})).await?;
        side.until_all("one is broken", POD, |pods| {
            pods.len() == 3
                && pods.iter().any(|pod| image(pod) == "broken" && text(pod, "/status/phase") == "Running")
        })
        .await?;
        side.checkpoint("stuck").await?;
        change(side, json!({"template": template("agent", "three", "ready")})).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("rolled back").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_surge_has_new_pods_beside_old_ones() -> Result<()> {
    compare("daemon-surge", async |side| {
        side.nodes_are_alike();
        side.nodes(&["node-a", "node-b"]).await?;
        let strategy =
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
        side.create(DAEMON_SET, set(json!({"updateStrategy": strategy, "minReadySeconds": 1}))).await?;
        rolled_out(side, 2).await?;
        change(side, json!({"template": template("agent", "two", "ready")})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("rolled").await?;
        change(side, json!({"template": template("agent", "broken", "unready")})).await?;
        side.until_all("one is broken", POD, |pods| {
            pods.len() == 3
                && pods.iter().any(|pod| image(pod) == "broken" && text(pod, "/status/phase") == "Running")
        })
        .await?;
        side.checkpoint("stuck").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_delete_replaces_only_what_is_deleted() -> Result<()> {
    compare("daemon-on-delete", async |side| {
        side.nodes(&["node-a", "node-b"]).await?;
        side.create(DAEMON_SET, set(json!({"updateStrategy": {"type": "OnDelete"}}))).await?;
        rolled_out(side, 2).await?;
        change(side, json!({"template": template("agent", "two", "ready")})).await?;
        side.until(DAEMON_SET, "agent", "has old pods", |set| {
            set["status"]["updatedNumberScheduled"].is_null()
        })
        .await?;
        side.checkpoint("changed").await?;
        let pods = side.list(POD).await?;
        let on_a = pods.iter().find(|pod| text(pod, "/spec/nodeName") == "node-a");
        side.delete(POD, on_a.map_or("", |pod| text(pod, "/metadata/name"))).await?;
        side.until_all("one is new", POD, |pods| {
            pods.len() == 2 && pods.iter().any(|pod| image(pod) == "two" && is_ready(pod))
        })
        .await?;
        side.checkpoint("one deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_ended_is_replaced() -> Result<()> {
    compare("daemon-ended", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(DAEMON_SET, set(json!({"template": template("agent", "one", "1/ready")}))).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("one failed").await?;
        change(side, json!({"template": template("agent", "two", "ready/ready/0/ready")})).await?;
        side.until_all("the third ended", POD, |pods| pods.iter().any(is_ready)).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("rolled").await
    })
    .await
}
