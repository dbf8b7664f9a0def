//! Which attributes a volume is to have, row by row.

use serde_json::json;

use super::*;

fn planned(wanted: &str, current: &str, step: Option<(&str, &str)>, refused: bool) -> Plan {
    let under_way =
        step.map(|(status, target)| json!({ "status": status, "targetVolumeAttributesClassName": target }));
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "spec": { "volumeAttributesClassName": wanted },
        "status": {
            "phase": "Bound",
            "currentVolumeAttributesClassName": current,
            "modifyVolumeStatus": under_way,
        },
    }))
    .unwrap();
    plan(&claim, refused)
}

#[test]
fn a_change_is_applied_kept_or_cancelled() {
    let apply = |class: &str| Plan::Apply(class.to_owned());
    let rows = [
        ("no class", "", "", None, false, Plan::Nothing),
        ("has its class", "a", "a", None, false, Plan::Nothing),
        ("wants another", "b", "a", None, false, apply("b")),
        ("wants a first one", "a", "", None, false, apply("a")),
        ("waits for its class", "b", "a", Some((PENDING, "b")), false, apply("b")),
        ("infeasible, wants a third", "c", "a", Some((INFEASIBLE, "b")), false, apply("c")),
        ("uncertain: the target stays", "c", "a", Some((IN_PROGRESS, "b")), false, apply("b")),
        ("uncertain, taken back: the target stays", "a", "a", Some((IN_PROGRESS, "b")), false, apply("b")),
        ("refused: the target may change", "c", "a", Some((IN_PROGRESS, "b")), true, apply("c")),
        ("refused, taken back", "a", "a", Some((IN_PROGRESS, "b")), true, Plan::Cancel),
        ("infeasible, taken back", "a", "a", Some((INFEASIBLE, "b")), false, Plan::Cancel),
        ("pending, emptied", "", "", Some((PENDING, "b")), false, Plan::Cancel),
    ];
    for (row, wanted, current, step, refused, expected) in rows {
        assert_eq!(planned(wanted, current, step, refused), expected, "{row}");
    }
    assert_eq!(plan(&PersistentVolumeClaim::default(), false), Plan::Nothing, "not bound");
}

#[test]
fn every_code_of_controller_modify_has_its_verdict() {
    for number in 1..=16 {
        let code = Code::from_i32(number);
        let expected = match code {
            Code::InvalidArgument => Verdict::Infeasible,
            Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::Aborted
            | Code::ResourceExhausted => Verdict::Uncertain,
            _ => Verdict::Refused,
        };
        assert_eq!(verdict(code), expected, "{code:?}");
    }
}

#[test]
fn the_status_shows_each_step() {
    let mut status = PersistentVolumeClaimStatus::default();
    set(&mut status, IN_PROGRESS, "b");
    failed(&mut status, true, "InvalidArgument", "no");
    let error = &status.conditions.as_ref().unwrap()[0];
    assert_eq!((error.type_.as_str(), error.reason.as_deref()), (ERROR, Some("InvalidArgument")));
    assert_eq!(status.modify_volume_status.as_ref().unwrap().status, INFEASIBLE);
    finished(&mut status, "b");
    assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some("b"));
    assert_eq!((status.modify_volume_status, status.conditions), (None, None));
}
