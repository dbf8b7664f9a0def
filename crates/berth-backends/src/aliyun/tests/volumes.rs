//! Disks: made, placed, found again, changed and counted.

use super::*;

#[tokio::test]
async fn a_volume_is_made_as_upstream_makes_it_and_found_again() {
    let bench = Bench::new().await;
    let made = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert_eq!((made.capacity, made.context["type"].as_str()), (Capacity::gibibytes(21), "cloud_essd"));
    let zone = Topology::single("topology.diskplugin.csi.alibabacloud.com/zone", "cn-hangzhou-h");
    assert_eq!(*made.topology.clone().unwrap(), zone);
    let again = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert_eq!((again.id, bench.counts()), (made.id.clone(), (1, 0)));
    let tags = tags_of(&bench.cloud.lock().disks[made.id.as_str()]);
    let expected = map(&[
        ("ack.aliyun.com", "c-1"),
        ("createdby", "alibabacloud-csi-plugin"),
        ("csi.alibabacloud.com/volume-name", "disk-1"),
        ("k8s.aliyun.com", "true"),
    ]);
    assert_eq!(tags, expected);
    assert!(bench.cloud.lock().tokens.contains_key("n:disk-1"));
    let other = bench.create_as(&new("disk-1", 21 * GIB, &[("type", "cloud_ssd")])).await.unwrap_err();
    assert!(matches!(&other, Error::Conflict(said) if said.contains("cloud_essd")), "{other}");

    let range = CapacityRange::new(51 * GIB / 2, 0).unwrap();
    bench.account.get(&bench.ctx, &made.id).await.unwrap();
    let expanded = bench.account.expand(&bench.ctx, &made, range).await.unwrap();
    assert_eq!(expanded.capacity, Capacity::gibibytes(26));
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    bench.account.delete(&bench.ctx, &made.id).await.unwrap();
    assert_eq!(bench.counts(), (0, 0));
    // The token of the name stands for a disk that is gone.
    let anew = bench.create("disk-1", 41 * GIB / 2).await.unwrap();
    assert!(anew.id != made.id && bench.counts() == (1, 0));
}

#[tokio::test]
async fn types_are_tried_in_turn_and_a_zone_without_them_is_resource_exhausted() {
    let bench = Bench::new().await;
    let wanted = [("type", "cloud_efficiency,cloud_essd"), ("performanceLevel", "PL1")];
    let made = bench.create_as(&new("disk-1", 20 * GIB, &wanted)).await.unwrap();
    assert_eq!((&*made.context["type"], &*made.context["performanceLevel"]), ("cloud_essd", "PL1"));
    let error = bench.create_as(&new("disk-2", GIB, &[("type", "cloud_efficiency")])).await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted(said) if said.contains("R-77")), "{error}");
    bench.fault("CreateDisk", Fault::Before(400, "InvalidDiskSize.NotSupported"));
    let error = bench.create("disk-3", GIB).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(_)), "{error}");
    let unknown = new("disk-4", GIB, &[("iops", "9")]);
    let error = bench.account.plan(&bench.ctx, &unknown).unwrap_err();
    assert!(error.to_string().starts_with("parameter \"iops\" is not known; known are type,"), "{error}");
}

#[tokio::test]
async fn zones_are_those_of_nodes_and_of_the_class() {
    let bench = Bench::new().await;
    let zone = |zone: &str| {
        Topology(map(&[("topology.kubernetes.io/zone", zone), ("alibabacloud.com/ecs-instance-id", "i-1")]))
    };
    let place = async |parameters: &[(&str, &str)], zones: &[&str]| {
        let mut plan = bench.account.plan(&bench.ctx, &new("v", GIB, parameters)).unwrap();
        let requisite: Vec<_> = zones.iter().map(|name| bench.account.canonical(zone(name))).collect();
        let wanted = TopologyRequirement { requisite, preferred: vec![] };
        let wanted = Some(&wanted).filter(|_| !zones.is_empty());
        bench.account.place(&bench.ctx, &mut plan, wanted).await
    };
    let is = |placed: crate::Result<Topology>, key: &str, value: &str| {
        assert_eq!(placed.unwrap(), Topology::single(key, value));
    };
    is(place(&[], &[]).await, OWN_ZONE, "cn-hangzhou-h");
    is(place(&[], &["cn-hangzhou-i", "cn-hangzhou-j"]).await, OWN_ZONE, "cn-hangzhou-i");
    is(
        place(&[("zoneId", "cn-hangzhou-j")], &["cn-hangzhou-i", "cn-hangzhou-j"]).await,
        OWN_ZONE,
        "cn-hangzhou-j",
    );
    is(place(&[("zoneId", "cn-hangzhou-j")], &[]).await, OWN_ZONE, "cn-hangzhou-j");
    let regional = [("type", "cloud_regional_disk_auto")];
    is(place(&regional, &["cn-hangzhou-i"]).await, KUBERNETES_REGION, "cn-hangzhou");
    let refused = place(&[("zoneId", "cn-hangzhou-j")], &["cn-hangzhou-i"]).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let elsewhere = TopologyRequirement {
        requisite: vec![bench.account.canonical(Topology::single(KUBERNETES_REGION, "cn-beijing"))],
        preferred: vec![],
    };
    let mut plan = bench.account.plan(&bench.ctx, &new("v", GIB, &[])).unwrap();
    let refused = bench.account.place(&bench.ctx, &mut plan, Some(&elsewhere)).await.unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let error = bench.account.plan(&bench.ctx, &new("v", GIB, &[("regionId", "cn-beijing")])).unwrap_err();
    assert!(error.to_string().contains("regionId"), "{error}");
}

#[tokio::test]
async fn a_server_that_fails_after_the_work_makes_no_second_disk_or_snapshot() {
    let bench = Bench::new().await;
    for (name, fault) in [
        ("a1", Fault::After(500)),
        ("b1", Fault::After(503)),
        ("c1", Fault::DropAfter),
        ("d1", Fault::Before(503, "ServiceUnavailable")),
    ] {
        bench.fault("CreateDisk", fault);
        bench.create(name, GIB).await.unwrap();
    }
    assert_eq!(bench.counts(), (4, 0));
    let source = bench.create("a1", GIB).await.unwrap();
    let wanted = NewSnapshot {
        name: "snap".parse().unwrap(),
        source: source.id.clone(),
        parameters: Parameters::new(),
    };
    bench.fault("CreateSnapshot", Fault::After(502));
    let taken = bench.account.take_snapshot(&bench.ctx, wanted.clone(), &source).await.unwrap();
    let found = bench.account.find_snapshot(&bench.ctx, &wanted).await.unwrap().unwrap();
    assert_eq!((taken.id, bench.counts()), (found.id, (4, 1)));
    // An attachment whose answer was lost is found, and so is a detachment.
    bench.fault("AttachDisk", Fault::After(504));
    bench.attach(&source, "i-1").await.unwrap();
    bench.fault("DetachDisk", Fault::DropAfter);
    bench.detach(&source, "i-1").await.unwrap();
    // Nothing was done, however often it was tried, and nothing is claimed.
    for _ in 0..8 {
        bench.fault("CreateDisk", Fault::Before(500, "InternalError"));
    }
    let error = bench.create("e1", GIB).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(said) if said.contains("request R-77")), "{error}");
    assert_eq!(bench.counts(), (4, 1));
}

#[tokio::test]
async fn a_disk_that_descriptions_do_not_show_yet_is_not_taken_to_be_gone() {
    let bench = Bench::new().await;
    bench.cloud.lock().lag = 3;
    let made = bench.create("disk-1", GIB).await.unwrap();
    assert_eq!((made.capacity, bench.counts()), (Capacity::gibibytes(20), (1, 0)));
    let found = bench.account.get(&bench.ctx, &made.id).await.unwrap();
    assert!(found.is_some());
    let told = bench.attach(&made, "i-1").await.unwrap();
    assert_eq!(told["serialNumber"], made.id.as_str()[2..]);
    assert!(bench.account.get(&bench.ctx, &"d-unknown".parse().unwrap()).await.unwrap().is_none());
    assert!(bench.account.get(&bench.ctx, &"no id/at all".parse().unwrap()).await.unwrap().is_none());
}

#[tokio::test]
async fn what_a_class_changes_is_changed_all_or_none() {
    let bench = Bench::new().await;
    bench.cloud.lock().looks = 2;
    let volume = bench.create("disk-1", 20 * GIB).await.unwrap();
    let modify = async |pairs: &[(&str, &str)]| {
        let volume = bench.account.get(&bench.ctx, &volume.id).await.unwrap().unwrap();
        bench.account.modify(&bench.ctx, &volume, map(pairs)).await
    };
    modify(&[("type", "cloud_auto"), ("burstingEnabled", "true"), ("diskTags/a", "1"), ("diskTags/b", "2")])
        .await
        .unwrap();
    let disk = bench.cloud.lock().disks[volume.id.as_str()].clone();
    assert_eq!((&disk["Category"], &disk["BurstingEnabled"]), (&json!("cloud_auto"), &json!(true)));
    assert_eq!((&*tags_of(&disk)["a"], &*tags_of(&disk)["b"]), ("1", "2"));
    // What is so already costs one look.
    let before = bench.actions().len();
    modify(&[("type", "cloud_auto"), ("diskTags/a", "1"), ("-diskTags/c", "")]).await.unwrap();
    assert_eq!(bench.actions()[before..], ["DescribeDisks"]);
    // One that is impossible changes nothing, and one that fails says so at once.
    let error = modify(&[("type", "cloud_essd_entry"), ("-diskTags/a", "")]).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(_)), "{error}");
    assert!(tags_of(&bench.cloud.lock().disks[volume.id.as_str()]).contains_key("a"));
    let error = modify(&[("XXX_FakeKey", "x")]).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(said) if said.contains("XXX_FakeKey")), "{error}");
    bench.fault("ModifyDiskSpec", Fault::Before(400, "DryRunOperation"));
    bench.fault("ModifyDiskSpec", Fault::Errored);
    let error = modify(&[("type", "cloud_essd")]).await.unwrap_err();
    assert!(matches!(&error, Error::State(said) if said.contains("Failed")), "{error}");
    // The answer is lost, the change is not.
    bench.fault("ModifyDiskSpec", Fault::Before(400, "DryRunOperation"));
    bench.fault("ModifyDiskSpec", Fault::DropAfter);
    modify(&[("type", "cloud_essd"), ("-diskTags/a", "")]).await.unwrap();
    let disk = bench.cloud.lock().disks[volume.id.as_str()].clone();
    assert!(disk["Category"] == "cloud_essd" && !tags_of(&disk).contains_key("a"), "{disk}");
}

#[tokio::test]
async fn capacity_is_what_the_quota_leaves_and_its_end_is_resource_exhausted() {
    let bench = Bench::new().await;
    let ask = async |pairs: &[(&str, &str)], topology: Option<Topology>| {
        let topology = topology.map(|topology| bench.account.canonical(topology));
        let found =
            bench.account.available_capacity(&bench.ctx, &map(pairs), topology.as_ref()).await.unwrap();
        found.available
    };
    let at = |key: &str, value: &str| Some(Topology::single(key, value));
    assert_eq!(ask(&[("type", "cloud_ssd")], None).await, Capacity::gibibytes(60));
    assert_eq!(
        ask(&[("type", "cloud_essd")], at(KUBERNETES_ZONE, "cn-hangzhou-h")).await,
        Capacity::gibibytes(5000)
    );
    assert_eq!(ask(&[("type", "cloud_ssd")], at(KUBERNETES_ZONE, "cn-hangzhou-i")).await, Capacity::ZERO);
    assert_eq!(ask(&[("type", "cloud_ssd")], at(KUBERNETES_REGION, "cn-beijing")).await, Capacity::ZERO);
    for number in 0..10 {
        bench.create(&format!("disk-{number}"), GIB).await.unwrap();
    }
    let error = bench.create("one-more", GIB).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted(_)), "{error}");
}

#[tokio::test]
async fn many_lookups_cost_few_requests() {
    let bench = Bench::new().await;
    let mut volumes = Vec::new();
    for number in 0..8 {
        volumes.push(bench.create(&format!("disk-{number}"), GIB).await.unwrap().id);
    }
    let before = bench.actions().len();
    let all =
        futures_util::future::join_all(volumes.iter().map(|id| bench.account.get(&bench.ctx, id))).await;
    assert!(all.iter().all(|found| found.as_ref().unwrap().is_some()));
    // One for who came first, and one for all others.
    let asked = bench.actions().len() - before;
    assert!(asked <= 2, "{asked} requests for 8 volumes");
}
