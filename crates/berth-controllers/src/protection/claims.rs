//! Claims are protected while a pod that has a node uses them, even one that is over.
//!
//! A pod may have come just before the claim was deleted, so the API server is asked for the namespace's pods before a
//! finalizer goes; once for all claims of the namespace that were deleted meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use parking_lot::Mutex;

use berth_core::names::CLAIM_PROTECTION;
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Queue, Result, finalizers};

use super::{FinalizerChange, WORKERS, finalizer_change, write};
use berth_kube::storage;

/// The claims to reconcile, by namespace.
type Due = Mutex<HashMap<String, HashSet<String>>>;

pub(super) async fn run(cluster: Cluster) {
    let (claims, pods) = (cluster.cache::<PersistentVolumeClaim>(), cluster.cache::<Pod>());
    let by_claim = pods.index(|pod| storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect());
    let queue: Queue<String> = cluster.queue("claim protection", Backoff::default());
    let protection = Arc::new(Protection {
        cluster: cluster.clone(),
        claims: claims.clone(),
        by_claim,
        due: Due::default(),
    });
    let (changed, used) = (protection.clone(), protection.clone());
    Loop::new(&cluster, &queue)
        .also(&claims, move |claim| {
            let asked = finalizer_change(claim.as_ref(), CLAIM_PROTECTION);
            (asked != FinalizerChange::Nothing).then(|| changed.note(Key::of(claim.as_ref())))
        })
        .subscribe(&pods, move |before, after| {
            let pods = [before, after].into_iter().flatten();
            let claims = pods.flat_map(|pod| storage::claims_of_pod(pod)).map(|claim| claim.key);
            claims.filter(|claim| used.is_deleted(claim)).map(|claim| used.note(claim)).collect()
        })
        .run(WORKERS, move |namespace| protection.clone().reconcile_namespace(namespace))
        .await;
}

struct Protection {
    cluster: Cluster,
    claims: Cache<PersistentVolumeClaim>,
    by_claim: Index<Pod, Key>,
    due: Due,
}

impl Protection {
    /// Remembers a claim; its namespace.
    fn note(&self, claim: Key) -> String {
        self.due().entry(claim.namespace.clone()).or_default().insert(claim.name);
        claim.namespace
    }

    fn is_deleted(&self, claim: &Key) -> bool {
        self.claims.get(claim).is_some_and(|claim| claim.metadata.deletion_timestamp.is_some())
    }

    async fn reconcile_namespace(self: Arc<Self>, namespace: String) -> Result<Next> {
        let names = self.due().remove(&namespace).unwrap_or_default();
        let outcome = self.reconcile_claims(&namespace, &names).await;
        if outcome.is_err() {
            // What succeeded is left alone the next time.
            self.due().entry(namespace).or_default().extend(names);
        }
        outcome
    }

    async fn reconcile_claims(&self, namespace: &str, names: &HashSet<String>) -> Result<Next> {
        let mut work = Vec::new();
        let mut unused = Vec::new();
        for name in names {
            let Some(claim) = self.claims.get(&Key::new(namespace, name.clone())) else { continue };
            match finalizer_change(claim.as_ref(), CLAIM_PROTECTION) {
                FinalizerChange::Add => work.push((claim, true)),
                FinalizerChange::RemoveIfUnused if !self.is_used(&claim) => unused.push(claim),
                _ => {}
            }
        }
        if !unused.is_empty() {
            let pods = self.cluster.fetch_all::<Pod>(namespace).await?;
            let users = users(&pods);
            unused.retain(|claim| {
                let pods = users.get(&Key::of(claim.as_ref())).into_iter().flatten();
                !pods.into_iter().any(|pod| is_user(pod, claim))
            });
            work.extend(unused.into_iter().map(|claim| (claim, false)));
        }
        let writes = stream::iter(work).map(|(claim, adds)| async move {
            let change = if adds { finalizers::add } else { finalizers::remove };
            write(&self.cluster, &claim, |claim| change(claim, CLAIM_PROTECTION)).await
        });
        let outcomes: Vec<_> = writes.buffer_unordered(WORKERS).collect().await;
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(Next::Done)
    }

    fn is_used(&self, claim: &PersistentVolumeClaim) -> bool {
        self.by_claim.get(&Key::of(claim)).iter().any(|pod| is_user(pod, claim))
    }

    fn due(&self) -> parking_lot::MutexGuard<'_, HashMap<String, HashSet<String>>> {
        self.due.lock()
    }
}

fn users(pods: &[Pod]) -> HashMap<Key, Vec<&Pod>> {
    let mut users: HashMap<Key, Vec<&Pod>> = HashMap::new();
    for pod in pods {
        for claim in storage::claims_of_pod(pod) {
            users.entry(claim.key).or_default().push(pod);
        }
    }
    users
}

/// Whether a pod that names a claim keeps it from going.
pub(super) fn is_user(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    if storage::node_of_pod(pod).is_empty() {
        return false;
    }
    let key = Key::of(claim);
    storage::claims_of_pod(pod).iter().filter(|used| used.key == key).any(|used| {
        // The pod owns an ephemeral claim, so it is gone for good only after the claim: shut down is enough.
        !used.ephemeral || (!is_shut_down(pod) && storage::owned_by(claim, pod))
    })
}

/// Whether the kubelet is done with a pod: it is deleted without grace.
fn is_shut_down(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() && pod.metadata.deletion_grace_period_seconds == Some(0)
}
