//! Command lines in the shape of upstream's example manifests, and what they come to.

use std::time::Duration;

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
    let Ok(Component::Provisioner(options)) = parse::<Provisioner>(&[]).component() else { panic!() };
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
    let Ok(Component::Provisioner(options)) = provisioner.component() else { panic!() };
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
}

#[test]
fn what_is_not_supported_yet_is_refused_rather_than_silently_missing() {
    for (words, flag) in [
        (["--enable-capacity"], "--enable-capacity"),
        (["--node-deployment"], "--node-deployment"),
        (["--retry-interval-start=6m"], "--retry-interval-start"),
    ] {
        let refused = parse::<Provisioner>(&words).component().unwrap_err().to_string();
        assert!(refused.contains(flag), "{refused}");
    }
    assert!(
        parse::<Provisioner>(&["--enable-capacity=false", "--node-deployment=false"]).component().is_ok()
    );
}
