//! Chooses a node for each pod, with its volumes in mind.
//!
//! Reads: Pod, Node, Namespace, PVC, PV, StorageClass, CSIDriver, CSINode, CSIStorageCapacity, VolumeAttachment,
//! PodDisruptionBudget. Writes: pods' binding, conditions `PodScheduled` and `DisruptionTarget`, and `nominatedNodeName`; PV
//! `spec.claimRef`, PVC annotation `volume.kubernetes.io/selected-node`. Deletes: pods that make room for others.
//! Events: `Scheduled`, `FailedScheduling`, `Preempted` on pods. Serves pods whose `schedulerName` is `default-scheduler`.
//!
//! Decisions are made one after the other from caches, in microseconds; writes run beside each other. What was decided
//! counts at once. A pod that fits nowhere is tried again when something changes that prevented it, and never
//! by the clock. A pod whose volumes are being made keeps its node until they are bound or somebody takes the node
//! back; then it rests, 1 s at first and 10 s at most, before it gets another.
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
#[cfg(test)]
mod tests;
mod unfit;
mod volumes;
mod world;

use berth_core::names::events;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::provisionable::largest_volume;
use berth_kube::timeline::Step;
use berth_kube::{Backoff, Cluster, Key, Loop, Next, Queue, Recorder, Result};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::nodes::{deletion, disrupt};
use berth_kube::storage;
use bind::{BIND_TIMEOUT, Nomination, Reservation, Setback};
use board::Board;
use decide::decide;
pub(crate) use decide::{is_wanted, tolerates};
use hints::Waiting;
use setbacks::Setbacks;
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

#[derive(Default)]
struct State {
    board: Board,
    reservations: HashMap<Key, Reservation>,
    waiting: Waiting,
    setbacks: Setbacks,
}

impl State {
    /// Gives up what was planned for a pod; says whether anything was.
    fn abandon(&mut self, pod: &Key) -> bool {
        let reservation = self.reservations.remove(pod);
        if let Some(reservation) = &reservation {
            self.release(reservation);
        }
        self.board.forget(pod) || reservation.is_some()
    }

    /// Drops the promises of a reservation: they are written, or void.
    fn release(&mut self, reservation: &Reservation) {
        let volumes = &reservation.placement.volumes;
        for (claim, volume) in &volumes.bind {
            self.board.release(claim, Some(volume));
        }
        for claim in &volumes.provision {
            self.board.release(claim, None);
        }
    }
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
            {
                let mut state = self.state();
                state.waiting.remove(key);
                state.setbacks.forget(key);
            }
            self.abandon(key);
            return Ok(Next::Done);
        };
        // Also when something changed: a setback changes the claim itself.
        let rest = self.state().setbacks.rest(key, pod.metadata.uid.as_deref(), Instant::now());
        if let Some(rest) = rest {
            return Ok(Next::After(rest));
        }
        let unfit = match self.reserve(key, &pod) {
            Ok(reservation) => return self.carry_out(key, &pod, reservation).await,
            Err(unfit) => unfit,
        };
        let nomination = match &unfit.preemption {
            Preemption::Victims { node, .. } => Nomination::Set(node.clone()),
            Preemption::NotEligible => Nomination::Keep,
            Preemption::InVain => Nomination::Clear,
        };
        bind::refuse(&self.cluster, &pod, "Unschedulable", &unfit.message, &nomination).await?;
        self.recorder.warning(pod.as_ref(), events::FAILED_SCHEDULING, unfit.message);
        if let Preemption::Victims { node, pods, withdrawn } = unfit.preemption {
            self.make_room(&pod, &node, &pods, withdrawn).await?;
        }
        Ok(Next::Done)
    }

    /// Has pods leave a node for one that is more important.
    async fn make_room(&self, pod: &Pod, node: &str, victims: &[Key], withdrawn: Vec<Key>) -> Result<()> {
        for key in withdrawn {
            if let Some(other) = self.caches.pods.get(&key) {
                bind::withdraw(&self.cluster, &other).await?;
            }
            self.queue.add(key);
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
        if storage::node_of_pod(&found).is_empty() {
            self.abandon(victim);
            self.queue.add(victim.clone());
            let message = format!("{message} (in kube-scheduler memory).");
            self.recorder.normal(found.as_ref(), events::PREEMPTED, message);
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

    /// The reservation a pod has, or a new one.
    fn reserve(&self, key: &Key, pod: &Pod) -> Result<Reservation, unfit::Unfit> {
        let known = self.state().reservations.get(key).cloned();
        match known {
            Some(known) if known.uid == pod.uid() => return Ok(known),
            Some(_) => self.abandon(key),
            None => {}
        }
        let mut state = self.state();
        state.waiting.remove(key);
        match decide(&self.caches, &mut state.board, pod) {
            Ok(placement) => {
                state.board.assume(key, pod, &placement.node);
                for (claim, volume) in &placement.volumes.bind {
                    state.board.promise_volume(volume, claim);
                }
                for claim in &placement.volumes.provision {
                    state.board.promise_node(claim, &placement.node);
                }
                let reservation =
                    Reservation { uid: pod.uid(), placement, since: Instant::now(), written: false };
                state.reservations.insert(key.clone(), reservation.clone());
                Ok(reservation)
            }
            Err(unfit) => {
                state.waiting.insert(key, &unfit.plugins, board::priority(pod));
                match &unfit.preemption {
                    Preemption::Victims { node, withdrawn, .. } => {
                        state.board.nominate(key, pod, node);
                        for other in withdrawn {
                            state.board.withdraw(other);
                        }
                    }
                    Preemption::InVain => {
                        state.board.withdraw(key);
                    }
                    Preemption::NotEligible => {}
                }
                Err(unfit)
            }
        }
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
        let node = &reservation.placement.node;
        let begun = std::time::Instant::now();
        bind::write(&self.cluster, &self.caches, reservation).await?;
        if !reservation.written {
            trace_step("schedule", key, node, begun);
            let mut state = self.state();
            state.release(reservation);
            if let Some(reservation) = state.reservations.get_mut(key) {
                reservation.written = true;
            }
        }
        if !bind::is_bound(&self.caches, reservation)? {
            let waited = reservation.since.elapsed();
            if waited >= BIND_TIMEOUT {
                return Err(Setback::Volumes("binding volumes: context deadline exceeded".to_owned()));
            }
            return Ok(Next::After(BIND_TIMEOUT.saturating_sub(waited)));
        }
        let begun = std::time::Instant::now();
        match bind::bind(&self.cluster, pod, node).await {
            Ok(()) => trace_step("bind pod", key, node, begun),
            // Somebody else assigned it, or it is another pod of that name by now.
            Err(error) if error.is_conflict() || error.is_not_found() => {
                self.abandon(key);
                return Ok(Next::Retry);
            }
            Err(error) => return Err(error.into()),
        }
        {
            let mut state = self.state();
            state.reservations.remove(key);
            state.setbacks.forget(key);
        }
        self.recorder.normal(pod, events::SCHEDULED, format!("Successfully assigned {key} to {node}"));
        Ok(Next::Done)
    }

    /// Gives up what was planned for a pod, and queues those that it may have prevented.
    fn abandon(&self, pod: &Key) {
        let had_plans = self.state().abandon(pod);
        if had_plans {
            for waiting in self.waiting(&hints::PLAN_GIVEN_UP) {
                self.queue.add(waiting);
            }
        }
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
        let (of_pod, of_node, of_claim, of_volume) = (of(), of(), of(), of());
        let (of_class, of_driver, of_csi_node, of_capacity, of_attachment) = (of(), of(), of(), of(), of());
        Loop::new(cluster, &self.queue)
            .subscribe(&caches.pods, move |before, after| {
                of_pod.pod_changed(before.map(AsRef::as_ref), after.map(AsRef::as_ref))
            })
            .subscribe(&caches.nodes, move |before, after| {
                let hints = hints::of_node(before.map(AsRef::as_ref), after.map(AsRef::as_ref));
                let mut pods = of_node.waiting(&hints);
                if let (Some(gone), None) = (before, after) {
                    pods.extend(of_node.reserved(&gone.name_any()));
                }
                pods
            })
            .also(&caches.claims, move |claim| of_claim.users(&Key::of(claim.as_ref())))
            .also(&caches.volumes, move |volume| match storage::claim_of_volume(volume) {
                Some(claim) => of_volume.users(&claim),
                None => of_volume.waiting(&[Plugin::VolumeBinding]),
            })
            .subscribe(&caches.classes, move |before, after| {
                let topologies =
                    |class: Option<&Arc<StorageClass>>| class.map(|class| class.allowed_topologies.clone());
                let changed = after.is_some() && topologies(before) != topologies(after);
                let hints: &[Plugin] =
                    if changed { &[Plugin::VolumeBinding, Plugin::VolumeZone] } else { &[] };
                of_class.waiting(hints)
            })
            .also(&caches.drivers, move |_| of_driver.waiting(&[Plugin::VolumeBinding, Plugin::VolumeLimits]))
            .subscribe(&caches.csi_nodes, move |before, after| {
                let changed = before.map(|node| &node.spec) != after.map(|node| &node.spec);
                of_csi_node.waiting(if changed { &[Plugin::VolumeLimits] } else { &[] })
            })
            .subscribe(&caches.capacities, move |before, after| {
                let grown = after.and_then(|after| largest_volume(after))
                    > before.and_then(|before| largest_volume(before));
                of_capacity.waiting(if grown { &[Plugin::VolumeBinding] } else { &[] })
            })
            .subscribe(&caches.attachments, move |_, after| {
                of_attachment.waiting(if after.is_none() { &[Plugin::VolumeLimits] } else { &[] })
            })
    }

    fn pod_changed(&self, before: Option<&Pod>, after: Option<&Pod>) -> Vec<Key> {
        let Some(pod) = after.or(before) else { return Vec::new() };
        let key = Key::of(pod);
        let named = |pod: Option<&Pod>| pod.and_then(board::nominated_node).map(str::to_owned);
        let left = {
            let mut state = self.state();
            // Somebody took the name of the node away, or we did.
            let withdrawn = named(before).is_some() && named(after).is_none() && state.board.withdraw(&key);
            state.board.observe(&key, after) || withdrawn
        };
        let mut pods = if left { self.waiting(&hints::POD_LEFT) } else { Vec::new() };
        let beside = |pod: Option<&Pod>| {
            let pod = pod.filter(|pod| !storage::node_of_pod(pod).is_empty())?;
            Some((pod.metadata.labels.clone(), storage::node_of_pod(pod).to_owned()))
        };
        if after.is_some() && beside(before) != beside(after) {
            pods.extend(self.waiting(&hints::POD_CAME));
        }
        // A pod without a node is tried when its own specification changes, not when we say in its status why it waits.
        let wishes =
            |pod: Option<&Pod>| pod.map(|pod| (pod.spec.clone(), pod.metadata.labels.clone(), is_ours(pod)));
        let pending = |pod: Option<&Pod>| pod.is_some_and(|pod| storage::node_of_pod(pod).is_empty());
        if (pending(before) || pending(after)) && wishes(before) != wishes(after) {
            pods.push(key);
        }
        pods
    }
}

fn trace_step(call: &str, pod: &Key, node: &str, begun: std::time::Instant) {
    Step { component: "scheduler", call, pod: &pod.to_string(), node, ..Step::default() }.ended(begun, None);
}

/// Whether a pod waits for a node, and waits for us.
fn is_ours(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    storage::node_of_pod(pod).is_empty()
        && !storage::is_over(pod)
        && pod.metadata.deletion_timestamp.is_none()
        && spec.scheduler_name.as_deref().unwrap_or(COMPONENT) == COMPONENT
        && spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
}
