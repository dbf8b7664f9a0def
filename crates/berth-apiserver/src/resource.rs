//! What is served: resources, their subresources, and why an object of theirs may be refused.

use std::fmt;
use std::sync::Arc;

/// One served resource: `persistentvolumeclaims` in v1, `storageclasses` in storage.k8s.io/v1, a CRD's version.
#[derive(Clone, Debug)]
pub struct Resource {
    /// The API group, empty for the core group.
    pub group: Arc<str>,
    /// The version within the group.
    pub version: Arc<str>,
    /// The kind of its objects.
    pub kind: Arc<str>,
    /// The kind of its lists.
    pub list_kind: Arc<str>,
    /// The name in paths.
    pub plural: Arc<str>,
    /// The name in the singular.
    pub singular: Arc<str>,
    /// What people type instead of the name.
    pub short_names: Vec<Arc<str>>,
    /// Names for sets of resources: `all`.
    pub categories: Vec<Arc<str>>,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
    /// What can be done below one object's path.
    pub subresources: Vec<Subresource>,
    /// The verbs of the resource itself, as discovery lists them.
    pub verbs: &'static [&'static str],
    /// Whether it is one of Kubernetes' own, and not a custom resource.
    pub built_in: bool,
}

/// A path below one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subresource {
    /// The observed state, written apart from the desired one.
    Status,
    /// The number of replicas.
    Scale,
    /// Assigns a pod to a node.
    Binding,
    /// Removes a pod if that is safe.
    Eviction,
    /// Reads what a container of a pod wrote to its outputs.
    Log,
    /// Runs a command in a container.
    Exec,
    /// Joins a container's process.
    Attach,
    /// Connects to a pod's port.
    PortForward,
    /// Adds containers to a pod that runs.
    EphemeralContainers,
    /// Issues a service account's token.
    Token,
    /// Takes a namespace's own finalizers away.
    Finalize,
}

impl Subresource {
    /// Its name in paths.
    pub fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Scale => "scale",
            Self::Binding => "binding",
            Self::Eviction => "eviction",
            Self::Log => "log",
            Self::Exec => "exec",
            Self::Attach => "attach",
            Self::PortForward => "portforward",
            Self::EphemeralContainers => "ephemeralcontainers",
            Self::Token => "token",
            Self::Finalize => "finalize",
        }
    }
}

impl Resource {
    /// The `apiVersion` of its objects: `v1` or `storage.k8s.io/v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_string()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The name with its group, as messages and the store spell it: `storageclasses.storage.k8s.io`.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_string()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// The subresource of that name, if it has one.
    pub fn subresource(&self, name: &str) -> Option<Subresource> {
        self.subresources.iter().copied().find(|subresource| subresource.name() == name)
    }
}

/// One reason why an object is invalid, as it stands in `Status.details.causes` and, joined, in the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The class of the reason.
    pub reason: CauseReason,
    /// The text without the field: `Invalid value: "x": must be …`.
    pub message: String,
    /// The field's path: `spec.accessModes[0]`.
    pub field: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// The class of a [`Cause`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CauseReason {
    /// The value is not allowed there.
    Invalid,
    /// A value has to be there.
    Required,
    /// No value may be there.
    Forbidden,
    /// Another item has the value already.
    Duplicate,
    /// The value is none of the known ones.
    NotSupported,
    /// What the value names does not exist.
    NotFound,
    /// The text is too long.
    TooLong,
    /// There are too many items.
    TooMany,
    /// The value is of another type.
    TypeInvalid,
    /// The server failed to check the value.
    Internal,
    /// Another manager owns the field.
    ManagerConflict,
}

impl CauseReason {
    /// How Kubernetes spells it in a cause.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "FieldValueInvalid",
            Self::Required => "FieldValueRequired",
            Self::Forbidden => "FieldValueForbidden",
            Self::Duplicate => "FieldValueDuplicate",
            Self::NotSupported => "FieldValueNotSupported",
            Self::NotFound => "FieldValueNotFound",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
            Self::TypeInvalid => "FieldValueTypeInvalid",
            Self::Internal => "InternalError",
            Self::ManagerConflict => "FieldManagerConflict",
        }
    }
}
