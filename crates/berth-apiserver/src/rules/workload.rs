//! Deployment, ReplicaSet, StatefulSet and DaemonSet, as objects.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{
    annotation, at, default, default_pointer, has, is_empty, items, items_mut, keep, map, name, number, same,
    text,
};
use super::selector::{LabelSelector, label_selector_causes};
use super::table::{AGE, Column, NAME, integer, string, wide};
use super::{NameRule, Rules, age, claim, names, pod, table};
use crate::resource::Cause;

const CONTAINERS: Column = wide("Containers", "Names of each container in the template.");
const IMAGES: Column = wide("Images", "Images referenced by each container in the template.");
const SELECTOR: Column = wide("Selector", "Which pods are its own.");
/// Counts the changes of a daemon set's template.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
const MISMATCH: &str = "`selector` does not match template `labels`";
const STATEFUL_FIXED: &str = "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden";
const DEPLOYMENT_COLUMNS: &[Column] = &[
    NAME,
    string("Ready", "Number of the pod with ready state"),
    string("Up-to-date", "How many pods have the newest template."),
    string("Available", "How many pods have been ready for long enough."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];
const REPLICA_SET_COLUMNS: &[Column] = &[
    NAME,
    integer("Desired", "How many pods there should be."),
    integer("Current", "How many pods there are."),
    integer("Ready", "How many pods are ready."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];
const STATEFUL_SET_COLUMNS: &[Column] =
    &[NAME, string("Ready", "Number of the pod with ready state"), AGE, CONTAINERS, IMAGES];
const DAEMON_SET_COLUMNS: &[Column] = &[
    NAME,
    integer("Desired", "On how many nodes a pod should run."),
    integer("Current", "On how many nodes a pod runs."),
    integer("Ready", "On how many nodes a pod is ready."),
    integer("Up-to-date", "On how many nodes the pod has the newest template."),
    integer("Available", "On how many nodes the pod has been ready for long enough."),
    string("Node Selector", "Which nodes it is for."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];

/// The rules of workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    Deployment,
    ReplicaSet,
    StatefulSet,
    DaemonSet,
}

impl Rules for Workload {
    fn default(&self, object: &mut Value) {
        map(object, &["spec", "template", "spec"]);
        if let Some(spec) = object.pointer_mut("/spec/template/spec") {
            pod::default_spec(spec);
        }
        let spec = map(object, &["spec"]);
        if *self != Self::DaemonSet {
            default_pointer(spec, "replicas", 1);
        }
        if *self != Self::ReplicaSet {
            default_pointer(spec, "revisionHistoryLimit", 10);
        }
        match self {
            Self::Deployment => default_pointer(spec, "progressDeadlineSeconds", 600),
            Self::StatefulSet => default_stateful(object),
            Self::ReplicaSet | Self::DaemonSet => {}
        }
        self.default_strategy(object);
        self.default_status(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        super::read::drop(object, "status");
        self.default_status(object);
        if *self == Self::DaemonSet {
            map(object, &["metadata", "annotations"]).insert(TEMPLATE_GENERATION.to_owned(), json!("1"));
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        if *self == Self::DaemonSet {
            let given = annotation(old, TEMPLATE_GENERATION).parse::<i64>().unwrap_or_default();
            let template = ["spec", "template"];
            let changed = !same(at(new, &template), at(old, &template));
            let generation = (given + i64::from(changed)).to_string();
            map(new, &["metadata", "annotations"]).insert(TEMPLATE_GENERATION.to_owned(), json!(generation));
        }
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        super::keep_all_but_status(new, old);
        // Its annotations may change: the controller writes the revision with the status.
        if *self == Self::Deployment {
            let labels = at(old, &["metadata", "labels"]).clone();
            let metadata = map(new, &["metadata"]);
            match labels {
                Value::Null => metadata.remove("labels"),
                labels => metadata.insert("labels".to_owned(), labels),
            };
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let spec = at(object, &["spec"]);
        let mut causes = Vec::new();
        for field in ["replicas", "minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
            if let Some(value) = number(spec, &[field]).filter(|value| *value < 0) {
                causes.push(path.child(field).invalid(value, "must be greater than or equal to 0"));
            }
        }
        if let Some(deadline) = number(spec, &["progressDeadlineSeconds"])
            && deadline <= number(spec, &["minReadySeconds"]).unwrap_or_default()
        {
            let path = path.child("progressDeadlineSeconds");
            causes.push(path.invalid(deadline, "must be greater than minReadySeconds"));
        }
        if *self == Self::StatefulSet {
            causes.extend(stateful_causes(spec, &path));
        }
        causes.extend(self.strategy_causes(spec, &path));
        causes.extend(self.selector_causes(spec, &path));
        let selector = at(spec, &["selector"]);
        if label_selector_causes(selector, &path).is_empty() {
            causes.extend(self.template_causes(spec, &path.child("template")));
        } else if *self != Self::DaemonSet {
            let detail = if *self == Self::StatefulSet { "" } else { "invalid label selector" };
            causes.push(path.child("selector").invalid(selector.clone(), detail));
        }
        causes
    }

    fn name_rule(&self) -> NameRule {
        if *self == Self::StatefulSet { NameRule::Label } else { NameRule::Subdomain }
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let (new, old) = (at(new, &["spec"]), at(old, &["spec"]));
        if *self == Self::StatefulSet {
            // What never changes was checked when it was made.
            causes.retain(|cause| {
                !cause.field.starts_with("spec.serviceName")
                    && !cause.field.starts_with("spec.volumeClaimTemplates")
            });
            let mut fixed = new.clone();
            for field in [
                "replicas",
                "ordinals",
                "template",
                "updateStrategy",
                "revisionHistoryLimit",
                "persistentVolumeClaimRetentionPolicy",
                "minReadySeconds",
            ] {
                keep(&mut fixed, old, field);
            }
            if !same(&fixed, old) {
                causes.push(Path::new("spec").forbidden(STATEFUL_FIXED));
            }
        } else {
            let path = Path::new("spec").child("selector");
            causes.extend(immutable(at(new, &["selector"]), at(old, &["selector"]), &path));
        }
        causes
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        let annotations = ["metadata", "annotations"];
        let annotated =
            matches!(self, Self::Deployment) && !same(at(new, &annotations), at(old, &annotations));
        annotated || !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn columns(&self) -> &'static [Column] {
        match self {
            Self::Deployment => DEPLOYMENT_COLUMNS,
            Self::ReplicaSet => REPLICA_SET_COLUMNS,
            Self::StatefulSet => STATEFUL_SET_COLUMNS,
            Self::DaemonSet => DAEMON_SET_COLUMNS,
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = |field| number(object, &["status", field]).unwrap_or_default();
        let desired = number(object, &["spec", "replicas"]).unwrap_or_default();
        let ready = format!("{}/{desired}", status("readyReplicas"));
        let mut cells = vec![json!(name(object))];
        match self {
            Self::Deployment => cells.extend([
                json!(ready),
                json!(status("updatedReplicas")),
                json!(status("availableReplicas")),
            ]),
            Self::ReplicaSet => {
                cells.extend([json!(desired), json!(status("replicas")), json!(status("readyReplicas"))]);
            }
            Self::StatefulSet => cells.push(json!(ready)),
            Self::DaemonSet => {
                cells.extend(
                    [
                        "desiredNumberScheduled",
                        "currentNumberScheduled",
                        "numberReady",
                        "updatedNumberScheduled",
                        "numberAvailable",
                    ]
                    .map(|field| json!(status(field))),
                );
                cells.push(json!(table::labels(at(object, &["spec", "template", "spec", "nodeSelector"]))));
            }
        }
        cells.push(json!(age::of(object, now)));
        cells.extend(table::containers(at(object, &["spec", "template"])));
        if *self != Self::StatefulSet {
            let selector = at(object, &["spec", "selector"]);
            let shown = match table::selector(selector).as_str() {
                "<none>" if *self == Self::Deployment => String::new(),
                "<error>" if *self == Self::Deployment => "<invalid>".to_owned(),
                shown => shown.to_owned(),
            };
            cells.push(json!(shown));
        }
        cells
    }
}

impl Workload {
    /// The counters that are written even when they are zero.
    fn default_status(self, object: &mut Value) {
        let counters: &[&str] = match self {
            Self::Deployment => &[],
            Self::ReplicaSet => &["replicas"],
            Self::StatefulSet => &["replicas", "availableReplicas"],
            Self::DaemonSet => {
                &["currentNumberScheduled", "desiredNumberScheduled", "numberMisscheduled", "numberReady"]
            }
        };
        let status = map(object, &["status"]);
        for counter in counters {
            default_pointer(status, counter, 0);
        }
    }

    fn default_strategy(self, object: &mut Value) {
        let field = if self == Self::Deployment { "strategy" } else { "updateStrategy" };
        if self == Self::ReplicaSet {
            return;
        }
        let strategy = map(object, &["spec", field]);
        let unset = strategy.get("type").is_none_or(is_empty);
        default(strategy, "type", "RollingUpdate");
        let rolling = strategy.get("type") == Some(&json!("RollingUpdate"));
        if !rolling {
            return;
        }
        if self != Self::StatefulSet || unset {
            default_pointer(strategy, "rollingUpdate", json!({}));
        }
        let Some(Value::Object(update)) = strategy.get_mut("rollingUpdate") else { return };
        match self {
            Self::Deployment => {
                default_pointer(update, "maxUnavailable", "25%");
                default_pointer(update, "maxSurge", "25%");
            }
            Self::DaemonSet => {
                default_pointer(update, "maxUnavailable", 1);
                default_pointer(update, "maxSurge", 0);
            }
            Self::StatefulSet => default_pointer(update, "partition", 0),
            Self::ReplicaSet => {}
        }
    }

    fn strategy_causes(self, spec: &Value, path: &Path) -> Option<Cause> {
        let (field, other) = match self {
            Self::Deployment => ("strategy", "Recreate"),
            Self::StatefulSet | Self::DaemonSet => ("updateStrategy", "OnDelete"),
            Self::ReplicaSet => return None,
        };
        let strategy = at(spec, &[field]);
        let path = path.child(field);
        let kind = text(strategy, &["type"]);
        if kind == "RollingUpdate" {
            return None;
        }
        if kind == other {
            let update = at(strategy, &["rollingUpdate"]);
            return match self {
                _ if update.is_null() => None,
                Self::Deployment => {
                    let detail = "may not be specified when strategy `type` is 'Recreate'";
                    Some(path.child("rollingUpdate").forbidden(detail))
                }
                Self::StatefulSet => {
                    let detail = "only allowed for updateStrategy 'RollingUpdate'";
                    Some(path.child("rollingUpdate").invalid(update.clone(), detail))
                }
                Self::DaemonSet | Self::ReplicaSet => None,
            };
        }
        let shown =
            format!("{{\"Type\":{},\"RollingUpdate\":{}}}", json!(kind), at(strategy, &["rollingUpdate"]));
        Some(match self {
            Self::StatefulSet => path.invalid_shown(&shown, "must be 'RollingUpdate' or 'OnDelete'"),
            Self::DaemonSet => path.not_supported_shown(&shown, &["RollingUpdate", other]),
            Self::Deployment | Self::ReplicaSet => {
                path.not_supported_shown(&shown, &[other, "RollingUpdate"])
            }
        })
    }

    fn selector_causes(self, spec: &Value, path: &Path) -> Vec<Cause> {
        let selector = at(spec, &["selector"]);
        let path = path.child("selector");
        if selector.is_null() {
            return if self == Self::DaemonSet { Vec::new() } else { vec![path.required("")] };
        }
        let mut causes = label_selector_causes(selector, &path);
        if is_empty(at(selector, &["matchLabels"])) && is_empty(at(selector, &["matchExpressions"])) {
            // Upstream calls replica sets deployments here.
            let kind = match self {
                Self::Deployment | Self::ReplicaSet => "deployment",
                Self::StatefulSet => "statefulset",
                Self::DaemonSet => "daemonset",
            };
            causes.push(path.invalid(json!({}), format!("empty selector is invalid for {kind}")));
        }
        causes
    }

    fn template_causes(self, spec: &Value, path: &Path) -> Vec<Cause> {
        let mut causes = Vec::new();
        let mut template = at(spec, &["template"]).clone();
        let labels = at(&template, &["metadata", "labels"]);
        let selector = at(spec, &["selector"]);
        // No selector at all matches nothing.
        let matches = LabelSelector::from_value(selector).map(|s| !selector.is_null() && s.matches(labels));
        if matches == Ok(false) {
            let shown = if labels.is_null() { Value::Null } else { labels.clone() };
            causes.push(path.child("metadata").child("labels").invalid(shown, MISMATCH));
        }
        if self == Self::StatefulSet {
            add_claim_volumes(spec, &mut template);
        }
        causes.extend(pod::template_causes(&template, path));
        let within = path.child("spec");
        let policy = text(&template, &["spec", "restartPolicy"]);
        if policy != "Always" {
            causes.push(within.child("restartPolicy").not_supported(policy, &["Always"]));
        }
        if has(&template, &["spec", "activeDeadlineSeconds"]) {
            let kind = match self {
                Self::DaemonSet => "DaemonSet",
                Self::StatefulSet => "StatefulSet",
                Self::Deployment | Self::ReplicaSet => "ReplicaSet",
            };
            let detail = format!("activeDeadlineSeconds in {kind} is not Supported");
            causes.push(within.child("activeDeadlineSeconds").forbidden(detail));
        }
        causes
    }
}

fn default_stateful(object: &mut Value) {
    let spec = map(object, &["spec"]);
    default(spec, "podManagementPolicy", "OrderedReady");
    let retention = map(object, &["spec", "persistentVolumeClaimRetentionPolicy"]);
    default(retention, "whenDeleted", "Retain");
    default(retention, "whenScaled", "Retain");
    for template in items_mut(object, &["spec", "volumeClaimTemplates"]) {
        let fields = map(template, &[]);
        default(fields, "kind", "PersistentVolumeClaim");
        default(fields, "apiVersion", "v1");
        default(map(template, &["status"]), "phase", "Pending");
        map(template, &["spec"]);
        if let Some(spec) = template.get_mut("spec") {
            claim::default_spec(spec);
        }
    }
}

fn stateful_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let policy = text(spec, &["podManagementPolicy"]);
    if !matches!(policy, "OrderedReady" | "Parallel") {
        let detail = "must be 'OrderedReady' or 'Parallel'";
        causes.push(path.child("podManagementPolicy").invalid(policy, detail));
    }
    for field in ["whenDeleted", "whenScaled"] {
        let within = path.child("persistentVolumeClaimRetentionPolicy").child(field);
        let policy = text(spec, &["persistentVolumeClaimRetentionPolicy", field]);
        if !matches!(policy, "" | "Retain" | "Delete") {
            causes.push(within.not_supported(policy, &["Retain", "Delete"]));
        }
    }
    for (index, template) in items(spec, &["volumeClaimTemplates"]).iter().enumerate() {
        let within = path.child("volumeClaimTemplates").index(index);
        causes.extend(claim::spec_causes(at(template, &["spec"]), &within.child("spec")));
    }
    let service = text(spec, &["serviceName"]);
    if !service.is_empty() {
        causes.extend(path.child("serviceName").each_invalid(service, names::label(service)));
    }
    causes
}

/// Containers of a stateful set's pods may mount its claims by the names of their templates.
fn add_claim_volumes(spec: &Value, template: &mut Value) {
    let claims: Vec<&str> = items(spec, &["volumeClaimTemplates"]).iter().map(name).collect();
    if claims.is_empty() {
        return;
    }
    let volumes = map(template, &["spec"]).entry("volumes").or_insert(json!([]));
    if let Some(list) = volumes.as_array_mut() {
        list.retain(|volume| !claims.contains(&text(volume, &["name"])));
        list.extend(
            claims.iter().map(|claim| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(kind: Workload) -> Value {
        let mut object = json!({"metadata": {"name": "w"}, "spec": {"selector": {"matchLabels": {"app": "w"}},
            "template": {"metadata": {"labels": {"app": "w"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}}});
        if kind == Workload::StatefulSet {
            object["spec"]["serviceName"] = json!("w");
            object["spec"]["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}}]);
            object["spec"]["template"]["spec"]["containers"][0]["volumeMounts"] =
                json!([{"name": "data", "mountPath": "/data"}]);
        }
        kind.default(&mut object);
        object
    }

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    const ALL: [Workload; 4] =
        [Workload::Deployment, Workload::ReplicaSet, Workload::StatefulSet, Workload::DaemonSet];

    #[test]
    fn workloads_get_their_defaults() {
        let deployment = workload(Workload::Deployment);
        assert_eq!(
            deployment["spec"]["strategy"],
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}})
        );
        assert_eq!(deployment["spec"]["replicas"], 1);
        assert_eq!(deployment["spec"]["progressDeadlineSeconds"], 600);
        assert_eq!(deployment["spec"]["template"]["spec"]["dnsPolicy"], "ClusterFirst");
        assert!(deployment["spec"]["template"]["spec"].get("enableServiceLinks").is_none());
        let set = workload(Workload::StatefulSet);
        assert_eq!(
            set["spec"]["updateStrategy"],
            json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 0}})
        );
        assert_eq!(
            set["spec"]["persistentVolumeClaimRetentionPolicy"],
            json!({"whenDeleted": "Retain", "whenScaled": "Retain"})
        );
        assert_eq!(
            set["spec"]["volumeClaimTemplates"][0],
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "status": {"phase": "Pending"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "volumeMode": "Filesystem"}})
        );
        let daemons = workload(Workload::DaemonSet);
        assert_eq!(
            daemons["spec"]["updateStrategy"]["rollingUpdate"],
            json!({"maxSurge": 0, "maxUnavailable": 1})
        );
        assert!(daemons["spec"].get("replicas").is_none());
    }

    #[test]
    fn valid_workloads_are_accepted_and_invalid_ones_refused_with_the_cause() {
        for kind in ALL {
            let valid = workload(kind);
            assert_eq!(texts(kind.validate(&valid)), Vec::<String>::new(), "{kind:?}");
            let mut other = valid.clone();
            other["spec"]["template"]["metadata"]["labels"] = json!({"app": "x"});
            assert_eq!(
                texts(kind.validate(&other)),
                [
                    "spec.template.metadata.labels: Invalid value: {\"app\":\"x\"}: `selector` does not match template `labels`"
                ]
            );
            let mut never = valid.clone();
            never["spec"]["template"]["spec"]["restartPolicy"] = json!("Never");
            assert_eq!(
                texts(kind.validate(&never)),
                [
                    "spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\""
                ]
            );
        }
        let mut deployment = workload(Workload::Deployment);
        deployment["spec"]["replicas"] = json!(-1);
        assert_eq!(
            texts(Workload::Deployment.validate(&deployment)),
            ["spec.replicas: Invalid value: -1: must be greater than or equal to 0"]
        );
        let mut none = workload(Workload::Deployment);
        none["spec"].as_object_mut().unwrap().remove("selector");
        assert_eq!(
            texts(Workload::Deployment.validate(&none)),
            [
                "spec.selector: Required value",
                "spec.template.metadata.labels: Invalid value: {\"app\":\"w\"}: `selector` does not match template `labels`"
            ]
        );
    }

    #[test]
    fn selectors_and_claim_templates_never_change() {
        let old = workload(Workload::Deployment);
        let mut new = old.clone();
        new["spec"]["selector"]["matchLabels"] = json!({"app": "w", "x": "y"});
        new["spec"]["template"]["metadata"]["labels"] = json!({"app": "w", "x": "y"});
        assert!(texts(Workload::Deployment.validate_update(&new, &old))[0].ends_with("field is immutable"));
        let old = workload(Workload::StatefulSet);
        let mut new = old.clone();
        new["spec"]["replicas"] = json!(3);
        assert!(Workload::StatefulSet.validate_update(&new, &old).is_empty());
        assert!(Workload::StatefulSet.generation_changes(&new, &old));
        new["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = json!("2Gi");
        assert_eq!(
            texts(Workload::StatefulSet.validate_update(&new, &old)),
            [format!("spec: Forbidden: {STATEFUL_FIXED}")]
        );
    }

    #[test]
    fn the_status_of_a_deployment_is_written_with_annotations_and_without_labels() {
        let mut old = workload(Workload::Deployment);
        old["metadata"]["labels"] = json!({"app": "w"});
        let mut new = old.clone();
        new["metadata"]["labels"] = json!({"app": "other"});
        new["metadata"]["annotations"] = json!({"deployment.kubernetes.io/revision": "1"});
        new["spec"]["replicas"] = json!(7);
        new["status"]["replicas"] = json!(1);
        Workload::Deployment.prepare_status_update(&mut new, &old);
        assert_eq!(new["metadata"]["labels"], old["metadata"]["labels"]);
        assert_eq!(new["metadata"]["annotations"], json!({"deployment.kubernetes.io/revision": "1"}));
        assert_eq!((&new["spec"], &new["status"]["replicas"]), (&old["spec"], &json!(1)));
    }

    #[test]
    fn rows_look_as_kubectl_prints_them() {
        let now = Timestamp::UNIX_EPOCH;
        let cells = |kind: Workload, status: Value| {
            let mut object = workload(kind);
            object["status"] = status;
            let cells = kind.cells(&object, now);
            assert_eq!(cells.len(), kind.columns().len());
            cells
        };
        assert_eq!(
            cells(Workload::Deployment, json!({"readyReplicas": 1, "updatedReplicas": 1})),
            [
                json!("w"),
                json!("1/1"),
                json!(1),
                json!(0),
                json!("<unknown>"),
                json!("c"),
                json!("i:1"),
                json!("app=w")
            ]
        );
        assert_eq!(cells(Workload::StatefulSet, json!({}))[1], "0/1");
        assert_eq!(cells(Workload::ReplicaSet, json!({"replicas": 2}))[1..4], [json!(1), json!(2), json!(0)]);
        assert_eq!(
            cells(Workload::DaemonSet, json!({"numberReady": 2}))[3..7],
            [json!(2), json!(0), json!(0), json!("<none>")]
        );
    }
}
