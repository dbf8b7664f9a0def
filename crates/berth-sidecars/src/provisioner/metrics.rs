//! What Prometheus sees of provisioning, under upstream's names.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::capacity::Publisher;

/// The Go client's defaults, so that dashboards fit.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

type Times<L> = Family<L, Histogram, fn() -> Histogram>;

/// How much was provisioned and deleted, how long that took, and how many capacity objects there are.
#[derive(Clone)]
pub struct Metrics {
    provisioned: Family<ClaimLabels, Counter>,
    not_provisioned: Family<ClaimLabels, Counter>,
    provisioning: Times<ClaimLabels>,
    deleted: Family<VolumeLabels, Counter>,
    not_deleted: Family<VolumeLabels, Counter>,
    deleting: Times<VolumeLabels>,
    capacity: Published,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    class: String,
    /// The kind of the claim's data source.
    source: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumeLabels {
    class: String,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            provisioned: Family::default(),
            not_provisioned: Family::default(),
            provisioning: Family::new_with_constructor(times),
            deleted: Family::default(),
            not_deleted: Family::default(),
            deleting: Family::new_with_constructor(times),
            capacity: Published::default(),
        }
    }
}

fn times() -> Histogram {
    Histogram::new(SECONDS)
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    /// Lets a registry see them.
    pub fn register(registry: &mut Registry) -> Self {
        let own = Self::default();
        let claims = "controller_persistentvolumeclaim_provision";
        registry.register(
            claims,
            "Volumes that were provisioned, by class and source",
            own.provisioned.clone(),
        );
        registry.register(
            format!("{claims}_failed"),
            "Failed attempts to provision a volume, by class and source",
            own.not_provisioned.clone(),
        );
        registry.register(
            format!("{claims}_duration_seconds"),
            "How long it took to provision a volume, without failed attempts, by class and source",
            own.provisioning.clone(),
        );
        let volumes = "controller_persistentvolume_delete";
        registry.register(volumes, "Volumes that were deleted, by class", own.deleted.clone());
        registry.register(
            format!("{volumes}_failed"),
            "Failed attempts to delete a volume, by class",
            own.not_deleted.clone(),
        );
        registry.register(
            format!("{volumes}_duration_seconds"),
            "How long it took to delete a volume, without failed attempts, by class",
            own.deleting.clone(),
        );
        registry.register_collector(Box::new(own.capacity.clone()));
        own
    }

    pub(super) fn provisioned(&self, class: &str, source: &str, took: Duration) {
        let labels = ClaimLabels { class: class.to_owned(), source: source.to_owned() };
        self.provisioned.get_or_create(&labels).inc();
        self.provisioning.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(super) fn not_provisioned(&self, class: &str, source: &str) {
        let labels = ClaimLabels { class: class.to_owned(), source: source.to_owned() };
        self.not_provisioned.get_or_create(&labels).inc();
    }

    pub(super) fn deleted(&self, class: &str, took: Duration) {
        let labels = VolumeLabels { class: class.to_owned() };
        self.deleted.get_or_create(&labels).inc();
        self.deleting.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(super) fn not_deleted(&self, class: &str) {
        self.not_deleted.get_or_create(&VolumeLabels { class: class.to_owned() }).inc();
    }

    /// Counts the objects of a publisher from now on, for as long as it lives.
    pub(super) fn count_objects_of(&self, publisher: &Arc<Publisher>) {
        *self.capacity.publisher.lock() = Arc::downgrade(publisher);
    }
}

/// Counts capacity objects when somebody wants to know.
#[derive(Debug, Clone, Default)]
struct Published {
    publisher: Arc<Mutex<Weak<Publisher>>>,
}

impl Collector for Published {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let publisher = self.publisher.lock().upgrade();
        let Some(counts) = publisher.map(|publisher| publisher.counts()) else { return Ok(()) };
        for (name, help, count) in [
            ("desired_goal", "CSIStorageCapacity objects that there should be", counts.goal),
            ("desired_current", "CSIStorageCapacity objects that there are and should be", counts.current),
            ("obsolete", "CSIStorageCapacity objects that there are and will be deleted", counts.obsolete),
        ] {
            let name = format!("csistoragecapacities_{name}");
            let encoder = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX)).encode(encoder)?;
        }
        Ok(())
    }
}
