//! The pods of a workload: how one is made from a template, what state it is in, and making and deleting many of them.

use std::collections::HashSet;
use std::sync::Arc;

use berth_kube::{Kind, storage};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodTemplateSpec};
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use parking_lot::Mutex;

use super::ownership::reference;

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

/// Pods that were deleted, by uid, until the cache shows that they go.
#[derive(Default)]
pub(super) struct Deletions(Mutex<HashSet<String>>);

impl Deletions {
    /// To be told of every change of a pod in the cache.
    pub(super) fn observe(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) {
        if let Some(before) = before
            && after.is_none_or(|after| is_terminating(after))
            && let Some(uid) = before.uid()
        {
            self.0.lock().remove(&uid);
        }
    }

    /// Before a pod is deleted.
    pub(super) fn begin(&self, pod: &Pod) {
        self.0.lock().extend(pod.uid());
    }

    /// When the pod could not be deleted.
    pub(super) fn failed(&self, pod: &Pod) {
        self.0.lock().remove(&pod.uid().unwrap_or_default());
    }

    /// Whether a pod is going, even if the cache does not show it yet.
    pub(super) fn is_going(&self, pod: &Pod) -> bool {
        is_terminating(pod) || pod.uid().is_some_and(|uid| self.0.lock().contains(&uid))
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
