//! Doing what was decided: requests to the API itself, so that all its rules hold for them, too.

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::decide::{Policy, Step, Target};
use crate::rest::ApiServer;
use crate::rules::namespace::{KUBERNETES, is_held};
use crate::rules::read::{at, items, map, text};
use crate::store::{Change, Collection, Expect, Key, WriteError};

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is done, or was done before.
    Done,
    /// Somebody else changed the object meanwhile.
    Conflict,
    /// The step failed with this status; it is tried again after a pause.
    Failed(StatusCode),
}

/// Where an object is served.
pub(super) fn path(api: &ApiServer, key: &Key) -> Option<String> {
    let registry = api.registry();
    let served = registry.all().find(|served| served.collection == key.collection)?;
    let resource = &served.resource;
    let root = if resource.group.is_empty() {
        format!("/api/{}", resource.version)
    } else {
        format!("/apis/{}/{}", resource.group, resource.version)
    };
    let (plural, name) = (&resource.plural, &key.name);
    Some(if resource.namespaced {
        format!("{root}/namespaces/{}/{plural}/{name}", key.namespace)
    } else {
        format!("{root}/{plural}/{name}")
    })
}

/// The object at a key, as it is right now.
pub(super) fn current(api: &ApiServer, key: &Key) -> Option<Value> {
    api.store().get(key).and_then(|object| serde_json::from_slice(&object.bytes).ok())
}

/// Performs one step through the API. A step whose target is gone counts as done.
pub(super) async fn perform(api: &ApiServer, step: &Step) -> Outcome {
    match step {
        Step::Delete { target, policy } => delete(api, target, *policy).await,
        Step::DropOwners { target, owners } => {
            let keeps = |owner: &&Value| !owners.iter().any(|uid| text(owner, &["uid"]) == uid);
            change(api, target, |metadata| {
                let left: Vec<&Value> = items(metadata, &["ownerReferences"]).iter().filter(keeps).collect();
                json!({ "ownerReferences": left })
            })
            .await
        }
        Step::Unblock { target } => {
            change(api, target, |metadata| {
                let mut owners = at(metadata, &["ownerReferences"]).clone();
                for owner in owners.as_array_mut().into_iter().flatten() {
                    owner["blockOwnerDeletion"] = json!(false);
                }
                json!({ "ownerReferences": owners })
            })
            .await
        }
        Step::DropFinalizer { target, finalizer } => {
            change(api, target, |metadata| {
                let left: Vec<&Value> = items(metadata, &["finalizers"])
                    .iter()
                    .filter(|f| f.as_str() != Some(finalizer))
                    .collect();
                json!({ "finalizers": left })
            })
            .await
        }
        Step::Finalize { namespace } => finalize(api, namespace).await,
        Step::NamespaceDefaults { namespace } => match api.create_namespace_defaults(namespace).await {
            Ok(()) => Outcome::Done,
            Err(failure) => Outcome::Failed(
                StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            ),
        },
        Step::Visit { .. } => Outcome::Done,
    }
}

async fn delete(api: &ApiServer, target: &Target, policy: Policy) -> Outcome {
    let Some(path) = path(api, &target.key) else { return Outcome::Done };
    let policy = match policy {
        Policy::Background => "Background",
        Policy::Foreground => "Foreground",
        Policy::Orphan => "Orphan",
    };
    let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy,
        "preconditions": {"uid": target.uid, "resourceVersion": target.version}});
    send(api, Method::DELETE, &path, "application/json", &options).await
}

/// Merges a change into an object's metadata, if nobody else changes it meanwhile.
async fn change(api: &ApiServer, target: &Target, change: impl FnOnce(&Value) -> Value) -> Outcome {
    let key = &target.key;
    let (Some(object), Some(path)) = (current(api, key), path(api, key)) else { return Outcome::Done };
    let metadata = at(&object, &["metadata"]);
    if text(metadata, &["uid"]) != target.uid {
        return Outcome::Done;
    }
    let mut changed = change(metadata);
    changed["uid"] = at(metadata, &["uid"]).clone();
    changed["resourceVersion"] = at(metadata, &["resourceVersion"]).clone();
    let merge = json!({ "metadata": changed });
    send(api, Method::PATCH, &path, "application/merge-patch+json", &merge).await
}

/// Takes the namespace's own finalizer away; with the last one the namespace goes.
///
/// Written to the store itself: the finalizer is the collector's, and no rule for clients is about it.
async fn finalize(api: &ApiServer, namespace: &str) -> Outcome {
    let key = Key::new(Collection::new("namespaces"), "", namespace);
    let Some(stored) = api.store().get(&key) else { return Outcome::Done };
    let Ok(mut object) = serde_json::from_slice::<Value>(&stored.bytes) else { return Outcome::Done };
    let spec = map(&mut object, &["spec"]);
    if let Some(finalizers) = spec.get_mut("finalizers").and_then(Value::as_array_mut) {
        finalizers.retain(|finalizer| finalizer.as_str() != Some(KUBERNETES));
        if finalizers.is_empty() {
            spec.remove("finalizers");
        }
    }
    let gone = !is_held(&object) && items(&object, &["metadata", "finalizers"]).is_empty();
    let contents = move |revision: u64| {
        let metadata = map(&mut object, &["metadata"]);
        metadata.insert("resourceVersion".to_owned(), json!(revision.to_string()));
        Bytes::from(object.to_string())
    };
    let change = if gone { Change::delete(contents) } else { Change::put(contents) };
    match api.store().write(key, Expect::Revision(stored.revision), change).await {
        Ok(_) | Err(WriteError::Missing) => Outcome::Done,
        Err(WriteError::Conflict(_) | WriteError::Exists(_)) => Outcome::Conflict,
        Err(WriteError::Full(_) | WriteError::Storage(_) | WriteError::Quarantined) => {
            Outcome::Failed(StatusCode::INTERNAL_SERVER_ERROR)
        }
    }
}

async fn send(api: &ApiServer, method: Method, path: &str, kind: &str, body: &Value) -> Outcome {
    let body = Full::new(Bytes::from(body.to_string()));
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, kind)
        .header(http::header::USER_AGENT, "berth-collector")
        .body(body);
    let Ok(request) = request else { return Outcome::Failed(StatusCode::BAD_REQUEST) };
    let status = match api.clone().oneshot(request).await {
        Ok(response) => response.status(),
        Err(never) => match never {},
    };
    match status {
        status if status.is_success() => Outcome::Done,
        StatusCode::NOT_FOUND => Outcome::Done,
        StatusCode::CONFLICT => Outcome::Conflict,
        status => Outcome::Failed(status),
    }
}
