//! Volumes made of objects, on a node with a real API server: what is there, what changes, what goes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use berth_host::mount;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Value, json};

use super::super::tests::{Bench, NODE, UID, mode, object_of, pod, volume, volume_of};
use super::*;

/// Longer than anything here takes, on however busy a machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

impl Bench {
    /// The pod that should be refreshed next.
    async fn next_refresh(&mut self) -> String {
        let refreshed = tokio::time::timeout(PATIENCE, self.refreshed.recv()).await;
        refreshed.expect("a refresh is asked for").unwrap()
    }

    /// Waits until the node knows a pod of its own: only its watch tells it.
    async fn knows(&self, pod: &Pod) {
        let (pods, key) = (self.cluster.cache_where::<Pod>(&format!("spec.nodeName={NODE}")), Key::of(pod));
        let known = async {
            while !pods.contains(&key) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, known).await.expect("the pod is known");
    }

    async fn config_map(&self, data: Value) -> Arc<ConfigMap> {
        self.create(json!({ "metadata": { "name": "c", "namespace": "ns" }, "data": data })).await
    }

    async fn change(&self, object: &Arc<ConfigMap>, key: &str, value: &str) -> Arc<ConfigMap> {
        let changed = self.cluster.update(object.as_ref(), |object| {
            object.data.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        });
        changed.await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_is_set_up_where_it_belongs_and_taken_away_whole() {
    let bench = Bench::new().await;
    bench.config_map(json!({ "key": "config" })).await;
    bench
        .create::<Secret>(
            json!({ "metadata": { "name": "s", "namespace": "ns" }, "data": { "key": "c2VjcmV0" } }),
        )
        .await;
    let downward = json!({ "items": [{ "path": "key", "fieldRef": { "fieldPath": "metadata.name" } }] });
    for (source, plugin, in_memory, expected) in [
        (json!({ "configMap": { "name": "c" } }), "kubernetes.io/configmap", false, "config"),
        (json!({ "secret": { "secretName": "s" } }), "kubernetes.io/secret", true, "secret"),
        (json!({ "downwardAPI": downward }), "kubernetes.io/downward-api", true, "pod"),
        (
            json!({ "projected": { "sources": [{ "secret": { "name": "s" } }] } }),
            "kubernetes.io/projected",
            true,
            "secret",
        ),
    ] {
        let volume = volume(source);
        assert_eq!(bench.plugin(&volume).name(), plugin);
        let path = bench.set_up(&volume).await;
        assert_eq!(path, bench.layout.pod_volume(UID, plugin, "vol"));
        assert_eq!(text(&path.join("key")), expected);
        assert_eq!(mount::is_mount_point(&path).unwrap(), in_memory, "{plugin}");
        let version = fs::read_link(path.join("..data")).unwrap();
        assert_eq!(bench.set_up(&volume).await, path);
        assert_eq!(
            fs::read_link(path.join("..data")).unwrap(),
            version,
            "nothing changed, nothing is written"
        );
        assert!(bench.mounted().len() <= 1, "nothing is mounted twice");
        bench.tear_down(&volume).await;
        bench.assert_clean();
        bench.tear_down(&volume).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_leaves_nothing_behind_and_is_asked_for_again_when_it_comes() {
    let mut bench = Bench::new().await;
    bench
        .create::<Pod>(json!({ "metadata": { "name": "pod", "namespace": "ns" },
        "spec": { "nodeName": NODE, "containers": [{ "name": "main", "image": "none" }] } }))
        .await;
    let created = bench.cluster.fetch::<Pod>(&Key::new("ns", "pod")).await.unwrap().unwrap();
    let uid = created.metadata.uid.clone().unwrap();
    bench.knows(&created).await;
    let volume = volume_of(created.as_ref().clone(), json!({ "configMap": { "name": "c" } }));
    assert_eq!(bench.refused(&volume).await, "configmap \"c\" not found");
    bench.assert_clean();
    bench.config_map(json!({ "a": "1" })).await;
    assert_eq!(bench.next_refresh().await, uid);
    assert_eq!(text(&bench.set_up(&volume).await.join("a")), "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_an_object_reaches_the_running_pod() {
    let mut bench = Bench::new().await;
    let object = bench.config_map(json!({ "a": "1", "b": "1" })).await;
    let volume = volume(json!({ "projected": { "sources": [{ "configMap": { "name": "c" } }] } }));
    let path = bench.set_up(&volume).await;
    let object = bench.change(&object, "a", "2").await;
    assert_eq!(bench.next_refresh().await, UID);
    bench.set_up(&volume).await;
    assert_eq!((text(&path.join("a")), text(&path.join("b"))), ("2".to_owned(), "1".to_owned()));

    // Once torn down nobody is changes any more: the next one changes is the other pod.
    bench.tear_down(&volume).await;
    let mut other = pod(json!({}));
    other.metadata.uid = Some("other".to_owned());
    let other = volume_of(other, json!({ "configMap": { "name": "c" } }));
    bench.set_up(&other).await;
    while bench.refreshed.try_recv().is_ok() {}
    bench.change(&object, "a", "3").await;
    assert_eq!(bench.next_refresh().await, "other");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_somebody_elses_secret_reaches_the_running_pod() {
    let mut bench = Bench::new().await;
    let secret = json!({ "metadata": { "name": "s", "namespace": "ns" }, "data": { "key": "MQ==" } });
    bench.create::<Secret>(secret).await;
    let volume = volume(json!({ "secret": { "secretName": "s" } }));
    let path = bench.set_up(&volume).await;
    while bench.refreshed.try_recv().is_ok() {}
    // Past the cache, as another process writes: only the watch tells.
    let secrets: kube::Api<Secret> = kube::Api::namespaced(bench.cluster.client().clone(), "ns");
    let change = kube::api::Patch::Merge(json!({ "data": { "key": "Mg==" } }));
    secrets.patch("s", &kube::api::PatchParams::default(), &change).await.unwrap();
    loop {
        assert_eq!(bench.next_refresh().await, UID);
        bench.set_up(&volume).await;
        if text(&path.join("key")) == "2" {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_pods_labels_reaches_it() {
    let mut bench = Bench::new().await;
    let created = bench
        .create::<Pod>(json!({ "metadata": { "name": "pod", "namespace": "ns", "labels": { "a": "1" } },
            "spec": { "nodeName": NODE, "containers": [{ "name": "main", "image": "none" }] } }))
        .await;
    bench.knows(&created).await;
    let items = json!([{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }]);
    let volume = volume_of(created.as_ref().clone(), json!({ "downwardAPI": { "items": items } }));
    let path = bench.set_up(&volume).await;
    assert_eq!(text(&path.join("labels")), "a=\"1\"");
    let label = |pod: &mut Pod| {
        pod.metadata.labels.get_or_insert_default().insert("b".to_owned(), "2".to_owned());
    };
    bench.cluster.update(created.as_ref(), label).await.unwrap();
    assert_eq!(bench.next_refresh().await, created.metadata.uid.clone().unwrap());
    // The caller still has the old pod.
    bench.set_up(&volume).await;
    assert_eq!(text(&path.join("labels")), "a=\"1\"\nb=\"2\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_the_pods_kept_and_its_groups_to_read() {
    let bench = Bench::new().await;
    let created = bench
        .create::<Pod>(json!({ "metadata": { "name": "pod", "namespace": "ns" },
            "spec": { "nodeName": NODE, "serviceAccountName": "default", "securityContext": { "fsGroup": 4321, "runAsUser": 1234 },
                "containers": [{ "name": "main", "image": "none" }] } }))
        .await;
    let sources = json!([{ "serviceAccountToken": { "path": "token", "audience": "vault", "expirationSeconds": 600 } }]);
    let volume = volume_of(created.as_ref().clone(), json!({ "projected": { "sources": sources } }));
    let path = bench.set_up(&volume).await;
    let token = text(&path.join("token"));
    assert_eq!(token.split('.').count(), 3, "it is a token");
    let stat = fs::metadata(path.join("token")).unwrap();
    assert_eq!((stat.uid(), stat.gid(), stat.mode() & 0o777), (1234, 4321, 0o640));
    bench.set_up(&volume).await;
    assert_eq!(text(&path.join("token")), token, "it is not asked for twice");
    bench.tear_down(&volume).await;
    bench.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_account_that_is_not_there_is_named() {
    let bench = Bench::new().await;
    let source = json!({ "projected": { "sources": [{ "serviceAccountToken": { "path": "token" } }] } });
    let refused = bench.refused(&volume_of(pod(json!({ "serviceAccountName": "nobody" })), source)).await;
    assert!(refused.starts_with("failed to fetch token: service account ns/nobody: "), "{refused}");
    assert!(refused.contains("not found"), "{refused}");
    bench.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_after_a_reboot_or_a_crash_is_made_again() {
    let bench = Bench::new().await;
    bench
        .create::<Secret>(
            json!({ "metadata": { "name": "s", "namespace": "ns" }, "data": { "key": "MQ==" } }),
        )
        .await;
    let volume = volume(json!({ "secret": { "secretName": "s" } }));
    let path = bench.set_up(&volume).await;
    mount::unmount(&path).unwrap();
    bench.set_up(&volume).await;
    assert!(mount::is_mount_point(&path).unwrap());
    assert_eq!(text(&path.join("key")), "1");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn places_for_volumes_mounted_into_this_one_are_made() {
    let bench = Bench::new().await;
    bench.config_map(json!({ "a": "1", "file": "2" })).await;
    let mounts = |list: &[(&str, &str)]| {
        list.iter().map(|(name, path)| json!({ "name": name, "mountPath": path })).collect::<Vec<_>>()
    };
    let spec = json!({ "containers": [{ "name": "main", "volumeMounts":
        mounts(&[("vol", "/dir"), ("x", "/dir/x"), ("y", "/dir/x/y"), ("z", "/dir//./deep/z/"), ("w", "/dirw"), ("v", "/dir/file")]) }] });
    let volume = volume_of(pod(spec), json!({ "configMap": { "name": "c" } }));
    assert_eq!(nested_mount_points(&volume.pod, "vol"), ["deep/z", "file", "x"]);
    let path = bench.set_up(&volume).await;
    assert!(path.join("x").is_dir() && path.join("deep/z").is_dir() && !path.join("x/y").exists());
    assert_eq!(mode(&path.join("x")), 0o755);
    bench.set_up(&volume).await;
    assert_eq!(text(&path.join("a")), "1");
    bench.tear_down(&volume).await;
    bench.assert_clean();

    let hostile = json!({ "containers": [{ "name": "main", "volumeMounts":
        mounts(&[("vol", "/dir"), ("x", "/dir/../../escape"), ("y", "/dir/a/../../../../escape")]) }] });
    assert_eq!(nested_mount_points(&pod(hostile), "vol"), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_due_is_asked_for_and_one_that_was_forgotten_is_not() {
    let (sender, mut refreshed) = tokio::sync::mpsc::unbounded_channel();
    let interest = Interest::new(Arc::new(move |uid: &str| sender.send(uid.to_owned()).unwrap()));
    let in_seconds = |seconds: i64| Some(jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds));
    for (uid, seconds) in [("late", 1000), ("soon", 500), ("gone", 100), ("moved", 200)] {
        interest.register(uid, "vol", "ns", &References::default());
        interest.refresh_at(uid, "vol", in_seconds(seconds));
    }
    interest.forget("gone", "vol");
    interest.refresh_at("moved", "vol", in_seconds(2000));
    interest.refresh_at("unknown", "vol", in_seconds(1));
    for expected in ["soon", "late", "moved"] {
        assert_eq!(refreshed.recv().await.as_deref(), Some(expected));
    }
}

#[test]
fn interest_follows_what_volumes_refer_to() {
    let changes = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let heard = changes.clone();
    let interest = Interest::new(Arc::new(move |uid: &str| heard.lock().push(uid.to_owned())));
    let references = |names: &[&str]| References {
        config_maps: names.iter().map(|name| (*name).to_owned()).collect(),
        ..References::default()
    };
    let subject = |name: &str| Subject::ConfigMap { namespace: "ns".to_owned(), name: name.to_owned() };
    let changes_of = |name: &str| {
        interest.changed(&subject(name));
        let mut changes = std::mem::take(&mut *changes.lock());
        changes.sort();
        changes
    };
    interest.register("1", "v", "ns", &references(&["a", "b"]));
    interest.register("1", "w", "ns", &references(&["b"]));
    interest.register("2", "v", "ns", &references(&["b"]));
    interest.register("3", "v", "elsewhere", &references(&["b"]));
    assert_eq!(
        (changes_of("a"), changes_of("b"), changes_of("c")),
        (vec!["1".to_owned()], vec!["1".into(), "2".into()], vec![])
    );
    interest.register("1", "v", "ns", &references(&["c"]));
    assert_eq!((changes_of("a").len(), changes_of("b").len(), changes_of("c").len()), (0, 2, 1));
    interest.forget("1", "w");
    assert_eq!(changes_of("b"), ["2"]);
    interest.forget_pod("2");
    interest.forget_pod("2");
    interest.forget("2", "v");
    assert_eq!(changes_of("b"), [""; 0]);
}

#[test]
fn the_pods_api_access_as_admission_adds_it_needs_nothing_special() {
    let access = json!({ "projected": { "defaultMode": 420, "sources": [
        { "serviceAccountToken": { "expirationSeconds": 3607, "path": "token" } },
        { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
        { "downwardAPI": { "items": [{ "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" } }] } }] } });
    let source =
        as_projected(&object_of(json!({ "name": "kube-api-access", "projected": access["projected"] })))
            .unwrap();
    let references = References::of_volume(&source);
    assert_eq!(references.config_maps.iter().collect::<Vec<_>>(), ["kube-root-ca.crt"]);
    assert!(references.pod && !references.node && tokens_of(&source).count() == 1);
}
