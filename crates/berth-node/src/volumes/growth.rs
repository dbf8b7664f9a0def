//! Grows what is on a volume that was grown while, or before, a pod uses it, and says so in the claim.

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimCondition, PersistentVolumeClaimStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::state::{Growth, size};
use super::{Outcome, Volumes};
use crate::plugin::{Certainty, Failed, Placed, PodVolume, Source};

/// The conditions of a claim that are about its growth.
const RESIZE: [&str; 4] = ["Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"];

/// What the driver's answer FAILED_PRECONDITION means for whoever waits.
const IN_USE: &str = "; the volume is in use, and is grown when it is staged the next time: after all pods on this node \
                      that use it have ended";

impl Volumes {
    /// Has the driver grow what is on a volume that a pod has.
    ///
    /// The claim says `NodeResizeInProgress` meanwhile, and the new size only once the driver says that it is there.
    /// Refused for now (FAILED_PRECONDITION) leaves it at `NodeResizePending` until the volume is staged again; refused
    /// for good at `NodeResizeInfeasible` until somebody asks for another size; everything else is tried again.
    pub(super) async fn expand(&self, placed: &Placed) -> Outcome {
        let known = self
            .state()
            .pod_mount(placed)
            .and_then(|pod_mount| Some((pod_mount.plugin.clone(), pod_mount.volume.clone()?)));
        let Some((plugin, volume)) = known else { return Outcome::Done };
        let Source::Persistent { volume: persistent, claim } = &volume.source else { return Outcome::Done };
        if volume.read_only {
            self.grown(placed, &volume);
            return Outcome::Done;
        }
        let claim = match self.options.cluster.update_status(claim.as_ref(), in_progress).await {
            Ok(claim) => claim,
            Err(error) => {
                tracing::debug!(error = error.chain(), "not marked as growing; trying again");
                return self.resolve_again(placed);
            }
        };
        let node = volume.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        let expanded = {
            let lock = self.steadiness(&placed.spec_name);
            let _alone = lock.write().await;
            plugin.expand(&volume).await
        };
        match expanded {
            Ok(_) => {
                let size =
                    persistent.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage").cloned());
                if let Err(error) =
                    self.options.cluster.update_status(claim.as_ref(), |claim| finished(claim, size)).await
                {
                    tracing::debug!(error = error.chain(), "not marked as grown; trying again");
                    return self.resolve_again(placed);
                }
                let message = format!(
                    "MountVolume.NodeExpandVolume succeeded for volume {:?} {node}",
                    placed.spec_name
                );
                self.options.recorder.normal(volume.pod.as_ref(), "FileSystemResizeSuccessful", &*message);
                self.options.recorder.normal(claim.as_ref(), "FileSystemResizeSuccessful", message);
                self.grown(placed, &volume);
                Outcome::Done
            }
            Err(failed) => self.not_grown(placed, &volume, &claim, &failed).await,
        }
    }

    /// Records that a volume could not be grown: the claim keeps the size that it has, and says what comes next.
    async fn not_grown(
        &self,
        placed: &Placed,
        volume: &PodVolume,
        claim: &PersistentVolumeClaim,
        failed: &Failed,
    ) -> Outcome {
        let next = match failed.certainty {
            Certainty::Unchanged => IN_USE,
            Certainty::Final | Certainty::Uncertain => "",
        };
        let cause = format!("{}{next}", failed.message);
        let message =
            format!("MountVolume.NodeExpandVolume failed for volume {:?} : {cause}", placed.spec_name);
        self.options.recorder.warning(volume.pod.as_ref(), "VolumeResizeFailed", &*message);
        self.options.recorder.warning(claim, "VolumeResizeFailed", message);
        let change = |claim: &mut PersistentVolumeClaim| refused(claim, &cause, failed.certainty);
        if let Err(error) = self.options.cluster.update_status(claim, change).await {
            tracing::debug!(error = error.chain(), "the failure to grow is not noted in the claim");
        }
        match failed.certainty {
            Certainty::Final => self.grown(placed, volume),
            Certainty::Unchanged => self.not_in_use(placed),
            Certainty::Uncertain => return Outcome::Failed,
        }
        Outcome::Done
    }

    /// There is nothing more to grow until the claim or the volume changes.
    fn grown(&self, placed: &Placed, volume: &PodVolume) {
        if let Some(pod_mount) = self.state().pod_mount_mut(placed) {
            pod_mount.growth = Growth::None;
            pod_mount.size = size(volume);
        }
    }

    /// The volume cannot be grown while the pod has it.
    fn not_in_use(&self, placed: &Placed) {
        if let Some(pod_mount) = self.state().pod_mount_mut(placed) {
            pod_mount.growth = Growth::Refused;
        }
    }

    /// The claim is not as it was: finds it anew, which also decides whether there is something to grow.
    fn resolve_again(&self, placed: &Placed) -> Outcome {
        let names: Vec<String> = {
            let state = self.state();
            let wishes = state.pods.get(&placed.pod_uid).into_iter().flat_map(|wishes| &wishes.volumes);
            wishes
                .filter(|(_, wish)| wish.found.as_ref() == Some(placed))
                .map(|(name, _)| name.clone())
                .collect()
        };
        for name in names {
            self.queue.add(super::Work::Find { pod: placed.pod_uid.clone(), name });
        }
        Outcome::Failed
    }
}

fn status(claim: &mut PersistentVolumeClaim) -> &mut PersistentVolumeClaimStatus {
    claim.status.get_or_insert_default()
}

fn in_progress(claim: &mut PersistentVolumeClaim) {
    let statuses = status(claim).allocated_resource_statuses.get_or_insert_default();
    statuses.insert("storage".to_owned(), "NodeResizeInProgress".to_owned());
}

fn finished(claim: &mut PersistentVolumeClaim, size: Option<Quantity>) {
    let status = status(claim);
    if let Some(size) = size {
        status.capacity.get_or_insert_default().insert("storage".to_owned(), size);
    }
    if let Some(statuses) = &mut status.allocated_resource_statuses {
        statuses.remove("storage");
        if statuses.is_empty() {
            status.allocated_resource_statuses = None;
        }
    }
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| !RESIZE.contains(&condition.type_.as_str()));
    }
}

fn refused(claim: &mut PersistentVolumeClaim, cause: &str, certainty: Certainty) {
    let status = status(claim);
    let resize = match certainty {
        Certainty::Final => "NodeResizeInfeasible",
        // Nobody works on it until the volume is staged again.
        Certainty::Unchanged => "NodeResizePending",
        Certainty::Uncertain => "NodeResizeInProgress",
    };
    let statuses = status.allocated_resource_statuses.get_or_insert_default();
    statuses.insert("storage".to_owned(), resize.to_owned());
    let message = Some(format!("failed to expand pvc with {cause}"));
    let conditions = status.conditions.get_or_insert_default();
    let known = conditions.iter_mut().find(|condition| condition.type_ == "NodeResizeError");
    if let Some(known) = known.filter(|known| known.status == "True") {
        known.message = message;
        return;
    }
    conditions.retain(|condition| condition.type_ != "NodeResizeError");
    conditions.push(PersistentVolumeClaimCondition {
        type_: "NodeResizeError".to_owned(),
        status: "True".to_owned(),
        last_transition_time: Some(Time(jiff::Timestamp::now())),
        message,
        ..PersistentVolumeClaimCondition::default()
    });
}
