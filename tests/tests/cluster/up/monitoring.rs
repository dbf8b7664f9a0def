//! What Prometheus sees: Debian's Prometheus scrapes a running `berth up`, and every query of every board and rule has an answer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine::{command, run};
use berth_e2e::nfs::Server;
use berth_e2e::up::Machine;
use serde_json::{Value, json};

use super::{claim, pod, says, together};

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/monitoring")
}

/// A Prometheus that is killed when the test ends.
struct Prometheus {
    child: Child,
    url: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    fn start(directory: &Path, config: &Path) -> Result<Self> {
        // Prometheus cannot be asked for a free port.
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = fs::File::create(directory.join("prometheus.log"))?;
        let child = command("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("tsdb").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("start prometheus")?;
        Ok(Self { child, url: format!("http://127.0.0.1:{port}") })
    }

    /// How many series a query has; `None` while Prometheus does not answer.
    fn ask(&self, query: &str) -> Option<usize> {
        let output = command("promtool").args(["query", "instant", &self.url, query]).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        output.status.success().then(|| text.lines().filter(|line| !line.trim().is_empty()).count())
    }
}

/// Writes a part of the kubeconfig into a file; gives its path.
fn credential(machine: &Machine, path: &str, name: &str) -> Result<PathBuf> {
    let text = machine.kubectl(&["config", "view", "--raw", "-o", &format!("jsonpath={{{path}}}")])?;
    let file = machine.dir().join(name);
    fs::write(machine.dir().join("encoded"), text)?;
    let decoded = run("base64", &["-d", machine.dir().join("encoded").to_str().context("UTF-8")?])?;
    fs::write(&file, decoded)?;
    fs::remove_file(machine.dir().join("encoded"))?;
    Ok(file)
}

/// The rules as Prometheus reads them, and each one's name and query without what it is compared with.
fn rules() -> Result<(Value, Vec<(String, String)>)> {
    let manifest: Value = serde_saphyr::from_str(&fs::read_to_string(manifests().join("rules.yaml"))?)?;
    let spec = manifest["spec"].clone();
    let rules = spec["groups"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|group| group["rules"].as_array().into_iter().flatten());
    let mut queries = Vec::new();
    for rule in rules {
        let (name, query) =
            (rule["alert"].as_str().context("an alert")?, rule["expr"].as_str().context("a query")?);
        let (value, _) = query.rsplit_once([' ']).context("a number")?;
        let (value, comparison) = value.rsplit_once([' ']).context("a comparison")?;
        ensure!(
            ["<", ">"].contains(&comparison),
            "{name} is not one value and what it must not reach: {query}"
        );
        queries.push((name.to_owned(), value.to_owned()));
    }
    Ok((spec, queries))
}

/// The queries of all boards.
fn boards() -> Result<Vec<(String, String)>> {
    let mut queries = Vec::new();
    for file in fs::read_dir(manifests().join("dashboards"))? {
        let board: Value = serde_json::from_slice(&fs::read(file?.path())?)?;
        for panel in board["panels"].as_array().context("panels")? {
            for target in panel["targets"].as_array().context("targets")? {
                let title = format!("{}: {}", board["title"], panel["title"]);
                queries.push((title, target["expr"].as_str().context("a query")?.to_owned()));
            }
        }
    }
    ensure!(queries.len() > 20, "there are boards");
    Ok(queries)
}

/// A class on the NFS server of this machine.
const SHARED: &str = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: shared}\nprovisioner: nfs.csi.k8s.io\n\
    parameters: {server: 127.0.0.1, share: /export}\n";

#[test]
fn every_query_of_every_board_and_rule_has_an_answer() -> Result<()> {
    let server = Server::start(&[])?;
    let options = ["--default-mount-options", &server.options, "--mount-mode=fuse"];
    let machine = Machine::start_with(&[&["--driver=local", "--driver=nfs"], &options[..]].concat())?;
    let stuck = claim("stuck").replace("spec:\n", "spec:\n  storageClassName: absent\n");
    let shared = claim("shared").replace("spec:\n", "spec:\n  storageClassName: shared\n");
    machine.apply(&together(&[
        SHARED.to_owned(),
        claim("data"),
        pod("one", "data", "exec sleep 1000000"),
        stuck,
        shared,
    ]))?;
    machine.ready("one")?;
    machine.wait("pvc/shared", "jsonpath={.status.phase}=Bound")?;
    let running: Value = serde_json::from_slice(&fs::read(machine.data().join("running.json"))?)?;
    let directory = machine.dir().join("prometheus");
    fs::create_dir(&directory)?;
    let (rules, mut queries) = rules()?;
    let rules_file = directory.join("rules.json");
    fs::write(&rules_file, rules.to_string())?;
    run("promtool", &["check", "rules", rules_file.to_str().context("UTF-8")?])?;
    let config = json!({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [rules_file],
        "scrape_configs": [{
            "job_name": "berth", "scheme": "https",
            "tls_config": {
                "ca_file": credential(&machine, ".clusters[0].cluster.certificate-authority-data", "ca.crt")?,
                "cert_file": credential(&machine, ".users[0].user.client-certificate-data", "client.crt")?,
                "key_file": credential(&machine, ".users[0].user.client-key-data", "client.key")?,
            },
            "static_configs": [{"targets": [running["address"]]}],
        }],
    });
    let config_file = directory.join("prometheus.json");
    fs::write(&config_file, config.to_string())?;
    let prometheus = Prometheus::start(&directory, &config_file)?;
    machine.until("Prometheus scrapes", || Ok(prometheus.ask("up == 1").filter(|series| *series == 1)))?;
    queries.extend(boards()?);
    for (name, query) in queries {
        machine
            .until(&format!("an answer to {query}"), || {
                Ok(prometheus.ask(&query).filter(|series| *series > 0))
            })
            .with_context(|| {
                format!(
                    "{name}\n{}",
                    fs::read_to_string(directory.join("prometheus.log")).unwrap_or_default()
                )
            })?;
    }
    drop(prometheus);
    fs::remove_dir_all(&directory)?;
    for file in ["ca.crt", "client.crt", "client.key"] {
        fs::remove_file(machine.dir().join(file))?;
    }
    machine.finish()
}

#[test]
fn doctor_examines_a_machine_and_says_what_is_stuck() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    says(&machine.says(&["doctor"])?, "No problems found: 1 claim, 1 volume, 1 pod, ")?;
    let stuck = claim("stuck").replace("spec:\n", "spec:\n  storageClassName: absent\n");
    machine.apply(&stuck)?;
    machine.event("PersistentVolumeClaim", "stuck", "ProvisioningFailed")?;
    let output = machine.command(&["doctor", "-o", "json"]).output()?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let found: Vec<_> =
        report["findings"].as_array().into_iter().flatten().map(|finding| &finding["trouble"]).collect();
    ensure!(found == ["class-missing"], "{report:#}");
    for what in ["sc/berth-local", "csidriver/local.berth.dev"] {
        says(&machine.says(&["explain", what])?, "No problems found")?;
    }
    machine.finish()
}
