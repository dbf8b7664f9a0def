//! How a provisioner works.

use std::time::Duration;

use berth_kube::Backoff;

use super::{Capacity, Metrics, PerNode};

/// How a provisioner works; the defaults are upstream's.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many claims, and how many volumes, are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// Claim and volume names are given to the driver as parameters, and what its class asks of the claim's labels and
    /// annotations.
    pub extra_create_metadata: bool,
    /// The filesystem of classes that name none.
    pub default_fs_type: String,
    /// A volume must be reachable from the selected node's own topology segment, not just from one like it.
    pub strict_topology: bool,
    /// Without a selected node, CreateVolume names the topology segments that there are in the cluster.
    pub immediate_topology: bool,
    /// What volumes' names begin with.
    pub volume_name_prefix: String,
    /// How much of the claim's UID, without dashes, follows; all of it as it is if `None`.
    pub volume_name_uuid_length: Option<usize>,
    /// A volume with the sole access mode ReadOnlyMany is published read-only.
    pub controller_publish_readonly: bool,
    /// A restore may not change the volume mode unless the content allows it.
    pub prevent_volume_mode_conversion: bool,
    /// Sources may be in other namespaces, if these grant it (the gate CrossNamespaceVolumeDataSource).
    pub cross_namespace_sources: bool,
    /// Whether and how capacity is published for the scheduler.
    pub capacity: Option<Capacity>,
    /// The node, if every node has a provisioner of its own.
    pub per_node: Option<PerNode>,
    /// The counters of volumes that were created and deleted.
    pub metrics: Metrics,
    /// This process among its replicas, in events: a host or pod name.
    pub instance: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            workers: 100,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            extra_create_metadata: false,
            default_fs_type: String::new(),
            strict_topology: false,
            immediate_topology: true,
            volume_name_prefix: "pvc".to_owned(),
            volume_name_uuid_length: None,
            controller_publish_readonly: false,
            prevent_volume_mode_conversion: true,
            cross_namespace_sources: false,
            capacity: None,
            per_node: None,
            metrics: Metrics::default(),
            instance: "berth".to_owned(),
        }
    }
}
