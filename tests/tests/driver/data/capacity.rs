//! A volume holds what it promises and no more, and grows under its user's hands.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth_csi::v1;
use berth_e2e::{DiskType, Kind, MIB, Mounted, Shape, Testbed, content, driver::PATIENCE};
use rustix::io::Errno;

use crate::data::{BTRFS, DIR, IMAGE_BTRFS, IMAGE_EXT4, IMAGE_XFS, bytes_used};

#[tokio::test(flavor = "multi_thread")]
async fn a_subvolume_grows_while_it_is_written() -> Result<()> {
    grow_under_load(DiskType::Btrfs, BTRFS, Errno::DQUOT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_xfs_image_grows_while_it_is_written() -> Result<()> {
    grow_under_load(DiskType::Xfs, IMAGE_XFS, Errno::NOSPC).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_btrfs_image_grows_while_it_is_written() -> Result<()> {
    grow_under_load(DiskType::Ext4, IMAGE_BTRFS, Errno::NOSPC).await
}

/// Fills a volume to its limit, doubles it with files open and being written, and fills it again.
async fn grow_under_load(disk: DiskType, shape: Shape, refusal: Errno) -> Result<()> {
    let bed = Testbed::start(disk, &[]).await?;
    let volume = bed.csi.create("volume", shape).await?;
    let mounted = bed.mount(&volume).await?;
    let writer = Writer::start(mounted.target.join("steady"))?;
    let mib = u64::try_from(shape.bytes / MIB)?;

    let (before, error) = content::fill(&mounted.target, mib * 2);
    let errno = error.as_ref().and_then(std::io::Error::raw_os_error);
    ensure!(errno == Some(refusal.raw_os_error()), "{before} MiB fitted into {mib} MiB, then {error:?}");
    // A filesystem of its own takes some of the volume for itself, a small btrfs half of it.
    ensure!(before <= mib && before >= mib / 3, "{before} MiB fitted into {mib} MiB");

    let answer = bed.csi.expand(&volume, shape.bytes * 2).await?;
    ensure!(answer.capacity_bytes == shape.bytes * 2, "grown to {} bytes", answer.capacity_bytes);
    if answer.node_expansion_required {
        bed.csi.node_expand(&volume, &mounted, shape.bytes * 2).await?;
    }
    let (more, error) = content::fill(&mounted.target, before + mib / 2);
    ensure!(error.is_none(), "after growing only {more} MiB fitted: {error:?}");
    let total = bytes_used(&bed, &mounted).await?.total;
    ensure!(total > shape.bytes && total <= shape.bytes * 2, "the driver counts {total} bytes");
    ensure!(writer.stop()? > 0, "nothing was written meanwhile");

    bed.csi.expand(&volume, shape.bytes).await.context("growing to less than it has is nothing to do")?;
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ext4_image_grows_at_the_latest_when_it_is_staged_again() -> Result<()> {
    let bed = Testbed::start(DiskType::Xfs, &[]).await?;
    let volume = bed.csi.create("volume", IMAGE_EXT4).await?;
    let mounted = bed.mount(&volume).await?;
    content::write(&mounted.target.join("kept"), &content::bytes(1, 1 << 20))?;
    let before = bytes_used(&bed, &mounted).await?.total;

    // Not every kernel and privilege lets ext4 grow while in use: an open file here keeps it in use.
    let held = fs::File::open(mounted.target.join("kept"))?;
    bed.csi.expand(&volume, IMAGE_EXT4.bytes * 4).await?;
    let grown_in_use = bed.csi.node_expand(&volume, &mounted, IMAGE_EXT4.bytes * 4).await;
    content::check(&mounted.target.join("kept"), 1, 1 << 20).context("after an attempt to grow in use")?;
    drop(held);
    if let Err(status) = &grown_in_use {
        ensure!(status.code() == tonic::Code::FailedPrecondition, "a volume in use may wait: {status}");
    }

    bed.csi.unmount(&mounted).await?;
    let mounted = bed.mount(&volume).await?;
    let after = bytes_used(&bed, &mounted).await?.total;
    ensure!(after > before * 3, "it had room for {before} bytes and has for {after}");
    content::check(&mounted.target.join("kept"), 1, 1 << 20)?;
    let (written, error) = content::fill(&mounted.target, 150);
    ensure!(error.is_none(), "{written} MiB fitted, then {error:?}");
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ext4_image_grows_on_its_node_when_nobody_holds_it() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let volume = bed.csi.create("volume", IMAGE_EXT4).await?;
    let mounted = bed.mount(&volume).await?;
    content::write(&mounted.target.join("kept"), &content::bytes(1, 1 << 20))?;
    let before = bytes_used(&bed, &mounted).await?.total;
    bed.csi.expand(&volume, IMAGE_EXT4.bytes * 4).await?;
    bed.csi.node_expand(&volume, &mounted, IMAGE_EXT4.bytes * 4).await?;
    let after = bytes_used(&bed, &mounted).await?.total;
    ensure!(after > before * 3, "it had room for {before} bytes and has for {after}");
    content::check(&mounted.target.join("kept"), 1, 1 << 20)?;
    bed.csi.unmount(&mounted).await?;
    crate::data::finish(bed, &[&volume]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_ext4_image_says_no_space_and_its_neighbour_has_room() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let (full, other) =
        (bed.csi.create("full", IMAGE_EXT4).await?, bed.csi.create("other", IMAGE_EXT4).await?);
    let (in_full, in_other) = (bed.mount(&full).await?, bed.mount(&other).await?);
    let (written, error) = content::fill(&in_full.target, 128);
    let errno = error.as_ref().and_then(std::io::Error::raw_os_error);
    ensure!(errno == Some(Errno::NOSPC.raw_os_error()), "{written} MiB fitted into 64, then {error:?}");
    content::write(&in_other.target.join("fits"), &content::bytes(1, 20 << 20))?;
    for mounted in [&in_full, &in_other] {
        bed.csi.unmount(mounted).await?;
    }
    crate::data::finish(bed, &[&full, &other]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_are_of_the_volume_and_not_of_the_disk() -> Result<()> {
    for (disk, shape) in [
        (DiskType::Btrfs, BTRFS),
        (DiskType::Xfs, IMAGE_XFS),
        (DiskType::Ext4, IMAGE_EXT4),
        (DiskType::Ext4, DIR),
    ] {
        let bed = Testbed::start(disk, &[]).await?;
        let (volume, noisy) = (bed.csi.create("volume", shape).await?, bed.csi.create("noisy", shape).await?);
        let (mounted, in_noisy) = (bed.mount(&volume).await?, bed.mount(&noisy).await?);
        let before = bytes_used(&bed, &mounted).await?;
        content::write(&mounted.target.join("file"), &content::bytes(1, 10 << 20))?;
        content::write(&in_noisy.target.join("file"), &content::bytes(1, 30 << 20))?;
        let after = until_used(&bed, &mounted, &before).await?;
        let used = after.used - before.used;
        ensure!((10 * MIB..12 * MIB).contains(&used), "{shape:?}: 10 MiB written, {used} bytes more in use");
        if shape.kind != Kind::Dir {
            ensure!(after.total <= shape.bytes, "{shape:?} is said to have {} bytes", after.total);
            ensure!(after.available <= after.total - after.used, "{shape:?}: {after:?}");
        }
        for mounted in [&mounted, &in_noisy] {
            bed.csi.unmount(mounted).await?;
        }
        crate::data::finish(bed, &[&volume, &noisy]).await?;
    }
    Ok(())
}

/// Waits until a volume has not in use what it had before: what took long to count is not counted again at once.
async fn until_used(bed: &Testbed, mounted: &Mounted, before: &v1::VolumeUsage) -> Result<v1::VolumeUsage> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = bytes_used(bed, mounted).await?;
        if now.used != before.used {
            return Ok(now);
        }
        ensure!(Instant::now() < deadline, "still {} bytes are in use", now.used);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Rewrites one block of one file for as long as it is left alone.
struct Writer {
    thread: Option<JoinHandle<std::io::Result<u64>>>,
    stop: Arc<AtomicBool>,
}

impl Writer {
    fn start(path: PathBuf) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let mut file = fs::File::create(path)?;
        file.write_all(&[0; 4096])?;
        file.sync_all()?;
        let thread = std::thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                // A full copy-on-write filesystem refuses even this, until it has grown.
                let written = file.write_all_at(&[1; 4096], 0).and_then(|()| file.sync_all());
                match written.map_err(|error| error.raw_os_error()) {
                    Ok(()) => rounds += 1,
                    Err(Some(errno))
                        if [Errno::NOSPC, Errno::DQUOT].iter().any(|e| e.raw_os_error() == errno) => {}
                    Err(errno) => return Err(std::io::Error::from_raw_os_error(errno.unwrap_or_default())),
                }
            }
            Ok(rounds)
        });
        Ok(Self { thread: Some(thread), stop })
    }

    fn stop(mut self) -> Result<u64> {
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
