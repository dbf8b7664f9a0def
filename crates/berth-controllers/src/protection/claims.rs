//! Claims are protected while a pod that has a node uses them, even one that is over.
//!
//! A pod may have come just before the claim was deleted, so the API server is asked for the namespace's pods before a
//! finalizer goes; once for all claims of the namespace that were deleted meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::api::ListParams;
use parking_lot::Mutex;

use berth_core::names::CLAIM_PROTECTION;
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Next, Queue};

use super::{Error, WORKERS, Wanted, add, remove, wanted};
use berth_kube::storage;

/// The claims to look at, by namespace.
type Due = Arc<Mutex<HashMap<String, HashSet<String>>>>;

pub(super) async fn run(cluster: Cluster) {
    let (claims, pods) = (cluster.cache::<PersistentVolumeClaim>(), cluster.cache::<Pod>());
    let by_claim = pods.index(|pod| storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect());
    let queue: Queue<String> = Queue::new("claim protection", Backoff::default());
    let due = Due::default();
    let look = {
        let (queue, due) = (queue.clone(), due.clone());
        move |key: Key| {
            let mut due = due.lock();
            due.entry(key.namespace.clone()).or_default().insert(key.name);
            drop(due);
            queue.add(key.namespace);
        }
    };
    let looking = look.clone();
    claims.on_change(move |claim| {
        if wanted(claim.as_ref(), CLAIM_PROTECTION) != Wanted::Nothing {
            looking(Key::of(claim.as_ref()));
        }
    });
    let known = claims.clone();
    pods.subscribe(move |before, after| {
        let used = [before, after].into_iter().flatten().flat_map(|pod| storage::claims_of_pod(pod));
        for claim in used {
            let deleted =
                known.get(&claim.key).is_some_and(|claim| claim.metadata.deletion_timestamp.is_some());
            if deleted {
                look(claim.key);
            }
        }
    });
    let shutdown = cluster.shutdown().clone();
    tokio::select! {
        () = shutdown.cancelled() => return,
        _ = async { tokio::join!(claims.synced(), pods.synced()) } => {}
    }
    let protection = Arc::new(Protection { cluster, claims, by_claim, due });
    queue
        .run(WORKERS, shutdown, move |namespace| {
            let protection = protection.clone();
            async move { protection.look_at_namespace(namespace).await }
        })
        .await;
}

struct Protection {
    cluster: Cluster,
    claims: Cache<PersistentVolumeClaim>,
    by_claim: Index<Pod, Key>,
    due: Due,
}

impl Protection {
    async fn look_at_namespace(&self, namespace: String) -> Result<Next, Error> {
        let names = self.due().remove(&namespace).unwrap_or_default();
        let outcome = self.look_at(&namespace, &names).await;
        if outcome.is_err() {
            // What succeeded is left alone the next time.
            self.due().entry(namespace).or_default().extend(names);
        }
        outcome
    }

    async fn look_at(&self, namespace: &str, names: &HashSet<String>) -> Result<Next, Error> {
        let mut work = Vec::new();
        let mut unused = Vec::new();
        for name in names {
            let Some(claim) = self.claims.get(&Key::new(namespace, name.clone())) else { continue };
            match wanted(claim.as_ref(), CLAIM_PROTECTION) {
                Wanted::Add => work.push((claim, true)),
                Wanted::RemoveIfUnused if !self.is_used(&claim) => unused.push(claim),
                _ => {}
            }
        }
        if !unused.is_empty() {
            let api: Api<Pod> = Api::namespaced(self.cluster.client().clone(), namespace);
            let pods = api
                .list(&ListParams::default())
                .await
                .map_err(|source| Error::List { what: "pods", source })?;
            let users = users(&pods.items);
            unused.retain(|claim| {
                let pods = users.get(&Key::of(claim.as_ref())).into_iter().flatten();
                !pods.into_iter().any(|pod| is_user(pod, claim))
            });
            work.extend(unused.into_iter().map(|claim| (claim, false)));
        }
        let writes = stream::iter(work).map(|(claim, adds)| async move {
            if adds {
                add(&self.cluster, &claim, CLAIM_PROTECTION).await
            } else {
                remove(&self.cluster, &claim, CLAIM_PROTECTION).await
            }
        });
        let outcomes: Vec<_> = writes.buffer_unordered(WORKERS).collect().await;
        outcomes.into_iter().collect::<berth_kube::Result<()>>()?;
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
