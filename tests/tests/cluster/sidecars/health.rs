//! The health monitor beside a driver whose disk fails.

use std::fs;

use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use crate::sidecars::cluster::{Cluster, PATIENCE, pause};
use crate::sidecars::metrics::bind;

/// Waits for an event on the claim, and gives its message.
async fn event(cluster: &Cluster, reason: &str) -> String {
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let found = events.list(&ListParams::default().fields(&format!("reason={reason}"))).await.unwrap();
        if let Some(event) = found.items.into_iter().next() {
            assert_eq!(event.involved_object.name.as_deref(), Some("data"));
            return event.message.unwrap_or_default();
        }
        assert!(std::time::Instant::now() < deadline, "there is no event {reason}");
        pause().await;
    }
}

#[tokio::test]
async fn a_volume_whose_data_is_gone_is_told_on_its_claim_and_so_is_that_it_is_back() {
    let cluster = Cluster::start().await;
    let _driver = cluster.driver().await;
    let (address, kubeconfig) = (cluster.csi_address(), cluster.kubeconfig());
    let _sidecars =
        cluster.berth("sidecars", &["sidecars", &address, &kubeconfig, "--controllers=provisioner"], &[]);
    let volume = cluster.volume_of(&cluster.claim("data").await).await;
    bind(&cluster, &volume.name_any()).await;
    let words = [address.as_str(), &kubeconfig, "--list-volumes-interval=100ms", "-v=5"];
    let monitor = cluster.by_name("csi-external-health-monitor-controller", &words);

    let stored = fs::read_dir(cluster.path("volumes/volumes")).unwrap().next().unwrap().unwrap().path();
    let aside = cluster.path("aside");
    fs::rename(&stored, &aside).unwrap();
    let wrong = event(&cluster, "VolumeConditionAbnormal").await;
    assert!(!wrong.is_empty());
    fs::rename(&aside, &stored).unwrap();
    let well = event(&cluster, "VolumeConditionNormal").await;
    assert_eq!(well, "The Volume returns to the healthy state");
    monitor.stop().await.unwrap();
}
