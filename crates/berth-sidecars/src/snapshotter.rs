//! Takes and deletes snapshots on the storage system, as their contents ask.
//!
//! Reads: VolumeSnapshotContent, VolumeSnapshotClass, VolumeGroupSnapshotContent, VolumeGroupSnapshotClass,
//! PersistentVolume; Secret one at a time. Writes: contents' status, finalizer and `…-being-created` annotation,
//! and the label of their node where each node has a snapshotter.
//! Events on contents: `SnapshotCreationFailed`, `SnapshotContentCheckandUpdateFailed`, `SnapshotDeleteError`, and the
//! same of groups: `GroupSnapshotCreationFailed`, … The first two are recorded on the VolumeSnapshot, too, where people look,
//! and so is how far a snapshot is that is not ready (`SnapshotProgress`), if the driver reports it beside its answer.
//!
//! Before CreateSnapshot a content gets the annotation `being-created` and its finalizer in the same write; the annotation stays
//! until the driver has finally answered and the answer is saved, and a content with it is not released. So whoever finds the
//! annotation repeats the call, which by its name gives the same snapshot, and no snapshot is left that no content knows.
//!
//! A snapshot that is taken but not ready is no failure: it is asked for again after pauses that grow with its age.

mod adopt;
mod contents;
mod groups;
mod plan;
mod poll;
mod taken;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use berth_kube::{Backoff, Cache, Cluster, Index, Recorder, storage};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, SecretReference};
use kube::ResourceExt as _;

use crate::driver::{ControllerCapability, Driver, GroupCapability};
use crate::failure::Failure;
use crate::secrets;
use crate::snapshots::{VolumeGroupSnapshotContent, VolumeSnapshotContent, names, served};

/// How a snapshotter works; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many contents are worked on at a time.
    pub workers: usize,
    /// When a failed item is tried again.
    pub retry: Backoff,
    /// How soon a snapshot that is not ready is asked for again, at least and at most.
    pub poll: (Duration, Duration),
    /// What snapshots' names begin with.
    pub snapshot_name_prefix: String,
    /// How much of the VolumeSnapshot's UID, without dashes, follows; all of it as it is if `None`.
    pub snapshot_name_uuid_length: Option<usize>,
    /// What groups' names begin with.
    pub group_snapshot_name_prefix: String,
    /// How much of the VolumeGroupSnapshot's UID, without dashes, follows; all of it as it is if `None`.
    pub group_snapshot_name_uuid_length: Option<usize>,
    /// The objects' names are given to the driver as parameters.
    pub extra_create_metadata: bool,
    /// Act only on the contents that are labelled with this node, and label those of snapshots and groups that somebody
    /// made by hand if the driver has them here.
    pub node: Option<String>,
    /// How often a cluster without the CustomResourceDefinitions is asked for them again.
    pub kinds: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_mins(1),
            workers: 10,
            retry: Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(5) },
            poll: (Duration::from_secs(1), Duration::from_mins(1)),
            snapshot_name_prefix: "snapshot".to_owned(),
            snapshot_name_uuid_length: None,
            group_snapshot_name_prefix: "groupsnapshot".to_owned(),
            group_snapshot_name_uuid_length: None,
            extra_create_metadata: false,
            node: None,
            kinds: Duration::from_secs(30),
        }
    }
}

const COMPONENT: &str = "snapshotter";

/// Takes and deletes snapshots until the cluster's shutdown, then finishes what is under way. Returns at once if the
/// driver takes no snapshots.
pub async fn run(cluster: Cluster, driver: Driver, options: Options) {
    let identity = tokio::select! {
        () = cluster.shutdown().cancelled() => return,
        identity = driver.ready() => identity,
    };
    if !identity.can(ControllerCapability::CreateDeleteSnapshot) {
        tracing::info!(driver = identity.name, "the driver takes no snapshots (CREATE_DELETE_SNAPSHOT)");
        return;
    }
    let takes_groups = identity.group.contains(&GroupCapability::CreateDeleteGetVolumeGroupSnapshot);
    let context = Arc::new(Context::new(&cluster, driver, &identity.name, options));
    let pause = context.options.kinds;
    let snapshots = async {
        if served::wait(&cluster, served::SNAPSHOTS, COMPONENT, pause).await {
            let contents = match &context.options.node {
                None => cluster.cache::<VolumeSnapshotContent>(),
                Some(node) => cluster.cache_labelled(&format!("{}={node}", names::MANAGED_BY)),
            };
            worker::run(context.clone(), contents).await;
        }
    };
    let unlabelled = async {
        if let Some(node) = context.options.node.clone()
            && served::wait(&cluster, served::SNAPSHOTS, COMPONENT, pause).await
        {
            adopt::run::<VolumeSnapshotContent>(context.clone(), node).await;
        }
    };
    let groups = async {
        if takes_groups && served::wait(&cluster, served::GROUPS, COMPONENT, pause).await {
            let contents = match &context.options.node {
                None => cluster.cache::<VolumeGroupSnapshotContent>(),
                Some(node) => cluster.cache_labelled(&format!("{}={node}", names::MANAGED_BY)),
            };
            worker::run(context.clone(), contents).await;
        }
    };
    let unlabelled_groups = async {
        if let Some(node) = context.options.node.clone()
            && takes_groups
            && served::wait(&cluster, served::GROUPS, COMPONENT, pause).await
        {
            adopt::run::<VolumeGroupSnapshotContent>(context.clone(), node).await;
        }
    };
    tokio::join!(snapshots, unlabelled, groups, unlabelled_groups);
}

/// What contents and groups of them share.
struct Context {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this snapshotter was started for.
    name: String,
    options: Options,
    recorder: Recorder,
    volumes: Cache<PersistentVolume>,
    /// The driver's volumes by its ids of them.
    by_handle: Index<PersistentVolume, String>,
}

impl Context {
    fn new(cluster: &Cluster, driver: Driver, name: &str, options: Options) -> Self {
        let volumes = cluster.cache::<PersistentVolume>();
        Self {
            recorder: Recorder::new(cluster, &format!("csi-snapshotter {name}"), ""),
            cluster: cluster.named("csi-snapshotter"),
            driver,
            name: name.to_owned(),
            options,
            by_handle: storage::volumes_by_handle(&volumes, name),
            volumes,
        }
    }

    /// The PersistentVolume of a handle, under whose name all components hold a volume.
    fn volume_of(&self, handle: &str) -> Option<String> {
        self.by_handle.get(handle).first().map(|volume| volume.name_any())
    }

    /// What the secret that a content's annotations name holds.
    async fn secrets(&self, secret: Option<&SecretReference>) -> Result<BTreeMap<String, String>, Failure> {
        secrets::read(&self.cluster, secret).await
    }

    /// The same for a deletion, which a secret that is gone must not keep for ever: the driver may not need it.
    async fn secrets_to_delete(
        &self,
        content: &str,
        secret: Option<&SecretReference>,
    ) -> Result<BTreeMap<String, String>, Failure> {
        match secrets::read(&self.cluster, secret).await {
            Err(Failure::Refused(why)) => {
                tracing::warn!(content, why, "deleting the snapshot without its secret");
                Ok(BTreeMap::new())
            }
            secrets => secrets,
        }
    }
}

/// The name that the driver is given, from a prefix and the UID of the object that a content belongs to.
fn csi_name(prefix: &str, length: Option<usize>, uid: &str) -> Result<String, Failure> {
    crate::name_from_uid(prefix, length, uid).ok_or_else(|| {
        Failure::refused(
            "a snapshot's name needs a prefix (--snapshot-name-prefix) and the UID in its content's reference, which is \
             missing: create contents of volumes by VolumeSnapshots, not by hand",
        )
    })
}

/// What the driver gets besides the request itself: the class's parameters that are its own, and, if it is to have them,
/// the names of the content and of the object that the content belongs to. `kind` is what these names are filed under.
fn parameters(
    class: Option<&BTreeMap<String, String>>,
    options: &Options,
    kind: &str,
    owner: &ObjectReference,
    content: String,
) -> Result<BTreeMap<String, String>, Failure> {
    let mut parameters = secrets::snapshot_parameters(class.unwrap_or(&BTreeMap::new()))?;
    if options.extra_create_metadata {
        for (key, value) in [
            (format!("{kind}/name"), owner.name.clone().unwrap_or_default()),
            (format!("{kind}/namespace"), owner.namespace.clone().unwrap_or_default()),
            (format!("{kind}content/name"), content),
        ] {
            parameters.insert(format!("{KUBERNETES_PARAMETER_PREFIX}{key}"), value);
        }
    }
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_by_prefix_and_uid() {
        for (prefix, length, uid, expected) in [
            ("snapshot", None, "12-34", Some("snapshot-12-34")),
            ("snapshot", Some(3), "12-34", Some("snapshot-123")),
            ("snapshot", Some(99), "12-34", Some("snapshot-1234")),
            ("", None, "12-34", None),
            ("snapshot", None, "", None),
        ] {
            assert_eq!(csi_name(prefix, length, uid).ok().as_deref(), expected, "{prefix} {length:?} {uid}");
        }
    }
}
