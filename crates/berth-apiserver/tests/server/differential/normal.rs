//! What differs from one time to the next, and what only one server has: the one list of it.
//!
//! - uids, times, resource versions, continue tokens, random ends of names, issued tokens, ages in tables;
//! - `metadata.managedFields`, except where a step asks for them (`> managed`), and then without times;
//! - `apiVersion` and `kind` of a list's items: Berth sends items as they lie in the store, which is more than is asked;
//! - the order of the causes of a conflict;
//! - an empty `continue` token, which says what none says;
//! - dumps of Go's internal structures in messages, be it as a value or as the difference of two;
//! - in discovery: resources, subresources and groups that Berth does not serve;
//! - storage version hashes, which tell clients of the real server how objects lie in etcd.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Value};

use crate::differential::answer::Answer;
use crate::differential::corpus::Step;

/// Resources of the built-in groups that Berth serves.
const RESOURCES: &[&str] = &[
    "bindings",
    "configmaps",
    "events",
    "limitranges",
    "namespaces",
    "nodes",
    "persistentvolumeclaims",
    "persistentvolumes",
    "pods",
    "resourcequotas",
    "secrets",
    "serviceaccounts",
    "services",
    "controllerrevisions",
    "daemonsets",
    "deployments",
    "replicasets",
    "statefulsets",
    "selfsubjectreviews",
    "tokenreviews",
    "localsubjectaccessreviews",
    "selfsubjectaccessreviews",
    "selfsubjectrulesreviews",
    "subjectaccessreviews",
    "clusterrolebindings",
    "clusterroles",
    "rolebindings",
    "roles",
    "csidrivers",
    "csinodes",
    "csistoragecapacities",
    "storageclasses",
    "volumeattachments",
    "volumeattributesclasses",
    "customresourcedefinitions",
    "leases",
];

/// Subresources that Berth does not serve, and one that it did not serve when the answers were recorded.
const ABSENT: &[&str] = &["ephemeralcontainers", "resize", "proxy"];

const GROUPS: &[&str] = &[
    "",
    "apps",
    "events.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "apiextensions.k8s.io",
    "coordination.k8s.io",
    "differential.example.com",
];

static PATTERNS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    [
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "(uid)"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "(time)"),
        (r"kube-api-access-[a-z0-9]{5}", "kube-api-access-(random)"),
        (r"(random-)[bcdfghjklmnpqrstvwxz2456789]{5}\b", "$1(random)"),
        (r"(?s)\n@@ .*?\n(, |\]|$)", "(difference)$1"),
        (r"(?s)(Invalid value: )\[?\{.*?\}\]?(: [A-Za-z])", "$1(structure)$2"),
        (r#"(?s)(Invalid value: )"\{.*\}"(: )"#, "$1(object)$2"),
        (r"X509SHA256=[0-9a-f]{64}", "X509SHA256=(hash)"),
        (r"(in record )\(\d+\)", "$1(version)"),
        (r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", "(jwt)"),
        (
            r"(resource version: |resourceVersion: |ResourceVersion in precondition: |in object meta: )\d+",
            "$1(version)",
        ),
    ]
    .map(|(pattern, to)| (Regex::new(pattern).expect("a pattern"), to))
    .into()
});
static AGE: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"^(\d+[smhdy])+$").expect("a pattern"));

/// Takes the list's noise out of an answer.
pub(crate) fn normalise(answer: &mut Answer, step: &Step) {
    for warning in &mut answer.warnings {
        *warning = text(warning);
    }
    if answer.body["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) {
        for item in answer
            .body
            .get_mut("items")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
            .filter_map(Value::as_object_mut)
        {
            item.remove("apiVersion");
            item.remove("kind");
        }
    }
    // Conflicts come out of a map that Go walks in any order.
    if answer.body["reason"] == "Conflict"
        && let Some(causes) = answer.body.pointer_mut("/details/causes").and_then(Value::as_array_mut)
    {
        causes.sort_by_key(Value::to_string);
    }
    discovery(&mut answer.body);
    ages(&mut answer.body);
    for event in answer.body.as_array_mut().into_iter().flatten() {
        ages(&mut event["object"]);
    }
    value(&mut answer.body, step);
}

fn text(text: &str) -> String {
    PATTERNS.iter().fold(text.to_owned(), |text, (pattern, to)| pattern.replace_all(&text, *to).into_owned())
}

fn value(value_: &mut Value, step: &Step) {
    match value_ {
        Value::String(string) => *string = text(string),
        Value::Array(items) => items.iter_mut().for_each(|item| value(item, step)),
        Value::Object(map) => {
            object(map, step);
            map.values_mut().for_each(|item| value(item, step));
        }
        _ => {}
    }
}

fn object(map: &mut Map<String, Value>, step: &Step) {
    for (key, to) in
        [("resourceVersion", "(version)"), ("continue", "(token)"), ("storageVersionHash", "(hash)")]
    {
        if map.get(key).and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
            map.insert(key.to_owned(), to.into());
        }
    }
    map.remove("storageVersionHash");
    if map.get("continue").is_some_and(|token| token == "") {
        map.remove("continue");
    }
    if !step.managed {
        map.remove("managedFields");
    }
}

/// The cells of a table that hold ages.
fn ages(body: &mut Value) {
    if body["kind"] != "Table" {
        return;
    }
    let Some(rows) = body.get_mut("rows").and_then(Value::as_array_mut) else { return };
    for cell in rows.iter_mut().filter_map(|row| row.get_mut("cells")?.as_array_mut()).flatten() {
        if cell.as_str().is_some_and(|text| AGE.is_match(text)) {
            *cell = "(age)".into();
        }
    }
    // What a column means is told at length; only its name, type and priority are facts that clients go by.
    let Some(columns) = body.get_mut("columnDefinitions").and_then(Value::as_array_mut) else { return };
    for column in columns.iter_mut().filter_map(Value::as_object_mut) {
        column.remove("description");
    }
}

fn discovery(body: &mut Value) {
    let resource = |item: &Value, key: &str| {
        let name = item[key].as_str().unwrap_or_default();
        let (name, sub) = name.split_once('/').unwrap_or((name, ""));
        RESOURCES.contains(&name) && !ABSENT.contains(&sub)
    };
    let kind = body["kind"].as_str().unwrap_or_default().to_owned();
    match kind.as_str() {
        "APIResourceList" if body["groupVersion"] != "differential.example.com/v1" => {
            retain(&mut body["resources"], |item| resource(item, "name"));
        }
        "APIGroupList" => {
            retain(&mut body["groups"], |group| GROUPS.contains(&group["name"].as_str().unwrap_or("?")));
        }
        "APIGroupDiscoveryList" => {
            let items = &mut body["items"];
            retain(items, |group| {
                GROUPS.contains(&group.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default())
            });
            for group in items.as_array_mut().into_iter().flatten() {
                if group.pointer("/metadata/name").is_some_and(|name| name == "differential.example.com") {
                    continue;
                }
                for version in group["versions"].as_array_mut().into_iter().flatten() {
                    retain(&mut version["resources"], |item| resource(item, "resource"));
                    for item in version["resources"].as_array_mut().into_iter().flatten() {
                        let subresources = item.get_mut("subresources");
                        if let Some(subresources) = subresources {
                            retain(subresources, |sub| {
                                !ABSENT.contains(&sub["subresource"].as_str().unwrap_or_default())
                            });
                        }
                    }
                }
            }
        }
        _ => {}
    }
}

fn retain(items: &mut Value, keep: impl Fn(&Value) -> bool) {
    if let Some(items) = items.as_array_mut() {
        items.retain(keep);
    }
}
