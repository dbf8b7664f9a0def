//! Walks one volume of each kind through its life on this machine, and says how long each step took.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use berth_e2e::{Access, DiskType, Expected, Kind, Shape, Testbed, content, csi::from_snapshot};

#[tokio::main]
async fn main() -> Result<()> {
    walk(DiskType::Btrfs, Shape::new(Kind::Btrfs, Access::Mount(""), 256), "a btrfs subvolume").await?;
    walk(DiskType::Xfs, Shape::new(Kind::Image, Access::Mount("xfs"), 512), "an image with XFS, on XFS")
        .await?;
    walk(DiskType::Ext4, Shape::new(Kind::Image, Access::Mount("ext4"), 256), "an image with ext4, on ext4")
        .await?;
    walk(DiskType::Ext4, Shape::new(Kind::Dir, Access::Mount(""), 256), "a directory on ext4").await
}

async fn walk(disk: DiskType, shape: Shape, title: &str) -> Result<()> {
    println!("\n{title}");
    let data = content::bytes(1, 16 << 20);
    let mut clock = Instant::now();
    let bed = Testbed::start(disk, &[]).await?;
    step(&mut clock, "disk made, driver started and ready");

    let volume = bed.csi.create("demo", shape).await?;
    step(&mut clock, format!("CreateVolume: {} of {} MiB", volume.id, volume.bytes >> 20));
    let mounted = berth_e2e::Mounted::paths(&volume.id, bed.dir())?;
    bed.csi.stage(&volume, &mounted.staging).await?;
    step(&mut clock, "NodeStageVolume");
    bed.csi.publish(&volume, &mounted.staging, &mounted.target).await?;
    step(&mut clock, format!("NodePublishVolume at {}", mounted.target.display()));
    content::write(&mounted.target.join("file"), &data)?;
    step(&mut clock, "wrote 16 MiB and made them durable");

    let snapshot = bed.csi.snapshot("demo", &volume.id).await?.snapshot_id;
    step(&mut clock, format!("CreateSnapshot: {snapshot}"));
    content::write(&mounted.target.join("file"), b"overwritten")?;
    step(&mut clock, "overwrote the file");
    let bytes = shape.bytes * 2;
    if bed.csi.expand(&volume, bytes).await?.node_expansion_required {
        bed.csi.node_expand(&volume, &mounted, bytes).await?;
    }
    step(&mut clock, format!("expanded to {} MiB", bytes >> 20));

    let restored = bed.csi.create_from("restored", shape, from_snapshot(&snapshot)).await?;
    step(&mut clock, format!("CreateVolume from the snapshot: {}", restored.id));
    let in_restored = bed.mount(&restored).await?;
    ensure!(std::fs::read(in_restored.target.join("file"))? == data, "the restored file has other bytes");
    step(&mut clock, "staged, published and compared it: the bytes of before");

    for mounted in [&mounted, &in_restored] {
        bed.csi.unmount(mounted).await?;
    }
    step(&mut clock, "unpublished and unstaged both");
    bed.csi.delete_snapshot(&snapshot).await?;
    bed.csi.delete(&volume.id).await?;
    bed.csi.delete(&restored.id).await?;
    step(&mut clock, "deleted all three");
    bed.check_leftovers(&Expected::default()).await?;
    step(&mut clock, "nothing is left on disk, mounted or attached");
    bed.finish().await
}

fn step(clock: &mut Instant, what: impl Display) {
    let took: Duration = clock.elapsed();
    println!("  {:9.1} ms  {what}", took.as_secs_f64() * 1000.0);
    *clock = Instant::now();
}
