//! The PV controller: binds claims to volumes, asks provisioners for volumes, and reclaims what claims leave behind.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume, StorageClass, Pod. Writes: PV `spec.claimRef`, its annotations, its
//! in-tree finalizer and its status; PVC `spec.volumeName`, `spec.storageClassName`, its annotations and its status;
//! deletes released hostPath volumes below /tmp; creates and deletes pods `recycler-for-<volume>`. Events as
//! `persistentvolume-controller`.
//!
//! A binding is four writes, the volume's first: claimRef, the volume's status, volumeName, the claim's status. Each is
//! left out if it is there already, so whatever was interrupted is finished by the next reconciliation. Claims are reconciled in
//! parallel; `pool` sees to it that no two get the same volume.
//!
//! Two things differ from Kubernetes on purpose: nothing is reconciled again every 15 seconds, since every change wakes
//! those that it matters to; and a volume that is reserved for a claim wins over a free one even when the free one has
//! fewer access modes.

mod apply;
mod host_path;
mod names;
mod plan;
mod pool;
mod recycle;
mod step;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;

use berth_kube::timeline;
use berth_kube::{Backoff, Cache, Cluster, Failure, Index, Key, Loop, Next, Queue, Recorder};

use self::apply::Pair;
use self::plan::ObservedClaim;
use self::pool::Pool;
use self::recycle::RecyclerEvents;
use self::step::Step;
use berth_core::names::BIND_COMPLETED;
use berth_kube::storage;

/// How many claims and volumes are reconciled at a time; they mostly wait for the disk of the API server.
const WORKERS: usize = 64;
/// How long after a pod came the claim that it waits for gets an event, if it still waits.
const WAITING_EVENT_DELAY: Duration = Duration::from_secs(1);

/// Runs the PV controller until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    let cluster = cluster.named("persistentvolume-controller");
    let controller = Arc::new(Controller::new(&cluster));
    let of = || controller.clone();
    let (of_volume, of_claim, of_class, of_pod) = (of(), of(), of(), of());
    Loop::new(&cluster, &controller.queue)
        .subscribe(&controller.volumes, move |before, after| of_volume.volume_changed(before, after))
        .also(&controller.claims, move |claim| of_claim.claim_changed(claim))
        .also(&controller.classes, move |class| of_class.class_changed(class))
        .subscribe(&controller.pods, move |before, after| of_pod.pod_changed(before, after))
        .run(WORKERS, |work| controller.clone().reconcile(work))
        .await;
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Work {
    Claim(Key),
    Volume(String),
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] berth_kube::Error),
    #[error("two objects contradict each other: {0}")]
    Misbound(String),
    #[error("reclaim volume {0}: {1}")]
    Reclaim(String, String),
}

impl Failure for Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Kube(error) if error.is_conflict())
    }

    fn describe(&self) -> String {
        match self {
            Self::Kube(error) => error.chain(),
            other => other.to_string(),
        }
    }
}

struct Controller {
    cluster: Cluster,
    recorder: Recorder,
    queue: Queue<Work>,
    pool: Pool,
    claims: Cache<PersistentVolumeClaim>,
    volumes: Cache<PersistentVolume>,
    classes: Cache<StorageClass>,
    pods: Cache<Pod>,
    recycler_news: RecyclerEvents,
    /// Volumes by the claim they point at.
    volumes_by_claim: Index<PersistentVolume, Key>,
    /// Pods by the claims they use.
    pods_by_claim: Index<Pod, Key>,
    /// Claims by the volume they name.
    claims_by_volume: Index<PersistentVolumeClaim, String>,
    /// Claims whose binding is not finished, by the class they ask for.
    waiting_by_class: Index<PersistentVolumeClaim, Option<String>>,
}

impl Controller {
    fn new(cluster: &Cluster) -> Self {
        let queue = cluster.queue("persistent volumes", Backoff::default());
        let wake = queue.clone();
        let (volumes, pods) = (cluster.cache::<PersistentVolume>(), cluster.cache::<Pod>());
        let claims = cluster.cache::<PersistentVolumeClaim>();
        Self {
            cluster: cluster.clone(),
            recorder: Recorder::new(cluster, "persistentvolume-controller", ""),
            pool: Pool::new(move |claim| wake.add(Work::Claim(claim))),
            volumes_by_claim: volumes.index(|volume| storage::claim_of_volume(volume).into_iter().collect()),
            pods_by_claim: pods
                .index(|pod| storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect()),
            claims_by_volume: claims.index(|claim| {
                let name = Some(storage::volume_name(claim).to_owned());
                name.filter(|name| !name.is_empty()).into_iter().collect()
            }),
            waiting_by_class: claims.index(|claim| {
                let class = plan::has_class(claim).then(|| storage::class_of_claim(claim).to_owned());
                if waits(claim) { vec![class] } else { Vec::new() }
            }),
            classes: cluster.cache(),
            recycler_news: RecyclerEvents::default(),
            queue,
            claims,
            volumes,
            pods,
        }
    }

    /// A volume matters to the claims it points at and to those that name it.
    fn volume_changed(
        &self,
        before: Option<&Arc<PersistentVolume>>,
        after: Option<&Arc<PersistentVolume>>,
    ) -> Vec<Work> {
        let Some(volume) = after.or(before) else { return Vec::new() };
        let name = volume.name_any();
        self.pool.volume_changed(&name, after);
        let both = [before, after].into_iter().flatten();
        let mut work: Vec<Work> =
            both.filter_map(|volume| storage::claim_of_volume(volume)).map(Work::Claim).collect();
        work.extend(
            self.claims_by_volume.get(&name).iter().map(|claim| Work::Claim(Key::of(claim.as_ref()))),
        );
        work.push(Work::Volume(name));
        work
    }

    /// A claim matters to the volumes that point at it.
    fn claim_changed(&self, claim: &PersistentVolumeClaim) -> Vec<Work> {
        let key = Key::of(claim);
        let volumes = self.volumes_by_claim.get(&key);
        let mut work: Vec<Work> = volumes.iter().map(|volume| Work::Volume(volume.name_any())).collect();
        work.push(Work::Claim(key));
        work
    }

    /// A class that comes or changes matters to its claims, and a default class to those without a class.
    fn class_changed(&self, class: &StorageClass) -> Vec<Work> {
        let mut waiting = self.waiting_by_class.get(&Some(class.name_any()));
        if names::is_default(class) {
            waiting.extend(self.waiting_by_class.get(&None));
        }
        waiting.iter().map(|claim| Work::Claim(Key::of(claim.as_ref()))).collect()
    }

    /// A pod matters to a claim that waits for its first consumer, to a volume that can be emptied once no pod uses it,
    /// and to the volume it empties.
    fn pod_changed(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) -> Vec<Work> {
        let Some(pod) = after.or(before) else { return Vec::new() };
        let mut work = Vec::new();
        if let Some(volume) = recycle::volume_of(pod) {
            if after.is_none() {
                self.recycler_news.end(pod);
            }
            work.push(Work::Volume(volume));
        }
        for claim in storage::claims_of_pod(pod) {
            let volumes = self.volumes_by_claim.get(&claim.key).into_iter();
            let left = volumes.filter(|volume| matches!(plan::phase(volume), "Released" | "Failed"));
            work.extend(left.map(|volume| Work::Volume(volume.name_any())));
            if before.is_none() && self.claims.get(&claim.key).is_some_and(|claim| waits(&claim)) {
                self.queue.add_after(Work::Claim(claim.key), WAITING_EVENT_DELAY);
            }
        }
        work
    }

    async fn reconcile(self: Arc<Self>, work: Work) -> Result<Next, Error> {
        match work {
            Work::Claim(key) => self.reconcile_claim(key).await,
            Work::Volume(name) => self.reconcile_volume(name).await,
        }
    }

    async fn reconcile_claim(&self, key: Key) -> Result<Next, Error> {
        let turn = self.pool.turn(key.clone());
        let Some(claim) = self.claims.get(&key) else { return Ok(Next::Done) };
        let class = Some(storage::class_of_claim(&claim)).filter(|class| !class.is_empty());
        let class = class.and_then(|class| self.classes.named(class));
        let completed = claim.annotations().contains_key(BIND_COMPLETED);
        let volume = match storage::volume_name(&claim) {
            "" if completed => None,
            "" => self.reserved(&claim).or_else(|| {
                let delayed = plan::is_delayed(class.as_deref());
                if delayed { None } else { turn.find(&claim) }
            }),
            name => self.volume_or_live(name, completed).await?,
        };
        let (default_class, unscheduled) = if volume.is_none() && !completed {
            (self.default_class(), self.unscheduled(&key))
        } else {
            (None, Vec::new())
        };
        let steps = plan::plan_claim(&ObservedClaim {
            claim: &claim,
            volume: volume.as_deref(),
            class: class.as_deref(),
            default_class: default_class.as_deref(),
            unscheduled: &unscheduled,
        });
        self.carry_out(&steps, Pair { claim: Some(claim), volume }).await
    }

    async fn reconcile_volume(&self, name: String) -> Result<Next, Error> {
        let Some(volume) = self.volumes.named(&name) else { return Ok(Next::Done) };
        let claim = self.claim_of(&volume).await?;
        let steps = plan::plan_volume(&volume, claim.as_deref());
        self.carry_out(&steps, Pair { claim, volume: Some(volume) }).await
    }

    async fn carry_out(&self, steps: &[Step], mut pair: Pair) -> Result<Next, Error> {
        let begun = Instant::now();
        let mut binds = pair.claim.as_ref().is_some_and(|claim| !storage::is_bound(claim));
        for step in steps {
            match step {
                Step::DeleteHostPath => self.delete_host_path(&mut pair).await?,
                Step::Recycle => return self.recycle(&mut pair).await,
                step => apply::apply(&self.cluster, &self.recorder, step, &mut pair).await?,
            }
            // Recorded with the write that binds: a later write of these steps may meet a conflict, and the next round
            // finds the claim bound.
            if let (true, Some(claim), Some(volume)) = (binds, &pair.claim, &pair.volume)
                && storage::is_bound(claim)
            {
                binds = false;
                timeline::Step {
                    component: "pv-controller",
                    call: "bind",
                    volume: &volume.name_any(),
                    claim: &Key::of(claim.as_ref()).to_string(),
                    ..timeline::Step::default()
                }
                .ended(begun, None);
            }
        }
        Ok(Next::Done)
    }

    /// The volume that is reserved for a claim.
    fn reserved(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        pool::reserved(self.volumes_by_claim.get(&Key::of(claim)), claim)
    }

    /// A volume by name; before a bound claim counts as lost, the API server is asked.
    async fn volume_or_live(&self, name: &str, live: bool) -> Result<Option<Arc<PersistentVolume>>, Error> {
        match self.volumes.named(name) {
            None if live => Ok(self.cluster.fetch(&Key::cluster(name)).await?),
            volume => Ok(volume),
        }
    }

    /// The claim a volume is bound to, if it still exists; before a volume counts as released, the API server is asked.
    async fn claim_of(&self, volume: &PersistentVolume) -> Result<Option<Arc<PersistentVolumeClaim>>, Error> {
        let (Some(key), Some(uid)) = (storage::claim_of_volume(volume), plan::bound_uid(volume)) else {
            return Ok(None);
        };
        let is_it = |claim: &Arc<PersistentVolumeClaim>| claim.metadata.uid.as_deref() == Some(uid);
        let known = self.claims.get(&key);
        if known.as_ref().is_some_and(is_it) {
            return Ok(known);
        }
        if known.is_none() && matches!(plan::phase(volume), "Released" | "Failed") {
            return Ok(None);
        }
        Ok(self.cluster.fetch(&key).await?.filter(is_it))
    }

    /// The class that claims without a class get.
    fn default_class(&self) -> Option<String> {
        names::default_of(&self.classes.list())
    }

    /// The pods that use a claim, are not over and have no node, by name.
    fn unscheduled(&self, claim: &Key) -> Vec<String> {
        let pods = self.pods_by_claim.get(claim);
        let mut names: Vec<String> = pods
            .iter()
            .filter(|pod| storage::node_of_pod(pod).is_empty() && !is_terminated(pod))
            .map(|pod| pod.name_any())
            .collect();
        names.sort();
        names
    }
}

/// Whether a claim's binding is not finished.
fn waits(claim: &PersistentVolumeClaim) -> bool {
    !claim.annotations().contains_key(BIND_COMPLETED)
}

/// Whether nothing of a pod runs any more.
fn is_terminated(pod: &Pod) -> bool {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let runs = statuses.into_iter().flatten().any(|container| {
        container.state.as_ref().is_some_and(|state| state.terminated.is_none() && state.waiting.is_none())
    });
    storage::is_over(pod) || (pod.metadata.deletion_timestamp.is_some() && !runs)
}
