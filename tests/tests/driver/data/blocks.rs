//! Raw volumes, and which of their blocks hold data or changed.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use berth_csi::v1;
use berth_e2e::{Access, DiskType, Kind, Mounted, Shape, Testbed, Volume, content, csi::from_snapshot};

const BLOCK: u64 = 4096;
const RAW: Shape = Shape::new(Kind::Image, Access::Block, 64);
/// Scattered over the volume, with neighbours, the first and the last block.
const FIRST: &[u64] = &[0, 7, 8, 9, 4000, 16383];
const SECOND: &[u64] = &[8, 100, 16383];

fn seed(block: u64) -> u64 {
    block + 1
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_blocks_are_kept_and_changes_are_told_exactly() -> Result<()> {
    for disk in [DiskType::Xfs, DiskType::Ext4, DiskType::Btrfs] {
        let bed = Testbed::start(disk, &[]).await?;
        let volume = bed.csi.create("raw", RAW).await?;
        let mounted = bed.mount(&volume).await?;
        for block in FIRST {
            content::write_at(&mounted.target, &content::bytes(seed(*block), 4096), block * BLOCK)?;
        }
        let base = snapshot(&bed, "base", &volume, disk).await?;
        let mounted = bed.mount(&volume).await?;
        for block in SECOND {
            content::write_at(&mounted.target, &content::bytes(seed(*block) + 77, 4096), block * BLOCK)?;
        }
        let target = snapshot(&bed, "target", &volume, disk).await?;
        bed.csi.unmount(&mounted).await?;

        let on = disk.as_str();
        assert_eq!(allocated(&bed, &base, 0, 0).await?, set(FIRST), "on {on}");
        let all = set(FIRST).union(&set(SECOND)).copied().collect();
        assert_eq!(allocated(&bed, &target, 0, 0).await?, all, "on {on}");
        assert_eq!(changed(&bed, &base, &target, 0, 0).await?, set(SECOND), "on {on}");
        assert_eq!(changed(&bed, &base, &base, 0, 0).await?, set(&[]), "on {on}");
        // Resuming in the middle, in messages of one entry.
        assert_eq!(allocated(&bed, &base, 9 * BLOCK, 1).await?, set(&[9, 4000, 16383]), "on {on}");
        assert_eq!(changed(&bed, &base, &target, 100 * BLOCK, 1).await?, set(&[100, 16383]), "on {on}");

        let restored = bed.csi.create_from("restored", RAW, from_snapshot(&base)).await?;
        let mounted = bed.mount(&restored).await?;
        for block in FIRST {
            let found = content::read_at(&mounted.target, 4096, block * BLOCK)?;
            ensure!(found == content::bytes(seed(*block), 4096), "block {block} has other bytes, on {on}");
        }
        ensure!(
            content::read_at(&mounted.target, 4096, 100 * BLOCK)? == [0; 4096],
            "block 100 came too late, on {on}"
        );
        bed.csi.unmount(&mounted).await?;
        for snapshot in [&base, &target] {
            bed.csi.delete_snapshot(snapshot).await?;
        }
        crate::data::finish(bed, &[&volume, &restored]).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_volume_grows_on_its_node() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let volume = bed.csi.create("raw", RAW).await?;
    let mounted = bed.mount(&volume).await?;
    let beyond = u64::try_from(RAW.bytes)?;
    ensure!(content::write_at(&mounted.target, &[1; 4096], beyond).is_err(), "written beyond the end");
    let answer = bed.csi.expand(&volume, RAW.bytes * 2).await?;
    if answer.node_expansion_required {
        bed.csi.node_expand(&volume, &mounted, RAW.bytes * 2).await?;
    }
    content::write_at(&mounted.target, &content::bytes(1, 4096), beyond)?;
    ensure!(
        content::read_at(&mounted.target, 4096, beyond)? == content::bytes(1, 4096),
        "other bytes came back"
    );
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

/// Takes a snapshot of a published raw volume. Without reflinks a copy takes its time, and nothing can stop the
/// writers of a raw device meanwhile: the driver says so, and the volume is unpublished first.
async fn snapshot(bed: &Testbed, name: &str, volume: &Volume, disk: DiskType) -> Result<String> {
    let live = bed.csi.snapshot(name, &volume.id).await;
    if disk != DiskType::Ext4 {
        return Ok(live?.snapshot_id);
    }
    let status = live.err().context("a live copy without reflinks")?;
    ensure!(status.code() == tonic::Code::FailedPrecondition, "{status}");
    bed.csi.unmount(&Mounted::paths(&volume.id, bed.dir())?).await?;
    Ok(bed.csi.snapshot(name, &volume.id).await?.snapshot_id)
}

fn set(blocks: &[u64]) -> BTreeSet<u64> {
    blocks.iter().copied().collect()
}

async fn allocated(bed: &Testbed, snapshot: &str, from: u64, max_results: i32) -> Result<BTreeSet<u64>> {
    let request = v1::GetMetadataAllocatedRequest {
        snapshot_id: snapshot.into(),
        starting_offset: i64::try_from(from)?,
        max_results,
        ..Default::default()
    };
    let mut stream = bed.csi.metadata.clone().get_metadata_allocated(request).await?.into_inner();
    let mut found = BTreeSet::new();
    while let Some(message) = stream.message().await? {
        ensure!(
            message.volume_capacity_bytes == RAW.bytes,
            "a capacity of {}",
            message.volume_capacity_bytes
        );
        add(&mut found, &message.block_metadata, max_results)?;
    }
    Ok(found)
}

async fn changed(
    bed: &Testbed,
    base: &str,
    target: &str,
    from: u64,
    max_results: i32,
) -> Result<BTreeSet<u64>> {
    let request = v1::GetMetadataDeltaRequest {
        base_snapshot_id: base.into(),
        target_snapshot_id: target.into(),
        starting_offset: i64::try_from(from)?,
        max_results,
        ..Default::default()
    };
    let mut stream = bed.csi.metadata.clone().get_metadata_delta(request).await?.into_inner();
    let mut found = BTreeSet::new();
    while let Some(message) = stream.message().await? {
        add(&mut found, &message.block_metadata, max_results)?;
    }
    Ok(found)
}

/// Adds the blocks of one message, which must be whole, in order and not told before.
fn add(found: &mut BTreeSet<u64>, ranges: &[v1::BlockMetadata], max_results: i32) -> Result<()> {
    ensure!(
        max_results == 0 || ranges.len() <= usize::try_from(max_results)?,
        "{} in one message",
        ranges.len()
    );
    for range in ranges {
        let (offset, size) = (u64::try_from(range.byte_offset)?, u64::try_from(range.size_bytes)?);
        ensure!(offset % BLOCK == 0 && size % BLOCK == 0 && size > 0, "{range:?} is not made of blocks");
        ensure!(found.last().is_none_or(|last| *last < offset / BLOCK), "{range:?} is out of order");
        found.extend(offset / BLOCK..(offset + size) / BLOCK);
    }
    Ok(())
}
