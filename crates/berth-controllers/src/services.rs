//! Decides where the traffic of Services goes: their EndpointSlices and Endpoints, from the pods that they select.
//!
//! Reads: Service, Pod, Endpoints, EndpointSlice. Writes: EndpointSlices of Services with a selector, as
//! `endpointslice-controller.k8s.io`, and of Services whose Endpoints somebody else wrote, as
//! `endpointslicemirroring-controller.k8s.io`; Endpoints of Services with a selector, and their deletion with the Service.
//!
//! What was just written is in the caches when the write returns, so nothing is created twice.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use berth_core::names::{
    ENDPOINT_SLICE_CONTROLLER, ENDPOINT_SLICE_MANAGED_BY, ENDPOINT_SLICE_MIRRORING_CONTROLLER, SERVICE_NAME,
};
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Result};
use k8s_openapi::api::core::v1::{Endpoints, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::ResourceExt as _;
use parking_lot::Mutex;

use self::plan::{
    Step, endpoints, has_selector, is_of_controller, is_selected, mirrored, plan, selected, traffic,
};

const COMPONENT: &str = "endpointslice-controller";

/// Runs until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let services: Cache<Service> = cluster.cache();
    let pods: Cache<Pod> = cluster.cache();
    let slices: Cache<EndpointSlice> = cluster.cache();
    let written: Cache<Endpoints> = cluster.cache();
    let by_namespace: Index<Service, String> =
        services.index(|service| service.namespace().into_iter().collect());
    let controller = Arc::new(Controller {
        pods_by_namespace: pods.index(|pod| pod.namespace().into_iter().collect()),
        by_service: slices.index(|slice| service_of(slice).into_iter().collect()),
        deleted: Mutex::default(),
        cluster: cluster.clone(),
        services: services.clone(),
        endpoints: written.clone(),
    });
    let of_service = controller.clone();
    Loop::new(&cluster, &cluster.queue("services", Backoff::default()))
        .subscribe(&services, move |before, after| {
            let key = after.or(before).map(|service| Key::of(service.as_ref()));
            let mut deleted = of_service.deleted.lock();
            match (&key, after) {
                (Some(key), None) => deleted.insert(key.clone()),
                (Some(key), Some(_)) => deleted.remove(key),
                (None, _) => false,
            };
            key.into_iter().collect()
        })
        .also(&slices, |slice| service_of(slice))
        .also(&written, |endpoints| Some(Key::of(endpoints.as_ref())))
        .subscribe(&pods, move |before, after| {
            let of = |pod: Option<&Arc<Pod>>| pod.map(|pod| (traffic(pod), pod.metadata.labels.clone()));
            if of(before) == of(after) {
                return Vec::new();
            }
            let namespace = after.or(before).and_then(|pod| pod.namespace()).unwrap_or_default();
            let mut concerned = by_namespace.get(namespace.as_str());
            concerned.retain(|service| before.into_iter().chain(after).any(|pod| is_selected(service, pod)));
            concerned.iter().map(|service| Key::of(service.as_ref())).collect()
        })
        .run(8, move |service| controller.clone().reconcile(service))
        .await;
}

/// The Service that a slice belongs to.
fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let name = slice.labels().get(SERVICE_NAME)?;
    Some(Key::new(slice.namespace().unwrap_or_default(), name.clone()))
}

struct Controller {
    cluster: Cluster,
    services: Cache<Service>,
    endpoints: Cache<Endpoints>,
    pods_by_namespace: Index<Pod, String>,
    by_service: Index<EndpointSlice, Key>,
    /// Services that were seen to go, whose Endpoints go with them, whoever wrote those.
    deleted: Mutex<HashSet<Key>>,
}

impl Controller {
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let written = self.endpoints.get(&key);
        let Some(service) = self.services.get(&key) else {
            let goes = self.deleted.lock().contains(&key);
            if let Some(left) = written.filter(|left| goes || is_of_controller(left)) {
                self.cluster.delete(&*left).await?;
            }
            self.deleted.lock().remove(&key);
            return Ok(Next::Done);
        };
        if service.metadata.deletion_timestamp.is_some() {
            return Ok(Next::Done);
        }
        let slices = self.by_service.get(&key);
        if !has_selector(&service) {
            // Slices that somebody else made for it are theirs.
            let wanted = mirrored(&service, written.as_deref());
            return self
                .apply(plan(
                    &service,
                    &wanted,
                    &slices,
                    ENDPOINT_SLICE_MIRRORING_CONTROLLER,
                    written.as_deref(),
                ))
                .await;
        }
        let namespace = key.namespace.clone();
        let pods = self.pods_by_namespace.get(namespace.as_str());
        let wanted = selected(&service, &pods);
        self.apply(plan(&service, &wanted, &slices, ENDPOINT_SLICE_CONTROLLER, None)).await?;
        let wanted = endpoints(&service, &wanted);
        match written {
            None => drop(self.cluster.create(&wanted).await?),
            Some(known) if known.subsets == wanted.subsets && is_of_controller(&known) => {}
            Some(known) => {
                let change = |known: &mut Endpoints| {
                    known.subsets = wanted.subsets;
                    known.labels_mut().extend(wanted.metadata.labels.unwrap_or_default());
                };
                self.cluster.update(&*known, change).await?;
            }
        }
        Ok(Next::Done)
    }

    async fn apply(&self, steps: Vec<Step>) -> Result<Next> {
        for step in steps {
            match step {
                Step::Create(slice) => drop(self.cluster.create(&*slice).await?),
                Step::Update(known, wanted) => {
                    let change = |known: &mut EndpointSlice| {
                        known.endpoints = wanted.endpoints;
                        known.ports = wanted.ports;
                        let manager = known.labels().get(ENDPOINT_SLICE_MANAGED_BY).cloned();
                        known.metadata.labels = wanted.metadata.labels;
                        known
                            .labels_mut()
                            .extend(manager.map(|manager| (ENDPOINT_SLICE_MANAGED_BY.to_owned(), manager)));
                    };
                    self.cluster.update(&*known, change).await?;
                }
                Step::Delete(slice) => self.cluster.delete(&*slice).await?,
            }
        }
        Ok(Next::Done)
    }
}
