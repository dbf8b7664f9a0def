//! The kinds of objects that the tests use, and the text in them.

use kube::api::{ApiResource, GroupVersionKind};
use serde_json::Value;

/// A kind of objects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    group: &'static str,
    version: &'static str,
    pub(crate) name: &'static str,
    pub(crate) namespaced: bool,
}

const fn in_namespaces(group: &'static str, version: &'static str, name: &'static str) -> Kind {
    Kind { group, version, name, namespaced: true }
}

const fn in_cluster(group: &'static str, version: &'static str, name: &'static str) -> Kind {
    Kind { group, version, name, namespaced: false }
}

pub(crate) const CLAIM: Kind = in_namespaces("", "v1", "PersistentVolumeClaim");
pub(crate) const EVENT: Kind = in_namespaces("", "v1", "Event");
pub(crate) const NAMESPACE: Kind = in_cluster("", "v1", "Namespace");
pub(crate) const NODE: Kind = in_cluster("", "v1", "Node");
pub(crate) const POD: Kind = in_namespaces("", "v1", "Pod");
pub(crate) const SERVICE_ACCOUNT: Kind = in_namespaces("", "v1", "ServiceAccount");
pub(crate) const VOLUME: Kind = in_cluster("", "v1", "PersistentVolume");

const STORAGE: &str = "storage.k8s.io";
pub(crate) const ATTACHMENT: Kind = in_cluster(STORAGE, "v1", "VolumeAttachment");
pub(crate) const ATTRIBUTES_CLASS: Kind = in_cluster(STORAGE, "v1", "VolumeAttributesClass");
pub(crate) const CAPACITY: Kind = in_namespaces(STORAGE, "v1", "CSIStorageCapacity");
pub(crate) const CLASS: Kind = in_cluster(STORAGE, "v1", "StorageClass");
pub(crate) const CSI_DRIVER: Kind = in_cluster(STORAGE, "v1", "CSIDriver");
pub(crate) const CSI_NODE: Kind = in_cluster(STORAGE, "v1", "CSINode");

const SNAPSHOTS: &str = "snapshot.storage.k8s.io";
pub(crate) const SNAPSHOT: Kind = in_namespaces(SNAPSHOTS, "v1", "VolumeSnapshot");
pub(crate) const SNAPSHOT_CLASS: Kind = in_cluster(SNAPSHOTS, "v1", "VolumeSnapshotClass");
pub(crate) const SNAPSHOT_CONTENT: Kind = in_cluster(SNAPSHOTS, "v1", "VolumeSnapshotContent");

const GROUPS: &str = "groupsnapshot.storage.k8s.io";
pub(crate) const GROUP_SNAPSHOT: Kind = in_namespaces(GROUPS, "v1", "VolumeGroupSnapshot");
pub(crate) const GROUP_SNAPSHOT_CLASS: Kind = in_cluster(GROUPS, "v1", "VolumeGroupSnapshotClass");
pub(crate) const GROUP_SNAPSHOT_CONTENT: Kind = in_cluster(GROUPS, "v1", "VolumeGroupSnapshotContent");

const APPS: &str = "apps";
pub(crate) const DAEMON_SET: Kind = in_namespaces(APPS, "v1", "DaemonSet");
pub(crate) const DEPLOYMENT: Kind = in_namespaces(APPS, "v1", "Deployment");
pub(crate) const REPLICA_SET: Kind = in_namespaces(APPS, "v1", "ReplicaSet");
pub(crate) const REVISION: Kind = in_namespaces(APPS, "v1", "ControllerRevision");
pub(crate) const STATEFUL_SET: Kind = in_namespaces(APPS, "v1", "StatefulSet");

pub(crate) const BUDGET: Kind = in_namespaces("policy", "v1", "PodDisruptionBudget");
pub(crate) const CRON_JOB: Kind = in_namespaces("batch", "v1", "CronJob");
pub(crate) const JOB: Kind = in_namespaces("batch", "v1", "Job");
pub(crate) const PRIORITY_CLASS: Kind = in_cluster("scheduling.k8s.io", "v1", "PriorityClass");

impl Kind {
    /// As the client wants it.
    pub(crate) fn resource(self) -> ApiResource {
        ApiResource::from_gvk(&GroupVersionKind::gvk(self.group, self.version, self.name))
    }

    /// What every object of the kind begins with.
    pub(crate) fn api_version(self) -> String {
        self.resource().api_version
    }
}

/// The text at a path such as `/spec/volumeName`; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}
