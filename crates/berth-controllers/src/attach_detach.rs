//! Attaches volumes to the nodes whose pods need them, and detaches them when nobody does.
//!
//! Reads: Pod, PVC, PV, CSIDriver, Node, VolumeAttachment. Writes: VolumeAttachment (creates, deletes), Node
//! `status.volumesAttached`, and an annotation for FlexVolumes. Events: `SuccessfulAttachVolume`, `FailedAttachVolume` on pods. Never calls CSI: the
//! driver's attacher acts on VolumeAttachments and says in their status what became of it. FlexVolume drivers are
//! called from here (`flex.rs`), and what they attached is what nodes' statuses say.
//!
//! Each volume is reconciled by itself, on all nodes at once, when anything it depends on changes. What is attached is
//! what VolumeAttachments say, so there is nothing to recover at a start and nothing to verify later. A volume leaves a
//! node in this order: nobody there wants it, the node does not use it, the node's status no longer says it is
//! attached, the node's status read afresh agrees, the attachment is deleted.
//!
//! Unlike kube-controller-manager it leaves attachments to nodes alone that attach by themselves.

mod flex;
mod names;
mod observe;
mod plan;
mod reports;
#[cfg(test)]
mod tests;

use berth_core::names::events;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_flex::Drivers;
use berth_kube::storage;
use berth_kube::timeline::Step;
use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next, Recorder, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec,
};
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use parking_lot::Mutex;
use tokio::time::Instant;

use flex::FlexAttachments;
use observe::{VolumeMemory, World};
use plan::{Action, Detach, plan};
use reports::Reports;

const COMPONENT: &str = "attachdetach-controller";
const WORKERS: usize = 64;

/// How long Kubernetes waits for a node that is not ready to unmount a volume that nobody wants there.
pub const FORCE_DETACH_AFTER: Duration = plan::UNMOUNT_WAIT;

/// Runs until the cluster's shutdown; `flex` are the FlexVolume drivers that attach volumes from here.
pub async fn run(cluster: Cluster, flex: Option<Drivers>, force_detach_after: Duration) {
    let cluster = cluster.named(COMPONENT);
    let backoff = Backoff { first: Duration::from_millis(50), ..Backoff::default() };
    let queue = cluster.queue("attach-detach", backoff);
    let flex = flex.map(|drivers| Arc::new(FlexAttachments::new(drivers, queue.clone())));
    let world = World::new(&cluster, flex.clone(), force_detach_after);
    let reports = Reports::new(&cluster, queue.clone());
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        world: world.clone(),
        reports: reports.clone(),
        known: Mutex::default(),
        cluster: cluster.clone(),
    });
    if let Some(flex) = &flex {
        tokio::select! {
            () = cluster.shutdown().cancelled() => return,
            () = world.nodes.synced() => controller.recover_flex(flex),
        }
    }
    let verifying = controller.clone().follow_flex(flex);
    // Each volume is reconciled when something it depends on changes.
    let (of_pod, of_claim, of_attachment) = (world.clone(), world.clone(), world.clone());
    let (of_driver, of_node) = (world.clone(), world.clone());
    let volumes = Loop::new(&cluster, &queue)
        .also(&world.pods, move |pod| of_pod.unique_of_pod(pod))
        .also(&world.claims, move |claim| of_claim.unique_of_claim(claim))
        .also(&world.volumes, |volume| storage::unique_name(volume))
        .also(&world.attachments, move |attachment| of_attachment.unique_of_attachment(attachment))
        .subscribe(&world.drivers, move |before, after| {
            let required =
                |driver: Option<&Arc<CSIDriver>>| driver.and_then(|driver| driver.spec.attach_required);
            let driver = after.or(before).filter(|_| required(before) != required(after));
            let volumes = driver.map(|driver| of_driver.volumes_by_driver.get(driver.name_any().as_str()));
            volumes.iter().flatten().filter_map(|volume| storage::unique_name(volume)).collect()
        })
        .subscribe(&world.nodes, move |before, after| {
            touched(&of_node, before.map(AsRef::as_ref), after.map(AsRef::as_ref))
        })
        .run(WORKERS, move |volume| controller.clone().reconcile(volume));
    tokio::join!(volumes, reports.run(), verifying);
}

struct Controller {
    cluster: Cluster,
    world: World,
    reports: Reports,
    recorder: Recorder,
    /// By volume, then by node.
    known: Mutex<HashMap<String, HashMap<String, VolumeMemory>>>,
}

impl Controller {
    async fn reconcile(self: Arc<Self>, volume: String) -> Result<Next> {
        let volume = volume.as_str();
        if names::split(volume).is_none() {
            // Who works on it adds it again, and so does a driver that comes.
            let flex = self.world.flex.as_ref();
            if !flex.is_some_and(|flex| flex.is_known(volume) && !flex.is_busy(volume)) {
                return Ok(Next::Done);
            }
        }
        let known = self.known().get(volume).cloned().unwrap_or_default();
        let observed = self.world.observe(volume, &known, |node| self.reports.settled(node, volume));
        let mut again = None;
        for action in plan(&observed) {
            if let Action::Again(after) = action {
                again = Some(again.map_or(after, |known: Duration| known.min(after)));
            } else if names::split(volume).is_none()
                && let Action::Attach { node } = &action
            {
                self.attach_flex(volume, node);
            } else if names::split(volume).is_none()
                && let Action::Detach { node, verify, .. } = &action
            {
                self.detach_flex(volume, node, *verify).await?;
            } else if names::split(volume).is_none()
                && let Action::Report { node, attached: false } = &action
            {
                self.note_detaching(volume, node).await?;
                self.apply(volume, action).await?;
            } else {
                self.apply(volume, action).await?;
            }
        }
        Ok(again.map_or(Next::Done, Next::After))
    }

    async fn apply(&self, volume: &str, action: Action) -> Result<()> {
        match action {
            Action::Attach { node } => self.attach(volume, &node).await?,
            Action::Attaching { node } => {
                self.remember(volume, &node, |known| known.attaching = Some(Instant::now()));
            }
            Action::Attached { node } => {
                self.remember(volume, &node, |known| *known = VolumeMemory::default());
                self.record_for_pods(volume, &node, |_, name| {
                    Ok(format!("AttachVolume.Attach succeeded for volume {name:?} "))
                });
            }
            Action::Failed { node, error } => {
                let mut new = false;
                self.remember(volume, &node, |known| {
                    new = known.error_reported.replace(error.clone()) != Some(error.clone());
                });
                if new {
                    self.record_for_pods(volume, &node, |_, name| {
                        Err(format!("AttachVolume.Attach failed for volume {name:?} : {error}"))
                    });
                }
            }
            Action::Slow { node } => {
                self.remember(volume, &node, |known| known.attaching = Some(Instant::now()));
                let (driver, handle) = names::split(volume).unwrap_or_default();
                self.record_for_pods(volume, &node, |_, name| {
                    Err(format!(
                        "AttachVolume.Attach failed for volume {name:?} : timed out waiting for external-attacher of \
                         {driver} CSI driver to attach volume {handle}; is the driver's controller running?"
                    ))
                });
            }
            Action::Conflict { node, users } => {
                self.remember(volume, &node, |known| known.conflict_reported = true);
                self.record_for_pods(volume, &node, |pod, name| {
                    Err(plan::conflict_message(name, &pod.namespace().unwrap_or_default(), &users))
                });
            }
            Action::Report { node, attached } => {
                let device = || self.world.flex.as_ref().map(|flex| flex.device(volume, &node));
                self.reports.set(&node, volume, attached.then(|| device().unwrap_or_default()));
            }
            Action::Detach { node, verify, why } => self.detach(volume, &node, verify, why).await?,
            Action::Wanted { node } => self.remember(volume, &node, |known| known.unwanted = None),
            Action::Forget { node } => self.remember(volume, &node, |known| *known = VolumeMemory::default()),
            Action::Unwanted { node } => self.remember(volume, &node, |known| {
                *known = VolumeMemory { unwanted: Some(Instant::now()), ..VolumeMemory::default() };
            }),
            Action::Again(_) => {}
        }
        Ok(())
    }

    async fn attach(&self, volume: &str, node: &str) -> Result<()> {
        let Some((driver, handle)) = names::split(volume) else { return Ok(()) };
        let users = self.world.users(volume);
        let here = users.iter().find(|user| storage::node_of_pod(&user.pod) == node);
        let Some(object) = here.and_then(|user| user.volume.as_ref()) else { return Ok(()) };
        self.remember(volume, node, |known| {
            *known = VolumeMemory { attaching: Some(Instant::now()), ..VolumeMemory::default() }
        });
        let attachment = VolumeAttachment {
            metadata: ObjectMeta {
                name: Some(storage::attachment_name(driver, handle, node)),
                annotations: Some(
                    [(berth_core::names::ATTACHED_VOLUME.to_owned(), names::short(volume).to_owned())].into(),
                ),
                ..ObjectMeta::default()
            },
            spec: VolumeAttachmentSpec {
                attacher: driver.to_owned(),
                node_name: node.to_owned(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(object.name_any()),
                    inline_volume_spec: None,
                },
            },
            status: None,
        };
        let begun = std::time::Instant::now();
        let created = self.cluster.create(&attachment).await;
        let why = created.as_ref().err().filter(|error| !error.is_already_exists()).map(Error::chain);
        Step {
            component: "attach-detach",
            call: "VolumeAttachment created",
            volume: &object.name_any(),
            node,
            ..Step::default()
        }
        .ended(begun, why.as_deref());
        match created {
            Err(error) if error.is_already_exists() => Ok(()),
            Err(error) => {
                let why = error.chain();
                self.record_for_pods(volume, node, |_, name| {
                    Err(format!("AttachVolume.Attach failed for volume {name:?} : {why}"))
                });
                Err(error)
            }
            Ok(_) => Ok(()),
        }
    }

    async fn detach(&self, volume: &str, node: &str, verify: bool, why: Detach) -> Result<()> {
        let Some((driver, handle)) = names::split(volume) else { return Ok(()) };
        let attachment = storage::attachment_name(driver, handle, node);
        let Some(attachment) = self.world.attachments.named(&attachment) else { return Ok(()) };
        if verify && self.is_spoken_of(volume, node).await? {
            return Ok(());
        }
        match why {
            Detach::Unused => tracing::debug!(volume, node, "detaching"),
            Detach::Timeout => {
                tracing::warn!(
                    volume,
                    node,
                    "node is not ready and did not unmount the volume in time; forcing the detach"
                );
            }
            Detach::OutOfService => {
                tracing::warn!(volume, node, "node is out of service; forcing the detach");
            }
        }
        self.cluster.delete(attachment.as_ref()).await
    }

    /// Whether the node's status, read afresh, still names the volume; the cache then knows it too, and the volume is
    /// looked at again.
    async fn is_spoken_of(&self, volume: &str, node: &str) -> Result<bool> {
        let fresh = self.cluster.fetch::<Node>(&Key::cluster(node)).await?;
        Ok(fresh.is_some_and(|node| {
            observe::in_use(&node).chain(observe::attached(&node)).any(|name| name == volume)
        }))
    }

    /// Records an event on the pods that want the volume on the node.
    fn record_for_pods(
        &self,
        volume: &str,
        node: &str,
        message: impl Fn(&Pod, &str) -> Result<String, String>,
    ) {
        for user in self.world.users(volume) {
            let pod = user.pod.as_ref();
            if storage::node_of_pod(pod) != node {
                continue;
            }
            match message(pod, &user.volume_name(volume)) {
                Ok(good) => self.recorder.normal(pod, events::SUCCESSFUL_ATTACH_VOLUME, good),
                Err(bad) => self.recorder.warning(pod, events::FAILED_ATTACH_VOLUME, bad),
            }
        }
    }

    fn remember(&self, volume: &str, node: &str, change: impl FnOnce(&mut VolumeMemory)) {
        let mut known = self.known();
        let nodes = known.entry(volume.to_owned()).or_default();
        let entry = nodes.entry(node.to_owned()).or_default();
        change(entry);
        if entry.is_nothing() {
            nodes.remove(node);
            if nodes.is_empty() {
                known.remove(volume);
            }
        }
    }

    fn known(&self) -> parking_lot::MutexGuard<'_, HashMap<String, HashMap<String, VolumeMemory>>> {
        self.known.lock()
    }
}

/// The volumes that a change of a node is about: those that joined or left its lists, or all of it if the node itself
/// changed in what matters.
fn touched(world: &World, before: Option<&Node>, after: Option<&Node>) -> Vec<String> {
    let lists = |node: Option<&Node>| -> (Vec<String>, Vec<String>) {
        node.map_or_else(Default::default, |node| {
            (
                observe::attached(node).map(str::to_owned).collect(),
                observe::in_use(node).map(str::to_owned).collect(),
            )
        })
    };
    let (attached_before, used_before) = lists(before);
    let (attached_after, used_after) = lists(after);
    if before.map(observe::facts) == after.map(observe::facts) {
        let mut volumes = differing(attached_before, attached_after);
        volumes.extend(differing(used_before, used_after));
        return volumes;
    }
    let Some(node) = after.or(before) else { return Vec::new() };
    let name = node.name_any();
    let mut volumes = [attached_before, used_before, attached_after, used_after].concat();
    volumes.extend(world.pods_by_node.get(name.as_str()).iter().flat_map(|pod| world.unique_of_pod(pod)));
    volumes.extend(
        world.attachments_by_node.get(name.as_str()).iter().filter_map(|of| world.unique_of_attachment(of)),
    );
    volumes
}

fn differing(before: Vec<String>, after: Vec<String>) -> Vec<String> {
    let (old, new): (std::collections::HashSet<String>, std::collections::HashSet<String>) =
        (before.into_iter().collect(), after.into_iter().collect());
    old.symmetric_difference(&new).cloned().collect()
}
