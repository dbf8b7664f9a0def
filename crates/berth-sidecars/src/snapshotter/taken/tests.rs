//! What a driver answered, as a status, row by row.

use super::*;

fn now() -> Timestamp {
    Timestamp::from_second(1_000).unwrap()
}

fn answer(ready_to_use: bool, size_bytes: i64, seconds: Option<i64>) -> v1::Snapshot {
    let mut answer =
        v1::Snapshot { snapshot_id: "id".to_owned(), ready_to_use, size_bytes, ..v1::Snapshot::default() };
    if let Some(seconds) = seconds {
        answer.creation_time.get_or_insert_default().seconds = seconds;
    }
    answer
}

#[test]
fn a_first_answer_becomes_the_status() {
    let status = snapshot(None, &answer(true, 5, Some(7)), now());
    let expected = VolumeSnapshotContentStatus {
        snapshot_handle: Some("id".to_owned()),
        creation_time: Some(7_000_000_000),
        restore_size: Some(5),
        ready_to_use: Some(true),
        ..VolumeSnapshotContentStatus::default()
    };
    assert_eq!(status, expected);
}

#[test]
fn a_driver_that_gives_no_time_means_now_and_one_that_gives_no_size_means_none() {
    let status = snapshot(None, &answer(false, 0, None), now());
    assert_eq!(status.creation_time, Some(1_000_000_000_000));
    assert_eq!(status.restore_size, None);
    assert_eq!(status.ready_to_use, Some(false));
}

#[test]
fn later_answers_change_readiness_and_clear_errors_and_nothing_that_is_known() {
    let known = snapshot(None, &answer(false, 5, Some(7)), now());
    let failed = VolumeSnapshotContentStatus { error: Some(error(None, "no", now())), ..known.clone() };
    let later = snapshot(Some(&failed), &answer(true, 6, Some(8)), now());
    assert_eq!(later, VolumeSnapshotContentStatus { ready_to_use: Some(true), ..known.clone() });
    let again = snapshot(Some(&later), &answer(true, 6, None), Timestamp::now());
    assert_eq!(again, later, "the same answer changes nothing, so nothing is written");
}

#[test]
fn a_given_snapshot_learns_of_its_group() {
    let mut said = answer(true, 5, Some(7));
    said.group_snapshot_id = "group".to_owned();
    assert_eq!(snapshot(None, &said, now()).volume_group_snapshot_handle.as_deref(), Some("group"));
}

#[test]
fn a_group_lists_its_members_once() {
    let mut said = v1::VolumeGroupSnapshot {
        group_snapshot_id: "group".to_owned(),
        ready_to_use: false,
        ..v1::VolumeGroupSnapshot::default()
    };
    let mut first = answer(false, 5, Some(7));
    first.source_volume_id = "volume".to_owned();
    said.snapshots = vec![first];
    let status = group(None, &said, true, now());
    let members = status.volume_snapshot_info_list.clone().unwrap();
    assert_eq!(members.len(), 1);
    assert_eq!((members[0].volume_handle.as_str(), members[0].snapshot_handle.as_str()), ("volume", "id"));
    assert_eq!((members[0].creation_time, members[0].restore_size), (Some(7_000_000_000), Some(5)));
    assert_eq!(status.creation_time, Some(Time(now())), "a driver that gives no time means now");
    said.ready_to_use = true;
    said.snapshots.push(answer(true, 1, None));
    let later = group(Some(&status), &said, true, now());
    assert_eq!(later.volume_snapshot_info_list.unwrap().len(), 1);
    assert_eq!(later.ready_to_use, Some(true));
    assert_eq!(group(None, &said, false, now()).volume_snapshot_info_list, None, "given groups list none");
}

#[test]
fn the_same_error_again_keeps_the_time_of_the_first() {
    let first = error(None, "no", now());
    assert_eq!(error(Some(&first), "no", Timestamp::from_second(2_000).unwrap()), first);
    assert_ne!(error(Some(&first), "other", now()), first);
}
