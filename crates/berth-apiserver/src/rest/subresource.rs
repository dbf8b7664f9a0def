//! Subresources: status, scale, binding, eviction, finalize, tokens, and what others serve.

use bytes::Bytes;
use http::{Method, Response};
use serde_json::{Value, json};

use super::error::{Answer, Failure};
use super::object::{self, Expected};
use super::request::FieldValidation;
use super::write::Tracking;
use super::{Accept, Body, Call, Shape, content};
use crate::resource::Subresource;
use crate::rules::budget::{self, Verdict};
use crate::rules::{Denied, read};
use crate::schema;

/// How often an eviction is judged anew because the pod changed meanwhile.
const EVICTION_TRIES: u32 = 20;

impl Call {
    pub(crate) async fn subresource(self, subresource: Subresource, bytes: Bytes) -> Answer<Response<Body>> {
        match (subresource, self.parts.method.clone()) {
            (Subresource::Status | Subresource::EphemeralContainers, Method::GET | Method::HEAD) => {
                self.get()
            }
            (Subresource::Status | Subresource::Finalize | Subresource::EphemeralContainers, Method::PUT) => {
                self.update(&bytes).await
            }
            (Subresource::Status | Subresource::EphemeralContainers, Method::PATCH) => {
                self.patch(&bytes).await
            }
            (Subresource::Scale, Method::GET | Method::HEAD) => self.scale(),
            (Subresource::Scale, Method::PUT) => self.update_scale(&bytes).await,
            (Subresource::Scale, Method::PATCH) => self.patch_scale(&bytes).await,
            (Subresource::Binding, Method::POST) => self.bind(&bytes).await,
            (Subresource::Eviction, Method::POST) => self.evict(&bytes).await,
            (Subresource::Token, Method::POST) => self.token(&bytes),
            (
                Subresource::Log | Subresource::Exec | Subresource::Attach | Subresource::PortForward,
                Method::GET | Method::POST,
            ) => self.pod_access(subresource).await,
            _ => Err(Failure::method_not_allowed()),
        }
    }

    /// Assigns a pod to a node; the binding names the pod, or the path does.
    pub(crate) async fn bind(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = self.query.write_options("CreateOptions")?;
        let type_ = schema::built_in("", "v1", "Binding").unwrap_or_default();
        let expected =
            Expected { api_version: "v1", kind: "Binding", type_: &type_, registry: &self.registry };
        let binding =
            object::decode(&self.parts.headers, bytes, &expected, FieldValidation::Ignore, &mut Vec::new())?;
        let name = if self.name.is_empty() { read::name(&binding) } else { &self.name };
        let kind = read::text(&binding, &["target", "kind"]);
        let node = read::text(&binding, &["target", "name"]);
        if node.is_empty() || !matches!(kind, "" | "Node" | "Minion") {
            return Err(Failure::bad_request("a binding needs a target of kind Node with a name"));
        }
        let served = self.registry.find("", "v1", "pods").ok_or_else(Failure::no_such_path)?.clone();
        let mut call = self.api.internal(served, &self.namespace, name);
        call.subresource = Some(Subresource::Binding);
        let binding_resource =
            crate::resource::Resource { plural: "pods/binding".into(), ..call.served.resource.clone() };
        call.modify(&options, Tracking::Settled, |pod| {
            // Whoever decided saw this pod in this state; another is not what was decided about.
            for (field, what) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
                let (given, found) = (object::text(&binding, field), object::text(pod, field));
                if !given.is_empty() && given != found {
                    return Err(call.broken_precondition(name, what, given, found));
                }
            }
            let bound = read::text(pod, &["spec", "nodeName"]);
            if object::is_deleting(pod) {
                let why = format!("pod {name} is being deleted, cannot be assigned to a host");
                return Err(Failure::conflict(&binding_resource, name, &why));
            }
            if !bound.is_empty() {
                let why = format!("pod {name} is already assigned to node {bound:?}");
                return Err(Failure::conflict(&binding_resource, name, &why));
            }
            if !read::items(pod, &["spec", "schedulingGates"]).is_empty() {
                let why = format!("pod {name} has non-empty .spec.schedulingGates");
                return Err(Failure::conflict(&binding_resource, name, &why));
            }
            let mut new = pod.clone();
            assign(&mut new, node, &binding);
            Ok(new)
        })
        .await?;
        Ok(self.success(201))
    }

    async fn evict(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let eviction: Value = serde_json::from_slice(bytes)
            .map_err(|error| Failure::bad_request(format!("cannot read the eviction: {error}")))?;
        let mut options = read::at(&eviction, &["deleteOptions"]).clone();
        let dry_run: Vec<Value> = self.query.all("dryRun").map(Value::from).collect();
        // Options in the body hide those of the query, but a dry run must not become a real one by that.
        if options.is_object() && read::items(&options, &["dryRun"]).is_empty() && !dry_run.is_empty() {
            options["dryRun"] = dry_run.clone().into();
        }
        let is_dry = !dry_run.is_empty() || !read::items(&options, &["dryRun"]).is_empty();
        let asks_version = !read::text(&options, &["preconditions", "resourceVersion"]).is_empty();
        for _ in 1..EVICTION_TRIES {
            match self.evict_once(options.clone(), is_dry, asks_version).await {
                // The pod has changed since it was judged.
                Err(failure) if failure.code == 409 && !asks_version => {}
                evicted => return evicted,
            }
        }
        self.evict_once(options, is_dry, asks_version).await
    }

    async fn evict_once(
        &self,
        mut options: Value,
        is_dry: bool,
        asks_version: bool,
    ) -> Answer<Response<Body>> {
        let pod: Value = serde_json::from_slice(&self.current()?.bytes).map_err(Failure::internal)?;
        let is_judged_by_state = budget::is_beyond_budgets(&pod) || !self.ask_budget(&pod, is_dry).await?;
        // A pod that becomes ready meanwhile would have to be counted.
        if is_judged_by_state && !budget::is_over(&pod) && !asks_version {
            let version = read::map(&mut options, &["preconditions"]);
            version.insert("resourceVersion".to_owned(), object::text(&pod, "resourceVersion").into());
        }
        if !is_dry {
            let version = self.mark_evicted(&options).await?;
            // What asked for one version of the pod means the one that we wrote just now.
            if let Some(asked) = options.pointer_mut("/preconditions/resourceVersion")
                && let Some(version) = version
            {
                *asked = version.into();
            }
        }
        let bytes = if options.is_null() { String::new() } else { options.to_string() };
        self.delete(bytes.as_bytes()).await?;
        Ok(self.success(201))
    }

    /// Counts an eviction in the budget that protects the pod, or refuses it. Returns whether that holds whatever becomes of the pod
    /// meanwhile: it does not if the pod is none of those that keep the application going, because that may change.
    async fn ask_budget(&self, pod: &Value, is_dry: bool) -> Answer<bool> {
        let served = self.registry.find("policy", "v1", "poddisruptionbudgets");
        let served = served.ok_or_else(Failure::no_such_path)?.clone();
        let view = self.store().view(&served.collection);
        let budgets: Vec<Value> = view
            .range(Some(&self.namespace), None)
            .filter_map(|object| serde_json::from_slice(&object.bytes).ok())
            .filter(|budget| budget::protects(budget, pod))
            .collect();
        let budget = match budgets.as_slice() {
            [] => return Ok(true),
            [budget] => read::name(budget).to_owned(),
            _ => {
                return Err(Failure::plain(
                    500,
                    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
                ));
            }
        };
        let mut call = self.api.internal(served, &self.namespace, &budget);
        call.subresource = Some(Subresource::Status);
        let mut options = self.query.write_options("CreateOptions")?;
        options.dry_run = is_dry;
        let resource = &call.served.resource;
        let mut is_counted = false;
        let counted = call.modify(&options, Tracking::Settled, |found| match budget::judge(found, pod) {
            Verdict::Unhealthy => {
                is_counted = false;
                Ok(found.clone())
            }
            Verdict::Counted => {
                is_counted = true;
                let mut counted = found.clone();
                budget::count_eviction(&mut counted, &self.name, &object::now());
                Ok(counted)
            }
            Verdict::Later(why, after) => Err(Failure::over_budget(&why, after)),
            Verdict::Broken(why) => {
                let why = format!("{} {budget:?} is forbidden: {why}", resource.qualified());
                Err(Failure::denied(
                    resource,
                    &budget,
                    &Denied { code: 403, reason: "Forbidden", message: why },
                ))
            }
        });
        match counted.await {
            // A budget that is gone by now forbids nothing.
            Err(failure) if failure.code == 404 => Ok(true),
            counted => counted.map(|_| is_counted),
        }
    }

    /// Says in the pod's status why it goes, if it still is the pod that the preconditions mean; gives its version then.
    async fn mark_evicted(&self, options: &Value) -> Answer<Option<String>> {
        let mut call = self.api.internal(self.served.clone(), &self.namespace, &self.name);
        call.subresource = Some(Subresource::Status);
        let write = self.query.write_options("CreateOptions")?;
        let meant = |field| read::text(options, &["preconditions", field]);
        let mut is_meant = false;
        let marked = call.modify(&write, Tracking::Settled, |pod| {
            let other = [("uid", meant("uid")), ("resourceVersion", meant("resourceVersion"))]
                .iter()
                .any(|(field, meant)| !meant.is_empty() && *meant != object::text(pod, field));
            let mut new = pod.clone();
            // The deletion that follows refuses another pod, in its own words.
            is_meant = !other;
            if is_meant {
                disrupt(&mut new);
            }
            Ok(new)
        });
        let marked = marked.await?.value()?;
        Ok(is_meant.then(|| object::text(&marked, "resourceVersion").to_owned()))
    }

    pub(crate) fn success(&self, code: u16) -> Response<Body> {
        let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code });
        content::respond(code, Accept { shape: Shape::Object, ..self.accept }, &status)
    }
}

/// Adds the condition of a pod that is evicted, unless it has one for another reason.
fn disrupt(pod: &mut Value) {
    let conditions = read::map(pod, &["status"]).entry("conditions").or_insert_with(|| json!([]));
    let Value::Array(conditions) = conditions else { return };
    let known = |have: &Value| read::text(have, &["type"]) == "DisruptionTarget";
    if conditions.iter().any(|have| known(have) && read::text(have, &["status"]) == "True") {
        return;
    }
    conditions.retain(|have| !known(have));
    conditions.push(json!({
        "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting", "lastProbeTime": null, "lastTransitionTime": object::now(),
    }));
}

fn assign(pod: &mut Value, node: &str, binding: &Value) {
    read::map(pod, &["spec"]).insert("nodeName".to_owned(), node.into());
    for (key, value) in read::entries(binding, &["metadata", "annotations"]) {
        read::map(pod, &["metadata", "annotations"]).insert(key.to_owned(), value.clone());
    }
    let condition = json!({
        "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": object::now(),
    });
    let status = read::map(pod, &["status"]);
    status.remove("nominatedNodeName");
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    if let Value::Array(conditions) = conditions {
        conditions.retain(|have| read::text(have, &["type"]) != "PodScheduled");
        conditions.push(condition);
    }
}
