//! The table, and command lines in the shape of upstream's example manifests, with what they come to.

use std::collections::HashSet;
use std::time::Duration;

use berth_sidecars::driver::{ControllerCapability, NodeCapability};
use clap::FromArgMatches;

use super::*;
use crate::launch::Surroundings;

fn row(name: &str) -> Sidecar {
    *SIDECARS.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("there is no {name}"))
}

fn line(name: &str, words: &[&str]) -> ArgMatches {
    let matches = row(name).command().try_get_matches_from([name].iter().chain(words));
    matches.unwrap_or_else(|mistake| panic!("{words:?}: {mistake}"))
}

/// One group of the flags that a sidecar alone is given.
fn parse<F: FromArgMatches>(name: &str, words: &[&str]) -> F {
    F::from_arg_matches(&line(name, words)).unwrap()
}

fn provisioner(
    words: &[&str],
    surroundings: &Surroundings,
) -> Result<berth_sidecars::provisioner::Options, String> {
    let name = "csi-provisioner";
    let setting = Setting::read(&line(name, words), surroundings.clone()).map_err(|why| why.to_string())?;
    parse::<provisioner::Flags>(name, words).options(&setting).map_err(|why| why.to_string())
}

fn snapshotter(
    words: &[&str],
    surroundings: &Surroundings,
) -> Result<berth_sidecars::snapshotter::Options, String> {
    let name = "csi-snapshotter";
    let setting = Setting::read(&line(name, words), surroundings.clone()).map_err(|why| why.to_string())?;
    parse::<snapshotter::Flags>(name, words).options(&setting).map_err(|why| why.to_string())
}

#[test]
fn leases_are_named_as_upstream_names_them() {
    let leases: Vec<_> = SIDECARS.iter().map(|row| row.lease("ebs.csi.aws.com")).collect();
    assert_eq!(
        leases,
        [
            "ebs-csi-aws-com",
            "external-attacher-leader-ebs-csi-aws-com",
            "external-resizer-ebs-csi-aws-com",
            "external-snapshotter-leader-ebs-csi-aws-com",
            "external-health-monitor-leader-ebs-csi-aws-com",
            "snapshot-controller-leader",
        ]
    );
    assert_eq!(lease_name("driver_"), "driver-X");
}

#[test]
fn a_driver_is_given_the_sidecars_that_it_needs() {
    let needed = |identity: &Identity| -> Vec<_> {
        SIDECARS.iter().filter(|row| (row.missing)(identity).is_none()).map(|row| row.name).collect()
    };
    assert_eq!(needed(&Identity::default()), ["csi-attacher", "snapshot-controller"]);
    let node = HashSet::from([NodeCapability::ExpandVolume]);
    let grows_on_the_node = Identity { node, ..Identity::default() };
    assert_eq!(needed(&grows_on_the_node), ["csi-attacher", "csi-resizer", "snapshot-controller"]);
    let controller = [
        ControllerCapability::CreateDeleteVolume,
        ControllerCapability::CreateDeleteSnapshot,
        ControllerCapability::ModifyVolume,
        ControllerCapability::ListVolumes,
    ];
    let almost = Identity { controller: controller.into(), ..Identity::default() };
    assert!(!needed(&almost).contains(&"csi-external-health-monitor-controller"));
    let everything = Identity { tells_condition: true, ..almost };
    assert_eq!(needed(&everything).len(), 6);
}

#[test]
fn on_every_node_run_only_those_that_can() {
    let asked = |words: &[&str]| -> Result<Vec<&str>, String> {
        let matches = command(SIDECARS).try_get_matches_from(["sidecars"].iter().chain(words)).unwrap();
        let chosen = chosen(SIDECARS, &matches).map_err(|refused| refused.to_string())?;
        Ok(chosen.iter().map(|row| row.short_name).collect())
    };
    let beside_a_driver = ["provisioner", "attacher", "resizer", "snapshotter", "health-monitor"];
    assert_eq!(asked(&[]), Ok(beside_a_driver.to_vec()));
    assert_eq!(asked(&["--node-deployment"]), Ok(vec!["provisioner", "resizer", "snapshotter"]));
    let twice = ["--node-deployment", "--controllers=provisioner,csi-provisioner"];
    assert_eq!(asked(&twice), Ok(vec!["provisioner"]));
    let refused = asked(&["--node-deployment", "--controllers=provisioner,attacher"]).unwrap_err();
    assert!(refused.contains("--controllers") && refused.contains("--node-deployment"), "{refused}");
    assert!(asked(&["--controllers=provisioner,attacher"]).is_ok());
}

#[test]
fn without_flags_each_works_as_upstream_does() {
    let options = provisioner(&[], &pod()).unwrap();
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(10), 100));
    assert_eq!(options.retry.first, Duration::from_secs(1));
    assert_eq!(options.retry.longest, Duration::from_mins(5));
    assert!(options.immediate_topology && !options.strict_topology && !options.extra_create_metadata);
    assert!(options.prevent_volume_mode_conversion && !options.controller_publish_readonly);
    assert_eq!((options.volume_name_prefix.as_str(), options.volume_name_uuid_length), ("pvc", None));
    let options = parse::<attacher::Flags>("csi-attacher", &[]).options().unwrap();
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(15), 10));
    assert_eq!((options.reconcile, options.max_entries), (Duration::from_mins(1), 0));
    let options = parse::<resizer::Flags>("csi-resizer", &[]).options().unwrap();
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(10), 10));
    assert!(options.handle_volume_in_use_error && !options.extra_modify_metadata);
    let options = snapshotter(&[], &pod()).unwrap();
    assert_eq!(options.node, None);
    assert_eq!((options.timeout, options.workers), (Duration::from_mins(1), 10));
    assert_eq!(
        (options.snapshot_name_prefix.as_str(), options.snapshot_name_uuid_length),
        ("snapshot", None)
    );
    assert_eq!(options.group_snapshot_name_prefix, "groupsnapshot");
    let options = parse::<snapshot_controller::Flags>("snapshot-controller", &[]).options().unwrap();
    assert_eq!((options.workers, options.prevent_volume_mode_conversion), (10, true));
    assert!(!options.distributed);
    let monitor = "csi-external-health-monitor-controller";
    let options = parse::<health_monitor::Flags>(monitor, &[]).options();
    assert_eq!((options.timeout, options.workers), (Duration::from_secs(15), 10));
    assert_eq!((options.interval, options.list_interval), (Duration::from_mins(1), Duration::from_mins(5)));
    assert_eq!((options.node_watcher, options.node_patience), (false, Duration::from_mins(5)));
    let election = parse::<Election>("csi-attacher", &[]);
    assert!(!election.leader_election);
    assert_eq!(election.leader_election_lease_duration, Duration::from_secs(15));
    assert_eq!(election.leader_election_renew_deadline, Duration::from_secs(10));
    assert_eq!(election.leader_election_retry_period, Duration::from_secs(5));
    let connection = parse::<Connection>("csi-attacher", &[]);
    assert_eq!(connection.endpoint().unwrap().to_string(), "unix:///run/csi/socket");
    assert_eq!(parse::<Http>("csi-attacher", &[]).address().unwrap(), None);
}

#[test]
fn a_provisioner_of_a_cloud_driver() {
    let words = [
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
    ];
    let options = provisioner(&words, &pod()).unwrap();
    assert_eq!((options.timeout, options.workers), (Duration::from_mins(1), 50));
    assert_eq!(options.retry.first, Duration::from_millis(500));
    assert_eq!(options.retry.longest, Duration::from_secs(90));
    assert!(options.extra_create_metadata && options.strict_topology && options.controller_publish_readonly);
    assert!(!options.immediate_topology && !options.prevent_volume_mode_conversion);
    assert_eq!((options.volume_name_prefix.as_str(), options.volume_name_uuid_length), ("disk", Some(12)));
    assert_eq!(options.default_fs_type, "ext4");
    let election = parse::<Election>("csi-provisioner", &words);
    assert!(election.leader_election);
    assert_eq!(election.leader_election_namespace, "kube-system");
    assert_eq!(election.leader_election_labels.0["app"], "csi");
    assert_eq!(parse::<Http>("csi-provisioner", &words).address().unwrap(), Some(":8080"));
    let connection = parse::<Connection>("csi-provisioner", &words);
    assert_eq!(connection.endpoint().unwrap().to_string(), "unix:///csi/csi.sock");
}

#[test]
fn the_others_as_their_manifests_have_them() {
    let attacher =
        ["-v=5", "--timeout", "2m", "--reconcile-sync=10m", "--max-entries=500", "--default-fstype", "xfs"];
    let options = parse::<attacher::Flags>("csi-attacher", &attacher).options().unwrap();
    assert_eq!((options.timeout, options.reconcile), (Duration::from_mins(2), Duration::from_mins(10)));
    assert_eq!((options.max_entries, options.default_fs_type.as_str()), (500, "xfs"));
    let resizer = ["--workers=7", "--handle-volume-inuse-error=false", "--extra-modify-metadata"];
    let options = parse::<resizer::Flags>("csi-resizer", &resizer).options().unwrap();
    assert_eq!(options.workers, 7);
    assert!(!options.handle_volume_in_use_error && options.extra_modify_metadata);
    let named =
        ["--snapshot-name-prefix=s", "--snapshot-name-uuid-length=8", "--groupsnapshot-name-prefix=g"];
    let options = snapshotter(&named, &pod()).unwrap();
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
    let name = "csi-external-health-monitor-controller";
    let options = parse::<health_monitor::Flags>(name, &monitor).options();
    assert_eq!((options.interval, options.list_interval), (Duration::from_secs(30), Duration::from_mins(2)));
    assert!(options.node_watcher);
}

#[test]
fn a_snapshotter_on_every_node_must_know_its_node_and_needs_no_lease() {
    let words = ["--node-deployment"];
    assert_eq!(snapshotter(&words, &pod()).unwrap().node.as_deref(), Some("n1"));
    for node in [None, Some(String::new())] {
        let refused = snapshotter(&words, &Surroundings { node, ..pod() }).unwrap_err();
        assert!(refused.contains("NODE_NAME"), "{refused}");
    }
    let refused = snapshotter(&["--node-deployment", "--leader-election"], &pod()).unwrap_err();
    assert!(refused.contains("--leader-election"), "{refused}");
    let words = ["--enable-distributed-snapshotting"];
    assert!(
        parse::<snapshot_controller::Flags>("snapshot-controller", &words).options().unwrap().distributed
    );
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

#[test]
fn capacity_is_published_in_the_pods_namespace_and_owned_by_what_the_level_says() {
    assert!(provisioner(&["--enable-capacity=false"], &pod()).unwrap().capacity.is_none());
    let capacity = provisioner(&["--enable-capacity"], &pod()).unwrap().capacity.unwrap();
    assert_eq!((capacity.namespace.as_str(), capacity.poll), ("storage", Duration::from_mins(1)));
    assert_eq!((capacity.immediate, capacity.workers, capacity.only_if_announced), (false, 1, false));
    assert_eq!(
        capacity.owner,
        Some(berth_sidecars::provisioner::Owner { pod: "driver-x".to_owned(), level: 1 })
    );
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
    assert_eq!(node, berth_sidecars::provisioner::PerNode::new("n1"));
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
