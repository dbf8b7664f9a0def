//! csi-sanity, the CSI community's conformance suite, against a driver in this process.

#[path = "../../../../testbed/nfs/cannot.rs"]
mod cannot;

use std::{fs, path::Path, sync::Arc, time::Duration};

use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_driver::{Driver, backend::Parameters, nfs::Nfs, services};
use prometheus_client::registry::Registry;
use serde_json::Value;

use self::cannot::CANNOT;

const PATIENCE: Duration = Duration::from_mins(10);

/// What the suite found.
pub(crate) struct Outcome {
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
}

/// Runs every spec but those that `skip`, a regular expression, names; a failure panics with its words.
pub(crate) async fn run(dir: &Path, backend: Nfs, parameters: &Parameters, skip: &str) -> Outcome {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/csi-sanity");
    assert!(program.is_file(), "there is no csi-sanity: build it first with `make deps`");
    let config = services::Config {
        name: "nfs.csi.k8s.io".to_owned(),
        version: "1".to_owned(),
        state_dir: dir.join("driver"),
        private_dir: dir.join("driver"),
        mode: services::Mode::All,
        default_page: 1000,
        check_volume_lifecycle: false,
    };
    let driver = Driver::new(config, Arc::new(backend.clone())).unwrap();
    driver.recover().await.unwrap();
    let socket = dir.join("csi.sock");
    let listener = Listener::bind(&Endpoint::Unix(socket.clone())).await.unwrap();
    let layer = CallLayer::new(Metrics::register(&mut Registry::default(), "nfs"), None);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let routes = driver.routes();
    let serving = tokio::spawn(async move {
        berth_csi::serve(listener, routes, layer, async { drop(stopped.await) }).await
    });
    let yaml: Vec<String> = parameters.iter().map(|(key, value)| format!("{key}: {value:?}")).collect();
    fs::write(dir.join("parameters.yaml"), yaml.join("\n")).unwrap();
    let report = dir.join("report.json");
    let mut args = vec![
        format!("--csi.endpoint=unix://{}", socket.display()),
        format!("--csi.mountdir={}", dir.join("mount").display()),
        format!("--csi.stagingdir={}", dir.join("staging").display()),
        format!("--csi.testvolumeparameters={}", dir.join("parameters.yaml").display()),
        "--csi.testvolumesize=1073741824".to_owned(),
        "--csi.testvolumeexpandsize=1610612736".to_owned(),
        format!("--ginkgo.json-report={}", report.display()),
        "--ginkgo.no-color".to_owned(),
    ];
    if !skip.is_empty() {
        args.push(format!("--ginkgo.skip={skip}"));
    }
    let ran = tokio::task::spawn_blocking(move || {
        berth_host::exec::run_accepting(program.to_str().unwrap(), args, PATIENCE, &[0, 1])
    });
    let output = ran.await.unwrap().unwrap();
    let _ = stop.send(());
    serving.await.unwrap().unwrap();
    assert_eq!(driver.take_down().await.unwrap(), 0, "the suite left something published");
    backend.drain(Duration::from_secs(20)).await;
    let text = fs::read_to_string(&report).unwrap();
    let outcome = read(&text, skip);
    assert_eq!(
        output.code,
        0,
        "csi-sanity failed without a failure:\n{}",
        String::from_utf8_lossy(&output.stdout)
    );
    outcome
}

fn read(report: &str, skip: &str) -> Outcome {
    let suites: Value = serde_json::from_str(report).unwrap();
    let mut outcome = Outcome { passed: 0, skipped: 0 };
    let mut failures = Vec::new();
    let specs = suites.as_array().into_iter().flatten().filter_map(|suite| suite["SpecReports"].as_array());
    for spec in specs.flatten().filter(|spec| spec["LeafNodeType"] == "It") {
        let path = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let name = path.chain(spec["LeafNodeText"].as_str()).collect::<Vec<_>>().join(" ");
        match spec["State"].as_str().unwrap() {
            "passed" => outcome.passed += 1,
            // Those that were not to run have no message.
            "skipped" if skip.is_empty() || !spec["Failure"]["Message"].is_null() => {
                assert!(
                    CANNOT.iter().any(|word| name.contains(word)),
                    "skipped, though NFS can have it: {name}"
                );
                outcome.skipped += 1;
            }
            "skipped" | "pending" => {}
            _ => {
                failures.push(format!("{name}: {}", spec["Failure"]["Message"].as_str().unwrap_or_default()));
            }
        }
    }
    assert!(failures.is_empty(), "csi-sanity failed:\n{}", failures.join("\n"));
    outcome
}
