//! Tables of what comes next for a pod; whole pods with real containers are in `tests/node`.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec;
use serde_json::json;

use super::decide::{ContainerRecord, Decision, Phase, RESTART, deadline, decide};
use berth_runtime::{Exit, Reason, State};

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

fn running() -> ContainerRecord {
    ContainerRecord { run: Some(State::Running { started: time(0) }), ..ContainerRecord::default() }
}

fn ended(code: i32) -> ContainerRecord {
    let ended = Exit {
        code,
        signal: None,
        reason: if code == 0 { Reason::Completed } else { Reason::Error },
        message: String::new(),
        started: Some(time(0)),
        finished: time(1),
    };
    ContainerRecord { run: Some(State::Exited(ended)), ..ContainerRecord::default() }
}

fn next(policy: &str, known: &[(&str, ContainerRecord)]) -> Decision {
    let known: HashMap<String, ContainerRecord> =
        known.iter().map(|(name, known)| ((*name).to_owned(), known.clone())).collect();
    decide(&spec(policy), &known, true, None, time(2), "p_ns(uid)")
}

#[test]
fn containers_start_in_their_order() {
    type Row<'a> = (&'a [(&'a str, ContainerRecord)], &'a [&'a str]);
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
    let decision = decide(&spec("Always"), &HashMap::new(), false, None, time(2), "");
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
    let down =
        |a, b, side: ContainerRecord| [("init", ended(0)), ("side", side), ("a", ended(a)), ("b", ended(b))];
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
    let seconds: Vec<u64> = (1..8).map(|starts| RESTART.exact_pause(starts).as_secs()).collect();
    assert_eq!(seconds, [10, 20, 40, 80, 160, 300, 300]);
    let up = |a: ContainerRecord| [("init", ended(0)), ("side", running()), ("a", a), ("b", running())];
    let decision = next("Always", &up(ContainerRecord { crashes: 2, ..ended(1) }));
    assert!(decision.start.is_empty());
    assert_eq!(decision.wake, Some(time(21)));
    assert_eq!(decision.waiting["a"].message, "back-off 20s restarting failed container=a pod=p_ns(uid)");
    let mut long = ContainerRecord { crashes: 2, ..ended(1) };
    if let Some(State::Exited(ended)) = &mut long.run {
        ended.started = Some(time(1 - 600));
    }
    assert_eq!(next("Always", &up(long)).start, ["a"]);
}

#[test]
fn a_pod_may_be_active_from_when_it_was_first_seen() {
    for (seconds, expected) in [(None, None), (Some(60), Some(time(160))), (Some(i64::MAX), None)] {
        let spec = PodSpec { active_deadline_seconds: seconds, ..spec("Never") };
        assert_eq!(deadline(&spec, time(100)), expected, "{seconds:?}");
    }
}

#[test]
fn a_pod_whose_time_is_over_is_ended_whatever_it_does() {
    struct Row<'a> {
        name: &'a str,
        known: Vec<(&'a str, ContainerRecord)>,
        volumes_ready: bool,
        stop: &'a [&'a str],
        phase: Phase,
    }
    let row = |name, known: &[(&'static str, ContainerRecord)], stop, phase| Row {
        name,
        known: known.to_vec(),
        volumes_ready: true,
        stop,
        phase,
    };
    // The time is over at 5, and it is 6.
    let late = |code| {
        let Some(State::Exited(ended)) = ended(code).run else { unreachable!() };
        ContainerRecord {
            run: Some(State::Exited(Exit { finished: time(6), ..ended })),
            ..ContainerRecord::default()
        }
    };
    let init = ("init", ended(0));
    let crashed = ContainerRecord { crashes: 2, ..ended(1) };
    let rows = [
        Row { volumes_ready: false, ..row("waits for its volumes", &[], &[], Phase::Failed) },
        row("nothing was started yet", &[], &[], Phase::Failed),
        row("an init container runs", &[("init", running())], &["init"], Phase::Pending),
        row("its containers could start", &[init.clone(), ("side", running())], &["side"], Phase::Pending),
        row(
            "all run: sidecars go last",
            &[init.clone(), ("side", running()), ("a", running()), ("b", running())],
            &["a", "b"],
            Phase::Running,
        ),
        row(
            "one is left, one waits to run again",
            &[init.clone(), ("side", running()), ("a", running()), ("b", crashed.clone())],
            &["a"],
            Phase::Running,
        ),
        row(
            "the sidecar is left",
            &[init.clone(), ("side", running()), ("a", late(0)), ("b", late(0))],
            &["side"],
            Phase::Running,
        ),
        row(
            "all were stopped, and ended well",
            &[init.clone(), ("side", late(0)), ("a", late(0)), ("b", late(0))],
            &[],
            Phase::Failed,
        ),
    ];
    for policy in ["Never", "Always"] {
        for Row { name, known, volumes_ready, stop, phase } in &rows {
            let known = known.iter().map(|(name, known)| ((*name).to_owned(), known.clone())).collect();
            let decision = decide(&spec(policy), &known, *volumes_ready, Some(time(5)), time(6), "");
            assert!(decision.is_expired, "{policy}: {name}");
            assert_eq!(decision.stop, *stop, "{policy}: {name}");
            assert_eq!(decision.phase, *phase, "{policy}: {name}");
            assert!(decision.start.is_empty() && decision.wake.is_none(), "{policy}: {name}: {decision:?}");
            let ended =
                |name: &&String| known.get(*name).is_some_and(|known: &ContainerRecord| known.run.is_some());
            assert_eq!(decision.waiting.keys().find(ended), None, "{policy}: {name}");
        }
    }
    let again = [("init", ended(0)), ("a", crashed.clone()), ("b", crashed)];
    let again = again.map(|(name, known)| (name.to_owned(), known)).into();
    let decision = decide(&spec("Always"), &again, true, Some(time(5)), time(6), "");
    assert_eq!((decision.is_expired, decision.phase), (true, Phase::Failed), "all wait to run again");
}

#[test]
fn a_pod_is_reconciled_when_its_deadline_passes_and_not_ended_before() {
    type Row<'a> = (&'a str, &'a [(&'a str, ContainerRecord)], i64, i64, Option<i64>, Phase);
    let up = [("init", ended(0)), ("side", running()), ("a", running()), ("b", running())];
    let down = [("init", ended(0)), ("side", ended(0)), ("a", ended(0)), ("b", ended(0))];
    let crashed = [
        ("init", ended(0)),
        ("side", running()),
        ("a", ContainerRecord { crashes: 1, ..ended(1) }),
        ("b", running()),
    ];
    let rows: [Row<'_>; 6] = [
        ("runs", &up, 5, 4, Some(5), Phase::Running),
        ("starts", &[], 5, 4, Some(5), Phase::Pending),
        ("a pause ends later", &crashed, 5, 4, Some(5), Phase::Running),
        ("a pause ends earlier", &crashed, 20, 4, Some(11), Phase::Running),
        ("it ended before", &down, 5, 4, None, Phase::Succeeded),
        ("it ended in time, and is looked at later", &down, 5, 6, None, Phase::Succeeded),
    ];
    for (name, known, deadline, now, wake, phase) in rows {
        let known = known.iter().map(|(name, known)| ((*name).to_owned(), known.clone())).collect();
        let decision = decide(&spec("OnFailure"), &known, true, Some(time(deadline)), time(now), "");
        assert!(!decision.is_expired, "{name}");
        assert_eq!((decision.wake, decision.phase), (wake.map(time), phase), "{name}");
    }
}
