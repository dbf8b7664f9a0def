//! Events: what `kubectl describe` shows of what a loop did, or why it could not.
//!
//! Recording never waits and never fails the work that it is about. Events are correlated as client-go does it:
//!
//! - The same event again within ten minutes counts up the first one, at most once a second; the last count is written,
//!   too.
//! - Of one object, severity and reason, nine different messages have an event each. Further ones share an event whose
//!   message begins with "(combined from similar events)".
//! - An object may have 25 events in a row and then one in five minutes. More are suppressed, but never the first of a
//!   severity and reason; counts wait instead.
//!
//! Unlike there, nothing is lost because many objects have news at once: up to [`WAITING`] events wait to be written, by
//! several requests at a time, and are kept while the API server is away. What is lost is counted and logged once a
//! minute. A process that ends has what waits written first, by [`Cluster::finish_events`].

mod correlator;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::correlator::{Correlator, CountUp, Creation, Occurrence, Outcome, Request};
use crate::cluster::Cluster;
use crate::kind::Kind;
use crate::write::within;

/// Whether an event is good or bad news.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Severity {
    /// Something happened as it should.
    Normal,
    /// Something is wrong, and somebody may have to act.
    Warning,
}

impl Severity {
    /// The `type` of an Event as Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Records events in the name of one component; cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    handle: Arc<Handle>,
}

/// What the recorders of a component have in common with the task that writes their events.
#[derive(Default)]
struct Outbox {
    events: Mutex<Correlator>,
    changed: Notify,
}

/// The tasks that write the events of all recorders of a cluster.
#[derive(Clone, Default)]
pub(crate) struct Writers {
    tasks: TaskTracker,
    /// Cancelled when the process ends: what waits is written at once.
    end: CancellationToken,
}

impl Writers {
    /// Has everything written that was recorded, for at most `limit`; false if that was not enough.
    pub(crate) async fn finish(&self, limit: Duration) -> bool {
        self.end.cancel();
        self.tasks.close();
        timeout(limit, self.tasks.wait()).await.is_ok()
    }
}

/// The recorders' side of the outbox: when the last recorder goes, the writer finishes and ends.
struct Handle(Arc<Outbox>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.events.lock().close();
        self.0.changed.notify_one();
    }
}

/// How many requests a recorder makes at a time.
const WRITERS: usize = 8;
/// How often losses are logged at most.
const LOSSES: Duration = Duration::from_mins(1);
/// Kubernetes refuses longer messages.
const LONGEST: usize = 1024;

impl Recorder {
    /// A recorder that names `component` as the source, and `host` if it matters where it runs.
    pub fn new(cluster: &Cluster, component: &str, host: &str) -> Self {
        let outbox = Arc::<Outbox>::default();
        let source = EventSource {
            component: Some(component.to_owned()),
            host: (!host.is_empty()).then(|| host.to_owned()),
        };
        let writers = &cluster.writers;
        writers.tasks.spawn(write(cluster.client().clone(), source, outbox.clone(), writers.end.clone()));
        Self { handle: Arc::new(Handle(outbox)) }
    }

    /// Records good news about an object.
    pub fn normal<K: Kind>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.record(reference(about), Severity::Normal, reason, message);
    }

    /// Records bad news about an object.
    pub fn warning<K: Kind>(&self, about: &K, reason: &str, message: impl Into<String>) {
        self.record(reference(about), Severity::Warning, reason, message);
    }

    /// Records an event about the object that `about` points to.
    pub fn record(
        &self,
        about: ObjectReference,
        severity: Severity,
        reason: &str,
        message: impl Into<String>,
    ) {
        let occurrence = Occurrence {
            about,
            severity,
            reason: reason.to_owned(),
            message: message.into(),
            at: Timestamp::now(),
        };
        let outbox = &self.handle.0;
        outbox.events.lock().record(Instant::now(), occurrence);
        outbox.changed.notify_one();
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

/// Writes events until the last recorder is gone, or the process ends, and everything is written.
async fn write(client: Client, source: EventSource, outbox: Arc<Outbox>, end: CancellationToken) {
    let mut writing = FuturesUnordered::new();
    let mut logged: Option<Instant> = None;
    loop {
        let now = Instant::now();
        let mut wake = None;
        let ends = {
            let mut events = outbox.events.lock();
            if end.is_cancelled() {
                events.close();
            }
            while writing.len() < WRITERS {
                match events.next(now) {
                    Ok((key, request)) => {
                        let (client, source) = (client.clone(), source.clone());
                        writing.push(async move { (key, send(&client, &source, request).await) });
                    }
                    Err(next) => {
                        wake = next;
                        break;
                    }
                }
            }
            if events.losses().any() {
                let again = logged.map(|logged| logged + LOSSES);
                if let Some(again) = again.filter(|again| *again > now && !events.is_closed()) {
                    wake = Some(wake.map_or(again, |wake: Instant| wake.min(again)));
                } else {
                    logged = Some(now);
                    let losses = events.take_losses();
                    tracing::warn!(
                        component = source.component,
                        lost = losses.lost,
                        suppressed = losses.suppressed,
                        "events were not written: too many wait, or one object has too many"
                    );
                }
            }
            if events.is_closed() && writing.is_empty() && wake.is_none() {
                return;
            }
            events.is_closed()
        };
        let woken = async {
            match wake {
                Some(wake) => sleep_until(wake).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some((key, outcome)) = writing.next() => {
                outbox.events.lock().finish(Instant::now(), key, outcome);
            }
            () = outbox.changed.notified() => {}
            () = end.cancelled(), if !ends => {}
            () = woken => {}
        }
    }
}

/// Makes one request; what became of the event.
async fn send(client: &Client, source: &EventSource, request: Request) -> Outcome {
    let answer = match request {
        Request::Create(creation) => {
            let event = event(source, *creation);
            let namespace = event.metadata.namespace.clone().unwrap_or_default();
            let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
            match within(api.create(&PostParams::default(), &event)).await {
                // An attempt whose answer was lost.
                Err(kube::Error::Api(status)) if status.code == 409 => return Outcome::Written,
                answer => answer.map(drop),
            }
        }
        Request::CountUp(CountUp { name, namespace, count, last, message }) => {
            let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
            let mut patch = serde_json::json!({ "count": count, "lastTimestamp": Time(last) });
            if let Some(message) = message {
                patch["message"] = message.into();
            }
            within(api.patch(&name, &PatchParams::default(), &Patch::Merge(patch))).await.map(drop)
        }
    };
    match answer {
        Ok(()) => Outcome::Written,
        // A namespace that is going away takes no events any more.
        Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => {
            tracing::debug!(error = %status.message, "an event was refused");
            Outcome::Refused
        }
        Err(error) => {
            tracing::debug!(%error, "an event could not be written yet");
            Outcome::Unanswered
        }
    }
}

fn event(source: &EventSource, creation: Creation) -> Event {
    let Creation { name, namespace, count, last, of } = creation;
    Event {
        metadata: ObjectMeta { name: Some(name), namespace: Some(namespace), ..ObjectMeta::default() },
        involved_object: of.about,
        reason: Some(of.reason),
        message: Some(of.message),
        type_: Some(of.severity.as_str().to_owned()),
        source: Some(source.clone()),
        reporting_component: source.component.clone(),
        reporting_instance: source.host.clone(),
        count: Some(count),
        first_timestamp: Some(Time(of.at)),
        last_timestamp: Some(Time(last)),
        ..Event::default()
    }
}

/// A message that is not longer than Kubernetes takes.
fn shortened(mut message: String) -> String {
    if message.len() > LONGEST {
        let end = (0..=LONGEST - 3).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
        message.truncate(end);
        message.push_str("...");
    }
    message
}
