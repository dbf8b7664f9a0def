//! What is served right now: the built-in resources, as discovery lists them, and those of the custom resource
//! definitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::{crd, metrics};
use crate::resource::Subresource::{
    Attach, Binding, EphemeralContainers, Eviction, Exec, Finalize, Log, PortForward, Scale, Status, Token,
};
use crate::resource::{Resource, Subresource};
use crate::rules::{self, Rules};
use crate::schema::{self, Type};
use crate::store::Collection;

/// A resource with all that is needed to serve it.
pub(crate) struct Served {
    pub(crate) resource: Resource,
    /// `apiVersion` of its objects.
    pub(crate) api_version: String,
    /// Where its objects lie.
    pub(crate) collection: Collection,
    pub(crate) rules: Arc<dyn Rules>,
    pub(crate) schema: Arc<Type>,
    /// The type of the objects as they lie in the store.
    pub(crate) stored_schema: Arc<Type>,
    pub(crate) stored: Stored,
    /// Where objects keep what `/scale` shows; only for those that have it.
    pub(crate) scale: Option<ScalePaths>,
    /// Only custom resources have one.
    pub(crate) definition: Option<Definition>,
}

/// How objects lie in the store, compared to how they are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As they are served.
    Same,
    /// As events of the core group.
    CoreEvents,
    /// With this `apiVersion`, or one that was stored earlier, and nothing else different.
    As(String),
}

/// What a custom resource has of its definition, besides its rules.
#[derive(Debug, Clone)]
pub(crate) struct Definition {
    /// The name of the definition.
    pub(crate) name: String,
    /// The OpenAPI schema as it was given.
    pub(crate) openapi: Value,
    /// The definition is being deleted: no new objects.
    pub(crate) terminating: bool,
}

/// Where a resource keeps what `/scale` shows.
#[derive(Debug, Clone)]
pub(crate) struct ScalePaths {
    pub(crate) spec: String,
    pub(crate) status: String,
    pub(crate) selector: Option<String>,
}

impl ScalePaths {
    fn of_workloads() -> Self {
        Self {
            spec: ".spec.replicas".to_owned(),
            status: ".status.replicas".to_owned(),
            selector: Some(".spec.selector".to_owned()),
        }
    }
}

impl Served {
    fn of_built_in(resource: Resource) -> Self {
        let schema = schema::built_in(&resource.group, &resource.version, &resource.kind).unwrap_or_default();
        let events = &*resource.group == "events.k8s.io";
        let (collection, stored, rules) = if events {
            ("events".to_owned(), Stored::CoreEvents, rules::of("events.k8s.io", "Event"))
        } else {
            (resource.qualified(), Stored::Same, rules::of(&resource.group, &resource.kind))
        };
        Self {
            api_version: resource.api_version(),
            collection: Collection::from(collection.as_str()),
            rules,
            stored_schema: if events {
                schema::built_in("", "v1", "Event").unwrap_or_default()
            } else {
                schema.clone()
            },
            schema,
            stored,
            scale: resource.subresources.contains(&Subresource::Scale).then(ScalePaths::of_workloads),
            definition: None,
            resource,
        }
    }
}

/// A group with its versions, the preferred one first.
pub(crate) struct Group {
    pub(crate) name: Arc<str>,
    pub(crate) versions: Vec<Version>,
}

/// A version with its resources.
pub(crate) struct Version {
    pub(crate) name: Arc<str>,
    pub(crate) resources: Vec<Arc<Served>>,
}

/// Everything that is served, as it was at one moment.
pub(crate) struct Registry {
    /// The core group first, then the others in the order of discovery.
    pub(crate) groups: Vec<Group>,
    /// Changes whenever what is served changes.
    pub(crate) generation: u64,
}

impl Registry {
    /// What is served with these custom resource definitions, and with the figures of nodes if there are any.
    pub(crate) fn new(definitions: &[Value], with_figures: bool, generation: u64) -> Self {
        let mut groups: Vec<Group> = Vec::new();
        let figures = with_figures.then(metrics::resources).into_iter().flatten();
        for resource in built_in().into_iter().chain(figures) {
            add(&mut groups, Served::of_built_in(resource));
        }
        let built_in = groups.len();
        let mut custom: BTreeMap<(String, String), Vec<Served>> = BTreeMap::new();
        for served in definitions.iter().flat_map(crd::served) {
            let key = (served.resource.group.to_string(), served.resource.version.to_string());
            custom.entry(key).or_default().push(served);
        }
        for served in custom.into_values().flatten() {
            add(&mut groups, served);
        }
        if let Some(custom) = groups.get_mut(built_in..) {
            for group in custom {
                group.versions.sort_by_key(|version| std::cmp::Reverse(crd::version_order(&version.name)));
            }
        }
        Self { groups, generation }
    }

    pub(crate) fn group(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| &*group.name == name)
    }

    pub(crate) fn version(&self, group: &str, version: &str) -> Option<&Version> {
        self.group(group)?.versions.iter().find(|have| &*have.name == version)
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Served>> {
        self.version(group, version)?.resources.iter().find(|served| &*served.resource.plural == plural)
    }

    /// The resource that a plural name or a kind of a group means, in its preferred version.
    pub(crate) fn by_name(&self, group: &str, name: &str) -> Option<&Arc<Served>> {
        let versions = &self.group(group)?.versions;
        let mut all = versions.iter().flat_map(|version| &version.resources);
        all.find(|served| &*served.resource.plural == name || &*served.resource.kind == name)
    }

    /// Whether a kind exists in a group and version at all.
    pub(crate) fn knows_kind(&self, group: &str, version: &str, kind: &str) -> bool {
        self.version(group, version)
            .is_some_and(|version| version.resources.iter().any(|served| &*served.resource.kind == kind))
    }

    /// Every resource, all versions.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Served>> {
        self.groups.iter().flat_map(|group| &group.versions).flat_map(|version| &version.resources)
    }
}

fn add(groups: &mut Vec<Group>, served: Served) {
    let (name, version) = (served.resource.group.clone(), served.resource.version.clone());
    let index = groups.iter().position(|group| group.name == name).unwrap_or_else(|| {
        groups.push(Group { name, versions: Vec::new() });
        groups.len() - 1
    });
    let Some(group) = groups.get_mut(index) else { return };
    match group.versions.iter_mut().find(|have| have.name == version) {
        Some(have) => have.resources.push(Arc::new(served)),
        None => group.versions.push(Version { name: version, resources: vec![Arc::new(served)] }),
    }
}

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
const BATCH: &str = "batch";
const POLICY: &str = "policy";
const RBAC: &str = "rbac.authorization.k8s.io";
const SCHEDULING: &str = "scheduling.k8s.io";
const STORAGE: &str = "storage.k8s.io";

// Groups stand in the order of discovery.
const ROWS: &[Row] = &[
    Row { verbs: CREATE, ..row("", "Binding", "bindings", true) },
    Row { short: &["cm"], ..row("", "ConfigMap", "configmaps", true) },
    Row { short: &["ep"], ..row("", "Endpoints", "endpoints", true) },
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
        subresources: &[Attach, Binding, EphemeralContainers, Eviction, Exec, Log, PortForward, Status],
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
    Row {
        short: &["cj"],
        categories: &["all"],
        subresources: &[Status],
        ..row(BATCH, "CronJob", "cronjobs", true)
    },
    Row { categories: &["all"], subresources: &[Status], ..row(BATCH, "Job", "jobs", true) },
    Row {
        short: &["pdb"],
        subresources: &[Status],
        ..row(POLICY, "PodDisruptionBudget", "poddisruptionbudgets", true)
    },
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
    Row { short: &["pc"], ..row(SCHEDULING, "PriorityClass", "priorityclasses", false) },
    row("coordination.k8s.io", "Lease", "leases", true),
    row("discovery.k8s.io", "EndpointSlice", "endpointslices", true),
];

/// All built-in resources, in the order of discovery.
fn built_in() -> Vec<Resource> {
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
