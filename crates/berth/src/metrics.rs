//! What Prometheus sees of `berth up`: the metrics of all its parts in one answer, under upstream's names where upstream has them.
//!
//! Parts register with registries of their own, because two drivers have the same metrics; [`Telemetry::text`] puts their texts
//! together, each name once. What is counted from objects ([`objects`]) is counted when somebody asks. What has to be asked of
//! drivers or concluded from the whole cluster ([`sampled`]) is as old as [`sampled::FRESH`] at most, and is not renewed while nobody asks.

mod objects;
mod sampled;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;

use berth_kube::Cluster;
use berth_node::UsageReader;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::http::Process;
use crate::timeline::Step;

/// How the text is to be read.
const END: &str = "# EOF\n";

/// The metrics of one `berth up`; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Telemetry {
    parts: Arc<Mutex<Vec<Part>>>,
    /// How full the volumes of each node are.
    usage: Usages,
}

/// The readers of the nodes that are on, by name.
type Usages = Arc<Mutex<BTreeMap<String, UsageReader>>>;

struct Part {
    /// The node that it goes with.
    node: Option<String>,
    registry: Registry,
}

impl Telemetry {
    /// Shows one more part.
    pub(crate) fn add(&self, registry: Registry) {
        self.parts.lock().push(Part { node: None, registry });
    }

    /// Shows one more part, until the node is forgotten.
    pub(crate) fn add_of_node(&self, node: &str, registry: Registry) {
        self.parts.lock().push(Part { node: Some(node.to_owned()), registry });
    }

    /// Shows what the volumes of a node hold, until the node is forgotten.
    pub(crate) fn node_started(&self, node: &str, usage: UsageReader) {
        self.usage.lock().insert(node.to_owned(), usage);
    }

    /// Shows nothing more of a node that is off.
    pub(crate) fn forget_node(&self, node: &str) {
        self.parts.lock().retain(|part| part.node.as_deref() != Some(node));
        self.usage.lock().remove(node);
    }

    /// Shows what the cluster's objects say, what its volumes hold, and this process.
    pub(crate) fn observe(&self, cluster: &Cluster, operations: &Operations) {
        let mut registry = Registry::default();
        operations.register(&mut registry);
        registry.register_collector(Box::new(objects::Objects::new(cluster)));
        registry.register_collector(Box::new(sampled::Sampled::new(cluster, self.usage.clone())));
        registry.register_collector(Box::new(Process));
        self.add(registry);
    }

    /// All metrics, as OpenMetrics has it.
    pub(crate) fn text(&self) -> String {
        let mut texts = Vec::new();
        for part in self.parts.lock().iter() {
            let mut text = String::new();
            // Writing to memory does not fail.
            let _ = encode(&mut text, &part.registry);
            texts.push(text);
        }
        merged(&texts)
    }
}

/// One text of several: a metric that stands in more than one gets its description once, and all samples behind it.
fn merged(texts: &[String]) -> String {
    let mut order: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for text in texts {
        let text = text.strip_suffix(END).unwrap_or(text);
        let mut rest = text;
        while let Some(start) = rest.strip_prefix("# HELP ") {
            let name = start.split([' ', '\n']).next().unwrap_or_default();
            let end = start.find("\n# HELP ").map_or(start.len(), |at| at + 1);
            let block = &rest[.."# HELP ".len() + end];
            if let Some(&at) = known.get(name) {
                order[at].1.push(block);
            } else {
                known.insert(name, order.len());
                order.push((block, Vec::new()));
            }
            rest = &rest[block.len()..];
        }
    }
    let mut merged = String::with_capacity(texts.iter().map(String::len).sum());
    for (block, more) in order {
        merged.push_str(block);
        for block in more {
            // The description is in lines that begin with "# ".
            for line in block.lines().filter(|line| !line.starts_with("# ")) {
                // Writing to memory does not fail.
                let _ = writeln!(merged, "{line}");
            }
        }
    }
    merged.push_str(END);
    merged
}

/// What operations on volumes take: the histogram of the kubelet and of kube-controller-manager; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    seconds: Family<OperationLabels, Histogram, fn() -> Histogram>,
    scheduled: Family<AttemptLabels, Histogram, fn() -> Histogram>,
    attempts: Family<AttemptLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    volume_plugin: &'static str,
    operation_name: &'static str,
    status: &'static str,
    migrated: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AttemptLabels {
    result: &'static str,
    profile: &'static str,
}

impl Default for Operations {
    fn default() -> Self {
        let seconds = || {
            Histogram::new([0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0])
        };
        let attempts = || {
            Histogram::new([
                0.0001, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0,
            ])
        };
        Self {
            seconds: Family::new_with_constructor(seconds),
            scheduled: Family::new_with_constructor(attempts),
            attempts: Family::default(),
        }
    }
}

impl Operations {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "storage_operation_duration_seconds",
            "How long operations on volumes take",
            self.seconds.clone(),
        );
        registry.register(
            "scheduler_scheduling_attempt_duration_seconds",
            "How long it takes to give a pod a node",
            self.scheduled.clone(),
        );
        registry.register(
            "scheduler_schedule_attempts",
            "Pods that were given a node",
            self.attempts.clone(),
        );
    }

    /// Takes in a step of a volume's timeline.
    pub(crate) fn observe(&self, step: &Step) {
        let seconds = step.duration().as_secs_f64();
        if step.component == "scheduler" {
            // What is tried before a volume is made is the first half of the same attempt.
            if step.call != "bind pod" {
                return;
            }
            let result = if step.error.is_empty() { "scheduled" } else { "error" };
            let labels = AttemptLabels { result, profile: "default-scheduler" };
            self.scheduled.get_or_create(&labels).observe(seconds);
            self.attempts.get_or_create(&labels).inc();
            return;
        }
        let Some(operation_name) = operation(&step.call) else { return };
        let labels = OperationLabels {
            volume_plugin: berth_core::names::CSI_PLUGIN,
            operation_name,
            status: if step.error.is_empty() { "success" } else { "fail-unknown" },
            migrated: "false",
        };
        self.seconds.get_or_create(&labels).observe(seconds);
    }
}

/// Upstream's word for what a call does; `None` for steps that are no operation of storage.
fn operation(call: &str) -> Option<&'static str> {
    Some(match call {
        "CreateVolume" => "provision",
        "DeleteVolume" => "delete",
        "ControllerPublishVolume" => "volume_attach",
        "ControllerUnpublishVolume" => "volume_detach",
        "NodeStageVolume" => "mount_device",
        "NodePublishVolume" => "volume_mount",
        "NodeUnpublishVolume" => "volume_unmount",
        "NodeUnstageVolume" => "unmount_device",
        "ControllerExpandVolume" => "expand_volume",
        "NodeExpandVolume" => "volume_fs_resize",
        "CreateSnapshot" => "snapshot_create",
        "DeleteSnapshot" => "snapshot_delete",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_of_several_parts_is_described_once() {
        let first =
            "# HELP a A.\n# TYPE a gauge\na{x=\"1\"} 1\n# HELP b B.\n# TYPE b counter\nb_total 2\n# EOF\n";
        let second = "# HELP b B.\n# TYPE b counter\nb_total{y=\"# HELP c\"} 3\n# EOF\n";
        let merged = merged(&[first.to_owned(), second.to_owned(), "# EOF\n".to_owned()]);
        assert_eq!(
            merged,
            "# HELP a A.\n# TYPE a gauge\na{x=\"1\"} 1\n# HELP b B.\n# TYPE b counter\nb_total 2\nb_total{y=\"# HELP c\"} 3\n# EOF\n"
        );
    }

    #[test]
    fn steps_are_counted_under_upstreams_words() {
        let operations = Operations::default();
        let step = |component: &str, call: &str, error: &str| Step {
            component: component.to_owned(),
            call: call.to_owned(),
            error: error.to_owned(),
            ..Step::default()
        };
        for step in [
            step("provisioner", "CreateVolume", ""),
            step("attacher", "ControllerPublishVolume", "no"),
            step("scheduler", "schedule", ""),
            step("scheduler", "bind pod", ""),
            step("node", "container c started", ""),
        ] {
            operations.observe(&step);
        }
        let mut registry = Registry::default();
        operations.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "storage_operation_duration_seconds_count{volume_plugin=\"kubernetes.io/csi\",operation_name=\"provision\",status=\"success\",migrated=\"false\"} 1",
            "operation_name=\"volume_attach\",status=\"fail-unknown\"",
            "scheduler_schedule_attempts_total{result=\"scheduled\",profile=\"default-scheduler\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("container"), "{text}");
    }
}
