//! What Prometheus sees of the calls: the histogram every CSI driver has, and how many calls are under way.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Duration;
use tonic::Code;

use crate::code;

/// From 0.1 s on the buckets of other CSI drivers, so that dashboards fit; below that, finer ones.
const SECONDS: [f64; 19] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0,
    300.0, 600.0,
];

/// The metrics of one driver's calls.
#[derive(Clone, Debug)]
pub struct Metrics {
    driver_name: Arc<str>,
    operations: Family<OperationLabels, Histogram, fn() -> Histogram>,
    in_flight: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    driver_name: Arc<str>,
    method_name: String,
    grpc_status_code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DriverLabels {
    driver_name: Arc<str>,
}

impl Metrics {
    /// Adds `csi_plugin_operations_seconds` and `csi_plugin_operations_in_flight` to the registry.
    pub fn register(registry: &mut Registry, driver_name: &str) -> Self {
        let driver_name: Arc<str> = driver_name.into();
        let operations: Family<OperationLabels, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        registry.register(
            "csi_plugin_operations_seconds",
            "Duration of CSI calls, by method and status code",
            operations.clone(),
        );
        let in_flight: Family<DriverLabels, Gauge> = Family::default();
        registry.register("csi_plugin_operations_in_flight", "CSI calls under way", in_flight.clone());
        let in_flight = in_flight.get_or_create_owned(&DriverLabels { driver_name: driver_name.clone() });
        Self { driver_name, operations, in_flight }
    }

    /// Metrics that nobody reads.
    pub fn unregistered(driver_name: &str) -> Self {
        Self::register(&mut Registry::default(), driver_name)
    }

    pub(crate) fn began(&self) {
        self.in_flight.inc();
    }

    pub(crate) fn ended(&self, method_name: &str, code: Code, took: Duration) {
        self.in_flight.dec();
        let labels = OperationLabels {
            driver_name: self.driver_name.clone(),
            method_name: method_name.to_owned(),
            grpc_status_code: code::go_name(code),
        };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}
