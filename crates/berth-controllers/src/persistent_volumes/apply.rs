//! Carries out what was decided about one claim and one volume, step by step.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use berth_kube::{Cluster, Recorder, reference};

use super::Error;
use super::step::{About, PlannedEvent, Step, Target};

/// A claim and a volume as they are after the steps so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Pair {
    pub(super) claim: Option<Arc<PersistentVolumeClaim>>,
    pub(super) volume: Option<Arc<PersistentVolume>>,
}

/// Makes the write of a step, or records its event; nothing is sent for what is already so.
pub(super) async fn apply(
    cluster: &Cluster,
    recorder: &Recorder,
    step: &Step,
    pair: &mut Pair,
) -> Result<(), Error> {
    match step {
        Step::Record(event) => record(recorder, event, pair),
        Step::Refuse(why) => return Err(Error::Misbound(why.clone())),
        _ => {}
    }
    match step.target() {
        Target::Volume | Target::VolumeStatus => {
            let Some(before) = pair.volume.clone() else { return Ok(()) };
            let mut after = Box::new((*before).clone());
            step.change_volume(&mut after, pair.claim.as_deref());
            if *after != *before {
                let claim = pair.claim.as_deref();
                let change = |volume: &mut PersistentVolume| step.change_volume(volume, claim);
                // Boxed, here and below: the write holds whole objects.
                let written = match step.target() {
                    Target::VolumeStatus => Box::pin(cluster.update_status(before.as_ref(), change)).await,
                    _ => Box::pin(cluster.update(before.as_ref(), change)).await,
                };
                pair.volume = Some(written?);
            }
        }
        Target::Claim | Target::ClaimStatus => {
            let Some(before) = pair.claim.clone() else { return Ok(()) };
            let mut after = Box::new((*before).clone());
            step.change_claim(&mut after, pair.volume.as_deref());
            if *after != *before {
                let volume = pair.volume.as_deref();
                let change = |claim: &mut PersistentVolumeClaim| step.change_claim(claim, volume);
                let written = match step.target() {
                    Target::ClaimStatus => Box::pin(cluster.update_status(before.as_ref(), change)).await,
                    _ => Box::pin(cluster.update(before.as_ref(), change)).await,
                };
                pair.claim = Some(written?);
            }
        }
        Target::Nothing => {}
    }
    Ok(())
}

fn record(recorder: &Recorder, event: &PlannedEvent, pair: &Pair) {
    let about = match event.about {
        About::Claim => pair.claim.as_deref().map(reference),
        About::Volume => pair.volume.as_deref().map(reference),
    };
    if let Some(about) = about {
        recorder.record(about, event.severity, event.reason, event.message.clone());
    }
}
