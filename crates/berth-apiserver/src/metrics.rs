//! What Prometheus sees of the API and its store, under kube-apiserver's names where it has them.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::resource::{Resource, Subresource};
use crate::rest::ApiServer;

/// The buckets of kube-apiserver from 5 ms on, and finer ones below: most answers come from memory.
const SECONDS: [f64; 18] = [
    0.0001, 0.0005, 0.001, 0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
];

/// What is measured of requests; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct RequestMetrics {
    durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
    requests: Family<RequestLabels, Counter>,
    long_running: Family<ResourceLabels, Gauge>,
    watch_events: Family<KindLabels, Counter>,
}

/// Which request it is, from what is served: never from what a client made up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ResourceLabels {
    verb: &'static str,
    group: Arc<str>,
    version: Arc<str>,
    resource: Arc<str>,
    subresource: &'static str,
    scope: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DurationLabels {
    verb: &'static str,
    group: Arc<str>,
    version: Arc<str>,
    resource: Arc<str>,
    subresource: &'static str,
    scope: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    group: Arc<str>,
    version: Arc<str>,
    resource: Arc<str>,
    subresource: &'static str,
    scope: &'static str,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    group: Arc<str>,
    version: Arc<str>,
    kind: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StoredLabels {
    resource: String,
}

impl ResourceLabels {
    /// The labels of a request in kube-apiserver's words.
    pub(crate) fn new(
        resource: &Resource,
        subresource: Option<Subresource>,
        method: &http::Method,
        named: bool,
        in_namespace: bool,
        watch: bool,
    ) -> Self {
        let verb = match method.as_str() {
            "GET" | "HEAD" if watch => "WATCH",
            "GET" | "HEAD" | "POST" if subresource.is_some_and(Self::connects) => "CONNECT",
            "GET" | "HEAD" if named => "GET",
            "GET" | "HEAD" => "LIST",
            "POST" => "POST",
            "PUT" => "PUT",
            "PATCH" => "PATCH",
            "DELETE" if named => "DELETE",
            "DELETE" => "DELETECOLLECTION",
            _ => "OTHER",
        };
        let scope = match (named, in_namespace) {
            (true, _) => "resource",
            (false, true) => "namespace",
            (false, false) => "cluster",
        };
        Self {
            verb,
            group: resource.group.clone(),
            version: resource.version.clone(),
            resource: resource.plural.clone(),
            subresource: subresource.map_or("", Subresource::name),
            scope,
        }
    }

    fn connects(subresource: Subresource) -> bool {
        matches!(
            subresource,
            Subresource::Log | Subresource::Exec | Subresource::Attach | Subresource::PortForward
        )
    }

    /// Whether it lasts as long as its client likes.
    fn is_long_running(&self) -> bool {
        matches!(self.verb, "WATCH" | "CONNECT")
    }
}

impl Default for RequestMetrics {
    fn default() -> Self {
        Self {
            durations: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            requests: Family::default(),
            long_running: Family::default(),
            watch_events: Family::default(),
        }
    }
}

impl RequestMetrics {
    /// Counts a request that was answered.
    pub(crate) fn answered(&self, labels: &ResourceLabels, code: u16, begun: Instant) {
        let ResourceLabels { verb, group, version, resource, subresource, scope } = labels.clone();
        if !labels.is_long_running() {
            let labels = DurationLabels {
                verb,
                group: group.clone(),
                version: version.clone(),
                resource: resource.clone(),
                subresource,
                scope,
            };
            self.durations.get_or_create(&labels).observe(begun.elapsed().as_secs_f64());
        }
        let labels = RequestLabels { verb, group, version, resource, subresource, scope, code };
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a watch as running until what is returned is dropped.
    pub(crate) fn watching(&self, resource: &Resource, in_namespace: bool) -> Watching {
        let labels = ResourceLabels::new(resource, None, &http::Method::GET, false, in_namespace, true);
        let running = self.long_running.get_or_create_owned(&labels);
        running.inc();
        let labels = KindLabels {
            group: resource.group.clone(),
            version: resource.version.clone(),
            kind: resource.kind.clone(),
        };
        Watching { running, events: self.watch_events.get_or_create_owned(&labels) }
    }
}

/// One watch that runs.
#[derive(Debug)]
pub(crate) struct Watching {
    running: Gauge,
    /// The events that were sent to all who watch the kind.
    pub(crate) events: Counter,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.running.dec();
    }
}

/// What is measured of the store's journal; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct JournalMetrics {
    /// How long one sync to the disk takes.
    pub(crate) syncs: Histogram,
    /// How many changes share one sync.
    pub(crate) batches: Histogram,
}

impl Default for JournalMetrics {
    fn default() -> Self {
        Self {
            syncs: Histogram::new(exponential_buckets(0.0001, 2.0, 16)),
            batches: Histogram::new(exponential_buckets(1.0, 2.0, 11)),
        }
    }
}

/// How many objects there are of each kind, counted when somebody asks.
struct StoredObjects {
    api: ApiServer,
}

impl fmt::Debug for StoredObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoredObjects")
    }
}

impl Collector for StoredObjects {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Objects in the store, by resource";
        let mut encoder =
            encoder.encode_descriptor("apiserver_storage_objects", help, None, MetricType::Gauge)?;
        for (resource, count) in self.api.stored_objects() {
            #[expect(clippy::cast_precision_loss, reason = "nobody stores so many objects")]
            let count = count as f64;
            ConstGauge::new(count).encode(encoder.encode_family(&StoredLabels { resource })?)?;
        }
        Ok(())
    }
}

impl ApiServer {
    /// Adds kube-apiserver's metrics of requests, watches and objects to the registry, and those of the journal.
    pub fn measure(&self, registry: &mut Registry) {
        let (requests, journal) = self.meters();
        registry.register(
            "apiserver_request_duration_seconds",
            "How long requests take, but for watches, logs and commands",
            requests.durations.clone(),
        );
        registry.register(
            "apiserver_request",
            "Requests by what was asked and the code of the answer",
            requests.requests.clone(),
        );
        registry.register(
            "apiserver_longrunning_requests",
            "Watches under way",
            requests.long_running.clone(),
        );
        registry.register(
            "apiserver_watch_events",
            "Events sent to those who watch",
            requests.watch_events.clone(),
        );
        registry.register(
            "berth_journal_sync_duration_seconds",
            "How long it takes to make changes durable",
            journal.syncs.clone(),
        );
        registry.register(
            "berth_journal_batch_records",
            "How many changes share one sync",
            journal.batches.clone(),
        );
        registry.register_collector(Box::new(StoredObjects { api: self.clone() }));
    }
}
