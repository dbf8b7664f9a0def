//! Pods of a Job that failed: what the Job's `podFailurePolicy` says about them, when they ended, and how long the Job waits
//! before it replaces them. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;

/// How long a Job waits after the first failure, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// What a failure policy has to say about a pod that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The failure counts, as it does without a policy.
    Count,
    /// The failure does not count.
    Ignore,
    /// The pod's index has failed for good.
    FailIndex,
    /// The Job has failed, with this message.
    FailJob(String),
}

impl Verdict {
    /// What the first rule that fits says.
    pub(super) fn of(policy: Option<&PodFailurePolicy>, pod: &Pod) -> Self {
        let rules = policy.map(|policy| policy.rules.as_slice()).unwrap_or_default();
        for (index, rule) in rules.iter().enumerate() {
            let Some(what) = matched(rule, pod) else { continue };
            match rule.action.as_str() {
                "Ignore" => return Self::Ignore,
                "FailIndex" => return Self::FailIndex,
                "Count" => return Self::Count,
                "FailJob" => {
                    let message = format!("{what} matching FailJob rule at index {index}");
                    return Self::FailJob(message);
                }
                _ => {}
            }
        }
        Self::Count
    }

    /// Whether the failure counts towards the limits.
    pub(super) fn counts(&self) -> bool {
        *self != Self::Ignore
    }
}

/// What of a pod fits a rule, in words.
fn matched(rule: &PodFailurePolicyRule, pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    if let Some(codes) = &rule.on_exit_codes {
        let lists = [&status.container_statuses, &status.init_container_statuses];
        let mut containers = lists.into_iter().flatten().flatten();
        let (container, code) =
            containers.find_map(|container| Some((&container.name, exit_code(container, codes)?)))?;
        return Some(format!("Container {container} for pod {name} failed with exit code {code}"));
    }
    let patterns = rule.on_pod_conditions.as_deref().unwrap_or_default();
    let condition = status.conditions.iter().flatten().find(|condition| {
        patterns.iter().any(|pattern| {
            pattern.type_ == condition.type_
                && pattern.status.as_deref().unwrap_or("True") == condition.status
        })
    })?;
    Some(format!("Pod {name} has condition {}", condition.type_))
}

/// The exit code of a container that failed, if it is one that a rule asks for.
fn exit_code(container: &ContainerStatus, rule: &PodFailurePolicyOnExitCodesRequirement) -> Option<i32> {
    let code = container.state.as_ref()?.terminated.as_ref()?.exit_code;
    let is_meant = rule.container_name.as_ref().is_none_or(|name| *name == container.name);
    let fits = match rule.operator.as_str() {
        "In" => rule.values.contains(&code),
        "NotIn" => !rule.values.contains(&code),
        _ => false,
    };
    (is_meant && code != 0 && fits).then_some(code)
}

/// When a pod ended, as far as its object says.
pub(super) fn finished_at(pod: &Pod) -> Timestamp {
    let of_containers = || {
        let containers = pod.status.as_ref()?.container_statuses.as_deref()?;
        let ends: Option<Vec<Timestamp>> = containers
            .iter()
            .map(|container| Some(container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()?.0))
            .collect();
        ends?.into_iter().max()
    };
    let unready = || {
        let conditions = pod.status.as_ref()?.conditions.as_deref()?;
        let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
        ready.last_transition_time.as_ref().filter(|_| ready.status == "False").map(|time| time.0)
    };
    let deleted = || {
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
        let end = pod.metadata.deletion_timestamp.as_ref()?.0;
        end.checked_sub(SignedDuration::from_secs(grace)).ok()
    };
    let created = || pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    of_containers().or_else(unready).or_else(deleted).or_else(created).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// How many pods of a Job failed one after the other, and when the last of them did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Failures {
    count: u32,
    last: Option<Timestamp>,
}

impl Failures {
    /// So many failures, the last of them at a time.
    pub(super) fn new(count: u32, last: Timestamp) -> Self {
        Self { count, last: Some(last) }
    }

    /// Adds the pods that ended since: a success ends the row of failures.
    #[must_use]
    pub(super) fn and(&self, succeeded: &[Arc<Pod>], failed: &[Arc<Pod>]) -> Self {
        let success = succeeded.iter().map(|pod| finished_at(pod)).max();
        let times: Vec<Timestamp> = failed
            .iter()
            .map(|pod| finished_at(pod))
            .filter(|time| success.is_none_or(|success| *time > success))
            .collect();
        let before = if success.is_some() { Self::default() } else { self.clone() };
        Self {
            count: before.count + u32::try_from(times.len()).unwrap_or(u32::MAX),
            last: times.into_iter().max().or(before.last),
        }
    }

    /// How long no further pod is made: 10 seconds after the first failure, twice as long after each further one, up to
    /// ten minutes.
    pub(super) fn pause(&self, now: Timestamp) -> Option<Duration> {
        let last = self.last.filter(|_| self.count > 0)?;
        let (first, most) = PAUSE;
        let pause = first.saturating_mul(1 << (self.count - 1).min(10)).min(most);
        let elapsed = Duration::try_from(now.duration_since(last)).unwrap_or(Duration::ZERO);
        pause.checked_sub(elapsed).filter(|left| !left.is_zero())
    }
}
