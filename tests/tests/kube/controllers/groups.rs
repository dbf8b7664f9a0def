//! Snapshots of several claims at one moment.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::snapshots::is_ready;
use crate::cluster::Cluster;
use crate::hollow::{Hollow, read, write};
use crate::kinds::{GROUP_SNAPSHOT, GROUP_SNAPSHOT_CONTENT, SNAPSHOT, SNAPSHOT_CONTENT, text};

#[tokio::test]
async fn a_group_is_taken_restored_and_deleted_with_its_members() -> Result<()> {
    let cluster = Cluster::start("group", json!({})).await?;
    cluster.with_snapshots().await?;
    let controller = cluster.controller(&cluster.name, &["--kind=image"]).await?;
    let node = Hollow::start(&cluster, &cluster.name).await?;
    let mut used = Vec::new();
    for name in ["first", "second"] {
        cluster.claim(name, "16Mi", json!({})).await?;
        cluster.pod(name, name, json!({})).await?;
        let volume = node.run(name).await?;
        write(&volume.target, "file", name)?;
        used.push(volume);
    }

    let selector = json!({"matchLabels": {"test": cluster.name}});
    let spec = json!({"volumeGroupSnapshotClassName": cluster.name, "source": {"selector": selector}});
    cluster.create(GROUP_SNAPSHOT, json!({"metadata": {"name": "both"}, "spec": spec})).await?;
    let group = cluster.until(GROUP_SNAPSHOT, "both", "gets ready", is_ready).await?;
    let content = text(&group, "/status/boundVolumeGroupSnapshotContentName");
    let all_ready = |all: &[Value]| all.len() == 2 && all.iter().all(is_ready);
    let members = cluster.until_all("both members are ready", SNAPSHOT, all_ready).await?;

    let of_second = |taken: &&Value| text(taken, "/spec/source/persistentVolumeClaimName") == "second";
    let member = members.iter().find(of_second).context("no member is of the second claim")?;
    let name = text(member, "/metadata/name");
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name});
    cluster.claim("restored", "16Mi", json!({"dataSource": source})).await?;
    cluster.pod("reader", "restored", json!({})).await?;
    let restored = node.run("reader").await?;
    ensure!(read(&restored.target, "file")? == "second");

    used.push(restored);
    for volume in used {
        node.stop(volume).await?;
    }
    cluster.delete(GROUP_SNAPSHOT, "both").await?;
    cluster.gone(GROUP_SNAPSHOT, "both").await?;
    cluster.gone(GROUP_SNAPSHOT_CONTENT, content).await?;
    cluster.until_all("the members are gone", SNAPSHOT, <[Value]>::is_empty).await?;
    let ours = |content: &Value| text(content, "/spec/driver") == cluster.driver;
    cluster.until_all("their contents are gone", SNAPSHOT_CONTENT, |all| !all.iter().any(ours)).await?;
    for name in ["first", "second", "restored"] {
        cluster.delete_claim(name).await?;
    }
    node.leave().await?;
    cluster.finish(vec![(&cluster.name, controller)]).await
}
