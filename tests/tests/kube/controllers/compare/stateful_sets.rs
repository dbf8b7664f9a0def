//! StatefulSets: order, revisions, claims and who owns them, adoption.

use anyhow::Result;
use kube::api::{DeleteParams, PropagationPolicy};
use serde_json::{Value, json};

use super::kubelet::OUTCOME;
use super::side::Side;
use super::{compare, image, is_ready, template};
use crate::kinds::{CLAIM, POD, STATEFUL_SET};
use crate::objects::merged;

fn set(replicas: i32, more: Value) -> Value {
    let spec = json!({
        "replicas": replicas, "serviceName": "web", "selector": {"matchLabels": {"app": "web"}},
        "template": template("web", "one", "ready"),
    });
    json!({"metadata": {"name": "web"}, "spec": merged(spec, more)})
}

fn with_claims(more: Value) -> Value {
    let claims = json!([{"metadata": {"name": "data"}, "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "made",
        "resources": {"requests": {"storage": "1Gi"}},
    }}]);
    merged(json!({"volumeClaimTemplates": claims}), more)
}

/// Waits until the set's status says that so many pods are there and available, all of the template of the set.
async fn rolled_out(side: &Side, wanted: i64) -> Result<()> {
    let done = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"] == set["metadata"]["generation"]
            && status["replicas"] == wanted
            && status["availableReplicas"] == wanted
            && status["updatedReplicas"].as_i64().unwrap_or(0) == wanted
            && status["currentRevision"] == status["updateRevision"]
    };
    side.until(STATEFUL_SET, "web", &format!("has {wanted} pods"), done).await.map(drop)
}

async fn change(side: &Side, spec: Value) -> Result<()> {
    side.patch(STATEFUL_SET, "web", json!({"spec": spec})).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_come_and_go_in_order_and_keep_their_claims() -> Result<()> {
    compare("stateful-ordered", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(STATEFUL_SET, set(3, with_claims(json!({"revisionHistoryLimit": 1})))).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("created").await?;
        change(side, json!({"replicas": 1})).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("scaled down").await?;
        change(side, json!({"replicas": 3})).await?;
        rolled_out(side, 3).await?;
        for image in ["two", "three"] {
            change(side, json!({"template": template("web", image, "ready")})).await?;
            rolled_out(side, 3).await?;
        }
        side.checkpoint("rolled twice").await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("rolled back").await?;
        side.delete(STATEFUL_SET, "web").await?;
        side.until_all("the pods are gone", POD, <[Value]>::is_empty).await?;
        side.checkpoint("deleted").await?;
        side.create(STATEFUL_SET, set(2, with_claims(json!({})))).await?;
        rolled_out(side, 2).await?;
        side.until_all("the claims are there", CLAIM, |claims| claims.len() == 3).await?;
        side.checkpoint("created again").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_pods_do_not_wait_for_each_other() -> Result<()> {
    compare("stateful-parallel", async |side| {
        side.nodes(&["node-a"]).await?;
        let unready = template("web", "one", "unready");
        let spec = json!({"podManagementPolicy": "Parallel", "template": unready});
        side.create(STATEFUL_SET, set(3, with_claims(spec))).await?;
        side.until_all("all are there", POD, |pods| {
            pods.len() == 3 && pods.iter().all(|pod| pod["status"]["phase"] == "Running")
        })
        .await?;
        side.checkpoint("created, and none is ready").await?;
        for at in 0..3 {
            side.patch(POD, &format!("web-{at}"), json!({"metadata": {"annotations": {OUTCOME: "ready"}}}))
                .await?;
        }
        rolled_out(side, 3).await?;
        change(side, json!({"replicas": 4, "template": template("web", "one", "ready")})).await?;
        rolled_out(side, 4).await?;
        side.checkpoint("scaled up and rolled").await?;
        change(side, json!({"replicas": 1})).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("scaled down").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_keeps_pods_of_the_old_template() -> Result<()> {
    compare("stateful-partition", async |side| {
        side.nodes(&["node-a"]).await?;
        let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 2}});
        side.create(STATEFUL_SET, set(3, json!({"updateStrategy": strategy}))).await?;
        rolled_out(side, 3).await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        side.until(POD, "web-2", "is of the new template", |pod| image(pod) == "two" && is_ready(pod))
            .await?;
        side.checkpoint("one is new").await?;
        side.delete(POD, "web-0").await?;
        let fresh = |pod: &Value| is_ready(pod) && pod["metadata"]["deletionTimestamp"].is_null();
        side.until(STATEFUL_SET, "web", "misses one", |set| set["status"]["availableReplicas"] == 2).await?;
        side.until(POD, "web-0", "is back", fresh).await?;
        side.checkpoint("an old one came back").await?;
        change(side, json!({"updateStrategy": {"rollingUpdate": {"partition": 0}}})).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("all are new").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_delete_replaces_only_what_is_deleted() -> Result<()> {
    compare("stateful-on-delete", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(STATEFUL_SET, set(2, json!({"updateStrategy": {"type": "OnDelete"}}))).await?;
        side.until(STATEFUL_SET, "web", "is there", |set| set["status"]["availableReplicas"] == 2).await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        side.checkpoint("changed").await?;
        side.delete(POD, "web-1").await?;
        side.until(POD, "web-1", "is new", |pod| image(pod) == "two" && is_ready(pod)).await?;
        side.checkpoint("one deleted").await?;
        side.delete(POD, "web-0").await?;
        side.until(POD, "web-0", "is new", |pod| image(pod) == "two" && is_ready(pod)).await?;
        side.checkpoint("both deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_by_the_retention_policy() -> Result<()> {
    compare("stateful-retention", async |side| {
        side.nodes(&["node-a"]).await?;
        let policy = |deleted: &str, scaled: &str| {
            json!({"persistentVolumeClaimRetentionPolicy": {"whenDeleted": deleted, "whenScaled": scaled}})
        };
        side.create(STATEFUL_SET, set(3, with_claims(policy("Retain", "Delete")))).await?;
        rolled_out(side, 3).await?;
        side.checkpoint("created").await?;
        change(side, json!({"replicas": 2})).await?;
        rolled_out(side, 2).await?;
        side.gone(CLAIM, "data-web-2").await?;
        side.checkpoint("scaled down").await?;
        change(side, policy("Delete", "Retain")).await?;
        side.until(CLAIM, "data-web-0", "has an owner", |claim| !claim["metadata"]["ownerReferences"].is_null())
            .await?;
        side.checkpoint("with another policy").await?;
        change(side, json!({"replicas": 1})).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("scaled down again").await?;
        side.delete(STATEFUL_SET, "web").await?;
        side.until_all("the claims are gone", CLAIM, <[Value]>::is_empty).await?;
        side.until_all("the pods are gone", POD, <[Value]>::is_empty).await?;
        side.checkpoint("deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordinals_begin_where_the_set_says() -> Result<()> {
    compare("stateful-ordinals", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(STATEFUL_SET, set(2, with_claims(json!({"ordinals": {"start": 5}})))).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("created").await?;
        change(side, json!({"ordinals": {"start": 4}})).await?;
        side.gone(POD, "web-6").await?;
        rolled_out(side, 2).await?;
        side.checkpoint("moved").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_adopted_and_released() -> Result<()> {
    compare("stateful-adoption", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(STATEFUL_SET, set(2, with_claims(json!({})))).await?;
        rolled_out(side, 2).await?;
        let orphans =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        side.delete_by(STATEFUL_SET, "web", &orphans).await?;
        side.gone(STATEFUL_SET, "web").await?;
        side.checkpoint("orphaned").await?;
        side.create(STATEFUL_SET, set(2, with_claims(json!({})))).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("adopted").await?;
        side.patch(POD, "web-1", json!({"metadata": {"labels": {"app": "other"}}})).await?;
        side.until(POD, "web-1", "is released", |pod| pod["metadata"]["ownerReferences"].is_null()).await?;
        side.checkpoint("released").await?;
        side.delete(POD, "web-1").await?;
        side.until(POD, "web-1", "is new", |pod| pod["metadata"]["labels"]["app"] == "web" && is_ready(pod))
            .await?;
        rolled_out(side, 2).await?;
        side.checkpoint("replaced").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_end_are_replaced_and_one_that_is_not_ready_holds_up_the_rest() -> Result<()> {
    compare("stateful-broken", async |side| {
        side.nodes(&["node-a"]).await?;
        let ends_once = template("web", "one", "1/ready");
        side.create(STATEFUL_SET, set(1, json!({"template": ends_once}))).await?;
        rolled_out(side, 1).await?;
        side.checkpoint("one ended").await?;
        let broken = template("web", "two", "unready");
        change(side, json!({"replicas": 3, "template": broken})).await?;
        side.until(POD, "web-1", "runs", |pod| pod["status"]["phase"] == "Running").await?;
        side.checkpoint("the second is not ready").await?;
        // The broken one stays until somebody deletes it.
        change(side, json!({"template": template("web", "three", "ready")})).await?;
        side.checkpoint("mended").await?;
        side.delete(POD, "web-1").await?;
        rolled_out(side, 3).await?;
        side.checkpoint("the broken one deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_counts_when_it_has_been_ready_for_long_enough() -> Result<()> {
    compare("stateful-minimum", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(STATEFUL_SET, set(2, json!({"minReadySeconds": 4}))).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("created").await?;
        change(side, json!({"template": template("web", "two", "ready")})).await?;
        rolled_out(side, 2).await?;
        side.checkpoint("rolled").await
    })
    .await
}
