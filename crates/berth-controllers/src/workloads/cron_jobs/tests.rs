//! When a CronJob starts a Job, and which Jobs it keeps; after `cronjob_controllerv2_test.go` and `utils_test.go` of
//! kube-controller-manager.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::plan::{Due, Plan, Timetable, history, job_for};

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn cron_job(spec: &Value, status: &Value) -> CronJob {
    let mut full = json!({ "schedule": "0 * * * *", "timeZone": "UTC", "concurrencyPolicy": "Allow",
        "jobTemplate": { "metadata": { "labels": { "a": "b" } },
            "spec": { "template": { "spec": { "containers": [] } } } } });
    for (key, value) in spec.as_object().into_iter().flatten() {
        full[key] = value.clone();
    }
    serde_json::from_value(json!({ "metadata": { "name": "c", "namespace": "ns", "uid": "cron",
        "creationTimestamp": "2026-01-01T09:05:00Z" }, "spec": full, "status": status }))
    .unwrap()
}

fn due(spec: &Value, status: &Value, now: &str) -> Due {
    let cron_job = cron_job(spec, status);
    let timetable = Timetable::of(&cron_job.spec).unwrap();
    timetable.due(&cron_job, cron_job.status.as_ref().unwrap(), time(now))
}

#[test]
fn a_job_is_started_when_its_time_has_come_and_once() {
    let none = json!({});
    let last = |at: &str| json!({ "lastScheduleTime": at });
    let running = json!({ "active": [{ "name": "c-29454420", "uid": "old" }], "lastScheduleTime": "2026-01-01T11:00:00Z" });
    let start = |at: &str| Plan::Start(time(at));
    let rows = [
        // Not before the first time after its creation, then at each.
        (json!({}), none.clone(), "2026-01-01T09:30:00Z", Plan::Nothing),
        (json!({}), none.clone(), "2026-01-01T10:00:00Z", start("2026-01-01T10:00:00Z")),
        (json!({}), last("2026-01-01T10:00:00Z"), "2026-01-01T10:59:59Z", Plan::Nothing),
        (json!({}), last("2026-01-01T10:00:00Z"), "2026-01-01T11:00:01Z", start("2026-01-01T11:00:00Z")),
        // Of several that were missed, the last one.
        (json!({}), last("2026-01-01T10:00:00Z"), "2026-01-01T14:20:00Z", start("2026-01-01T14:00:00Z")),
        (
            json!({ "schedule": "30 6-16/4 * * 1-5" }),
            last("2026-01-01T10:30:00Z"),
            "2026-01-06T09:00:00Z",
            start("2026-01-06T06:30:00Z"),
        ),
        // Too late, unless the deadline is long enough.
        (
            json!({ "startingDeadlineSeconds": 600 }),
            last("2026-01-01T10:00:00Z"),
            "2026-01-01T11:09:00Z",
            start("2026-01-01T11:00:00Z"),
        ),
        (
            json!({ "startingDeadlineSeconds": 600 }),
            last("2026-01-01T10:00:00Z"),
            "2026-01-01T11:11:00Z",
            Plan::Nothing,
        ),
        // While one runs.
        (json!({}), running.clone(), "2026-01-01T12:00:00Z", start("2026-01-01T12:00:00Z")),
        (json!({ "concurrencyPolicy": "Forbid" }), running.clone(), "2026-01-01T12:00:00Z", Plan::Busy),
        (
            json!({ "concurrencyPolicy": "Replace" }),
            running,
            "2026-01-01T12:00:00Z",
            Plan::Replace(time("2026-01-01T12:00:00Z")),
        ),
        (
            json!({ "concurrencyPolicy": "Forbid" }),
            last("2026-01-01T11:00:00Z"),
            "2026-01-01T12:00:00Z",
            start("2026-01-01T12:00:00Z"),
        ),
        // In another time zone: 9 o'clock in Tokyo is midnight here.
        (
            json!({ "schedule": "0 9 * * *", "timeZone": "Asia/Tokyo" }),
            none.clone(),
            "2026-01-02T00:00:00Z",
            start("2026-01-02T00:00:00Z"),
        ),
        (
            json!({ "schedule": "0 9 * * *", "timeZone": "Asia/Tokyo" }),
            none.clone(),
            "2026-01-01T23:59:59Z",
            Plan::Nothing,
        ),
        (
            json!({ "schedule": "@every 90m" }),
            last("2026-01-01T10:05:30Z"),
            "2026-01-01T11:40:00Z",
            start("2026-01-01T11:35:30Z"),
        ),
        // The Job of this time is on the list already, although the time is not in the status.
        (
            json!({}),
            json!({ "active": [{ "name": "c-29454480", "uid": "new" }] }),
            "2026-01-01T12:00:10Z",
            Plan::Nothing,
        ),
    ];
    for (spec, status, now, expected) in rows {
        let got = due(&spec, &status, now);
        assert_eq!(got, Due { plan: expected, many_missed: false }, "{spec} {status} {now}");
    }
    let many =
        due(&json!({ "schedule": "* * * * *" }), &last("2026-01-01T10:00:00Z"), "2026-01-01T14:00:30Z");
    assert_eq!(many, Due { plan: start("2026-01-01T14:00:00Z"), many_missed: true });
    let never = due(&json!({ "schedule": "0 0 31 2 *" }), &none, "2026-01-01T14:00:30Z").plan;
    assert!(
        matches!(&never, Plan::Invalid(why) if why.starts_with("invalid schedule: 0 0 31 2 *")),
        "{never:?}"
    );
}

#[test]
fn the_next_look_is_at_the_next_time() {
    let pause = |status: Value, now: &str| {
        let cron_job = cron_job(&json!({}), &status);
        let timetable = Timetable::of(&cron_job.spec).unwrap();
        timetable.pause(&cron_job, &CronJobStatus::default(), time(now)).as_millis()
    };
    assert_eq!(pause(json!({}), "2026-01-01T09:30:00Z"), 30 * 60 * 1000 + 100);
    assert_eq!(pause(json!({}), "2026-01-01T14:20:00Z"), 40 * 60 * 1000 + 100);
}

#[test]
fn what_cannot_be_read_is_said_by_an_event() {
    let of = |spec: Value| match Timetable::of(&cron_job(&spec, &json!({})).spec) {
        Ok(_) => panic!("{spec} was read"),
        Err(event) => event,
    };
    assert_eq!(of(json!({ "timeZone": "Nowhere/Land" })).0, "UnknownTimeZone");
    assert_eq!(of(json!({ "schedule": "61 * * * *" })).0, "UnparseableSchedule");
}

#[test]
fn the_name_of_a_job_is_its_time() {
    let zoned = cron_job(&json!({ "timeZone": "Asia/Tokyo" }), &json!({}));
    let job = job_for(&zoned, time("2026-01-01T12:00:00Z"));
    assert_eq!(job.name_any(), "c-29454480");
    assert_eq!(job.labels().get("a").map(String::as_str), Some("b"));
    let annotation = "batch.kubernetes.io/cronjob-scheduled-timestamp";
    assert_eq!(job.annotations().get(annotation).map(String::as_str), Some("2026-01-01T21:00:00+09:00"));
    let owner = &job.owner_references()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("CronJob", "cron", Some(true)));
    let utc = job_for(&cron_job(&json!({}), &json!({})), time("2026-01-01T12:00:00Z"));
    assert_eq!(utc.annotations().get(annotation).map(String::as_str), Some("2026-01-01T12:00:00Z"));
}

#[test]
fn the_oldest_jobs_that_ended_go_beyond_the_limits() {
    let job = |name: &str, start: &str, end: &str| -> Arc<Job> {
        let mut status = json!({ "conditions": [{ "type": end, "status": "True" }] });
        if !start.is_empty() {
            status["startTime"] = json!(start);
        }
        Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "status": status })).unwrap())
    };
    let jobs = [
        job("new", "2026-01-01T12:00:00Z", "Complete"),
        job("old", "2026-01-01T10:00:00Z", "Complete"),
        job("unknown", "", "Complete"),
        job("failed", "2026-01-01T09:00:00Z", "Failed"),
        job("runs", "2026-01-01T08:00:00Z", "Suspended"),
    ];
    let names = |spec: Value| -> Vec<String> {
        history(&cron_job(&spec, &json!({})), &jobs).iter().map(|job| job.name_any()).collect()
    };
    assert_eq!(names(json!({})), Vec::<String>::new());
    let limits =
        |good: i32, bad: i32| json!({ "successfulJobsHistoryLimit": good, "failedJobsHistoryLimit": bad });
    assert_eq!(names(limits(2, 1)), ["old"]);
    assert_eq!(names(limits(1, 0)), ["old", "new", "failed"]);
    assert_eq!(names(limits(0, 1)), ["old", "new", "unknown"]);
}
