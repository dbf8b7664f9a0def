//! Volumes come to be where their pods can use them.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::cluster::Cluster;
use crate::hollow::Hollow;
use crate::kinds::{CLAIM, CLASS, text};

const KEY: &str = "topology.berth.dev/node";

#[tokio::test]
async fn a_class_that_allows_one_place_brings_pod_and_volume_there() -> Result<()> {
    let cluster = Cluster::start("place", json!({})).await?;
    let (here, there) = (format!("{}-a", cluster.name), format!("{}-b", cluster.name));
    let places = json!([{"matchLabelExpressions": [{"key": KEY, "values": [here]}]}]);
    let class = json!({"volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": places});
    cluster.class(&here, class).await?;
    let controller = cluster.controller(&here, &["--kind=dir"]).await?;
    // A second node, with a driver of its own and no controller; a pod would rather be there.
    let other = cluster.local("driver", &there, &["--attach", "--kind=dir"]).await?;
    let (allowed, preferred) =
        (Hollow::start(&cluster, &here).await?, Hollow::start(&cluster, &there).await?);
    cluster.claim("data", "16Mi", json!({"storageClassName": here})).await?;
    cluster.event("data", "WaitForFirstConsumer").await?;
    ensure!(cluster.csi(&here)?.volumes().await?.is_empty(), "nobody asked for a volume yet");

    let expressions = json!([{"key": KEY, "operator": "In", "values": [there]}]);
    let weighted = json!([{"weight": 100, "preference": {"matchExpressions": expressions}}]);
    let wish = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}});
    cluster.pod("one", "data", json!({"affinity": wish})).await?;
    let used = allowed.run("one").await?;

    let claim = cluster.get(CLAIM, "data").await?;
    let selected = &claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"];
    ensure!(*selected == json!(here), "{claim:#}");
    let volume = cluster.volume_of("data").await?;
    let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let expected = json!([{"matchExpressions": [{"key": KEY, "operator": "In", "values": [here]}]}]);
    ensure!(*terms == expected, "{terms:#}");
    ensure!(text(&volume, "/spec/csi/driver") == cluster.driver, "{volume:#}");

    allowed.stop(used).await?;
    cluster.delete_claim("data").await?;
    allowed.leave().await?;
    preferred.leave().await?;
    cluster.delete(CLASS, &here).await?;
    cluster.finish(vec![(&here, controller), (&there, other)]).await
}
