//! A thousand directory volumes: what one caller waits for, what the driver holds in memory, and mounting.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use berth_e2e::{Access, Kind, Mounted, Shape};

use crate::{
    baseline::Baseline,
    load::{CALLERS, Latencies, Run, run},
    scratch::{SYNC, ScratchDir},
    server::{Server, Subject},
    table::{Figures, Quantity, Target, count},
};

/// How many volumes are made.
const VOLUMES: usize = 1000;
/// How many of them are mounted.
const MOUNTED: usize = 500;
/// How long each load may take.
const LIMIT: Duration = Duration::from_secs(15);

/// What one driver did with few volumes.
#[derive(Debug)]
pub(crate) struct Few {
    /// What syncing cost just before.
    sync: Latencies,
    create: Run<berth_e2e::Volume>,
    resident_made: Quantity,
    resident_started: Quantity,
    start: Duration,
    publish: Run<()>,
    unpublish: Run<()>,
}

/// A directory volume as every load here makes it. Its request names no kind: host-path knows none.
pub(crate) const SHAPE: Shape = Shape::new(Kind::Dir, Access::Mount(""), 1);

/// The request for the volume of that number, with a name as long as Kubernetes gives one.
pub(crate) fn request(number: usize) -> berth_csi::v1::CreateVolumeRequest {
    let name = format!("pvc-{number:08}-0000-4000-8000-000000000000");
    berth_csi::v1::CreateVolumeRequest { parameters: BTreeMap::new(), ..SHAPE.request(&name) }
}

/// Measures a driver on an empty directory.
pub(crate) async fn measure(subject: &Subject) -> Result<Few> {
    let place = ScratchDir::new()?;
    let sync = place.sync_times()?;
    let data = place.path().join("data");
    let server = Server::start(subject, place.path(), &data).await?;
    let csi = server.csi.clone();
    let create = run(1, 0..VOLUMES, LIMIT, move |number| {
        let csi = csi.clone();
        async move { csi.create_by(SHAPE, request(number)).await }
    })
    .await
    .context("create volumes one by one")?;
    let resident_made = server.resident()?;
    server.stop().await?;

    let server = Server::start(subject, place.path(), &data).await?;
    let (resident_started, start) = (server.resident()?, server.start);
    let volumes = create.answers.iter().take(MOUNTED);
    let mounts = volumes.map(|volume| Ok((volume.clone(), Mounted::paths(&volume.id, place.path())?)));
    let mounts: Arc<[_]> = mounts.collect::<Result<Vec<_>>>()?.into();
    // Each step takes the volumes that the one before got to.
    let step = async |what, count| -> Result<Run<()>> {
        let (csi, mounts) = (server.csi.clone(), mounts.clone());
        run(CALLERS, 0..count, LIMIT, move |number| {
            let (csi, mounts) = (csi.clone(), mounts.clone());
            async move {
                let (volume, at) = &mounts[number];
                match what {
                    Step::Stage => csi.stage(volume, &at.staging).await,
                    Step::Publish => csi.publish(volume, &at.staging, &at.target).await,
                    Step::Unpublish => csi.unpublish(&volume.id, &at.target).await,
                }
            }
        })
        .await
        .with_context(|| format!("{what:?}"))
    };
    let staged = step(Step::Stage, mounts.len()).await?;
    let publish = step(Step::Publish, staged.answers.len()).await?;
    let unpublish = step(Step::Unpublish, publish.answers.len()).await?;
    Ok(Few { sync, create, resident_made, resident_started, start, publish, unpublish })
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Stage,
    Publish,
    Unpublish,
}

impl Few {
    pub(crate) fn publishes(&self) -> f64 {
        self.publish.rate()
    }

    pub(crate) fn unpublishes(&self) -> f64 {
        self.unpublish.rate()
    }

    /// The figures as a table.
    pub(crate) fn figures(&self, baseline: &Baseline) -> Figures {
        let made = count(self.create.answers.len());
        let mut figures = Figures::new(format!("{made} directory volumes"));
        figures.note(SYNC, self.sync.to_string());
        for percent in [50, 99] {
            let time = self.create.latencies.percentile(percent);
            figures.add(format!("create, one caller, p{percent}"), time, None, None);
        }
        let resident = Some(Target::AtMost(Quantity::Megabytes(10.0)));
        figures.add(format!("resident after creating {made}"), self.resident_made, resident, None);
        figures.add(format!("resident after starting on {made}"), self.resident_started, resident, None);
        figures.add(format!("start with {made}"), Quantity::Seconds(self.start.as_secs_f64()), None, None);
        let mounted = count(self.publish.answers.len());
        for (what, run, aim, other) in [
            ("publishes", &self.publish, 1300.0, baseline.publishes),
            ("unpublishes", &self.unpublish, 980.0, baseline.unpublishes),
        ] {
            figures.add(
                format!("{what}, {CALLERS} callers, {mounted} volumes"),
                Quantity::Rate(run.rate()),
                Some(Target::AtLeast(Quantity::Rate(aim))),
                other.map(|rate| Quantity::Rate(rate).to_string()),
            );
            figures.note("  latency p50 / p99", run.latencies.to_string());
        }
        figures
    }
}
