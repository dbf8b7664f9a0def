//! Node, and the RBAC kinds, which are stored as given.

use std::collections::BTreeSet;

use berth_core::names::{NODE_ROLE, NODE_ROLE_PREFIX};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::quantity::canonicalise_list;
use super::read::{at, default_pointer, entries, flag, has, is_empty, items, keep, map, name, same, text};
use super::table::{AGE, Column, NAME, string, wide};
use super::{NameRule, Rules, age, metadata_fields, names, table};
use crate::resource::Cause;

const COLUMNS: &[Column] = &[
    NAME,
    string("Status", "The status of the node"),
    string("Roles", "The roles of the node"),
    AGE,
    string("Version", "The version of its kubelet."),
    wide("Internal-IP", "Its address inside the cluster."),
    wide("External-IP", "Its address outside the cluster."),
    wide("OS-Image", "Its operating system."),
    wide("Kernel-Version", "Its kernel."),
    wide("Container-Runtime", "What runs its containers."),
];
const BINDING_COLUMNS: &[Column] = &[
    NAME,
    string("Role", "The role that is granted."),
    AGE,
    wide("Users", "Users in the binding"),
    wide("Groups", "Groups in the binding"),
    wide("ServiceAccounts", "ServiceAccounts in the binding"),
];

/// The rules of nodes.
pub(super) struct Node;

impl Rules for Node {
    fn default(&self, object: &mut Value) {
        let spec = map(object, &["spec"]);
        let range = spec.get("podCIDR").filter(|range| !is_empty(range)).cloned();
        let first = spec.get("podCIDRs").and_then(|ranges| ranges.get(0)).cloned();
        match (range, first) {
            (Some(range), first) if first.as_ref() != Some(&range) => {
                spec.insert("podCIDRs".to_owned(), json!([range]));
            }
            (None, Some(first)) => {
                spec.insert("podCIDR".to_owned(), first);
            }
            _ => {}
        }
        default_pointer(map(object, &["status", "daemonEndpoints", "kubeletEndpoint"]), "Port", 0);
        let status = map(object, &["status"]);
        canonicalise_list(status, "capacity");
        canonicalise_list(status, "allocatable");
        let capacity = status.get("capacity").cloned().unwrap_or_default();
        if !capacity.is_null() && status.get("allocatable").is_none_or(Value::is_null) {
            status.insert("allocatable".to_owned(), capacity);
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        taint_causes(object)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        let addresses = items(new, &["status", "addresses"]);
        for (index, address) in addresses.iter().enumerate() {
            if addresses[..index].contains(address) {
                causes.push(Path::new("status").child("addresses").index(index).duplicate(address.clone()));
            }
        }
        let path = Path::new("spec");
        for (field, shown) in [("podCIDRs", "podCIDR"), ("providerID", "providerID")] {
            let (new, old) = (at(new, &["spec", field]), at(old, &["spec", field]));
            if !is_empty(old) && !same(new, old) {
                let detail = format!("node updates may not change {shown} except from \"\" to valid");
                causes.push(path.child(field).forbidden(detail));
            }
        }
        causes.extend(taint_causes(new));
        causes
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        self.validate_update(new, old)
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        let mut fields = metadata_fields(object);
        fields.push(("spec.unschedulable", flag(object, &["spec", "unschedulable"]).to_string()));
        fields
    }

    fn supports_field(&self, label: &str) -> bool {
        matches!(label, "metadata.name" | "spec.unschedulable")
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let ready = items(object, &["status", "conditions"]).iter().rfind(|c| text(c, &["type"]) == "Ready");
        let mut status = match ready.map(|condition| text(condition, &["status"])) {
            Some("True") => "Ready".to_owned(),
            Some(_) => "NotReady".to_owned(),
            None => "Unknown".to_owned(),
        };
        if flag(object, &["spec", "unschedulable"]) {
            status.push_str(",SchedulingDisabled");
        }
        let info = at(object, &["status", "nodeInfo"]);
        let mut kernel = table::or(text(info, &["kernelVersion"]), "<unknown>").to_owned();
        let architecture = text(info, &["architecture"]);
        if !architecture.is_empty() {
            kernel = format!("{kernel} ({architecture})");
        }
        let address = |kind| {
            let found = items(object, &["status", "addresses"]).iter().find(|a| text(a, &["type"]) == kind);
            found.map_or("<none>", |address| text(address, &["address"]))
        };
        vec![
            json!(name(object)),
            json!(status),
            json!(table::or(&roles(object), "<none>")),
            json!(age::of(object, now)),
            json!(text(info, &["kubeletVersion"])),
            json!(address("InternalIP")),
            json!(address("ExternalIP")),
            json!(table::or(text(info, &["osImage"]), "<unknown>")),
            json!(kernel),
            json!(table::or(text(info, &["containerRuntimeVersion"]), "<unknown>")),
        ]
    }
}

fn roles(object: &Value) -> String {
    let mut roles = BTreeSet::new();
    for (key, value) in entries(object, &["metadata", "labels"]) {
        match key.strip_prefix(NODE_ROLE_PREFIX) {
            Some(role) if !role.is_empty() => {
                roles.insert(role);
            }
            None if key == NODE_ROLE => {
                roles.extend(value.as_str().filter(|role| !role.is_empty()));
            }
            _ => {}
        }
    }
    roles.into_iter().collect::<Vec<_>>().join(",")
}

fn taint_causes(object: &Value) -> Vec<Cause> {
    const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    // Upstream puts taints below the metadata.
    let path = Path::new("metadata").child("taints");
    let mut seen = BTreeSet::new();
    let mut causes = Vec::new();
    for (index, taint) in items(object, &["spec", "taints"]).iter().enumerate() {
        let path = path.index(index);
        let (key, value, effect) = (text(taint, &["key"]), text(taint, &["value"]), text(taint, &["effect"]));
        causes.extend(path.child("key").each_invalid(key, names::qualified(key)));
        let complaints = names::label_value(value);
        if !complaints.is_empty() {
            causes.push(path.child("value").invalid(value, complaints.join(";")));
        }
        if effect.is_empty() {
            causes.push(path.child("effect").required(""));
        } else if !EFFECTS.contains(&effect) {
            causes.push(path.child("effect").not_supported(effect, &EFFECTS));
        }
        if !seen.insert((key, effect)) {
            let mut cause = path.duplicate(taint.clone());
            cause.message.push_str(": taints must be unique by key and effect pair");
            causes.push(cause);
        }
    }
    causes
}

/// The rules of roles, cluster roles and their bindings.
pub(super) struct Rbac {
    pub(super) binding: bool,
}

impl Rules for Rbac {
    fn default(&self, object: &mut Value) {
        const GROUP: &str = "rbac.authorization.k8s.io";
        if !self.binding {
            return;
        }
        super::read::default(map(object, &["roleRef"]), "apiGroup", GROUP);
        for subject in super::read::items_mut(object, &["subjects"]) {
            let group = if text(subject, &["kind"]) == "ServiceAccount" { "" } else { GROUP };
            if !group.is_empty() {
                super::read::default(map(subject, &[]), "apiGroup", group);
            }
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        items(object, &["rules"])
            .iter()
            .enumerate()
            .flat_map(|(index, rule)| rule_causes(rule, index))
            .collect()
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let causes = self.validate(new);
        if !causes.is_empty() {
            return causes;
        }
        let (new, old) = (at(new, &["roleRef"]), at(old, &["roleRef"]));
        if self.binding && has(old, &[]) && !same(new, old) {
            return vec![Path::new("roleRef").invalid(new.clone(), "cannot change roleRef")];
        }
        Vec::new()
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        if self.binding { BINDING_COLUMNS } else { table::PLAIN }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        if !self.binding {
            return super::Plain.cells(object, now);
        }
        let subjects = |kind: &str| {
            let of_kind = items(object, &["subjects"]).iter().filter(|s| text(s, &["kind"]) == kind);
            let shown = of_kind.map(|subject| match kind {
                "ServiceAccount" => format!("{}/{}", text(subject, &["namespace"]), text(subject, &["name"])),
                _ => text(subject, &["name"]).to_owned(),
            });
            json!(shown.collect::<Vec<_>>().join(", "))
        };
        let role = at(object, &["roleRef"]);
        vec![
            json!(name(object)),
            json!(format!("{}/{}", text(role, &["kind"]), text(role, &["name"]))),
            json!(age::of(object, now)),
            subjects("User"),
            subjects("Group"),
            subjects("ServiceAccount"),
        ]
    }
}

fn rule_causes(rule: &Value, index: usize) -> Vec<Cause> {
    let path = Path::new("rules").index(index);
    let lacks = |field: &str| items(rule, &[field]).is_empty();
    let mut causes = Vec::new();
    if lacks("verbs") {
        causes.push(path.child("verbs").required("verbs must contain at least one value"));
    }
    if !lacks("nonResourceURLs") {
        return causes;
    }
    if lacks("apiGroups") {
        causes.push(path.child("apiGroups").required("resource rules must supply at least one api group"));
    }
    if lacks("resources") {
        causes.push(path.child("resources").required("resource rules must supply at least one resource"));
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    #[test]
    fn a_node_can_use_all_it_has_unless_it_says_otherwise() {
        let mut node = json!({"status": {"capacity": {"memory": "1024Ki"}}});
        Node.default(&mut node);
        assert_eq!(node["status"]["allocatable"], json!({"memory": "1Mi"}));
    }

    #[test]
    fn invalid_nodes_are_refused_with_the_cause() {
        let node = |taints: Value| json!({"spec": {"taints": taints}});
        assert!(Node.validate(&node(json!([{"key": "a", "effect": "NoSchedule"}]))).is_empty());
        assert_eq!(
            texts(Node.validate(&node(json!([{"key": "a", "effect": "Never"}])))),
            [
                "metadata.taints[0].effect: Unsupported value: \"Never\": supported values: \"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\""
            ]
        );
        let taint = json!({"key": "a", "effect": "NoSchedule"});
        assert!(
            texts(Node.validate(&node(json!([taint, taint]))))[0]
                .ends_with("taints must be unique by key and effect pair")
        );
        let old = json!({"spec": {"providerID": "a"}});
        assert_eq!(
            texts(Node.validate_update(&json!({"spec": {"providerID": "b"}}), &old)),
            ["spec.providerID: Forbidden: node updates may not change providerID except from \"\" to valid"]
        );
    }

    #[test]
    fn rows_look_as_kubectl_prints_them() {
        let node = json!({"metadata": {"name": "n", "labels": {"node-role.kubernetes.io/control-plane": ""}},
            "spec": {"unschedulable": true},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
                "nodeInfo": {"kubeletVersion": "v1.36.3", "kernelVersion": "6.1", "architecture": "amd64", "osImage": "Debian"}}});
        assert_eq!(
            Node.cells(&node, Timestamp::UNIX_EPOCH),
            [
                "n",
                "Ready,SchedulingDisabled",
                "control-plane",
                "<unknown>",
                "v1.36.3",
                "10.0.0.1",
                "<none>",
                "Debian",
                "6.1 (amd64)",
                "<unknown>"
            ]
            .map(|c| json!(c))
        );
    }

    #[test]
    fn bindings_keep_their_role() {
        let rules = Rbac { binding: true };
        let mut old = json!({"metadata": {"name": "b"}, "roleRef": {"kind": "Role", "name": "r"}, "subjects": [{"kind": "User", "name": "u"}, {"kind": "ServiceAccount", "name": "s", "namespace": "n"}]});
        rules.default(&mut old);
        assert_eq!(old["subjects"][0]["apiGroup"], "rbac.authorization.k8s.io");
        assert!(old["subjects"][1].get("apiGroup").is_none());
        let mut new = old.clone();
        new["roleRef"]["name"] = json!("other");
        assert!(texts(rules.validate_update(&new, &old))[0].ends_with("cannot change roleRef"));
        assert_eq!(
            rules.cells(&old, Timestamp::UNIX_EPOCH),
            ["b", "Role/r", "<unknown>", "u", "", "n/s"].map(|c| json!(c))
        );
    }
}
