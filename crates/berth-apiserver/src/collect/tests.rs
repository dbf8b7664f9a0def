//! Tests of the collector over a whole API.

use serde_json::{Value, json};

use super::*;

struct Cluster {
    api: ApiServer,
    shutdown: CancellationToken,
    _dir: tempfile::TempDir,
}

impl Cluster {
    async fn start(options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(dir.path(), crate::store::Options::default()).unwrap();
        let api = ApiServer::new(store, crate::rest::Options::default());
        api.bootstrap().await.unwrap();
        let shutdown = CancellationToken::new();
        tokio::spawn(run(api.clone(), options, shutdown.clone()));
        Self { api, shutdown, _dir: dir }
    }

    async fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        use http_body_util::BodyExt;
        use tower::ServiceExt;
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(http_body_util::Full::new(bytes::Bytes::from(body.to_string())))
            .unwrap();
        let response = self.api.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        assert!(status.is_success(), "{method} {path}: {status} {}", String::from_utf8_lossy(&bytes));
        serde_json::from_slice(&bytes).unwrap()
    }

    async fn config(&self, name: &str, owner: Option<&Value>, blocks: bool) -> Value {
        let mut object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
        if let Some(owner) = owner {
            object["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "ConfigMap",
                "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"], "blockOwnerDeletion": blocks}]);
        }
        self.send("POST", "/api/v1/namespaces/default/configmaps", &object).await
    }

    async fn delete(&self, name: &str, policy: &str) {
        let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy});
        self.send("DELETE", &format!("/api/v1/namespaces/default/configmaps/{name}"), &options).await;
    }

    fn key(collection: &str, namespace: &str, name: &str) -> Key {
        Key::new(Collection::new(collection), namespace, name)
    }

    fn get(&self, name: &str) -> Option<Value> {
        current(&self.api, &Self::key("configmaps", "default", name))
    }

    /// Waits until the store is as it should be; a collector that never gets there fails the test by its deadline.
    async fn until(&self, collection: &str, reached: impl Fn() -> bool) {
        let collection = Collection::new(collection);
        let wait = async {
            loop {
                let revision = self.api.store().revision();
                if reached() {
                    return;
                }
                let mut watch = self.api.store().watch(&collection, revision).unwrap();
                watch.next().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the collector gets there");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dependents_follow_their_owner_in_the_background() {
    let cluster = Cluster::start(Options::default()).await;
    let owner = cluster.config("owner", None, false).await;
    let child = cluster.config("child", Some(&owner), false).await;
    cluster.config("grandchild", Some(&child), false).await;
    cluster.config("stranger", None, false).await;
    cluster.delete("owner", "Background").await;
    cluster
        .until("configmaps", || cluster.get("child").is_none() && cluster.get("grandchild").is_none())
        .await;
    assert!(cluster.get("stranger").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_deleted_in_the_foreground_goes_last() {
    let cluster = Cluster::start(Options::default()).await;
    let owner = cluster.config("owner", None, false).await;
    cluster.config("child", Some(&owner), true).await;
    cluster.delete("owner", "Foreground").await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
    assert!(cluster.get("child").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_stay_and_forget_their_owner() {
    let cluster = Cluster::start(Options::default()).await;
    let owner = cluster.config("owner", None, false).await;
    cluster.config("child", Some(&owner), false).await;
    cluster.delete("owner", "Orphan").await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
    let child = cluster.get("child").expect("the child stays");
    assert!(crate::rules::read::items(&child, &["metadata", "ownerReferences"]).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_made_for_an_owner_that_is_gone_goes() {
    let cluster = Cluster::start(Options::default()).await;
    let owner = json!({"metadata": {"name": "never", "uid": "00000000-0000-0000-0000-000000000000"}});
    cluster.config("child", Some(&owner), false).await;
    cluster.until("configmaps", || cluster.get("child").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_goes_with_all_that_is_in_it() {
    let cluster = Cluster::start(Options::default()).await;
    cluster
        .send(
            "POST",
            "/api/v1/namespaces",
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mine"}}),
        )
        .await;
    let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}});
    cluster.send("POST", "/api/v1/namespaces/mine/configmaps", &config).await;
    cluster.send("DELETE", "/api/v1/namespaces/mine", &json!({})).await;
    cluster
        .until("namespaces", || current(&cluster.api, &Cluster::key("namespaces", "", "mine")).is_none())
        .await;
    assert!(current(&cluster.api, &Cluster::key("configmaps", "mine", "c")).is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_go_when_they_are_old() {
    let cluster = Cluster::start(Options { event_ttl: Duration::from_millis(1) }).await;
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "r", "type": "Normal",
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}});
    cluster.send("POST", "/api/v1/namespaces/default/events", &event).await;
    cluster
        .until("events", || current(&cluster.api, &Cluster::key("events", "default", "e")).is_none())
        .await;
}

#[test]
fn an_event_lives_from_when_it_was_last_seen() {
    let event = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "series": {"lastObservedTime": "2026-01-01T01:00:00.000000Z"}});
    let hour = Duration::from_secs(3600);
    assert_eq!(expiry(&event, hour), "2026-01-01T02:00:00Z".parse::<Timestamp>().unwrap());
}
