//! What a container and its pod may take of the node: from `resources` to the limits of their control groups, as the
//! kubelet does it.

use berth_kube::resources::{Amounts, List};
use berth_runtime::Limits;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::status::qos_class;

/// The weight of a container that requests no processor time.
const LEAST_SHARES: u64 = 2;
/// The scores of processes that are killed last, and first, when the machine has no memory left.
const GUARANTEED_SCORE: i64 = -997;
const BEST_EFFORT_SCORE: i64 = 1000;

/// What the node gives its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Supply {
    /// The memory of the machine in bytes.
    pub(crate) memory: u64,
    /// Processes and threads that each pod may have; any number if `None`.
    pub(crate) pod_pids: Option<u64>,
}

/// What a container may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Allowance {
    pub(super) own: Limits,
    pub(super) pod: Limits,
    pub(super) oom_score_adj: i32,
}

impl Allowance {
    pub(super) fn new(pod: &Pod, container: &Container, supply: Supply) -> Self {
        let default = PodSpec::default();
        let spec = pod.spec.as_ref().unwrap_or(&default);
        let resources = container.resources.as_ref();
        let (requests, limits) = (List::Requests.of(resources), List::Limits.of(resources));
        let class = pod.status.as_ref().and_then(|status| status.qos_class.as_deref());
        Self {
            own: Limits {
                cpu_shares: Some(shares(&requests, &limits)),
                cpu_millis: thousandths(&limits, "cpu"),
                memory: bytes(&limits, "memory"),
                pids: None,
            },
            pod: pod_limits(spec, supply),
            oom_score_adj: oom_score_adj(class.unwrap_or_else(|| qos_class(spec)), &requests, supply.memory),
        }
    }
}

/// Whether a container has limits that take a control group.
pub(super) fn is_limited(container: &Container) -> bool {
    let limits = List::Limits.of(container.resources.as_ref());
    ["cpu", "memory"].iter().any(|name| thousandths(&limits, name).is_some())
}

/// The limits of a pod as a whole; as upstream, those of its containers only where each of them has one.
fn pod_limits(spec: &PodSpec, supply: Supply) -> Limits {
    let (requests, limits) = (List::Requests.of_pod(spec), List::Limits.of_pod(spec));
    let whole = List::Limits.of(spec.resources.as_ref());
    let is_limited = |name: &str| {
        let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
        whole.contains_key(name)
            || all
                .all(|container| thousandths(&List::Limits.of(container.resources.as_ref()), name).is_some())
    };
    Limits {
        cpu_shares: Some(shares(&requests, &limits)),
        cpu_millis: thousandths(&limits, "cpu").filter(|_| is_limited("cpu")),
        memory: bytes(&limits, "memory").filter(|_| is_limited("memory")),
        pids: supply.pod_pids,
    }
}

fn thousandths(amounts: &Amounts, name: &str) -> Option<u64> {
    let amount = u64::try_from(*amounts.get(name)?).ok();
    amount.filter(|amount| *amount > 0)
}

fn bytes(amounts: &Amounts, name: &str) -> Option<u64> {
    thousandths(amounts, name).map(|amount| amount / 1000)
}

/// The weight by what is requested, or by the limit if nothing is.
fn shares(requests: &Amounts, limits: &Amounts) -> u64 {
    let millis = thousandths(requests, "cpu").or_else(|| thousandths(limits, "cpu"));
    millis.map_or(LEAST_SHARES, |millis| (millis * 1024 / 1000).max(LEAST_SHARES))
}

/// The more of the machine's memory a container requests, the later it is killed.
fn oom_score_adj(class: &str, requests: &Amounts, machine: u64) -> i32 {
    let requested = i64::try_from(bytes(requests, "memory").unwrap_or(0)).unwrap_or(i64::MAX);
    let machine = i64::try_from(machine.max(1)).unwrap_or(i64::MAX);
    let score = match class {
        "Guaranteed" => GUARANTEED_SCORE,
        "BestEffort" => BEST_EFFORT_SCORE,
        _ => {
            let score = 1000 - requested.saturating_mul(1000) / machine;
            score.clamp(1000 + GUARANTEED_SCORE, BEST_EFFORT_SCORE - 1)
        }
    };
    i32::try_from(score).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SUPPLY: Supply = Supply { memory: 1 << 30, pod_pids: Some(100) };

    fn pod(containers: &Value, whole: &Value) -> Pod {
        serde_json::from_value(json!({ "spec": { "containers": containers, "resources": whole } })).unwrap()
    }

    fn first(pod: &Pod) -> Allowance {
        Allowance::new(pod, &pod.spec.as_ref().unwrap().containers[0], SUPPLY)
    }

    #[test]
    fn limits_and_requests_become_those_of_control_groups() {
        let full = json!({ "cpu": "500m", "memory": "64Mi" });
        let found = first(&pod(
            &json!([{ "name": "a", "resources": { "limits": full, "requests": full } }]),
            &json!(null),
        ));
        let limits =
            Limits { cpu_shares: Some(512), cpu_millis: Some(500), memory: Some(64 << 20), pids: None };
        assert_eq!(found.own, limits);
        assert_eq!(found.pod, Limits { pids: Some(100), ..limits });
        assert_eq!(found.oom_score_adj, -997);

        let found = first(&pod(&json!([{ "name": "a" }]), &json!(null)));
        assert_eq!(found.own, Limits { cpu_shares: Some(2), ..Limits::default() });
        assert_eq!(found.oom_score_adj, 1000);
    }

    #[test]
    fn a_pod_is_limited_where_each_container_is_or_it_is_as_a_whole() {
        let one = json!([
            { "name": "a", "resources": { "limits": { "cpu": "1", "memory": "1Gi" } } },
            { "name": "b", "resources": { "limits": { "cpu": "2" } } },
        ]);
        let found = first(&pod(&one, &json!(null)));
        assert_eq!((found.pod.cpu_millis, found.pod.memory), (Some(3000), None));
        let found = first(&pod(&one, &json!({ "limits": { "memory": "2Gi", "cpu": "2500m" } })));
        assert_eq!((found.pod.cpu_millis, found.pod.memory), (Some(2500), Some(2 << 30)));
    }

    #[test]
    fn the_more_memory_is_requested_the_later_a_container_is_killed() {
        for (memory, score) in [("0", 999), ("1Mi", 999), ("512Mi", 500), ("1Gi", 3), ("8Gi", 3)] {
            let requests =
                List::Requests
                    .of(serde_json::from_value(json!({ "requests": { "memory": memory } })).ok().as_ref());
            assert_eq!(oom_score_adj("Burstable", &requests, SUPPLY.memory), score, "{memory}");
        }
    }
}
