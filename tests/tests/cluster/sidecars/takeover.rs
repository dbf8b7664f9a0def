//! Two replicas of which one works.

use std::time::{Duration, Instant};

use berth_e2e::program::Program;

use crate::sidecars::cluster::Cluster;

const LEASE: &str = "berth-sidecars-local-berth-dev";

fn replica(cluster: &Cluster, name: &str, command: &[&str]) -> Program {
    let (address, kubeconfig) = (cluster.csi_address(), cluster.kubeconfig());
    let election = [
        address.as_str(),
        kubeconfig.as_str(),
        "--leader-election",
        "--leader-election-namespace=default",
        "--leader-election-lease-duration=8s",
        "--leader-election-renew-deadline=5s",
        "--leader-election-retry-period=500ms",
    ];
    let args: Vec<&str> = command.iter().copied().chain(election).collect();
    cluster.berth(name, &args, &[("POD_NAME", name)])
}

#[tokio::test]
async fn when_the_leader_is_killed_the_other_takes_over_and_when_it_is_stopped_at_once() {
    let cluster = Cluster::start().await;
    let _driver = cluster.driver().await;
    let mut first = replica(&cluster, "first", &["sidecars"]);
    cluster.held(LEASE, |holder| holder == "first").await;
    let mut second = replica(&cluster, "second", &["sidecars"]);
    second.says("standing by").await.unwrap();
    cluster.volume_of(&cluster.claim("a").await).await;

    first.kill().unwrap();
    let claim = cluster.claim("b").await;
    let lease = cluster.held(LEASE, |holder| holder == "second").await;
    assert_eq!(lease.lease_transitions, Some(1));
    cluster.volume_of(&claim).await;

    let mut third = replica(&cluster, "third", &["sidecars"]);
    third.says("standing by").await.unwrap();
    second.stop().await.unwrap();
    let stopped = Instant::now();
    let said = std::fs::read_to_string(cluster.path("second.log")).unwrap();
    assert!(said.contains("released the lease"), "{said}");
    // Without a release it would be 8 s at least, the lease's duration.
    let by_third = |holder: &str| {
        assert_ne!(holder, "second", "who has ended holds the lease");
        holder == "third"
    };
    cluster.held(LEASE, by_third).await;
    assert!(stopped.elapsed() < Duration::from_secs(6), "it took {:?}", stopped.elapsed());
    cluster.volume_of(&cluster.claim("c").await).await;
    assert!(cluster.server_log().contains("ready"));
}

#[tokio::test]
async fn a_component_alone_holds_the_lease_that_upstream_would() {
    let cluster = Cluster::start().await;
    let _driver = cluster.driver().await;
    for (command, lease) in [
        ("csi-provisioner", "local-berth-dev"),
        ("csi-attacher", "external-attacher-leader-local-berth-dev"),
        ("csi-resizer", "external-resizer-local-berth-dev"),
        ("csi-snapshotter", "external-snapshotter-leader-local-berth-dev"),
        ("csi-external-health-monitor-controller", "external-health-monitor-leader-local-berth-dev"),
    ] {
        let alone = replica(&cluster, command, &[command]);
        let held = cluster.held(lease, |holder| holder == command).await;
        assert_eq!(held.lease_duration_seconds, Some(8));
        alone.stop().await.unwrap();
        cluster.held(lease, str::is_empty).await;
    }
}
