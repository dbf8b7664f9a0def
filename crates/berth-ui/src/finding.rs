//! What is wrong with an object, and what to do about it.

use std::fmt;

use kube::{Resource, ResourceExt};
use serde::Serialize;

/// One thing that is wrong, or worth knowing, about one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of trouble it is, from a closed set.
    pub trouble: Trouble,
    /// The object that is in trouble.
    pub object: ObjectName,
    /// What was seen, one fact per sentence.
    pub evidence: Vec<String>,
    /// Why it is so, in one sentence.
    pub cause: String,
    /// What a person is to do.
    pub what_to_do: String,
    /// A command that does it, or shows more; without a cluster or kubeconfig.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// What `berth doctor --fix` does about it; only what is provably safe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<Fix>,
}

/// How bad a finding is; the worst is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nobody has to do anything.
    Note,
    /// Nothing fails yet, or what fails is not used yet: a person should look at it.
    Warning,
    /// Somebody cannot use storage that they asked for: a person has to act.
    Error,
}

impl Severity {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// Whether a person has to do something.
    pub fn needs_a_person(self) -> bool {
        self > Self::Note
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// An object, as people name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ObjectName {
    /// The kind, such as `PersistentVolumeClaim`.
    pub kind: String,
    /// The namespace; empty for kinds that have none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The name within kind and namespace.
    pub name: String,
}

impl ObjectName {
    /// The name of an object.
    pub fn of<K: Resource<DynamicType = ()>>(object: &K) -> Self {
        Self {
            kind: K::kind(&()).into_owned(),
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        }
    }

    /// As kubectl takes it: `pvc/data -n shop`.
    pub fn argument(&self) -> String {
        let kind = match self.kind.as_str() {
            "PersistentVolumeClaim" => "pvc".to_owned(),
            "PersistentVolume" => "pv".to_owned(),
            "StorageClass" => "sc".to_owned(),
            other => other.to_lowercase(),
        };
        if self.namespace.is_empty() {
            format!("{kind}/{}", self.name)
        } else {
            format!("{kind}/{} -n {}", self.name, self.namespace)
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// A repair that loses nothing, whatever else happens at the same time; made by [`crate::fix::apply`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum Fix {
    /// Take a finalizer off an object that is being deleted, where the condition that it waits for is met.
    RemoveFinalizer {
        /// The finalizer that goes.
        finalizer: String,
    },
    /// Delete an object that stands for nothing.
    Delete,
}

macro_rules! troubles {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// The kinds of trouble that are told apart: a closed set, so its words can be labels of metrics.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        pub enum Trouble {
            $($(#[$doc])* #[serde(rename = $code)] $name,)*
        }

        impl Trouble {
            /// All kinds of trouble, in order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The word for it in JSON and in metrics.
            pub fn code(self) -> &'static str {
                match self {
                    $(Self::$name => $code,)*
                }
            }
        }
    };
}

troubles! {
    /// A claim names a class that does not exist.
    ClassMissing = "class-missing",
    /// A claim names no class, none is the default, and no volume fits.
    NoClass = "no-class",
    /// A claim is made without a class, and no volume fits it.
    NoVolumeFits = "no-volume-fits",
    /// A claim names a volume that does not exist or belongs to another claim.
    NamedVolumeUnusable = "named-volume-unusable",
    /// No provisioner has taken up a claim.
    NoProvisioner = "no-provisioner",
    /// The driver does not create the volume of a claim.
    ProvisioningFailed = "provisioning-failed",
    /// A provisioner has taken up a claim, and says nothing since.
    ProvisioningSilent = "provisioning-silent",
    /// The snapshot or claim that a claim is to be filled from does not exist or is not ready.
    DataSourceUnusable = "data-source-unusable",
    /// The volume of a claim is gone.
    ClaimLost = "claim-lost",
    /// A claim is being deleted while pods use it.
    ClaimInUse = "claim-in-use",
    /// A claim is being deleted and has a finalizer that nobody removes.
    ClaimFinalizer = "claim-finalizer",
    /// A volume could not be made larger.
    ResizeFailed = "resize-failed",
    /// A volume has grown and its filesystem waits for a node.
    ResizeWaitsForNode = "resize-waits-for-node",
    /// Nobody makes a volume larger as its claim asks.
    NoResizer = "no-resizer",
    /// The VolumeAttributesClass of a claim does not exist or was refused.
    ModifyFailed = "modify-failed",
    /// No pod uses a claim.
    ClaimUnused = "claim-unused",

    /// A pod names a claim that does not exist.
    PodClaimMissing = "pod-claim-missing",
    /// A pod's ephemeral volume has the name of somebody else's claim.
    PodClaimForeign = "pod-claim-foreign",
    /// No node can take a pod because of its volumes.
    PodUnschedulable = "pod-unschedulable",
    /// A volume that one node at a time may use is held by another node.
    MultiAttach = "multi-attach",
    /// A volume cannot be attached for a pod.
    AttachFailed = "attach-failed",
    /// A volume cannot be mounted for a pod.
    MountFailed = "mount-failed",
    /// A pod waits on a node where its driver is not registered.
    DriverNotOnNode = "driver-not-on-node",
    /// A pod is being deleted on a node that is gone or not ready, and keeps its volumes.
    PodStuckOnNode = "pod-stuck-on-node",

    /// A volume is released and kept: nobody reclaims it.
    VolumeReleased = "volume-released",
    /// A volume cannot be deleted.
    VolumeDeleteFailed = "volume-delete-failed",
    /// A released volume is to be deleted and nobody does.
    VolumeNotDeleted = "volume-not-deleted",
    /// A volume is being deleted while it is bound or attached.
    VolumeInUse = "volume-in-use",
    /// A volume is being deleted and has a finalizer that nobody removes.
    VolumeFinalizer = "volume-finalizer",
    /// A volume can be reached only from nodes that do not exist.
    VolumeNodeGone = "volume-node-gone",
    /// Two volumes are the same storage.
    VolumeTwice = "volume-twice",
    /// A volume is nearly full.
    VolumeFull = "volume-full",

    /// An attachment to a node that does not exist.
    AttachmentNodeGone = "attachment-node-gone",
    /// An attachment of a volume that does not exist.
    AttachmentVolumeGone = "attachment-volume-gone",
    /// The driver does not attach a volume.
    AttachmentFailed = "attachment-failed",
    /// The driver does not detach a volume.
    DetachmentFailed = "detachment-failed",
    /// No attacher has taken up an attachment.
    NoAttacher = "no-attacher",

    /// The claim or content of a snapshot does not exist.
    SnapshotSourceMissing = "snapshot-source-missing",
    /// The class of a snapshot does not exist, or there is no default for its driver.
    SnapshotClassMissing = "snapshot-class-missing",
    /// A snapshot could not be taken.
    SnapshotFailed = "snapshot-failed",
    /// No snapshot controller or snapshotter has taken up a snapshot.
    NoSnapshotter = "no-snapshotter",
    /// A snapshot is being deleted and something keeps it.
    SnapshotFinalizer = "snapshot-finalizer",
    /// A snapshot on the storage that no VolumeSnapshot stands for.
    SnapshotLeaked = "snapshot-leaked",

    /// A driver that classes or volumes name is registered on no node.
    DriverAway = "driver-away",
    /// A driver is registered on too few nodes.
    DriverOnTooFewNodes = "driver-on-too-few-nodes",
    /// A driver's own pod fails again and again.
    DriverPodFailing = "driver-pod-failing",
    /// Copies of a sidecar, or sidecars that belong together, have different versions.
    SidecarSkew = "sidecar-skew",
    /// Several classes are the default.
    SeveralDefaultClasses = "several-default-classes",
    /// A node that has volumes attached is not ready.
    NodeNotReady = "node-not-ready",
    /// A node has as many volumes as its driver allows.
    NodeVolumeLimit = "node-volume-limit",
    /// A driver's capacity is published for a class that does not exist.
    CapacityStale = "capacity-stale",
    /// The scheduler is told to look at a driver's capacity, and none is published.
    CapacityMissing = "capacity-missing",
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.code())
    }
}

impl Finding {
    /// A finding without evidence or a command yet.
    pub(crate) fn new(
        severity: Severity,
        trouble: Trouble,
        object: ObjectName,
        cause: impl Into<String>,
    ) -> Self {
        Self {
            severity,
            trouble,
            object,
            evidence: Vec::new(),
            cause: cause.into(),
            what_to_do: String::new(),
            command: None,
            fix: None,
        }
    }

    pub(crate) fn evidence(mut self, facts: impl IntoIterator<Item = String>) -> Self {
        self.evidence.extend(facts.into_iter().filter(|fact| !fact.is_empty()));
        self
    }

    pub(crate) fn advise(mut self, what_to_do: impl Into<String>) -> Self {
        self.what_to_do = what_to_do.into();
        self
    }

    pub(crate) fn command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }

    pub(crate) fn safe(mut self, fix: Fix) -> Self {
        self.fix = Some(fix);
        self
    }
}
