//! The liveness probe and the registrar beside a driver.

use std::fs;

use crate::sidecars::cluster::{Cluster, get, pause};

#[tokio::test]
async fn the_liveness_probe_follows_the_driver_and_the_file_of_its_socket() {
    let cluster = Cluster::start().await;
    let mut probe =
        cluster.by_name("livenessprobe", &[&cluster.csi_address(), "-http-endpoint=127.0.0.1:0", "-v=5"]);
    let http = probe.http().await.unwrap();
    assert_eq!(get(&http, "/healthz").0, 500);
    let mut driver = cluster.driver().await;
    assert_eq!(get(&http, "/healthz"), (200, "ok".to_owned()));
    assert_eq!(get(&http, "/metrics").0, 200);
    assert_eq!(get(&http, "/elsewhere").0, 404);
    fs::remove_file(cluster.path("csi.sock")).unwrap();
    assert_eq!(get(&http, "/healthz").0, 500);
    driver.kill().unwrap();
    probe.stop().await.unwrap();
}

#[tokio::test]
async fn the_registrar_introduces_the_driver_and_takes_its_socket_away_again() {
    let cluster = Cluster::start().await;
    let directory = cluster.path("registry");
    fs::create_dir(&directory).unwrap();
    let words = [
        &cluster.csi_address(),
        "--kubelet-registration-path=/var/lib/kubelet/plugins/local/csi.sock",
        &format!("--plugin-registration-path={}", directory.display()),
        "--http-endpoint=127.0.0.1:0",
        "--timeout=5s",
        "--connection-timeout=10s",
        "--enable-pprof=false",
    ];
    let mut registrar = cluster.by_name("csi-node-driver-registrar", &words);
    registrar.says("--connection-timeout has no effect here: it is deprecated").await.unwrap();
    registrar.says("asking every second").await.unwrap();
    let _driver = cluster.driver().await;
    let socket = directory.join("local.berth.dev-reg.sock");
    let http = registrar.http().await.unwrap();
    while get(&http, "/healthz").0 != 200 {
        pause().await;
    }
    assert!(socket.exists());
    fs::remove_file(&socket).unwrap();
    assert_eq!(get(&http, "/healthz").0, 404);
    registrar.stop().await.unwrap();
}

#[tokio::test]
async fn a_driver_whose_socket_is_gone_says_that_it_is_not_well() {
    let cluster = Cluster::start().await;
    let own = cluster.driver_args();
    let args: Vec<&str> = ["driver", "local", "--http-endpoint=127.0.0.1:0"]
        .into_iter()
        .chain(own.iter().map(String::as_str))
        .collect();
    let mut driver = cluster.berth("driver", &args, &[]);
    let http = driver.http().await.unwrap();
    driver.says(" ready ").await.unwrap();
    for check in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(get(&http, check), (200, "ok".to_owned()), "{check}");
    }
    fs::remove_file(cluster.path("csi.sock")).unwrap();
    for (check, status) in [("/healthz", 500), ("/livez", 500), ("/readyz", 200)] {
        assert_eq!(get(&http, check).0, status, "{check}");
    }
    driver.stop().await.unwrap();
}
