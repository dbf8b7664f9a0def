//! What a probe says of drivers that live, hang, are not ready, and have lost their socket.

use std::sync::Arc;

use berth_csi::v1::ProbeResponse;
use berth_csi::{CallLayer, Listener, Metrics};
use berth_testkit::{FakeDriver, FaultKind};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

/// A driver that answers whether it is ready.
fn ready(ready: Option<bool>) -> Arc<FakeDriver> {
    let driver = FakeDriver::new("a.example");
    driver.on(move |_: ProbeRequest| Ok(ProbeResponse { ready }));
    driver
}

async fn serve(path: &Path, driver: &Arc<FakeDriver>) -> (Endpoint, DropGuard) {
    let endpoint = Endpoint::Unix(path.to_owned());
    let listener = Listener::bind(&endpoint).await.unwrap();
    let layer = CallLayer::new(Metrics::unregistered("a.example"), None);
    let stop = CancellationToken::new();
    tokio::spawn(berth_csi::serve(listener, driver.routes(), layer, stop.clone().cancelled_owned()));
    (endpoint, stop.drop_guard())
}

#[tokio::test]
async fn a_driver_lives_when_it_answers_that_it_is_ready_or_says_nothing_about_it() {
    let dir = tempfile::tempdir().unwrap();
    for answer in [Some(true), None] {
        let path = dir.path().join(format!("{answer:?}.sock"));
        let (endpoint, _stop) = serve(&path, &ready(answer)).await;
        probe(&endpoint, PATIENCE).await.unwrap();
    }
}

#[tokio::test]
async fn a_driver_that_is_not_ready_fails_or_hangs_is_reported_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (broken, hanging) = (FakeDriver::new("a.example"), FakeDriver::new("a.example"));
    broken.on(|_: ProbeRequest| Err(Status::failed_precondition("the disk is missing")));
    hanging.fail("Probe", "", FaultKind::Hang, u32::MAX);
    for (driver, patience, said) in [
        (ready(Some(false)), PATIENCE, "not ready"),
        (broken, PATIENCE, "the disk is missing"),
        (hanging, Duration::from_millis(50), "no answer within 50ms"),
    ] {
        let (endpoint, _stop) = serve(&dir.path().join(said), &driver).await;
        let unwell = probe(&endpoint, patience).await.unwrap_err().to_string();
        assert!(unwell.contains(said), "{unwell}");
    }
    let nobody = Endpoint::Unix(dir.path().join("nobody.sock"));
    assert!(matches!(probe(&nobody, PATIENCE).await, Err(Unwell::Driver(_))));
}

/// The defect that upstream's livenessprobe once had: an old connection outlives the socket's file.
#[tokio::test]
async fn a_driver_whose_socket_file_was_removed_is_unwell_although_it_still_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("csi.sock");
    let (endpoint, _stop) = serve(&path, &ready(Some(true))).await;
    probe(&endpoint, PATIENCE).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(probe(&endpoint, PATIENCE).await, Err(Unwell::Driver(_))));
}

#[tokio::test]
async fn a_registration_is_well_while_its_socket_answers_with_the_drivers_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = registrar::socket(dir.path(), "a.example");
    let check = || registration(dir.path(), "a.example", PATIENCE);
    assert!(matches!(check().await, Err(Unwell::Gone(gone)) if gone == path));

    let stop = CancellationToken::new();
    let options = registrar::Options {
        directory: dir.path().to_owned(),
        driver: "a.example".to_owned(),
        endpoint: "/csi/csi.sock".into(),
    };
    let serving = tokio::spawn(registrar::serve(options, stop.clone()));
    let answered = async {
        while check().await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.unwrap();
    std::fs::rename(&path, registrar::socket(dir.path(), "b.example")).unwrap();
    let other = registration(dir.path(), "b.example", PATIENCE).await;
    assert!(matches!(other, Err(Unwell::Stranger(name)) if name == "a.example"));
    std::fs::write(&path, "").unwrap();
    assert!(matches!(check().await, Err(Unwell::NotASocket(_))));
    stop.cancel();
    serving.await.unwrap().unwrap();
}
