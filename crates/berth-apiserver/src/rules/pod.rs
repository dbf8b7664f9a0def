//! Pod: defaults, what may change, and how long deletion waits.

mod cells;
mod containers;
mod defaults;
pub(crate) mod ephemeral;
mod volumes;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::quantity::{self, Quantity};
use super::read::{at, flag, has, items, keep, map, name, number, same, text};
use super::table::Column;
use super::{Rules, metadata_fields, names, nodes, selector};
use crate::resource::Cause;

pub(super) use self::defaults::default_spec;

const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
const DNS_POLICIES: [&str; 4] = ["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];

/// The rules of pods.
pub(super) struct Pod;

impl Rules for Pod {
    fn default(&self, object: &mut Value) {
        map(object, &["spec"]);
        if let Some(spec) = object.get_mut("spec") {
            default_spec(spec);
            defaults::default_own(spec);
        }
        map(object, &["status"]);
    }

    fn prepare_create(&self, object: &mut Value) {
        let mut status = json!({"phase": "Pending", "qosClass": quality(at(object, &["spec"]))});
        if !items(object, &["spec", "schedulingGates"]).is_empty() {
            status["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates", "lastProbeTime": null,
                "lastTransitionTime": super::age::now()}]);
        }
        map(object, &[]).insert("status".to_owned(), status);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        let owners = at(old, &["metadata", "ownerReferences"]).clone();
        let metadata = map(new, &["metadata"]);
        if owners.is_null() {
            metadata.remove("ownerReferences");
        } else {
            metadata.insert("ownerReferences".to_owned(), owners);
        }
        let class = text(old, &["status", "qosClass"]).to_owned();
        if !class.is_empty() {
            super::read::default(map(new, &["status"]), "qosClass", class);
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = causes(object);
        if !items(object, &["spec", "ephemeralContainers"]).is_empty() {
            let path = Path::new("spec").child("ephemeralContainers");
            causes.push(path.forbidden("cannot be set on create"));
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = causes(new);
        causes.extend(update_causes(at(new, &["spec"]), at(old, &["spec"])));
        causes
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let path = Path::new("status");
        let field = ["status", "qosClass"];
        let mut causes: Vec<Cause> =
            immutable(at(new, &field), at(old, &field), &path.child("qosClass")).into_iter().collect();
        let nominated = text(new, &["status", "nominatedNodeName"]);
        if nominated != text(old, &["status", "nominatedNodeName"]) && !nominated.is_empty() {
            let path = path.child("nominatedNodeName");
            causes.extend(path.each_invalid(nominated, names::subdomain(nominated)));
            if !text(old, &["spec", "nodeName"]).is_empty() {
                causes.push(path.forbidden("may not be set on pods that are already bound to a node"));
            }
        }
        causes
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        let mut fields = metadata_fields(object);
        let status = |field| text(object, &["status", field]);
        let spec = |field| text(object, &["spec", field]);
        let addresses: Vec<&str> =
            items(object, &["status", "podIPs"]).iter().map(|a| text(a, &["ip"])).collect();
        fields.extend(
            [
                ("spec.nodeName", spec("nodeName")),
                ("spec.restartPolicy", spec("restartPolicy")),
                ("spec.schedulerName", spec("schedulerName")),
                ("spec.serviceAccountName", spec("serviceAccountName")),
                ("status.phase", status("phase")),
                ("status.podIP", addresses.first().copied().unwrap_or_else(|| status("podIP"))),
                ("status.nominatedNodeName", status("nominatedNodeName")),
            ]
            .map(|(field, value)| (field, value.to_owned())),
        );
        fields.push(("status.podIPs", addresses.join(",")));
        fields.push(("spec.hostNetwork", flag(object, &["spec", "hostNetwork"]).to_string()));
        fields
    }

    fn columns(&self) -> &'static [Column] {
        cells::COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        cells::cells(object, now)
    }

    fn grace_seconds(&self, object: &Value, asked: Option<i64>) -> i64 {
        let wanted =
            asked.or_else(|| number(object, &["spec", "terminationGracePeriodSeconds"])).unwrap_or_default();
        let over = matches!(text(object, &["status", "phase"]), "Failed" | "Succeeded");
        if over || text(object, &["spec", "nodeName"]).is_empty() {
            return 0;
        }
        if wanted < 0 { 1 } else { wanted }
    }
}

/// Checks a pod, be it a new one or not.
fn causes(pod: &Value) -> Vec<Cause> {
    let (spec, path) = (at(pod, &["spec"]), Path::new("spec"));
    let mut causes = spec_causes(spec, name(pod), &path);
    causes.extend(volumes::token_causes(spec, &path.child("volumes")));
    causes
}

/// Checks a pod's spec; the pod's name matters for the claims of its ephemeral volumes.
pub(super) fn spec_causes(spec: &Value, pod: &str, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    if !has(spec, &["terminationGracePeriodSeconds"]) {
        causes.push(path.child("terminationGracePeriodSeconds").required(""));
    }
    let (volumes, complaints) = volumes::causes(spec, pod, &path.child("volumes"));
    causes.extend(complaints);
    causes.extend(containers::causes(spec, &volumes, path));
    match text(spec, &["restartPolicy"]) {
        "Always" | "OnFailure" | "Never" => {}
        "" => causes.push(path.child("restartPolicy").required("")),
        other => {
            let known = ["Always", "OnFailure", "Never"];
            causes.push(path.child("restartPolicy").not_supported(other, &known));
        }
    }
    match text(spec, &["dnsPolicy"]) {
        "" => causes.push(path.child("dnsPolicy").required("")),
        policy if DNS_POLICIES.contains(&policy) => {}
        other => causes.push(path.child("dnsPolicy").not_supported(other, &DNS_POLICIES)),
    }
    causes.extend(selector::label_causes(at(spec, &["nodeSelector"]), &path.child("nodeSelector")));
    for (index, secret) in items(spec, &["imagePullSecrets"]).iter().enumerate() {
        if text(secret, &["name"]).is_empty() {
            let path = path.child("imagePullSecrets").index(index).child("name");
            causes.push(path.required("name is required"));
        }
    }
    let affinity = at(spec, &["affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"]);
    if !affinity.is_null() {
        let path = path.child("affinity").child("nodeAffinity");
        let path = path.child("requiredDuringSchedulingIgnoredDuringExecution");
        causes.extend(nodes::selector_causes(affinity, &path));
    }
    causes.extend(name_causes(spec, path));
    if let Some(seconds) = number(spec, &["activeDeadlineSeconds"])
        && !(1..=i64::from(i32::MAX)).contains(&seconds)
    {
        let detail = names::in_range(1, i64::from(i32::MAX));
        causes.push(path.child("activeDeadlineSeconds").invalid(seconds, detail));
    }
    causes.extend(toleration_causes(spec, &path.child("tolerations")));
    causes.extend(host_users_causes(spec, path));
    causes
}

/// Checks that a pod with users of its own shares no other namespace of the host, and has no device of it.
fn host_users_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let detail = "when `hostUsers` is false";
    if at(spec, &["hostUsers"]) != &Value::Bool(false) {
        return Vec::new();
    }
    let shared = ["hostNetwork", "hostPID", "hostIPC"].into_iter().filter(|field| flag(spec, &[*field]));
    let mut causes: Vec<Cause> = shared.map(|field| path.child(field).forbidden(detail)).collect();
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in items(spec, &[list]).iter().enumerate() {
            if !items(container, &["volumeDevices"]).is_empty() {
                causes.push(path.child(list).index(index).child("volumeDevices").forbidden(detail));
            }
        }
    }
    causes
}

fn name_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for field in ["serviceAccountName", "nodeName", "priorityClassName", "runtimeClassName"] {
        let value = text(spec, &[field]);
        if !value.is_empty() {
            causes.extend(path.child(field).each_invalid(value, names::subdomain(value)));
        }
    }
    for field in ["hostname", "subdomain"] {
        let value = text(spec, &[field]);
        if !value.is_empty() {
            causes.extend(path.child(field).each_invalid(value, names::label(value)));
        }
    }
    causes
}

fn toleration_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for (index, toleration) in items(spec, &["tolerations"]).iter().enumerate() {
        let path = path.index(index);
        let (key, operator) = (text(toleration, &["key"]), text(toleration, &["operator"]));
        if !key.is_empty() {
            causes.extend(path.child("key").each_invalid(key, names::qualified(key)));
        }
        if key.is_empty() && operator != "Exists" {
            let detail =
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
            causes.push(path.child("operator").invalid(operator, detail));
        }
        if has(toleration, &["tolerationSeconds"]) && text(toleration, &["effect"]) != "NoExecute" {
            let effect = text(toleration, &["effect"]);
            let detail = "effect must be 'NoExecute' when `tolerationSeconds` is set";
            causes.push(path.child("effect").invalid(effect, detail));
        }
        let value = text(toleration, &["value"]);
        match operator {
            "Exists" if !value.is_empty() => {
                let detail = "value must be empty when `operator` is 'Exists'";
                causes.push(path.child("operator").invalid(value, detail));
            }
            "" | "Equal" => {
                let complaints = names::label_value(value);
                if !complaints.is_empty() {
                    causes.push(path.child("operator").invalid(value, complaints.join(";")));
                }
            }
            "Exists" | "Lt" | "Gt" => {}
            other => causes.push(path.child("operator").not_supported(other, &["Equal", "Exists"])),
        }
    }
    causes
}

fn update_causes(new: &Value, old: &Value) -> Vec<Cause> {
    let path = Path::new("spec");
    let mut causes = Vec::new();
    for field in ["containers", "initContainers"] {
        if items(new, &[field]).len() != items(old, &[field]).len() {
            causes.push(path.child(field).forbidden("pod updates may not add or remove containers"));
            return causes;
        }
    }
    let deadline = ["activeDeadlineSeconds"];
    match (number(new, &deadline), number(old, &deadline)) {
        (Some(new), Some(old)) if new > old => {
            let detail = "must be less than or equal to previous value";
            causes.push(path.child("activeDeadlineSeconds").invalid(new, detail));
            return causes;
        }
        (None, Some(_)) => {
            let detail = "must not update from a positive integer to nil value";
            causes.push(path.child("activeDeadlineSeconds").invalid(Value::Null, detail));
        }
        _ => {}
    }
    let tolerations = items(new, &["tolerations"]);
    let kept = |old: &Value| {
        tolerations.iter().any(|new| {
            let mut new = new.clone();
            keep(&mut new, old, "tolerationSeconds");
            same(&new, old)
        })
    };
    if !items(old, &["tolerations"]).iter().all(kept) {
        let detail = "existing toleration can not be modified except its tolerationSeconds";
        causes.push(path.child("tolerations").forbidden(detail));
    }
    let gates = items(old, &["schedulingGates"]);
    for (index, gate) in
        items(new, &["schedulingGates"]).iter().enumerate().filter(|(_, g)| !gates.contains(g))
    {
        let name = text(gate, &["name"]);
        let detail = format!("only deletion is allowed, but found new scheduling gate '{name}'");
        causes.push(path.child("schedulingGates").index(index).child("name").forbidden(detail));
    }
    let fixed = without_updatable(new, old);
    if !same(&fixed, old) {
        let difference = super::field::difference(old, &fixed);
        let detail = format!("pod updates may not change fields other than {UPDATABLE}\n{difference}");
        causes.push(path.forbidden(detail));
    }
    causes
}

/// The new spec with what may change put back.
fn without_updatable(new: &Value, old: &Value) -> Value {
    let mut fixed = new.clone();
    for field in ["containers", "initContainers"] {
        for (container, old) in super::read::items_mut(&mut fixed, &[field]).zip(items(old, &[field])) {
            keep(container, old, "image");
        }
    }
    for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
        keep(&mut fixed, old, field);
    }
    let grace = ["terminationGracePeriodSeconds"];
    if number(old, &grace).is_some_and(|seconds| seconds < 0) && number(new, &grace) == Some(1) {
        keep(&mut fixed, old, grace[0]);
    }
    // A pod that waits behind gates may still be steered to nodes.
    if !items(old, &["schedulingGates"]).is_empty() {
        keep(&mut fixed, old, "nodeSelector");
        if has(new, &["affinity", "nodeAffinity"]) {
            keep(&mut fixed, old, "affinity");
        }
    }
    fixed
}

/// The quality of service a pod gets by what it asks for.
fn quality(spec: &Value) -> &'static str {
    const KINDS: [&str; 2] = ["cpu", "memory"];
    let containers = || items(spec, &["containers"]).iter().chain(items(spec, &["initContainers"]));
    let amount = |container: &Value, list: &str, kind: &str| {
        let quantity = at(container, &["resources", list, kind]);
        quantity::from_value(quantity).ok().filter(Quantity::is_positive)
    };
    let asks = containers().any(|c| {
        KINDS.iter().any(|k| amount(c, "requests", k).is_some() || amount(c, "limits", k).is_some())
    });
    if !asks {
        return "BestEffort";
    }
    let guaranteed = containers().all(|container| {
        KINDS.iter().all(|kind| {
            let limit = amount(container, "limits", kind);
            limit.is_some() && amount(container, "requests", kind) == limit
        })
    });
    if guaranteed { "Guaranteed" } else { "Burstable" }
}

/// The annotations and labels of a pod template are checked like an object's.
pub(super) fn template_causes(template: &Value, path: &Path) -> Vec<Cause> {
    // Upstream leaves the metadata out of these paths.
    let mut causes = selector::label_causes(at(template, &["metadata", "labels"]), &path.child("labels"));
    let annotations = at(template, &["metadata", "annotations"]);
    causes.extend(super::metadata::annotation_causes(annotations, &path.child("annotations")));
    causes.extend(spec_causes(at(template, &["spec"]), "", &path.child("spec")));
    if !items(template, &["spec", "ephemeralContainers"]).is_empty() {
        let path = path.child("spec").child("ephemeralContainers");
        causes.push(path.forbidden("ephemeral containers not allowed in pod template"));
    }
    causes
}

#[cfg(test)]
mod tests;
