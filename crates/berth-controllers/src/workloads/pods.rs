//! The pods of a workload: how one is made from a template, what state it is in, and creating and deleting many of them.

use std::collections::HashSet;
use std::sync::Arc;

use berth_core::names::events;
use berth_kube::{Cluster, Key, Kind, Recorder, Result, storage};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use parking_lot::Mutex;

use super::ownership::{Dependents, reference};
use super::workload::{Workload, Workloads};

/// At most so many pods are made or deleted in one go.
pub(super) const BURST: usize = 500;

/// A pod from a template, controlled by its owner, whose name the API server completes.
pub(super) fn from_template<O: Kind>(owner: &O, template: PodTemplateSpec) -> Pod {
    let meta = template.metadata.unwrap_or_default();
    let mut prefix = format!("{}-", owner.name_any());
    // A name that would be too long is used without the dash, as Kubernetes does.
    if prefix.len() > 253 {
        prefix.pop();
    }
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(prefix),
            namespace: owner.namespace(),
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: meta.finalizers,
            owner_references: Some(vec![reference(owner)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// Whether a pod counts: it neither ran to its end nor is being deleted.
pub(super) fn is_active(pod: &Pod) -> bool {
    !storage::is_over(pod) && !is_terminating(pod)
}

/// Whether a pod is being deleted.
pub(super) fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn ready(pod: &Pod) -> Option<&PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Whether a pod is ready.
pub(super) fn is_ready(pod: &Pod) -> bool {
    ready(pod).is_some()
}

/// Since when a ready pod is ready.
pub(super) fn ready_since(pod: &Pod) -> Option<Timestamp> {
    ready(pod)?.last_transition_time.as_ref().map(|time| time.0)
}

/// In how many seconds a pod will have been ready for `minimum` seconds: 0 if it has been, `None` if it is not ready.
pub(super) fn seconds_to_available(pod: &Pod, minimum: i32, now: Timestamp) -> Option<i64> {
    let condition = ready(pod)?;
    let since = condition.last_transition_time.as_ref().map(|time| time.0);
    let ready_for = since.map_or(i64::MAX, |since| now.duration_since(since).as_secs());
    let minimum = i64::from(minimum);
    Some(if minimum == 0 || ready_for >= minimum { 0 } else { (minimum - ready_for).max(1) })
}

/// Whether a pod has been ready for `minimum` seconds.
pub(super) fn is_available(pod: &Pod, minimum: i32, now: Timestamp) -> bool {
    seconds_to_available(pod, minimum, now) == Some(0)
}

/// How many pods are ready and available, and when the next one becomes available without a change of any object.
#[derive(Default)]
pub(super) struct Availability {
    pub(super) ready: i32,
    pub(super) available: i32,
    /// In how many seconds.
    pub(super) next: Option<i64>,
}

impl Availability {
    /// Counts a pod that [`seconds_to_available`] says this of.
    pub(super) fn count(&mut self, seconds: Option<i64>) {
        let Some(seconds) = seconds else { return };
        self.ready += 1;
        if seconds == 0 {
            self.available += 1;
        } else {
            self.next = Some(self.next.map_or(seconds, |next| next.min(seconds)));
        }
    }
}

/// Which whole number a percentage of pods becomes.
#[derive(Clone, Copy)]
pub(super) enum Rounding {
    Up,
    Down,
}

/// A number of pods that is given as such, or as a percentage of `total`.
pub(super) fn scaled(asked: &IntOrString, total: usize, round: Rounding) -> usize {
    match asked {
        IntOrString::Int(number) => usize::try_from(*number).unwrap_or(0),
        IntOrString::String(percent) => {
            let percent = percent.strip_suffix('%').and_then(|percent| percent.parse::<usize>().ok());
            let hundredfold = percent.unwrap_or(0).saturating_mul(total);
            match round {
                Rounding::Up => hundredfold.div_ceil(100),
                Rounding::Down => hundredfold / 100,
            }
        }
    }
}

/// A status has no number where it is 0, as Kubernetes writes it.
pub(super) fn nonzero(count: i32) -> Option<i32> {
    (count > 0).then_some(count)
}

/// The pods that the workloads of a kind have, and how their controller creates and deletes them: with the events of
/// Kubernetes, and so that none is deleted twice.
pub(super) struct Pods {
    pub(super) dependents: Dependents<Pod>,
    cluster: Cluster,
    recorder: Recorder,
    /// The uids of pods that were deleted here and that the cache does not show as being deleted yet.
    deleted: Mutex<HashSet<String>>,
}

impl Pods {
    pub(super) fn new<W: Workload>(workloads: &Workloads<W>) -> Self {
        let (cluster, recorder) = (workloads.cluster.clone(), workloads.recorder.clone());
        Self { dependents: Dependents::new(&cluster), cluster, recorder, deleted: Mutex::default() }
    }

    /// The pods that the owner with a uid controls.
    pub(super) fn of(&self, uid: &str) -> Vec<Arc<Pod>> {
        self.dependents.of(uid)
    }

    /// The workloads that the change of a pod concerns.
    pub(super) fn changed<W: Workload>(
        &self,
        workloads: &Workloads<W>,
        before: Option<&Arc<Pod>>,
        after: Option<&Arc<Pod>>,
    ) -> Vec<Key> {
        if let Some(before) = before
            && after.is_none_or(|after| is_terminating(after))
            && let Some(uid) = before.uid()
        {
            self.deleted.lock().remove(&uid);
        }
        workloads.concerned(before, after)
    }

    /// Whether a pod is being deleted, even if the cache does not show it yet.
    pub(super) fn is_going(&self, pod: &Pod) -> bool {
        is_terminating(pod) || pod.uid().is_some_and(|uid| self.deleted.lock().contains(&uid))
    }

    /// Creates a pod, with an event on its owner.
    pub(super) async fn create<O: Kind>(&self, owner: &O, pod: &Pod) -> Result<()> {
        match self.cluster.create(pod).await {
            Ok(pod) => {
                let message = format!("Created pod: {}", pod.name_any());
                self.recorder.normal(owner, events::SUCCESSFUL_CREATE, message);
                Ok(())
            }
            Err(error) => {
                let message = format!("Error creating: {}", error.chain());
                self.recorder.warning(owner, events::FAILED_CREATE, message);
                Err(error)
            }
        }
    }

    /// Deletes a pod, with an event on its owner.
    pub(super) async fn delete<O: Kind>(&self, owner: &O, pod: &Pod) -> Result<()> {
        let deleted = self.delete_silently(pod).await;
        match &deleted {
            Ok(()) => {
                let message = format!("Deleted pod: {}", pod.name_any());
                self.recorder.normal(owner, events::SUCCESSFUL_DELETE, message);
            }
            Err(error) => {
                let message = format!("Error deleting: {}", error.chain());
                self.recorder.warning(owner, events::FAILED_DELETE, message);
            }
        }
        deleted
    }

    /// Deletes a pod without an event.
    pub(super) async fn delete_silently(&self, pod: &Pod) -> Result<()> {
        let uid = pod.uid().unwrap_or_default();
        self.deleted.lock().insert(uid.clone());
        let deleted = self.cluster.delete(pod).await;
        if deleted.is_err() {
            self.deleted.lock().remove(&uid);
        }
        deleted
    }
}

/// Does something to each item, to twice as many at a time as long as it goes well, so that a refusal is heard after one
/// and not after hundreds. Ends with the first batch that had a failure, and returns its last one.
pub(super) async fn in_growing_batches<T, E, R>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R,
) -> Result<(), E>
where
    R: Future<Output = Result<(), E>>,
{
    let (mut items, mut size) = (items.into_iter().peekable(), 1);
    while items.peek().is_some() {
        let done = join_all(items.by_ref().take(size).map(&work)).await;
        done.into_iter().rfold(Ok(()), Result::and)?;
        size *= 2;
    }
    Ok(())
}
