//! What happens to people's bytes: real volumes of every kind on real disks, written, copied, grown and read back.

use anyhow::Result;
use berth_csi::v1;
use berth_e2e::{Access, DiskType, Kind, Shape, Testbed, Volume};

mod blocks;
mod capacity;
mod groups;
mod publish;
mod reboot;
mod snapshots;
mod topology;

const BTRFS: Shape = Shape::new(Kind::Btrfs, Access::Mount(""), 64);
const DIR: Shape = Shape::new(Kind::Dir, Access::Mount(""), 64);
const IMAGE_EXT4: Shape = Shape::new(Kind::Image, Access::Mount("ext4"), 64);
const IMAGE_XFS: Shape = Shape::new(Kind::Image, Access::Mount("xfs"), 320);
const IMAGE_BTRFS: Shape = Shape::new(Kind::Image, Access::Mount("btrfs"), 160);

/// Every kind of mounted volume, by the disk it is tried on.
const MATRIX: &[(DiskType, &[Shape])] = &[
    (DiskType::Btrfs, &[BTRFS, IMAGE_EXT4]),
    (DiskType::Xfs, &[IMAGE_EXT4, IMAGE_XFS, IMAGE_BTRFS, DIR]),
    (DiskType::Ext4, &[IMAGE_EXT4, DIR]),
];

/// The bytes of a published volume as the driver tells them: total, used, available.
async fn bytes_used(bed: &Testbed, mounted: &berth_e2e::Mounted) -> Result<v1::VolumeUsage> {
    let usage = bed.csi.stats(mounted).await?;
    let bytes = usage.into_iter().find(|usage| usage.unit() == v1::volume_usage::Unit::Bytes);
    bytes.ok_or_else(|| anyhow::anyhow!("the statistics have no bytes"))
}

/// Deletes volumes and checks that nothing is left of anything.
async fn finish(bed: Testbed, volumes: &[&Volume]) -> Result<()> {
    for volume in volumes {
        bed.csi.delete(&volume.id).await?;
    }
    bed.finish().await
}
