//! What the scheduler knows besides the caches: what nodes carry, what was decided and is not done yet, and which pods wait for
//! what. A decision changes this state alone, and says which other pods it may help.

use std::collections::{HashMap, HashSet};

use berth_kube::{Key, storage};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::time::Instant;

use super::bind::{Reservation, Stage, Written};
use super::board::Board;
use super::decide::decide;
use super::hints::{POD_CAME, POD_LEFT, Waiting};
use super::setbacks::Setbacks;
use super::undecided::Undecided;
use super::unfit::{Preemption, Unfit};
use super::world::World;

/// What was decided about pods.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) board: Board,
    pub(super) reservations: HashMap<Key, Reservation>,
    pub(super) waiting: Waiting,
    pub(super) setbacks: Setbacks,
    pub(super) undecided: Undecided,
    /// Why pods fit nowhere, until their workers take it to say so; each for the pod with this uid.
    refused: HashMap<Key, (Option<String>, Unfit)>,
    /// Pods whose plans are being carried out at this moment. Nothing new is decided about them before that is over, even if the
    /// plan is taken back.
    carried_out: HashSet<Key>,
}

/// What a worker does about its pod.
#[derive(Debug)]
pub(super) enum Decision {
    /// The plan is carried out; [`State::end_of_work`] says that the worker is done for now.
    Plan(Reservation),
    /// The pod fits nowhere.
    Unfit(Unfit),
    /// The pod changed meanwhile, and comes again.
    Changed,
}

/// What a preemption finds that wants the room of a pod without a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TakenBack {
    /// The pod had a plan for that node, and has it no more.
    Plan,
    /// The pod has no plan for that node.
    Nothing,
    /// The pod is being bound to the node, or is bound already.
    TooLate,
}

impl State {
    /// What is decided about a pod, if it need not be decided first, along with those that are more important.
    pub(super) fn decided(&mut self, key: &Key, pod: &Pod) -> Option<Decision> {
        if let Some(known) = self.reservations.get(key).filter(|known| known.uid == pod.uid()) {
            let plan = known.clone();
            self.undecided.remove(key);
            self.carried_out.insert(key.clone());
            return Some(Decision::Plan(plan));
        }
        if self.undecided.contains(key) {
            return None;
        }
        let (_, unfit) = self.refused.remove(key).filter(|(uid, _)| *uid == pod.uid())?;
        Some(Decision::Unfit(unfit))
    }

    /// Decides about the most important pod that is to be decided about, as long as the one that `asks` is among them. Gives the
    /// pods that this may help.
    pub(super) fn decide_next(&mut self, world: &impl World, asks: &Key, now: Instant) -> Option<Vec<Key>> {
        if !self.undecided.contains(asks) {
            return None;
        }
        let is_free = |pod: &Key| pod == asks || !self.carried_out.contains(pod);
        let key = self.undecided.first(is_free)?.clone();
        self.undecided.remove(&key);
        let Some(pod) = world.pod(&key).filter(|pod| is_ours(pod)) else { return Some(Vec::new()) };
        let rests = self.setbacks.rest(&key, pod.metadata.uid.as_deref(), now).is_some();
        if rests || self.reservations.contains_key(&key) {
            return Some(Vec::new());
        }
        Some(self.decide(world, &key, &pod, now))
    }

    fn decide(&mut self, world: &impl World, key: &Key, pod: &Pod, now: Instant) -> Vec<Key> {
        self.waiting.remove(key);
        self.refused.remove(key);
        let (mut freed, mut helped) = (false, Vec::new());
        match decide(world, &mut self.board, pod) {
            Ok(placement) => {
                freed |= self.board.assume(key, pod, &placement.node);
                for (claim, volume) in &placement.volumes.bind {
                    self.board.promise_volume(volume, claim);
                }
                for claim in &placement.volumes.provision {
                    self.board.promise_node(claim, &placement.node);
                }
                let reservation = Reservation {
                    uid: pod.uid(),
                    placement,
                    since: now,
                    written: Written::Nothing,
                    stage: Stage::Volumes,
                };
                self.reservations.insert(key.clone(), reservation);
            }
            Err(unfit) => {
                self.waiting.insert(key, &unfit.plugins);
                match &unfit.preemption {
                    Preemption::Victims { node, withdrawn, .. } => {
                        freed |= self.board.nominate(key, pod, node);
                        for other in withdrawn {
                            freed |= self.board.withdraw(other);
                        }
                        helped.extend(withdrawn.iter().cloned());
                    }
                    Preemption::InVain => freed |= self.board.withdraw(key),
                    Preemption::NotEligible => {}
                }
                self.refused.insert(key.clone(), (pod.uid(), unfit));
            }
        }
        if freed {
            helped.extend(self.waiting.because(&POD_LEFT));
        }
        helped.retain(|other| other != key);
        helped
    }

    /// A worker is done with a plan for now.
    pub(super) fn end_of_work(&mut self, pod: &Key) {
        self.carried_out.remove(pod);
    }

    /// Takes in the change of a pod; gives the pods that it may help.
    pub(super) fn pod_changed(&mut self, key: &Key, before: Option<&Pod>, after: Option<&Pod>) -> Vec<Key> {
        let left = self.board.observe(key, before, after);
        let mut helped = if left { self.waiting.because(&POD_LEFT) } else { Vec::new() };
        // A pod that is being deleted still takes room, and does not count where pods are to be spread.
        let beside = |pod: Option<&Pod>| {
            let pod = pod.filter(|pod| !storage::node_of_pod(pod).is_empty())?;
            let is_leaving = pod.metadata.deletion_timestamp.is_some();
            Some((pod.metadata.labels.clone(), storage::node_of_pod(pod).to_owned(), is_leaving))
        };
        if after.is_some() && beside(before) != beside(after) {
            helped.extend(self.waiting.because(&POD_CAME));
        }
        // A pod without a node is tried when its own specification changes, not when we say in its status why it waits.
        let wishes =
            |pod: Option<&Pod>| pod.map(|pod| (pod.spec.clone(), pod.metadata.labels.clone(), is_ours(pod)));
        let pending = |pod: Option<&Pod>| pod.is_some_and(|pod| storage::node_of_pod(pod).is_empty());
        if (pending(before) || pending(after)) && wishes(before) != wishes(after) {
            helped.push(key.clone());
        }
        helped
    }

    /// Gives up what was planned for a pod; says whether that makes room.
    pub(super) fn abandon(&mut self, pod: &Key) -> bool {
        let reservation = self.reservations.remove(pod);
        if let Some(reservation) = &reservation {
            self.release(reservation);
        }
        self.board.forget(pod) || reservation.is_some_and(|reservation| reservation.stage != Stage::Bound)
    }

    /// Gives up what was planned for a pod on a node, unless it is too late.
    pub(super) fn take_back(&mut self, pod: &Key, node: &str) -> TakenBack {
        match self.reservations.get(pod) {
            Some(known) if known.placement.node != node => TakenBack::Nothing,
            Some(known) if known.stage != Stage::Volumes => TakenBack::TooLate,
            Some(_) => {
                self.abandon(pod);
                TakenBack::Plan
            }
            None => TakenBack::Nothing,
        }
    }

    /// Notes how far a plan is, and drops the promises that are written now; false if it was taken back.
    pub(super) fn note_written(&mut self, pod: &Key, written: Written) -> bool {
        let Some(known) = self.reservations.get_mut(pod) else { return false };
        let is_news = known.written != written && written == Written::Everything;
        known.written = written;
        if is_news {
            let known = known.clone();
            self.release(&known);
        }
        true
    }

    /// Notes how far a plan is; false if it was taken back.
    pub(super) fn enter(&mut self, pod: &Key, stage: Stage) -> bool {
        self.reservations.get_mut(pod).map(|known| known.stage = stage).is_some()
    }

    /// Forgets a pod that is gone, or has a node, but for what was planned.
    pub(super) fn forget(&mut self, pod: &Key) {
        self.waiting.remove(pod);
        self.setbacks.forget(pod);
        self.undecided.remove(pod);
        self.refused.remove(pod);
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

/// Whether a pod waits for a node, and waits for us.
pub(super) fn is_ours(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    storage::node_of_pod(pod).is_empty()
        && !storage::is_over(pod)
        && pod.metadata.deletion_timestamp.is_none()
        && spec.scheduler_name.as_deref().unwrap_or(super::COMPONENT) == super::COMPONENT
        && spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
}
