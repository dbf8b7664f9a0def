//! Deployments and ReplicaSets.

use anyhow::Result;
use serde_json::{Value, json};

use super::side::Side;
use super::{compare, is_ready, template};
use crate::kinds::{DEPLOYMENT, POD, REPLICA_SET, text};
use crate::objects::merged;

fn deployment(replicas: i32, more: Value) -> Value {
    let spec = json!({
        "replicas": replicas, "selector": {"matchLabels": {"app": "web"}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template("web", "one", "ready"),
    });
    json!({"metadata": {"name": "web"}, "spec": merged(spec, more)})
}

async fn rolled_out(side: &Side, wanted: i64) -> Result<()> {
    let done = |deployment: &Value| {
        let (status, conditions) = (&deployment["status"], &deployment["status"]["conditions"]);
        let is_new = |condition: &Value| condition["reason"] == "NewReplicaSetAvailable";
        let count = |field: &str| status[field].as_i64().unwrap_or(0);
        status["observedGeneration"] == deployment["metadata"]["generation"]
            && ["replicas", "updatedReplicas", "availableReplicas"]
                .into_iter()
                .all(|field| count(field) == wanted)
            && conditions.as_array().is_some_and(|all| all.iter().any(is_new))
    };
    side.until(DEPLOYMENT, "web", &format!("has {wanted} pods"), done).await?;
    let there = |pods: &[Value]| i64::try_from(pods.len()).is_ok_and(|count| count == wanted);
    side.until_all(&format!("there are {wanted} pods"), POD, there).await.map(drop)
}

async fn change(side: &Side, spec: Value) -> Result<()> {
    side.patch(DEPLOYMENT, "web", json!({"spec": spec})).await.map(drop)
}

fn has_condition(deployment: &Value, kind: &str, reason: &str) -> bool {
    let conditions = deployment["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["reason"] == reason))
}

// A scenario has at most nine different messages of one reason about an object: which of more than that are combined is chosen
// at random.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_rolled_and_rolled_back() -> Result<()> {
    compare("deployment-rolling", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(DEPLOYMENT, deployment(2, json!({}))).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("created").await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("rolled").await?;
        change(side, json!({"template": template("web", "one", "ready")})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("rolled back").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_paused_and_scaled() -> Result<()> {
    compare("deployment-paused", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(DEPLOYMENT, deployment(1, json!({"revisionHistoryLimit": 0}))).await?;
        rolled_out(side, 1).await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        rolled_out(side, 1).await?;
        side.until_all("the old set is gone", REPLICA_SET, |sets| sets.len() == 1).await?;
        side.checkpoint("rolled").await?;
        change(side, json!({"replicas": 3})).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("scaled up").await?;
        change(side, json!({"paused": true, "template": template("web", "three", "ready")})).await?;
        side.until(DEPLOYMENT, "web", "pauses", |it| has_condition(it, "Progressing", "DeploymentPaused"))
            .await?;
        change(side, json!({"replicas": 1})).await?;
        side.until(DEPLOYMENT, "web", "is small", |it| it["status"]["replicas"] == 1).await?;
        side.checkpoint("paused and scaled down").await?;
        change(side, json!({"paused": false})).await?;
        rolled_out(side, 1).await?;
        side.until_all("the old set is gone", REPLICA_SET, |sets| sets.len() == 1).await?;
        side.checkpoint("resumed").await?;
        change(side, json!({"replicas": 0})).await?;
        rolled_out(side, 0).await?;
        side.checkpoint("scaled to nothing").await?;
        side.delete(DEPLOYMENT, "web").await?;
        side.until_all("the sets are gone", REPLICA_SET, <[Value]>::is_empty).await?;
        side.checkpoint("deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recreate_waits_for_the_old_pods_to_be_gone() -> Result<()> {
    compare("deployment-recreate", async |side| {
        side.nodes(&["node-a"]).await?;
        let spec = json!({"strategy": {"type": "Recreate"}});
        side.create(DEPLOYMENT, deployment(2, spec)).await?;
        rolled_out(side, 2).await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("rolled").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_that_does_not_progress_says_so_and_is_scaled_in_proportion() -> Result<()> {
    compare("deployment-stuck", async |side| {
        side.nodes(&["node-a"]).await?;
        let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 1}});
        let spec = json!({"strategy": rolling, "progressDeadlineSeconds": 5});
        side.create(DEPLOYMENT, deployment(6, spec)).await?;
        rolled_out(side, 6).await?;
        change(side, json!({"template": template("web", "two", "unready")})).await?;
        side.until(DEPLOYMENT, "web", "gives up", |it| {
            has_condition(it, "Progressing", "ProgressDeadlineExceeded")
        })
        .await?;
        side.checkpoint("stuck").await?;
        change(side, json!({"replicas": 12})).await?;
        side.until_all("all run", POD, |pods| {
            pods.len() == 14 && pods.iter().all(|pod| text(pod, "/status/phase") == "Running")
        })
        .await?;
        side.checkpoint("scaled up").await?;
        change(side, json!({"replicas": 4})).await?;
        side.until_all("some are gone", POD, |pods| pods.len() == 6).await?;
        side.checkpoint("scaled down").await?;
        change(side, json!({"template": template("web", "one", "ready")})).await?;
        rolled_out(side, 4).await?;
        side.checkpoint("rolled back").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_set_adopts_and_releases_pods() -> Result<()> {
    compare("replica-set", async |side| {
        side.nodes(&["node-a"]).await?;
        let pod = template("web", "one", "ready");
        let alone = json!({"metadata": {"name": "alone", "labels": {"app": "web"}}, "spec": pod["spec"]});
        side.create(POD, alone).await?;
        side.until(POD, "alone", "is ready", is_ready).await?;
        let spec = json!({"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": pod});
        side.create(REPLICA_SET, json!({"metadata": {"name": "web"}, "spec": spec})).await?;
        side.until(REPLICA_SET, "web", "has two", |set| set["status"]["availableReplicas"] == 2).await?;
        side.checkpoint("adopted").await?;
        side.patch(POD, "alone", json!({"metadata": {"labels": {"app": "other"}}})).await?;
        side.until(POD, "alone", "is released", |pod| pod["metadata"]["ownerReferences"].is_null()).await?;
        side.until_all("it is replaced", POD, |pods| pods.len() == 3 && pods.iter().all(is_ready)).await?;
        side.until(REPLICA_SET, "web", "has two", |set| set["status"]["availableReplicas"] == 2).await?;
        side.checkpoint("released").await?;
        side.patch(REPLICA_SET, "web", json!({"spec": {"replicas": 0}})).await?;
        side.until_all("one is left", POD, |pods| pods.len() == 1).await?;
        side.checkpoint("scaled to nothing").await?;
        side.delete(REPLICA_SET, "web").await?;
        side.gone(REPLICA_SET, "web").await?;
        side.checkpoint("deleted").await
    })
    .await
}
