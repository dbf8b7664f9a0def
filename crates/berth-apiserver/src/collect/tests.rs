//! Tests of the collector over a whole API.

mod by_hand;

use serde_json::{Value, json};

use super::*;

struct Cluster {
    api: ApiServer,
    shutdown: CancellationToken,
    dir: Arc<tempfile::TempDir>,
}

impl Cluster {
    async fn start(options: Options) -> Self {
        let cluster = Self::without_collector().await;
        tokio::spawn(run(cluster.api.clone(), options, cluster.shutdown.clone()));
        cluster
    }

    async fn without_collector() -> Self {
        Self::on(Arc::new(tempfile::tempdir().unwrap())).await
    }

    async fn on(dir: Arc<tempfile::TempDir>) -> Self {
        let (store, _) = Store::open(dir.path(), crate::store::Options::default()).unwrap();
        let pki = tempfile::tempdir().unwrap();
        let credentials = crate::auth::Credentials::ensure(pki.path(), Timestamp::now()).unwrap();
        let given = crate::rest::Options { credentials: Some(credentials.into()), ..Default::default() };
        let api = ApiServer::new(store, given);
        api.bootstrap().await.unwrap();
        Self { api, shutdown: CancellationToken::new(), dir }
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

    /// Replaces an object's metadata in part.
    async fn change(&self, name: &str, metadata: &Value) {
        let mut object = self.get(name).unwrap();
        for (field, value) in metadata.as_object().unwrap() {
            object["metadata"][field] = value.clone();
        }
        self.send("PUT", &format!("/api/v1/namespaces/default/configmaps/{name}"), &object).await;
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

/// An owner that goes in the foreground, and a dependent that holds it back and is held itself.
async fn held_back() -> (Cluster, Value) {
    let cluster = Cluster::start(Options::default()).await;
    let owner = cluster.config("owner", None, false).await;
    cluster.config("child", Some(&owner), true).await;
    cluster.change("child", &json!({"finalizers": ["example.com/x"]})).await;
    cluster.delete("owner", "Foreground").await;
    let is_deleting = |name: &str| {
        cluster.get(name).is_some_and(|object| object["metadata"]["deletionTimestamp"].is_string())
    };
    cluster.until("configmaps", || is_deleting("child")).await;
    assert!(is_deleting("owner"));
    (cluster, owner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_goes_when_the_last_who_held_it_back_forgets_it() {
    let (cluster, _) = held_back().await;
    cluster.change("child", &json!({"ownerReferences": []})).await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
    assert!(cluster.get("child").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_goes_when_the_last_who_held_it_back_lets_it() {
    let (cluster, owner) = held_back().await;
    let reference =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]});
    cluster.change("child", &json!({"ownerReferences": [reference]})).await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
    assert!(cluster.get("child").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_another_owner_does_not_hold_back_the_one_that_goes() {
    let cluster = Cluster::start(Options::default()).await;
    let owner = cluster.config("owner", None, false).await;
    let other = cluster.config("other", None, false).await;
    let child = cluster.config("child", Some(&owner), true).await;
    let mut owners = child["metadata"]["ownerReferences"].clone();
    owners.as_array_mut().unwrap().push(json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "other",
        "uid": other["metadata"]["uid"], "blockOwnerDeletion": true}));
    cluster.change("child", &json!({"ownerReferences": owners})).await;
    cluster.delete("owner", "Foreground").await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
    let child = cluster.get("child").expect("the child stays with the other");
    assert_eq!(child["metadata"]["ownerReferences"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_own_each_other_both_go() {
    let cluster = Cluster::start(Options::default()).await;
    let one = cluster.config("one", None, false).await;
    let two = cluster.config("two", Some(&one), true).await;
    let reference = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "two",
        "uid": two["metadata"]["uid"], "blockOwnerDeletion": true});
    cluster.change("one", &json!({"ownerReferences": [reference]})).await;
    cluster.delete("one", "Foreground").await;
    cluster.until("configmaps", || cluster.get("one").is_none() && cluster.get("two").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_goes_although_its_dependent_has_its_name_wrong() {
    let cluster = Cluster::start(Options::default()).await;
    let mut owner = cluster.config("owner", None, false).await;
    owner["metadata"]["name"] = json!("owner-of-old");
    // The reference dangles, but for its uid; a finalizer keeps the dependent until the owner waits for it.
    let child = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child",
        "finalizers": ["example.com/x"], "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap",
        "name": "owner-of-old", "uid": owner["metadata"]["uid"], "blockOwnerDeletion": true}]}});
    cluster.send("POST", "/api/v1/namespaces/default/configmaps", &child).await;
    cluster.delete("owner", "Foreground").await;
    let is_deleting = |name: &str| {
        cluster.get(name).is_some_and(|object| object["metadata"]["deletionTimestamp"].is_string())
    };
    cluster.until("configmaps", || is_deleting("child")).await;
    cluster.change("child", &json!({"finalizers": []})).await;
    cluster.until("configmaps", || cluster.get("owner").is_none()).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_every_namespace_has_comes_back() {
    let cluster = Cluster::start(Options::default()).await;
    let account = Cluster::key("serviceaccounts", "default", "default");
    let map = "/api/v1/namespaces/default/configmaps/kube-root-ca.crt";
    let uid = |object: &Option<Value>| object.as_ref().map(|it| it["metadata"]["uid"].clone());
    let (old_account, old_map) = (current(&cluster.api, &account), cluster.get("kube-root-ca.crt"));
    cluster.send("DELETE", "/api/v1/namespaces/default/serviceaccounts/default", &json!({})).await;
    cluster.send("DELETE", map, &json!({})).await;
    let is_new = |new: Option<Value>, old| new.is_some() && uid(&new) != uid(old);
    cluster.until("serviceaccounts", || is_new(current(&cluster.api, &account), &old_account)).await;
    cluster.until("configmaps", || is_new(cluster.get("kube-root-ca.crt"), &old_map)).await;
    let data = old_map.unwrap()["data"].clone();
    let mut changed = cluster.get("kube-root-ca.crt").unwrap();
    changed["data"] = json!({ "ca.crt": "another" });
    cluster.send("PUT", map, &changed).await;
    cluster.until("configmaps", || cluster.get("kube-root-ca.crt").unwrap()["data"] == data).await;
}
