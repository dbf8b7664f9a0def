//! What Prometheus sees of the calls to the driver: the histogram that every upstream component has.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tonic::Code;

/// Upstream's, so that dashboards fit.
const SECONDS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// How long calls took, by driver, method and code.
pub(super) struct Metrics {
    operations: Family<Labels, Histogram, fn() -> Histogram>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    driver_name: String,
    method_name: String,
    grpc_status_code: &'static str,
}

impl Metrics {
    /// Adds `csi_sidecar_operations_seconds` to the registry.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let operations: Family<Labels, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        registry.register(
            "csi_sidecar_operations_seconds",
            "Duration of calls to the CSI driver, by method and status code",
            operations.clone(),
        );
        Self { operations }
    }

    /// Counts a call by the type of its request, which is named after it.
    pub(super) fn observe<Q>(&self, driver: Option<&str>, code: Code, took: Duration) {
        let labels = Labels {
            driver_name: driver.unwrap_or("unknown-driver").to_owned(),
            method_name: method_of::<Q>(),
            grpc_status_code: berth_csi::code::go_name(code),
        };
        self.operations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

fn method_of<Q>() -> String {
    let message = std::any::type_name::<Q>().rsplit("::").next().unwrap_or_default();
    let method = message.strip_suffix("Request").unwrap_or(message);
    let service = match method {
        "Probe" | "GetPluginInfo" | "GetPluginCapabilities" => "Identity",
        _ if method.starts_with("Node") => "Node",
        _ if method.contains("VolumeGroupSnapshot") || method.starts_with("GroupController") => {
            "GroupController"
        }
        _ => "Controller",
    };
    format!("/csi.v1.{service}/{method}")
}

#[cfg(test)]
mod tests {
    use berth_csi::v1;

    use super::*;

    #[test]
    fn a_call_is_counted_under_its_method_and_code() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let quick = Duration::from_millis(200);
        metrics.observe::<v1::CreateVolumeRequest>(Some("local.berth.dev"), Code::Ok, quick);
        let slow = Duration::from_secs(7);
        metrics.observe::<v1::CreateVolumeGroupSnapshotRequest>(Some("x"), Code::NotFound, slow);
        metrics.observe::<v1::ProbeRequest>(None, Code::Ok, quick);
        metrics.observe::<v1::NodeGetCapabilitiesRequest>(Some("x"), Code::Unimplemented, quick);
        metrics.observe::<v1::GroupControllerGetCapabilitiesRequest>(Some("x"), Code::Ok, quick);
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
