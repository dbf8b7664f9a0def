//! A cluster to run control loops on: objects to create and to wait for, and the loops themselves.

mod clearing;

use std::collections::HashMap;
use std::fmt::Debug;
use std::future::Future;

use berth_apiserver::collect;
use berth_apiserver::rest::ApiServer;
use berth_kube::Cluster;
use futures_util::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Namespace, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, Resource};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{EmbeddedServer, PATIENCE};

/// Names the kubeconfig of a real cluster.
const REAL: &str = "KUBECONFIG_REAL";

/// A kind of object that tests create, change and wait for.
pub trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// An API server and a namespace of the test's own. A real server is left as it was found.
pub struct TestCluster {
    /// A client of the API server.
    pub client: Client,
    /// The namespace of the test.
    pub namespace: String,
    server: Option<EmbeddedServer>,
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if self.server.is_none() {
            let clear = clearing::clear(&self.client, &self.namespace);
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(clear));
        }
    }
}

impl TestCluster {
    /// An embedded API server. The namespace is `default`.
    pub async fn embedded() -> Self {
        let server = EmbeddedServer::start().await;
        Self { client: server.client(), namespace: "default".to_owned(), server: Some(server) }
    }

    /// The real cluster that KUBECONFIG_REAL names, or an embedded API server. The namespace begins with `name`, and differs
    /// from that of every other test and every other run.
    pub async fn real_or_embedded(name: &str) -> Self {
        let run = jiff::Timestamp::now().as_microsecond();
        let mut cluster = match std::env::var(REAL) {
            Ok(path) => Self { client: real_client(&path).await, namespace: String::new(), server: None },
            Err(_) => Self::embedded().await,
        };
        cluster.namespace = format!("{name}-{run:x}");
        cluster.create::<Namespace>(json!({ "metadata": { "name": cluster.namespace } })).await;
        cluster.create_accounts().await;
        cluster
    }

    /// Pods are refused without the account that a controller of its own makes in every namespace.
    async fn create_accounts(&self) {
        for namespace in [self.namespace.as_str(), "default"] {
            let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
            let account = serde_json::from_value(json!({ "metadata": { "name": "default" } }));
            match api.create(&PostParams::default(), &account.unwrap()).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("create the default account in {namespace}: {error}"),
            }
        }
    }

    /// Deletes what is owned by objects that are gone, until the answer is dropped. A real cluster has a controller for it.
    pub fn collect_garbage(&self) -> Option<DropGuard> {
        let server = self.server.as_ref()?;
        let shutdown = CancellationToken::new();
        tokio::spawn(collect::run(server.api.clone(), collect::Options::default(), shutdown.clone()));
        Some(shutdown.drop_guard())
    }

    /// The embedded API server itself.
    pub fn api_server(&self) -> &ApiServer {
        &self.server.as_ref().expect("the cluster is not a real one").api
    }

    /// The name of an object without a namespace, such that tests on one cluster do not meet.
    pub fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.namespace)
    }

    /// The objects of a kind, in all namespaces if it has them.
    pub fn all<K: Kind>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    /// The objects of a kind in the namespace of the test.
    pub fn namespaced<K: Kind + Resource<Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates an object of a kind without namespaces.
    pub async fn create<K: Kind>(&self, object: Value) -> K {
        create(&self.all(), object).await
    }

    /// Creates an object in the namespace of the test.
    pub async fn create_namespaced<K: Kind + Resource<Scope = NamespaceResourceScope>>(
        &self,
        object: Value,
    ) -> K {
        create(&self.namespaced(), object).await
    }

    /// All events, in the order in which they came.
    pub async fn events(&self) -> Vec<Event> {
        let mut events = self.all::<Event>().list(&ListParams::default()).await.unwrap().items;
        events.sort_by_key(|event| event.first_timestamp.as_ref().map(|time| time.0));
        events
    }

    /// All events for this reason about objects of a kind.
    pub async fn events_of(&self, kind: &str, reason: &str) -> Vec<Event> {
        let fields = format!("involvedObject.kind={kind},reason={reason}");
        self.all::<Event>().list(&ListParams::default().fields(&fields)).await.unwrap().items
    }

    /// Waits for an event about an object of the namespace or of none.
    pub async fn has_event(&self, about: &str, reason: &str) -> Event {
        let namespace = Some(self.namespace.as_str());
        until_any(&self.all::<Event>(), |event| {
            let object = &event.involved_object;
            object.name.as_deref() == Some(about)
                && event.reason.as_deref() == Some(reason)
                && (object.namespace.is_none() || object.namespace.as_deref() == namespace)
        })
        .await
    }

    /// Waits for an event with this reason whose message contains `text`.
    pub async fn event(&self, reason: &str, text: &str) -> Event {
        until_any(&self.all::<Event>(), |event| {
            event.reason.as_deref() == Some(reason)
                && event.message.as_deref().is_some_and(|message| message.contains(text))
        })
        .await
    }

    /// Waits until an object, `None` while it does not exist, is as `what` says. A failure shows the events besides.
    pub async fn wait<K: Kind>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        condition: impl Fn(Option<&K>) -> bool,
    ) -> Option<K> {
        let waited = wait(&api, name, condition).await;
        match waited {
            Ok(object) => object,
            Err(last) => {
                let events = self.events().await;
                let events: Vec<_> = events.iter().map(|event| (&event.reason, &event.message)).collect();
                panic!("{name} never became {what}: {last:#?}\nevents: {events:#?}")
            }
        }
    }
}

async fn real_client(kubeconfig: &str) -> Client {
    let file = kube::config::Kubeconfig::read_from(kubeconfig).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(file, &options).await.unwrap();
    Client::try_from(config).unwrap()
}

async fn create<K: Kind>(api: &Api<K>, object: Value) -> K {
    let object: K = serde_json::from_value(object).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap()
}

/// Deletes an object, unless there is none of this name.
pub async fn delete<K: Kind>(api: &Api<K>, name: &str) {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => panic!("delete {name}: {error}"),
    }
}

/// Changes an object by a merge patch.
pub async fn patch<K: Kind>(api: &Api<K>, name: &str, change: Value) -> K {
    api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

/// Changes the status of an object by a merge patch.
pub async fn patch_status<K: Kind>(api: &Api<K>, name: &str, change: Value) -> K {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
}

/// Changes a JSON value by a merge patch that removes nothing.
pub fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

/// Control loops that run on a cluster until they are stopped, or dropped, which is as if they were killed.
pub struct Loops {
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
    cluster: Cluster,
}

impl Loops {
    /// No loops yet, and the caches that they will share.
    pub fn new(client: &Client) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client.clone(), shutdown.clone());
        Self { shutdown, tasks: JoinSet::new(), cluster }
    }

    /// Starts one more loop.
    #[must_use]
    pub fn with<R>(mut self, run: impl FnOnce(Cluster) -> R) -> Self
    where
        R: Future<Output = ()> + Send + 'static,
    {
        self.tasks.spawn(run(self.cluster.clone()));
        self
    }

    /// Stops the loops and waits for the work under way.
    pub async fn stop(mut self) {
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

/// Waits until an object exists and meets a condition; returns it.
pub async fn until<K: Kind>(api: &Api<K>, name: &str, condition: impl Fn(&K) -> bool) -> K {
    match wait(api, name, |object| object.is_some_and(&condition)).await {
        Ok(object) => object.expect("the condition held for an object"),
        Err(last) => panic!("{} {name} does not meet the condition; last: {last:#?}", K::kind(&())),
    }
}

/// Waits until an object is gone.
pub async fn until_gone<K: Kind>(api: &Api<K>, name: &str) {
    if let Err(last) = wait(api, name, |object| object.is_none()).await {
        panic!("{} {name} is still there: {last:#?}", K::kind(&()));
    }
}

/// Waits until some object meets a condition; returns it.
pub async fn until_any<K: Kind>(api: &Api<K>, condition: impl Fn(&K) -> bool) -> K {
    match follow(api, "", |object| object.is_some_and(&condition)).await {
        Ok(object) => object.expect("the condition held for an object"),
        Err(last) => panic!("no {} meets the condition; last: {last:#?}", K::kind(&())),
    }
}

/// Waits until as many objects as `count` met a condition, all at the same time or one after the other; returns them.
pub async fn until_all<K: Kind>(api: &Api<K>, count: usize, condition: impl Fn(&K) -> bool) -> Vec<K> {
    let found: Mutex<HashMap<String, K>> = Mutex::default();
    until_any(api, |object| {
        let mut found = found.lock();
        if condition(object) {
            found.insert(object.meta().name.clone().unwrap_or_default(), object.clone());
        }
        found.len() >= count
    })
    .await;
    found.into_inner().into_values().collect()
}

async fn wait<K: Kind>(
    api: &Api<K>,
    name: &str,
    condition: impl Fn(Option<&K>) -> bool,
) -> Result<Option<K>, Option<K>> {
    follow(api, &format!("metadata.name={name}"), condition).await
}

/// Watches the objects that a field selector chooses until a condition holds for the state of one; `None` is what a list
/// without objects and a deletion are. `Err` has the last state, if the condition never holds.
async fn follow<K: Kind>(
    api: &Api<K>,
    fields: &str,
    condition: impl Fn(Option<&K>) -> bool,
) -> Result<Option<K>, Option<K>> {
    let mut last: Option<K> = None;
    let found = async {
        loop {
            let objects = api.list(&ListParams::default().fields(fields)).await.unwrap();
            if objects.items.is_empty() && condition(None) {
                return None;
            }
            for object in objects.items {
                if condition(Some(&object)) {
                    return Some(object);
                }
                last = Some(object);
            }
            let version = objects.metadata.resource_version.unwrap_or_default();
            let events = api.watch(&WatchParams::default().fields(fields), &version).await.unwrap();
            let mut events = std::pin::pin!(events);
            while let Some(Ok(event)) = events.next().await {
                match event {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        if condition(Some(&object)) {
                            return Some(object);
                        }
                        last = Some(object);
                    }
                    WatchEvent::Deleted(_) if condition(None) => return None,
                    // Another list says what is there now.
                    WatchEvent::Error(_) => break,
                    _ => {}
                }
            }
        }
    };
    // Boxed: a watch is large, and tests wait often.
    let found = tokio::time::timeout(PATIENCE, Box::pin(found)).await;
    found.map_err(|_elapsed| last)
}
