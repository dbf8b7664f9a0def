//! What a workload sees at its target path.

use std::fs;

use anyhow::{Context, Result, ensure};
use berth_csi::v1::{self, volume_capability};
use berth_e2e::{Csi, DiskType, Mounted, Shape, Testbed, content, csi::text};

use crate::data::{DIR, IMAGE_EXT4, MATRIX};

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_publication_refuses_writes_and_shows_the_data() -> Result<()> {
    for (disk, shapes) in MATRIX {
        let bed = Testbed::start(*disk, &[]).await?;
        for shape in *shapes {
            read_only(&bed, *shape).await.with_context(|| format!("{shape:?} on {}", disk.as_str()))?;
        }
        bed.finish().await?;
    }
    Ok(())
}

async fn read_only(bed: &Testbed, shape: Shape) -> Result<()> {
    let volume = bed.csi.create("volume", shape).await?;
    let mounted = bed.mount(&volume).await?;
    content::write(&mounted.target.join("file"), b"seen")?;
    bed.csi.unpublish(&volume.id, &mounted.target).await?;
    ensure!(!mounted.target.exists(), "the target path is still there");

    let request = Csi::publish_request(&volume, &mounted.staging, &mounted.target);
    bed.csi
        .node
        .clone()
        .node_publish_volume(v1::NodePublishVolumeRequest { readonly: true, ..request })
        .await?;
    assert_eq!(fs::read(mounted.target.join("file"))?, b"seen");
    let errno = fs::write(mounted.target.join("file"), b"changed").map_err(|error| error.raw_os_error());
    assert_eq!(errno, Err(Some(rustix::io::Errno::ROFS.raw_os_error())));
    let errno = fs::create_dir(mounted.target.join("dir")).map_err(|error| error.raw_os_error());
    assert_eq!(errno, Err(Some(rustix::io::Errno::ROFS.raw_os_error())));
    bed.csi.unmount(&mounted).await?;
    Ok(bed.csi.delete(&volume.id).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_read_only_publication_cannot_be_written() -> Result<()> {
    let bed = Testbed::start(DiskType::Xfs, &[]).await?;
    let shape = Shape { access: berth_e2e::Access::Block, ..IMAGE_EXT4 };
    let volume = bed.csi.create("volume", shape).await?;
    let mounted = Mounted::paths(&volume.id, bed.dir())?;
    bed.csi.stage(&volume, &mounted.staging).await?;
    let request = Csi::publish_request(&volume, &mounted.staging, &mounted.target);
    bed.csi
        .node
        .clone()
        .node_publish_volume(v1::NodePublishVolumeRequest { readonly: true, ..request })
        .await?;
    content::read_at(&mounted.target, 4096, 0).context("read the device")?;
    ensure!(content::write_at(&mounted.target, &[1; 4096], 0).is_err(), "a read-only device took a write");
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_group_is_refused_because_the_kubelet_applies_it() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let volume = bed.csi.create("volume", DIR).await?;
    let mounted = Mounted::paths(&volume.id, bed.dir())?;
    let mut capability = DIR.capability();
    if let Some(volume_capability::AccessType::Mount(mount)) = &mut capability.access_type {
        mount.volume_mount_group = "3456".into();
    }
    let stage = v1::NodeStageVolumeRequest {
        volume_id: volume.id.clone(),
        staging_target_path: text(&mounted.staging),
        volume_capability: Some(capability),
        volume_context: volume.context.clone(),
        ..Default::default()
    };
    let refused = bed.csi.node.clone().node_stage_volume(stage).await;
    ensure!(refused.is_err_and(|status| status.code() == tonic::Code::InvalidArgument));
    let asked = bed.csi.node.clone().node_get_capabilities(v1::NodeGetCapabilitiesRequest {}).await?;
    let announced = format!("{:?}", asked.into_inner().capabilities);
    ensure!(!announced.contains("VolumeMountGroup"), "{announced}");
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inline_volume_comes_with_its_publication_and_goes_with_it() -> Result<()> {
    for (disk, kind) in [(DiskType::Btrfs, "btrfs"), (DiskType::Xfs, "image"), (DiskType::Ext4, "dir")] {
        let mut bed = Testbed::start(disk, &["--kind", kind]).await?;
        let id = "csi-0123456789abcdef";
        let mounted = Mounted::paths(id, bed.dir())?;
        let mut request = v1::NodePublishVolumeRequest {
            volume_id: id.into(),
            target_path: text(&mounted.target),
            volume_capability: Some(
                Shape::new(berth_e2e::Kind::Dir, berth_e2e::Access::Mount(""), 0).capability(),
            ),
            ..Default::default()
        };
        request.volume_context.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
        bed.csi.node.clone().node_publish_volume(request.clone()).await?;
        content::write(&mounted.target.join("file"), b"here")?;
        bed.csi.node.clone().node_publish_volume(request).await.context("publish again")?;
        assert_eq!(fs::read(mounted.target.join("file"))?, b"here");
        assert_eq!(bed.entries("volumes")?.len(), 1);

        // It is the pod's, not the cluster's, and it survives the driver.
        bed.kill_and_restart().await?;
        assert_eq!(fs::read(mounted.target.join("file"))?, b"here");
        bed.csi.unpublish(id, &mounted.target).await?;
        bed.csi.unpublish(id, &mounted.target).await.context("unpublish again")?;
        ensure!(!mounted.target.exists(), "the target path is still there");
        bed.finish().await?;
    }
    Ok(())
}
