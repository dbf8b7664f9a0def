//! A cluster with Kubernetes' own loops, a driver's storage, and lives of all components between them.

mod audit;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cluster};
use berth_sidecars::driver::Driver;
use berth_sidecars::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeSnapshot, VolumeSnapshotContent,
};
use berth_sidecars::{attacher, provisioner, resizer, snapshot_controller, snapshotter};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttributesClass};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::bench::{DRIVER, RETRY, Server, merge};
use crate::fake::{Fake, Storage};
use crate::power::Power;

/// How long changes are gathered before everything is looked at.
const LULL: Duration = Duration::from_millis(3);
/// More than anything here takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What there is to be of a subject: on the storage, and in Kubernetes, each owning the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Goal {
    pub(crate) volumes: usize,
    pub(crate) snapshots: usize,
    pub(crate) attached: usize,
}

/// Goals of subjects; those that are not named are to have nothing.
pub(crate) type Goals = BTreeMap<String, Goal>;

/// A cluster and a storage. What belongs to one subject has its name, or its name and more after a dash.
pub(crate) struct World {
    pub(crate) server: Server,
    pub(crate) storage: Arc<Storage>,
    /// Subjects by their claims' UIDs, also when the claims are gone.
    subjects: Mutex<BTreeMap<String, String>>,
    changes: watch::Receiver<u64>,
    _loops: DropGuard,
}

impl World {
    pub(crate) async fn start() -> Self {
        let server = Server::start().await;
        server.define().await;
        server.class("fast", json!({ "allowVolumeExpansion": true })).await;
        server.snapshot_class("snaps", json!({})).await;
        server.group_class("groups", json!({})).await;
        for class in ["silver", "gold"] {
            let class = json!({
                "metadata": { "name": class }, "driverName": DRIVER, "parameters": { "level": class },
            });
            server.apply::<VolumeAttributesClass>(class).await;
        }
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(server.client.clone(), shutdown.clone());
        tokio::spawn(berth_controllers::persistent_volumes::run(cluster.clone()));
        tokio::spawn(berth_controllers::protection::run(cluster));
        let changes = follow(&server.client, &shutdown);
        Self {
            server,
            storage: Arc::default(),
            subjects: Mutex::default(),
            changes,
            _loops: shutdown.drop_guard(),
        }
    }

    /// A life of all components with this power.
    pub(crate) fn life(&self, power: &Power) -> Life {
        let driver = Fake::driver(&self.storage, power);
        Life::start(&power.client(self.server.server.clone()), &driver, &Settings::default())
    }

    /// A claim of a subject.
    pub(crate) async fn claim(&self, name: &str, change: Value) {
        let mut own = json!({ "metadata": { "labels": { "subject": subject(name) } } });
        merge(&mut own, change);
        let claim = self.server.claim(name, "fast", own).await;
        self.subjects.lock().insert(claim.uid().unwrap(), subject(name).to_owned());
    }

    /// The UID of a claim that is there.
    pub(crate) async fn uid(&self, claim: &str) -> String {
        self.server.claims().get(claim).await.unwrap().uid().unwrap()
    }

    /// The volume of a claim that is there.
    pub(crate) async fn volume(&self, claim: &str) -> String {
        format!("pvc-{}", self.uid(claim).await)
    }

    /// Whose a volume or a snapshot is, by any name with its claim's UID in it.
    fn subject_of(&self, name: &str) -> String {
        let subjects = self.subjects.lock();
        let known = subjects.iter().find(|(uid, _)| name.contains(uid.as_str()));
        known.map_or_else(|| format!("nobody ({name})"), |(_, subject)| subject.clone())
    }

    /// Waits until all is as it should be; `whose` chooses the subjects that matter.
    pub(crate) async fn settles(&self, goals: &Goals, whose: impl Fn(&str) -> bool, at: &str) {
        let mut changes = self.changes.clone();
        let waiting = async {
            loop {
                changes.mark_unchanged();
                if self.wrong(goals).await.iter().all(|wrong| !whose(&wrong.subject)) {
                    return;
                }
                changes.changed().await.unwrap();
                // Changes come in bursts, and looking at everything costs more than one.
                tokio::time::sleep(LULL).await;
            }
        };
        if tokio::time::timeout(PATIENCE, Box::pin(waiting)).await.is_err() {
            let mut wrong = self.wrong(goals).await;
            wrong.retain(|wrong| whose(&wrong.subject));
            panic!("{at}: {wrong:#?}\nevents: {:#?}", self.server.events().await);
        }
    }

    /// Deletes every object that people made.
    pub(crate) async fn clear(&self) {
        delete_all(self.server.api::<VolumeAttachment>()).await;
        delete_all(self.server.groups()).await;
        let snapshots = self.server.snapshots();
        for snapshot in snapshots.list(&ListParams::default()).await.unwrap() {
            // Members go with their groups.
            if snapshot.owner_references().is_empty() {
                delete(&snapshots, &snapshot.name_any()).await;
            }
        }
        delete_all(self.server.claims()).await;
    }
}

/// What the name of an object says about whose it is.
pub(crate) fn subject(name: &str) -> &str {
    name.split('-').next().unwrap_or(name)
}

async fn delete_all<K>(api: Api<K>)
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    for object in api.list(&ListParams::default()).await.unwrap() {
        delete(&api, &object.name_any()).await;
    }
}

/// Deletes an object; one that is gone is deleted.
pub(crate) async fn delete<K>(api: &Api<K>, name: &str)
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        deleted => {
            deleted.unwrap();
        }
    }
}

/// Counts the changes of everything that is looked at.
fn follow(client: &Client, shutdown: &CancellationToken) -> watch::Receiver<u64> {
    let (count, changes) = watch::channel(0);
    let all = futures_util::stream::select_all([
        of::<PersistentVolumeClaim>(client),
        of::<PersistentVolume>(client),
        of::<VolumeAttachment>(client),
        of::<VolumeSnapshot>(client),
        of::<VolumeSnapshotContent>(client),
        of::<VolumeGroupSnapshot>(client),
        of::<VolumeGroupSnapshotContent>(client),
    ]);
    let end = shutdown.clone();
    tokio::spawn(async move {
        let mut all = std::pin::pin!(all.take_until(end.cancelled_owned()));
        while all.next().await.is_some() {
            count.send_modify(|count| *count += 1);
        }
    });
    changes
}

fn of<K>(client: &Client) -> futures_util::stream::BoxStream<'static, ()>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    watcher(Api::<K>::all(client.clone()), watcher::Config::default()).map(|_| ()).boxed()
}

/// How the components of a life work.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) workers: usize,
    pub(crate) retry: Backoff,
    pub(crate) reconcile: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            workers: 10,
            retry: RETRY,
            reconcile: attacher::Options::default().reconcile,
        }
    }
}

/// All components, running until this is stopped, or dropped, which is as if they were killed: with the power off,
/// nothing they still do reaches anybody.
pub(crate) struct Life {
    shutdown: CancellationToken,
    running: JoinSet<()>,
}

impl Life {
    pub(crate) fn start(client: &Client, driver: &Driver, settings: &Settings) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client.clone(), shutdown.clone());
        let Settings { timeout, workers, retry, reconcile } = settings.clone();
        let kinds = Duration::from_millis(50);
        let mut running = JoinSet::new();
        let options = provisioner::Options { timeout, workers, retry, ..provisioner::Options::default() };
        running.spawn(provisioner::run(cluster.clone(), driver.clone(), options));
        let options =
            attacher::Options { timeout, workers, retry, reconcile, ..attacher::Options::default() };
        running.spawn(attacher::run(cluster.clone(), driver.clone(), options));
        let options = resizer::Options { timeout, workers, retry, ..resizer::Options::default() };
        running.spawn(resizer::run(cluster.clone(), driver.clone(), options));
        let poll = (Duration::from_millis(5), Duration::from_millis(50));
        let options =
            snapshotter::Options { timeout, workers, retry, poll, kinds, ..snapshotter::Options::default() };
        running.spawn(snapshotter::run(cluster.clone(), driver.clone(), options));
        let options =
            snapshot_controller::Options { workers, retry, kinds, ..snapshot_controller::Options::default() };
        running.spawn(snapshot_controller::run(cluster, options));
        Self { shutdown, running }
    }

    /// Stops the components and waits for the work under way.
    pub(crate) async fn stop(mut self) {
        self.shutdown.cancel();
        while let Some(ended) = self.running.join_next().await {
            ended.unwrap();
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}
