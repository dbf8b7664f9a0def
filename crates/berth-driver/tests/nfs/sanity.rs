//! csi-sanity, the CSI community's conformance suite, against the controller: every spec of its, none skipped but for
//! what NFS cannot have.

use std::{fs, path::Path, sync::Arc, time::Duration};

use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_driver::{Driver, services};
use prometheus_client::registry::Registry;

use crate::server::{Server, VERSIONS};

const PATIENCE: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_conforms() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/csi-sanity");
    assert!(program.is_file(), "there is no csi-sanity: build it first with `make deps`");
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let dir = server.dir().to_owned();
        let config = services::Config {
            name: "nfs.csi.k8s.io".to_owned(),
            version: "1".to_owned(),
            state_dir: dir.join("state/driver"),
            private_dir: dir.join("state"),
            mode: services::Mode::All,
            default_page: 1000,
            check_volume_lifecycle: false,
        };
        let driver = Driver::new(config, Arc::new(server.backend())).unwrap();
        let socket = dir.join("csi.sock");
        let listener = Listener::bind(&Endpoint::Unix(socket.clone())).await.unwrap();
        let layer = CallLayer::new(Metrics::register(&mut Registry::default(), "nfs"), None);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            berth_csi::serve(listener, driver.routes(), layer, async { drop(stopped.await) }).await
        });
        let parameters: Vec<String> =
            server.class(&[]).iter().map(|(key, value)| format!("{key}: {value:?}")).collect();
        fs::write(dir.join("parameters.yaml"), parameters.join("\n")).unwrap();
        let args = [
            format!("--csi.endpoint=unix://{}", socket.display()),
            format!("--csi.mountdir={}", dir.join("mount").display()),
            format!("--csi.stagingdir={}", dir.join("staging").display()),
            format!("--csi.testvolumeparameters={}", dir.join("parameters.yaml").display()),
            "--csi.testvolumesize=1073741824".to_owned(),
            "--csi.testvolumeexpandsize=1610612736".to_owned(),
            // Publishing needs a mount, which the whole binary's tests make.
            "--ginkgo.skip=Node Service|should work|Node Unpublish".to_owned(),
            "--ginkgo.no-color".to_owned(),
            "--ginkgo.v".to_owned(),
        ];
        let program = program.clone();
        let ran = tokio::task::spawn_blocking(move || {
            berth_host::exec::run_accepting(program.to_str().unwrap(), args, PATIENCE, &[0, 1])
        });
        let output = ran.await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let _ = stop.send(());
        serving.await.unwrap().unwrap();
        assert_eq!(output.code, 0, "version {version}:\n{text}");
        assert!(text.contains(" Passed") && text.contains("0 Failed"), "{text}");
        eprintln!("version {version}: {}", text.lines().rev().find(|line| line.contains("Passed")).unwrap());
    }
}
