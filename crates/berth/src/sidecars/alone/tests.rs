//! Command lines in the shape of upstream's example manifests, and what they come to.

use std::time::Duration;

use berth_sidecars::provisioner;
use clap::Parser;

use super::*;

/// A program whose whole command line is that of one component.
#[derive(Debug, Parser)]
struct Line<A: Args> {
    #[command(flatten)]
    args: A,
}

fn parse<A: Args>(words: &[&str]) -> A {
    match Line::<A>::try_parse_from(["program"].iter().chain(words)) {
        Ok(line) => line.args,
        Err(mistake) => panic!("{words:?}: {mistake}"),
    }
}

#[test]
fn without_flags_each_works_as_upstream_does() {
    let Ok(Component::Provisioner(options)) = parse::<Provisioner>(&[]).component(&pod()) else { panic!() };
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(10), 100));
    assert_eq!(options.retry.first, Duration::from_secs(1));
    assert_eq!(options.retry.longest, Duration::from_mins(5));
    assert!(options.immediate_topology && !options.strict_topology && !options.extra_create_metadata);
    assert!(options.prevent_volume_mode_conversion && !options.controller_publish_readonly);
    assert_eq!((options.volume_name_prefix.as_str(), options.volume_name_uuid_length), ("pvc", None));
    let Ok(Component::Attacher(options)) = parse::<Attacher>(&[]).component() else { panic!() };
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(15), 10));
    assert_eq!((options.reconcile, options.max_entries), (Duration::from_mins(1), 0));
    let Ok(Component::Resizer(options)) = parse::<Resizer>(&[]).component() else { panic!() };
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(10), 10));
    assert!(options.handle_volume_in_use_error && !options.extra_modify_metadata);
    let Ok(Component::Snapshotter(options)) = parse::<Snapshotter>(&[]).component(None) else { panic!() };
    assert_eq!(options.node, None);
    assert_eq!((options.timeout, options.workers), (Duration::from_mins(1), 10));
    assert_eq!(
        (options.snapshot_name_prefix.as_str(), options.snapshot_name_uuid_length),
        ("snapshot", None)
    );
    assert_eq!(options.group_snapshot_name_prefix, "groupsnapshot");
    let Ok(Component::SnapshotController(options)) = parse::<SnapshotController>(&[]).component() else {
        panic!()
    };
    assert_eq!((options.workers, options.prevent_volume_mode_conversion), (10, true));
    assert!(!options.distributed);
    let Component::HealthMonitor(options) = parse::<HealthMonitor>(&[]).component() else { panic!() };
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(15), 10));
    assert_eq!((options.interval, options.list_interval), (Duration::from_mins(1), Duration::from_mins(5)));
    assert_eq!((options.node_watcher, options.node_patience), (false, Duration::from_mins(5)));
    let common = parse::<Attacher>(&[]).common;
    assert!(!common.election.leader_election);
    assert_eq!(common.election.leader_election_lease_duration, Duration::from_secs(15));
    assert_eq!(common.election.leader_election_renew_deadline, Duration::from_secs(10));
    assert_eq!(common.election.leader_election_retry_period, Duration::from_secs(5));
    assert_eq!(parse::<Attacher>(&[]).connection.csi_address.to_string(), "unix:///run/csi/socket");
    assert_eq!(common.http.address().unwrap(), None);
}

#[test]
fn a_provisioner_of_a_cloud_driver() {
    let provisioner = parse::<Provisioner>(&[
        "--timeout=60s",
        "--csi-address=unix:///csi/csi.sock",
        "--v=2",
        "--feature-gates=Topology=true",
        "--extra-create-metadata",
        "--leader-election=true",
        "--leader-election-namespace",
        "kube-system",
        "--leader-election-labels=app:csi",
        "--default-fstype=ext4",
        "--kube-api-qps=20",
        "--kube-api-burst=100",
        "--worker-threads=50",
        "--strict-topology",
        "--immediate-topology=false",
        "--volume-name-prefix=disk",
        "--volume-name-uuid-length=12",
        "--retry-interval-start=500ms",
        "--retry-interval-max=1m30s",
        "--prevent-volume-mode-conversion=false",
        "--controller-publish-readonly=true",
        "--http-endpoint=:8080",
    ]);
    let Ok(Component::Provisioner(options)) = provisioner.component(&pod()) else { panic!() };
    assert_eq!((options.timeout, options.workers), (Duration::from_mins(1), 50));
    assert_eq!(options.retry.first, Duration::from_millis(500));
    assert_eq!(options.retry.longest, Duration::from_secs(90));
    assert!(options.extra_create_metadata && options.strict_topology && options.controller_publish_readonly);
    assert!(!options.immediate_topology && !options.prevent_volume_mode_conversion);
    assert_eq!((options.volume_name_prefix.as_str(), options.volume_name_uuid_length), ("disk", Some(12)));
    assert_eq!(options.default_fs_type, "ext4");
    let election = &provisioner.common.election;
    assert!(election.leader_election);
    assert_eq!(election.leader_election_namespace, "kube-system");
    assert_eq!(election.leader_election_labels.0["app"], "csi");
    assert_eq!(provisioner.common.http.address().unwrap(), Some(":8080"));
    assert_eq!(provisioner.connection.csi_address.to_string(), "unix:///csi/csi.sock");
}

#[test]
fn the_others_as_their_manifests_have_them() {
    let attacher =
        ["-v=5", "--timeout", "2m", "--reconcile-sync=10m", "--max-entries=500", "--default-fstype", "xfs"];
    let Ok(Component::Attacher(options)) = parse::<Attacher>(&attacher).component() else { panic!() };
    assert_eq!((options.timeout, options.reconcile), (Duration::from_mins(2), Duration::from_mins(10)));
    assert_eq!((options.max_entries, options.default_fs_type.as_str()), (500, "xfs"));
    let resizer = ["--workers=7", "--handle-volume-inuse-error=false", "--extra-modify-metadata"];
    let Ok(Component::Resizer(options)) = parse::<Resizer>(&resizer).component() else { panic!() };
    assert_eq!(options.workers, 7);
    assert!(!options.handle_volume_in_use_error && options.extra_modify_metadata);
    let snapshotter =
        ["--snapshot-name-prefix=s", "--snapshot-name-uuid-length=8", "--groupsnapshot-name-prefix=g"];
    let Ok(Component::Snapshotter(options)) = parse::<Snapshotter>(&snapshotter).component(None) else {
        panic!()
    };
    assert_eq!((options.snapshot_name_prefix.as_str(), options.snapshot_name_uuid_length), ("s", Some(8)));
    assert_eq!(options.group_snapshot_name_prefix, "g");
    let monitor = [
        "--monitor-interval=30s",
        "--list-volumes-interval=2m",
        "--volume-list-add-interval=5m",
        "--node-list-add-interval=5m",
        "--enable-node-watcher=true",
        "--resync=10m",
    ];
    let Component::HealthMonitor(options) = parse::<HealthMonitor>(&monitor).component() else { panic!() };
    assert_eq!((options.interval, options.list_interval), (Duration::from_secs(30), Duration::from_mins(2)));
    assert!(options.node_watcher);
}

#[test]
fn a_snapshotter_on_every_node_must_know_its_node_and_needs_no_lease() {
    let words = ["--node-deployment"];
    let Ok(Component::Snapshotter(options)) = parse::<Snapshotter>(&words).component(Some("n".to_owned()))
    else {
        panic!()
    };
    assert_eq!(options.node.as_deref(), Some("n"));
    for node in [None, Some(String::new())] {
        let refused = parse::<Snapshotter>(&words).component(node).unwrap_err().to_string();
        assert!(refused.contains("NODE_NAME"), "{refused}");
    }
    let elected = parse::<Snapshotter>(&["--node-deployment", "--leader-election"]);
    let refused = elected.component(Some("n".to_owned())).unwrap_err().to_string();
    assert!(refused.contains("--leader-election"), "{refused}");
    let distributed = parse::<SnapshotController>(&["--enable-distributed-snapshotting"]);
    let Ok(Component::SnapshotController(options)) = distributed.component() else { panic!() };
    assert!(options.distributed);
}

/// A pod of a DaemonSet.
fn pod() -> Surroundings {
    let some = |text: &str| Some(text.to_owned());
    Surroundings {
        host: "host".to_owned(),
        node: some("n1"),
        namespace: some("storage"),
        pod: some("driver-x"),
    }
}

fn provisioner(words: &[&str], surroundings: &Surroundings) -> Result<provisioner::Options, String> {
    match parse::<Provisioner>(words).component(surroundings) {
        Ok(Component::Provisioner(options)) => Ok(options),
        Ok(other) => panic!("{other:?}"),
        Err(refused) => Err(refused.to_string()),
    }
}

#[test]
fn capacity_is_told_in_the_pods_namespace_and_goes_with_what_the_level_says() {
    assert!(provisioner(&["--enable-capacity=false"], &pod()).unwrap().capacity.is_none());
    let capacity = provisioner(&["--enable-capacity"], &pod()).unwrap().capacity.unwrap();
    assert_eq!((capacity.namespace.as_str(), capacity.poll), ("storage", Duration::from_mins(1)));
    assert_eq!((capacity.immediate, capacity.workers, capacity.only_if_announced), (false, 1, false));
    assert_eq!(capacity.owner, Some(provisioner::Owner { pod: "driver-x".to_owned(), level: 1 }));
    let words = [
        "--enable-capacity",
        "--capacity-poll-interval=10s",
        "--capacity-for-immediate-binding",
        "--capacity-threads=4",
        "--capacity-ownerref-level=-1",
        "--kube-api-capacity-qps=50",
    ];
    let nobody = Surroundings { pod: None, ..pod() };
    let capacity = provisioner(&words, &nobody).unwrap().capacity.unwrap();
    assert_eq!((capacity.poll, capacity.immediate, capacity.workers), (Duration::from_secs(10), true, 4));
    assert_eq!(capacity.owner, None);
    let nowhere = Surroundings { namespace: None, ..pod() };
    let refused = provisioner(&["--enable-capacity"], &nowhere).unwrap_err();
    assert!(refused.contains("NAMESPACE"), "{refused}");
    let refused = provisioner(&["--enable-capacity", "--capacity-ownerref-level=2"], &nobody).unwrap_err();
    assert!(refused.contains("POD_NAME") && refused.contains("--capacity-ownerref-level=-1"), "{refused}");
}

#[test]
fn a_provisioner_on_every_node_must_know_its_node_and_needs_no_lease() {
    assert!(provisioner(&["--node-deployment=false"], &pod()).unwrap().per_node.is_none());
    let node = provisioner(&["--node-deployment"], &pod()).unwrap().per_node.unwrap();
    assert_eq!(node, provisioner::PerNode::new("n1"));
    let words = [
        "--node-deployment",
        "--node-deployment-immediate-binding=false",
        "--node-deployment-base-delay=1s",
        "--node-deployment-max-delay=2s",
    ];
    let node = provisioner(&words, &pod()).unwrap().per_node.unwrap();
    assert_eq!(
        (node.immediate, node.base_delay, node.max_delay),
        (false, Duration::from_secs(1), Duration::from_secs(2))
    );
    let nowhere = Surroundings { node: None, ..pod() };
    for (words, surroundings, word) in [
        (vec!["--node-deployment"], nowhere, "NODE_NAME"),
        (vec!["--node-deployment", "--leader-election"], pod(), "--leader-election"),
        (vec!["--node-deployment", "--node-deployment-base-delay=2m"], pod(), "--node-deployment-max-delay"),
        (vec!["--retry-interval-start=6m"], pod(), "--retry-interval-start"),
    ] {
        let refused = provisioner(&words, &surroundings).unwrap_err();
        assert!(refused.contains(word), "{refused}");
    }
}

#[test]
fn sources_in_other_namespaces_are_a_feature_to_switch_on() {
    assert!(!provisioner(&[], &pod()).unwrap().cross_namespace_sources);
    let words = ["--feature-gates=CrossNamespaceVolumeDataSource=true"];
    assert!(provisioner(&words, &pod()).unwrap().cross_namespace_sources);
}
