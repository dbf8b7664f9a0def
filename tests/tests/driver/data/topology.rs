//! What is made on this machine is bound to it.

use anyhow::{Context, Result};
use berth_csi::v1;
use berth_e2e::{DiskType, Testbed};

use crate::data::DIR;

#[tokio::test(flavor = "multi_thread")]
async fn volumes_and_snapshots_are_where_their_node_is() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let node = bed.csi.node.clone().node_get_info(v1::NodeGetInfoRequest {}).await?.into_inner();
    let here = node.accessible_topology.context("the node is nowhere")?;

    let request = v1::CreateVolumeRequest {
        accessibility_requirements: Some(v1::TopologyRequirement {
            requisite: vec![here.clone()],
            preferred: vec![here.clone()],
        }),
        ..DIR.request("volume")
    };
    let volume = bed.csi.create_by(DIR, request).await?;
    let listed = bed.csi.volumes().await?;
    assert_eq!(listed[0].accessible_topology, std::slice::from_ref(&here));
    let snapshot = bed.csi.snapshot("snapshot", &volume.id).await?;
    assert_eq!(snapshot.accessible_topology, std::slice::from_ref(&here));
    assert_eq!(bed.csi.snapshots().await?[0].accessible_topology, [here]);

    let elsewhere = v1::Topology { segments: [("topology.berth.dev/node".into(), "another".into())].into() };
    let request = v1::CreateVolumeRequest {
        accessibility_requirements: Some(v1::TopologyRequirement {
            requisite: vec![elsewhere],
            preferred: vec![],
        }),
        ..DIR.request("elsewhere")
    };
    let status = bed.csi.create_by(DIR, request).await.err().context("made for another node")?;
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    bed.csi.delete_snapshot(&snapshot.snapshot_id).await?;
    crate::data::finish(bed, &[&volume]).await
}
