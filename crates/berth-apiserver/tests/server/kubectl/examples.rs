//! The manifests that the project shows: every one applies, and can be looked at and taken away.

use std::path::{Path, PathBuf};

use super::{Cluster, kubectls};

fn manifests() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let all = [directory.clone(), directory.join("nfs")];
    let entries = all.iter().flat_map(|directory| std::fs::read_dir(directory).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "yaml")).collect();
    found.sort();
    assert!(found.len() >= 14, "{found:?}");
    found
}

/// The definitions of the snapshot kinds, which `berth up` brings and a bare API server has not.
const SNAPSHOT_KINDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../berth-sidecars/src/snapshots");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_example_is_applied_shown_and_deleted() {
    for kubectl in kubectls() {
        for manifest in manifests() {
            let cluster = Cluster::start(&kubectl).await;
            if std::fs::read_to_string(&manifest).unwrap().contains("snapshot.storage.k8s.io/") {
                cluster.print(&format!("kubectl apply -f {SNAPSHOT_KINDS}")).await;
                cluster.print("kubectl wait --for=condition=Established crd --all --timeout=30s").await;
            }
            one(&cluster, &manifest).await;
        }
    }
}

async fn one(cluster: &Cluster, manifest: &Path) {
    let text = std::fs::read_to_string(manifest).unwrap();
    let kinds: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("kind: ")).map(str::trim).collect();
    let on = |verb: &str| format!("kubectl {verb} -f {}", manifest.display());
    let applied = cluster.print(&on("apply")).await;
    assert_eq!(applied.lines().filter(|line| line.ends_with(" created")).count(), kinds.len(), "{applied}");
    // kubectl takes what was added to a pod for a change, and sends a patch that changes nothing.
    let versions = on("get -o jsonpath='{..metadata.resourceVersion}'");
    let before = cluster.print(&versions).await;
    cluster.print(&on("apply")).await;
    assert_eq!(cluster.print(&versions).await, before);
    assert_eq!(cluster.print(&on("diff")).await, "");
    let wide = cluster.print(&on("get -o wide")).await;
    assert!(wide.contains("NAME") && !wide.contains("<unknown>"), "{wide}");
    let yaml = cluster.print(&on("get -o yaml")).await;
    let json: serde_json::Value = serde_json::from_str(&cluster.print(&on("get -o json")).await).unwrap();
    // One alone is not in a list.
    let objects = json["items"].as_array().cloned().unwrap_or_else(|| vec![json]);
    assert_eq!(objects.len(), kinds.len());
    for (kind, object) in kinds.iter().zip(&objects) {
        assert_eq!(object["kind"], *kind);
        assert!(yaml.contains(&format!("uid: {}", object["metadata"]["uid"].as_str().unwrap())));
    }
    let described = cluster.print(&on("describe")).await;
    assert_eq!(
        described.lines().filter(|line| line.starts_with("Name:")).count(),
        kinds.len(),
        "{described}"
    );
    let dumped =
        cluster.print(&format!("{} > dump.json && kubectl apply -f dump.json", on("get -o json"))).await;
    assert_eq!(dumped.lines().count(), kinds.len(), "{dumped}");
    // With its namespace, an object may be gone before its turn.
    cluster.print(&on("delete --wait=false --ignore-not-found")).await;
    let left = "get --ignore-not-found -o jsonpath='{..metadata.deletionTimestamp}{\"\\n\"}{..metadata.uid}'";
    let left = cluster.print(&on(left)).await;
    let mut lines = left.lines().map(|line| line.split_whitespace().count());
    // What protects volumes and claims in use is a controller's to take away.
    assert_eq!(lines.next(), lines.next(), "not everything is gone or on its way: {left}");
}
