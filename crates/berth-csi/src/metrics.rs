//! What Prometheus sees of the calls: the histogram every CSI driver has, and how many calls are under way; and the
//! histogram that every component beside a driver has.

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

/// The buckets of other components beside drivers.
const CLIENT_SECONDS: [f64; 13] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

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

    pub(crate) fn driver_name(&self) -> &str {
        &self.driver_name
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

/// How long the calls of clients took, by driver, method and code; clones share it.
#[derive(Clone, Debug)]
pub struct ClientMetrics {
    operations: Family<OperationLabels, Histogram, fn() -> Histogram>,
}

impl Default for ClientMetrics {
    fn default() -> Self {
        Self { operations: Family::new_with_constructor(|| Histogram::new(CLIENT_SECONDS)) }
    }
}

impl ClientMetrics {
    /// Adds them to the registry, under the name that they have upstream: `csi_sidecar_operations_seconds` of a sidecar,
    /// `csi_operations_seconds` of the kubelet.
    pub fn register(&self, registry: &mut Registry, name: &'static str) {
        let help = "Duration of calls to the CSI driver, by method and status code";
        registry.register(name, help, self.operations.clone());
    }

    pub(crate) fn observe(&self, driver: Option<&str>, method: &str, code: Code, took: Duration) {
        let labels = OperationLabels {
            driver_name: driver.unwrap_or("unknown-driver").into(),
            method_name: method.to_owned(),
            grpc_status_code: code::go_name(code),
        };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, v1};

    #[test]
    fn a_call_is_counted_under_its_method_and_code() {
        let mut registry = Registry::default();
        let metrics = ClientMetrics::default();
        metrics.register(&mut registry, "csi_sidecar_operations_seconds");
        let quick = Duration::from_millis(200);
        metrics.observe(Some("local.berth.dev"), v1::CreateVolumeRequest::METHOD, Code::Ok, quick);
        let slow = Duration::from_secs(7);
        metrics.observe(Some("x"), v1::CreateVolumeGroupSnapshotRequest::METHOD, Code::NotFound, slow);
        metrics.observe(None, v1::ProbeRequest::METHOD, Code::Ok, quick);
        metrics.observe(Some("x"), v1::NodeGetCapabilitiesRequest::METHOD, Code::Unimplemented, quick);
        metrics.observe(Some("x"), v1::GroupControllerGetCapabilitiesRequest::METHOD, Code::Ok, quick);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "csi_sidecar_operations_seconds_bucket{le=\"0.25\",driver_name=\"local.berth.dev\",\
             method_name=\"/csi.v1.Controller/CreateVolume\",grpc_status_code=\"OK\"} 1",
            "csi_sidecar_operations_seconds_count{driver_name=\"x\",\
             method_name=\"/csi.v1.GroupController/CreateVolumeGroupSnapshot\",grpc_status_code=\"NotFound\"} 1",
            "driver_name=\"unknown-driver\",method_name=\"/csi.v1.Identity/Probe\"",
            "method_name=\"/csi.v1.Node/NodeGetCapabilities\",grpc_status_code=\"Unimplemented\"",
            "method_name=\"/csi.v1.GroupController/GroupControllerGetCapabilities\"",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
