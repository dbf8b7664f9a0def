//! Admission: what depends on other objects when an object is written.
//!
//! The steps that kube-apiserver switches on by default, as far as the kinds served here need them: NamespaceLifecycle,
//! ServiceAccount, Priority, DefaultTolerationSeconds, DefaultStorageClass, StorageObjectInUseProtection and
//! PersistentVolumeClaimResize.

use std::hash::{BuildHasher, Hasher, RandomState};

use berth_core::names::{
    ATTRIBUTES_CLASS_PROTECTION, BETA_STORAGE_CLASS, CLAIM_PROTECTION, MIRROR_POD, NODE_NOT_READY,
    NODE_UNREACHABLE, SERVICE_ACCOUNT_DIRECTORY, VOLUME_PROTECTION,
};
use serde_json::{Value, json};

use super::priority::Priority;
use super::quantity::{self, Quantity};
use super::read::{at, find, flag, has, items, items_mut, keep, map, name, number, text};
use super::{classes, volume};
use crate::resource::Resource;

const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];
const SCHEDULING: &str = "scheduling.k8s.io";
const PRIORITY_CLASSES: &str = "priorityclasses";
const TOKEN_VOLUME: &str = "kube-api-access-";
const RESIZE: &str = "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize";

/// What is being done to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
}

/// Why a write is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Denied {
    /// The HTTP status code.
    pub code: u16,
    /// The reason in the answer's `Status`.
    pub reason: &'static str,
    /// The whole message of the answer's `Status`, for people.
    pub message: String,
}

/// Reads the objects that a decision depends on besides the one that is written.
pub(crate) trait Reader {
    /// One object by its resource's plural name; the namespace is empty for cluster-scoped ones.
    fn get(&self, group: &str, resource: &str, namespace: &str, name: &str) -> Option<Value>;

    /// All objects of a resource.
    fn list(&self, group: &str, resource: &str) -> Vec<Value>;

    /// How long pods that do not say stay on a node that fails.
    fn toleration_seconds(&self) -> TolerationSeconds {
        TolerationSeconds::default()
    }
}

/// How long pods that do not say stay on a node that fails; the default is Kubernetes'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TolerationSeconds {
    /// On a node that says it is not ready.
    pub not_ready: u32,
    /// On a node that says nothing any more.
    pub unreachable: u32,
}

impl Default for TolerationSeconds {
    fn default() -> Self {
        Self { not_ready: 300, unreachable: 300 }
    }
}

/// Completes an object from others, or refuses to write it.
pub(crate) fn admit(
    operation: Operation,
    resource: &Resource,
    object: &mut Value,
    old: Option<&Value>,
    reader: &dyn Reader,
) -> Result<(), Denied> {
    let request = Request { operation, resource, reader };
    request.namespace(object)?;
    match (&*resource.group, &*resource.kind, operation) {
        ("", "Pod", Operation::Create) => {
            request.service_account(object)?;
            request.priority(object)?;
            default_tolerations(object, reader.toleration_seconds());
        }
        ("scheduling.k8s.io", "PriorityClass", Operation::Create | Operation::Update) => {
            request.default_priority(object)?;
        }
        ("", "PersistentVolumeClaim", Operation::Create) => {
            request.default_class(object);
            protect(object, CLAIM_PROTECTION);
        }
        ("", "PersistentVolumeClaim", Operation::Update) => request.resize(object, old)?,
        ("", "PersistentVolume", Operation::Create) => protect(object, VOLUME_PROTECTION),
        ("storage.k8s.io", "VolumeAttributesClass", Operation::Create) => {
            protect(object, ATTRIBUTES_CLASS_PROTECTION);
        }
        _ => {}
    }
    Ok(())
}

/// Completes a changed object, before it is validated.
pub(crate) fn complete_update(resource: &Resource, object: &mut Value, old: &Value, reader: &dyn Reader) {
    if resource.group.is_empty() && &*resource.kind == "Pod" {
        keep_priority(object, old);
        default_tolerations(object, reader.toleration_seconds());
    }
}

struct Request<'a> {
    operation: Operation,
    resource: &'a Resource,
    reader: &'a dyn Reader,
}

impl Request<'_> {
    fn forbidden(&self, object: &Value, why: &str) -> Denied {
        let named = match name(object) {
            "" => "\"Unknown\"".to_owned(),
            name => format!("{name:?}"),
        };
        let message = format!("{} {named} is forbidden: {why}", self.resource.qualified());
        Denied { code: 403, reason: "Forbidden", message }
    }

    /// Nothing is created in namespaces that are not there or are going; some namespaces never go.
    fn namespace(&self, object: &Value) -> Result<(), Denied> {
        if self.resource.group.is_empty() && &*self.resource.kind == "Namespace" {
            let immortal = self.operation == Operation::Delete && IMMORTAL.contains(&name(object));
            return if immortal {
                Err(self.forbidden(object, "this namespace may not be deleted"))
            } else {
                Ok(())
            };
        }
        if !self.resource.namespaced || self.operation == Operation::Delete {
            return Ok(());
        }
        let namespace = text(object, &["metadata", "namespace"]);
        match self.reader.get("", "namespaces", "", namespace) {
            None => Err(Denied {
                code: 404,
                reason: "NotFound",
                message: format!("namespaces {namespace:?} not found"),
            }),
            Some(found) => {
                let going = text(&found, &["status", "phase"]) == "Terminating";
                if going && self.operation == Operation::Create {
                    let why = format!(
                        "unable to create new content in namespace {namespace} because it is being terminated"
                    );
                    return Err(self.forbidden(object, &why));
                }
                Ok(())
            }
        }
    }

    /// Every pod runs as a service account and finds its token in its containers.
    fn service_account(&self, pod: &mut Value) -> Result<(), Denied> {
        if has(pod, &["metadata", "annotations", MIRROR_POD]) {
            return Ok(());
        }
        let namespace = text(pod, &["metadata", "namespace"]).to_owned();
        let account = match text(pod, &["spec", "serviceAccountName"]) {
            "" => "default".to_owned(),
            account => account.to_owned(),
        };
        let Some(found) = self.reader.get("", "serviceaccounts", &namespace, &account) else {
            let why = format!(
                "error looking up service account {namespace}/{account}: serviceaccount {account:?} not found"
            );
            return Err(self.forbidden(pod, &why));
        };
        let spec = map(pod, &["spec"]);
        for field in ["serviceAccountName", "serviceAccount"] {
            spec.insert(field.to_owned(), json!(account));
        }
        let wants = |object: &Value, path: &[&str]| at(object, path).as_bool();
        let automount = wants(pod, &["spec", "automountServiceAccountToken"])
            .or_else(|| wants(&found, &["automountServiceAccountToken"]));
        if automount.unwrap_or(true) {
            mount_token(pod);
        }
        let secrets = at(&found, &["imagePullSecrets"]);
        if items(pod, &["spec", "imagePullSecrets"]).is_empty() && !super::read::is_empty(secrets) {
            map(pod, &["spec"]).insert("imagePullSecrets".to_owned(), secrets.clone());
        }
        Ok(())
    }

    /// A pod's priority comes from its class, or from the default class.
    fn priority(&self, pod: &mut Value) -> Result<(), Denied> {
        let wanted = text(pod, &["spec", "priorityClassName"]);
        let found = if wanted.is_empty() {
            Priority::of_default(&self.reader.list(SCHEDULING, PRIORITY_CLASSES))
        } else {
            let class = self.reader.get(SCHEDULING, PRIORITY_CLASSES, "", wanted);
            class.as_ref().map(Priority::of_class).or_else(|| Priority::of_system(wanted)).ok_or_else(
                || self.forbidden(pod, &format!("no PriorityClass with name {wanted} was found")),
            )?
        };
        if let Some(given) = number(pod, &["spec", "priority"]).filter(|given| *given != found.value) {
            let why = format!(
                "the integer value of priority ({given}) must not be provided in pod spec; priority admission controller computed {} from the given PriorityClass name",
                found.value
            );
            return Err(self.forbidden(pod, &why));
        }
        let given = text(pod, &["spec", "preemptionPolicy"]);
        if !given.is_empty() && given != found.policy {
            let why = format!(
                "the string value of PreemptionPolicy ({given}) must not be provided in pod spec; priority admission controller computed {} from the given PriorityClass name",
                found.policy
            );
            return Err(self.forbidden(pod, &why));
        }
        let spec = map(pod, &["spec"]);
        if !found.class.is_empty() {
            spec.insert("priorityClassName".to_owned(), json!(found.class));
        }
        spec.insert("priority".to_owned(), json!(found.value));
        spec.insert("preemptionPolicy".to_owned(), json!(found.policy));
        Ok(())
    }

    /// Only one class is the default.
    fn default_priority(&self, class: &Value) -> Result<(), Denied> {
        if !flag(class, &["globalDefault"]) {
            return Ok(());
        }
        let mut defaults = self.reader.list(SCHEDULING, PRIORITY_CLASSES);
        defaults.retain(|other| flag(other, &["globalDefault"]));
        let other = defaults.iter().min_by_key(|other| number(other, &["value"]));
        match other.map(name).filter(|other| self.operation == Operation::Create || *other != name(class)) {
            None => Ok(()),
            Some(other) => {
                let why =
                    format!("PriorityClass {other} is already marked as default. Only one default can exist");
                Err(self.forbidden(class, &why))
            }
        }
    }

    /// A claim that names no class gets the default one, the newest if there are several.
    fn default_class(&self, claim: &mut Value) {
        let chosen = has(claim, &["spec", "storageClassName"])
            || has(claim, &["metadata", "annotations", BETA_STORAGE_CLASS]);
        if chosen {
            return;
        }
        let mut classes = self.reader.list("storage.k8s.io", "storageclasses");
        classes.retain(classes::is_default);
        classes.sort_by_key(|class| {
            let created = text(class, &["metadata", "creationTimestamp"]).to_owned();
            (std::cmp::Reverse(created), name(class).to_owned())
        });
        if let Some(class) = classes.first() {
            map(claim, &["spec"]).insert("storageClassName".to_owned(), json!(name(class)));
        }
    }

    /// A claim grows only if it is bound and its class lets it.
    fn resize(&self, claim: &Value, old: Option<&Value>) -> Result<(), Denied> {
        let Some(old) = old else { return Ok(()) };
        let size = |claim: &Value| {
            quantity::from_value(at(claim, &["spec", "resources", "requests", "storage"]))
                .unwrap_or(Quantity::ZERO)
        };
        if size(claim) <= size(old) {
            return Ok(());
        }
        if text(old, &["status", "phase"]) != "Bound" {
            return Err(self.forbidden(claim, "Only bound persistent volume claims can be expanded"));
        }
        let class = volume::class(claim);
        let same = !class.is_empty() && class == volume::class(old);
        let found = self.reader.get("storage.k8s.io", "storageclasses", "", class);
        if same && found.is_some_and(|class| flag(&class, &["allowVolumeExpansion"])) {
            return Ok(());
        }
        Err(self.forbidden(claim, RESIZE))
    }
}

/// Keeps an object until its controller lets it go.
fn protect(object: &mut Value, finalizer: &str) {
    let finalizers = map(object, &["metadata"]).entry("finalizers").or_insert(json!([]));
    match finalizers.as_array_mut() {
        Some(list) if list.contains(&json!(finalizer)) => {}
        Some(list) => list.push(json!(finalizer)),
        None => *finalizers = json!([finalizer]),
    }
}

fn keep_priority(pod: &mut Value, old: &Value) {
    for field in ["priority", "preemptionPolicy"] {
        if !has(pod, &["spec", field]) {
            map(pod, &["spec"]);
            if let Some(spec) = find(pod, &["spec"]) {
                keep(spec, at(old, &["spec"]), field);
            }
        }
    }
}

/// Pods stay for a while on a node that stops answering.
fn default_tolerations(pod: &mut Value, seconds: TolerationSeconds) {
    for (key, seconds) in [(NODE_NOT_READY, seconds.not_ready), (NODE_UNREACHABLE, seconds.unreachable)] {
        let tolerated = items(pod, &["spec", "tolerations"]).iter().any(|toleration| {
            matches!(text(toleration, &["effect"]), "" | "NoExecute")
                && (text(toleration, &["key"]) == key || text(toleration, &["key"]).is_empty())
        });
        if !tolerated {
            let toleration = json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
            push(map(pod, &["spec"]).entry("tolerations").or_insert(json!([])), toleration);
        }
    }
}

fn mount_token(pod: &mut Value) {
    let existing = items(pod, &["spec", "volumes"])
        .iter()
        .map(|volume| text(volume, &["name"]))
        .find(|name| name.starts_with(TOKEN_VOLUME))
        .map(str::to_owned);
    let volume = existing.clone().unwrap_or_else(|| format!("{TOKEN_VOLUME}{}", suffix()));
    let mut used = false;
    for field in ["initContainers", "containers"] {
        for container in items_mut(pod, &["spec", field]) {
            let mounted = items(container, &["volumeMounts"])
                .iter()
                .any(|mount| text(mount, &["mountPath"]) == SERVICE_ACCOUNT_DIRECTORY);
            if !mounted {
                let mount = json!({"name": volume, "readOnly": true, "mountPath": SERVICE_ACCOUNT_DIRECTORY});
                push(map(container, &[]).entry("volumeMounts").or_insert(json!([])), mount);
                used = true;
            }
        }
    }
    if used && existing.is_none() {
        let source = json!({"name": volume, "projected": {"defaultMode": 0o644, "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
        ]}});
        push(map(pod, &["spec"]).entry("volumes").or_insert(json!([])), source);
    }
}

fn push(list: &mut Value, item: Value) {
    match list.as_array_mut() {
        Some(items) => items.push(item),
        None => *list = json!([item]),
    }
}

/// Five random characters, as generated names end with.
fn suffix() -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut random = RandomState::new().build_hasher().finish();
    let mut next = || {
        let index = usize::try_from(random % 27).unwrap_or_default();
        random /= 27;
        char::from(ALPHABET[index])
    };
    (0..5).map(|_| next()).collect()
}

#[cfg(test)]
mod tests;
