//! The page, `berth top`, `berth doctor` and `berth explain` on real Kubernetes, with the objects of a driver that is not Berth's, and
//! with no more rights than `deploy/ui/rbac.yaml` gives.

use std::path::PathBuf;
use std::process::{Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::browser::Browser;
use berth_e2e::{driver, machine};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::kinds::{ATTACHMENT, CLAIM, NODE, SERVICE_ACCOUNT, VOLUME};

/// A kubeconfig of a service account that has the role of viewers and nothing else.
async fn viewer(cluster: &Cluster) -> Result<PathBuf> {
    let role = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/ui/rbac.yaml");
    cluster.kubectl(&["apply", "-f", role])?;
    cluster.create(SERVICE_ACCOUNT, json!({"metadata": {"name": "viewer"}})).await?;
    let account = format!("--serviceaccount={}:viewer", cluster.name);
    cluster.kubectl(&["create", "clusterrolebinding", &cluster.name, "--clusterrole=berth-ui", &account])?;
    let token = cluster.kubectl(&["create", "token", "viewer"])?;
    let own: Value = serde_json::from_str(&cluster.kubectl(&["config", "view", "--raw", "-o", "json"])?)?;
    let server = &own["clusters"][0]["cluster"];
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "viewer",
        "clusters": [{"name": "real", "cluster": server}],
        "contexts": [{"name": "viewer", "context": {"cluster": "real", "user": "viewer"}}],
        "users": [{"name": "viewer", "user": {"token": token.trim()}}],
    });
    let path = cluster.path("viewer.kubeconfig");
    std::fs::write(&path, config.to_string())?;
    Ok(path)
}

/// Storage of somebody else: a volume that is bound, a claim that nobody provisions, one whose class is missing, and an attachment of
/// a node that is gone.
async fn create_objects(cluster: &Cluster) -> Result<()> {
    cluster
        .create(
            VOLUME,
            json!({"metadata": {"name": cluster.name}, "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": cluster.name,
                "persistentVolumeReclaimPolicy": "Retain",
                "csi": {"driver": cluster.driver, "volumeHandle": "theirs"},
                "claimRef": {"namespace": cluster.name, "name": "data"},
            }}),
        )
        .await?;
    cluster.claim("data", "1Gi", json!({"volumeName": cluster.name})).await?;
    cluster.claim("waiting", "1Gi", json!({})).await?;
    cluster.claim("stuck", "1Gi", json!({"storageClassName": "absent"})).await?;
    cluster.volume_of("data").await?;
    let source = json!({"persistentVolumeName": cluster.name});
    let spec = json!({"attacher": cluster.driver, "nodeName": "gone", "source": source});
    cluster.create(ATTACHMENT, json!({"metadata": {"name": cluster.name}, "spec": spec})).await?;
    cluster.event("waiting", "ExternalProvisioning").await.map(drop)
}

fn berth(cluster: &Cluster, kubeconfig: &str, args: &[&str]) -> Result<Output> {
    let mut command = machine::command(driver::binary()?);
    command.args(args).arg(format!("--kubeconfig={kubeconfig}")).env_remove("KUBECONFIG");
    command.env("BERTH_DATA_DIR", cluster.path("none")).stdin(Stdio::null());
    command.output().with_context(|| format!("run berth {args:?}"))
}

/// The findings about objects of this test, by object.
fn findings(output: &Output, cluster: &Cluster) -> Result<Vec<(String, String)>> {
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    ensure!(report["unreadable"] == json!([]), "the role is not enough: {:#}", report["unreadable"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = report["findings"].as_array().context("findings")?.iter().filter_map(|finding| {
        let object = &finding["object"];
        let ours =
            object["namespace"] == json!(cluster.name) || text(&object["name"]).contains(&cluster.name);
        ours.then(|| (text(&object["name"]), text(&finding["trouble"])))
    });
    Ok(all.collect())
}

#[tokio::test]
async fn storage_of_somebody_else_is_examined_with_the_role_of_viewers() -> Result<()> {
    let cluster = Cluster::start("see", json!({})).await?;
    cluster.with_snapshots().await?;
    create_objects(&cluster).await?;
    let path = viewer(&cluster).await?;
    let kubeconfig = path.display().to_string();

    let output = berth(&cluster, &kubeconfig, &["doctor", "-o", "json", "--patience=0s"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let found = findings(&output, &cluster)?;
    for (name, trouble) in [
        ("stuck", "class-missing"),
        ("waiting", "no-provisioner"),
        (cluster.name.as_str(), "attachment-node-gone"),
    ] {
        let wanted = (name.to_owned(), trouble.to_owned());
        ensure!(found.contains(&wanted), "{wanted:?} is not among {found:?}");
    }
    ensure!(!found.iter().any(|(name, _)| name == "data"), "data is well: {found:?}");
    // The volume of `data` is attached to a node that is gone, which its claim does not show.
    for (what, reason) in [("pvc/stuck", "not found"), ("pvc/data", "the node gone does not exist any more")]
    {
        let output = berth(&cluster, &kubeconfig, &["explain", what, "-n", &cluster.name])?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(3) && said.contains(reason), "{what}: {output:?}");
    }
    let output = berth(&cluster, &kubeconfig, &["top", "--once", "--filter", &cluster.name])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success() && said.contains("No such class"), "{output:?}");
    ensure!(!said.contains("not read"), "{said}");

    let args = ["ui", "--listen=127.0.0.1:0", &format!("--kubeconfig={kubeconfig}")];
    let mut page = cluster.berth("ui", &args, &[])?;
    let link = page.says("http://").await?;
    let browser = Browser::start(1280, 800)?;
    browser.open(&link)?;
    let stuck = format!("{}/stuck", cluster.name);
    browser.shows(&stuck)?;
    browser.view(&format!("#/volume/{stuck}"))?;
    browser.shows("No such class")?;
    browser.view(&format!("#/volume/{}/data", cluster.name))?;
    browser.shows("only berth up on this machine keeps")?;
    browser.view("#/nodes")?;
    browser.shows(&cluster.driver)?;
    // What happens is shown by itself.
    browser.view("#/volumes")?;
    cluster.claim("later", "1Gi", json!({})).await?;
    browser.shows("later")?;
    ensure!(browser.complaints()?.is_empty(), "{:?}", browser.complaints()?);
    page.stop().await?;

    for name in ["later", "stuck", "waiting", "data"] {
        cluster.delete(CLAIM, name).await?;
    }
    cluster.delete(ATTACHMENT, &cluster.name).await?;
    cluster.delete(VOLUME, &cluster.name).await?;
    cluster.kubectl(&["delete", "clusterrolebinding", &cluster.name])?;
    ensure!(cluster.list(NODE).await?.iter().all(|node| node["metadata"]["name"] != "gone"));
    cluster.finish(Vec::new()).await
}
