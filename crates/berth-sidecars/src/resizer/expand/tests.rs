//! The size to grow to, row by row, and what the status says on the way.

use super::*;

const ALL: Abilities = Abilities { controller_expand: true, node_expand: true, modify: true };
const NODE_ONLY: Abilities = Abilities { controller_expand: false, node_expand: true, modify: false };

/// spec, actual, volume, allocated, status, filesystem pending, last call finally refused → target
type Row = (&'static str, i64, i64, i64, Option<i64>, &'static str, bool, bool, Option<i64>);

#[test]
fn the_size_to_grow_to_follows_the_recovery_matrix() {
    let rows: &[Row] = &[
        ("new growth", 5, 1, 1, None, "", false, false, Some(5)),
        ("nothing to grow", 1, 1, 1, None, "", false, false, None),
        ("smaller than it is", 1, 2, 2, None, "", false, false, None),
        ("asked for more while the node works", 9, 1, 5, Some(5), NODE_PENDING, false, false, None),
        ("asked for more, volume not recorded yet", 9, 1, 1, Some(5), NODE_PENDING, false, false, Some(5)),
        ("asked for more while the node is at it", 9, 1, 5, Some(5), NODE_IN_PROGRESS, false, false, None),
        ("asked for more after the node failed", 9, 1, 5, Some(5), NODE_INFEASIBLE, false, false, None),
        ("asked for more, driver uncertain", 9, 1, 1, Some(5), CONTROLLER_IN_PROGRESS, false, false, Some(5)),
        ("asked for more, driver refused", 9, 1, 1, Some(5), CONTROLLER_IN_PROGRESS, false, true, Some(9)),
        ("asked for less, driver uncertain", 3, 1, 1, Some(5), CONTROLLER_IN_PROGRESS, false, false, Some(5)),
        ("asked for less, driver refused", 3, 1, 1, Some(5), CONTROLLER_IN_PROGRESS, false, true, Some(3)),
        ("asked for less after infeasible", 3, 1, 1, Some(5), CONTROLLER_INFEASIBLE, false, false, Some(3)),
        ("grown, node to come", 5, 1, 5, Some(5), NODE_PENDING, true, false, None),
        ("grown, node at it", 5, 1, 5, Some(5), NODE_IN_PROGRESS, true, false, None),
        ("grown, node failed", 5, 1, 5, Some(5), NODE_INFEASIBLE, false, false, Some(5)),
        ("grown, not recorded", 5, 1, 5, Some(5), CONTROLLER_IN_PROGRESS, false, false, Some(5)),
        ("grown, asked for less", 3, 1, 5, Some(5), CONTROLLER_INFEASIBLE, false, false, Some(5)),
        ("grown, nothing recorded", 5, 1, 5, None, "", false, false, Some(5)),
        ("grown, an older resizer left it to the node", 5, 1, 5, None, "", true, false, None),
    ];
    for (row, spec, actual, volume, allocated, status, pending, refused, expected) in rows {
        let sizes = Sizes {
            spec: *spec,
            actual: *actual,
            volume: *volume,
            allocated: *allocated,
            status,
            pending: *pending,
        };
        assert_eq!(target(&sizes, *refused, ALL), *expected, "{row}");
    }
}

#[test]
fn a_driver_that_grows_on_nodes_only_takes_the_new_size_after_a_failure() {
    let sizes =
        Sizes { spec: 3, actual: 1, volume: 5, allocated: Some(5), status: NODE_INFEASIBLE, pending: false };
    assert_eq!(target(&sizes, false, NODE_ONLY), Some(3));
    assert_eq!(target(&sizes, false, ALL), Some(5));
    let none = Abilities { controller_expand: false, node_expand: false, modify: true };
    assert_eq!(target(&Sizes { status: "", ..sizes }, false, none), None, "nobody can grow it");
}

#[test]
fn every_code_of_controller_expand_has_its_verdict() {
    for number in 1..=16 {
        let code = Code::from_i32(number);
        let expected = match code {
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound => Verdict::Infeasible,
            Code::FailedPrecondition => Verdict::InUse,
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

fn conditions(status: &PersistentVolumeClaimStatus) -> Vec<&str> {
    status.conditions.iter().flatten().map(|condition| condition.type_.as_str()).collect()
}

#[test]
fn the_status_shows_each_step_and_keeps_conditions_of_others() {
    let mut status = PersistentVolumeClaimStatus::default();
    set_condition(&mut status, "Foreign", None);
    begun(&mut status, 1 << 30);
    assert_eq!(status.allocated_resources.as_ref().unwrap()["storage"].0, "1Gi");
    assert_eq!(status.allocated_resource_statuses.as_ref().unwrap()["storage"], CONTROLLER_IN_PROGRESS);
    assert_eq!(conditions(&status), ["Foreign", RESIZING]);
    failed(&mut status, false, "no");
    assert_eq!(status.allocated_resource_statuses.as_ref().unwrap()["storage"], CONTROLLER_IN_PROGRESS);
    failed(&mut status, true, "never");
    assert_eq!(status.allocated_resource_statuses.as_ref().unwrap()["storage"], CONTROLLER_INFEASIBLE);
    assert_eq!(conditions(&status), ["Foreign", RESIZING, CONTROLLER_ERROR]);
    pending_on_node(&mut status);
    assert_eq!(status.allocated_resource_statuses.as_ref().unwrap()["storage"], NODE_PENDING);
    assert_eq!(conditions(&status), ["Foreign", FS_RESIZE_PENDING]);
    finished(&mut status, 1 << 30);
    assert_eq!(status.capacity.as_ref().unwrap()["storage"].0, "1Gi");
    assert_eq!(status.allocated_resource_statuses, None);
    assert_eq!(conditions(&status), ["Foreign"]);
}

#[test]
fn why_the_node_failed_is_shown_until_it_has_grown_the_volume_or_another_size_is_wanted() {
    let mut status = PersistentVolumeClaimStatus::default();
    begun(&mut status, 2 << 30);
    pending_on_node(&mut status);
    // As the kubelet does it.
    set_status(&mut status, NODE_INFEASIBLE);
    set_condition(&mut status, NODE_ERROR, Some("failed to expand pvc"));
    for _ in 0..2 {
        begun(&mut status, 2 << 30);
        pending_on_node(&mut status);
        assert_eq!(conditions(&status), [FS_RESIZE_PENDING, NODE_ERROR]);
    }
    begun(&mut status, 1 << 30);
    assert_eq!(conditions(&status), [FS_RESIZE_PENDING, RESIZING]);
    set_condition(&mut status, NODE_ERROR, Some("again"));
    finished(&mut status, 1 << 30);
    assert_eq!(status.conditions, None);
}
