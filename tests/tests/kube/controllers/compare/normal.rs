//! Makes the objects of two clusters comparable: without versions and times, and with a word for every uid, every hash of a template
//! and every generated name, the same on both sides.

use std::collections::BTreeMap;
use std::sync::Arc;

use berth_kube::{Cluster, Kind};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::ObjectMeta;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::kinds::text;

/// Labels whose value is the hash of a template.
const HASHES: [&str; 3] = ["pod-template-hash", "controller-revision-hash", "controller.kubernetes.io/hash"];

/// Events that are told each time that a controller looks, of which their number depends on time alone.
const REPEATED: [&str; 4] = ["ExternalProvisioning", "FailedScheduling", "NoPods", "UnmanagedPods"];
/// Which of both a claim has depends on whether its pod was known already.
const WAITING: [&str; 2] = ["WaitForFirstConsumer", "WaitForPodScheduled"];

/// All names and uids that there were in a cluster while a scenario ran.
pub(crate) struct Names {
    namespace: String,
    seen: Arc<Mutex<SeenNames>>,
    _watches: DropGuard,
}

#[derive(Default)]
struct SeenNames {
    /// Whether one word stands for all nodes.
    hides_nodes: bool,
    /// Kind and name, by uid.
    uids: BTreeMap<String, (String, String)>,
    /// What a generated name begins with, by the name.
    generated: BTreeMap<String, String>,
    /// The image of a template, by the template's hash.
    hashes: BTreeMap<String, String>,
}

/// The words for names and uids, the longest first.
pub(crate) struct Words(Vec<(String, String)>);

impl Names {
    /// Notes the names of what comes into a namespace, and of what has none, from now on.
    pub(crate) async fn follow(client: Client, namespace: &str) -> Self {
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(client, shutdown.clone());
        let names =
            Self { namespace: namespace.to_owned(), seen: Arc::default(), _watches: shutdown.drop_guard() };
        names.note::<Pod>(&cluster, |_| None).await;
        names.note::<PersistentVolumeClaim>(&cluster, |_| None).await;
        names.note::<PersistentVolume>(&cluster, |_| None).await;
        names.note::<Node>(&cluster, |_| None).await;
        names.note::<StatefulSet>(&cluster, |_| None).await;
        names.note::<DaemonSet>(&cluster, |_| None).await;
        names.note::<Deployment>(&cluster, |_| None).await;
        names.note::<Job>(&cluster, |_| None).await;
        names.note::<CronJob>(&cluster, |_| None).await;
        names.note::<PodDisruptionBudget>(&cluster, |_| None).await;
        let of_set = |set: &ReplicaSet| {
            let template = set.spec.as_ref()?.template.as_ref()?;
            template.spec.as_ref()?.containers.first()?.image.clone()
        };
        names.note::<ReplicaSet>(&cluster, of_set).await;
        let of_revision = |revision: &ControllerRevision| {
            let image = revision.data.as_ref()?.0.pointer("/spec/template/spec/containers/0/image")?;
            image.as_str().map(str::to_owned)
        };
        names.note::<ControllerRevision>(&cluster, of_revision).await;
        names
    }

    async fn note<K: Kind>(
        &self,
        cluster: &Cluster,
        image: impl Fn(&K) -> Option<String> + Send + Sync + 'static,
    ) {
        let cache = cluster.cache::<K>();
        cache.synced().await;
        let (seen, namespace) = (self.seen.clone(), self.namespace.clone());
        cache.on_change(move |object| {
            let meta = object.meta();
            if meta.namespace.as_ref().is_none_or(|other| *other == namespace) {
                seen.lock().note(&K::kind(&()), meta, image(object));
            }
        });
    }

    /// Whether an event is about an object that was seen, and not about one of an earlier scenario.
    pub(crate) fn is_about_known(&self, event: &Value) -> bool {
        self.seen.lock().uids.contains_key(text(event, "/involvedObject/uid"))
    }

    /// Has one word stand for all nodes.
    pub(crate) fn hide_nodes(&self) {
        self.seen.lock().hides_nodes = true;
    }

    /// What stands for the names and uids, now that all are known.
    pub(crate) fn words(&self) -> Words {
        let seen = self.seen.lock();
        let mut hashes: Vec<_> =
            seen.hashes.iter().map(|(hash, image)| (hash.clone(), format!("<hash of {image}>"))).collect();
        if seen.hides_nodes {
            let nodes = seen.uids.values().filter(|(kind, _)| kind == "Node");
            hashes.extend(nodes.map(|(_, name)| (name.clone(), "<node>".to_owned())));
        }
        hashes.push((self.namespace.clone(), "<namespace>".to_owned()));
        let hashes = Words(hashes);
        let generated =
            seen.generated.iter().map(|(name, prefix)| (name.clone(), format!("{}*", hashes.apply(prefix))));
        let mut words: Vec<_> = generated.chain(hashes.0.clone()).collect();
        words.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let names = Words(words.clone());
        let uids = seen
            .uids
            .iter()
            .map(|(uid, (kind, name))| (uid.clone(), format!("<uid of {kind} {}>", names.apply(name))));
        Words(uids.chain(words).collect())
    }
}

impl SeenNames {
    fn note(&mut self, kind: &str, meta: &ObjectMeta, image: Option<String>) {
        let name = meta.name.clone().unwrap_or_default();
        let uid = meta.uid.clone().unwrap_or_default();
        self.uids.insert(uid, (kind.to_owned(), name.clone()));
        // A StatefulSet's pods have both, and a name that is not generated.
        if let Some(prefix) = &meta.generate_name
            && name.strip_prefix(prefix.as_str()).is_some_and(|suffix| suffix.len() == 5)
        {
            self.generated.insert(name, prefix.clone());
        }
        let Some(image) = image else { return };
        for label in HASHES {
            if let Some(hash) = meta.labels.as_ref().and_then(|labels| labels.get(label)) {
                self.hashes.insert(hash.clone(), image.clone());
            }
        }
    }
}

impl Words {
    fn apply(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, word) in &self.0 {
            if text.contains(name.as_str()) {
                text = text.replace(name.as_str(), word);
            }
        }
        minutes(&text)
    }

    /// A text with words for what differs from cluster to cluster.
    pub(crate) fn text(&self, text: &str) -> String {
        if text.parse::<Timestamp>().is_ok() {
            return "<time>".to_owned();
        }
        let text = self.apply(text);
        match text.strip_prefix("kube-api-access-") {
            Some(suffix) if suffix.len() == 5 => "kube-api-access-*".to_owned(),
            _ => text,
        }
    }

    /// An object without its version, with words for what differs from cluster to cluster. Lists whose order means nothing are
    /// sorted.
    pub(crate) fn object(&self, object: &Value) -> Value {
        let mut object = object.clone();
        if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["uid", "managedFields", "selfLink"] {
                meta.remove(field);
            }
        }
        self.value(&mut object, "");
        object
    }

    fn value(&self, value: &mut Value, field: &str) {
        match value {
            Value::String(text) => *text = self.text(text),
            Value::Array(items) => {
                for item in items.iter_mut() {
                    self.value(item, "");
                }
                if ["conditions", "taints"].contains(&field) {
                    items.sort_by_key(|item| {
                        format!("{} {} {}", text(item, "/type"), text(item, "/key"), text(item, "/effect"))
                    });
                }
            }
            Value::Object(fields) => {
                fields.remove("resourceVersion");
                let renamed = std::mem::take(fields).into_iter().map(|(key, mut value)| {
                    self.value(&mut value, &key);
                    (self.text(&key), value)
                });
                *fields = renamed.collect();
            }
            _ => {}
        }
    }

    /// Events by what they say, with how often and by whom.
    pub(crate) fn events(&self, events: &[Value]) -> BTreeMap<String, Value> {
        let mut told: BTreeMap<String, Value> = BTreeMap::new();
        for event in events {
            let [kind, name] = ["/involvedObject/kind", "/involvedObject/name"].map(|path| text(event, path));
            let [severity, reason, message] = ["/type", "/reason", "/message"].map(|path| text(event, path));
            if WAITING.contains(&reason) {
                continue;
            }
            // Which of many similar messages has an event of its own is chosen at random.
            let message = message.strip_prefix("(combined from similar events): ").unwrap_or(message);
            let says = self.apply(&format!("{kind}/{name} {severity} {reason}: {message}"));
            let by = [text(event, "/source/component"), text(event, "/reportingComponent")];
            let by = by.into_iter().find(|by| !by.is_empty()).unwrap_or_default();
            let count = event["series"]["count"].as_i64().or(event["count"].as_i64()).unwrap_or(1);
            let entry = told.entry(says).or_insert(json!({"by": by, "count": 0}));
            let is_repeated = REPEATED.contains(&reason);
            let count = if is_repeated { 1 } else { entry["count"].as_i64().unwrap_or(0) + count.max(1) };
            entry["count"] = json!(count);
        }
        told
    }
}

/// The Jobs of a CronJob are named after the minute that they are for.
fn minutes(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let digits = rest[at..].find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len() - at);
        result.push_str(&rest[..at]);
        let is_minute = digits == 8 && rest[..at].ends_with('-');
        result.push_str(if is_minute { "<minute>" } else { &rest[at..at + digits] });
        rest = &rest[at + digits..];
    }
    result + rest
}
