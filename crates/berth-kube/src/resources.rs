//! What pods ask for and may take, summed up over their containers as Kubernetes does it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::storage;

/// Amounts by resource, in thousandths.
pub type Amounts = BTreeMap<String, i128>;

/// One of the two lists of amounts that a container has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// What is set aside for it.
    Requests,
    /// What it may take at most.
    Limits,
}

impl List {
    /// The list among the resources of a container or of a pod as a whole.
    pub fn of(self, resources: Option<&ResourceRequirements>) -> Amounts {
        let list = resources.and_then(|resources| match self {
            Self::Requests => resources.requests.as_ref(),
            Self::Limits => resources.limits.as_ref(),
        });
        list.map_or_else(Amounts::new, amounts)
    }

    /// The amounts of a pod: its containers together, or the largest step of its start if that is more, without overhead.
    pub fn of_pod(self, spec: &PodSpec) -> Amounts {
        let of = |container: &Container| self.of(container.resources.as_ref());
        let mut sum = Amounts::new();
        for container in &spec.containers {
            add(&mut sum, &of(container));
        }
        let (mut helpers, mut start) = (Amounts::new(), Amounts::new());
        for container in spec.init_containers.iter().flatten() {
            let mut step = of(container);
            if container.restart_policy.as_deref() == Some("Always") {
                add(&mut sum, &step);
                add(&mut helpers, &step);
                step.clone_from(&helpers);
            } else {
                add(&mut step, &helpers);
            }
            most(&mut start, &step);
        }
        most(&mut sum, &start);
        // What is said of the pod as a whole replaces what its containers say.
        sum.extend(self.of(spec.resources.as_ref()));
        sum
    }
}

/// What a pod asks for, its overhead included.
pub fn requested(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let mut sum = List::Requests.of_pod(spec);
    if let Some(overhead) = &spec.overhead {
        add(&mut sum, &amounts(overhead));
    }
    sum.retain(|_, amount| *amount > 0);
    sum
}

/// A list of resources as amounts.
pub fn amounts(list: &BTreeMap<String, Quantity>) -> Amounts {
    list.iter().map(|(name, quantity)| (name.clone(), storage::amount(quantity).thousandths())).collect()
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

fn most(sum: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let known = sum.entry(name.clone()).or_default();
        *known = (*known).max(*amount);
    }
}
