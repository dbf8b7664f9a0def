//! Jobs and CronJobs on `berth up`: pods that run to their end with a claim, counted once also through `kill -9`.

use anyhow::{Result, ensure};
use berth_e2e::up::Machine;
use serde_json::Value;

use super::{claim, says, text, together, until_empty};

/// A Job whose pods run a script with the claim `data` at /data.
fn job(name: &str, spec: &str, script: &str) -> String {
    format!(
        "apiVersion: batch/v1\nkind: Job\nmetadata: {{name: {name}}}\nspec:\n  {spec}\n  template:\n    spec:\n      \
         restartPolicy: Never\n      terminationGracePeriodSeconds: 1\n      containers:\n      - name: main\n        \
         image: busybox\n        command: [sh, -c, {script:?}]\n        volumeMounts: [{{name: data, mountPath: /data}}]\n      \
         volumes: [{{name: data, persistentVolumeClaim: {{claimName: data}}}}]\n"
    )
}

/// The conditions of a Job that hold, with their reasons.
fn conditions(job: &Value) -> Vec<String> {
    let conditions = job.pointer("/status/conditions").and_then(Value::as_array);
    let held = conditions.into_iter().flatten().filter(|condition| text(condition, "/status") == "True");
    held.map(|condition| format!("{}: {}", text(condition, "/type"), text(condition, "/reason"))).collect()
}

/// The lines that the pods wrote, read by a pod that stays.
fn lines(machine: &Machine, file: &str) -> Result<usize> {
    Ok(machine.exec("reader", &format!("cat /data/{file} 2>/dev/null | wc -l"))?.trim().parse()?)
}

#[test]
fn jobs_run_to_their_end_and_each_pod_counts_once() -> Result<()> {
    let mut machine = Machine::start()?;
    let reader = super::pod("reader", "data", "exec sleep 100000");
    machine.apply(&together(&[claim("data"), reader]))?;
    machine.ready("reader")?;

    // Killed while pods run, between their end and their being counted, and while new ones are made.
    machine.apply(&job("many", "completions: 12\n  parallelism: 3", "echo done >> /data/many; sleep 0.2"))?;
    for ended in [2, 5, 8] {
        machine.until(&format!("{ended} pods have ended"), || {
            Ok((lines(&machine, "many")? >= ended).then_some(()))
        })?;
        machine.kill()?;
        machine.restart()?;
    }
    machine.wait("job/many", "condition=Complete")?;
    let many = machine.get("job/many")?;
    ensure!(many["status"]["succeeded"] == 12 && many["status"].get("failed").is_none(), "{many}");
    ensure!(lines(&machine, "many")? == 12, "{} pods ran", lines(&machine, "many")?);
    ensure!(
        conditions(&many) == ["SuccessCriteriaMet: CompletionsReached", "Complete: CompletionsReached"],
        "{many}"
    );
    says(&machine.kubectl(&["get", "job", "many"])?, "Complete   12/12")?;
    says(&machine.describe("job/many")?, "Job completed")?;
    for pod in machine.all("pods")?.iter().filter(|pod| text(pod, "/metadata/name").starts_with("many")) {
        ensure!(pod["metadata"].get("finalizers").is_none(), "a pod that is counted is kept: {pod}");
    }

    // An index each, by name, variable and label; the third fails once and is tried again.
    let script = "echo $JOB_COMPLETION_INDEX > /data/index-$(hostname); test $JOB_COMPLETION_INDEX = 2 || exit 0; \
                  echo x >> /data/tries; test $(cat /data/tries | wc -l) -gt 1";
    let indexed = "completions: 3\n  parallelism: 3\n  completionMode: Indexed\n  backoffLimitPerIndex: 1";
    machine.apply(&job("indexed", indexed, script))?;
    machine.wait("job/indexed", "condition=Complete")?;
    let done = machine.get("job/indexed")?;
    ensure!(text(&done, "/status/completedIndexes") == "0-2" && done["status"]["failed"] == 1, "{done}");
    for index in 0..3 {
        let found = machine.exec("reader", &format!("cat /data/index-indexed-{index}"))?;
        ensure!(found.trim() == index.to_string(), "{found}");
    }

    machine.delete("job/many job/indexed")?;
    machine.delete("pod/reader")?;
    machine.delete("pvc/data")?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn jobs_end_by_their_limits_wait_and_expire() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&claim("data"))?;
    machine.apply(&job("fails", "backoffLimit: 0", "exit 3"))?;
    machine.apply(&job("late", "activeDeadlineSeconds: 2", "exec sleep 100000"))?;
    let policy =
        "podFailurePolicy:\n    rules:\n    - {action: FailJob, onExitCodes: {operator: In, values: [42]}}";
    machine.apply(&job("judged", policy, "exit 42"))?;
    for (name, reason) in
        [("fails", "BackoffLimitExceeded"), ("late", "DeadlineExceeded"), ("judged", "PodFailurePolicy")]
    {
        machine.wait(&format!("job/{name}"), "condition=Failed")?;
        let job = machine.get(&format!("job/{name}"))?;
        ensure!(
            conditions(&job) == [format!("FailureTarget: {reason}"), format!("Failed: {reason}")],
            "{job}"
        );
        ensure!(job["status"]["failed"] == 1 && job["status"].get("active").is_none(), "{job}");
        machine.event("Job", name, reason)?;
    }
    says(&machine.kubectl(&["get", "job", "fails"])?, "Failed   0/1")?;

    // Suspended, it has no pods; resumed, it runs. Expired, it goes with them.
    machine.apply(&job("waits", "suspend: true\n  ttlSecondsAfterFinished: 0", "true"))?;
    machine.wait("job/waits", "condition=Suspended")?;
    machine.event("Job", "waits", "Suspended")?;
    says(&machine.kubectl(&["get", "job", "waits"])?, "Suspended   0/1")?;
    machine.kubectl(&["patch", "job/waits", "--type=merge", "-p", r#"{"spec": {"suspend": false}}"#])?;
    machine.event("Job", "waits", "Completed")?;
    machine.kubectl(&["wait", "job/waits", "--for=delete", "--timeout=60s"])?;
    machine.until("the pods of the Job are gone", || {
        let pods = machine.all("pods")?;
        Ok((!pods.iter().any(|pod| text(pod, "/metadata/name").starts_with("waits"))).then_some(()))
    })?;

    // Deleted while it runs: its pods are not kept by their finalizers. Deleted alone, they stay.
    machine.apply(&job("stopped", "parallelism: 2", "exec sleep 100000"))?;
    machine.apply(&job("left", "parallelism: 1", "exec sleep 100000"))?;
    let pods_of =
        |job: &str| machine.kubectl(&["get", "pods", "-l", &format!("job-name={job}"), "-o", "name"]);
    machine.until("pods of both run", || {
        Ok((!pods_of("stopped")?.is_empty() && !pods_of("left")?.is_empty()).then_some(()))
    })?;
    machine.delete("job/stopped")?;
    machine.kubectl(&["delete", "job/left", "--cascade=orphan"])?;
    machine.until("its pods are gone", || Ok(pods_of("stopped")?.is_empty().then_some(())))?;
    let left = machine.until("the pod is let go", || {
        let pods = machine.all("pods")?;
        let left = pods.into_iter().find(|pod| text(pod, "/metadata/name").starts_with("left"));
        Ok(left.filter(|pod| pod["metadata"].get("finalizers").is_none()))
    })?;
    ensure!(left["metadata"].get("deletionTimestamp").is_none(), "{left}");

    machine.kubectl(&["delete", "job", "--all"])?;
    machine.kubectl(&["delete", "pods", "--all"])?;
    machine.delete("pvc/data")?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn cron_jobs_start_jobs_at_their_times_and_are_started_by_hand() -> Result<()> {
    let mut machine = Machine::start()?;
    let cron_job = "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: tick}\nspec:\n  schedule: '@every 1s'\n  \
                    timeZone: Asia/Tokyo\n  jobTemplate:\n    metadata: {labels: {of: tick}}\n    spec:\n      template:\n        \
                    spec:\n          restartPolicy: Never\n          containers:\n          \
                    - {name: main, image: busybox, command: [sh, -c, 'exit 0']}\n";
    machine.apply(cron_job)?;
    machine.event("CronJob", "tick", "SuccessfulCreate")?;
    machine.event("CronJob", "tick", "SawCompletedJob")?;
    let made = machine.all("jobs")?;
    let stamp = text(&made[0], "/metadata/annotations/batch.kubernetes.io~1cronjob-scheduled-timestamp");
    ensure!(stamp.ends_with("+09:00"), "{}", made[0]);
    machine.kubectl(&["patch", "cronjob/tick", "--type=merge", "-p", r#"{"spec": {"suspend": true}}"#])?;
    let before = machine.all("jobs")?.len();
    machine.kill()?;
    machine.restart()?;
    let shown = machine.kubectl(&["get", "cronjob", "tick"])?;
    says(&shown, "NAME   SCHEDULE    TIMEZONE     SUSPEND   ACTIVE   LAST SCHEDULE   AGE")?;
    says(&shown, "tick   @every 1s   Asia/Tokyo   True")?;
    machine.kubectl(&["create", "job", "by-hand", "--from=cronjob/tick"])?;
    machine.wait("job/by-hand", "condition=Complete")?;
    ensure!(machine.all("jobs")?.len() == before + 1, "a suspended CronJob starts nothing");

    // A schedule that cannot be read, and a zone that there is not, are refused.
    for (wrong, said) in [
        (cron_job.replace("@every 1s", "61 * * * *"), "end of range (61) above maximum (59): 61"),
        (cron_job.replace("Asia/Tokyo", "Nowhere"), "unknown time zone Nowhere"),
    ] {
        let refused = machine.kubectl_with(&["apply", "-f", "-"], &wrong);
        says(&format!("{:#}", refused.err().unwrap_or_else(|| anyhow::anyhow!("it was accepted"))), said)?;
    }
    machine.delete("cronjob/tick")?;
    machine.until("its jobs and their pods are gone", || {
        Ok((machine.all("jobs")?.is_empty() && machine.all("pods")?.is_empty()).then_some(()))
    })?;
    machine.finish()
}
