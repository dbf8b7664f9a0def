//! Each kind of volume on the disk it is made for: what one caller waits for.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use berth_e2e::{
    Access, DiskType, Kind, Mounted, Shape, Testbed, Volume, content,
    csi::{from_snapshot, from_volume},
};

use crate::{load::Latencies, table::Table};

/// How many files of a MiB the volume has that snapshots are taken of.
const FILES: u64 = 64;
/// How often each call is made, if time allows.
const ROUNDS: usize = 100;
/// How long the rounds of one kind may take.
const LIMIT: Duration = Duration::from_secs(20);

/// What is measured, on which disk.
struct Case {
    title: &'static str,
    disk: DiskType,
    shape: Shape,
}

const CASES: &[Case] = &[
    Case { title: "btrfs", disk: DiskType::Btrfs, shape: Shape::new(Kind::Btrfs, Access::Mount(""), 256) },
    Case {
        title: "image (ext4) on XFS",
        disk: DiskType::Xfs,
        shape: Shape::new(Kind::Image, Access::Mount("ext4"), 256),
    },
    Case { title: "dir on ext4", disk: DiskType::Ext4, shape: Shape::new(Kind::Dir, Access::Mount(""), 256) },
];

/// The calls of a round, in the order of the columns.
#[derive(Debug, Default)]
struct Times {
    create: Latencies,
    snapshot: Latencies,
    restore: Latencies,
    clone: Latencies,
    delete: Latencies,
}

/// The steps of mounting and unmounting again.
#[derive(Debug, Default)]
struct Cycle {
    stage: Latencies,
    publish: Latencies,
    unpublish: Latencies,
    unstage: Latencies,
}

/// Two tables: the controller's calls and the node's.
pub(crate) async fn measure() -> Vec<Result<Box<dyn Display>>> {
    let mut calls = Table::new(
        format!("One caller, p50 / p99; the source is mounted and holds {FILES} MiB in {FILES} files"),
        &["", "rounds", "create", "snapshot", "restore", "clone", "delete"],
    );
    let mut cycles = Table::new(
        "One caller, p50 / p99; the very first stage makes the filesystem",
        &["", "rounds", "first stage", "stage", "publish", "unpublish", "unstage", "all four"],
    );
    let mut tables: Vec<Result<Box<dyn Display>>> = Vec::new();
    for case in CASES {
        match case.measure().await {
            Ok((call_row, cycle_row)) => {
                calls.add(call_row);
                cycles.add(cycle_row);
            }
            Err(error) => tables.push(Err(error.context(case.title))),
        }
    }
    tables.push(Ok(Box::new(calls)));
    tables.push(Ok(Box::new(cycles)));
    tables
}

impl Case {
    async fn measure(&self) -> Result<(Vec<String>, Vec<String>)> {
        let bed = Testbed::start(self.disk, &["--kind", self.shape.kind.as_str()]).await?;
        let source = bed.csi.create("source", self.shape).await.context("create the source")?;
        let mounted = Mounted::paths(&source.id, bed.dir())?;
        let began = Instant::now();
        bed.csi.stage(&source, &mounted.staging).await.context("stage the source")?;
        let first_stage = began.elapsed();
        bed.csi.unstage(&source.id, &mounted.staging).await.context("unstage the source")?;
        let cycle_row =
            self.cycles(&bed, &source, &mounted, first_stage).await.context("mount and unmount")?;

        let mounted = bed.mount(&source).await?;
        for file in 0..FILES {
            content::write(&mounted.target.join(file.to_string()), &content::bytes(file, 1 << 20))?;
        }
        let call_row = self.calls(&bed, &source).await?;
        bed.csi.unmount(&mounted).await.context("unmount the source")?;
        bed.csi.delete(&source.id).await.context("delete the source")?;
        bed.finish().await?;
        Ok((call_row, cycle_row))
    }

    async fn calls(&self, bed: &Testbed, source: &Volume) -> Result<Vec<String>> {
        let (csi, shape, began) = (&bed.csi, self.shape, Instant::now());
        let mut times = Times::default();
        let mut rounds = 0;
        while rounds < ROUNDS && began.elapsed() < LIMIT {
            let [new, snap, restored, cloned] =
                ["new", "snap", "restored", "cloned"].map(|word| format!("{word}-{rounds}"));
            let made = times.create.time(csi.create(&new, shape)).await.context("create")?;
            let taken = times.snapshot.time(csi.snapshot(&snap, &source.id)).await.context("snapshot")?;
            let from = from_snapshot(&taken.snapshot_id);
            let restored =
                times.restore.time(csi.create_from(&restored, shape, from)).await.context("restore")?;
            let from = from_volume(&source.id);
            let cloned = times.clone.time(csi.create_from(&cloned, shape, from)).await.context("clone")?;
            for volume in [made, restored, cloned] {
                times.delete.time(csi.delete(&volume.id)).await.context("delete")?;
            }
            csi.delete_snapshot(&taken.snapshot_id).await.context("delete a snapshot")?;
            // Or removing the data of one round would count in the next.
            bed.wait_for_empty_trash().await?;
            rounds += 1;
        }
        let runs = [&times.create, &times.snapshot, &times.restore, &times.clone, &times.delete];
        Ok([self.title.to_owned(), rounds.to_string()]
            .into_iter()
            .chain(runs.map(ToString::to_string))
            .collect())
    }

    async fn cycles(
        &self,
        bed: &Testbed,
        volume: &Volume,
        at: &Mounted,
        first_stage: Duration,
    ) -> Result<Vec<String>> {
        let (csi, began) = (&bed.csi, Instant::now());
        let (mut cycle, mut all) = (Cycle::default(), Latencies::default());
        let mut rounds = 0;
        while rounds < ROUNDS && began.elapsed() < LIMIT / 2 {
            let round = async {
                cycle.stage.time(csi.stage(volume, &at.staging)).await?;
                cycle.publish.time(csi.publish(volume, &at.staging, &at.target)).await?;
                cycle.unpublish.time(csi.unpublish(&volume.id, &at.target)).await?;
                cycle.unstage.time(csi.unstage(&volume.id, &at.staging)).await
            };
            all.time(round).await?;
            rounds += 1;
        }
        let runs = [&cycle.stage, &cycle.publish, &cycle.unpublish, &cycle.unstage, &all];
        let first = format!("{:.1} ms", first_stage.as_secs_f64() * 1e3);
        Ok([self.title.to_owned(), rounds.to_string(), first]
            .into_iter()
            .chain(runs.map(ToString::to_string))
            .collect())
    }
}
