//! A group snapshot is one moment for all its volumes.
//!
//! A writer appends n to the first volume, makes it durable, then n to the second. Whatever the moment, the first has
//! as many entries as the second, or one more.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use berth_e2e::{DiskType, Shape, Testbed, csi::from_snapshot};

use crate::data::{BTRFS, IMAGE_EXT4, IMAGE_XFS};

const GROUPS: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_subvolumes_is_one_moment() -> Result<()> {
    one_moment(DiskType::Btrfs, BTRFS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_images_with_reflinks_is_one_moment() -> Result<()> {
    one_moment(DiskType::Xfs, IMAGE_EXT4).await?;
    one_moment(DiskType::Xfs, IMAGE_XFS).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_images_without_reflinks_is_one_moment() -> Result<()> {
    one_moment(DiskType::Ext4, IMAGE_EXT4).await
}

async fn one_moment(disk: DiskType, shape: Shape) -> Result<()> {
    let bed = Testbed::start(disk, &[]).await?;
    let (first, second) = (bed.csi.create("first", shape).await?, bed.csi.create("second", shape).await?);
    let (in_first, in_second) = (bed.mount(&first).await?, bed.mount(&second).await?);
    let writer = Writer::start(in_first.target.join("log"), in_second.target.join("log"));

    let mut groups = Vec::new();
    for number in 0..GROUPS {
        writer.wait_for_more().await?;
        groups.push(bed.csi.group_snapshot(&format!("group-{number}"), &[&first.id, &second.id]).await?);
    }
    writer.stop()?;

    let mut lasts = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        ensure!(group.snapshots.len() == 2, "a group of {} snapshots", group.snapshots.len());
        let mut pair = Vec::new();
        for source in [&first, &second] {
            let snapshot = group.snapshots.iter().find(|snapshot| snapshot.source_volume_id == source.id);
            let snapshot = snapshot.context("the group lacks a volume")?;
            let name = format!("restored-{number}-{}", source.id);
            let restored = bed.csi.create_from(&name, shape, from_snapshot(&snapshot.snapshot_id)).await?;
            let mounted = bed.mount(&restored).await?;
            pair.push(last(&mounted.target.join("log"))?);
            bed.csi.unmount(&mounted).await?;
            bed.csi.delete(&restored.id).await?;
        }
        ensure!(pair[0] == pair[1] || pair[0] == pair[1] + 1, "{shape:?} group {number} has {pair:?}");
        lasts.push(pair[0]);
    }
    ensure!(
        lasts.windows(2).all(|pair| pair[0] < pair[1]),
        "nothing was written between the groups: {lasts:?}"
    );

    for mounted in [&in_first, &in_second] {
        bed.csi.unmount(mounted).await?;
    }
    for group in groups {
        let members: Vec<String> = group.snapshots.into_iter().map(|snapshot| snapshot.snapshot_id).collect();
        bed.csi.delete_group_snapshot(&group.group_snapshot_id, &members).await?;
    }
    crate::data::finish(bed, &[&first, &second]).await
}

/// The last number of a log, which must count up from 1 without a gap.
fn last(log: &Path) -> Result<u64> {
    let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
    let numbers: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(numbers.iter().zip(1..).all(|(found, expected)| *found == expected), "{text:?} has gaps");
    numbers.last().copied().context("the log is empty")
}

struct Writer {
    thread: Option<JoinHandle<std::io::Result<()>>>,
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
}

impl Writer {
    fn start(first: PathBuf, second: PathBuf) -> Self {
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), written.clone());
        let thread = std::thread::spawn(move || {
            let (mut first, mut second) = (fs::File::create(first)?, fs::File::create(second)?);
            for number in 1.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                for log in [&mut first, &mut second] {
                    log.write_all(format!("{number}\n").as_bytes())?;
                    log.sync_all()?;
                }
                count.store(number, Ordering::Relaxed);
            }
            Ok(())
        });
        Self { thread: Some(thread), stop, written }
    }

    /// Returns in the middle of the writing, at an arbitrary moment after some progress.
    async fn wait_for_more(&self) -> Result<()> {
        let before = self.written.load(Ordering::Relaxed);
        while self.written.load(Ordering::Relaxed) < before + 3 {
            ensure!(self.thread.as_ref().is_some_and(|thread| !thread.is_finished()), "the writer ended");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the writer is stopped once")?;
        Ok(thread.join().expect("the writer does not panic")?)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
