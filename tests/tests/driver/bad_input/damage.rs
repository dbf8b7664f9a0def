//! Records that rot on disk: the damaged one is set aside and spoken of, the others live on.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use berth_csi::v1;
use berth_e2e::{DiskType, Testbed, Volume, content};

use crate::bad_input::{BTRFS, DIR, IMAGE};

/// The files with records in them.
fn journals(bed: &Testbed) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(bed.data().join("state"))? {
        let path = entry?.path();
        if path.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

/// Changes one letter in every line that speaks of `needle`; returns how many.
fn damage(bed: &Testbed, needle: &str) -> Result<usize> {
    let mut damaged = 0;
    for path in journals(bed)? {
        let text = fs::read_to_string(&path)?;
        let lines = text.split_inclusive('\n').map(|line| {
            if line.contains(needle) {
                damaged += 1;
                line.replacen(needle, &needle.to_uppercase(), 1)
            } else {
                line.to_owned()
            }
        });
        let changed: String = lines.collect();
        fs::write(&path, changed)?;
    }
    Ok(damaged)
}

/// Whether the data of a volume is where it was, or where a person can find it.
fn is_kept(bed: &Testbed, id: &str) -> Result<bool> {
    let name = berth_e2e::name_on_disk(id);
    Ok(bed.entries("volumes")?.contains(name) || bed.entries("lost")?.contains(name))
}

async fn three_volumes(bed: &Testbed, shape: berth_e2e::Shape) -> Result<Vec<Volume>> {
    let mut volumes = Vec::new();
    for number in 0u64..3 {
        let volume = bed.csi.create(&format!("volume-{number}-name"), shape).await?;
        let mounted = bed.mount(&volume).await?;
        content::write(&mounted.target.join("file"), &content::bytes(number, 1000))?;
        bed.csi.unmount(&mounted).await?;
        volumes.push(volume);
    }
    Ok(volumes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_set_aside_and_its_data_kept() -> Result<()> {
    for (disk, shape) in [(DiskType::Btrfs, BTRFS), (DiskType::Xfs, IMAGE), (DiskType::Ext4, DIR)] {
        let mut bed = Testbed::start(disk, &[]).await?;
        let volumes = three_volumes(&bed, shape).await?;
        ensure!(bed.driver().terminate()?.success(), "the driver did not stop well");
        ensure!(damage(&bed, "volume-1-name")? > 0, "no line speaks of the volume's name");
        bed.restart().await?;

        let listed: Vec<String> =
            bed.csi.volumes().await?.into_iter().map(|volume| volume.volume_id).collect();
        for (number, volume) in volumes.iter().enumerate().filter(|(number, _)| *number != 1) {
            ensure!(listed.contains(&volume.id), "volume {number} went with its neighbour's record");
            let mounted = bed.mount(volume).await?;
            content::check(&mounted.target.join("file"), number as u64, 1000)?;
            bed.csi.unmount(&mounted).await?;
        }
        let lost = &volumes[1].id;
        ensure!(!listed.contains(lost), "a volume with a damaged record is served");
        ensure!(bed.entries("state/corrupt")?.len() == 1, "{:?} is set aside", bed.entries("state/corrupt")?);
        ensure!(is_kept(&bed, lost)?, "the data of the damaged record is gone");
        health_speaks_of_it(&bed, lost).await.with_context(|| format!("{shape:?}"))?;

        // Also after another restart, with the journal rewritten.
        bed.kill_and_restart().await?;
        ensure!(is_kept(&bed, lost)?, "the data is gone after a second restart");
        health_speaks_of_it(&bed, lost).await.context("after a second restart")?;
        for volume in [&volumes[0], &volumes[2]] {
            bed.csi.delete(&volume.id).await?;
        }
    }
    Ok(())
}

async fn health_speaks_of_it(bed: &Testbed, id: &str) -> Result<()> {
    let request = v1::ControllerListVolumeHealthRequest::default();
    let listed = bed.csi.controller.clone().controller_list_volume_health(request).await?.into_inner();
    ensure!(format!("{listed:?}").contains(id), "it is not among the unhealthy volumes: {listed:?}");
    let request = v1::ControllerGetVolumeHealthRequest { volume_id: id.into(), ..Default::default() };
    let health = bed.csi.controller.clone().controller_get_volume_health(request).await?.into_inner();
    let health = health.volume_health.context("no health")?;
    ensure!(!health.health_statuses.is_empty(), "the volume is said to be well");
    ensure!(!health.health_statuses[0].message.is_empty(), "its condition has no message");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_line_at_the_end_is_what_a_power_cut_leaves() -> Result<()> {
    let mut bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let volumes = three_volumes(&bed, DIR).await?;
    bed.driver().kill()?;
    for path in journals(&bed)? {
        let mut text = fs::read(&path)?;
        text.extend_from_slice(b"deadbeef [\"vol-half");
        fs::write(&path, text)?;
    }
    bed.restart().await?;
    ensure!(bed.csi.volumes().await?.len() == 3, "volumes went with the half line");
    ensure!(bed.entries("state/corrupt")?.is_empty(), "half a line is no damage: it was never acknowledged");
    let more = bed.csi.create("more", DIR).await?;
    bed.kill_and_restart().await?;
    ensure!(bed.csi.volumes().await?.len() == 4, "what was written after the half line is lost");
    for volume in volumes.iter().chain([&more]) {
        bed.csi.delete(&volume.id).await?;
    }
    bed.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_driver_does_not_start_on_the_same_data() -> Result<()> {
    let bed = Testbed::start(DiskType::Ext4, &[]).await?;
    let other = bed.dir().join("other");
    fs::create_dir(&other)?;
    let second = berth_e2e::Driver::start(&other, bed.data(), berth_e2e::Settings::default()).await;
    let error = second.err().context("two drivers serve the same data")?.to_string();
    ensure!(error.contains("instead of serving"), "{error}");
    ensure!(bed.csi.probe().await?, "the first driver is no longer ready");
    bed.finish().await
}
