//! Defaults, refusals and rows of jobs and cron jobs. What kube-apiserver answered is compared in `tests/server/differential`.

use serde_json::{Value, json};

use super::*;

#[expect(clippy::needless_pass_by_value, reason = "reads well in the rows")]
fn job(spec: Value) -> Value {
    let mut object = json!({ "metadata": { "name": "j", "uid": "u-1" }, "spec": { "template": { "spec": {
        "restartPolicy": "Never", "containers": [{ "name": "c", "image": "i:1" }] } } } });
    for (key, value) in spec.as_object().cloned().unwrap_or_default() {
        object["spec"][key] = value;
    }
    Job.default(&mut object);
    Job.prepare_create(&mut object);
    object
}

#[expect(clippy::needless_pass_by_value, reason = "reads well in the rows")]
fn cron_job(spec: Value) -> Value {
    let mut object = json!({ "metadata": { "name": "c" }, "spec": { "schedule": "0 * * * *", "jobTemplate": { "spec": {
        "template": { "spec": { "restartPolicy": "Never", "containers": [{ "name": "c", "image": "i:1" }] } } } } } });
    for (key, value) in spec.as_object().cloned().unwrap_or_default() {
        object["spec"][key] = value;
    }
    CronJob.default(&mut object);
    CronJob.prepare_create(&mut object);
    object
}

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| cause.to_string()).collect()
}

#[test]
fn jobs_get_defaults_and_a_selector_of_their_own() {
    let plain = job(json!({}));
    let spec = &plain["spec"];
    assert_eq!(
        (&spec["completions"], &spec["parallelism"], &spec["backoffLimit"]),
        (&json!(1), &json!(1), &json!(6))
    );
    assert_eq!((&spec["completionMode"], &spec["suspend"]), (&json!("NonIndexed"), &json!(false)));
    assert_eq!(spec["podReplacementPolicy"], "TerminatingOrFailed");
    assert_eq!(spec["selector"], json!({ "matchLabels": { "batch.kubernetes.io/controller-uid": "u-1" } }));
    let labels = json!({ "controller-uid": "u-1", "job-name": "j", "batch.kubernetes.io/controller-uid": "u-1",
        "batch.kubernetes.io/job-name": "j" });
    assert_eq!(spec["template"]["metadata"]["labels"], labels);
    assert_eq!(plain["metadata"]["labels"], labels, "a job without labels has those of its template");
    assert_eq!(texts(Job.validate(&plain)), Vec::<String>::new());

    let parallel = job(json!({ "parallelism": 3 }));
    assert!(parallel["spec"].get("completions").is_none(), "one success is enough");
    let limited = job(json!({ "completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1 }));
    assert_eq!(limited["spec"]["backoffLimit"], i32::MAX);
    let policy =
        json!({ "rules": [{ "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget" }] }] });
    let judged = job(json!({ "podFailurePolicy": policy }));
    assert_eq!(judged["spec"]["podReplacementPolicy"], "Failed");
    assert_eq!(judged["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["status"], "True");
    for valid in [parallel, limited, judged] {
        assert_eq!(texts(Job.validate(&valid)), Vec::<String>::new(), "{valid}");
    }
}

#[test]
fn jobs_that_make_no_sense_are_refused() {
    let rows = [
        (
            json!({ "completions": -1 }),
            "spec.completions: Invalid value: -1: must be greater than or equal to 0",
        ),
        (
            json!({ "completionMode": "Odd" }),
            "spec.completionMode: Unsupported value: \"Odd\": supported values: \"NonIndexed\", \"Indexed\"",
        ),
        (
            json!({ "completionMode": "Indexed", "parallelism": 2 }),
            "spec.completions: Required value: when completion mode is Indexed",
        ),
        (
            json!({ "backoffLimitPerIndex": 1 }),
            "spec.backoffLimitPerIndex: Invalid value: 1: requires indexed completion mode",
        ),
        (
            json!({ "completionMode": "Indexed", "completions": 2, "maxFailedIndexes": 1 }),
            "spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified",
        ),
        (
            json!({ "podReplacementPolicy": "Odd" }),
            "spec.podReplacementPolicy: Unsupported value: \"Odd\": supported values: \"Failed\", \"TerminatingOrFailed\"",
        ),
        (
            json!({ "managedBy": "me" }),
            "spec.managedBy: Invalid value: \"me\": must be a domain-prefixed path (such as \"acme.io/foo\")",
        ),
        (
            json!({ "podFailurePolicy": { "rules": [{ "action": "Count" }] } }),
            "spec.podFailurePolicy.rules[0]: Invalid value: specifying one of OnExitCodes and OnPodConditions is required",
        ),
        (
            json!({ "podFailurePolicy": { "rules": [{ "action": "FailIndex", "onExitCodes": { "operator": "In", "values": [1] } }] } }),
            "spec.podFailurePolicy.rules[0].action: Invalid value: \"FailIndex\": requires the backoffLimitPerIndex to be set",
        ),
        (
            json!({ "podFailurePolicy": { "rules": [{ "action": "Count", "onExitCodes": { "operator": "In", "values": [3, 1] } }] } }),
            "spec.podFailurePolicy.rules[0].onExitCodes.values: Invalid value: [3,1]: must be ordered",
        ),
        (
            json!({ "completionMode": "Indexed", "completions": 3, "successPolicy": { "rules": [{ "succeededIndexes": "0-5" }] } }),
            "spec.successPolicy.rules[0].succeededIndexes: Invalid value: \"0-5\": error parsing succeededIndexes: too large index: \"5\"",
        ),
    ];
    for (spec, expected) in rows {
        assert_eq!(texts(Job.validate(&job(spec.clone()))), [expected], "{spec}");
    }
    let mut always = job(json!({}));
    always["spec"]["template"]["spec"]["restartPolicy"] = json!("Always");
    assert_eq!(
        texts(Job.validate(&always)),
        ["spec.template.spec.restartPolicy: Required value: valid values: \"OnFailure\", \"Never\""]
    );
    let mut stolen = job(json!({}));
    stolen["spec"]["template"]["metadata"]["labels"]["job-name"] = json!("other");
    assert!(
        texts(Job.validate(&stolen))[0].starts_with("spec.template.metadata.labels[job-name]: Invalid value")
    );
}

#[test]
fn the_template_of_a_job_changes_only_while_it_is_suspended_and_has_no_pods() {
    let change = |old: &Value, field: &str, value: Value| {
        let mut new = old.clone();
        new["spec"]["template"]["spec"][field] = value;
        texts(Job.validate_update(&new, old)).len()
    };
    let selector = || json!({ "disk": "fast" });
    let running = job(json!({}));
    assert_eq!(change(&running, "nodeSelector", selector()), 1);
    let mut suspended = job(json!({ "suspend": true }));
    assert_eq!(change(&suspended, "nodeSelector", selector()), 0);
    assert_eq!(change(&suspended, "hostNetwork", json!(true)), 1);
    suspended["status"] = json!({ "active": 1 });
    assert_eq!(change(&suspended, "nodeSelector", selector()), 1);
    let mut more = running.clone();
    more["spec"]["completions"] = json!(2);
    assert_eq!(
        texts(Job.validate_update(&more, &running)),
        ["spec.completions: Invalid value: 2: field is immutable"]
    );
    more = running.clone();
    more["spec"]["parallelism"] = json!(0);
    more["spec"]["suspend"] = json!(true);
    assert_eq!(texts(Job.validate_update(&more, &running)), Vec::<String>::new());
    assert!(Job.generation_changes(&more, &running));
}

#[test]
fn a_status_keeps_its_word() {
    let with = |status: Value| {
        let mut object = job(json!({}));
        object["status"] = status;
        object
    };
    let condition = |kind: &str| json!({ "type": kind, "status": "True" });
    let running = with(json!({ "active": 1, "failed": 2, "startTime": "2026-01-01T00:00:00Z" }));
    let rows = [
        (json!({ "failed": 1, "startTime": "2026-01-01T00:00:00Z" }), "cannot decrease the failed counter"),
        (
            json!({ "failed": 2, "startTime": "2026-01-01T00:00:01Z" }),
            "field is immutable for unsuspended job once set",
        ),
        (
            json!({ "failed": 2, "startTime": "2026-01-01T00:00:00Z", "ready": 1 }),
            "cannot set more ready pods than active",
        ),
        (
            json!({ "failed": 2, "startTime": "2026-01-01T00:00:00Z", "conditions": [condition("Failed")] }),
            "without the FailureTarget=true condition",
        ),
        (
            json!({ "failed": 2, "startTime": "2026-01-01T00:00:00Z", "conditions": [condition("SuccessCriteriaMet"), condition("Complete")] }),
            "completionTime is required for Complete jobs",
        ),
    ];
    for (status, expected) in rows {
        let causes = texts(Job.validate_status_update(&with(status.clone()), &running));
        assert!(causes.len() == 1 && causes[0].contains(expected), "{status}: {causes:?}");
    }
    let failed = json!({ "failed": 3, "startTime": "2026-01-01T00:00:00Z",
        "conditions": [condition("FailureTarget"), condition("Failed")] });
    assert_eq!(texts(Job.validate_status_update(&with(failed.clone()), &running)), Vec::<String>::new());
    assert_eq!(texts(Job.validate_status_update(&running, &with(failed))).len(), 3, "what ended stays ended");
}

#[test]
fn cron_jobs_are_checked_like_their_jobs() {
    let plain = cron_job(json!({}));
    assert_eq!(texts(CronJob.validate(&plain)), Vec::<String>::new());
    assert_eq!(plain["spec"]["concurrencyPolicy"], "Allow");
    assert_eq!(plain["spec"]["successfulJobsHistoryLimit"], 3);
    assert!(plain["spec"]["jobTemplate"]["spec"].get("backoffLimit").is_none(), "the job gets it");
    let rows = [
        (json!({ "schedule": "" }), "spec.schedule: Required value"),
        (
            json!({ "schedule": "* * *" }),
            "spec.schedule: Invalid value: \"* * *\": expected exactly 5 fields, found 3: [* * *]",
        ),
        (
            json!({ "schedule": "TZ=UTC 0 * * * *" }),
            "spec.schedule: Invalid value: \"TZ=UTC 0 * * * *\": cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
        ),
        (
            json!({ "timeZone": "Local" }),
            "spec.timeZone: Invalid value: \"Local\": timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones",
        ),
        (
            json!({ "timeZone": "../etc" }),
            "spec.timeZone: Invalid value: \"../etc\": unknown time zone ../etc",
        ),
        (
            json!({ "concurrencyPolicy": "Odd" }),
            "spec.concurrencyPolicy: Unsupported value: \"Odd\": supported values: \"Allow\", \"Forbid\", \"Replace\"",
        ),
        (
            json!({ "startingDeadlineSeconds": -1 }),
            "spec.startingDeadlineSeconds: Invalid value: -1: must be greater than or equal to 0",
        ),
    ];
    for (spec, expected) in rows {
        assert_eq!(texts(CronJob.validate(&cron_job(spec.clone()))), [expected], "{spec}");
    }
    let mut long = plain;
    long["metadata"]["name"] = json!("c".repeat(53));
    assert_eq!(texts(CronJob.validate(&long)).len(), 1);
    assert_eq!(texts(CronJob.validate_update(&long, &long)), Vec::<String>::new());
}

#[test]
fn rows_look_as_kubectl_prints_them() {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
    let cells = |object: &Value| Job.cells(object, now)[1..4].to_vec();
    let mut object = job(json!({ "completions": 3 }));
    assert_eq!(cells(&object), [json!("Running"), json!("0/3"), json!("")]);
    object["status"] = json!({ "succeeded": 1, "startTime": "2026-01-01T00:00:00Z" });
    assert_eq!(cells(&object), [json!("Running"), json!("1/3"), json!("10m")]);
    object["status"] = json!({ "succeeded": 3, "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:07Z",
        "conditions": [{ "type": "Complete", "status": "True" }] });
    assert_eq!(cells(&object), [json!("Complete"), json!("3/3"), json!("7s")]);
    let parallel = job(json!({ "parallelism": 2 }));
    assert_eq!(cells(&parallel)[1], "0/1 of 2");
    let mut cron = cron_job(json!({ "timeZone": "Asia/Tokyo" }));
    cron["status"] = json!({ "active": [{}], "lastScheduleTime": "2026-01-01T00:09:00Z" });
    assert_eq!(
        CronJob.cells(&cron, now)[..6],
        [json!("c"), json!("0 * * * *"), json!("Asia/Tokyo"), json!("False"), json!(1), json!("60s")]
    );
}
