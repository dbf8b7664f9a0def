//! PodDisruptionBudgets: their status, and evictions.

use anyhow::Result;
use serde_json::{Value, json};

use super::kubelet::OUTCOME;
use super::side::Side;
use super::{compare, is_ready, template};
use crate::kinds::{BUDGET, DEPLOYMENT, POD, text};

fn budget(name: &str, spec: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec})
}

async fn is_judged(side: &Side, name: &str, allowed: i64) -> Result<()> {
    let judged = |budget: &Value| {
        budget["status"]["observedGeneration"] == budget["metadata"]["generation"]
            && budget["status"]["disruptionsAllowed"] == allowed
    };
    side.until(BUDGET, name, &format!("allows {allowed}"), judged).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budgets_count_pods_and_allow_evictions() -> Result<()> {
    compare("budgets", async |side| {
        side.nodes(&["node-a"]).await?;
        let selector = json!({"matchLabels": {"app": "web"}});
        side.create(BUDGET, budget("number", &json!({"selector": selector, "minAvailable": 2}))).await?;
        side.event("number", "NoPods").await?;
        side.checkpoint("without pods").await?;
        let spec = json!({"replicas": 3, "selector": selector, "template": template("web", "one", "ready/ready/ready/waiting")});
        side.create(DEPLOYMENT, json!({"metadata": {"name": "web"}, "spec": spec})).await?;
        is_judged(side, "number", 1).await?;
        let alone = template("alone", "two", "ready");
        let alone = json!({"metadata": {"name": "alone", "labels": {"app": "alone"}}, "spec": alone["spec"]});
        side.create(POD, alone).await?;
        side.until(POD, "alone", "is ready", is_ready).await?;
        let of_alone = json!({"matchLabels": {"app": "alone"}});
        side.create(BUDGET, budget("share", &json!({"selector": of_alone, "minAvailable": "50%"}))).await?;
        side.create(BUDGET, budget("missing", &json!({"selector": of_alone, "maxUnavailable": 1}))).await?;
        is_judged(side, "missing", 0).await?;
        side.checkpoint("with pods").await?;

        let pods = side.list(POD).await?;
        let of_web: Vec<&str> = pods
            .iter()
            .filter(|pod| text(pod, "/metadata/labels/app") == "web")
            .map(|pod| text(pod, "/metadata/name"))
            .collect();
        side.remark(json!({"first": side.evict(of_web[0]).await?, "second": side.evict(of_web[1]).await?}));
        side.gone(POD, of_web[0]).await?;
        side.until_all("there is another one", POD, |pods| pods.len() == 4).await?;
        is_judged(side, "number", 0).await?;
        side.checkpoint("one is missing").await?;
        for pod in side.list(POD).await? {
            side.patch(POD, text(&pod, "/metadata/name"), json!({"metadata": {"annotations": {OUTCOME: "ready"}}})).await?;
        }
        side.until_all("it is replaced", POD, |pods| pods.len() == 4 && pods.iter().all(is_ready)).await?;
        is_judged(side, "number", 1).await?;
        side.remark(json!({"two budgets": side.evict("alone").await?}));
        side.patch(BUDGET, "number", json!({"spec": {"minAvailable": null, "maxUnavailable": "40%"}})).await?;
        side.until(BUDGET, "number", "expects less", |budget| budget["status"]["desiredHealthy"] == 1).await?;
        side.checkpoint("evicted").await
    })
    .await
}
