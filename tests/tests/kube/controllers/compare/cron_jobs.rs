//! CronJobs: what happens when the minute comes. Several in one scenario, because a minute is long.

use anyhow::Result;
use serde_json::{Value, json};

use super::{compare, template};
use crate::kinds::{CRON_JOB, JOB, text};
use crate::objects::merged;

fn cron_job(name: &str, outcome: &str, more: Value) -> Value {
    let mut template = template(name, name, outcome);
    template["spec"]["restartPolicy"] = json!("Never");
    let job =
        json!({"metadata": {"labels": {"of": name}}, "spec": {"template": template, "backoffLimit": 0}});
    let spec = json!({"schedule": "* * * * *", "jobTemplate": job});
    json!({"metadata": {"name": name}, "spec": merged(spec, more)})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_are_made_every_minute() -> Result<()> {
    compare("cron-jobs", async |side| {
        side.nodes(&["node-a"]).await?;
        // All before the first minute, and none in the middle of it.
        side.after_second(5, 40).await;
        side.create(CRON_JOB, cron_job("allows", "ready", json!({}))).await?;
        side.create(CRON_JOB, cron_job("forbids", "ready", json!({"concurrencyPolicy": "Forbid"}))).await?;
        side.create(CRON_JOB, cron_job("replaces", "ready", json!({"concurrencyPolicy": "Replace"}))).await?;
        side.create(CRON_JOB, cron_job("succeeds", "0", json!({"successfulJobsHistoryLimit": 1}))).await?;
        side.create(CRON_JOB, cron_job("fails", "1", json!({"failedJobsHistoryLimit": 1}))).await?;
        side.create(CRON_JOB, cron_job("rests", "0", json!({"suspend": true}))).await?;
        side.create(
            CRON_JOB,
            cron_job("elsewhere", "0", json!({"timeZone": "Asia/Kathmandu", "schedule": "7 3 1 2 *"})),
        )
        .await?;
        side.checkpoint("created").await?;
        let of = |jobs: &[Value], name: &str| {
            jobs.iter().filter(|job| text(job, "/metadata/labels/of") == name).count()
        };
        side.until_all("the first are there", JOB, |jobs| {
            of(jobs, "allows") == 1 && of(jobs, "succeeds") == 1
        })
        .await?;
        side.until(CRON_JOB, "succeeds", "succeeded", |it| !it["status"]["lastSuccessfulTime"].is_null())
            .await?;
        side.event("fails", "SawCompletedJob").await?;
        side.checkpoint("after a minute").await?;
        side.until_all("the second are there", JOB, |jobs| of(jobs, "allows") == 2).await?;
        side.event("forbids", "JobAlreadyActive").await?;
        side.event("replaces", "SuccessfulDelete").await?;
        side.event("succeeds", "SuccessfulDelete").await?;
        side.event("fails", "SuccessfulDelete").await?;
        side.checkpoint("after two minutes").await?;
        for name in ["allows", "forbids", "replaces", "succeeds", "fails"] {
            side.patch(CRON_JOB, name, json!({"spec": {"suspend": true}})).await?;
        }
        // A Job that its CronJob does not know, and one that is taken away from it.
        let jobs = side.list(JOB).await?;
        let first = jobs.iter().find(|job| text(job, "/metadata/labels/of") == "forbids");
        side.delete(JOB, first.map_or("", |job| text(job, "/metadata/name"))).await?;
        side.event("forbids", "MissingJob").await?;
        side.delete(CRON_JOB, "allows").await?;
        side.until_all("its jobs are gone", JOB, |jobs| of(jobs, "allows") == 0).await?;
        side.checkpoint("at the end").await
    })
    .await
}
