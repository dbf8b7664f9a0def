//! Kills the driver at random moments under load, again and again, and then counts.
//!
//! Workers make the calls an orchestrator makes, each on volumes of its own, and remember what was answered. A call
//! that a kill cut off is in doubt: its worker either tries it again, as an orchestrator would, or gives it up. In the
//! end every answered volume and snapshot must be there with its bytes; whatever is in doubt is there wholly or not at
//! all; and when all is deleted, nothing is left on disk, mounted or attached.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    content::Random,
    csi::{Csi, Shape, Volume, from_snapshot},
    disk::DiskType,
    testbed::{Expected, Testbed},
};

mod worker;

use worker::{Slots, Worker, check_slots};

/// How many workers load the driver at once.
const WORKERS: u64 = 8;

/// How one crash run goes.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Where everything random comes from.
    pub seed: u64,
    /// How often the driver is killed.
    pub kills: u64,
    /// What it keeps its data on.
    pub disk: DiskType,
    /// The volumes it is asked for.
    pub shapes: &'static [Shape],
}

/// What a run saw.
#[derive(Debug, Default, Clone, Copy)]
pub struct Report {
    /// Calls that were answered.
    pub answered: u64,
    /// Calls that a kill cut off.
    pub in_doubt: u64,
    /// Volumes whose bytes were compared at the end.
    pub volumes: u64,
    /// Snapshots that were restored and compared at the end.
    pub snapshots: u64,
}

/// Loads, kills and counts; prints the seed first, with which the same choices are made again.
pub async fn run(plan: Plan) -> Result<Report> {
    let on = plan.disk.as_str();
    // Not by `println`: the seed must also be seen of a run that hangs.
    writeln!(std::io::stderr(), "crash run on {on}: seed {}, {} kills", plan.seed, plan.kills)?;
    let begun = Instant::now();
    let report = kill_and_count(plan).await.with_context(|| format!("on {on} with seed {}", plan.seed))?;
    let seconds = begun.elapsed().as_secs();
    writeln!(std::io::stderr(), "crash run on {on}: {report:?} in {seconds} s")?;
    Ok(report)
}

async fn kill_and_count(plan: Plan) -> Result<Report> {
    let mut bed = Testbed::start(plan.disk, &["--overcommit", "20"]).await?;
    let mut random = Random::new(plan.seed);
    let mut workers: Vec<Worker> =
        (0..WORKERS).map(|number| Worker::new(number, random.number(), &plan, bed.dir())).collect();
    for kill in 0..plan.kills {
        let killed = Arc::new(AtomicBool::new(false));
        let running: Vec<_> = workers
            .into_iter()
            .map(|worker| tokio::spawn(worker.work(bed.csi.clone(), killed.clone())))
            .collect();
        // Short lives as well as long ones: right after the start is a moment too.
        let longest = *random.pick(&[30, 200, 800]);
        tokio::time::sleep(Duration::from_millis(random.below(longest))).await;
        killed.store(true, Ordering::SeqCst);
        bed.driver().kill()?;
        workers = Vec::new();
        for task in running {
            workers.push(task.await?.with_context(|| format!("before kill {kill}"))?);
        }
        bed.restart().await.with_context(|| format!("after kill {kill}"))?;
        check_lists(&bed.csi, &workers).await.with_context(|| format!("after kill {kill}"))?;
        for worker in &workers {
            worker.check_published().with_context(|| format!("after kill {kill}"))?;
        }
    }
    let mut report = Report {
        answered: workers.iter().map(|worker| worker.answered).sum(),
        in_doubt: workers.iter().map(|worker| worker.in_doubt).sum(),
        ..Default::default()
    };
    ensure!(report.answered > plan.kills, "the load did next to nothing: {report:?}");
    let mut settled = Vec::new();
    for worker in workers {
        settled.push(worker.settle(bed.csi.clone()).await.context("at the end")?);
    }
    check_lists(&bed.csi, &settled).await.context("at the end")?;
    check_disk(&bed).await?;
    check_bytes(&bed, &settled, &mut report).await?;
    delete_all(&bed).await?;
    bed.finish().await?;
    Ok(report)
}

/// What is listed must be all that was answered, nothing that was deleted, and of the rest no more than is in doubt.
async fn check_lists(csi: &Csi, workers: &[Worker]) -> Result<()> {
    let listed: BTreeMap<String, i64> =
        csi.volumes().await?.into_iter().map(|volume| (volume.volume_id, volume.capacity_bytes)).collect();
    let mut known = BTreeSet::new();
    for volume in workers.iter().flat_map(|worker| &worker.volumes) {
        let bytes = listed.get(&volume.volume.id);
        let bytes = bytes.with_context(|| format!("{} is lost", volume.volume.id))?;
        ensure!(
            *bytes >= volume.bytes,
            "{} has {bytes} bytes, {} were promised",
            volume.volume.id,
            volume.bytes
        );
        known.insert(&volume.volume.id);
    }
    let doubtful: usize = workers.iter().map(Worker::doubtful_volumes).sum();
    let extra: Vec<&String> = listed.keys().filter(|id| !known.contains(id)).collect();
    ensure!(extra.len() <= doubtful, "{extra:?} should be gone; {doubtful} calls are in doubt");

    let listed = csi.snapshots().await?;
    let mut known = BTreeSet::new();
    for snapshot in workers.iter().flat_map(|worker| &worker.snapshots) {
        let found = listed.iter().find(|listed| listed.snapshot_id == snapshot.id);
        let found = found.with_context(|| format!("snapshot {} is lost", snapshot.id))?;
        ensure!(found.ready_to_use, "snapshot {} is not ready", snapshot.id);
        known.insert(&snapshot.id);
    }
    let doubtful: usize = workers.iter().map(Worker::doubtful_snapshots).sum();
    let extra: Vec<_> = listed.iter().filter(|snapshot| !known.contains(&snapshot.snapshot_id)).collect();
    ensure!(extra.len() <= doubtful, "{extra:?} should be gone; {doubtful} calls are in doubt");
    let mut groups: BTreeMap<&str, usize> = BTreeMap::new();
    for snapshot in listed.iter().filter(|snapshot| !snapshot.group_snapshot_id.is_empty()) {
        *groups.entry(&snapshot.group_snapshot_id).or_default() += 1;
    }
    ensure!(groups.values().all(|members| *members == 2), "a group is there in part: {groups:?}");
    Ok(())
}

/// On disk is what is listed and nothing else; nothing is mounted or attached.
async fn check_disk(bed: &Testbed) -> Result<()> {
    let listed = Expected {
        volumes: bed.csi.volumes().await?.into_iter().map(|volume| volume.volume_id).collect(),
        snapshots: bed.csi.snapshots().await?.into_iter().map(|snapshot| snapshot.snapshot_id).collect(),
    };
    bed.check_leftovers(&listed).await
}

async fn check_bytes(bed: &Testbed, workers: &[Worker], report: &mut Report) -> Result<()> {
    let listed: BTreeSet<String> =
        bed.csi.volumes().await?.into_iter().map(|volume| volume.volume_id).collect();
    for worker in workers {
        // A volume whose deletion was cut off is whole as long as it is listed.
        let half_deleted =
            worker.given_up.deletions.iter().filter(|volume| listed.contains(&volume.volume.id));
        for volume in worker.volumes.iter().chain(half_deleted) {
            check_volume(bed, &volume.volume, &[&volume.slots]).await?;
            report.volumes += 1;
        }
    }
    for snapshot in bed.csi.snapshots().await? {
        let of_this = |worker: &'_ Worker| worker.contents_of(&snapshot).cloned().collect::<Vec<Slots>>();
        let possible: Vec<Slots> = workers.iter().flat_map(of_this).collect();
        let shape = workers.iter().find_map(|worker| worker.shape_of(&snapshot));
        let shape = shape.with_context(|| format!("nobody took snapshot {}", snapshot.snapshot_id))?;
        let shape = Shape { bytes: snapshot.size_bytes.max(shape.bytes), ..shape };
        let name = format!("check-{}", snapshot.snapshot_id);
        let restored = bed.csi.create_from(&name, shape, from_snapshot(&snapshot.snapshot_id)).await;
        let restored = restored.with_context(|| format!("restore snapshot {}", snapshot.snapshot_id))?;
        let possible: Vec<&Slots> = possible.iter().collect();
        check_volume(bed, &restored, &possible)
            .await
            .with_context(|| format!("of {}", snapshot.snapshot_id))?;
        bed.csi.delete(&restored.id).await?;
        report.snapshots += 1;
    }
    Ok(())
}

/// Mounts a volume and compares its bytes with what they may be.
async fn check_volume(bed: &Testbed, volume: &Volume, possible: &[&Slots]) -> Result<()> {
    let mounted = bed.mount(volume).await?;
    let outcomes: Vec<Result<()>> =
        possible.iter().map(|slots| check_slots(volume.shape, &mounted.target, slots)).collect();
    if outcomes.iter().all(Result::is_err) {
        let first = outcomes.into_iter().next().context("nothing is known of its bytes")?;
        first.with_context(|| format!("{} {:?} has other bytes", volume.id, volume.shape))?;
    }
    Ok(bed.csi.unmount(&mounted).await?)
}

async fn delete_all(bed: &Testbed) -> Result<()> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for snapshot in bed.csi.snapshots().await? {
        if snapshot.group_snapshot_id.is_empty() {
            bed.csi.delete_snapshot(&snapshot.snapshot_id).await?;
        } else {
            groups.entry(snapshot.group_snapshot_id).or_default().push(snapshot.snapshot_id);
        }
    }
    for (id, members) in groups {
        bed.csi.delete_group_snapshot(&id, &members).await?;
    }
    for volume in bed.csi.volumes().await? {
        bed.csi.delete(&volume.volume_id).await?;
    }
    Ok(())
}
