//! More and more directory volumes: whether the driver stays as fast, as small and as quick to start.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use berth_csi::v1::ListVolumesRequest;
use berth_e2e::Csi;

use crate::{
    baseline::Baseline,
    few::{SHAPE, request},
    load::{CALLERS, Latencies, Run, rate, run},
    scratch::{SYNC, ScratchDir, wait_for_empty_trash},
    server::{Server, Subject},
    table::{Figures, Quantity, Target, count},
};

/// With how many volumes the rates are taken.
pub(crate) const STEPS: &[usize] = &[10, 1000, 5000, 10_000, 50_000, 100_000];
/// How long creating them may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);
/// How many calls a rate is taken from.
const SAMPLE: usize = 2000;
/// Entries on a page of the list.
const PAGE: i32 = 500;

/// What one driver did with many volumes.
#[derive(Debug)]
pub(crate) struct Many {
    /// What syncing cost just before.
    sync: Latencies,
    pub(crate) steps: Vec<Step>,
    /// How many volumes there were when everything but the creates was measured.
    pub(crate) volumes: usize,
    /// The creates of all steps.
    pub(crate) all: Run<String>,
    /// CPU time per create.
    cpu: Duration,
    pub(crate) delete: Run<()>,
    /// Deletes per second if removing the data counts, too.
    removal: f64,
    pub(crate) resident_made: Quantity,
    resident_started: Quantity,
    start: Duration,
    list: List,
}

/// The creates from a number of volumes on.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) volumes: usize,
    rate: f64,
    latencies: String,
}

#[derive(Debug)]
struct List {
    took: Duration,
    pages: usize,
    entries: usize,
}

/// Fills an empty driver within `limit`, taking a sample at each step, then deletes, lists and restarts.
pub(crate) async fn measure(subject: &Subject, steps: &[usize], limit: Duration) -> Result<Many> {
    let place = ScratchDir::new()?;
    let sync = place.sync_times()?;
    let data = place.path().join("data");
    let server = Server::start(subject, place.path(), &data).await?;
    let mut all = Run::default();
    let mut taken = Vec::new();
    // Nothing is deleted on the way: ext4 without a journal looks for inodes more slowly for a while after that.
    for (index, &volumes) in steps.iter().enumerate() {
        all.append(create(&server.csi, all.answers.len()..volumes, limit.saturating_sub(all.took)).await?);
        let sample = SAMPLE.min(steps.get(index + 1).map_or(SAMPLE, |next| next - volumes));
        let sampled = create(&server.csi, volumes..volumes + sample, limit.saturating_sub(all.took)).await?;
        if all.answers.len() < volumes || sampled.answers.len() < sample {
            all.append(sampled);
            break;
        }
        taken.push(Step { volumes, rate: sampled.rate(), latencies: sampled.latencies.to_string() });
        all.append(sampled);
    }
    let cpu = server.cpu()? / u32::try_from(all.answers.len().max(1))?;

    let surplus = all.answers.len().min(SAMPLE);
    let volumes = all.answers.len() - surplus;
    let began = Instant::now();
    let delete = delete(&server.csi, all.answers[volumes..].to_vec()).await?;
    wait_for_empty_trash(&data).await?;
    let removal = rate(surplus, began.elapsed());
    let resident_made = server.resident()?;
    let list = list(&server.csi).await?;
    server.stop().await?;
    let server = Server::start(subject, place.path(), &data).await?;
    let (resident_started, start) = (server.resident()?, server.start);
    Ok(Many {
        sync,
        steps: taken,
        volumes,
        all,
        cpu,
        delete,
        removal,
        resident_made,
        resident_started,
        start,
        list,
    })
}

async fn create(csi: &Csi, numbers: Range<usize>, limit: Duration) -> Result<Run<String>> {
    let csi = csi.clone();
    run(CALLERS, numbers, limit, move |number| {
        let csi = csi.clone();
        async move { Ok(csi.create_by(SHAPE, request(number)).await?.id) }
    })
    .await
    .context("create volumes")
}

async fn delete(csi: &Csi, ids: Vec<String>) -> Result<Run<()>> {
    let (csi, count, ids) = (csi.clone(), ids.len(), Arc::new(ids));
    // Without a limit: what was created must go, or the next batch would have more volumes than it says.
    run(CALLERS, 0..count, Duration::MAX, move |number| {
        let (csi, ids) = (csi.clone(), ids.clone());
        async move { csi.delete(&ids[number]).await }
    })
    .await
    .context("delete volumes")
}

async fn list(csi: &Csi) -> Result<List> {
    let began = Instant::now();
    let (mut pages, mut entries) = (0, 0);
    let mut starting_token = String::new();
    loop {
        let request = ListVolumesRequest { max_entries: PAGE, starting_token };
        let page = csi.controller.clone().list_volumes(request).await.context("list volumes")?.into_inner();
        pages += 1;
        entries += page.entries.len();
        starting_token = page.next_token;
        if starting_token.is_empty() {
            return Ok(List { took: began.elapsed(), pages, entries });
        }
    }
}

impl Step {
    /// How many volumes were created per second.
    pub(crate) fn creates(&self) -> f64 {
        self.rate
    }
}

impl Many {
    /// What the list came to, in words.
    pub(crate) fn listed(&self) -> String {
        format!("{} of {} in {} pages", count(self.list.entries), count(self.volumes), count(self.list.pages))
    }

    /// The figures as a table.
    pub(crate) fn figures(&self, baseline: &Baseline) -> Figures {
        let mut figures =
            Figures::new(format!("Many directory volumes, {CALLERS} callers on one connection"));
        figures.note(SYNC, self.sync.to_string());
        let aim = Some(Target::AtLeast(Quantity::Rate(2000.0)));
        for step in &self.steps {
            figures.add(
                format!("creates with {} volumes", count(step.volumes)),
                Quantity::Rate(step.rate),
                aim,
                baseline.creates(step.volumes).map(|rate| Quantity::Rate(rate).to_string()),
            );
            figures.note("  latency p50 / p99", &step.latencies);
        }
        let (created, n) = (count(self.all.answers.len()), count(self.volumes));
        if self.steps.len() < STEPS.len() {
            figures.note("gave up creating", format!("after {PATIENCE:?} with {created}"));
        }
        let filling = Quantity::Rate(self.all.rate());
        figures.add(format!("all {created} creates"), filling, aim, Some(baseline.filling.clone()));
        figures.add("CPU time per create", Quantity::Seconds(self.cpu.as_secs_f64()), None, None);
        let deletes = Quantity::Rate(self.delete.rate());
        figures.add(format!("deletes with {n} volumes"), deletes, None, baseline.deletes.clone());
        figures.note("  latency p50 / p99", self.delete.latencies.to_string());
        figures.add("  until the data is removed as well", Quantity::Rate(self.removal), None, None);
        figures.add(
            format!("list {n} in pages of {PAGE}"),
            Quantity::Seconds(self.list.took.as_secs_f64()),
            Some(Target::Below(Quantity::Seconds(1.0))),
            Some(baseline.list.clone()),
        );
        figures.note("  entries", self.listed());
        figures.add(
            format!("start with {n}"),
            Quantity::Seconds(self.start.as_secs_f64()),
            Some(Target::Below(Quantity::Seconds(2.0))),
            None,
        );
        let resident = Some(Target::AtMost(Quantity::Megabytes(50.0)));
        figures.add(
            format!("resident after creating {n}"),
            self.resident_made,
            resident,
            Some(baseline.resident.clone()),
        );
        figures.add(format!("resident after starting on {n}"), self.resident_started, resident, None);
        figures
    }
}
