//! Jobs: how pods are counted, and how a Job ends.

use anyhow::Result;
use serde_json::{Value, json};

use super::kubelet::OUTCOME;
use super::side::Side;
use super::{compare, template};
use crate::kinds::{JOB, POD, text};
use crate::objects::merged;

fn job(name: &str, outcome: &str, more: Value) -> Value {
    let mut template = template(name, name, outcome);
    template["spec"]["restartPolicy"] = json!("Never");
    let spec = json!({"template": template, "backoffLimit": 3});
    json!({"metadata": {"name": name}, "spec": merged(spec, more)})
}

fn has(job: &Value, condition: &str) -> bool {
    let conditions = job["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == condition && one["status"] == "True"))
}

async fn ends(side: &Side, name: &str, condition: &str) -> Result<()> {
    side.until(JOB, name, &format!("is {condition}"), |job| has(job, condition)).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_complete_and_fail() -> Result<()> {
    compare("jobs-ends", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(JOB, job("one", "0", json!({}))).await?;
        side.create(JOB, job("many", "0", json!({"completions": 4, "parallelism": 2}))).await?;
        side.create(JOB, job("retried", "1/0", json!({}))).await?;
        side.create(JOB, job("failing", "1", json!({"backoffLimit": 1}))).await?;
        side.create(JOB, job("late", "ready", json!({"activeDeadlineSeconds": 4}))).await?;
        for name in ["one", "many", "retried"] {
            ends(side, name, "Complete").await?;
        }
        for name in ["failing", "late"] {
            ends(side, name, "Failed").await?;
        }
        side.checkpoint("ended").await?;
        side.patch(JOB, "one", json!({"spec": {"ttlSecondsAfterFinished": 1}})).await?;
        side.gone(JOB, "one").await?;
        side.checkpoint("one expired").await?;
        side.delete(JOB, "many").await?;
        side.gone(JOB, "many").await?;
        side.checkpoint("one deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_of_a_work_queue_end_when_one_pod_succeeds() -> Result<()> {
    compare("jobs-queue", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(JOB, job("queue", "0/ready", json!({"parallelism": 3}))).await?;
        side.until(JOB, "queue", "has one that succeeded", |job| job["status"]["succeeded"] == 1).await?;
        side.checkpoint("one succeeded").await?;
        let pods = side.list(POD).await?;
        for pod in pods.iter().filter(|pod| text(pod, "/status/phase") == "Running") {
            let end = json!({"metadata": {"annotations": {OUTCOME: "0"}}});
            side.patch(POD, text(pod, "/metadata/name"), end).await?;
        }
        ends(side, "queue", "Complete").await?;
        side.checkpoint("ended").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn indexed_jobs_have_a_pod_for_each_index() -> Result<()> {
    compare("jobs-indexed", async |side| {
        side.nodes(&["node-a"]).await?;
        let indexed = |more: Value| {
            merged(json!({"completionMode": "Indexed", "completions": 3, "parallelism": 3}), more)
        };
        side.create(JOB, job("plain", "0", indexed(json!({})))).await?;
        side.create(JOB, job("retried", "0,1/0,0", indexed(json!({})))).await?;
        let limit = json!({"backoffLimitPerIndex": 1, "backoffLimit": null});
        side.create(JOB, job("failing", "0,1,0", indexed(limit))).await?;
        let most = json!({"backoffLimitPerIndex": 0, "maxFailedIndexes": 1, "backoffLimit": null});
        side.create(JOB, job("most", "1,1,ready", indexed(most))).await?;
        let policy = json!({"successPolicy": {"rules": [{"succeededIndexes": "0", "succeededCount": 1}]}});
        side.create(JOB, job("leader", "0,ready,ready", indexed(policy))).await?;
        for name in ["plain", "retried", "leader"] {
            ends(side, name, "Complete").await?;
        }
        for name in ["failing", "most"] {
            ends(side, name, "Failed").await?;
        }
        side.checkpoint("ended").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_job_has_no_pods_until_it_is_resumed() -> Result<()> {
    compare("jobs-suspended", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(JOB, job("rests", "ready", json!({"suspend": true, "parallelism": 2, "completions": 2})))
            .await?;
        ends(side, "rests", "Suspended").await?;
        side.checkpoint("created").await?;
        side.patch(JOB, "rests", json!({"spec": {"suspend": false}})).await?;
        side.until(JOB, "rests", "runs", |job| job["status"]["ready"] == 2).await?;
        side.checkpoint("resumed").await?;
        side.patch(JOB, "rests", json!({"spec": {"suspend": true}})).await?;
        ends(side, "rests", "Suspended").await?;
        side.until_all("its pods are gone", POD, <[Value]>::is_empty).await?;
        side.checkpoint("suspended").await?;
        side.patch(JOB, "rests", json!({"spec": {"suspend": false, "parallelism": 1}})).await?;
        side.until(JOB, "rests", "runs", |job| job["status"]["ready"] == 1).await?;
        side.patch(JOB, "rests", json!({"spec": {"parallelism": 2}})).await?;
        side.until(JOB, "rests", "runs", |job| job["status"]["ready"] == 2).await?;
        side.patch(JOB, "rests", json!({"spec": {"parallelism": 1}})).await?;
        side.until_all("one is gone", POD, |pods| pods.len() == 1).await?;
        side.checkpoint("scaled").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_policy_decides_by_exit_codes() -> Result<()> {
    compare("jobs-policy", async |side| {
        side.nodes(&["node-a"]).await?;
        let rule = |action: &str, code: i32| {
            json!({"action": action, "onExitCodes": {"containerName": "main", "operator": "In", "values": [code]}})
        };
        let policy = |rules: &[Value]| json!({"podFailurePolicy": {"rules": rules}, "backoffLimit": 1});
        side.create(JOB, job("ends", "42", policy(&[rule("FailJob", 42)]))).await?;
        side.create(JOB, job("ignores", "7/7/0", policy(&[rule("Ignore", 7)]))).await?;
        let indexed = json!({
            "completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimitPerIndex": 3,
        });
        let indexed = merged(policy(&[rule("FailIndex", 9)]), indexed);
        side.create(JOB, job("index", "9,0", indexed)).await?;
        ends(side, "ends", "Failed").await?;
        ends(side, "ignores", "Complete").await?;
        ends(side, "index", "Failed").await?;
        side.checkpoint("ended").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_are_deleted_are_replaced() -> Result<()> {
    compare("jobs-replaced", async |side| {
        side.nodes(&["node-a"]).await?;
        side.create(JOB, job("soon", "ready", json!({}))).await?;
        side.create(JOB, job("ended", "ready", json!({"podReplacementPolicy": "Failed"}))).await?;
        for name in ["soon", "ended"] {
            side.until(JOB, name, "runs", |job| job["status"]["ready"] == 1).await?;
        }
        for pod in side.list(POD).await? {
            side.delete(POD, text(&pod, "/metadata/name")).await?;
        }
        for name in ["soon", "ended"] {
            side.until(JOB, name, "runs again", |job| {
                job["status"]["ready"] == 1 && job["status"]["failed"] == 1
            })
            .await?;
        }
        side.until_all("the first are gone", POD, |pods| pods.len() == 2).await?;
        side.checkpoint("replaced").await
    })
    .await
}
