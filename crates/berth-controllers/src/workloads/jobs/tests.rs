//! Which pods a Job makes and removes, when it ends, and how its pods are counted; after `job_controller_test.go`,
//! `indexed_job_utils_test.go`, `pod_failure_policy_test.go`, `backoff_utils_test.go` and `success_policy_test.go` of
//! kube-controller-manager.

use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{JOB_COMPLETION_INDEX, JOB_INDEX_FAILURES, JOB_TRACKING};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::failures::{Failures, Verdict};
use super::indexes::Indexes;
use super::new_pod;
use super::plan::{JobPod, NewPod, ObservedJob, Step, count_released, finish, finished, set_condition};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn job(spec: &Value, status: &Value) -> Job {
    let mut full = json!({
        "parallelism": 2, "completions": 5, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": false,
        "podReplacementPolicy": "TerminatingOrFailed", "selector": { "matchLabels": { "job": "j" } },
        "template": { "metadata": { "labels": { "job": "j" } }, "spec": { "restartPolicy": "Never",
            "containers": [{ "name": "c" }] } },
    });
    for (key, value) in spec.as_object().into_iter().flatten() {
        if value.is_null() {
            full.as_object_mut().unwrap().remove(key);
        } else {
            full[key] = value.clone();
        }
    }
    serde_json::from_value(
        json!({ "metadata": { "name": "j", "namespace": "ns", "uid": "job" }, "spec": full, "status": status }),
    )
    .unwrap()
}

/// A pod by its name, its phase (with `-` behind it if it is being deleted, with `!` if it was let go already), and its index.
fn pod(name: &str, phase: &str, index: Option<usize>, failures: u32) -> JobPod {
    let is_going = phase.contains('-');
    let is_tracked = !phase.contains('!');
    let phase = phase.trim_end_matches(['-', '!']);
    let mut object = json!({
        "metadata": { "name": name, "namespace": "ns", "uid": name, "labels": { "job": "j" }, "annotations": {},
            "creationTimestamp": "2026-01-01T11:00:00Z" },
        "spec": { "nodeName": "n", "containers": [] }, "status": { "phase": phase },
    });
    if let Some(index) = index {
        object["metadata"]["annotations"][JOB_COMPLETION_INDEX] = json!(index.to_string());
        object["metadata"]["annotations"][JOB_INDEX_FAILURES] = json!(failures.to_string());
    }
    if is_tracked {
        object["metadata"]["finalizers"] = json!([JOB_TRACKING]);
    }
    JobPod { pod: Arc::new(serde_json::from_value(object).unwrap()), is_going, is_tracked }
}

fn pods(list: &str) -> Vec<JobPod> {
    let one = |(at, word): (usize, &str)| match word.split_once('@') {
        Some((phase, index)) => {
            let (index, failures) = index.split_once('/').unwrap_or((index, "0"));
            pod(&format!("p{at}"), phase, Some(index.parse().unwrap()), failures.parse().unwrap())
        }
        None => pod(&format!("p{at}"), word, None, 0),
    };
    list.split_whitespace().enumerate().map(one).collect()
}

fn observe<'a>(job: &'a Job, list: &str) -> ObservedJob<'a> {
    let spec = job.spec.as_ref().unwrap();
    ObservedJob { job, spec, pods: pods(list), failures: Failures::default(), now: now() }
}

/// The plan in words, and the reason with which the Job ends.
fn planned(spec: &Value, status: &Value, list: &str) -> String {
    let job = job(spec, status);
    let observed = observe(&job, list);
    let assessment = observed.assess();
    let (step, pause) = observed.plan(&assessment);
    let names = |pods: &[Arc<Pod>]| {
        let mut names: Vec<String> = pods.iter().map(|pod| pod.name_any()).collect();
        names.sort();
        names.join(",")
    };
    let mut text = match step {
        Step::Nothing => "nothing".to_owned(),
        Step::Create(new) if new.iter().all(|pod| pod.index.is_none()) => format!("create {}", new.len()),
        Step::Create(new) => {
            let indexes: Vec<String> =
                new.iter().map(|pod| pod.index.unwrap_or_default().to_string()).collect();
            format!("create @{}", indexes.join(","))
        }
        Step::End(pods) => format!("end {}", names(&pods)),
        Step::Remove(pods) => format!("remove {}", names(&pods)),
    };
    text.truncate(text.trim_end().len());
    if let Some(end) = assessment.end {
        text.extend([": ", &end.reason.unwrap_or_default()]);
    }
    if let Some(pause) = pause {
        text.extend([", pause ", &pause.as_secs().to_string()]);
    }
    text
}

#[test]
fn as_many_pods_run_as_parallelism_and_completions_ask_for() {
    let none = json!({});
    let rows = [
        (json!({}), none.clone(), "", "create 2"),
        (json!({ "parallelism": 0 }), none.clone(), "", "nothing"),
        (json!({}), none.clone(), "Running", "create 1"),
        (json!({}), none.clone(), "Running Running", "nothing"),
        (json!({}), none.clone(), "Running Running Pending", "remove p2"),
        (json!({}), none.clone(), "Succeeded", "create 2"),
        (json!({}), json!({ "succeeded": 4 }), "", "create 1"),
        (json!({}), json!({ "succeeded": 5 }), "", "nothing"),
        (json!({}), json!({ "succeeded": 4 }), "Running Pending", "remove p1"),
        // Those in the status that are not counted yet count once.
        (
            json!({}),
            json!({ "succeeded": 2, "uncountedTerminatedPods": { "succeeded": ["p0"] } }),
            "Succeeded",
            "create 2",
        ),
        (
            json!({}),
            json!({ "succeeded": 3, "uncountedTerminatedPods": { "succeeded": ["p0"] } }),
            "Succeeded",
            "create 1",
        ),
        // Those that were let go are in the counts.
        (json!({}), json!({ "succeeded": 4 }), "Succeeded!", "create 1"),
        // Without completions one success is enough.
        (json!({ "completions": null }), none.clone(), "", "create 2"),
        (json!({ "completions": null }), none.clone(), "Succeeded Running", "nothing"),
        // A pod that is being deleted is replaced at once, or when it has ended.
        (json!({}), none.clone(), "Running- Running", "create 1, pause 0"),
        (json!({ "podReplacementPolicy": "Failed" }), none.clone(), "Running- Running", "nothing"),
        (json!({ "parallelism": 9000, "completions": 9000 }), none.clone(), "", "create 500"),
        (json!({ "suspend": true }), none.clone(), "Running Pending", "remove p0,p1"),
        (json!({ "suspend": true }), none, "Succeeded", "nothing"),
    ];
    for (spec, status, list, expected) in rows {
        let got = planned(&spec, &status, list);
        // The failure of a pod that is being deleted is an hour old here.
        assert_eq!(got, expected.trim_end_matches(", pause 0"), "{spec} {status} {list:?}");
    }
}

#[test]
fn a_job_ends_by_its_limits() {
    let none = json!({});
    let started = |time: &str| json!({ "startTime": time });
    let rows = [
        (json!({ "backoffLimit": 0 }), none.clone(), "Failed Running", "end p1: BackoffLimitExceeded"),
        (json!({ "backoffLimit": 1 }), none.clone(), "Failed Running", "create 1"),
        (json!({ "backoffLimit": 1 }), json!({ "failed": 1 }), "Failed", "end: BackoffLimitExceeded"),
        (
            json!({ "backoffLimit": 1 }),
            json!({ "failed": 1, "uncountedTerminatedPods": { "failed": ["p0"] } }),
            "Failed",
            "end: BackoffLimitExceeded",
        ),
        (
            json!({ "activeDeadlineSeconds": 60 }),
            started("2026-01-01T11:59:00Z"),
            "Running",
            "end p0: DeadlineExceeded",
        ),
        (
            json!({ "activeDeadlineSeconds": 60 }),
            started("2026-01-01T11:59:01Z"),
            "Running Running",
            "nothing",
        ),
        (
            json!({ "activeDeadlineSeconds": 60, "suspend": true }),
            started("2026-01-01T11:00:00Z"),
            "",
            "nothing",
        ),
        // What was decided stays decided.
        (
            json!({}),
            json!({ "conditions": [{ "type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded" }] }),
            "Running",
            "end p0: DeadlineExceeded",
        ),
        (
            json!({}),
            json!({ "conditions": [{ "type": "SuccessCriteriaMet", "status": "True", "reason": "CompletionsReached" }] }),
            "Running",
            "end p0: CompletionsReached",
        ),
    ];
    for (spec, status, list, expected) in rows {
        assert_eq!(planned(&spec, &status, list), expected, "{spec} {status} {list:?}");
    }
    let deadline = job(&json!({ "activeDeadlineSeconds": 60 }), &started("2026-01-01T11:59:30Z"));
    assert_eq!(observe(&deadline, "").assess().again, Some(Duration::from_secs(30)));
}

#[test]
fn restarts_of_containers_count_where_pods_restart_them() {
    let spec = json!({ "backoffLimit": 3, "template": { "spec": { "restartPolicy": "OnFailure", "containers": [] } } });
    let job = job(&spec, &json!({}));
    for (restarts, ends) in [(2, false), (3, true)] {
        let mut observed = observe(&job, "Running");
        let mut pod = observed.pods[0].pod.as_ref().clone();
        pod.status.as_mut().unwrap().container_statuses = Some(vec![
            serde_json::from_value(
                json!({ "name": "c", "image": "", "imageID": "", "ready": true, "restartCount": restarts }),
            )
            .unwrap(),
        ]);
        observed.pods[0].pod = Arc::new(pod);
        assert_eq!(observed.assess().end.is_some(), ends, "{restarts}");
    }
}

#[test]
fn indexes_are_tried_from_the_first_and_failed_by_their_own_limit() {
    let indexed = |more: &Value| {
        let mut spec = json!({ "completionMode": "Indexed", "parallelism": 3, "completions": 4 });
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        spec
    };
    let (none, limited) = (json!({}), json!({ "backoffLimitPerIndex": 1, "backoffLimit": i32::MAX }));
    let rows = [
        (none.clone(), none.clone(), "", "create @0,1,2"),
        (none.clone(), json!({ "completedIndexes": "0,1", "succeeded": 2 }), "", "create @2,3"),
        (none.clone(), none.clone(), "Running@1 Succeeded@0", "create @2,3"),
        // Two of one index, one of an index that there is not, one without.
        (none.clone(), none.clone(), "Running@1 Pending@1 Running@7 Running", "remove p1,p2,p3"),
        (none.clone(), none.clone(), "Failed@0 Running@1 Running@2", "create @0"),
        // One failure is forgiven, a second is not, and the others go on.
        (limited.clone(), none.clone(), "Failed@0/0 Running@1 Running@2", "create @0"),
        (limited.clone(), none.clone(), "Failed@0/1 Running@1 Running@2", "create @3"),
        (
            limited.clone(),
            json!({ "failedIndexes": "0", "completedIndexes": "1,2", "succeeded": 2 }),
            "Succeeded@3",
            "end: FailedIndexes",
        ),
        (
            json!({ "backoffLimitPerIndex": 0, "maxFailedIndexes": 1, "backoffLimit": i32::MAX }),
            none.clone(),
            "Failed@0 Failed@1 Running@2",
            "end p2: MaxFailedIndexesExceeded",
        ),
        (
            json!({ "successPolicy": { "rules": [{ "succeededIndexes": "0,2" }] } }),
            none.clone(),
            "Succeeded@0 Running@1",
            "create @2,3",
        ),
        (
            json!({ "successPolicy": { "rules": [{ "succeededIndexes": "0,2" }] } }),
            none.clone(),
            "Succeeded@0 Running@1 Succeeded@2",
            "end p1: SuccessPolicy",
        ),
        (
            json!({ "successPolicy": { "rules": [{ "succeededIndexes": "0-3", "succeededCount": 1 }] } }),
            none.clone(),
            "Succeeded@3 Running@1",
            "end p1: SuccessPolicy",
        ),
        (
            json!({ "successPolicy": { "rules": [{ "succeededCount": 2 }] } }),
            none,
            "Succeeded@3 Succeeded@1 Running@0",
            "end p2: SuccessPolicy",
        ),
    ];
    for (spec, status, list, expected) in rows {
        assert_eq!(planned(&indexed(&spec), &status, list), expected, "{spec} {status} {list:?}");
    }
}

#[test]
fn the_replacement_of_an_index_knows_how_often_it_failed() {
    let spec = json!({ "completionMode": "Indexed", "completions": 2, "backoffLimitPerIndex": 3 });
    let job = job(&spec, &json!({}));
    let observed = observe(&job, "Failed@0/1 Failed@0/0 Running@1");
    let assessment = observed.assess();
    let (Step::Create(new), None) = observed.plan(&assessment) else { panic!("index 0 is tried again") };
    assert_eq!(new, [NewPod { index: Some(0), failures: Some((2, 0)) }]);
    // Until then the last failed pod stays, and only that one.
    let tracking = observed.track(&assessment, None);
    assert_eq!(tracking.release.iter().map(|pod| pod.name_any()).collect::<Vec<_>>(), ["p1"]);
    let made = new_pod(&job, job.spec.as_ref().unwrap(), &new[0]);
    assert_eq!(made.metadata.generate_name.as_deref(), Some("j-0-"));
    assert_eq!(made.annotations().get(JOB_INDEX_FAILURES).map(String::as_str), Some("2"));
    assert_eq!(made.labels().get(JOB_COMPLETION_INDEX).map(String::as_str), Some("0"));
    assert_eq!(made.finalizers(), [JOB_TRACKING]);
    let spec = made.spec.unwrap();
    assert_eq!(spec.hostname.as_deref(), Some("j-0"));
    assert_eq!(spec.containers[0].env.as_ref().unwrap()[0].name, "JOB_COMPLETION_INDEX");
}

#[test]
fn a_failure_policy_is_followed_rule_by_rule() {
    let policy = serde_json::from_value(json!({ "rules": [
        { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget" }] },
        { "action": "FailJob", "onExitCodes": { "containerName": "main", "operator": "In", "values": [40, 42] } },
        { "action": "FailIndex", "onExitCodes": { "operator": "In", "values": [50] } },
        { "action": "Count", "onExitCodes": { "operator": "NotIn", "values": [1] } },
        { "action": "FailJob", "onPodConditions": [{ "type": "Odd", "status": "Unknown" }] },
    ] }))
    .unwrap();
    let failed = |container: &str, code: i32, condition: &Value| -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": "p", "namespace": "ns" }, "status": { "phase": "Failed",
            "conditions": condition.as_array().cloned().unwrap_or_default(),
            "containerStatuses": [{ "name": container, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": { "terminated": { "exitCode": code } } }] } }))
        .unwrap()
    };
    let none = json!([]);
    let fail = |message: &str| Verdict::FailJob(message.to_owned());
    let rows = vec![
        (
            failed("main", 42, &none),
            fail("Container main for pod ns/p failed with exit code 42 matching FailJob rule at index 1"),
        ),
        (failed("other", 42, &none), Verdict::Count),
        (failed("other", 50, &none), Verdict::FailIndex),
        (failed("main", 1, &none), Verdict::Count),
        (failed("main", 0, &none), Verdict::Count),
        (failed("main", 42, &json!([{ "type": "DisruptionTarget", "status": "True" }])), Verdict::Ignore),
        (failed("main", 1, &json!([{ "type": "DisruptionTarget", "status": "False" }])), Verdict::Count),
        (
            failed("main", 1, &json!([{ "type": "Odd", "status": "Unknown" }])),
            fail("Pod ns/p has condition Odd matching FailJob rule at index 4"),
        ),
    ];
    for (pod, expected) in rows {
        assert_eq!(Verdict::of(Some(&policy), &pod), expected, "{pod:?}");
    }
    assert_eq!(Verdict::of(None, &failed("main", 42, &none)), Verdict::Count);

    // An ignored failure is not counted, and its pod is let go all the same.
    let ignoring = json!({ "backoffLimit": 0, "podFailurePolicy": { "rules": [
        { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget" }] }] } });
    let job = job(&ignoring, &json!({}));
    let mut observed = observe(&job, "Failed");
    let mut pod = observed.pods[0].pod.as_ref().clone();
    pod.status.as_mut().unwrap().conditions =
        Some(vec![serde_json::from_value(json!({ "type": "DisruptionTarget", "status": "True" })).unwrap()]);
    observed.pods[0].pod = Arc::new(pod);
    let assessment = observed.assess();
    assert!(assessment.end.is_none());
    let tracking = observed.track(&assessment, None);
    assert_eq!(tracking.release.len(), 1);
    assert_eq!(tracking.status.uncounted_terminated_pods.unwrap().failed, None);
}

#[test]
fn failures_are_followed_by_growing_pauses_that_a_success_ends() {
    let ended = |at: &str| -> Arc<Pod> {
        let pod = json!({ "metadata": {}, "status": { "containerStatuses": [{ "name": "c", "image": "", "imageID": "",
            "ready": false, "restartCount": 0, "state": { "terminated": { "exitCode": 1, "finishedAt": at } } }] } });
        Arc::new(serde_json::from_value(pod).unwrap())
    };
    let now = now();
    let at = ended("2026-01-01T12:00:00Z");
    let pause = |failures: &Failures| failures.pause(now).map(|pause| pause.as_secs());
    let mut failures = Failures::default();
    assert_eq!(pause(&failures), None);
    for expected in [10, 20, 40, 80, 160, 320, 600, 600] {
        failures = failures.and(&[], std::slice::from_ref(&at));
        assert_eq!(pause(&failures), Some(expected));
    }
    assert_eq!(pause(&failures.and(&[ended("2026-01-01T12:00:01Z")], &[])), None);
    let mixed = failures.and(
        &[ended("2026-01-01T11:59:58Z")],
        &[ended("2026-01-01T11:59:57Z"), ended("2026-01-01T11:59:59Z")],
    );
    assert_eq!(pause(&mixed), Some(9), "only the failure after the success counts");
    assert_eq!(pause(&Failures::new(1, "2026-01-01T11:59:50Z".parse().unwrap())), None);
}

/// The status after pods are entered into it, after they are let go, and whether the Job is finished then.
fn tracked(spec: &Value, status: &Value, list: &str) -> (JobStatus, JobStatus, bool) {
    let job = job(spec, status);
    let observed = observe(&job, list);
    let assessment = observed.assess();
    let (active, ready, terminating) = observed.counts();
    let end =
        assessment.end.clone().or_else(|| observed.success(&assessment, usize::try_from(active).unwrap()));
    let mut tracking = observed.track(&assessment, end.as_ref());
    tracking.status.active = Some(active);
    tracking.status.ready = Some(ready);
    tracking.status.terminating = Some(terminating);
    let before = tracking.status.clone();
    let mut tracked = observed.tracked();
    for pod in &tracking.release {
        tracked.remove(&pod.uid().unwrap());
    }
    count_released(&mut tracking.status, &tracked);
    let is_finished = tracking.end.is_some_and(|end| finish(&mut tracking.status, end));
    (before, tracking.status, is_finished)
}

fn uncounted(status: &JobStatus) -> (usize, usize) {
    let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
    (uncounted.succeeded.map_or(0, |pods| pods.len()), uncounted.failed.map_or(0, |pods| pods.len()))
}

#[test]
fn each_pod_is_counted_once_also_after_a_crash() {
    let (before, after, is_finished) =
        tracked(&json!({}), &json!({ "succeeded": 1, "failed": 1 }), "Succeeded Failed Running Running-");
    assert_eq!((uncounted(&before), before.succeeded, before.failed), ((1, 2), Some(1), Some(1)));
    assert_eq!((uncounted(&after), after.succeeded, after.failed), ((0, 0), Some(2), Some(3)));
    assert!(!is_finished);

    // Died after the status was written: the pods still have their finalizers.
    let crashed = json!({ "succeeded": 1, "failed": 1,
        "uncountedTerminatedPods": { "succeeded": ["p0"], "failed": ["p1", "p3"] } });
    let (again, after, _) = tracked(&json!({}), &crashed, "Succeeded Failed Running Running-");
    assert_eq!(uncounted(&again), (1, 2), "none is entered twice");
    assert_eq!((after.succeeded, after.failed), (Some(2), Some(3)));

    // Died after the finalizers were taken off: two pods are gone altogether.
    let (_, after, _) = tracked(&json!({}), &crashed, "Succeeded! ");
    assert_eq!((after.succeeded, after.failed), (Some(2), Some(3)));
}

#[test]
fn a_job_is_finished_when_its_pods_are_counted_and_gone() {
    let conditions = |status: &JobStatus| -> Vec<String> {
        status.conditions.iter().flatten().map(|c| c.type_.clone()).collect()
    };
    let one = json!({ "completions": 1, "parallelism": 1 });
    let (before, after, is_finished) = tracked(&one, &json!({}), "Succeeded");
    assert_eq!((conditions(&before), is_finished), (vec!["SuccessCriteriaMet".to_owned()], true));
    assert_eq!(conditions(&after), ["SuccessCriteriaMet", "Complete"]);
    assert_eq!(after.completion_time.as_ref().map(|time| time.0), Some(now()));
    let mut complete = job(&one, &json!({}));
    complete.status = Some(after);
    assert_eq!(finished(&complete).and_then(|end| end.reason.as_deref()), Some("CompletionsReached"));

    // A pod that still ends delays it.
    let (_, after, is_finished) = tracked(&one, &json!({}), "Succeeded Running-!");
    assert_eq!((conditions(&after), is_finished), (vec!["SuccessCriteriaMet".to_owned()], false));

    // A Job that failed counts what runs as failed.
    let limited = json!({ "backoffLimit": 0, "parallelism": 3 });
    let (before, after, is_finished) = tracked(&limited, &json!({}), "Failed Running Succeeded");
    assert_eq!(conditions(&before), ["FailureTarget"]);
    assert_eq!((after.failed, after.succeeded, is_finished), (Some(2), Some(1), true));
    assert_eq!(conditions(&after), ["FailureTarget", "Failed"]);

    // One that met its policy does not.
    let policy = json!({ "completionMode": "Indexed", "completions": 3,
        "successPolicy": { "rules": [{ "succeededCount": 1 }] } });
    let (_, after, _) = tracked(&policy, &json!({}), "Succeeded@1 Running@0");
    assert_eq!(
        (after.failed, after.succeeded, after.completed_indexes.as_deref()),
        (None, Some(1), Some("1"))
    );
}

#[test]
fn at_most_500_pods_are_uncounted_at_a_time() {
    let list = "Succeeded ".repeat(600);
    let spec = json!({ "completions": 600, "parallelism": 600 });
    let (before, after, is_finished) = tracked(&spec, &json!({}), &list);
    assert_eq!((uncounted(&before), after.succeeded, is_finished), ((500, 0), Some(500), false));
}

#[test]
fn a_condition_that_never_held_is_not_set_to_false() {
    let mut status = JobStatus::default();
    let mut no = super::condition("Suspended", "JobResumed", "Job resumed", now());
    no.status = "False".to_owned();
    assert!(!set_condition(&mut status, no.clone()) && status.conditions.is_none());
    assert!(set_condition(
        &mut status,
        super::condition("Suspended", "JobSuspended", "Job suspended", now())
    ));
    assert!(set_condition(&mut status, no.clone()) && !set_condition(&mut status, no));
    assert_eq!(status.conditions.unwrap().len(), 1);
}

#[test]
fn indexes_are_written_and_read_as_intervals() {
    for (text, completions, total, written) in [
        ("", 5, 0, ""),
        ("0", 5, 1, "0"),
        ("0,1", 5, 2, "0,1"),
        ("0-2,3", 5, 4, "0-3"),
        ("1,3-9", 5, 3, "1,3,4"),
        ("7", 5, 0, ""),
        ("x,2,3-y,4", 5, 2, "2,4"),
    ] {
        let indexes = Indexes::parse(text, completions);
        assert_eq!((indexes.total(), indexes.to_string()), (total, written.to_owned()), "{text}");
    }
    let indexes = Indexes::parse("0-2,5,8-9", 20);
    let has: Vec<usize> = (0..12).filter(|index| indexes.contains(*index)).collect();
    assert_eq!(has, [0, 1, 2, 5, 8, 9]);
    assert_eq!(indexes.missing(4, 20), [3, 4, 6, 7]);
    assert_eq!(indexes.missing(9, 7), [3, 4, 6]);
    assert_eq!(indexes.common(&Indexes::parse("2-5,9", 20)), 3);
    assert_eq!(indexes.union(&[3, 4, 11].into_iter().collect()).to_string(), "0-5,8,9,11");
}
