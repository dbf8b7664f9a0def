//! A cluster and a driver to run the components on, and words for what the tests do and wait for.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use berth_backends::local::{self, Kind, Local};
use berth_backends::services::{Config, Mode};
use berth_csi::{CallLayer, Metrics};
use berth_kube::{Backoff, Cluster};
use berth_sidecars::driver::Driver;
use berth_sidecars::{attacher, provisioner, resizer};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// The driver of these tests.
pub(crate) const DRIVER: &str = "local.berth.dev";
/// The node of these tests.
pub(crate) const NODE: &str = "node-a";
/// More than anything here takes, even on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An API server in this process.
#[expect(clippy::struct_field_names, reason = "the server itself, for those who want no client")]
pub(crate) struct Server {
    pub(crate) client: Client,
    pub(crate) server: berth_apiserver::rest::ApiServer,
    _place: tempfile::TempDir,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let (store, _) =
            berth_apiserver::store::Store::open(place.path(), berth_apiserver::store::Options::default())
                .unwrap();
        let api = berth_apiserver::rest::ApiServer::new(store, berth_apiserver::rest::Options::default());
        assert!(api.bootstrap().await.is_ok());
        let server = Self { client: Client::new(api.clone(), "default"), server: api, _place: place };
        server
            .apply::<Node>(
                json!({ "metadata": { "name": NODE, "labels": { "topology.berth.dev/node": NODE } } }),
            )
            .await;
        let driver = json!({ "name": DRIVER, "nodeID": NODE, "topologyKeys": ["topology.berth.dev/node"] });
        server
            .apply::<CSINode>(json!({ "metadata": { "name": NODE }, "spec": { "drivers": [driver] } }))
            .await;
        server
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = ()>,
    {
        Api::all(self.client.clone())
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Creates an object without a namespace.
    pub(crate) async fn apply<K>(&self, object: Value) -> K
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>().create(&PostParams::default(), &object).await.unwrap()
    }

    pub(crate) async fn class(&self, name: &str, change: Value) -> StorageClass {
        let mut class =
            json!({ "metadata": { "name": name }, "provisioner": DRIVER, "reclaimPolicy": "Delete" });
        merge(&mut class, change);
        self.apply(class).await
    }

    /// A claim that was handed to the driver.
    pub(crate) async fn claim(&self, name: &str, class: &str, change: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": {
                "name": name,
                "annotations": { "volume.kubernetes.io/storage-provisioner": DRIVER },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": class,
                "resources": { "requests": { "storage": "16Mi" } },
            },
        });
        merge(&mut claim, change);
        let claim = serde_json::from_value(claim).unwrap();
        self.claims().create(&PostParams::default(), &claim).await.unwrap()
    }

    pub(crate) async fn attachment(&self, name: &str, volume: &str) -> VolumeAttachment {
        self.apply(json!({
            "metadata": { "name": name },
            "spec": { "attacher": DRIVER, "nodeName": NODE, "source": { "persistentVolumeName": volume } },
        }))
        .await
    }

    /// What the PV controller does when it binds.
    pub(crate) async fn bind(&self, claim: &str) -> PersistentVolume {
        let claim = self.claims().get(claim).await.unwrap();
        let volume = format!("pvc-{}", claim.uid().unwrap());
        patch(&self.claims(), &claim.name_any(), json!({ "spec": { "volumeName": volume } })).await;
        let volume = self.api::<PersistentVolume>().get(&volume).await.unwrap();
        let capacity = volume.spec.as_ref().unwrap().capacity.clone();
        patch_status(
            &self.claims(),
            &claim.name_any(),
            json!({ "status": { "phase": "Bound", "capacity": capacity } }),
        )
        .await;
        patch_status(
            &self.api::<PersistentVolume>(),
            &volume.name_any(),
            json!({ "status": { "phase": "Bound" } }),
        )
        .await
    }

    /// What the PV controller and the protection controller do when the claim is gone.
    pub(crate) async fn release(&self, volume: &str) {
        let api = self.api::<PersistentVolume>();
        patch_status(&api, volume, json!({ "status": { "phase": "Released" } })).await;
        // Others write finalizers at the same time: only if the list is still the same.
        while let Some(mut now) = api.get_opt(volume).await.unwrap() {
            now.finalizers_mut().retain(|finalizer| finalizer != "kubernetes.io/pv-protection");
            match api.replace(volume, &PostParams::default(), &now).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(kube::Error::Api(status)) if status.code == 404 => break,
                replaced => {
                    replaced.unwrap();
                    break;
                }
            }
        }
    }

    /// Waits until an object is as wanted; `None` means gone.
    pub(crate) async fn wait<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        wanted: impl Fn(Option<&K>) -> bool,
    ) -> Option<K>
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
    {
        let mut last = None;
        let waiting = async {
            let mut states = std::pin::pin!(watcher::watch_object(api, name));
            while let Some(state) = states.next().await {
                if let Ok(state) = state {
                    last = state;
                    if wanted(last.as_ref()) {
                        return;
                    }
                }
            }
        };
        // Boxed: a watch is large, and tests wait often.
        let in_time = tokio::time::timeout(PATIENCE, Box::pin(waiting)).await;
        assert!(in_time.is_ok(), "{name} never became {what}: {last:#?}\nevents: {:#?}", self.events().await);
        last
    }

    /// The volume of a claim, once it is saved.
    pub(crate) async fn provisioned(&self, claim: &PersistentVolumeClaim) -> PersistentVolume {
        let name = format!("pvc-{}", claim.uid().unwrap());
        self.wait(self.api(), &name, "saved", |volume: Option<&PersistentVolume>| volume.is_some())
            .await
            .unwrap()
    }

    /// Reason and message of every event.
    pub(crate) async fn events(&self) -> Vec<(String, String)> {
        let events: Api<Event> = Api::all(self.client.clone());
        let list = events.list(&ListParams::default()).await.unwrap();
        list.items
            .into_iter()
            .map(|e| (e.reason.unwrap_or_default(), e.message.unwrap_or_default()))
            .collect()
    }

    /// All events for this reason on objects of a kind.
    pub(crate) async fn events_of(&self, kind: &str, reason: &str) -> Vec<Event> {
        let events: Api<Event> = Api::all(self.client.clone());
        let of = format!("involvedObject.kind={kind},reason={reason}");
        events.list(&ListParams::default().fields(&of)).await.unwrap().items
    }

    /// Waits for an event with this reason whose message contains `text`.
    pub(crate) async fn event(&self, reason: &str, text: &str) -> String {
        let found = tokio::time::timeout(PATIENCE, async {
            let events: Api<Event> = Api::all(self.client.clone());
            let mut changes = std::pin::pin!(watcher(events, watcher::Config::default()));
            while let Some(change) = changes.next().await {
                if let Ok(watcher::Event::Apply(event) | watcher::Event::InitApply(event)) = change
                    && event.reason.as_deref() == Some(reason)
                    && event.message.as_deref().is_some_and(|message| message.contains(text))
                {
                    return event.message.unwrap();
                }
            }
            unreachable!("a watch does not end")
        });
        let Ok(message) = found.await else {
            panic!("no event {reason} with {text:?}: {:#?}", self.events().await)
        };
        message
    }
}

pub(crate) async fn patch<K>(api: &Api<K>, name: &str, change: Value) -> K
where
    K: Clone + Debug + serde::de::DeserializeOwned,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

pub(crate) async fn patch_status<K>(api: &Api<K>, name: &str, change: Value) -> K
where
    K: Clone + Debug + serde::de::DeserializeOwned,
{
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

pub(crate) fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

/// Berth's local driver, with volumes in a directory.
pub(crate) async fn local_driver(place: &Path, attach: bool) -> (Local, Driver) {
    let mut config = local::Config::new(place.join("data"), NODE.parse().unwrap());
    config.kind = Some(Kind::Dir);
    config.attachment = attach;
    let backend = Local::open(config).await.unwrap();
    let driver = backend.driver(DRIVER, "test", Mode::Controller).open(Config::new(place)).unwrap();
    let calls = berth_csi::in_process(driver.routes(), &CallLayer::new(Metrics::unregistered(DRIVER), None));
    (backend, Driver::in_process(calls))
}

/// The three components, running until this is stopped or dropped.
pub(crate) struct Components {
    shutdown: CancellationToken,
    running: JoinSet<()>,
}

/// Quick retries, so that tests of failures take no seconds.
pub(crate) const RETRY: Backoff =
    Backoff { first: Duration::from_millis(5), longest: Duration::from_millis(200) };

impl Components {
    pub(crate) fn start(client: &Client, driver: &Driver) -> Self {
        Self::start_with(client, driver, |_, _, _| {})
    }

    pub(crate) fn start_with(
        client: &Client,
        driver: &Driver,
        change: impl FnOnce(&mut provisioner::Options, &mut attacher::Options, &mut resizer::Options),
    ) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client.clone(), shutdown.clone());
        let mut provisioning = provisioner::Options { retry: RETRY, ..provisioner::Options::default() };
        let mut attaching = attacher::Options { retry: RETRY, ..attacher::Options::default() };
        let mut resizing = resizer::Options { retry: RETRY, ..resizer::Options::default() };
        change(&mut provisioning, &mut attaching, &mut resizing);
        let mut running = JoinSet::new();
        running.spawn(provisioner::run(cluster.clone(), driver.clone(), provisioning));
        running.spawn(attacher::run(cluster.clone(), driver.clone(), attaching));
        running.spawn(resizer::run(cluster.clone(), driver.clone(), resizing));
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

impl Drop for Components {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}
