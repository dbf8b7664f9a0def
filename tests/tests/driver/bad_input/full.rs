//! A disk without room, and clients that do not wait for an answer.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use berth_e2e::{Disk, DiskType, Expected, MIB, Shape, Testbed, content};
use tonic::Code;

use crate::bad_input::{BTRFS, Before, DIR, IMAGE, KINDS};

#[tokio::test(flavor = "multi_thread")]
async fn more_than_the_disk_has_is_refused() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start_on(Disk::new(*disk, 1024)?, &[]).await?;
        let before = Before::of(&bed)?;
        let large = Shape { bytes: 4096 * MIB, ..*shape };
        let answer = bed.csi.create("large", large).await;
        before
            .refused(&bed, answer, &[Code::ResourceExhausted, Code::OutOfRange])
            .context("one large volume")?;

        // Promises count, although nothing is written yet.
        let mut made = Vec::new();
        let refusal = loop {
            match bed
                .csi
                .create(&format!("volume-{}", made.len()), Shape { bytes: 200 * MIB, ..*shape })
                .await
            {
                Ok(volume) => made.push(volume.id),
                Err(status) => break status,
            }
            ensure!(made.len() < 6, "{} volumes of 200 MiB on a disk of 1 GiB", made.len());
        };
        ensure!(refusal.code() == Code::ResourceExhausted, "refused with {refusal}");
        ensure!(made.len() >= 3, "only {} volumes of 200 MiB on a disk of 1 GiB: {refusal}", made.len());
        let expected = Expected { volumes: made.iter().cloned().collect(), ..Expected::default() };
        bed.check_leftovers(&expected).await.context("after the refusal")?;
        for id in made {
            bed.csi.delete(&id).await?;
        }
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_really_full_refuses_and_keeps_nothing_half_made() -> Result<()> {
    for (disk, shape, ballast_mib) in
        [(DiskType::Ext4, IMAGE, 40), (DiskType::Ext4, DIR, 40), (DiskType::Btrfs, BTRFS, 0)]
    {
        let bed = Testbed::start_on(Disk::new(disk, 512)?, &["--overcommit", "100"]).await?;
        let volume = bed.csi.create("volume", shape).await?;
        let mounted = bed.mount(&volume).await?;
        if ballast_mib > 0 {
            content::write(&mounted.target.join("file"), &content::bytes(1, ballast_mib << 20))?;
        }
        let ballast = bed.disk().mount_point().join("ballast");
        fs::create_dir(&ballast)?;
        let (_, error) = content::fill(&ballast, 1024);
        ensure!(error.is_some(), "the disk does not get full");
        // The last few kilobytes too.
        let rest = fs::File::create(ballast.join("rest"))?;
        while std::io::Write::write_all(&mut &rest, &[1; 4096]).is_ok() {}

        let kept = Expected { volumes: [volume.id.clone()].into(), ..Expected::default() };
        if ballast_mib > 0 {
            // On a disk without reflinks a copy needs as much room again.
            let status =
                bed.csi.snapshot("snapshot", &volume.id).await.err().context("a snapshot on a full disk")?;
            ensure!(status.code() == Code::ResourceExhausted, "{shape:?}: {status}");
            ensure!(status.message().len() > 10, "{shape:?}: {status}");
            let clone = bed.csi.create_from("clone", shape, berth_e2e::csi::from_volume(&volume.id)).await;
            let status = clone.err().context("a clone on a full disk")?;
            ensure!(status.code() == Code::ResourceExhausted, "{shape:?}: {status}");
        }
        bed.wait_for_empty_trash().await?;
        bed.check_entries(&kept).with_context(|| format!("{shape:?}"))?;
        ensure!(bed.csi.volumes().await?.len() == 1 && bed.csi.snapshots().await?.is_empty(), "{shape:?}");

        // Taking down and deleting needs no room, and once there is room everything goes on.
        bed.csi.unmount(&mounted).await.context("unmount on a full disk")?;
        bed.csi.delete(&volume.id).await.context("delete on a full disk")?;
        fs::remove_dir_all(&ballast)?;
        drop(rest);
        let again = bed.csi.create("again", shape).await?;
        bed.csi.delete(&again.id).await?;
        bed.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_gets_its_volume_on_asking_again() -> Result<()> {
    for (disk, shape) in KINDS {
        let bed = Testbed::start(*disk, &[]).await?;
        let mut expected = Expected::default();
        for attempt in 0..20u64 {
            let name = format!("volume-{attempt}");
            // Dropping the future cancels the call: the driver sees its client go, at 20 different moments.
            let patience = Duration::from_micros(attempt * 400);
            let _ = tokio::time::timeout(patience, bed.csi.create(&name, *shape)).await;
            let volume = loop {
                match bed.csi.create(&name, *shape).await {
                    Ok(volume) => break volume,
                    // The first call is still at it.
                    Err(status) if status.code() == Code::Aborted => tokio::task::yield_now().await,
                    Err(status) => return Err(status.into()),
                }
            };
            expected.volumes.insert(volume.id);
        }
        bed.check_leftovers(&expected).await?;
        for id in &expected.volumes {
            let _ = tokio::time::timeout(Duration::from_micros(500), bed.csi.delete(id)).await;
            while let Err(status) = bed.csi.delete(id).await {
                ensure!(status.code() == Code::Aborted, "delete again: {status}");
            }
        }
        bed.finish().await?;
    }
    Ok(())
}
