//! Volumes outlive the driver and the machine's uptime.

use std::fs;

use anyhow::{Context, Result, ensure};
use berth_e2e::{Access, DiskType, Expected, Kind, Shape, Testbed, content, csi::from_snapshot};

use crate::data::MATRIX;

const LENGTH: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_leaves_volumes_snapshots_and_data() -> Result<()> {
    for (disk, shapes) in MATRIX {
        let mut bed = Testbed::start(*disk, &[]).await?;
        let mut volumes = Vec::new();
        for (number, shape) in shapes.iter().enumerate() {
            let volume = bed.csi.create(&format!("volume-{number}"), *shape).await?;
            let mounted = bed.mount(&volume).await?;
            content::write(&mounted.target.join("file"), &content::bytes(1, LENGTH))?;
            let snapshot = bed.csi.snapshot(&format!("snapshot-{number}"), &volume.id).await?;
            content::write(&mounted.target.join("file"), &content::bytes(2, LENGTH))?;
            volumes.push((volume, snapshot.snapshot_id));
        }
        bed.reboot().await?;

        for (volume, snapshot) in &volumes {
            let what = || format!("{:?} on {}", volume.shape, disk.as_str());
            let mounted = bed.mount(volume).await.with_context(what)?;
            content::check(&mounted.target.join("file"), 2, LENGTH).with_context(what)?;
            let restored = bed.csi.create_from("restored", volume.shape, from_snapshot(snapshot)).await?;
            let in_restored = bed.mount(&restored).await.with_context(what)?;
            content::check(&in_restored.target.join("file"), 1, LENGTH).with_context(what)?;
            for mounted in [&mounted, &in_restored] {
                bed.csi.unmount(mounted).await?;
            }
            bed.csi.delete(&restored.id).await?;
            bed.csi.delete_snapshot(snapshot).await?;
            bed.csi.delete(&volume.id).await?;
        }
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_leaves_raw_volumes() -> Result<()> {
    let mut bed = Testbed::start(DiskType::Xfs, &[]).await?;
    let volume = bed.csi.create("raw", Shape::new(Kind::Image, Access::Block, 64)).await?;
    let mounted = bed.mount(&volume).await?;
    content::write_at(&mounted.target, &content::bytes(1, LENGTH), 1 << 20)?;
    bed.reboot().await?;
    let mounted = bed.mount(&volume).await?;
    ensure!(content::read_at(&mounted.target, LENGTH, 1 << 20)? == content::bytes(1, LENGTH), "other bytes");
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_mounted_can_be_unmounted_by_the_next_process() -> Result<()> {
    for (disk, shapes) in MATRIX {
        let mut bed = Testbed::start(*disk, &[]).await?;
        for shape in *shapes {
            let volume = bed.csi.create("volume", *shape).await?;
            let mounted = bed.mount(&volume).await?;
            let open = fs::File::create(mounted.target.join("open"))?;
            bed.kill_and_restart().await?;
            std::io::Write::write_all(&mut &open, b"a workload does not notice")?;
            open.sync_all()?;
            drop(open);
            bed.csi.publish(&volume, &mounted.staging, &mounted.target).await.context("publish again")?;
            bed.csi.unmount(&mounted).await?;
            bed.csi.delete(&volume.id).await?;
            bed.check_leftovers(&Expected::default()).await?;
        }
        bed.finish().await?;
    }
    Ok(())
}
