//! csi-sanity, the CSI community's conformance suite, against a driver in this process.

#[path = "../../../../testbed/nfs/cannot.rs"]
mod cannot;

use std::{fs, path::Path, time::Duration};

use berth_backends::{Parameters, nfs::Nfs};
use serde_json::Value;

use self::cannot::CANNOT;
use crate::served::Served;

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
    let served = Served::start(dir, backend).await;
    let yaml: Vec<String> = parameters.iter().map(|(key, value)| format!("{key}: {value:?}")).collect();
    fs::write(dir.join("parameters.yaml"), yaml.join("\n")).unwrap();
    let report = dir.join("report.json");
    let mut args = vec![
        format!("--csi.endpoint=unix://{}", served.socket.display()),
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
    assert_eq!(served.end().await, 0, "the suite left something published");
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
