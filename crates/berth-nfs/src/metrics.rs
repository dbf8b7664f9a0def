//! How servers answer, by server: round trips, requests that were sent again, silence, and connections.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// From a server in the same rack to one that is about to time out, in seconds.
const BUCKETS: [f64; 12] = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// The metrics of a client; clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    seconds: Family<ServerLabel, Histogram, fn() -> Histogram>,
    repeated: Family<ServerLabel, Counter>,
    unanswered: Family<ServerLabel, Counter>,
    connections: Family<ServerLabel, Gauge>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServerLabel {
    server: String,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            repeated: Family::default(),
            unanswered: Family::default(),
            connections: Family::default(),
        }
    }
}

impl Metrics {
    /// Shows them in a registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "How long NFS servers take to answer a request";
        registry.register("berth_nfs_request_duration_seconds", help, self.seconds.clone());
        let help = "Requests to NFS servers that were sent again";
        registry.register("berth_nfs_retries", help, self.repeated.clone());
        let help =
            "Requests that an NFS server did not answer in time, and connections that it did not accept";
        registry.register("berth_nfs_unanswered", help, self.unanswered.clone());
        let help = "Connections to NFS servers, each with a session where the version has them";
        registry.register("berth_nfs_sessions", help, self.connections.clone());
    }

    /// Those of one server.
    pub(crate) fn of(&self, host: &str) -> Meter {
        let label = ServerLabel { server: host.to_owned() };
        Meter {
            seconds: self.seconds.get_or_create(&label).clone(),
            repeated: self.repeated.get_or_create(&label).clone(),
            unanswered: self.unanswered.get_or_create(&label).clone(),
            connections: self.connections.get_or_create(&label).clone(),
        }
    }
}

/// The metrics of one server.
#[derive(Debug, Clone)]
pub(crate) struct Meter {
    seconds: Histogram,
    repeated: Counter,
    unanswered: Counter,
    connections: Gauge,
}

impl Default for Meter {
    /// Metrics that nobody sees.
    fn default() -> Self {
        Metrics::default().of("")
    }
}

impl Meter {
    pub(crate) fn answered(&self, after: Duration) {
        self.seconds.observe(after.as_secs_f64());
    }

    pub(crate) fn repeated(&self) {
        self.repeated.inc();
    }

    pub(crate) fn unanswered(&self) {
        self.unanswered.inc();
    }

    pub(crate) fn connected(&self) {
        self.connections.inc();
    }

    pub(crate) fn disconnected(&self) {
        self.connections.dec();
    }
}
