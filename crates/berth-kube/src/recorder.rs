//! Events: what `kubectl describe` shows of what a loop did, or why it could not.
//!
//! Telling never waits and never fails the work that is told of. The same event again within a few minutes only counts
//! up the first one, at most once a second.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::kind::Kind;
use crate::write::within;

/// Whether an event is good or bad news.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    /// Something happened as it should.
    Normal,
    /// Something is wrong.
    Warning,
}

impl Severity {
    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Tells events in the name of one component; cheap to clone.
#[derive(Debug, Clone)]
pub struct Recorder {
    sender: mpsc::Sender<Told>,
}

#[derive(Debug)]
struct Told {
    about: ObjectReference,
    severity: Severity,
    reason: String,
    message: String,
}

/// Events that may wait to be written; more are dropped, with a line in the log.
const WAITING: usize = 4096;
/// How many different events are remembered to be counted up rather than written anew.
const REMEMBERED: usize = 4096;
/// How long an event is counted up rather than written anew.
const SAME: Duration = Duration::from_secs(600);
/// How often an event is counted up at most.
const PACE: Duration = Duration::from_secs(1);
/// Kubernetes refuses longer messages.
const LONGEST: usize = 1024;

impl Recorder {
    /// A recorder that names `component` as the source, and `host` if it matters where it runs.
    pub fn new(cluster: &Cluster, component: &str, host: &str) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        let source = EventSource {
            component: Some(component.to_owned()),
            host: (!host.is_empty()).then(|| host.to_owned()),
        };
        tokio::spawn(write(cluster.client().clone(), source, receiver));
        Self { sender }
    }

    /// Good news about an object.
    pub fn normal<K: Kind>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.tell(reference(about), Severity::Normal, reason, message);
    }

    /// Bad news about an object.
    pub fn warning<K: Kind>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.tell(reference(about), Severity::Warning, reason, message);
    }

    /// News about an object.
    pub fn tell(&self, about: ObjectReference, severity: Severity, reason: &str, message: impl Into<String>) {
        let mut message = message.into();
        if message.len() > LONGEST {
            let end = (0..=LONGEST - 3).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
            message.truncate(end);
            message.push_str("...");
        }
        let told = Told { about, severity, reason: reason.to_owned(), message };
        if let Err(error) = self.sender.try_send(told) {
            tracing::warn!(%error, "an event was not told");
        }
    }
}

/// What an event points to.
pub fn reference<K: Kind>(object: &K) -> ObjectReference {
    let meta = object.meta();
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        field_path: None,
    }
}

struct Known {
    /// `None` while the event is not written yet.
    event: String,
    namespace: String,
    count: i32,
    written: Instant,
    first: Instant,
}

async fn write(client: Client, source: EventSource, mut receiver: mpsc::Receiver<Told>) {
    // By what is the same of equal events: thousands are remembered, and their texts would take megabytes.
    let mut known: HashMap<u64, Known> = HashMap::new();
    let hasher = RandomState::new();
    while let Some(told) = receiver.recv().await {
        let about = &told.about;
        let object = (&about.uid, &about.kind, &about.name, &about.namespace, &about.field_path);
        let same = hasher.hash_one((object, told.severity, &told.reason, &told.message));
        let now = Instant::now();
        if let Some(known) = known.get_mut(&same).filter(|known| now - known.first < SAME) {
            known.count += 1;
            if now - known.written >= PACE {
                known.written = now;
                count_up(&client, known).await;
            }
            continue;
        }
        if known.len() >= REMEMBERED {
            known.retain(|_, known| now - known.first < SAME);
            if known.len() >= REMEMBERED {
                known.clear();
            }
        }
        let event = event(&source, told);
        let (name, namespace) = (
            event.metadata.name.clone().unwrap_or_default(),
            event.metadata.namespace.clone().unwrap_or_default(),
        );
        let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
        match within(api.create(&PostParams::default(), &event)).await {
            Ok(_) => {
                known.insert(same, Known { event: name, namespace, count: 1, written: now, first: now });
            }
            // A namespace that is going away takes no events any more.
            Err(error) => tracing::debug!(%error, "an event was refused"),
        }
    }
}

async fn count_up(client: &Client, known: &Known) {
    let api: Api<Event> = Api::namespaced(client.clone(), &known.namespace);
    let patch = serde_json::json!({ "count": known.count, "lastTimestamp": Time(Timestamp::now()) });
    let counted = within(api.patch(&known.event, &PatchParams::default(), &Patch::Merge(patch))).await;
    if let Err(error) = counted {
        tracing::debug!(%error, "an event could not be counted up");
    }
}

fn event(source: &EventSource, told: Told) -> Event {
    let now = Timestamp::now();
    let namespace = told.about.namespace.clone().unwrap_or_else(|| "default".to_owned());
    let about = told.about.name.clone().unwrap_or_default();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{about}.{:x}", now.as_nanosecond())),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        involved_object: told.about,
        reason: Some(told.reason),
        message: Some(told.message),
        type_: Some(told.severity.as_str().to_owned()),
        source: Some(source.clone()),
        reporting_component: source.component.clone(),
        reporting_instance: source.host.clone(),
        count: Some(1),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        ..Event::default()
    }
}
