//! The next steps of a StatefulSet, given its pods and claims. Pure.
//!
//! Pods come in the order of their ordinals and go in the reverse order. With `OrderedReady` each waits for the one before
//! it to be available; with `Parallel` none waits for another, except while pods are replaced by those of a new revision.

use std::collections::HashMap;
use std::sync::Arc;

use berth_core::names::CONTROLLER_REVISION_HASH;
use berth_kube::storage;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{RollingUpdateStatefulSetStrategy, StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::identity::{claims, is_identified, is_stale, ordinals, owners, pod_name};
use crate::workloads::pods::{
    Availability, Rounding, is_available, is_ready, nonzero, scaled, seconds_to_available,
};

/// One change to a StatefulSet's pods and claims.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Create the claims that a pending pod lacks.
    CreateClaims {
        ordinal: i32,
    },
    /// Create the claims that the pod with an ordinal lacks, then the pod, from the template of a revision.
    CreatePod {
        ordinal: i32,
        revision: String,
    },
    /// The pod cannot be created yet.
    Refuse {
        ordinal: i32,
        why: String,
    },
    /// Restore a pod's labels, or try its volumes, and tell of it.
    Identify {
        ordinal: i32,
        pod: Arc<Pod>,
    },
    /// Have a claim owned by these.
    Own {
        claim: Arc<PersistentVolumeClaim>,
        owners: Vec<OwnerReference>,
    },
    DeletePod {
        pod: Arc<Pod>,
    },
}

/// A pod of the set.
pub(super) struct Member {
    pub(super) ordinal: i32,
    pub(super) pod: Arc<Pod>,
    /// It is being deleted.
    pub(super) is_terminating: bool,
}

impl Member {
    fn is_over(&self) -> bool {
        storage::is_over(&self.pod)
    }

    fn is_ready(&self) -> bool {
        storage::phase_of_pod(&self.pod) == "Running" && is_ready(&self.pod)
    }

    fn is_healthy(&self) -> bool {
        self.is_ready() && !self.is_terminating
    }

    fn revision(&self) -> &str {
        self.pod.labels().get(CONTROLLER_REVISION_HASH).map_or("", String::as_str)
    }
}

/// A StatefulSet with its pods and claims.
pub(super) struct ObservedSet<'a> {
    pub(super) set: &'a StatefulSet,
    /// The name of the revision that pods are of which are not to be replaced yet.
    pub(super) current: &'a str,
    /// The name of the revision of the set's template.
    pub(super) update: &'a str,
    /// The pods, by ordinals.
    pub(super) members: Vec<Member>,
    /// The claims of those pods and of the pods that are wanted, by name.
    pub(super) claims: HashMap<String, Arc<PersistentVolumeClaim>>,
    pub(super) now: Timestamp,
}

/// Whether a step ends the round.
#[derive(PartialEq)]
enum Round {
    Goes,
    Ends,
}

/// What to do now.
pub(super) fn plan(observed: &ObservedSet<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    if observed.set.metadata.deletion_timestamp.is_some() {
        return steps;
    }
    let ordered = observed.is_ordered();
    for ordinal in ordinals(observed.set) {
        if observed.plan_replica(ordinal, &mut steps) == Round::Ends && ordered {
            return steps;
        }
    }
    let wanted = ordinals(observed.set);
    let mut condemned: Vec<&Member> =
        observed.members.iter().filter(|member| !wanted.contains(&member.ordinal)).collect();
    condemned.sort_by_key(|member| std::cmp::Reverse(member.ordinal));
    for member in &condemned {
        observed.plan_owners(member.ordinal, Some(&member.pod), true, &mut steps);
    }
    let first_unhealthy = observed.first_unhealthy(&condemned);
    for member in condemned {
        if member.is_terminating {
            if ordered {
                return steps;
            }
            continue;
        }
        // One that is not well waits for those below it to be well, unless it is the one that all wait for.
        if ordered && !observed.is_available(member) && first_unhealthy != Some(member.ordinal) {
            return steps;
        }
        steps.push(Step::DeletePod { pod: member.pod.clone() });
        if ordered {
            return steps;
        }
    }
    observed.plan_update(&mut steps);
    steps
}

impl ObservedSet<'_> {
    fn strategy(&self) -> (bool, Option<&RollingUpdateStatefulSetStrategy>) {
        let strategy = self.set.spec.as_ref().and_then(|spec| spec.update_strategy.as_ref());
        let on_delete = strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete");
        (on_delete, strategy.and_then(|strategy| strategy.rolling_update.as_ref()))
    }

    pub(super) fn is_ordered(&self) -> bool {
        let spec = self.set.spec.as_ref();
        spec.and_then(|spec| spec.pod_management_policy.as_deref()) != Some("Parallel")
    }

    fn minimum(&self) -> i32 {
        self.set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
    }

    fn is_available(&self, member: &Member) -> bool {
        member.is_ready() && is_available(&member.pod, self.minimum(), self.now)
    }

    fn member(&self, ordinal: i32) -> Option<&Member> {
        self.members.iter().find(|member| member.ordinal == ordinal)
    }

    /// The lowest ordinal that is wanted and not healthy, else the lowest of those that are not wanted.
    fn first_unhealthy(&self, condemned: &[&Member]) -> Option<i32> {
        let wanted =
            ordinals(self.set).find(|ordinal| !self.member(*ordinal).is_some_and(Member::is_healthy));
        wanted.or_else(|| {
            condemned.iter().rev().find(|member| !member.is_healthy()).map(|member| member.ordinal)
        })
    }

    /// The revision that a new pod gets.
    fn revision_of(&self, ordinal: i32) -> &str {
        let start = ordinals(self.set).start;
        let status = self.set.status.as_ref();
        let keeps = match self.strategy() {
            (true, _) => false,
            (false, Some(rolling)) => ordinal < start.saturating_add(rolling.partition.unwrap_or(0)),
            (false, None) => {
                let count = status.and_then(|status| status.current_replicas).unwrap_or(0);
                ordinal < start.saturating_add(count)
            }
        };
        if keeps { self.current } else { self.update }
    }

    fn plan_replica(&self, ordinal: i32, steps: &mut Vec<Step>) -> Round {
        let Some(member) = self.member(ordinal) else { return self.plan_creation(ordinal, steps) };
        if member.is_over() {
            if !member.is_terminating {
                steps.push(Step::DeletePod { pod: member.pod.clone() });
            }
            return Round::Ends;
        }
        if storage::phase_of_pod(&member.pod) == "Pending" && !self.missing_claims(ordinal).is_empty() {
            steps.push(Step::CreateClaims { ordinal });
        }
        if self.is_ordered() && (member.is_terminating || !self.is_available(member)) {
            return Round::Ends;
        }
        if !member.is_terminating {
            let before = steps.len();
            self.plan_owners(ordinal, Some(&member.pod), false, steps);
            // Claims that get other owners are told of as an update of their pod.
            if steps.len() > before || !is_identified(self.set, ordinal, &member.pod) {
                steps.push(Step::Identify { ordinal, pod: member.pod.clone() });
            }
        }
        Round::Goes
    }

    fn plan_creation(&self, ordinal: i32, steps: &mut Vec<Step>) -> Round {
        let name = pod_name(self.set, ordinal);
        for (_, claim) in claims(self.set, ordinal) {
            let Some(known) = self.claims.get(&claim.name_any()) else { continue };
            // It goes with the pod that it was used by.
            if is_stale(known, &name) {
                return Round::Ends;
            }
            if known.metadata.deletion_timestamp.is_some() {
                let why = format!("pvc {} is to be deleted", known.name_any());
                steps.push(Step::Refuse { ordinal, why });
                return Round::Ends;
            }
        }
        self.plan_owners(ordinal, None, false, steps);
        steps.push(Step::CreatePod { ordinal, revision: self.revision_of(ordinal).to_owned() });
        Round::Ends
    }

    /// The claims that the pod with an ordinal lacks, as they are to be created.
    pub(super) fn missing_claims(&self, ordinal: i32) -> Vec<PersistentVolumeClaim> {
        let mut missing: Vec<_> = claims(self.set, ordinal)
            .into_iter()
            .map(|(_, claim)| claim)
            .filter(|claim| !self.claims.contains_key(&claim.name_any()))
            .collect();
        for claim in &mut missing {
            let owners = owners(self.set, None, false, claim);
            claim.metadata.owner_references = Some(owners).filter(|owners| !owners.is_empty());
        }
        missing
    }

    fn plan_owners(&self, ordinal: i32, pod: Option<&Pod>, condemned: bool, steps: &mut Vec<Step>) {
        for (_, claim) in claims(self.set, ordinal) {
            let Some(known) = self.claims.get(&claim.name_any()) else { continue };
            if known.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let owners = owners(self.set, pod, condemned, known);
            if owners != known.metadata.owner_references.as_deref().unwrap_or_default() {
                steps.push(Step::Own { claim: known.clone(), owners });
            }
        }
    }

    /// Deletes pods of other revisions, the highest first, as many as may be missing at a time. One that is missing anyway
    /// costs nothing.
    fn plan_update(&self, steps: &mut Vec<Step>) {
        let (on_delete, rolling) = self.strategy();
        if on_delete {
            return;
        }
        let wanted = ordinals(self.set);
        let count = usize::try_from(wanted.end - wanted.start).unwrap_or(0);
        let lowest = wanted.start.saturating_add(rolling.and_then(|rolling| rolling.partition).unwrap_or(0));
        let most = max_unavailable(rolling.and_then(|rolling| rolling.max_unavailable.as_ref()), count);
        let is_missing = |member: &Member| member.is_terminating || !self.is_available(member);
        let missing = wanted.clone().filter(|ordinal| self.member(*ordinal).is_none_or(is_missing)).count();
        let mut left = most.saturating_sub(missing);
        for ordinal in (lowest.max(wanted.start)..wanted.end).rev() {
            let Some(member) = self.member(ordinal) else { continue };
            if member.is_terminating || member.is_over() || member.revision() == self.update {
                continue;
            }
            if !is_missing(member) {
                if left == 0 {
                    continue;
                }
                left -= 1;
            }
            steps.push(Step::DeletePod { pod: member.pod.clone() });
        }
    }

    /// The status, and in how many seconds it changes by itself because a pod was ready for long enough.
    pub(super) fn status(&self, collisions: i32) -> (StatefulSetStatus, Option<i64>) {
        let known = self.set.status.clone().unwrap_or_default();
        let (mut availability, mut current, mut updated) = (Availability::default(), 0, 0);
        for member in &self.members {
            if member.is_ready() {
                availability.count(seconds_to_available(&member.pod, self.minimum(), self.now));
            }
            if !member.is_terminating {
                current += i32::from(member.revision() == self.current);
                updated += i32::from(member.revision() == self.update);
            }
        }
        let replicas = i32::try_from(self.members.len()).unwrap_or(i32::MAX);
        let wanted = ordinals(self.set);
        let wanted = wanted.end - wanted.start;
        let mut revision = self.current;
        let (on_delete, _) = self.strategy();
        if !on_delete && updated == wanted && availability.ready == wanted && replicas == wanted {
            (current, revision) = (updated, self.update);
        }
        let status = StatefulSetStatus {
            observed_generation: self.set.metadata.generation,
            replicas,
            ready_replicas: nonzero(availability.ready),
            available_replicas: Some(availability.available),
            current_replicas: nonzero(current),
            updated_replicas: nonzero(updated),
            current_revision: Some(revision.to_owned()),
            update_revision: Some(self.update.to_owned()),
            collision_count: Some(collisions),
            conditions: known.conditions,
        };
        (status, availability.next)
    }
}

/// How many pods may be missing during an update: at least one, or it would never move.
fn max_unavailable(asked: Option<&IntOrString>, count: usize) -> usize {
    asked.map_or(1, |asked| scaled(asked, count, Rounding::Down)).max(1)
}
