//! A cluster with Kubernetes' own loops, a driver's storage, and lives of all components between them.

mod audit;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use berth_kube::Backoff;
use berth_sidecars::driver::Driver;
use berth_sidecars::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeSnapshot, VolumeSnapshotContent,
};
use berth_sidecars::{attacher, provisioner, resizer, snapshot_controller, snapshotter};
use berth_testkit::{FakeDriver, Kind, Loops, PATIENCE, delete, merge};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttributesClass};
use kube::api::ListParams;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::bench::{DRIVER, RETRY, Server, connect};
use crate::power::Power;

/// How long changes are gathered before everything is looked at.
const LULL: Duration = Duration::from_millis(3);

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
    pub(crate) fake: Arc<FakeDriver>,
    /// Subjects by their claims' UIDs, also when the claims are gone.
    subjects: Mutex<BTreeMap<String, String>>,
    changes: watch::Receiver<u64>,
    _loops: Loops,
    _following: DropGuard,
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
            server.create::<VolumeAttributesClass>(class).await;
        }
        let loops = Loops::new(&server.client)
            .with(berth_controllers::persistent_volumes::run)
            .with(berth_controllers::protection::run);
        let following = CancellationToken::new();
        let changes = follow(&server.client, &following);
        Self {
            server,
            fake: FakeDriver::new(DRIVER),
            subjects: Mutex::default(),
            changes,
            _loops: loops,
            _following: following.drop_guard(),
        }
    }

    /// A life of all components with this power.
    pub(crate) fn life(&self, power: &Power) -> Loops {
        let driver = connect(&self.fake, power);
        start_all(&power.client(self.server.api_server().clone()), &driver, &Settings::default())
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
        delete_all(self.server.all::<VolumeAttachment>()).await;
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

async fn delete_all<K: Kind>(api: Api<K>) {
    for object in api.list(&ListParams::default()).await.unwrap() {
        delete(&api, &object.name_any()).await;
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

/// Starts all components. Dropping them is as if they were killed: with the power off, nothing they still do reaches anybody.
pub(crate) fn start_all(client: &Client, driver: &Driver, settings: &Settings) -> Loops {
    let Settings { timeout, workers, retry, reconcile } = settings.clone();
    let kinds = Duration::from_millis(50);
    let poll = (Duration::from_millis(5), Duration::from_millis(50));
    let provisioning = provisioner::Options { timeout, workers, retry, ..provisioner::Options::default() };
    let attaching = attacher::Options { timeout, workers, retry, reconcile, ..attacher::Options::default() };
    let resizing = resizer::Options { timeout, workers, retry, ..resizer::Options::default() };
    let taking =
        snapshotter::Options { timeout, workers, retry, poll, kinds, ..snapshotter::Options::default() };
    let binding =
        snapshot_controller::Options { workers, retry, kinds, ..snapshot_controller::Options::default() };
    Loops::new(client)
        .with(|cluster| provisioner::run(cluster, driver.clone(), provisioning))
        .with(|cluster| attacher::run(cluster, driver.clone(), attaching))
        .with(|cluster| resizer::run(cluster, driver.clone(), resizing))
        .with(|cluster| snapshotter::run(cluster, driver.clone(), taking))
        .with(|cluster| snapshot_controller::run(cluster, binding))
}
