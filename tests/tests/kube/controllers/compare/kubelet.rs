//! The nodes of a comparison, the same on both sides: they are alive by a Lease, run the pods that they are given to the end that
//! the pod's annotation [`OUTCOME`] names, remove those that are deleted, and have a driver that makes a volume for every claim.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use berth_kube::{Backoff, Cluster, Key, Next, Queue, storage};
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStatus, PersistentVolume,
    PersistentVolumeClaim, Pod, PodCondition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::kinds::{EVENT, NODE, text};
use crate::objects::{Objects, merged};

/// What becomes of a pod: `ready` (by default), `unready` (it runs and is not ready), `waiting` (it does not start), or the exit code
/// with which it ends. Several in a row, such as `1/1/0`, are for the first pod of an owner, or of an index of an owner, and for those
/// after it; the last one is for all others. Rows for the indexes of a Job have commas between them.
pub(crate) const OUTCOME: &str = "test/outcome";
/// The driver of the claims.
pub(crate) const DRIVER: &str = "compare.berth.test";

const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// How often a kubelet says that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How long a pod takes to come from one phase to the next, so that controllers see each of them.
const STEP: Duration = Duration::from_millis(200);

/// All nodes of a cluster.
pub(crate) struct Kubelets {
    objects: Objects,
    nodes: Arc<Nodes>,
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
}

struct Nodes {
    cluster: Cluster,
    queue: Queue<Key>,
    /// The nodes that are alive, with what ends their heartbeat.
    alive: Mutex<HashMap<String, CancellationToken>>,
    /// Which pod of its owner and index a pod is, by its uid, and how many there have been.
    places: Mutex<HashMap<String, usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Waiting,
    Ready,
    Unready,
    Exit(i32),
}

impl Kubelets {
    pub(crate) async fn start(client: Client) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client.clone(), shutdown.clone());
        let queue = Queue::new("kubelets", Backoff::default());
        let nodes = Arc::new(Nodes {
            cluster: cluster.clone(),
            queue: queue.clone(),
            alive: Mutex::default(),
            places: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        let pods = cluster.cache::<Pod>();
        pods.synced().await;
        pods.on_change(move |pod| queue.add(Key::of(pod.as_ref())));
        let running = nodes.clone();
        tasks.spawn(async move {
            let (queue, shutdown) = (running.queue.clone(), running.cluster.shutdown().clone());
            queue.run(32, shutdown, |key| running.clone().pod(key)).await;
        });
        tasks.spawn(provisioner(cluster));
        let objects = Objects::new(client, "default".to_owned());
        Self { objects, nodes, shutdown, tasks }
    }

    /// Makes a node that is ready, with more labels, and waits until pods may come to it and its controller knows it.
    pub(crate) async fn add(&mut self, name: &str, labels: Value) -> Result<()> {
        let labels = merged(json!({"kubernetes.io/hostname": name}), labels);
        let node = json!({"metadata": {"name": name, "labels": labels}, "status": status()});
        let uid = text(&self.objects.create(NODE, node).await?, "/metadata/uid").to_owned();
        self.revive(name).await?;
        let open = |node: &Value| node["spec"]["taints"].is_null();
        self.objects.until(NODE, name, "has no taints", open).await?;
        let registered = |event: &Value| {
            text(event, "/involvedObject/uid") == uid && text(event, "/reason") == "RegisteredNode"
        };
        let what = format!("{name} is registered");
        self.objects.until_all(&what, EVENT, |events| events.iter().any(registered)).await.map(drop)
    }

    /// Has a node say again that it is alive, and run its pods.
    pub(crate) async fn revive(&mut self, name: &str) -> Result<()> {
        let beats = self.shutdown.child_token();
        self.nodes.alive.lock().insert(name.to_owned(), beats.clone());
        self.tasks.spawn(beat(self.objects.client(), name.to_owned(), beats));
        self.objects.patch_status(NODE, name, status()).await?;
        for pod in self.nodes.cluster.cache::<Pod>().keys() {
            self.nodes.queue.add(pod);
        }
        Ok(())
    }

    /// Has a node fall silent: nobody hears of it, and its pods stay as they are.
    pub(crate) fn fail(&self, name: &str) {
        if let Some(beats) = self.nodes.alive.lock().remove(name) {
            beats.cancel();
        }
    }

    /// Takes a node away.
    pub(crate) async fn remove(&self, name: &str) -> Result<()> {
        self.fail(name);
        self.objects.delete(NODE, name).await
    }

    pub(crate) async fn stop(mut self) {
        self.shutdown.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The status of a node that is well.
fn status() -> Value {
    let now = now();
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({
            "type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        })
    };
    let room = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
    json!({
        "allocatable": room, "capacity": room,
        "conditions": [
            condition("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
            condition("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            condition("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            condition("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
        ],
    })
}

/// This moment as Kubernetes writes it in a status.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

async fn beat(client: Client, node: String, until: CancellationToken) {
    use k8s_openapi::api::coordination::v1::Lease;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    let leases: kube::Api<Lease> = kube::Api::namespaced(client, "kube-node-lease");
    loop {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
            "spec": {
                "holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": MicroTime(Timestamp::now()),
            },
        });
        // The next one comes soon.
        let _ = leases.patch(&node, &PatchParams::apply("kubelet").force(), &Patch::Apply(lease)).await;
        tokio::select! {
            () = until.cancelled() => return,
            () = tokio::time::sleep(HEARTBEAT) => {}
        }
    }
}

impl Nodes {
    async fn pod(self: Arc<Self>, key: Key) -> berth_kube::Result<Next> {
        let Some(pod) = self.cluster.cache::<Pod>().get(&key) else { return Ok(Next::Done) };
        let node = storage::node_of_pod(&pod);
        if node.is_empty() || !self.alive.lock().contains_key(node) {
            return Ok(Next::Done);
        }
        let is_over = storage::is_over(&pod);
        if pod.metadata.deletion_timestamp.is_some() {
            if !is_over {
                self.go_to(&pod, Outcome::Exit(137)).await?;
            }
            tokio::time::sleep(STEP).await;
            let preconditions = Preconditions { uid: pod.uid(), resource_version: None };
            let how = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            let removed = self.cluster.delete_with(pod.as_ref(), &how.grace_period(0)).await;
            return match removed {
                Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
                _ => Ok(Next::Done),
            };
        }
        let outcome = self.outcome(&pod);
        let is_running = storage::phase_of_pod(&pod) == "Running";
        if is_over || outcome == Outcome::Waiting {
            return Ok(Next::Done);
        }
        if !is_running {
            tokio::time::sleep(STEP).await;
            let running = if outcome == Outcome::Ready { Outcome::Ready } else { Outcome::Unready };
            self.go_to(&pod, running).await?;
        } else if let Outcome::Exit(_) = outcome {
            tokio::time::sleep(STEP).await;
            self.go_to(&pod, outcome).await?;
        } else if (outcome == Outcome::Ready) != is_ready(&pod) {
            self.go_to(&pod, outcome).await?;
        }
        Ok(Next::Done)
    }

    fn outcome(&self, pod: &Pod) -> Outcome {
        let Some(asked) = pod.annotations().get(OUTCOME) else { return Outcome::Ready };
        let index = pod.annotations().get("batch.kubernetes.io/job-completion-index");
        let at = index.and_then(|index| index.parse::<usize>().ok()).unwrap_or(0);
        let rows: Vec<&str> = asked.split(',').collect();
        let row: Vec<&str> = rows[at.min(rows.len() - 1)].split('/').collect();
        let owner = pod.owner_references().first().map_or("", |owner| &owner.uid);
        let mut places = self.places.lock();
        let uid = pod.uid().unwrap_or_default();
        let known = places.get(&uid).copied();
        let place = known.unwrap_or_else(|| {
            let next = places.entry(format!("{owner} {at}")).or_default();
            *next += 1;
            let place = *next - 1;
            places.insert(uid, place);
            place
        });
        match row[place.min(row.len() - 1)] {
            "waiting" => Outcome::Waiting,
            "unready" => Outcome::Unready,
            "ready" => Outcome::Ready,
            code => Outcome::Exit(code.parse().expect("an outcome is a word or an exit code")),
        }
    }

    async fn go_to(&self, pod: &Pod, outcome: Outcome) -> berth_kube::Result<()> {
        self.cluster.edit_status(pod, |pod| report(pod, outcome)).await.map(drop)
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Writes into a pod's status what a kubelet writes.
fn report(pod: &mut Pod, outcome: Outcome) {
    let spec = pod.spec.clone().unwrap_or_default();
    let status = pod.status.get_or_insert_default();
    let running = ContainerStateRunning { started_at: Some(now()) };
    let (phase, state) = match outcome {
        Outcome::Exit(code) => {
            let state = ContainerStateTerminated {
                exit_code: code,
                reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
                started_at: status.start_time.clone(),
                finished_at: Some(now()),
                ..ContainerStateTerminated::default()
            };
            let phase = if code == 0 { "Succeeded" } else { "Failed" };
            (phase, ContainerState { terminated: Some(state), ..ContainerState::default() })
        }
        _ => ("Running", ContainerState { running: Some(running), ..ContainerState::default() }),
    };
    status.phase = Some(phase.to_owned());
    status.start_time.get_or_insert_with(now);
    let is_ready = outcome == Outcome::Ready;
    status.container_statuses = Some(
        spec.containers
            .iter()
            .map(|container| ContainerStatus {
                name: container.name.clone(),
                image: container.image.clone().unwrap_or_default(),
                ready: is_ready,
                started: Some(phase == "Running"),
                state: Some(state.clone()),
                ..ContainerStatus::default()
            })
            .collect(),
    );
    let why = match outcome {
        Outcome::Exit(0) => Some("PodCompleted"),
        Outcome::Exit(_) => Some("PodFailed"),
        Outcome::Unready => Some("ContainersNotReady"),
        _ => None,
    };
    for (kind, holds, reason) in
        [("Initialized", true, None), ("Ready", is_ready, why), ("ContainersReady", is_ready, why)]
    {
        let conditions = status.conditions.get_or_insert_default();
        let wanted = if holds { "True" } else { "False" };
        let known = conditions.iter().position(|condition| condition.type_ == kind);
        let at = known.unwrap_or_else(|| {
            conditions.push(PodCondition { type_: kind.to_owned(), ..PodCondition::default() });
            conditions.len() - 1
        });
        let condition = &mut conditions[at];
        if condition.status != wanted {
            condition.last_transition_time = Some(now());
        }
        wanted.clone_into(&mut condition.status);
        condition.reason = reason.map(str::to_owned);
    }
}

/// Makes a volume for each claim that is handed to [`DRIVER`], and deletes it when the claim is gone.
async fn provisioner(cluster: Cluster) {
    let queue = Queue::new("provisioner", Backoff::default());
    let (claims, volumes) = (cluster.cache::<PersistentVolumeClaim>(), cluster.cache::<PersistentVolume>());
    claims.synced().await;
    volumes.synced().await;
    let (of_claims, of_volumes) = (queue.clone(), queue.clone());
    claims.on_change(move |claim| of_claims.add(Key::of(claim.as_ref())));
    volumes.on_change(move |volume| of_volumes.add(Key::of(volume.as_ref())));
    let shutdown = cluster.shutdown().clone();
    queue
        .run(8, shutdown, |key: Key| {
            let (cluster, claims, volumes) = (cluster.clone(), claims.clone(), volumes.clone());
            async move {
                if let Some(claim) = claims.get(&key).filter(|_| !key.namespace.is_empty()) {
                    provision(&cluster, &claim).await?;
                } else if let Some(volume) = volumes.get(&key) {
                    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
                    let is_ours = volume.annotations().get(PROVISIONED_BY).is_some_and(|by| by == DRIVER);
                    if is_ours && phase == Some("Released") && volume.metadata.deletion_timestamp.is_none() {
                        cluster.delete(volume.as_ref()).await?;
                    }
                }
                Ok::<_, berth_kube::Error>(Next::Done)
            }
        })
        .await;
}

async fn provision(cluster: &Cluster, claim: &PersistentVolumeClaim) -> berth_kube::Result<()> {
    let Some(spec) = &claim.spec else { return Ok(()) };
    let asked = claim.annotations().get("volume.kubernetes.io/storage-provisioner");
    if asked.is_none_or(|asked| asked != DRIVER) || spec.volume_name.is_some() {
        return Ok(());
    }
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {
            "name": format!("pvc-{}", claim.uid().unwrap_or_default()),
            "annotations": {PROVISIONED_BY: DRIVER},
        },
        "spec": {
            "accessModes": spec.access_modes, "storageClassName": spec.storage_class_name,
            "capacity": spec.resources.as_ref().and_then(|resources| resources.requests.clone()),
            "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Filesystem",
            "csi": {"driver": DRIVER, "volumeHandle": claim.uid()},
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace(), "name": claim.name_any(), "uid": claim.uid(),
                "resourceVersion": claim.resource_version(),
            },
        },
    });
    let volume: PersistentVolume = serde_json::from_value(volume).expect("the volume is well formed");
    match cluster.create(&volume).await {
        Err(error) if !error.is_already_exists() => Err(error),
        _ => Ok(()),
    }
}
