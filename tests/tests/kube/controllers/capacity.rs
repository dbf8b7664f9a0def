//! The scheduler learns how much room there is on each node.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::hollow::Hollow;
use crate::kinds::{CAPACITY, CLAIM, POD, text};

const KEY: &str = "topology.berth.dev/node";

/// The object that tells of a node.
fn of<'a>(all: &'a [Value], node: &str) -> Option<&'a Value> {
    all.iter().find(|reported| reported["nodeTopology"]["matchLabels"][KEY] == node)
}

/// The room that an object tells of, if it can tell.
fn room(reported: &Value) -> Option<u64> {
    let text = reported["capacity"].as_str()?;
    let (digits, factor) = match text.strip_suffix("Ki") {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix("Mi").map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    digits.parse::<u64>().ok().map(|number| number * factor)
}

/// A disk of its own for a node's data.
fn small_disk(place: &Path) -> Result<()> {
    std::fs::create_dir(place)?;
    machine::run("mount", &["-t", "tmpfs", "-o", "size=64m", "tmpfs", &place.display().to_string()]).map(drop)
}

#[tokio::test]
async fn pods_go_where_there_is_room_for_their_volumes() -> Result<()> {
    let class = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let cluster = Cluster::start_per_node("room", class).await?;
    let names = [format!("{}-small", cluster.name), format!("{}-large", cluster.name)];
    let disk = cluster.path(&format!("{}.data", names[0]));
    small_disk(&disk)?;
    let small = cluster.node(&names[0], &cluster.path("a"), &["--kind=dir"]).await?;
    let large = cluster.node(&names[1], &cluster.path("b"), &["--kind=dir"]).await?;
    let (a, b) = (Hollow::start(&cluster, &names[0]).await?, Hollow::start(&cluster, &names[1]).await?);
    let both = |all: &[Value]| {
        of(all, &names[0]).and_then(room).is_some() && of(all, &names[1]).and_then(room).is_some()
    };
    let reported = cluster.until_all("both nodes tell their room", CAPACITY, both).await?;
    ensure!(reported.len() == 2, "{reported:#?}");
    let before = of(&reported, &names[0]).and_then(room).context("the small node tells nothing")?;
    ensure!(before > 32 << 20 && before <= 64 << 20, "a disk of 64 MiB has room for {before} bytes");
    ensure!(of(&reported, &names[1]).and_then(room).is_some_and(|room| room > 1 << 30), "{reported:#?}");

    // Both would rather be on the small node.
    let expressions = json!([{"key": KEY, "operator": "In", "values": [names[0]]}]);
    let weighted = json!([{"weight": 100, "preference": {"matchExpressions": expressions}}]);
    let wish =
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}});
    cluster.claim("fits", "32Mi", json!({})).await?;
    cluster.pod("fits", "fits", wish.clone()).await?;
    let fits = a.run("fits").await?;
    let less = |all: &[Value]| of(all, &names[0]).and_then(room).is_some_and(|now| now + (30 << 20) < before);
    cluster.until_all("what is promised is no room", CAPACITY, less).await?;
    cluster.claim("wide", "128Mi", json!({})).await?;
    cluster.pod("wide", "wide", wish).await?;
    let wide = b.run("wide").await?;

    // There is no room for this one anywhere, and it is said.
    cluster.claim("huge", "1Pi", json!({})).await?;
    cluster.pod("huge", "huge", json!({})).await?;
    let said = cluster.event("huge", "FailedScheduling").await?;
    ensure!(said.contains("did not have enough free storage"), "{said}");
    let claim = cluster.get(CLAIM, "huge").await?;
    ensure!(text(&claim, "/status/phase") == "Pending", "{claim:#}");

    a.stop(fits).await?;
    b.stop(wide).await?;
    cluster.delete(POD, "huge").await?;
    for name in ["fits", "wide"] {
        cluster.delete_claim(name).await?;
    }
    cluster.delete(CLAIM, "huge").await?;
    cluster.gone(CLAIM, "huge").await?;
    // But for what the driver's own records take, ahead of their need.
    let again = |all: &[Value]| of(all, &names[0]).and_then(room).is_some_and(|now| now + (4 << 20) > before);
    cluster.until_all("what was promised is room again", CAPACITY, again).await?;
    a.leave().await?;
    b.leave().await?;
    finish(&cluster, &disk, [(&names[0], small), (&names[1], large)]).await
}

/// Stops the nodes' programs before the disk goes that one of them uses.
async fn finish(
    cluster: &Cluster,
    disk: &Path,
    programs: [(&String, berth_e2e::program::Program); 2],
) -> Result<()> {
    for (node, program) in programs {
        ensure!(cluster.csi(node)?.volumes().await?.is_empty(), "{node} still has volumes");
        program.stop().await?;
    }
    machine::run("umount", &[&disk.display().to_string()])?;
    cluster.finish(Vec::new()).await
}
