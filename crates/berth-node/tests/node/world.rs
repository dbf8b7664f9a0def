//! A node and its API server, of which nothing is left after the test, also when it fails.

use std::path::{Path, PathBuf};
use std::time::Duration;

use berth_kube::Cluster;
use berth_node::node::{Node, Options};
use berth_runtime::{ExecCall, LogOptions};
use berth_runtime::{Found, find};
use berth_testkit::{EmbeddedServer, Kind, PATIENCE, until, until_any, until_gone};
use futures_util::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio_util::sync::CancellationToken;

pub(crate) struct World {
    pub(crate) client: Client,
    server: EmbeddedServer,
    node: Option<(Node, CancellationToken)>,
}

impl World {
    pub(crate) async fn new() -> Self {
        let server = EmbeddedServer::start().await;
        let mut world = Self { client: server.client(), server, node: None };
        world.start().await;
        world
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.server.directory().join("node")
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node.as_ref().unwrap().0
    }

    pub(crate) async fn start(&mut self) {
        let shutdown = CancellationToken::new();
        let tests = std::env::current_exe().unwrap();
        let options = Options {
            cluster: Cluster::new(self.client.clone(), shutdown.clone()),
            name: "n".to_owned(),
            directory: self.path(),
            runtime: Default::default(),
            program: tests.parent().unwrap().parent().unwrap().join("examples/launcher"),
            labels: Default::default(),
            lease_duration: None,
            address: Some([127, 0, 0, 1].into()),
            environment: vec![("KUBERNETES_SERVICE_HOST".to_owned(), "127.0.0.1".to_owned())],
            hidden: Vec::new(),
            stand_ins: Vec::new(),
            volume_plugins: None,
            csi_timeout: None,
            attach_timeout: Some(Duration::from_millis(500)),
            volume_plugin_timeouts: berth_flex::Timeouts::default(),
            pod_pids_limit: Some(1000),
            network: berth_node::PodNetwork::default(),
            nfs: None,
        };
        self.node = Some((Node::start(options).await.unwrap(), shutdown));
    }

    /// Ends the node without letting it clean up anything.
    pub(crate) async fn kill(&mut self) {
        let (mut node, shutdown) = self.node.take().unwrap();
        shutdown.cancel();
        node.ended().await;
    }

    pub(crate) fn here<K: Kind + Resource<Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) async fn create<K: Kind>(&self, api: &Api<K>, object: Value) -> K {
        let object: K = serde_json::from_value(object).unwrap();
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    pub(crate) async fn pod(&self, name: &str, spec: Value) -> Pod {
        let mut spec = spec;
        spec["nodeName"] = "n".into();
        spec["automountServiceAccountToken"] = false.into();
        self.create(&self.here::<Pod>(), json!({ "metadata": { "name": name }, "spec": spec })).await
    }

    pub(crate) async fn until_pod(&self, name: &str, wanted: impl Fn(&Pod) -> bool) -> Pod {
        until(&self.here(), name, wanted).await
    }

    pub(crate) async fn until_phase(&self, name: &str, phase: &str) -> Pod {
        self.until_pod(name, |pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some(phase)).await
    }

    /// Writes into the status of a pod that the node first saw it years ago.
    pub(crate) async fn begin_long_ago(&self, name: &str) {
        let patch = Patch::Merge(json!({ "status": { "startTime": "2020-01-01T00:00:00Z" } }));
        self.here::<Pod>().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Deletes a pod and waits until it is gone.
    pub(crate) async fn delete(&self, name: &str) {
        let api = self.here::<Pod>();
        let _ = api.delete(name, &DeleteParams::default()).await.unwrap();
        until_gone(&api, name).await;
    }

    pub(crate) async fn has_event(&self, about: &str, reason: &str, part: &str) {
        let wanted = |event: &Event| {
            event.involved_object.name.as_deref() == Some(about)
                && event.reason.as_deref() == Some(reason)
                && event.message.as_deref().is_some_and(|message| message.contains(part))
        };
        until_any(&self.here::<Event>(), wanted).await;
    }

    pub(crate) async fn log(&self, pod: &Pod, container: &str, previous: bool) -> String {
        let stream = self.node().logs(pod, container, previous, LogOptions::default()).await.unwrap();
        let pieces: Vec<_> = stream.collect().await;
        pieces.into_iter().map(|piece| String::from_utf8(piece.unwrap().to_vec()).unwrap()).collect()
    }

    /// A log, once this is in it: what a container has written gets there a moment later.
    pub(crate) async fn until_log(&self, pod: &Pod, container: &str, part: &str) -> String {
        let mut log = String::new();
        let wait = async {
            while !log.contains(part) {
                tokio::time::sleep(Duration::from_millis(2)).await;
                log = self.log(pod, container, false).await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, wait).await;
        assert!(in_time.is_ok(), "{part:?} is not in the log: {log}");
        log
    }

    /// What a command in a container prints.
    pub(crate) async fn exec(&self, pod: &Pod, container: &str, script: &str) -> String {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        let call = ExecCall { command, tty: false, stdin: false, size: None };
        let mut exec = self.node().exec(pod, container, call).await.unwrap();
        let mut printed = String::new();
        exec.stdout.take().unwrap().read_to_string(&mut printed).await.unwrap();
        exec.wait().await.unwrap();
        printed
    }

    /// Waits until nothing of any pod is left on this machine.
    pub(crate) async fn until_clean(&self) {
        let left = || {
            let directories = ["pods", "logs", "containers", "plugins/kubernetes.io/csi/local.test"];
            let entries = directories.map(|name| self.path().join(name)).into_iter();
            let entries = entries.flat_map(|path| std::fs::read_dir(path).into_iter().flatten().flatten());
            let mut left: Vec<String> = entries.map(|entry| entry.path().display().to_string()).collect();
            left.extend(self.mounts());
            left.extend(self.groups());
            left
        };
        let wait = async {
            while !left().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("left over: {:#?}", left());
        }
    }

    /// The control groups of pods.
    pub(crate) fn groups(&self) -> Vec<String> {
        let groups = berth_runtime::groups_of(&self.path().join("containers"));
        let groups = groups.into_iter().map(|group| group.display().to_string());
        groups.filter(|group| group.contains("/pod")).collect()
    }

    /// The mounts below the node's directory.
    pub(crate) fn mounts(&self) -> Vec<String> {
        let mounts = berth_host::mount::mounts().unwrap().into_iter().map(|mount| mount.target);
        mounts
            .filter(|target| target.starts_with(self.path()))
            .map(|target| target.display().to_string())
            .collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some((_, shutdown)) = &self.node {
            shutdown.cancel();
        }
        for entry in std::fs::read_dir(self.path().join("containers")).into_iter().flatten().flatten() {
            while let Ok(Found::Running(shim)) = find(&entry.path()) {
                let _ = shim.kill();
                shim.reap();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        berth_runtime::remove_groups(&self.path().join("containers"));
        for link in std::fs::read_dir("/run/berth/user-namespaces").into_iter().flatten().flatten() {
            if std::fs::read_link(link.path()).is_ok_and(|pod| pod.starts_with(self.path())) {
                let _ = std::fs::remove_file(link.path());
            }
        }
        for target in self.mounts().iter().rev() {
            let _ = berth_host::mount::unmount_lazily(Path::new(target));
        }
    }
}

pub(crate) fn container<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    all.into_iter().find(|container| container.name == name)
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
