//! Tests of a collector that is told by hand what happened, in the order that does harm.

use super::*;
use crate::collect::decide::{Policy, Target};
use crate::store::{Change, Expect};

const CONFIGS: &str = "configmaps";
const SECRETS: &str = "secrets";

struct ByHand {
    cluster: Cluster,
    collector: Collector,
    _observations: mpsc::Receiver<Observation>,
}

impl ByHand {
    /// A collector that knows of no collection yet.
    async fn new() -> Self {
        Self::of(Cluster::without_collector().await)
    }

    fn of(cluster: Cluster) -> Self {
        let (sender, observations) = mpsc::channel(WAITING_OBSERVATIONS);
        let mut collector = Collector::new(cluster.api.clone(), Options::default(), sender);
        collector.followed = cluster.api.registry().all().map(|served| served.collection.clone()).collect();
        Self { cluster, collector, _observations: observations }
    }

    /// Tells what is in a collection, and lets the collector work.
    async fn list(&mut self, collection: &str) {
        let collection = Collection::new(collection);
        let view = self.cluster.api.store().view(&collection);
        self.collector.observe(&Observation::Listed(collection, view));
        self.work().await;
    }

    async fn list_all(&mut self) {
        for collection in self.collector.followed.clone() {
            self.list(collection.as_str()).await;
        }
    }

    /// Tells what happened in a collection since, which has to be something, and lets the collector work.
    async fn observe_change(&mut self, collection: &str) {
        let collection = Collection::new(collection);
        let seen = self.collector.seen[&collection];
        let mut watch = self.cluster.api.store().watch(&collection, seen).unwrap();
        self.collector.observe(&Observation::Changed(watch.next().await.unwrap()));
        self.work().await;
    }

    async fn work(&mut self) {
        while self.collector.can_work() {
            self.collector.work().await;
        }
    }

    /// A secret that a config map owns.
    async fn secret(&self, owner: &Value, finalizers: &[&str]) {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "child",
            "finalizers": finalizers, "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap",
            "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": true}]}});
        self.cluster.send("POST", "/api/v1/namespaces/default/secrets", &secret).await;
    }

    fn child(&self) -> Option<Value> {
        current(&self.cluster.api, &Cluster::key(SECRETS, "default", "child"))
    }

    /// The child is there, and is nobody's.
    fn is_orphaned(&self) -> bool {
        self.child().is_some_and(|child| {
            child["metadata"]["deletionTimestamp"].is_null()
                && crate::rules::read::items(&child, &["metadata", "ownerReferences"]).is_empty()
        })
    }
}

#[tokio::test]
async fn an_owner_whose_record_is_damaged_has_not_gone() {
    let hand = ByHand::new().await;
    let owner = hand.cluster.config("owner", None, false).await;
    hand.secret(&owner, &[]).await;
    let dir = hand.cluster.dir.clone();
    drop(hand);
    let journal = dir.path().join("objects");
    let text = std::fs::read_to_string(&journal).unwrap();
    let line = text.lines().find(|line| line.contains("configmaps/default/owner")).unwrap();
    std::fs::write(&journal, text.replace(line, &line.replace("ConfigMap", "ConfigMop"))).unwrap();
    // At the next start nothing is damaged any more, and yet nobody knows more.
    for _ in 0..2 {
        let cluster = Cluster::on(dir.clone()).await;
        assert!(current(&cluster.api, &Cluster::key(CONFIGS, "default", "owner")).is_none());
        let mut hand = ByHand::of(cluster);
        hand.list_all().await;
        assert!(hand.child().is_some_and(|child| child["metadata"]["deletionTimestamp"].is_null()));
        // One that is seen to go takes its dependents along as ever.
        let other = hand.cluster.config("other", None, false).await;
        hand.cluster.config("dependent", Some(&other), false).await;
        hand.observe_change(CONFIGS).await;
        hand.cluster.delete("other", "Background").await;
        hand.observe_change(CONFIGS).await;
        assert!(current(&hand.cluster.api, &Cluster::key(CONFIGS, "default", "dependent")).is_none());
    }
}

#[tokio::test]
async fn nothing_is_decided_before_every_collection_is_listed() {
    let mut hand = ByHand::new().await;
    let owner = hand.cluster.config("owner", None, false).await;
    hand.secret(&owner, &[]).await;
    hand.cluster.delete("owner", "Orphan").await;
    hand.list(CONFIGS).await;
    assert!(hand.cluster.get("owner").is_some(), "its dependents are not known yet");
    hand.list_all().await;
    assert!(hand.cluster.get("owner").is_none());
    assert!(hand.is_orphaned());
}

#[tokio::test]
async fn an_owner_stays_until_what_happened_before_its_deletion_is_known() {
    for policy in ["Orphan", "Foreground"] {
        let mut hand = ByHand::new().await;
        hand.list_all().await;
        let owner = hand.cluster.config("owner", None, false).await;
        hand.secret(&owner, &["example.com/x"]).await;
        hand.cluster.delete("owner", policy).await;
        hand.observe_change(CONFIGS).await;
        assert!(hand.cluster.get("owner").is_some(), "{policy}: the news of the child is on its way");
        hand.observe_change(SECRETS).await;
        if policy == "Orphan" {
            assert!(hand.cluster.get("owner").is_none() && hand.is_orphaned());
        } else {
            assert!(hand.cluster.get("owner").is_some());
            assert!(hand.child().unwrap()["metadata"]["deletionTimestamp"].is_string());
        }
    }
}

#[tokio::test]
async fn dependents_of_what_went_unseen_go_when_it_is_not_listed_any_more() {
    let mut hand = ByHand::new().await;
    let owner = hand.cluster.config("owner", None, false).await;
    hand.secret(&owner, &[]).await;
    hand.list_all().await;
    hand.cluster.delete("owner", "Background").await;
    hand.list(CONFIGS).await;
    assert!(hand.child().is_none());
}

#[tokio::test]
async fn an_owner_goes_when_the_last_who_held_it_back_went_unseen() {
    let mut hand = ByHand::new().await;
    let owner = hand.cluster.config("owner", None, false).await;
    hand.secret(&owner, &["example.com/x"]).await;
    hand.list_all().await;
    hand.cluster.delete("owner", "Foreground").await;
    hand.observe_change(CONFIGS).await;
    let mut child = hand.child().unwrap();
    assert!(child["metadata"]["deletionTimestamp"].is_string() && hand.cluster.get("owner").is_some());
    child["metadata"]["finalizers"] = json!([]);
    hand.cluster.send("PUT", "/api/v1/namespaces/default/secrets/child", &child).await;
    hand.list(SECRETS).await;
    assert!(hand.cluster.get("owner").is_none());
}

#[tokio::test]
async fn a_namespace_goes_when_the_last_in_it_went_unseen() {
    let mut hand = ByHand::new().await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mine"}});
    hand.cluster.send("POST", "/api/v1/namespaces", &namespace).await;
    let secret = json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "s", "finalizers": ["example.com/x"]}});
    hand.cluster.send("POST", "/api/v1/namespaces/mine/secrets", &secret).await;
    hand.list_all().await;
    hand.cluster.send("DELETE", "/api/v1/namespaces/mine", &json!({})).await;
    hand.observe_change(NAMESPACES).await;
    let key = Cluster::key(SECRETS, "mine", "s");
    let mut secret = current(&hand.cluster.api, &key).expect("its finalizer keeps it");
    assert!(secret["metadata"]["deletionTimestamp"].is_string());
    secret["metadata"]["finalizers"] = json!([]);
    hand.cluster.send("PUT", "/api/v1/namespaces/mine/secrets/s", &secret).await;
    hand.list(SECRETS).await;
    assert!(current(&hand.cluster.api, &Cluster::key(NAMESPACES, "", "mine")).is_none());
}

fn definition() -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object"}}}]}})
}

const MAKE_DEFINITION: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// A config map that a thing owns.
fn owned_by_thing(uid: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child",
        "ownerReferences": [{"apiVersion": "example.com/v1", "kind": "Thing", "name": "t", "uid": uid}]}})
}

#[tokio::test]
async fn a_definition_is_followed_even_before_the_api_serves_it() {
    let mut hand = ByHand::new().await;
    hand.list_all().await;
    let key = Cluster::key(DEFINITIONS, "", "things.example.com");
    let stored = Change::put(|_| bytes::Bytes::from(definition().to_string()));
    hand.cluster.api.store().write(key, Expect::Absent, stored).await.unwrap();
    hand.observe_change(DEFINITIONS).await;
    assert!(hand.collector.followed.contains(&Collection::new("things.example.com")));
}

#[tokio::test]
async fn dependents_go_with_an_owner_whose_definition_goes() {
    let mut hand = ByHand::new().await;
    hand.cluster.send("POST", MAKE_DEFINITION, &definition()).await;
    hand.collector.followed.insert(Collection::new("things.example.com"));
    let thing = json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "t"}});
    let thing = hand.cluster.send("POST", "/apis/example.com/v1/namespaces/default/things", &thing).await;
    let child = owned_by_thing(&thing["metadata"]["uid"]);
    hand.cluster.send("POST", "/api/v1/namespaces/default/configmaps", &child).await;
    hand.list_all().await;
    let path = format!("{MAKE_DEFINITION}/things.example.com");
    hand.cluster.send("DELETE", &path, &json!({})).await;
    hand.observe_change("things.example.com").await;
    assert!(hand.cluster.get("child").is_none());
}

#[tokio::test]
async fn an_owner_of_unknown_kind_is_looked_for_when_its_definition_comes() {
    let mut hand = ByHand::new().await;
    let child = owned_by_thing(&json!("00000000-0000-0000-0000-000000000000"));
    hand.cluster.send("POST", "/api/v1/namespaces/default/configmaps", &child).await;
    hand.list_all().await;
    assert!(hand.cluster.get("child").is_some(), "nobody can tell whether its owner is there");
    hand.cluster.send("POST", MAKE_DEFINITION, &definition()).await;
    hand.observe_change(DEFINITIONS).await;
    hand.list("things.example.com").await;
    assert!(hand.cluster.get("child").is_none());
}

#[tokio::test]
async fn what_nobody_can_tell_stays() {
    let mut hand = ByHand::new().await;
    let owner =
        |version: &str| json!([{"apiVersion": version, "kind": "ConfigMap", "name": "never", "uid": "u"}]);
    let child = json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "child", "ownerReferences": owner("v7")}});
    hand.cluster.send("POST", "/api/v1/namespaces/default/configmaps", &child).await;
    let event = json!({"apiVersion": "v1", "kind": "Event", "reason": "r", "type": "Normal",
        "metadata": {"name": "e", "ownerReferences": owner("v1")},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}});
    hand.cluster.send("POST", "/api/v1/namespaces/default/events", &event).await;
    hand.list_all().await;
    assert!(hand.cluster.get("child").is_some(), "the version of its owner is not served");
    let event = current(&hand.cluster.api, &Cluster::key(EVENTS, "default", "e"));
    assert!(event.is_some(), "events go by their age alone");
}

#[tokio::test]
async fn what_has_changed_since_it_was_decided_about_stays_and_keeps_nobody() {
    let mut hand = ByHand::new().await;
    hand.list_all().await;
    let mut steps = Vec::new();
    for name in ["changed", "same"] {
        let object = hand.cluster.config(name, None, false).await;
        let item = Item::read(&Cluster::key(CONFIGS, "default", name), &object);
        steps.push(Step::Delete { target: item.target(), policy: Policy::Background });
    }
    hand.cluster.change("changed", &json!({"labels": {"needed": "yes"}})).await;
    assert!(hand.collector.take_all(&steps).await.is_some(), "it is decided anew");
    assert!(hand.cluster.get("changed").is_some() && hand.cluster.get("same").is_none());
}

#[tokio::test]
async fn another_of_the_same_name_keeps_its_finalizers() {
    let hand = ByHand::new().await;
    hand.cluster.config("owner", None, false).await;
    hand.cluster.delete("owner", "Orphan").await;
    let key = Cluster::key(CONFIGS, "default", "owner");
    let target = Target { key, uid: "of another".to_owned(), version: String::new() };
    let step = Step::DropFinalizer { target, finalizer: decide::ORPHAN };
    assert_eq!(perform(&hand.cluster.api, &step).await, Outcome::Done);
    assert!(hand.cluster.get("owner").is_some());
}
