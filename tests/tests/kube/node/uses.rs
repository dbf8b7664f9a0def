//! The ways in which a pod can use a volume, all at once.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::deployment::{Deployment, Shape};
use super::{exec, ready};
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, POD, VOLUME, text};

#[tokio::test]
async fn a_pod_uses_volumes_in_every_way() -> Result<()> {
    let class = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let cluster = Cluster::start_per_node("uses", class).await?;
    let deployment = Deployment::start(&cluster, Shape::PerNode).await?;
    cluster.claim("files", "16Mi", json!({})).await?;
    cluster.claim("raw", "16Mi", json!({"volumeMode": "Block"})).await?;
    cluster.pod("one", "files", pod(&cluster)).await?;
    ready(&cluster, "one").await?;
    cluster.step("the pod runs");

    // A user who is not root writes because the volume belongs to the pod's group.
    ensure!(exec(&cluster, "one", "id -u; echo mine > /data/file && stat -c %g /data")? == "1000\n2000\n");
    ensure!(exec(&cluster, "one", "echo part > /part/file && cat /data/below/file")? == "part\n");
    let refused = exec(&cluster, "one", "(echo x > /look/file) 2>&1 || true")?;
    ensure!(refused.contains("Read-only file system"), "{refused}");
    ensure!(exec(&cluster, "one", "cat /look/file")? == "mine\n");
    let device = "echo raw | dd of=/dev/raw bs=512 count=1 conv=sync,notrunc && head -c 3 /dev/raw";
    ensure!(cluster.kubectl(&["exec", "one", "-c", "device", "--", "sh", "-c", device])? == "raw");
    ensure!(exec(&cluster, "one", "echo a > /inline/file && cat /inline/file")? == "a\n");
    ensure!(exec(&cluster, "one", "echo b > /own/file && cat /own/file")? == "b\n");
    let own = cluster.volume_of("one-own").await?;
    ensure!(text(&own, "/spec/claimRef/name") == "one-own", "{own:#}");
    check_figures(&cluster).await?;

    // With the pod goes what is its own; what is not stays.
    cluster.delete(POD, "one").await?;
    cluster.gone(POD, "one").await?;
    cluster.step("the pod is gone");
    cluster.gone(CLAIM, "one-own").await?;
    cluster.gone(VOLUME, text(&own, "/metadata/name")).await?;
    ensure!(cluster.find(CLAIM, "files").await?.is_some());
    for claim in ["files", "raw"] {
        cluster.delete_claim(claim).await?;
    }
    deployment.finish().await?;
    cluster.finish(Vec::new()).await
}

/// A pod of a user who is not root, with files, a part of them, the same read-only, a device, an inline volume and a claim
/// of its own.
fn pod(cluster: &Cluster) -> Value {
    let own = json!({"spec": {
        "storageClassName": cluster.name, "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "16Mi"}},
    }});
    let inline = json!({
        "driver": cluster.driver, "volumeAttributes": {"kind": "dir", "size": "8Mi"},
    });
    json!({
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
        "containers": [{
            "name": "main", "image": "docker.io/library/busybox:latest", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "exec sleep 1000000"],
            "volumeMounts": [
                {"name": "files", "mountPath": "/data"},
                {"name": "files", "mountPath": "/part", "subPath": "below"},
                {"name": "files", "mountPath": "/look", "readOnly": true},
                {"name": "inline", "mountPath": "/inline"},
                {"name": "own", "mountPath": "/own"},
            ],
        }, {
            "name": "device", "image": "docker.io/library/busybox:latest", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "exec sleep 1000000"],
            // A device is root's.
            "securityContext": {"runAsUser": 0},
            "volumeDevices": [{"name": "raw", "devicePath": "/dev/raw"}],
        }],
        "volumes": [
            {"name": "files", "persistentVolumeClaim": {"claimName": "files"}},
            {"name": "raw", "persistentVolumeClaim": {"claimName": "raw"}},
            {"name": "inline", "csi": inline},
            {"name": "own", "ephemeral": {"volumeClaimTemplate": own}},
        ],
    })
}

/// Waits until the kubelet tells how full the volume is, as the driver said.
async fn check_figures(cluster: &Cluster) -> Result<()> {
    let path = "/api/v1/nodes/testbed/proxy/stats/summary";
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(90);
    loop {
        let summary: Value = serde_json::from_str(&cluster.kubectl(&["get", "--raw", path])?)?;
        let pods = summary["pods"].as_array().cloned().unwrap_or_default();
        let of_it = |pod: &&Value| text(pod, "/podRef/namespace") == cluster.name;
        let volumes = pods.iter().find(of_it).map(|pod| pod["volume"].clone()).unwrap_or_default();
        let volumes = volumes.as_array().cloned().unwrap_or_default();
        let files = volumes.iter().find(|volume| text(volume, "/pvcRef/name") == "files");
        if let Some(capacity) = files.and_then(|files| files["capacityBytes"].as_u64()) {
            ensure!(capacity > 8 << 20 && capacity <= 16 << 20, "16 MiB are {capacity} bytes");
            return Ok(());
        }
        ensure!(std::time::Instant::now() < deadline, "the kubelet tells no figures: {summary:#}");
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
}
