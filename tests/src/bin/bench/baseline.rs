//! What csi-driver-host-path does: measured in this run, or else as it was measured before.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::{
    few, many,
    server::Subject,
    table::{Quantity, count},
};

/// It becomes slower with every volume: with these numbers it takes about a minute.
const STEPS: &[usize] = &[10, 1000, 5000];
const PATIENCE: Duration = Duration::from_secs(45);

/// The other driver's figures.
#[derive(Debug)]
pub(crate) struct Baseline {
    /// Where the figures come from.
    pub(crate) origin: String,
    pub(crate) publishes: Option<f64>,
    pub(crate) unpublishes: Option<f64>,
    /// How its list of all volumes went.
    pub(crate) list: String,
    /// Its memory, and with how many volumes.
    pub(crate) resident: String,
    /// Creates on the way to its last step.
    pub(crate) filling: String,
    /// Deletes with about as many.
    pub(crate) deletes: Option<String>,
    /// Creates per second, by the number of volumes there are.
    creates: Vec<(usize, f64)>,
}

impl Baseline {
    /// Puts the same load on the driver that `HOSTPATH_BIN` names; without one, [`Self::quoted`].
    pub(crate) async fn measure() -> Result<Self> {
        let Some(subject) = Subject::host_path() else { return Ok(Self::quoted()) };
        let few = few::measure(&subject).await.context("few volumes")?;
        let many = many::measure(&subject, STEPS, PATIENCE).await.context("many volumes")?;
        Ok(Self {
            origin: "measured in this run, with the same load".to_owned(),
            publishes: Some(few.publishes()),
            unpublishes: Some(few.unpublishes()),
            list: many.listed(),
            resident: at(many.resident_made, many.volumes),
            filling: at(Quantity::Rate(many.all.rate()), many.volumes),
            deletes: Some(at(Quantity::Rate(many.delete.rate()), many.volumes)),
            creates: many.steps.iter().map(|step| (step.volumes, step.creates())).collect(),
        })
    }

    /// Figures from an earlier measurement, on two cores with 8 callers; of which version was not recorded.
    pub(crate) fn quoted() -> Self {
        Self {
            origin: "NOT measured in this run, because HOSTPATH_BIN names no hostpathplugin that works: quoted from an \
                     earlier measurement on two cores with 8 callers and directory volumes, not by this program"
                .to_owned(),
            publishes: Some(65.0),
            unpublishes: Some(49.0),
            list: "ends after 1 page".to_owned(),
            resident: at(Quantity::Megabytes(37.0), 5000),
            filling: at(Quantity::Rate(185.0), 5000),
            deletes: None,
            creates: vec![(10, 790.0), (5000, 107.0)],
        }
    }

    /// Its creates per second with that many volumes, if they are known.
    pub(crate) fn creates(&self, volumes: usize) -> Option<f64> {
        self.creates.iter().find(|(at, _)| *at == volumes).map(|(_, rate)| *rate)
    }
}

fn at(quantity: Quantity, volumes: usize) -> String {
    format!("{quantity} at {}", count(volumes))
}
