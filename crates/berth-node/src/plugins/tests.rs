//! A node with an API server of its own for the tests of its plugins, and the tests of what they share.

use std::path::{Path, PathBuf};

use berth_apiserver::auth::Credentials;
use berth_apiserver::rest::Options;
use berth_host::mount;
use berth_testkit::EmbeddedServer;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Volume};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::plugin::{Certainty, Placed, Ready};

pub(super) const NODE: &str = "here";
pub(super) const UID: &str = "6c5b6ffb-6a4a-4b4c-9f0c-000000000001";

/// A node: its directory, its cluster, its plugins. Leaves no mount behind.
pub(super) struct Bench {
    server: EmbeddedServer,
    pub(super) layout: Layout,
    pub(super) cluster: Cluster,
    pub(super) plugins: Vec<Arc<dyn Plugin>>,
    pub(super) refreshed: mpsc::UnboundedReceiver<String>,
    _ends: tokio_util::sync::DropGuard,
}

impl Drop for Bench {
    fn drop(&mut self) {
        for mount in mount::mounts().unwrap_or_default().iter().rev() {
            if mount.target.starts_with(self.server.directory()) {
                let _ = mount::unmount_lazily(&mount.target);
            }
        }
    }
}

impl Bench {
    pub(super) async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let credentials = Credentials::ensure(&directory.path().join("pki"), jiff::Timestamp::now()).unwrap();
        let options = Options { credentials: Some(credentials.into()), ..Options::default() };
        let server = EmbeddedServer::open(directory, options).await;
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(server.client(), shutdown.clone());
        let (sender, refreshed) = mpsc::unbounded_channel();
        let refresh: Refresh = Arc::new(move |uid: &str| {
            let _ = sender.send(uid.to_owned());
        });
        let layout = Layout::new(server.directory().join("kubelet"));
        let recorder = Recorder::new(&cluster, "kubelet", NODE);
        let plugins = plugins(&layout, &cluster, NODE, &Tokens::new(&cluster), &recorder, None, refresh);
        let bench = Self { server, layout, cluster, plugins, refreshed, _ends: shutdown.drop_guard() };
        bench.create::<Namespace>(json!({ "metadata": { "name": "ns" } })).await;
        let status = json!({ "allocatable": { "cpu": "4", "memory": "2Gi", "ephemeral-storage": "10Gi" },
            "addresses": [{ "type": "Hostname", "address": "here" }, { "type": "InternalIP", "address": "192.0.2.7" }] });
        let node = bench.create::<Node>(json!({ "metadata": { "name": NODE } })).await;
        let status = serde_json::from_value(status).unwrap();
        bench.cluster.update_status(node.as_ref(), |node| node.status = Some(status)).await.unwrap();
        bench
    }

    pub(super) async fn create<K: berth_kube::Kind>(&self, object: Value) -> Arc<K> {
        self.cluster.create(&object_of::<K>(object)).await.unwrap()
    }

    pub(super) fn plugin(&self, volume: &PodVolume) -> &Arc<dyn Plugin> {
        let mut serving = self.plugins.iter().filter(|plugin| plugin.serves(&volume.source));
        let plugin = serving.next().expect("a plugin serves the volume");
        assert!(serving.next().is_none(), "only one does");
        plugin
    }

    pub(super) async fn set_up(&self, volume: &PodVolume) -> PathBuf {
        let Ready { path } = self.plugin(volume).set_up(volume).await.unwrap();
        path
    }

    pub(super) async fn refused(&self, volume: &PodVolume) -> String {
        let failed = self.plugin(volume).set_up(volume).await.unwrap_err();
        assert_eq!(failed.certainty, Certainty::Unchanged, "{failed}");
        failed.message
    }

    pub(super) async fn tear_down(&self, volume: &PodVolume) {
        self.plugin(volume).tear_down(&self.placed(volume)).await.unwrap();
    }

    pub(super) fn placed(&self, volume: &PodVolume) -> Placed {
        Placed {
            plugin: self.plugin(volume).name().to_owned(),
            pod_uid: volume.pod_uid().to_owned(),
            spec_name: volume.spec_name().to_owned(),
            block: false,
        }
    }

    /// Nothing of the pod's volumes is left but empty directories.
    pub(super) fn assert_clean(&self) {
        let mut directories = vec![self.layout.pods()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(&directory).into_iter().flatten() {
                let entry = entry.unwrap();
                assert!(entry.file_type().unwrap().is_dir(), "{} is left", entry.path().display());
                assert_ne!(entry.file_name(), *"vol", "{} is left", entry.path().display());
                directories.push(entry.path());
            }
        }
        assert_eq!(self.mounted(), Vec::<PathBuf>::new());
    }

    pub(super) fn mounted(&self) -> Vec<PathBuf> {
        let all = mount::mounts().unwrap().into_iter().map(|mount| mount.target);
        all.filter(|target| target.starts_with(self.server.directory())).collect()
    }
}

pub(super) fn object_of<K: serde::de::DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

/// A pod on the node, its spec completed.
#[expect(clippy::needless_pass_by_value, reason = "callers write the value in place")]
pub(super) fn pod(spec: Value) -> Pod {
    let mut pod = json!({ "metadata": { "name": "pod", "namespace": "ns", "uid": UID },
        "spec": { "nodeName": NODE, "serviceAccountName": "default", "containers": [{ "name": "main" }] } });
    for (field, value) in spec.as_object().unwrap() {
        pod["spec"][field] = value.clone();
    }
    object_of(pod)
}

/// The volume `vol` of a pod.
pub(super) fn volume_of(pod: Pod, mut source: Value) -> PodVolume {
    source["name"] = "vol".into();
    let source = Source::Inline(Arc::new(object_of::<Volume>(source)));
    PodVolume::new(Arc::new(pod), "vol", source, false, false)
}

pub(super) fn volume(source: Value) -> PodVolume {
    volume_of(pod(json!({})), source)
}

pub(super) fn persistent(mut spec: Value) -> PodVolume {
    spec["accessModes"] = json!(["ReadWriteOnce"]);
    spec["capacity"] = json!({ "storage": "1Gi" });
    spec["persistentVolumeReclaimPolicy"] = "Retain".into();
    let volume = object_of::<PersistentVolume>(json!({ "metadata": { "name": "pv" }, "spec": spec }));
    let claim = Arc::new(PersistentVolumeClaim::default());
    let source = Source::Persistent { volume: Arc::new(volume), claim };
    PodVolume::new(self::volume(json!({})).pod, "vol", source, false, false)
}

pub(super) fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_kind_that_is_not_served_is_named() {
    for (volume, expected) in [
        (volume(json!({ "iscsi": { "targetPortal": "a", "iqn": "b", "lun": 0 } })), "iscsi"),
        (volume(json!({ "nfs": { "server": "a", "path": "/b" } })), "nfs"),
        (persistent(json!({ "local": { "path": "/a" } })), "local"),
        (
            persistent(
                json!({ "nfs": { "server": "a", "path": "/b" }, "volumeMode": "Filesystem", "storageClassName": "" }),
            ),
            "nfs",
        ),
    ] {
        assert_eq!(unsupported(&volume), format!("volume vol: {expected} is not supported"));
    }
    assert_eq!(unsupported(&volume(json!({}))), "volume vol does not say what it is made of");
}

#[test]
fn tokens_belong_to_the_one_user_that_all_containers_run_as() {
    let container = |user: Option<i64>| match user {
        Some(user) => json!({ "name": "c", "securityContext": { "runAsUser": user } }),
        None => json!({ "name": "c" }),
    };
    for (default, containers, init, expected) in [
        (None, vec![None], vec![], None),
        (Some(1000), vec![None, None], vec![None], Some(1000)),
        (None, vec![Some(5), Some(5)], vec![Some(5)], Some(5)),
        (None, vec![Some(5), None], vec![], None),
        (Some(7), vec![Some(5), None], vec![], None),
        (Some(7), vec![Some(7), None], vec![Some(8)], None),
        (Some(0), vec![None], vec![], Some(0)),
    ] {
        let list = |users: &[Option<i64>]| users.iter().map(|user| container(*user)).collect::<Vec<_>>();
        let spec = json!({ "containers": list(&containers), "initContainers": list(&init),
            "securityContext": { "runAsUser": default } });
        assert_eq!(fs_user(&pod(spec)), expected, "{default:?} {containers:?} {init:?}");
    }
    let grouped = pod(json!({ "securityContext": { "fsGroup": 4321 } }));
    assert_eq!((fs_group(&grouped), fs_group(&pod(json!({})))), (Some(4321), None));
}
