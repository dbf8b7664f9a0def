//! How well a pod is protected when the machine runs short, from what its containers ask for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The class of a pod: `Guaranteed` if every container has equal requests and limits of CPU and memory, `BestEffort` if
/// none has any, else `Burstable`.
pub(super) fn class(spec: &PodSpec) -> &'static str {
    let (mut any, mut all_equal) = (false, true);
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        let resources = container.resources.clone().unwrap_or_default();
        let (requests, limits) =
            (resources.requests.unwrap_or_default(), resources.limits.unwrap_or_default());
        for name in ["cpu", "memory"] {
            let (request, limit) = (given(&requests, name), given(&limits, name));
            any |= request.is_some() || limit.is_some();
            all_equal &= limit.is_some() && (request.is_none() || request == limit);
        }
    }
    match (any, all_equal) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

fn given<'a>(amounts: &'a BTreeMap<String, Quantity>, name: &str) -> Option<&'a str> {
    amounts.get(name).map(|quantity| quantity.0.as_str()).filter(|amount| *amount != "0")
}
