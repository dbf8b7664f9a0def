//! Tables of what comes next for a pod; whole pods with real containers are in `tests/node`.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::json;

use super::decide::{Decision, Ended, Known, Phase, Run, decide, pause};

fn spec(policy: &str) -> PodSpec {
    let spec = json!({
        "restartPolicy": policy,
        "initContainers": [{ "name": "init" }, { "name": "side", "restartPolicy": "Always" }],
        "containers": [{ "name": "a" }, { "name": "b" }],
    });
    serde_json::from_value(spec).unwrap()
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn running() -> Known {
    Known { run: Some(Run::Running { started: time(0) }), ..Known::default() }
}

fn ended(code: i32) -> Known {
    let ended = Ended {
        code,
        signal: None,
        reason: String::new(),
        message: String::new(),
        started: Some(time(0)),
        finished: time(1),
    };
    Known { run: Some(Run::Ended(ended)), ..Known::default() }
}

fn next(policy: &str, known: &[(&str, Known)]) -> Decision {
    let known: HashMap<String, Known> =
        known.iter().map(|(name, known)| ((*name).to_owned(), known.clone())).collect();
    decide(&spec(policy), &known, true, time(2), "p_ns(uid)")
}

#[test]
fn containers_start_in_their_order() {
    type Row<'a> = (&'a [(&'a str, Known)], &'a [&'a str]);
    let rows: [Row<'_>; 6] = [
        (&[], &["init"]),
        (&[("init", running())], &[]),
        (&[("init", ended(0))], &["side"]),
        (&[("init", ended(1))], &["init"]),
        (&[("init", ended(0)), ("side", running())], &["a", "b"]),
        (&[("init", ended(0)), ("side", running()), ("a", running()), ("b", running())], &[]),
    ];
    for (known, expected) in rows {
        let decision = next("Always", known);
        assert_eq!(decision.start, expected, "{known:?}");
        assert_eq!(decision.phase == Phase::Running, known.len() == 4, "{known:?}");
    }
    let decision = decide(&spec("Always"), &HashMap::new(), false, time(2), "");
    assert_eq!(decision.start, [""; 0], "nothing starts without volumes");
    assert_eq!(decision.waiting["a"].reason, "PodInitializing");
}

#[test]
fn what_ends_is_started_again_as_the_policy_says() {
    let up = |code| [("init", ended(0)), ("side", running()), ("a", ended(code)), ("b", running())];
    let rows: [(&str, i32, &[&str]); 6] = [
        ("Always", 0, &["a"]),
        ("Always", 1, &["a"]),
        ("OnFailure", 0, &[]),
        ("OnFailure", 1, &["a"]),
        ("Never", 0, &[]),
        ("Never", 1, &[]),
    ];
    for (policy, code, expected) in rows {
        let decision = next(policy, &up(code));
        assert_eq!(decision.start, expected, "{policy} {code}");
        assert_eq!(decision.phase, Phase::Running, "{policy} {code}");
    }
}

#[test]
fn a_pod_is_over_when_its_containers_are_and_then_its_sidecars() {
    let down = |a, b, side: Known| [("init", ended(0)), ("side", side), ("a", ended(a)), ("b", ended(b))];
    let decision = next("Never", &down(0, 0, running()));
    assert_eq!((decision.stop, decision.phase), (vec!["side".to_owned()], Phase::Running));
    for (a, b, phase) in [(0, 0, Phase::Succeeded), (0, 1, Phase::Failed)] {
        let decision = next("Never", &down(a, b, ended(143)));
        assert_eq!(decision.phase, phase);
        assert!(decision.start.is_empty() && decision.stop.is_empty(), "{decision:?}");
    }
    assert_eq!(next("Never", &[("init", ended(1))]).phase, Phase::Failed);
}

#[test]
fn a_sidecar_that_ends_is_started_again_while_the_pod_goes_on() {
    let known = [("init", ended(0)), ("side", ended(0)), ("a", running()), ("b", running())];
    let decision = next("Never", &known);
    assert_eq!((decision.start, decision.phase), (vec!["side".to_owned()], Phase::Running));
}

#[test]
fn pauses_grow_and_a_long_run_ends_them() {
    let seconds: Vec<u64> = (0..8).map(|starts| pause(starts).as_secs()).collect();
    assert_eq!(seconds, [0, 10, 20, 40, 80, 160, 300, 300]);
    assert_eq!(pause(u32::MAX).as_secs(), 300);
    let up = |a: Known| [("init", ended(0)), ("side", running()), ("a", a), ("b", running())];
    let decision = next("Always", &up(Known { crashes: 2, ..ended(1) }));
    assert!(decision.start.is_empty());
    assert_eq!(decision.wake, Some(time(21)));
    assert_eq!(decision.waiting["a"].message, "back-off 20s restarting failed container=a pod=p_ns(uid)");
    let mut long = Known { crashes: 2, ..ended(1) };
    if let Some(Run::Ended(ended)) = &mut long.run {
        ended.started = Some(time(1 - 600));
    }
    assert_eq!(next("Always", &up(long)).start, ["a"]);
}
