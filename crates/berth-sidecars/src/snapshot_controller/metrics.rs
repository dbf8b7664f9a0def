//! What Prometheus sees of snapshots: upstream's metrics of how long operations take, so that dashboards fit.
//!
//! An operation begins and ends with changes of the object in the cache, so no other code has to count it.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upstream's, so that dashboards fit.
const SECONDS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// The metrics of a snapshot controller; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    operations: Family<Labels, Histogram, fn() -> Histogram>,
    in_flight: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    driver_name: String,
    operation_name: &'static str,
    snapshot_type: &'static str,
    operation_status: &'static str,
}

impl Default for Metrics {
    /// Metrics that nobody reads.
    fn default() -> Self {
        let operations: Family<Labels, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        Self { operations, in_flight: Gauge::default() }
    }
}

impl Metrics {
    /// Adds `snapshot_controller_operation_total_seconds` and `…_operations_in_flight` to the registry.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "snapshot_controller_operation_total_seconds",
            "How long operations on snapshots and groups of them take",
            metrics.operations.clone(),
        );
        registry.register(
            "snapshot_controller_operations_in_flight",
            "Operations on snapshots and groups of them under way",
            metrics.in_flight.clone(),
        );
        metrics
    }
}

/// What an object goes through, as the metrics call it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    create: &'static str,
    ready: &'static str,
    delete: &'static str,
}

/// What snapshots go through.
pub(super) const SNAPSHOT: Names =
    Names { create: "CreateSnapshot", ready: "CreateSnapshotAndReady", delete: "DeleteSnapshot" };
/// What groups go through.
pub(super) const GROUP: Names = Names {
    create: "CreateGroupSnapshot",
    ready: "CreateGroupSnapshotAndReady",
    delete: "DeleteGroupSnapshot",
};

/// What matters of an object.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "the columns of a table")]
pub(super) struct ObservedObject {
    pub(super) uid: String,
    pub(super) driver: Option<String>,
    /// Its content was there before it.
    pub(super) given: bool,
    pub(super) taken: bool,
    pub(super) ready: bool,
    pub(super) deleting: bool,
}

/// The operations on objects of one kind that are under way.
#[derive(Debug)]
pub(super) struct Operations {
    metrics: Metrics,
    names: Names,
    begun: Mutex<HashMap<(&'static str, String), Begun>>,
}

#[derive(Debug)]
struct Begun {
    at: Instant,
    driver: Option<String>,
}

impl Operations {
    pub(super) fn new(metrics: &Metrics, names: Names) -> Self {
        Self { metrics: metrics.clone(), names, begun: Mutex::default() }
    }

    /// An object is like this now.
    pub(super) fn observe(&self, observed: &ObservedObject) {
        if observed.deleting {
            self.begin(self.names.delete, observed);
            return;
        }
        for (name, reached) in [(self.names.create, observed.taken), (self.names.ready, observed.ready)] {
            if reached {
                self.end(name, observed, "success");
            } else {
                self.begin(name, observed);
            }
        }
    }

    /// An object that was like this is gone.
    pub(super) fn gone(&self, observed: &ObservedObject) {
        self.end(self.names.delete, observed, "success");
        for unfinished in [self.names.create, self.names.ready] {
            self.end(unfinished, observed, "cancel");
        }
    }

    fn begin(&self, name: &'static str, observed: &ObservedObject) {
        let mut begun = self.begun();
        let begun = begun.entry((name, observed.uid.clone())).or_insert_with(|| {
            self.metrics.in_flight.inc();
            Begun { at: Instant::now(), driver: None }
        });
        if observed.driver.is_some() {
            begun.driver.clone_from(&observed.driver);
        }
    }

    fn end(&self, name: &'static str, observed: &ObservedObject, status: &'static str) {
        let Some(begun) = self.begun().remove(&(name, observed.uid.clone())) else { return };
        self.metrics.in_flight.dec();
        let labels = Labels {
            driver_name: observed.driver.clone().or(begun.driver).unwrap_or_else(|| "unknown".to_owned()),
            operation_name: name,
            snapshot_type: if observed.given { "pre-provisioned" } else { "dynamic" },
            operation_status: status,
        };
        self.metrics.operations.get_or_create(&labels).observe(begun.at.elapsed().as_secs_f64());
    }

    fn begun(&self) -> MutexGuard<'_, HashMap<(&'static str, String), Begun>> {
        self.begun.lock()
    }
}

impl Drop for Operations {
    fn drop(&mut self) {
        self.metrics.in_flight.dec_by(i64::try_from(self.begun().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh(uid: &str) -> ObservedObject {
        let uid = uid.to_owned();
        ObservedObject { uid, driver: None, given: false, taken: false, ready: false, deleting: false }
    }

    #[test]
    fn an_operation_is_counted_from_the_first_sight_to_the_end() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let exposed = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let counted = |driver: &str, operation: &str, status: &str| {
            let line = format!(
                "snapshot_controller_operation_total_seconds_count{{driver_name=\"{driver}\",\
                 operation_name=\"{operation}\",snapshot_type=\"dynamic\",operation_status=\"{status}\"}} 1"
            );
            assert!(exposed().contains(&line), "{line} is not in\n{}", exposed());
        };
        let in_flight = |count: i64| {
            let line = format!("snapshot_controller_operations_in_flight {count}\n");
            assert!(exposed().contains(&line), "{line} is not in\n{}", exposed());
        };
        let operations = Operations::new(&metrics, SNAPSHOT);
        operations.observe(&fresh("a"));
        operations.observe(&fresh("a"));
        in_flight(2);
        let taken = ObservedObject { driver: Some("d".to_owned()), taken: true, ..fresh("a") };
        operations.observe(&taken);
        counted("d", "CreateSnapshot", "success");
        operations.observe(&ObservedObject { ready: true, ..taken.clone() });
        counted("d", "CreateSnapshotAndReady", "success");
        in_flight(0);
        operations.observe(&ObservedObject { ready: true, deleting: true, ..taken.clone() });
        // Its content, which knows the driver, goes before it.
        operations.gone(&ObservedObject { driver: None, ..taken });
        counted("d", "DeleteSnapshot", "success");

        operations.observe(&fresh("b"));
        operations.observe(&ObservedObject { deleting: true, ..fresh("b") });
        operations.gone(&fresh("b"));
        counted("unknown", "CreateSnapshot", "cancel");
        counted("unknown", "CreateSnapshotAndReady", "cancel");
        in_flight(0);
        let groups = Operations::new(&metrics, GROUP);
        groups.observe(&ObservedObject { ready: true, taken: true, ..fresh("c") });
        in_flight(0);
        groups.observe(&fresh("d"));
        in_flight(2);
        drop(groups);
        in_flight(0);
    }
}
