//! Where a scenario takes place: a client, a namespace of its own, and the loops that run on it.

mod clearing;

use std::collections::HashMap;
use std::fmt::Debug;
use std::future::Future;

use parking_lot::Mutex;
use std::time::Duration;

use berth_apiserver::rest::ApiServer;
use berth_apiserver::store::Store;
use berth_kube::Cluster;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Namespace, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Names the kubeconfig of a real cluster.
const REAL: &str = "KUBECONFIG_REAL";
/// How long anything may take before the scenario counts as stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A kind of object.
pub(crate) trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// An API server and a namespace of the scenario's own. A real server is left as it was found.
pub(crate) struct TestCluster {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    _directory: tempfile::TempDir,
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if is_real() {
            let clear = clearing::clear(&self.client, &self.namespace);
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(clear));
        }
    }
}

impl TestCluster {
    /// A place whose namespace begins with `name`, and differs from that of every other scenario and every other run.
    pub(crate) async fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let client = client(directory.path()).await;
        let run = jiff::Timestamp::now().as_microsecond();
        let place = Self { client, namespace: format!("{name}-{run:x}"), _directory: directory };
        let namespace = serde_json::json!({ "metadata": { "name": place.namespace } });
        place.create_as::<Namespace>(&Api::all(place.client.clone()), namespace).await;
        place.create_accounts().await;
        place
    }

    /// Pods are refused without the account that a controller of its own makes in every namespace.
    async fn create_accounts(&self) {
        for namespace in [self.namespace.as_str(), "default"] {
            let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
            let account = serde_json::from_value(serde_json::json!({ "metadata": { "name": "default" } }));
            match api.create(&PostParams::default(), &account.unwrap()).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("create the default account in {namespace}: {error}"),
            }
        }
    }

    /// The name of an object without a namespace, such that scenarios on one cluster do not meet.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.namespace)
    }

    pub(crate) fn all<K: Kind>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    pub(crate) fn here<K: Kind + Resource<Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates an object of a kind without namespaces.
    pub(crate) async fn create<K: Kind>(&self, object: Value) -> K {
        self.create_as(&self.all(), object).await
    }

    /// Creates an object in the namespace.
    pub(crate) async fn create_here<K: Kind + Resource<Scope = NamespaceResourceScope>>(
        &self,
        object: Value,
    ) -> K {
        self.create_as(&self.here(), object).await
    }

    async fn create_as<K: Kind>(&self, api: &Api<K>, object: Value) -> K {
        let object: K = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    /// Waits for an event about an object of the namespace or of none.
    pub(crate) async fn has_event(&self, about: &str, reason: &str) -> Event {
        let here = Some(self.namespace.as_str());
        until_any(&self.all::<Event>(), |event| {
            let object = &event.involved_object;
            object.name.as_deref() == Some(about)
                && event.reason.as_deref() == Some(reason)
                && (object.namespace.is_none() || object.namespace.as_deref() == here)
        })
        .await
    }
}

/// Whether the scenarios run on a cluster that outlives them.
fn is_real() -> bool {
    std::env::var_os(REAL).is_some()
}

async fn client(directory: &std::path::Path) -> Client {
    if let Ok(path) = std::env::var(REAL) {
        let file = kube::config::Kubeconfig::read_from(path).unwrap();
        let config = kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
            .await
            .unwrap();
        return Client::try_from(config).unwrap();
    }
    let (store, _) = Store::open(directory, berth_apiserver::store::Options::default()).unwrap();
    let api = ApiServer::new(store, berth_apiserver::rest::Options::default());
    api.bootstrap().await.unwrap();
    Client::new(api, "default")
}

/// Deletes an object; one that is not there is fine.
pub(crate) async fn delete<K: Kind>(api: &Api<K>, name: &str) {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => panic!("delete {name}: {error}"),
    }
}

/// Changes an object as a person would.
pub(crate) async fn patch<K: Kind>(api: &Api<K>, name: &str, change: Value) -> K {
    api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

/// Changes an object's status, as a node would.
pub(crate) async fn patch_status<K: Kind>(api: &Api<K>, name: &str, change: Value) -> K {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

/// Loops that run on a place until they are stopped or dropped.
pub(crate) struct Loops {
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
    cluster: Cluster,
}

impl Loops {
    pub(crate) fn new(client: &Client) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client.clone(), shutdown.clone());
        Self { shutdown, tasks: JoinSet::new(), cluster }
    }

    /// The PV controller and the protections: what every scenario of volumes needs.
    pub(crate) fn of_volumes(client: &Client) -> Self {
        Self::new(client)
            .with(berth_controllers::persistent_volumes::run)
            .with(berth_controllers::protection::run)
    }

    pub(crate) fn with<R>(mut self, run: impl FnOnce(Cluster) -> R) -> Self
    where
        R: Future<Output = ()> + Send + 'static,
    {
        self.tasks.spawn(run(self.cluster.clone()));
        self
    }

    pub(crate) async fn stop(mut self) {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// Waits until an object is as wanted; returns it.
pub(crate) async fn until<K: Kind>(api: &Api<K>, name: &str, wanted: impl Fn(&K) -> bool) -> K {
    let named = |object: &K| object.meta().name.as_deref() == Some(name);
    watch(api, &format!("metadata.name={name}"), name, |object| named(object) && wanted(object)).await
}

/// Waits until some object is as wanted; returns it.
pub(crate) async fn until_any<K: Kind>(api: &Api<K>, wanted: impl Fn(&K) -> bool) -> K {
    watch(api, "", "any", wanted).await
}

/// Waits until an object is gone.
pub(crate) async fn until_gone<K: Kind>(api: &Api<K>, name: &str) {
    let listed = async {
        loop {
            let list =
                api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await.unwrap();
            if list.items.is_empty() {
                return;
            }
            let version = list.metadata.resource_version.unwrap_or_default();
            let parameters = WatchParams::default().fields(&format!("metadata.name={name}"));
            let events = api.watch(&parameters, &version).await.unwrap();
            let mut events = std::pin::pin!(events);
            while let Some(event) = futures_util::StreamExt::next(&mut events).await {
                if matches!(event, Ok(WatchEvent::Deleted(_))) {
                    return;
                }
            }
        }
    };
    let gone = tokio::time::timeout(PATIENCE, listed).await;
    assert!(gone.is_ok(), "{} {name} is still there: {:#?}", K::kind(&()), api.get(name).await);
}

/// Waits until as many objects as `count` are as wanted, all at the same time or one after the other; returns them.
pub(crate) async fn until_all<K: Kind>(api: &Api<K>, count: usize, wanted: impl Fn(&K) -> bool) -> Vec<K> {
    let found: Mutex<HashMap<String, K>> = Mutex::default();
    let take = |object: &K| {
        let mut found = found.lock();
        if wanted(object) {
            found.insert(object.meta().name.clone().unwrap_or_default(), object.clone());
        }
        found.len() >= count
    };
    watch(api, "", "each", take).await;
    found.into_inner().into_values().collect()
}

async fn watch<K: Kind>(api: &Api<K>, fields: &str, name: &str, wanted: impl Fn(&K) -> bool) -> K {
    let mut latest: Option<K> = None;
    let found = async {
        loop {
            let list = api.list(&ListParams::default().fields(fields)).await.unwrap();
            for object in list.items {
                if wanted(&object) {
                    return object;
                }
                latest = Some(object);
            }
            let version = list.metadata.resource_version.unwrap_or_default();
            let events = api.watch(&WatchParams::default().fields(fields), &version).await.unwrap();
            let mut events = std::pin::pin!(events);
            while let Some(Ok(event)) = futures_util::StreamExt::next(&mut events).await {
                if let WatchEvent::Added(object) | WatchEvent::Modified(object) = event {
                    if wanted(&object) {
                        return object;
                    }
                    latest = Some(object);
                }
            }
        }
    };
    let Ok(found) = tokio::time::timeout(PATIENCE, found).await else {
        panic!("{} {name} did not become as wanted; last: {latest:#?}", K::kind(&()))
    };
    found
}
