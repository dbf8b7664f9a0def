//! More and more directory volumes: whether the driver stays as fast, as small and as quick to start.

use std::{
    ops::Range,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use berth_csi::v1::ListVolumesRequest;
use berth_e2e::Csi;

use crate::{
    baseline::Baseline,
    few::{SHAPE, request},
    load::{CALLERS, Run, rate, run},
    place::{Place, wait_for_empty_trash},
    server::{Server, Subject},
    table::{Figures, Quantity, Target, count},
};

/// How many volumes there are when the rates are taken.
pub(crate) const STEPS: &[usize] = &[10, 1000, 5000, 10_000, 50_000, 100_000];
/// How long filling up to the last step may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);
/// How many creates and deletes a rate is taken from.
const SAMPLE: usize = 2000;
/// How long one batch of them may take.
const LIMIT: Duration = Duration::from_secs(12);
/// Entries on a page of the list.
const PAGE: i32 = 500;

/// What one driver did with many volumes.
#[derive(Debug)]
pub(crate) struct Many {
    pub(crate) steps: Vec<Step>,
    volumes: usize,
    /// Creates per second on the way there, the samples left out.
    pub(crate) filling: f64,
    /// CPU time per create on the way there.
    cpu: Duration,
    pub(crate) resident_made: Quantity,
    resident_started: Quantity,
    start: Duration,
    list: List,
}

/// The rates at one number of volumes.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) volumes: usize,
    create: Run<String>,
    delete: Run<()>,
    /// Deletes per second if removing the data counts, too.
    removal: f64,
}

#[derive(Debug)]
struct List {
    took: Duration,
    pages: usize,
    entries: usize,
}

/// Fills an empty driver step by step, within `limit`, then lists and restarts it.
pub(crate) async fn measure(subject: &Subject, steps: &[usize], limit: Duration) -> Result<Many> {
    let place = Place::new()?;
    let data = place.path().join("data");
    let server = Server::start(subject, place.path(), &data).await?;
    let (mut volumes, mut filling, mut cpu) = (0, Duration::ZERO, Duration::ZERO);
    let mut taken = Vec::new();
    for &wanted in steps {
        let before = server.cpu()?;
        let fill = create(&server.csi, volumes..wanted, limit.saturating_sub(filling)).await?;
        cpu += server.cpu()?.saturating_sub(before);
        filling += fill.took;
        volumes += fill.answers.len();
        if volumes < wanted {
            break;
        }
        taken.push(sample(&server.csi, volumes, &data).await?);
    }
    let resident_made = server.resident()?;
    let list = list(&server.csi).await?;
    server.stop().await?;
    let server = Server::start(subject, place.path(), &data).await?;
    Ok(Many {
        steps: taken,
        volumes,
        filling: rate(volumes, filling),
        cpu: cpu / u32::try_from(volumes.max(1))?,
        resident_made,
        resident_started: server.resident()?,
        start: server.start,
        list,
    })
}

/// Creates and deletes, in batches so small that the number of volumes stays about the same.
async fn sample(csi: &Csi, volumes: usize, data: &Path) -> Result<Step> {
    let batch = (volumes / 5).clamp(200, SAMPLE);
    // Numbers that no volume that stays has.
    let mut first = 1_000_000;
    let mut step: Option<Step> = None;
    let mut removing = Duration::ZERO;
    let began = Instant::now();
    for _ in 0..SAMPLE / batch {
        let made = create(csi, first..first + batch, LIMIT).await?;
        first += batch;
        let deleting = Instant::now();
        let deleted = delete(csi, made.answers.clone()).await?;
        wait_for_empty_trash(data).await?;
        removing += deleting.elapsed();
        match &mut step {
            None => step = Some(Step { volumes, create: made, delete: deleted, removal: 0.0 }),
            Some(step) => {
                step.create.append(made);
                step.delete.append(deleted);
            }
        }
        if began.elapsed() > LIMIT {
            break;
        }
    }
    let mut step = step.context("a sample has at least one batch")?;
    step.removal = rate(step.delete.answers.len(), removing);
    Ok(step)
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
    pub(crate) fn creates(&self) -> f64 {
        self.create.rate()
    }

    pub(crate) fn deletes(&self) -> f64 {
        self.delete.rate()
    }
}

impl Many {
    /// How many volumes there were in the end.
    pub(crate) fn volumes(&self) -> usize {
        self.volumes
    }

    /// What the list came to, in words.
    pub(crate) fn listed(&self) -> String {
        format!("{} of {} in {} pages", count(self.list.entries), count(self.volumes), count(self.list.pages))
    }

    /// The figures as a table.
    pub(crate) fn figures(&self, baseline: &Baseline) -> Figures {
        let mut figures =
            Figures::new(format!("Many directory volumes, {CALLERS} callers on one connection"));
        let creates = Some(Target::AtLeast(Quantity::Rate(2000.0)));
        for step in &self.steps {
            let (there, volumes) = (baseline.at(step.volumes), count(step.volumes));
            let cell = |rate: Option<f64>| rate.map(|rate| Quantity::Rate(rate).to_string());
            figures.add(
                format!("creates with {volumes} volumes"),
                Quantity::Rate(step.creates()),
                creates,
                cell(there.map(|there| there.creates)),
            );
            figures.note("  latency p50 / p99", step.create.latencies.to_string(), "");
            let deletes = cell(there.and_then(|there| there.deletes));
            figures.add("  deletes", Quantity::Rate(step.deletes()), None, deletes);
            figures.add("  deletes, the data removed as well", Quantity::Rate(step.removal), None, None);
        }
        let (last, n) = (STEPS.last().copied().unwrap_or_default(), count(self.volumes));
        if self.volumes < last {
            figures.note(format!("gave up filling at {n} volumes"), format!("{PATIENCE:?}"), "");
        }
        figures.add(
            format!("creates on the way to {n}"),
            Quantity::Rate(self.filling),
            creates,
            Some(baseline.filling.clone()),
        );
        figures.add("CPU time per create", Quantity::Seconds(self.cpu.as_secs_f64()), None, None);
        figures.add(
            format!("list {n} in pages of {PAGE}"),
            Quantity::Seconds(self.list.took.as_secs_f64()),
            Some(Target::Below(Quantity::Seconds(1.0))),
            Some(baseline.list.clone()),
        );
        figures.note("  entries", self.listed(), "");
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
