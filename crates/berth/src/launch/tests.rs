//! Restarting roles that fail.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

#[test]
fn sidecars_that_share_a_lease_stand_back_for_the_holders_of_upstreams() {
    let rivals = |lease: &str, names: &[&str]| {
        let rows = sidecars::SIDECARS.iter().filter(|row| names.contains(&row.short_name));
        super::rivals(lease, rows, "nfs.csi.k8s.io")
    };
    assert_eq!(
        rivals("berth-sidecars-nfs-csi-k8s-io", &["provisioner", "resizer"]),
        ["berth-sidecars-nfs-csi-k8s-io", "nfs-csi-k8s-io", "external-resizer-nfs-csi-k8s-io"]
    );
    assert_eq!(
        rivals("snapshot-controller-leader", &["snapshot-controller"]),
        ["snapshot-controller-leader"],
        "in any other namespace"
    );
    assert!(rivals("nfs-csi-k8s-io", &["provisioner"]).is_empty(), "alone, as upstream");
}

#[tokio::test]
async fn a_role_that_panics_or_ends_is_started_again_until_the_shutdown() {
    let (starts, shutdown) = (AtomicUsize::new(0), CancellationToken::new());
    let backoff = Backoff { first: Duration::from_millis(1), longest: Duration::from_millis(4) };
    supervise(backoff, "test", shutdown.clone(), || async {
        match starts.fetch_add(1, Ordering::Relaxed) {
            0 | 2 => panic!("a mistake"),
            1 => {}
            _ => shutdown.cancel(),
        }
    })
    .await;
    assert_eq!(starts.into_inner(), 4);
}

#[tokio::test(start_paused = true)]
async fn the_pause_grows_with_every_failure_in_a_row() {
    let (starts, shutdown) = (parking_lot::Mutex::new(Vec::new()), CancellationToken::new());
    let begun = tokio::time::Instant::now();
    supervise(RESTART, "test", shutdown.clone(), || async {
        starts.lock().push(begun.elapsed());
        assert!(starts.lock().len() > 3, "a mistake");
        shutdown.cancel();
    })
    .await;
    let pauses: Vec<_> = starts.lock().windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    for (pause, least) in pauses.iter().zip([1, 2, 4]) {
        let least = Duration::from_secs(least);
        assert!(*pause >= least && *pause <= least.mul_f64(1.26), "{pauses:?}");
    }
    assert_eq!(pauses.len(), 3);
}
