//! Nodes that fail, that are out of service, and that are taken away.

use anyhow::Result;
use serde_json::{Value, json};

use super::side::Side;
use super::{compare, is_ready, template};
use crate::kinds::{DAEMON_SET, DEPLOYMENT, NODE, POD, STATEFUL_SET, text};

const NODE_ROLE: &str = "role";

/// The taints of a node, as key and effect.
fn taints(node: &Value) -> Vec<String> {
    let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    taints.iter().map(|taint| format!("{}:{}", text(taint, "/key"), text(taint, "/effect"))).collect()
}

fn is_going(pod: &Value) -> bool {
    !pod["metadata"]["deletionTimestamp"].is_null()
}

/// A workload whose pods leave a node that fails after two seconds, and begin on the node with the label.
fn workload(name: &str, more: &Value) -> Value {
    let toleration =
        |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2});
    let mut template = template(name, name, "ready");
    template["spec"]["tolerations"] =
        json!([toleration("node.kubernetes.io/not-ready"), toleration("node.kubernetes.io/unreachable")]);
    template["spec"]["nodeSelector"] = json!({NODE_ROLE: "worker"});
    let mut spec = json!({"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template});
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    json!({"metadata": {"name": name}, "spec": spec})
}

async fn is_on(side: &Side, app: &str, node: &str) -> Result<()> {
    side.until_all(&format!("{app} is on {node}"), POD, |pods| {
        pods.iter().any(|pod| {
            text(pod, "/metadata/labels/app") == app
                && text(pod, "/spec/nodeName") == node
                && is_ready(pod)
                && !is_going(pod)
        })
    })
    .await
    .map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_leave_a_node_that_falls_silent() -> Result<()> {
    compare("nodes-silent", async |side| {
        side.node("node-a", json!({NODE_ROLE: "worker"})).await?;
        side.create(DEPLOYMENT, workload("web", &json!({}))).await?;
        side.create(STATEFUL_SET, workload("db", &json!({"serviceName": "db"}))).await?;
        let mut stays = template("stays", "stays", "ready");
        stays["metadata"]["name"] = json!("stays");
        side.create(POD, stays).await?;
        is_on(side, "web", "node-a").await?;
        is_on(side, "db", "node-a").await?;
        is_on(side, "stays", "node-a").await?;
        side.nodes(&["node-c"]).await?;
        side.node("node-b", json!({NODE_ROLE: "worker"})).await?;
        let agent = json!({"selector": {"matchLabels": {"app": "agent"}}, "template": template("agent", "agent", "ready")});
        side.create(DAEMON_SET, json!({"metadata": {"name": "agent"}, "spec": agent})).await?;
        side.until(DAEMON_SET, "agent", "is everywhere", |set| set["status"]["numberReady"] == 3).await?;
        side.checkpoint("all is well").await?;

        side.fail_node("node-a");
        let unreachable = |node: &Value| taints(node).contains(&"node.kubernetes.io/unreachable:NoExecute".to_owned());
        side.until(NODE, "node-a", "is unreachable", unreachable).await?;
        is_on(side, "web", "node-b").await?;
        side.until(POD, "db-0", "is being deleted", is_going).await?;
        // Upstream counts anew only when something else happens to the set.
        side.patch(DAEMON_SET, "agent", json!({"metadata": {"labels": {"seen": "again"}}})).await?;
        side.until(DAEMON_SET, "agent", "wants two", |set| set["status"]["desiredNumberScheduled"] == 2).await?;
        side.checkpoint("the node is silent").await?;

        // What was deleted there could come back to it.
        side.patch(NODE, "node-a", json!({"metadata": {"labels": {NODE_ROLE: null}}})).await?;
        side.revive_node("node-a").await?;
        side.until(NODE, "node-a", "has no taints", |node| taints(node).is_empty()).await?;
        is_on(side, "web", "node-b").await?;
        side.until(POD, "db-0", "is back", |pod| is_ready(pod) && !is_going(pod)).await?;
        side.until_all("the old ones are gone", POD, |pods| pods.iter().all(|pod| !is_going(pod))).await?;
        side.until(DAEMON_SET, "agent", "is everywhere", |set| set["status"]["numberReady"] == 3).await?;
        side.checkpoint("it speaks again").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_node_that_is_out_of_service_are_removed() -> Result<()> {
    compare("nodes-out-of-service", async |side| {
        side.node("node-a", json!({NODE_ROLE: "worker"})).await?;
        side.create(STATEFUL_SET, workload("db", &json!({"serviceName": "db"}))).await?;
        is_on(side, "db", "node-a").await?;
        side.nodes(&["node-c"]).await?;
        side.node("node-b", json!({NODE_ROLE: "worker"})).await?;
        side.fail_node("node-a");
        side.until(POD, "db-0", "is being deleted", is_going).await?;
        let node = side.get(NODE, "node-a").await?;
        let mut taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        taints.push(json!({"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}));
        side.patch(NODE, "node-a", json!({"spec": {"taints": taints}})).await?;
        is_on(side, "db", "node-b").await?;
        side.checkpoint("moved").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_node_that_is_gone_are_removed() -> Result<()> {
    compare("nodes-gone", async |side| {
        side.node("node-a", json!({NODE_ROLE: "worker"})).await?;
        side.create(DEPLOYMENT, workload("web", &json!({}))).await?;
        side.create(STATEFUL_SET, workload("db", &json!({"serviceName": "db"}))).await?;
        let mut stays = template("stays", "stays", "ready");
        stays["metadata"]["name"] = json!("stays");
        side.create(POD, stays).await?;
        is_on(side, "web", "node-a").await?;
        is_on(side, "db", "node-a").await?;
        is_on(side, "stays", "node-a").await?;
        side.node("node-b", json!({NODE_ROLE: "worker"})).await?;
        side.remove_node("node-a").await?;
        is_on(side, "web", "node-b").await?;
        is_on(side, "db", "node-b").await?;
        side.gone(POD, "stays").await?;
        side.checkpoint("all moved").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_leave_a_node_by_its_taints() -> Result<()> {
    compare("nodes-taints", async |side| {
        side.node("node-a", json!({})).await?;
        let pod = |name: &str, tolerations: Value| {
            let mut pod = template(name, "one", "ready");
            pod["metadata"]["name"] = json!(name);
            pod["spec"]["tolerations"] = tolerations;
            pod
        };
        let own = json!({"key": "own", "operator": "Exists", "effect": "NoExecute"});
        let mut soon = own.clone();
        soon["tolerationSeconds"] = json!(3);
        side.create(POD, pod("leaves", json!([]))).await?;
        side.create(POD, pod("leaves-soon", json!([soon]))).await?;
        side.create(POD, pod("stays", json!([own]))).await?;
        side.until_all("all run", POD, |pods| pods.len() == 3 && pods.iter().all(is_ready)).await?;
        side.patch(NODE, "node-a", json!({"spec": {"taints": [{"key": "own", "effect": "NoExecute"}]}}))
            .await?;
        side.until_all("two are gone", POD, |pods| pods.len() == 1).await?;
        side.checkpoint("tainted").await?;
        let mut long = own.clone();
        long["tolerationSeconds"] = json!(20);
        side.create(POD, pod("hesitates", json!([long]))).await?;
        side.until(POD, "hesitates", "runs", is_ready).await?;
        side.patch(NODE, "node-a", json!({"spec": {"taints": null}})).await?;
        side.event("hesitates", "TaintManagerEviction").await?;
        side.checkpoint("not tainted any more").await
    })
    .await
}
