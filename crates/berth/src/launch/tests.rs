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

#[tokio::test]
async fn a_server_that_ends_unasked_is_named_with_the_reason_and_one_that_is_asked_to_is_not() {
    let (servers, shutdown) = (Servers::new(), CancellationToken::new());
    let waits = shutdown.clone();
    let obedient = servers.spawn("the obedient".to_owned(), shutdown.clone(), async move {
        waits.cancelled().await;
        anyhow::Ok("asked")
    });
    let running = CancellationToken::new();
    let ended = servers.spawn("the API server".to_owned(), running.clone(), async {
        Err::<(), _>(anyhow::anyhow!("the socket is gone").context("serve"))
    });
    assert_eq!(servers.failed().await, "the API server ended unasked: serve: the socket is gone");
    assert!(ended.await.unwrap().is_err());
    // The first is what the others follow from.
    let quiet = servers.spawn("another".to_owned(), running, async { anyhow::Ok(()) });
    quiet.await.unwrap().unwrap();
    assert!(servers.failed().await.starts_with("the API server"));
    shutdown.cancel();
    assert_eq!(obedient.await.unwrap().unwrap(), "asked");
}

#[tokio::test]
async fn a_server_that_panics_or_returns_is_named() {
    for (panics, expected) in
        [(true, "driver x ended unasked: it panicked: a mistake"), (false, "driver x ended unasked")]
    {
        let servers = Servers::new();
        let server = servers.spawn("driver x".to_owned(), CancellationToken::new(), async move {
            assert!(!panics, "a mistake");
            anyhow::Ok(())
        });
        assert_eq!(servers.failed().await, expected);
        assert_eq!(server.await.unwrap().is_err(), panics);
    }
}
