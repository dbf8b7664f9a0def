//! Chooses a node for each pod, with its volumes in mind.
//!
//! Reads: Pod, Node, Namespace, PVC, PV, StorageClass, CSIDriver, CSINode, CSIStorageCapacity, VolumeAttachment,
//! PodDisruptionBudget. Writes: pods' binding, conditions `PodScheduled` and `DisruptionTarget`, and `nominatedNodeName`; PV
//! `spec.claimRef`, PVC annotation `volume.kubernetes.io/selected-node`. Deletes: pods that make room for others.
//! Events: `Scheduled`, `FailedScheduling`, `Preempted` on pods. Serves pods whose `schedulerName` is `default-scheduler`.
//!
//! Decisions are made one after the other from caches, in microseconds, about the most important pod first (`undecided.rs`);
//! writes run beside each other. What was decided counts at once (`state.rs`). A pod that fits nowhere is tried again when
//! something changes that prevented it, and never by the clock. A pod whose volumes are being made keeps its node until they
//! are bound, a more important pod gets the node, or somebody takes it back; in the last case it rests, 1 s at first and 10 s
//! at most, before it gets another.
//!
//! If a pod fits nowhere, less important pods make room for it where the least is lost (`preempt.rs`): its status names the
//! node first, so that a crash after it is no loss, then they are deleted with their grace period, and until they are gone
//! the room is kept for it against pods that are less important.

mod bind;
mod board;
mod decide;
mod hints;
mod neighbours;
mod preempt;
mod setbacks;
mod state;
#[cfg(test)]
mod tests;
mod undecided;
mod unfit;
mod volumes;
mod world;

use berth_core::names::events;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::timeline::Step;
use berth_kube::{Backoff, Cluster, Key, Loop, Next, Queue, Recorder, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::nodes::{deletion, disrupt};
use berth_kube::storage;
use bind::{BIND_TIMEOUT, Nomination, Reservation, SOURCE_TIMEOUT, Setback, Stage, Written};
pub(crate) use decide::{is_wanted, tolerates};
use state::{Decision, State, TakenBack, is_ours};
use unfit::{Plugin, Preemption};
use world::Caches;

const COMPONENT: &str = "default-scheduler";
const WORKERS: usize = 64;

/// Runs until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let scheduler = Arc::new(Scheduler::new(&cluster));
    let work = |pod: Key| {
        let scheduler = scheduler.clone();
        async move { scheduler.reconcile(&pod).await }
    };
    scheduler.control(&cluster).run(WORKERS, work).await;
}

struct Scheduler {
    cluster: Cluster,
    caches: Caches,
    recorder: Recorder,
    queue: Queue<Key>,
    state: Mutex<State>,
}

impl Scheduler {
    fn new(cluster: &Cluster) -> Self {
        Self {
            recorder: Recorder::new(cluster, COMPONENT, ""),
            cluster: cluster.clone(),
            caches: Caches::new(cluster),
            queue: cluster.queue(
                "scheduler",
                Backoff { first: Duration::from_millis(5), longest: Duration::from_secs(10) },
            ),
            state: Mutex::default(),
        }
    }

    async fn reconcile(&self, key: &Key) -> Result<Next> {
        let Some(pod) = self.caches.pods.get(key).filter(|pod| is_ours(pod)) else {
            self.state().forget(key);
            self.abandon(key);
            return Ok(Next::Done);
        };
        // Also when something changed: a setback changes the claim itself.
        let rest = self.state().setbacks.rest(key, pod.metadata.uid.as_deref(), Instant::now());
        if let Some(rest) = rest {
            return Ok(Next::After(rest));
        }
        let unfit = match self.decide(key, &pod) {
            Decision::Plan(reservation) => {
                let done = self.carry_out(key, &pod, reservation).await;
                self.state().end_of_work(key);
                return done;
            }
            Decision::Unfit(unfit) => unfit,
            Decision::Changed => return Ok(Next::Done),
        };
        let nomination = match &unfit.preemption {
            Preemption::Victims { node, .. } => Nomination::Set(node.clone()),
            // Nothing is kept for it any more if a more important pod took the room.
            Preemption::NotEligible if self.nomination(key).is_some() => Nomination::Keep,
            Preemption::NotEligible | Preemption::InVain => Nomination::Clear,
        };
        bind::refuse(&self.cluster, &pod, "Unschedulable", &unfit.message, &nomination).await?;
        self.recorder.warning(pod.as_ref(), events::FAILED_SCHEDULING, unfit.message);
        if let Preemption::Victims { node, pods, withdrawn } = unfit.preemption {
            self.make_room(key, &pod, &node, &pods, withdrawn).await?;
        }
        Ok(Next::Done)
    }

    /// What is decided about a pod, after it is decided about all that are more important.
    fn decide(&self, key: &Key, pod: &Pod) -> Decision {
        let is_another = self.state().reservations.get(key).is_some_and(|known| known.uid != pod.uid());
        if is_another {
            self.abandon(key);
        }
        if let Some(decision) = self.state().decided(key, pod) {
            return decision;
        }
        self.state().undecided.insert(key, pod);
        loop {
            // Others may have the state between two decisions.
            let helped = self.state().decide_next(&self.caches, key, Instant::now());
            let Some(helped) = helped else { break };
            self.try_again(helped);
        }
        self.state().decided(key, pod).unwrap_or(Decision::Changed)
    }

    /// Has pods leave a node for one that is more important.
    async fn make_room(
        &self,
        key: &Key,
        pod: &Pod,
        node: &str,
        victims: &[Key],
        withdrawn: Vec<Key>,
    ) -> Result<()> {
        // Meanwhile it may have got a node, or somebody who is more important the room.
        if self.nomination(key).as_deref() != Some(node) {
            return Ok(());
        }
        for key in withdrawn {
            if let Some(other) = self.caches.pods.get(&key) {
                bind::withdraw(&self.cluster, &other).await?;
            }
        }
        let leave = victims.iter().map(|victim| self.leave(pod, node, victim));
        futures_util::future::try_join_all(leave).await.map(drop)
    }

    /// Has a pod leave its node. One that is on its way there only loses its place.
    async fn leave(&self, pod: &Pod, node: &str, victim: &Key) -> Result<()> {
        let Some(found) = self.caches.pods.get(victim) else { return Ok(()) };
        if found.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let message = format!("Preempted by pod {uid} on node {node}");
        let at = storage::node_of_pod(&found);
        if at.is_empty() {
            let taken = self.state().take_back(victim, node);
            match taken {
                TakenBack::Plan => {
                    let waiting = self.waiting(&hints::PLAN_GIVEN_UP);
                    self.try_again(waiting);
                    self.try_again(vec![victim.clone()]);
                    let message = format!("{message} (in kube-scheduler memory).");
                    self.recorder.normal(found.as_ref(), events::PREEMPTED, message);
                    return Ok(());
                }
                TakenBack::Nothing => return Ok(()),
                // It leaves as if it were there.
                TakenBack::TooLate => {}
            }
        } else if at != node {
            return Ok(());
        }
        let why = format!("{COMPONENT}: preempting to accommodate a higher priority pod");
        let now = jiff::Timestamp::now();
        self.cluster.edit_status(found.as_ref(), |pod| disrupt(pod, preempt::REASON, &why, now)).await?;
        match self.cluster.delete_with(found.as_ref(), &deletion(&found, false)).await {
            Err(error) if error.is_not_found() || error.is_conflict() => return Ok(()),
            deleted => deleted?,
        }
        self.recorder.normal(found.as_ref(), events::PREEMPTED, message);
        Ok(())
    }

    async fn carry_out(&self, key: &Key, pod: &Pod, reservation: Reservation) -> Result<Next> {
        match self.advance(key, pod, &reservation).await {
            Ok(next) => Ok(next),
            Err(Setback::Volumes(why)) => {
                let rest = self.state().setbacks.count(key, pod.metadata.uid.as_deref(), Instant::now());
                self.abandon(key);
                let message = Setback::Volumes(why).to_string();
                bind::refuse(&self.cluster, pod, "SchedulerError", &message, &Nomination::Clear).await?;
                self.recorder.warning(pod, events::FAILED_SCHEDULING, message);
                Ok(Next::After(rest))
            }
            Err(Setback::Write(error)) => {
                if error.is_not_found() {
                    self.abandon(key);
                }
                Err(error)
            }
        }
    }

    async fn advance(&self, key: &Key, pod: &Pod, reservation: &Reservation) -> Result<Next, Setback> {
        if reservation.stage == Stage::Bound {
            return Ok(Next::Done);
        }
        let node = &reservation.placement.node;
        let begun = std::time::Instant::now();
        let written = bind::write(&self.cluster, &self.caches, reservation).await?;
        if reservation.written == Written::Nothing {
            trace_step("schedule", key, node, begun);
        }
        // Whoever takes a plan back has the pod come again.
        if !self.state().note_written(key, written) {
            return Ok(Next::Done);
        }
        let waited = reservation.since.elapsed();
        if written == Written::Sources {
            return Ok(Next::After(SOURCE_TIMEOUT.saturating_sub(waited)));
        }
        if !bind::is_bound(&self.caches, reservation)? {
            if waited >= BIND_TIMEOUT {
                return Err(Setback::Volumes("binding volumes: context deadline exceeded".to_owned()));
            }
            return Ok(Next::After(BIND_TIMEOUT.saturating_sub(waited)));
        }
        if !self.state().enter(key, Stage::Binding) {
            return Ok(Next::Done);
        }
        let begun = std::time::Instant::now();
        match bind::bind(&self.cluster, pod, node).await {
            Ok(()) => trace_step("bind pod", key, node, begun),
            // Somebody else assigned it, or it is another pod of that name by now.
            Err(error) if error.is_conflict() || error.is_not_found() => {
                self.abandon(key);
                return Ok(Next::Retry);
            }
            Err(error) => {
                self.state().enter(key, Stage::Volumes);
                return Err(error.into());
            }
        }
        {
            let mut state = self.state();
            state.enter(key, Stage::Bound);
            state.setbacks.forget(key);
        }
        self.recorder.normal(pod, events::SCHEDULED, format!("Successfully assigned {key} to {node}"));
        Ok(Next::Done)
    }

    /// Gives up what was planned for a pod, and queues those that it may have prevented.
    fn abandon(&self, pod: &Key) {
        let had_plans = self.state().abandon(pod);
        if had_plans {
            let waiting = self.waiting(&hints::PLAN_GIVEN_UP);
            self.try_again(waiting);
        }
    }

    /// Has pods decided about again.
    fn try_again(&self, pods: Vec<Key>) {
        for pod in self.undecided(pods) {
            self.queue.add(pod);
        }
    }

    /// Notes that pods are to be decided about, which are in the queue or come there now.
    fn undecided(&self, pods: Vec<Key>) -> Vec<Key> {
        let mut state = self.state();
        for key in &pods {
            if let Some(pod) = self.caches.pods.get(key).filter(|pod| is_ours(pod)) {
                state.undecided.insert(key, &pod);
            }
        }
        pods
    }

    /// Where room is kept for a pod.
    fn nomination(&self, pod: &Key) -> Option<String> {
        self.state().board.nomination(pod).map(str::to_owned)
    }

    /// The pods that wait because of one of these.
    fn waiting(&self, plugins: &[Plugin]) -> Vec<Key> {
        if plugins.is_empty() { Vec::new() } else { self.state().waiting.because(plugins) }
    }

    /// The pods that were to go to a node.
    fn reserved(&self, node: &str) -> Vec<Key> {
        let state = self.state();
        let pods = state.reservations.iter().filter(|(_, reserved)| reserved.placement.node == node);
        pods.map(|(pod, _)| pod.clone()).collect()
    }

    /// The pods without a node that use a claim.
    fn users(&self, claim: &Key) -> Vec<Key> {
        self.caches.pending_by_claim.get(claim).iter().map(|pod| Key::of(pod.as_ref())).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The changes that lead to another reconciliation.
impl Scheduler {
    fn control(self: &Arc<Self>, cluster: &Cluster) -> Loop<Key> {
        let caches = &self.caches;
        let of = || self.clone();
        let (of_pod, of_node, of_namespace, of_claim, of_volume) = (of(), of(), of(), of(), of());
        let (of_class, of_driver, of_csi_node, of_capacity, of_attachment) = (of(), of(), of(), of(), of());
        Loop::new(cluster, &self.queue)
            .reads(&caches.budgets)
            .subscribe(&caches.pods, move |before, after| {
                of_pod.undecided(of_pod.pod_changed(before.map(AsRef::as_ref), after.map(AsRef::as_ref)))
            })
            .subscribe(&caches.nodes, move |before, after| {
                let hints = hints::of_node(before.map(AsRef::as_ref), after.map(AsRef::as_ref));
                let mut pods = of_node.waiting(&hints);
                if let (Some(gone), None) = (before, after) {
                    pods.extend(of_node.reserved(&gone.name_any()));
                }
                of_node.undecided(pods)
            })
            .subscribe(&caches.namespaces, move |before, after| {
                let labels = |namespace: Option<&Arc<Namespace>>| {
                    namespace.and_then(|namespace| namespace.metadata.labels.clone())
                };
                let changed = labels(before) != labels(after);
                of_namespace.hint(if changed { &[Plugin::InterPodAffinity] } else { &[] })
            })
            .also(&caches.claims, move |claim| of_claim.undecided(of_claim.users(&Key::of(claim.as_ref()))))
            .also(&caches.volumes, move |volume| match storage::claim_of_volume(volume) {
                Some(claim) => of_volume.undecided(of_volume.users(&claim)),
                None => of_volume.hint(&[Plugin::VolumeBinding]),
            })
            .subscribe(&caches.classes, move |before, after| {
                let topologies =
                    |class: Option<&Arc<StorageClass>>| class.map(|class| class.allowed_topologies.clone());
                let changed = after.is_some() && topologies(before) != topologies(after);
                of_class.hint(if changed { &[Plugin::VolumeBinding, Plugin::VolumeZone] } else { &[] })
            })
            .also(&caches.drivers, move |_| of_driver.hint(&[Plugin::VolumeBinding, Plugin::VolumeLimits]))
            .subscribe(&caches.csi_nodes, move |before, after| {
                let changed = before.map(|node| &node.spec) != after.map(|node| &node.spec);
                of_csi_node.hint(if changed { &[Plugin::VolumeLimits] } else { &[] })
            })
            .subscribe(&caches.capacities, move |before, after| {
                let grown = hints::has_grown(before.map(AsRef::as_ref), after.map(AsRef::as_ref));
                of_capacity.hint(if grown { &[Plugin::VolumeBinding] } else { &[] })
            })
            .subscribe(&caches.attachments, move |_, after| {
                of_attachment.hint(if after.is_none() { &[Plugin::VolumeLimits] } else { &[] })
            })
    }

    /// The pods that wait because of one of these, to be decided about again.
    fn hint(&self, plugins: &[Plugin]) -> Vec<Key> {
        self.undecided(self.waiting(plugins))
    }

    fn pod_changed(&self, before: Option<&Pod>, after: Option<&Pod>) -> Vec<Key> {
        let Some(pod) = after.or(before) else { return Vec::new() };
        self.state().pod_changed(&Key::of(pod), before, after)
    }
}

fn trace_step(call: &str, pod: &Key, node: &str, begun: std::time::Instant) {
    Step { component: "scheduler", call, pod: &pod.to_string(), node, ..Step::default() }.ended(begun, None);
}
