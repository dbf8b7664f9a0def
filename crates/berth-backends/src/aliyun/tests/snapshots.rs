//! Snapshots, and the volumes that are made of them.

use super::*;

#[tokio::test]
async fn a_clone_is_a_snapshot_and_a_disk_of_it_and_nothing_is_left_whatever_breaks() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 2;
    let source = bench.create("source", 20 * GIB).await.unwrap();
    let clone_of = async |name: &str| {
        let plan = bench.plan(&new(name, 30 * GIB, &[("type", "cloud_essd")])).await?;
        match bench.account.find(&bench.ctx, &plan).await? {
            Some(found) => Ok(found),
            None => bench.account.clone_volume(&bench.ctx, plan, &source).await,
        }
    };
    let clone = clone_of("clone").await.unwrap();
    assert_eq!(clone.capacity, Capacity::gibibytes(30));
    assert_eq!(clone.source, Some(ContentSource::Volume(source.id.clone())));
    assert_eq!(bench.counts(), (2, 0));
    // Cut off at each request in turn; the call is made again until it succeeds.
    for (number, action) in
        ["CreateSnapshot", "DescribeSnapshots", "CreateDisk", "DeleteSnapshot"].into_iter().enumerate()
    {
        let name = format!("clone-{number}");
        for _ in 0..5 {
            bench.fault(action, Fault::Before(500, "InternalError"));
        }
        let mut made = clone_of(&name).await;
        for _ in 0..4 {
            if made.is_err() {
                made = clone_of(&name).await;
            }
        }
        let made = made.unwrap();
        bench.cloud.lock().faults.clear();
        assert_eq!(bench.counts(), (3, 0), "{action}");
        bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    }
    // An end that is final leaves nothing either.
    bench.fault("CreateDisk", Fault::Before(403, "QuotaExceed.DiskCapacity"));
    assert!(matches!(clone_of("full").await, Err(Error::Exhausted(_))));
    assert_eq!(bench.counts(), (2, 0));
    // A driver that was killed before there was a volume: nobody sees the snapshot, and it is removed after a while.
    let left = api::NewEcsSnapshot {
        disk: source.id.to_string(),
        name: "berth-clone-left".to_owned(),
        tags: map(&[(names::CLONE_TAG, source.id.as_str()), ("createdby", "alibabacloud-csi-plugin")]),
        ..api::NewEcsSnapshot::default()
    };
    bench.account.snapshot_now(&left, Deadline::after(Duration::from_secs(30))).await.unwrap();
    let all = PageRequest { after: None, limit: 9 };
    let listed = bench.account.list_snapshots(&bench.ctx, None, &all).await.unwrap();
    assert!(listed.entries.is_empty(), "snapshots of clones belong to nobody");
    remove_leftovers(bench.account.as_ref(), Duration::from_secs(3600)).await.unwrap();
    assert_eq!(bench.counts().1, 1, "not while this program may need it");
    remove_leftovers(bench.account.as_ref(), Duration::ZERO).await.unwrap();
    assert_eq!(bench.counts(), (2, 0));
}

#[tokio::test]
async fn a_restored_volume_knows_its_snapshot_and_a_snapshot_its_class() {
    let bench = Bench::new().await;
    let source = bench.create("source", 20 * GIB).await.unwrap();
    let wanted = NewSnapshot {
        name: "snap".parse().unwrap(),
        source: source.id.clone(),
        parameters: map(&[("snapshotTags/team", "blue")]),
    };
    let taken = bench.account.take_snapshot(&bench.ctx, wanted, &source).await.unwrap();
    assert_eq!((taken.size, taken.source.clone()), (Capacity::gibibytes(20), source.id.clone()));
    assert_eq!(tags_of(&bench.cloud.lock().snapshots[taken.id.as_str()])["team"], "blue");
    let class = [("type", "cloud_auto")];
    let plan = bench.plan(&new("small", GIB, &class)).await.unwrap();
    let restored = bench.account.restore(&bench.ctx, plan, &taken).await.unwrap();
    assert_eq!(restored.capacity, Capacity::gibibytes(20), "not smaller than the snapshot");
    let plan = bench.plan(&new("small", GIB, &class)).await.unwrap();
    let found = bench.account.find(&bench.ctx, &plan).await.unwrap().unwrap();
    assert_eq!(found.source, Some(ContentSource::Snapshot(taken.id.clone())));
    let all = PageRequest { after: None, limit: 9 };
    for (of, count) in [(None, 1), (Some(&source.id), 1), (Some(&restored.id), 0)] {
        let listed = bench.account.list_snapshots(&bench.ctx, of, &all).await.unwrap();
        assert_eq!(listed.entries.len(), count);
    }
    bench.account.delete_snapshot(&bench.ctx, &taken.id).await.unwrap();
    bench.account.delete_snapshot(&bench.ctx, &taken.id).await.unwrap();
    assert!(bench.account.snapshot(&bench.ctx, &taken.id).await.unwrap().is_none());
}
