//! The driver under load and `kill -9`, on each kind of disk.
//!
//! `BERTH_CRASH_KILLS` sets how often it is killed on each disk; `BERTH_CRASH_SEED` repeats the choices of a run.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    Access, DiskType, Kind, Shape,
    crash::{Plan, run},
};

const BTRFS: Shape = Shape::new(Kind::Btrfs, Access::Mount(""), 64);
const DIR: Shape = Shape::new(Kind::Dir, Access::Mount(""), 64);
const IMAGE_EXT4: Shape = Shape::new(Kind::Image, Access::Mount("ext4"), 32);
const IMAGE_XFS: Shape = Shape::new(Kind::Image, Access::Mount("xfs"), 320);
const RAW: Shape = Shape::new(Kind::Image, Access::Block, 32);

async fn kill_on(disk: DiskType, shapes: &'static [Shape]) -> Result<()> {
    let kills = number("BERTH_CRASH_KILLS")?.unwrap_or(15);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let seed = number("BERTH_CRASH_SEED")?.unwrap_or_else(|| now.into());
    let report = run(Plan { seed, kills, disk, shapes }).await?;
    ensure!(report.in_doubt >= kills / 2, "hardly a kill hit a call: {report:?}");
    Ok(())
}

fn number(name: &str) -> Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|text| text.parse().with_context(|| format!("{name} is {text:?}, not a number"))).transpose()
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_left_on_btrfs() -> Result<()> {
    kill_on(DiskType::Btrfs, &[BTRFS, IMAGE_EXT4, DIR, RAW]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_left_on_xfs() -> Result<()> {
    kill_on(DiskType::Xfs, &[IMAGE_EXT4, IMAGE_XFS, DIR, RAW]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_left_on_ext4() -> Result<()> {
    kill_on(DiskType::Ext4, &[IMAGE_EXT4, DIR, RAW]).await
}
