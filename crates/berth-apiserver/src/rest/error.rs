//! Refusals as Kubernetes' `Status`: code, reason, message and details exactly as clients know them.

use serde_json::{Map, Value, json};

use crate::resource::{Cause, Resource};
use crate::rules::Denied;

/// A request that failed, ready to be answered to the client.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The HTTP status code.
    pub code: u16,
    /// The reason that programs tell failures apart by, such as `NotFound`; empty where Kubernetes gives none.
    pub reason: &'static str,
    /// The text for people.
    pub message: String,
    /// `details` of the status.
    pub details: Option<Value>,
    /// `metadata.continue` of the status: where to go on after an expired token.
    pub next: Option<String>,
}

/// Marks the answer that is no `Status`.
const NOWHERE: &str = "Nowhere";

/// The usual result of a verb.
pub type Answer<T> = Result<T, Failure>;

impl Failure {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None, next: None }
    }

    fn of(resource: &Resource, name: &str, code: u16, reason: &'static str, message: String) -> Self {
        let mut details = Map::new();
        put(&mut details, "name", name);
        put(&mut details, "group", &resource.group);
        put(&mut details, "kind", &resource.plural);
        Self { details: Some(Value::Object(details)), ..Self::new(code, reason, message) }
    }

    /// The request makes no sense.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// The resource is served, and has no object of that name (404).
    pub fn not_found(resource: &Resource, name: &str) -> Self {
        Self::of(resource, name, 404, "NotFound", format!("{} {name:?} not found", resource.qualified()))
    }

    /// Something other than an object is not there.
    pub fn absent(message: impl Into<String>) -> Self {
        Self::new(404, "NotFound", message)
    }

    /// Nothing is served at the path, although its group is (404).
    pub fn no_such_path() -> Self {
        let failure = Self::new(404, "NotFound", "the server could not find the requested resource");
        Self { details: Some(json!({})), ..failure }
    }

    /// Nothing at all is served there, not even a group.
    pub fn nowhere() -> Self {
        Self::new(404, NOWHERE, "404 page not found\n")
    }

    /// Whether the answer is plain text, as Kubernetes has it where nothing is served.
    pub(crate) fn is_plain(&self) -> bool {
        self.reason == NOWHERE
    }

    /// The path does not know the method.
    pub fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self { details: Some(json!({})), ..Self::new(405, "MethodNotAllowed", message) }
    }

    /// The definition of the resource is being deleted.
    pub fn terminating(resource: &Resource) -> Self {
        let message = "create not allowed while custom resource definition is terminating".to_owned();
        Self::of(resource, "", 405, "MethodNotAllowed", message)
    }

    /// Who asks is not known.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// The object is there already.
    pub fn already_exists(resource: &Resource, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", resource.qualified());
        Self::of(resource, name, 409, "AlreadyExists", message)
    }

    /// No free name was found for a `generateName`.
    pub fn generated_name_taken(resource: &Resource, name: &str) -> Self {
        let message = format!(
            "{} {name:?} already exists, the server was not able to generate a unique name for the object",
            resource.qualified()
        );
        Self::of(resource, name, 409, "AlreadyExists", message)
    }

    /// The object is not what the client believes.
    pub fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", resource.qualified());
        Self::of(resource, name, 409, "Conflict", message)
    }

    /// A disruption budget does not allow an eviction; after how many seconds to ask again, if that is known.
    pub(crate) fn over_budget(why: &str, after: u32) -> Self {
        let mut details = json!({ "causes": [{ "reason": "DisruptionBudget", "message": why }] });
        if after > 0 {
            details["retryAfterSeconds"] = after.into();
        }
        let message = "Cannot evict pod as it would violate the pod's disruption budget.";
        Self { details: Some(details), ..Self::new(429, "TooManyRequests", message) }
    }

    /// The object has another version than the client's.
    pub fn modified(resource: &Resource, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    /// A precondition of a deletion does not hold; Kubernetes names the kind here, not the resource.
    pub fn precondition(resource: &Resource, name: &str, why: &str) -> Self {
        let kind = if resource.group.is_empty() {
            resource.kind.to_string()
        } else {
            format!("{}.{}", resource.kind, resource.group)
        };
        let mut details = Map::new();
        put(&mut details, "name", name);
        put(&mut details, "group", &resource.group);
        put(&mut details, "kind", &resource.kind);
        let message = format!("Operation cannot be fulfilled on {kind} {name:?}: {why}");
        Self { details: Some(Value::Object(details)), ..Self::new(409, "Conflict", message) }
    }

    /// Admission refuses the object.
    pub(crate) fn denied(resource: &Resource, name: &str, denied: &Denied) -> Self {
        let Denied { code, reason, message: why } = denied;
        let code = *code;
        // What is missing is not the object but what it needs: `namespaces "x" not found`.
        if code == 404
            && let Some((kind, rest)) = why.split_once(" \"")
            && let Some((missing, _)) = rest.split_once('"')
        {
            let details = json!({ "name": missing, "kind": kind });
            return Self { details: Some(details), ..Self::new(code, reason, why) };
        }
        let message = if code == 403 && !why.contains("is forbidden: ") {
            let name = if name.is_empty() { "Unknown" } else { name };
            format!("{} {name:?} is forbidden: {why}", resource.qualified())
        } else {
            why.to_owned()
        };
        let mut failure = Self::of(resource, name, code, reason, message);
        if let Some((_, rest)) = why.split_once("unable to create new content in namespace ")
            && let Some((namespace, _)) = rest.split_once(" because it is being terminated")
            && let Some(details) = &mut failure.details
        {
            details["causes"] = json!([{
                "reason": "NamespaceTerminating", "message": format!("namespace {namespace} is being terminated"),
                "field": "metadata.namespace",
            }]);
        }
        failure
    }

    /// The object breaks rules of its kind.
    pub fn invalid(resource: &Resource, name: &str, causes: &[Cause]) -> Self {
        Self::invalid_kind(&resource.group, &resource.kind, name, causes)
    }

    /// Options of a request are wrong: `kind` is `ListOptions`, `DeleteOptions`, …
    pub fn invalid_options(kind: &str, causes: &[Cause]) -> Self {
        Self::invalid_kind("meta.k8s.io", kind, "", causes)
    }

    /// What `kind` names is invalid for these causes.
    pub fn invalid_kind(group: &str, kind: &str, name: &str, causes: &[Cause]) -> Self {
        let mut texts: Vec<String> = causes.iter().map(ToString::to_string).collect();
        texts.dedup();
        let joined = match texts.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let qualified = if group.is_empty() { kind.to_owned() } else { format!("{kind}.{group}") };
        let mut details = Map::new();
        put(&mut details, "name", name);
        put(&mut details, "group", group);
        put(&mut details, "kind", kind);
        details.insert("causes".to_owned(), causes.iter().map(cause_value).collect());
        let message = format!("{qualified} {name:?} is invalid: {joined}");
        Self { details: Some(Value::Object(details)), ..Self::new(422, "Invalid", message) }
    }

    /// A patch that cannot be carried out.
    pub fn unprocessable() -> Self {
        let message = "the server rejected our request due to an error in our request";
        Self { details: Some(json!({})), ..Self::new(422, "Invalid", message) }
    }

    /// Other managers own fields that an apply would change.
    pub fn apply_conflict(message: String, causes: &[Cause]) -> Self {
        let causes: Vec<Value> = causes.iter().map(cause_value).collect();
        Self { details: Some(json!({ "causes": causes })), ..Self::new(409, "Conflict", message) }
    }

    /// What is asked for is no longer kept.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    /// The version asked for lies in the future.
    pub fn too_large_version(wanted: u64, current: u64) -> Self {
        let message = format!("Too large resource version: {wanted}, current: {current}");
        let details = json!({
            "causes": [{ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" }],
            "retryAfterSeconds": 1,
        });
        Self { details: Some(details), ..Self::new(504, "Timeout", format!("Timeout: {message}")) }
    }

    /// None of the formats the client accepts is offered.
    pub fn not_acceptable(offered: &str) -> Self {
        let message = format!("406: Not Acceptable\n\nAvailable representations: {offered}");
        Self { details: Some(json!({})), ..Self::new(406, "NotAcceptable", message) }
    }

    /// The format is offered, but not in the shape that is asked for.
    pub fn unknown_shape(offered: &str) -> Self {
        let message = format!("only the following media types are accepted: {offered}");
        Self::new(406, "NotAcceptable", message)
    }

    /// The client took too long to say what it wants.
    pub fn timeout() -> Self {
        let message = "Timeout: request did not complete within the allotted timeout";
        Self { details: Some(json!({})), ..Self::new(504, "Timeout", message) }
    }

    /// The patch is of a kind that is not known; custom resources say which are.
    pub fn unsupported_patch(offered: Option<&str>) -> Self {
        match offered {
            Some(offered) => Self::unsupported_media_type(offered),
            None => Self {
                details: Some(json!({})),
                ..Self::new(415, "UnsupportedMediaType", "415: Unsupported Media Type")
            },
        }
    }

    /// The body is in a format that is not understood.
    pub fn unsupported_media_type(offered: &str) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {offered}"
        );
        Self::new(415, "UnsupportedMediaType", message)
    }

    /// The body is larger than the server reads.
    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(413, "RequestEntityTooLarge", message)
    }

    /// The object is larger than what is stored; kube-apiserver passes on what etcd says of it.
    pub fn object_too_large() -> Self {
        Self::plain(500, "etcdserver: request is too large")
    }

    /// The server has no such ability.
    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(501, "NotImplemented", message)
    }

    /// Something broke on this side.
    pub fn internal(why: impl std::fmt::Display) -> Self {
        let details = json!({ "causes": [{ "message": why.to_string() }] });
        Self {
            details: Some(details),
            ..Self::new(500, "InternalError", format!("Internal error occurred: {why}"))
        }
    }

    /// A failure without a reason of its own, as Kubernetes gives for some errors of its libraries.
    pub fn plain(code: u16, message: impl Into<String>) -> Self {
        Self::new(code, "", message)
    }

    /// The `Status` object that is the body of the answer.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if let Some(details) = &self.details {
            status["details"] = details.clone();
        }
        if let Some(next) = &self.next {
            status["metadata"]["continue"] = next.as_str().into();
        }
        status
    }
}

fn put(map: &mut Map<String, Value>, key: &str, value: &str) {
    if !value.is_empty() {
        map.insert(key.to_owned(), value.into());
    }
}

fn cause_value(cause: &Cause) -> Value {
    let mut map = Map::new();
    put(&mut map, "reason", cause.reason.as_str());
    put(&mut map, "message", &cause.message);
    put(&mut map, "field", &cause.field);
    Value::Object(map)
}
