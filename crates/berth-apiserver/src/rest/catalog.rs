//! The built-in resources: names, scopes, verbs and subresources, as discovery tells them.

use std::sync::Arc;

use crate::resource::Subresource::{
    Attach, Binding, Eviction, Exec, Finalize, Log, PortForward, Scale, Status, Token,
};
use crate::resource::{Resource, Subresource};

/// The verbs of nearly everything.
const ALL_VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
const NAMESPACE_VERBS: &[&str] = &["create", "delete", "get", "list", "patch", "update", "watch"];
const CREATE: &[&str] = &["create"];

struct Row {
    group: &'static str,
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    categories: &'static [&'static str],
    namespaced: bool,
    subresources: &'static [Subresource],
    verbs: &'static [&'static str],
}

const fn row(group: &'static str, kind: &'static str, plural: &'static str, namespaced: bool) -> Row {
    Row { group, kind, plural, short: &[], categories: &[], namespaced, subresources: &[], verbs: ALL_VERBS }
}

const APPS: &str = "apps";
const AUTHENTICATION: &str = "authentication.k8s.io";
const AUTHORIZATION: &str = "authorization.k8s.io";
const RBAC: &str = "rbac.authorization.k8s.io";
const STORAGE: &str = "storage.k8s.io";

// Groups stand in the order of discovery.
const ROWS: &[Row] = &[
    Row { verbs: CREATE, ..row("", "Binding", "bindings", true) },
    Row { short: &["cm"], ..row("", "ConfigMap", "configmaps", true) },
    Row { short: &["ev"], ..row("", "Event", "events", true) },
    Row { short: &["limits"], ..row("", "LimitRange", "limitranges", true) },
    Row {
        short: &["ns"],
        subresources: &[Finalize, Status],
        verbs: NAMESPACE_VERBS,
        ..row("", "Namespace", "namespaces", false)
    },
    Row { short: &["no"], subresources: &[Status], ..row("", "Node", "nodes", false) },
    Row {
        short: &["pvc"],
        subresources: &[Status],
        ..row("", "PersistentVolumeClaim", "persistentvolumeclaims", true)
    },
    Row {
        short: &["pv"],
        subresources: &[Status],
        ..row("", "PersistentVolume", "persistentvolumes", false)
    },
    Row {
        short: &["po"],
        categories: &["all"],
        subresources: &[Attach, Binding, Eviction, Exec, Log, PortForward, Status],
        ..row("", "Pod", "pods", true)
    },
    Row { short: &["quota"], subresources: &[Status], ..row("", "ResourceQuota", "resourcequotas", true) },
    row("", "Secret", "secrets", true),
    Row { short: &["sa"], subresources: &[Token], ..row("", "ServiceAccount", "serviceaccounts", true) },
    Row {
        short: &["svc"],
        categories: &["all"],
        subresources: &[Status],
        ..row("", "Service", "services", true)
    },
    row(APPS, "ControllerRevision", "controllerrevisions", true),
    Row {
        short: &["ds"],
        categories: &["all"],
        subresources: &[Status],
        ..row(APPS, "DaemonSet", "daemonsets", true)
    },
    Row {
        short: &["deploy"],
        categories: &["all"],
        subresources: &[Scale, Status],
        ..row(APPS, "Deployment", "deployments", true)
    },
    Row {
        short: &["rs"],
        categories: &["all"],
        subresources: &[Scale, Status],
        ..row(APPS, "ReplicaSet", "replicasets", true)
    },
    Row {
        short: &["sts"],
        categories: &["all"],
        subresources: &[Scale, Status],
        ..row(APPS, "StatefulSet", "statefulsets", true)
    },
    Row { short: &["ev"], ..row("events.k8s.io", "Event", "events", true) },
    Row { verbs: CREATE, ..row(AUTHENTICATION, "SelfSubjectReview", "selfsubjectreviews", false) },
    Row { verbs: CREATE, ..row(AUTHENTICATION, "TokenReview", "tokenreviews", false) },
    Row {
        verbs: CREATE,
        ..row(AUTHORIZATION, "LocalSubjectAccessReview", "localsubjectaccessreviews", true)
    },
    Row { verbs: CREATE, ..row(AUTHORIZATION, "SelfSubjectAccessReview", "selfsubjectaccessreviews", false) },
    Row { verbs: CREATE, ..row(AUTHORIZATION, "SelfSubjectRulesReview", "selfsubjectrulesreviews", false) },
    Row { verbs: CREATE, ..row(AUTHORIZATION, "SubjectAccessReview", "subjectaccessreviews", false) },
    row(RBAC, "ClusterRoleBinding", "clusterrolebindings", false),
    row(RBAC, "ClusterRole", "clusterroles", false),
    row(RBAC, "RoleBinding", "rolebindings", true),
    row(RBAC, "Role", "roles", true),
    row(STORAGE, "CSIDriver", "csidrivers", false),
    row(STORAGE, "CSINode", "csinodes", false),
    row(STORAGE, "CSIStorageCapacity", "csistoragecapacities", true),
    Row { short: &["sc"], ..row(STORAGE, "StorageClass", "storageclasses", false) },
    Row { subresources: &[Status], ..row(STORAGE, "VolumeAttachment", "volumeattachments", false) },
    Row { short: &["vac"], ..row(STORAGE, "VolumeAttributesClass", "volumeattributesclasses", false) },
    Row {
        short: &["crd", "crds"],
        categories: &["api-extensions"],
        subresources: &[Status],
        ..row("apiextensions.k8s.io", "CustomResourceDefinition", "customresourcedefinitions", false)
    },
    row("coordination.k8s.io", "Lease", "leases", true),
];

/// All built-in resources, in the order of discovery.
pub(crate) fn built_in() -> Vec<Resource> {
    let words = |words: &[&str]| words.iter().map(|word| Arc::from(*word)).collect();
    ROWS.iter()
        .map(|row| Resource {
            group: row.group.into(),
            version: "v1".into(),
            kind: row.kind.into(),
            list_kind: format!("{}List", row.kind).into(),
            plural: row.plural.into(),
            singular: row.kind.to_lowercase().into(),
            short_names: words(row.short),
            categories: words(row.categories),
            namespaced: row.namespaced,
            subresources: row.subresources.to_vec(),
            verbs: row.verbs,
            built_in: true,
        })
        .collect()
}
