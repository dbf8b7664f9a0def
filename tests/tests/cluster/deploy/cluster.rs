//! An API server with Kubernetes' own loops for claims and volumes, for the manifests to be applied to.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::ensure;
use berth_e2e::program::Program;
use berth_e2e::up::kubectl;
use berth_e2e::{driver, machine};
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where an object is.
#[derive(Debug, Clone)]
pub(crate) struct At {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    /// Empty if it is in none.
    pub(crate) namespace: &'static str,
    pub(crate) name: String,
}

impl At {
    pub(crate) fn cluster(api_version: &'static str, kind: &'static str, name: &str) -> Self {
        Self { api_version, kind, namespace: "", name: name.to_owned() }
    }

    pub(crate) fn claim(name: &str) -> Self {
        Self { namespace: "default", ..Self::cluster("v1", "PersistentVolumeClaim", name) }
    }

    pub(crate) fn volume(name: &str) -> Self {
        Self::cluster("v1", "PersistentVolume", name)
    }

    pub(crate) fn snapshot(name: &str) -> Self {
        Self { namespace: "default", ..Self::cluster("snapshot.storage.k8s.io/v1", "VolumeSnapshot", name) }
    }

    fn resource(&self) -> ApiResource {
        let (group, version) = self.api_version.rsplit_once('/').unwrap_or(("", self.api_version));
        ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, self.kind))
    }
}

/// An API server, and a directory for everything.
pub(crate) struct Cluster {
    // Dropped in this order: programs first.
    _loops: DropGuard,
    server: Program,
    pub(crate) client: Client,
    dir: TempDir,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        // The path stays short: a socket's may have 107 bytes.
        let dir = tempfile::Builder::new().prefix("de-").rand_bytes(5).tempdir().unwrap();
        let data = dir.path().join("api").display().to_string();
        let args = ["apiserver", "--listen", "127.0.0.1:0", "--data-dir", &data];
        let mut server =
            Program::start(&driver::binary().unwrap(), &args, &[], dir.path().join("api.log")).unwrap();
        server.says("ready: kubectl").await.unwrap();
        let read = Kubeconfig::read_from(dir.path().join("api/kubeconfig")).unwrap();
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let shutdown = CancellationToken::new();
        let cluster = berth_kube::Cluster::new(client.clone(), shutdown.clone());
        tokio::spawn(berth_controllers::persistent_volumes::run(cluster.clone()));
        tokio::spawn(berth_controllers::protection::run(cluster));
        Self { _loops: shutdown.drop_guard(), server, client, dir }
    }

    /// Stops the server and waits for its end.
    pub(crate) async fn finish(self) {
        self.server.stop().await.unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The kubeconfig of somebody who may do everything.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.path("api/kubeconfig")
    }

    /// Applies objects as a person would; gives what kubectl printed.
    pub(crate) fn apply(&self, objects: &[Value], more: &[&str]) -> String {
        self.try_apply(objects, more).unwrap()
    }

    /// The same, if it is not refused.
    pub(crate) fn try_apply(&self, objects: &[Value], more: &[&str]) -> anyhow::Result<String> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let mut kubectl = machine::command(kubectl::program());
        kubectl.args(["apply", "-f", "-"]).args(more).env("KUBECONFIG", self.kubeconfig());
        kubectl.env("HOME", self.dir.path()).stdin(Stdio::piped());
        let mut child = kubectl.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().unwrap().write_all(list.as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn api(&self, at: &At) -> Api<DynamicObject> {
        if at.namespace.is_empty() {
            Api::all_with(self.client.clone(), &at.resource())
        } else {
            Api::namespaced_with(self.client.clone(), at.namespace, &at.resource())
        }
    }

    /// Creates an object there, with these fields.
    pub(crate) async fn create(&self, at: &At, mut fields: Value) -> Value {
        fields["apiVersion"] = json!(at.api_version);
        fields["kind"] = json!(at.kind);
        fields["metadata"]["name"] = json!(at.name);
        let object: DynamicObject = serde_json::from_value(fields).unwrap();
        let made = self.api(at).create(&PostParams::default(), &object).await.unwrap();
        serde_json::to_value(made).unwrap()
    }

    /// An object, if it is there.
    pub(crate) async fn find(&self, at: &At) -> Option<Value> {
        let found = self.api(at).get_opt(&at.name).await.unwrap();
        found.map(|object| serde_json::to_value(object).unwrap())
    }

    /// All objects of a kind there.
    pub(crate) async fn list(&self, at: &At) -> Vec<Value> {
        let found = self.api(at).list(&kube::api::ListParams::default()).await.unwrap();
        found.items.into_iter().map(|object| serde_json::to_value(object).unwrap()).collect()
    }

    /// Changes an object by a merge patch.
    pub(crate) async fn merge(&self, at: &At, change: Value) {
        self.api(at).patch(&at.name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
    }

    /// Changes an object's status.
    pub(crate) async fn merge_status(&self, at: &At, status: Value) {
        let change = Patch::Merge(json!({"status": status}));
        self.api(at).patch_status(&at.name, &PatchParams::default(), &change).await.unwrap();
    }

    /// Asks for an object's deletion.
    pub(crate) async fn ask_to_delete(&self, at: &At) {
        self.api(at).delete(&at.name, &DeleteParams::default()).await.unwrap();
    }

    /// Asks for an object's deletion, and waits until it is gone.
    pub(crate) async fn delete(&self, at: &At) {
        self.ask_to_delete(at).await;
        self.gone(at).await;
    }

    /// Waits until an object is gone.
    pub(crate) async fn gone(&self, at: &At) {
        let deadline = Instant::now() + PATIENCE;
        while let Some(left) = self.find(at).await {
            assert!(Instant::now() < deadline, "it is not gone: {left:#}");
            pause().await;
        }
    }

    /// Waits until an object is so.
    pub(crate) async fn until(&self, at: &At, what: &str, so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.find(at).await;
            if let Some(object) = found.clone().filter(&so) {
                return object;
            }
            if Instant::now() > deadline {
                let events = self.events(&at.name).await;
                panic!("{} {} never {what}: {found:#?}\nwith events {events:#?}", at.kind, at.name);
            }
            pause().await;
        }
    }

    /// Waits until the objects of a kind are so.
    pub(crate) async fn until_all(&self, at: &At, what: &str, so: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let all = self.list(at).await;
            if so(&all) {
                return all;
            }
            assert!(Instant::now() < deadline, "never {what}: {all:#?}");
            pause().await;
        }
    }

    /// What happened to an object: reason, how often, and message.
    pub(crate) async fn events(&self, name: &str) -> Vec<(String, i64, String)> {
        let at = At { namespace: "default", ..At::cluster("v1", "Event", "") };
        let all = self.list(&at).await;
        let of_it = all.iter().filter(|event| event["involvedObject"]["name"] == name);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        of_it
            .map(|event| {
                (text(&event["reason"]), event["count"].as_i64().unwrap_or(1), text(&event["message"]))
            })
            .collect()
    }
}

/// Pauses until the next observation.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// A kubeconfig of somebody who is known by the address that he uses.
pub(crate) fn write_kubeconfig(path: &Path, server: &str) {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "door",
        "clusters": [{"name": "door", "cluster": {"server": server}}],
        "contexts": [{"name": "door", "context": {"cluster": "door", "user": "door"}}],
        "users": [{"name": "door", "user": {}}],
    });
    std::fs::write(path, config.to_string()).unwrap();
}
