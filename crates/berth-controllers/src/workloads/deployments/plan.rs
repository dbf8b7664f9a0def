//! The next steps of a rollout, given a Deployment and its ReplicaSets. Pure.

use std::cmp::Reverse;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::template::{desired_annotation, is_current, max_annotation, revision};
use crate::workloads::pods::{Rounding, scaled};

/// One change to a Deployment's ReplicaSets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Make the set of the current template, with so many pods.
    Create { replicas: i32 },
    /// Give a set so many pods.
    Scale { set: String, from: i32, to: i32 },
    /// Remove a set of old times.
    Delete { set: String },
}

/// A Deployment and its sets.
pub(super) struct ObservedDeployment<'a> {
    pub(super) deployment: &'a Deployment,
    /// The set of the current template, if it is there.
    pub(super) new: Option<Arc<ReplicaSet>>,
    /// The others, oldest first.
    pub(super) old: Vec<Arc<ReplicaSet>>,
    /// Some pod of an old set is not gone yet.
    pub(super) old_pods: bool,
}

impl<'a> ObservedDeployment<'a> {
    /// Sorts sets into the current one and the old ones.
    pub(super) fn new(deployment: &'a Deployment, mut sets: Vec<Arc<ReplicaSet>>) -> Self {
        sets.sort_by_key(|set| (set.metadata.creation_timestamp.as_ref().map(|time| time.0), set.name_any()));
        let at = sets.iter().position(|set| is_current(deployment, set));
        let new = at.map(|at| sets.remove(at));
        Self { deployment, new, old: sets, old_pods: false }
    }

    /// All sets, oldest first, the current one last.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<ReplicaSet>> {
        self.old.iter().chain(&self.new)
    }

    fn total(&self) -> i32 {
        self.all().map(|set| size(set)).sum()
    }
}

/// How many pods a Deployment should have.
pub(super) fn wanted(deployment: &Deployment) -> i32 {
    deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

/// How many pods a set should have.
pub(super) fn size(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

pub(super) fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

fn is_recreate(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("Recreate")
}

/// How many pods more than wanted, and fewer than wanted, a rolling update may have; 0 and 0 would never move.
fn bounds(deployment: &Deployment) -> (i32, i32) {
    if is_recreate(deployment) {
        return (0, 0);
    }
    let rolling = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.strategy.as_ref())
        .and_then(|strategy| strategy.rolling_update.clone())
        .unwrap_or_default();
    let total = usize::try_from(wanted(deployment)).unwrap_or(0);
    let number = |asked: Option<IntOrString>, round| {
        let asked = asked.unwrap_or_else(|| IntOrString::String("25%".to_owned()));
        i32::try_from(scaled(&asked, total, round)).unwrap_or(i32::MAX)
    };
    let surge = number(rolling.max_surge, Rounding::Up);
    let missing = number(rolling.max_unavailable, Rounding::Down);
    if surge == 0 && missing == 0 { (0, 1) } else { (surge, missing) }
}

/// How many pods more than wanted there may be.
pub(super) fn max_surge(deployment: &Deployment) -> i32 {
    bounds(deployment).0
}

/// How many pods may be missing.
pub(super) fn max_unavailable(deployment: &Deployment) -> i32 {
    if wanted(deployment) == 0 { 0 } else { bounds(deployment).1.min(wanted(deployment)) }
}

/// What to do now; what comes after follows when the sets have changed.
pub(super) fn plan(observed: &ObservedDeployment<'_>) -> Vec<Step> {
    let deployment = observed.deployment;
    let paused = deployment.spec.as_ref().and_then(|spec| spec.paused) == Some(true);
    if paused {
        let mut steps = scale(observed);
        steps.extend(cleanup(observed));
        return steps;
    }
    let scaled = observed
        .all()
        .any(|set| size(set) > 0 && desired_annotation(set).is_some_and(|n| n != wanted(deployment)));
    if scaled {
        return scale(observed);
    }
    let steps = if is_recreate(deployment) { recreate(observed) } else { roll(observed) };
    if steps.is_empty() { cleanup(observed) } else { steps }
}

fn resize(set: &ReplicaSet, to: i32) -> Option<Step> {
    let from = size(set);
    (from != to).then(|| Step::Scale { set: set.name_any(), from, to })
}

fn recreate(observed: &ObservedDeployment<'_>) -> Vec<Step> {
    let down: Vec<Step> = observed.old.iter().filter_map(|set| resize(set, 0)).collect();
    if !down.is_empty() || observed.old_pods {
        return down;
    }
    let wanted = wanted(observed.deployment);
    match &observed.new {
        None => vec![Step::Create { replicas: wanted }],
        Some(new) => resize(new, wanted).into_iter().collect(),
    }
}

fn roll(observed: &ObservedDeployment<'_>) -> Vec<Step> {
    let wanted = wanted(observed.deployment);
    let room = (wanted + max_surge(observed.deployment) - observed.total()).max(0);
    let Some(new) = &observed.new else {
        return vec![Step::Create { replicas: room.min(wanted) }];
    };
    let current = size(new);
    let to = if current > wanted { wanted } else { current + room.min(wanted - current) };
    if let Some(step) = resize(new, to) {
        return vec![step];
    }
    shrink_old(observed, new)
}

/// Takes pods from old sets: first those that do not work anyway, then as many as may be missing.
fn shrink_old(observed: &ObservedDeployment<'_>, new: &ReplicaSet) -> Vec<Step> {
    let minimum = wanted(observed.deployment) - max_unavailable(observed.deployment);
    let mut spare = observed.total() - minimum - (size(new) - available(new));
    let mut sizes: Vec<i32> = observed.old.iter().map(|set| size(set)).collect();
    if spare <= 0 || sizes.iter().sum::<i32>() == 0 {
        return Vec::new();
    }
    let mut removed = 0;
    for (set, size) in observed.old.iter().zip(&mut sizes) {
        let broken = (*size - available(set)).clamp(0, spare);
        *size -= broken;
        spare -= broken;
        removed += broken;
    }
    let working: i32 = observed.all().map(|set| available(set)).sum();
    let mut free = (working - minimum).max(0);
    for (set, size) in observed.old.iter().zip(&mut sizes) {
        let take = (*size).min(free).min(available(set));
        *size -= take;
        free -= take;
        removed += take;
    }
    if removed == 0 {
        return Vec::new();
    }
    observed.old.iter().zip(sizes).filter_map(|(set, to)| resize(set, to)).collect()
}

/// Spreads a change of the wanted number over all sets that have pods.
fn scale(observed: &ObservedDeployment<'_>) -> Vec<Step> {
    let wanted = wanted(observed.deployment);
    let mut active: Vec<&Arc<ReplicaSet>> = observed.all().filter(|set| size(set) > 0).collect();
    match active.as_slice() {
        [] => {
            let latest = observed
                .new
                .as_ref()
                .or_else(|| observed.old.iter().max_by_key(|set| revision(&set.metadata)));
            return latest.and_then(|set| resize(set, wanted)).into_iter().collect();
        }
        [only] => return with_annotation(only, wanted),
        _ => {}
    }
    if let Some(new) = &observed.new
        && size(new) == wanted
        && desired_annotation(new) == Some(wanted)
        && available(new) == wanted
    {
        return observed.old.iter().filter_map(|set| resize(set, 0)).collect();
    }
    if is_recreate(observed.deployment) {
        return Vec::new();
    }
    let allowed = if wanted > 0 { wanted + max_surge(observed.deployment) } else { 0 };
    let change = allowed - active.iter().map(|set| size(set)).sum::<i32>();
    let born = |set: &ReplicaSet| set.metadata.creation_timestamp.as_ref().map(|time| time.0);
    if change > 0 {
        active.sort_by_key(|set| Reverse((size(set), born(set))));
    } else {
        active.sort_by_key(|set| (Reverse(size(set)), born(set)));
    }
    let mut done = 0;
    let mut sizes: Vec<i32> = Vec::new();
    for set in &active {
        let left = change - done;
        let share = share(observed.deployment, set, wanted);
        let part = if change == 0 || left == 0 {
            0
        } else if change > 0 {
            share.min(left)
        } else {
            share.max(left)
        };
        done += part;
        sizes.push(size(set) + part);
    }
    if let Some(first) = sizes.first_mut() {
        *first = (*first + change - done).max(0);
    }
    active.iter().zip(sizes).flat_map(|(set, to)| with_annotation(set, to)).collect()
}

/// A step even if the size stays: the set must remember for how many pods it was last judged.
fn with_annotation(set: &ReplicaSet, to: i32) -> Vec<Step> {
    vec![Step::Scale { set: set.name_any(), from: size(set), to }]
}

/// A set's share of a change of the Deployment's size.
fn share(deployment: &Deployment, set: &ReplicaSet, wanted: i32) -> i32 {
    if wanted == 0 {
        return -size(set);
    }
    let now = i64::from(wanted + max_surge(deployment));
    let status = || deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0);
    let before = i64::from(max_annotation(set).filter(|max| *max > 0).unwrap_or_else(status));
    if before == 0 {
        return 0;
    }
    let rounded = (2 * i64::from(size(set)) * now + before) / (2 * before);
    i32::try_from(rounded).unwrap_or(i32::MAX) - size(set)
}

/// Removes the oldest empty sets beyond the limit, once the rollout is complete.
fn cleanup(observed: &ObservedDeployment<'_>) -> Vec<Step> {
    let spec = observed.deployment.spec.as_ref();
    let limit = usize::try_from(spec.and_then(|spec| spec.revision_history_limit).unwrap_or(10)).unwrap_or(0);
    let paused = spec.and_then(|spec| spec.paused) == Some(true);
    let complete = observed.new.as_ref().is_some_and(|new| available(new) == wanted(observed.deployment))
        && observed.old.iter().all(|set| size(set) == 0);
    if observed.old.len() <= limit || !(complete || paused) {
        return Vec::new();
    }
    let mut old: Vec<&Arc<ReplicaSet>> =
        observed.old.iter().filter(|set| set.metadata.deletion_timestamp.is_none()).collect();
    old.sort_by_key(|set| revision(&set.metadata));
    let beyond = old.len().saturating_sub(limit);
    old.into_iter()
        .take(beyond)
        .filter(|set| {
            let status = set.status.clone().unwrap_or_default();
            size(set) == 0 && status.replicas == 0 && status.observed_generation >= set.metadata.generation
        })
        .map(|set| Step::Delete { set: set.name_any() })
        .collect()
}
